"""Running totals of what the steps cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from k3.storage.reader import BytesRead


@dataclass(frozen=True, slots=True)
class Costs:
    """Totals since an engine was loaded. A request is one distinct expert of one layer of one step;
    padding is what alignment added to the bytes read.
    """

    bytes_read: BytesRead = field(default_factory=BytesRead)
    padding_bytes: int = 0
    expert_requests: int = 0
    expert_resident_hits: int = 0

    def __sub__(self, other: Costs) -> Costs:
        return Costs(
            self.bytes_read - other.bytes_read,
            self.padding_bytes - other.padding_bytes,
            self.expert_requests - other.expert_requests,
            self.expert_resident_hits - other.expert_resident_hits,
        )
