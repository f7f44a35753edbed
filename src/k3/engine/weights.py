"""The model's weight sources, made of what storage hands out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3.checkpoint.index import TensorEntry
from k3.checkpoint.layout import Layout
from k3.checkpoint.specs import EMBEDDING, LAYERS
from k3.engine.trunk import TrunkMatrix
from k3.errors import ExpertReadError
from k3.kernels import F32Array, Mxfp4Weight, Weight, widen_bf16
from k3.model.weights import Expert, LayerWeights, RowBlock, UnreadableExpert
from k3.storage.expert_cache import ExpertCache, LostExpert, StoredExpert
from k3.storage.reader import ByteClass, Reader
from k3.storage.stream import WeightStream


@dataclass(frozen=True, slots=True)
class _Matrices:
    """The matrices of one layer, or the head, as they come off the stream."""

    stream: WeightStream
    matrices: Mapping[str, TrunkMatrix]
    prefix: str

    def blocks(self, name: str) -> Iterator[RowBlock]:
        matrix = self.matrices[self.prefix + name]
        for piece in self.stream.pieces(self.prefix + name):
            yield RowBlock(piece.start, matrix.weight(piece))

    def matrix(self, name: str) -> Weight:
        [block] = self.blocks(name)
        return block.weight


class Trunk:
    """Everything but the routed experts: a `WeightSource` over the weight stream.

    Small tensors are read once, when the model is built; embedding rows are read singly.
    """

    def __init__(
        self, layout: Layout, matrices: Mapping[str, TrunkMatrix], stream: WeightStream, reader: Reader
    ) -> None:
        self._layout = layout
        self._matrices = matrices
        self._stream = stream
        self._reader = reader
        self._embedding_seconds = 0.0

    @property
    def wait_seconds(self) -> float:
        """Seconds so far in which steps had to wait for matrices and embedding rows."""
        return self._stream.wait_seconds + self._embedding_seconds

    def vector(self, layer: int | None, name: str) -> F32Array:
        entry = (self._layout.top if layer is None else self._layout.layers[layer].tensors)[name]
        return self._widened(entry, entry.offset, entry.nbytes, ByteClass.TRUNK).reshape(entry.shape)

    def begin_step(self, *, head: bool) -> None:
        self._stream.begin(head=head)

    def layer(self, index: int) -> LayerWeights:
        return _Matrices(self._stream, self._matrices, f"{self._layout.prefix}{LAYERS}{index}.")

    def head(self) -> LayerWeights:
        return _Matrices(self._stream, self._matrices, self._layout.prefix)

    def embed(self, ids: npt.NDArray[np.int64]) -> F32Array:
        entry = self._layout.top[EMBEDDING]
        row = entry.nbytes // entry.shape[0]
        began = time.perf_counter()
        rows = [self._widened(entry, entry.offset + int(i) * row, row, ByteClass.EMBEDDING) for i in ids]
        self._embedding_seconds += time.perf_counter() - began
        return np.stack(rows)

    def _widened(self, entry: TensorEntry, offset: int, nbytes: int, kind: ByteClass) -> F32Array:
        raw = np.empty(nbytes, np.uint8)
        self._reader.read(entry.path, offset, raw, kind)
        return widen_bf16(raw.view("<u2")) if entry.dtype == "BF16" else raw.view("<f4")


class RoutedExperts:
    """The routed experts: an `ExpertSource` over the expert cache."""

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache

    def fetch(self, layer: int, ids: npt.NDArray[np.int32]) -> Iterator[Expert | UnreadableExpert]:
        return (_ready(layer, expert) for expert in self._cache.begin(layer, ids))


def _ready(layer: int, expert: StoredExpert | LostExpert) -> Expert | UnreadableExpert:
    if isinstance(expert, LostExpert):
        return UnreadableExpert(expert.id, ExpertReadError(f"layer {layer}, expert {expert.id}: {expert.error}"))

    def matrix(name: str) -> Mxfp4Weight:
        return Mxfp4Weight(expert.tensors[f"{name}.weight_packed"], expert.tensors[f"{name}.weight_scale"])

    return Expert(expert.id, matrix("w1"), matrix("w3"), matrix("w2"))
