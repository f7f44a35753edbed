"""What a run cost and gave: a record a token, and the record of the whole."""

from __future__ import annotations

import hashlib
import mmap
import re
import resource
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from k3.engine.costs import Costs
from k3.engine.machine import resident_bytes
from k3.engine.sizes import GB
from k3.kernels import F32Array
from k3.storage.reader import BytesRead


@dataclass(frozen=True, slots=True)
class Phases:
    """Where seconds went: waiting for bytes of the trunk, head and embedding, waiting for experts, and the rest."""

    waiting_for_trunk: float = 0.0
    waiting_for_experts: float = 0.0
    computing: float = 0.0


@dataclass(frozen=True, slots=True)
class Drive:
    """What large reads did: the bytes that they brought, in whole pages and read ahead for the next step included,
    and the seconds in which one of them was under way.
    """

    bytes: int = 0
    busy_seconds: float = 0.0

    @property
    def gb_per_second(self) -> float | None:
        """The rate while there was something to read; None where nothing was read."""
        return self.bytes / GB / self.busy_seconds if self.bytes and self.busy_seconds else None


@dataclass(frozen=True, slots=True)
class StepReport:
    """The cost of generated token number `token` (from 1); the first one's covers the whole prompt.

    `rss_bytes` is the memory that the process holds when the token is there.
    """

    token: int
    seconds: float
    bytes_read: BytesRead
    expert_requests: int
    expert_resident_hits: int
    padding_bytes: int = 0
    phases: Phases = field(default_factory=Phases)
    drive: Drive = field(default_factory=Drive)
    rss_bytes: int = 0

    @classmethod
    def of(cls, token: int, seconds: float, spent: Costs, rss_bytes: int) -> StepReport:
        waits = (spent.trunk_wait_seconds, spent.expert_wait_seconds)
        return cls(
            token,
            seconds,
            spent.bytes_read,
            spent.expert_requests,
            spent.expert_resident_hits,
            spent.padding_bytes,
            Phases(*waits, computing=seconds - sum(waits)),
            Drive(spent.drive_bytes, spent.drive_busy_seconds),
            rss_bytes,
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums over a run's steps."""

    seconds: float
    bytes_read: BytesRead
    padding_bytes: int
    expert_requests: int
    expert_resident_hits: int
    phases: Phases
    drive: Drive

    @classmethod
    def of(cls, steps: list[StepReport]) -> Totals:
        return cls(
            sum(step.seconds for step in steps),
            BytesRead(*(sum(getattr(step.bytes_read, f.name) for step in steps) for f in fields(BytesRead))),
            sum(step.padding_bytes for step in steps),
            sum(step.expert_requests for step in steps),
            sum(step.expert_resident_hits for step in steps),
            Phases(*(sum(getattr(step.phases, f.name) for step in steps) for f in fields(Phases))),
            Drive(sum(step.drive.bytes for step in steps), sum(step.drive.busy_seconds for step in steps)),
        )

    @property
    def resident_hit_rate(self) -> float | None:
        """The share of requests that found their expert in memory; None without requests."""
        return self.expert_resident_hits / self.expert_requests if self.expert_requests else None

    @property
    def drive_busy_share(self) -> float | None:
        """The share of the seconds in which a large read was under way; None without steps."""
        return self.drive.busy_seconds / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        """The sums and what follows from them, as `--out` writes them."""
        return {
            **asdict(self),
            "resident_hit_rate": self.resident_hit_rate,
            "drive_busy_share": self.drive_busy_share,
            "drive_gb_per_second": self.drive.gb_per_second,
        }


@dataclass(slots=True)
class RunReport:
    """One generation. `seed` is None unless tokens were drawn; `finish_reason` is "stop" or "length".

    `peak_rss_bytes` is the most memory that the process had held when the generation ended.
    """

    prompt_ids: list[int]
    generated_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    seed: int | None = None
    steps: list[StepReport] = field(default_factory=list)
    peak_rss_bytes: int | None = None
    _logits_hash: Any = field(default_factory=hashlib.sha256)

    def add_logits(self, logits: F32Array) -> None:
        """Hash the logits of one more generated position: float32 [vocab_size]."""
        self._logits_hash.update(logits.astype("<f4", copy=False).tobytes())

    @property
    def logits_sha256(self) -> str:
        """Over the float32 bytes of the logits of every generated position, in order."""
        return str(self._logits_hash.hexdigest())

    @property
    def seconds_per_token(self) -> float:
        """Mean over the decoded tokens; the first one, which pays for the prompt, counts only when alone."""
        steps = self.steps[1:] or self.steps
        return sum(step.seconds for step in steps) / max(1, len(steps))

    @property
    def totals(self) -> Totals:
        """The sums over all steps."""
        return Totals.of(self.steps)

    def as_dict(self) -> dict[str, Any]:
        """The fields of this record as `--out` writes them."""
        return {
            "prompt_ids": self.prompt_ids,
            "generated_ids": self.generated_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "steps": [asdict(step) for step in self.steps],
            "totals": self.totals.as_dict(),
            "peak_rss_bytes": self.peak_rss_bytes,
            "logits_sha256": self.logits_sha256,
        }


def rss_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """The resident set of this process now. It is asked for at every token, so this is the shortest way to it."""
    try:
        with statm.open("rb", buffering=0) as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return resident_bytes()


def peak_rss_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The largest resident set of this process so far.

    Where the system counts it for the program alone (`VmHWM`), that figure: the other one also remembers what the
    process was before it became this program.
    """
    try:
        found = re.search(rb"^VmHWM:\s*([0-9]+) kB$", status.read_bytes(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
