"""What the model asks for: a layer's matrices, the embedding, the experts.

The model never knows where weights lie. It asks in execution order and gets objects that multiply; whether they
are resident, read on demand or streamed is the business of whoever implements these protocols.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from k3.errors import ExpertReadError
from k3.kernels import F32Array, Kernels, Mxfp4Weight, Weight


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows of a matrix, the first of them being row `start`."""

    start: int
    weight: Weight


class LayerWeights(Protocol):
    """The matrices of one layer (or of the top level), by their name within it.

    Every matrix is asked for once a step, in the order of `k3.checkpoint.layout`.
    """

    def blocks(self, name: str) -> Iterator[RowBlock]:
        """The matrix in blocks of rows, ascending; a block is valid until the next one, of any matrix, is asked for."""
        ...

    def matrix(self, name: str) -> Weight:
        """The whole matrix at once, valid until the next one is asked for; for `kv_b_proj`, which is used by heads."""
        ...


class WeightSource(Protocol):
    """The trunk: everything but the routed experts."""

    def vector(self, layer: int | None, name: str) -> F32Array:
        """A small tensor widened to float32, in its stored shape; `layer` None means the top level."""
        ...

    def begin_step(self, *, head: bool) -> None:
        """Begin to walk over the layers; `head` tells whether the step will ask for the head."""
        ...

    def layer(self, index: int) -> LayerWeights:
        """The matrices of layer `index` (0-based). Layers are entered in ascending order within a step."""
        ...

    def head(self) -> LayerWeights:
        """The output head: `lm_head.weight`."""
        ...

    def embed(self, ids: npt.NDArray[np.int64]) -> F32Array:
        """Embedding rows: float32 [len(ids), hidden_size]."""
        ...


@dataclass(frozen=True, slots=True)
class Expert:
    """One routed expert, valid until the next one is asked for: gate `w1`, up `w3`, down `w2`."""

    id: int
    w1: Mxfp4Weight
    w3: Mxfp4Weight
    w2: Mxfp4Weight


@dataclass(frozen=True, slots=True)
class UnreadableExpert:
    """An expert whose bytes could not be had."""

    id: int
    error: ExpertReadError


class ExpertSource(Protocol):
    """The routed experts."""

    def fetch(self, layer: int, ids: npt.NDArray[np.int32]) -> Iterator[Expert | UnreadableExpert]:
        """Begin to fetch each distinct expert of `ids` once; they come in any order.

        `ids` is int32 [rows, top_k], a row's experts in router-rank order (a cache policy needs the rank).
        """
        ...


def linear(ops: Kernels, weights: LayerWeights, name: str, x: F32Array, out_features: int) -> F32Array:
    """`x @ W.T` for the matrix `name`: float32 [rows, in] to [rows, out_features]."""
    out = np.empty((x.shape[0], out_features), np.float32)
    for block in weights.blocks(name):
        ops.matmul(x, block.weight, out=out[:, block.start : block.start + block.weight.rows])
    return out
