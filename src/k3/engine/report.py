"""What a run cost and gave: a record a token, and the record of the whole."""

from __future__ import annotations

import hashlib
import resource
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from k3.kernels import F32Array
from k3.storage.reader import BytesRead


@dataclass(frozen=True, slots=True)
class StepReport:
    """The cost of generated token number `token` (from 1); the first one's covers the whole prompt."""

    token: int
    seconds: float
    bytes_read: BytesRead
    expert_requests: int
    expert_resident_hits: int
    padding_bytes: int = 0


@dataclass(slots=True)
class RunReport:
    """One generation. `seed` is None unless tokens were drawn; `finish_reason` is "stop" or "length"."""

    prompt_ids: list[int]
    generated_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    seed: int | None = None
    steps: list[StepReport] = field(default_factory=list)
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

    def as_dict(self) -> dict[str, Any]:
        """The fields of this record as `--out` writes them."""
        return {
            "prompt_ids": self.prompt_ids,
            "generated_ids": self.generated_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "steps": [asdict(step) for step in self.steps],
            "logits_sha256": self.logits_sha256,
        }


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
