"""Attention residuals: a layer's input is a learned mix over earlier snapshots of the residual stream.

The stream is cut into blocks of `attn_res_block_size` layers. The running sum at each block's start is kept as a
snapshot (the embedding is snapshot 0); every sublayer reads a softmax mix of the snapshots and the running sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from k3.kernels import F32Array, Kernels


@dataclass(slots=True)
class ResidualStream:
    """The residual stream of a step: float32 [rows, hidden_size] each.

    `prefix` is the running sum since the last snapshot; it is None between a snapshot and the block's first output.
    """

    prefix: F32Array | None
    snapshots: list[F32Array] = field(default_factory=list)

    def snapshot(self) -> None:
        """Store the unmixed running sum and begin a new one."""
        assert self.prefix is not None
        self.snapshots.append(self.prefix)
        self.prefix = None

    def add(self, ops: Kernels, update: F32Array) -> None:
        """Add a sublayer's output to the running sum."""
        self.prefix = update if self.prefix is None else ops.add(self.prefix, update)

    def keep(self, rows: npt.NDArray[np.int64]) -> None:
        """Keep these rows only."""
        if self.prefix is not None:
            self.prefix = self.prefix[rows]
        self.snapshots = [snapshot[rows] for snapshot in self.snapshots]


@dataclass(frozen=True, slots=True)
class AttentionResidual:
    """One mix: the keys are normed, the values are raw; weights are float32 [hidden_size]."""

    norm_weight: F32Array
    proj_weight: F32Array
    eps: float

    def __call__(self, ops: Kernels, stream: ResidualStream) -> F32Array:
        """float32 [rows, hidden_size]; before the first snapshot there is nothing to mix."""
        sources = [*stream.snapshots] if stream.prefix is None else [*stream.snapshots, stream.prefix]
        if not stream.snapshots:
            return sources[0]
        return ops.residual_mix(sources, self.norm_weight, self.proj_weight, self.eps)
