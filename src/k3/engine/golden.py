"""Ids that the released checkpoint is known to give, and how a model's own compare with them.

Greedy decoding gives the published ids exactly when, at each of their positions and after the published ids before
it, the published id has the largest logit. So one pass over the prompt and the ids decides, where decoding would take
a pass for each id; the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from k3.checkpoint.config import ModelConfig
from k3.checkpoint.index import SYNTHETIC_MARK
from k3.checkpoint.released import KDA_HEAD_DIM, KDA_HEADS, MLA_LAYERS, SHAPE
from k3.errors import UsageError
from k3.kernels import F32Array

PROMPT: Final = (1008, 10484, 318, 15383, 387)
CONTINUATION: Final = (17374, 20829, 10, 427, 414, 1008, 606, 142957)
"""Published by another engine whose epsilon is slightly wrong, so a near tie may fall the other way there."""

NEAR_TIE: Final = 0.05
"""Logits closer than this are a near tie."""


@dataclass(frozen=True, slots=True)
class Position:
    """One published id, our best id in its place, and by how much our best logit exceeds the published id's."""

    published: int
    found: int
    margin: float

    @property
    def agrees(self) -> bool:
        return self.found == self.published

    @property
    def is_near_tie(self) -> bool:
        return not self.agrees and self.margin < NEAR_TIE


@dataclass(frozen=True, slots=True)
class Comparison:
    """All published ids of a continuation, each after the published ones before it."""

    positions: tuple[Position, ...]

    @property
    def agreeing(self) -> int:
        return sum(position.agrees for position in self.positions)

    @property
    def differences(self) -> list[tuple[int, Position]]:
        """The positions, from 1, that differ."""
        return [(number, p) for number, p in enumerate(self.positions, 1) if not p.agrees]

    @property
    def acceptable(self) -> bool:
        """Whether every difference is a near tie."""
        return all(position.is_near_tie for _, position in self.differences)


def compare(
    logits: Callable[[list[int]], F32Array], prompt: Sequence[int] = PROMPT, published: Sequence[int] = CONTINUATION
) -> Comparison:
    """Compare a model with published ids; `logits` is like `Model.logits`: ids → float32 [len(ids), vocab_size]."""
    rows = logits([*prompt, *published[:-1]])[len(prompt) - 1 :]
    best = rows.argmax(axis=1)  # Of equal logits the lower id, as in decoding.
    places = np.arange(len(published))
    margins = rows[places, best] - rows[places, list(published)]
    return Comparison(
        tuple(
            Position(expected, int(found), float(margin))
            for expected, found, margin in zip(published, best, margins, strict=True)
        )
    )


def require_released(config: ModelConfig, metadata: dict[str, Any], where: str) -> None:
    """Refuse a checkpoint for which no ids are published; `metadata` is its index's. UsageError."""
    found = {name: getattr(config, name) for name in SHAPE}
    linear = config.linear_attn_config
    other = next((name for name, value in found.items() if value != SHAPE[name]), None)
    if (linear.num_heads, linear.head_dim, linear.full_attn_layers) != (KDA_HEADS, KDA_HEAD_DIM, MLA_LAYERS):
        other = other or "linear_attn_config"
    reason = f"its {other} is another" if other else "its index says that it is synthetic"
    if other or metadata.get(SYNTHETIC_MARK) is True:
        raise UsageError(
            f"--golden: ids are published for the released checkpoint only, and {where} is not that: {reason}. Leave "
            "--golden out."
        )
