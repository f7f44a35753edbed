"""What a token will cost: bytes by class from the plan, seconds from the machine's speeds.

The bytes of trunk and head follow from the plan exactly. How many experts a token finds in memory is an estimate, by
the hits that docs/expert-cache.md measured on a recorded run of the released model. Seconds are a bound that a good
run comes close to: the drive and the arithmetic work at the same time, except that a layer's experts can be asked for
only when its router has run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Self

from k3.checkpoint.specs import expert_shapes, layer_specs
from k3.engine.forecast.speeds import Speeds
from k3.engine.plan import MemoryPlan, Needs
from k3.storage.reader import ByteClass, BytesRead

MEASURED_HITS = (
    (0.0, 0.0), (0.61, 0.024), (1.23, 0.046), (2.47, 0.085), (4.95, 0.150), (9.90, 0.240), (14.86, 0.302),
    (16.10, 0.316), (19.82, 0.340), (24.77, 0.363), (39.64, 0.396), (896.0, 1.0),
)  # fmt: skip
"""Slots a layer, and the share of requests found there: 16 experts a token of 896, docs/expert-cache.md."""
_MEASURED_TOP_K = 16
_SHARED = "shared_experts."
_BF16 = 2


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step of `rows` sequences, a token each; per-token figures are a `rows`-th of it.

    `needed` are the bytes of weights that it multiplies, `read` those of them that come from the drive. `seconds` is
    None where bytes must be read and the drive's speed isn't known; `bound` says what it is bound by.
    """

    rows: int
    needed: BytesRead
    read: BytesRead
    hit_rate: float
    hits_are_estimated: bool
    multiply_adds: float
    drive_seconds: float | None
    arithmetic_seconds: float
    seconds: float | None
    bound: str | None
    load_seconds: float | None

    @property
    def seconds_per_token(self) -> float | None:
        return None if self.seconds is None else self.seconds / self.rows


def predict(needs: Needs, plan: MemoryPlan, speeds: Speeds, rows: int = 1) -> Prediction:
    """Predict a step with one token of each of `rows` sequences, whose experts are taken as independent.

    The time of a class of weights is the larger of its bytes by the memory's speed and its multiply-adds by theirs.
    """
    hit_rate = _hit_rate(needs, plan)
    needed, kept = _needed(needs, rows), _kept(needs, plan)
    read = BytesRead(
        trunk=needed.trunk - kept[ByteClass.TRUNK],
        experts=round(needed.experts * (1 - hit_rate)),
        head=needed.head - kept[ByteClass.HEAD],
        embedding=needed.embedding,
    )
    work = _Work.of_row(needs)
    before_experts, arithmetic = _arithmetic(needs, needed, work, speeds, rows)
    seconds, bound = _overlap(read, speeds.drive, before_experts, arithmetic)
    loaded = sum(kept.values()) + (needs.experts * needs.expert_bytes if plan.expert_slots == needs.experts else 0)
    return Prediction(
        rows=rows,
        needed=needed,
        read=read,
        hit_rate=hit_rate,
        hits_are_estimated=0 < plan.expert_slots < needs.experts,
        multiply_adds=rows * (work.trunk + work.head + work.experts),
        drive_seconds=read.total / speeds.drive if speeds.drive else None,
        arithmetic_seconds=arithmetic,
        seconds=seconds,
        bound=bound,
        load_seconds=loaded / speeds.drive if speeds.drive else None,
    )


def expected_hits(slots: float, top_k: int, experts: int) -> float:
    """The share of a layer's requests that its slots hold: the measured curve, and no less than random choices give.

    The curve is scaled to models that choose another number of experts.
    """
    if slots >= experts:
        return 1.0
    scale = top_k / _MEASURED_TOP_K
    wanted = slots / scale
    measured = 0.0
    for (left, low), (right, high) in pairwise(MEASURED_HITS):
        if left <= wanted:
            measured = low + (high - low) * (min(wanted, right) - left) / (right - left)
    return min(1.0, max(measured, slots / experts))


def _hit_rate(needs: Needs, plan: MemoryPlan) -> float:
    layers = _moe_layers(needs)
    config = needs.config
    return (
        expected_hits(plan.expert_slots / layers, config.num_experts_per_token, config.num_experts) if layers else 0.0
    )


def _moe_layers(needs: Needs) -> int:
    return sum(needs.config.is_moe(index) for index in range(needs.layers))


def _needed(needs: Needs, rows: int) -> BytesRead:
    """Bytes that a step multiplies; each row chooses its experts at random, and each distinct one counts once."""
    config = needs.config
    stored = dict.fromkeys(ByteClass, 0)
    for matrix in needs.matrices:
        stored[matrix.kind] += sum(block.nbytes for block in matrix.blocks)
    distinct = config.num_experts * (1 - (1 - config.num_experts_per_token / config.num_experts) ** rows)
    return BytesRead(
        trunk=stored[ByteClass.TRUNK],
        experts=round(_moe_layers(needs) * distinct * needs.expert_bytes),
        head=stored[ByteClass.HEAD],
        embedding=rows * config.hidden_size * _BF16,
    )


def _kept(needs: Needs, plan: MemoryPlan) -> dict[ByteClass, int]:
    """Bytes of the walk that are kept between tokens, by class."""
    kept = dict.fromkeys(ByteClass, 0)
    for matrix in needs.matrices:
        kept[matrix.kind] += sum(block.nbytes for block in matrix.blocks if block in plan.pinned)
    return kept


@dataclass(frozen=True, slots=True)
class _Work:
    """Multiply-adds of a row with the weights of each class; `shared` experts are a part of `trunk`."""

    trunk: int
    shared: int
    experts: int
    head: int

    @classmethod
    def of_row(cls, needs: Needs) -> Self:
        config = needs.config
        matrices = [spec for n in range(needs.layers) for spec in layer_specs(config, n) if spec.role == "matrix"]
        packed = expert_shapes(config)[::2]  # Two codes to a byte.
        return cls(
            trunk=sum(prod(spec.shape) for spec in matrices),
            shared=sum(prod(spec.shape) for spec in matrices if _SHARED in spec.local),
            experts=_moe_layers(needs) * config.num_experts_per_token * sum(2 * prod(shape) for shape in packed),
            head=config.vocab_size * config.hidden_size,
        )


def _arithmetic(needs: Needs, needed: BytesRead, work: _Work, speeds: Speeds, rows: int) -> tuple[float, float]:
    """Seconds of arithmetic in a step: what can't be done while routed experts arrive, and all."""

    def busy(nbytes: float, multiply_adds: float) -> float:
        return max(nbytes / speeds.memory, rows * multiply_adds / speeds.multiply_adds)

    shared_bytes = needed.trunk * work.shared / work.trunk
    states = 2 * rows * needs.state_bytes / speeds.memory  # Read and written.
    dense = busy(needed.trunk, work.trunk) + busy(needed.head, work.head) + states
    return dense - busy(shared_bytes, work.shared), dense + busy(needed.experts, work.experts)


def _overlap(
    read: BytesRead, drive: float | None, before_experts: float, arithmetic: float
) -> tuple[float | None, str | None]:
    """Seconds of a step and what bounds them."""
    flowing = read.total - read.embedding
    if not flowing:
        return arithmetic, "arithmetic and memory"
    if not drive:
        return None, None
    bounds = {
        "the drive": read.total / drive,
        "experts read after the arithmetic that chooses them": read.experts / drive + before_experts,
        "arithmetic and memory": arithmetic,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    return bounds[bound], bound
