"""Running totals of what the steps cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from k3.storage.reader import BytesRead


@dataclass(frozen=True, slots=True)
class Costs:
    """Totals since an engine was loaded.

    A request is one distinct expert of one layer of one step; padding is what alignment added to the bytes read.
    Waits are seconds in which the arithmetic had nothing to do: for the trunk, head and embedding rows, or for experts.
    `drive_bytes` is what large reads have brought, in whole pages and used or not, `drive_busy_seconds` the seconds in
    which one of them was under way.
    """

    bytes_read: BytesRead = field(default_factory=BytesRead)
    padding_bytes: int = 0
    expert_requests: int = 0
    expert_resident_hits: int = 0
    trunk_wait_seconds: float = 0.0
    expert_wait_seconds: float = 0.0
    drive_bytes: int = 0
    drive_busy_seconds: float = 0.0

    def __sub__(self, other: Costs) -> Costs:
        return Costs(
            self.bytes_read - other.bytes_read,
            self.padding_bytes - other.padding_bytes,
            self.expert_requests - other.expert_requests,
            self.expert_resident_hits - other.expert_resident_hits,
            self.trunk_wait_seconds - other.trunk_wait_seconds,
            self.expert_wait_seconds - other.expert_wait_seconds,
            self.drive_bytes - other.drive_bytes,
            self.drive_busy_seconds - other.drive_busy_seconds,
        )
