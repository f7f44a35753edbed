"""The model's weight sources, made of what storage hands out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3.checkpoint.index import TensorEntry
from k3.checkpoint.layout import Layout
from k3.checkpoint.specs import EMBEDDING
from k3.errors import ExpertReadError, ReadError
from k3.kernels import Bf16Weight, F32Array, F32Weight, Mxfp4Weight, Weight, widen_bf16
from k3.model.weights import Expert, LayerWeights, RowBlock, UnreadableExpert
from k3.storage.experts import ExpertStore
from k3.storage.reader import ByteClass, Reader
from k3.storage.tensors import RawArray, TensorStore


@dataclass(frozen=True, slots=True)
class _Matrices:
    """The matrices of one layer, or the head."""

    store: TensorStore
    entries: Mapping[str, TensorEntry]
    kind: ByteClass

    def blocks(self, name: str) -> Iterator[RowBlock]:
        for start, array in self.store.blocks(self.entries[name], self.kind):
            yield RowBlock(start, _matrix(array))

    def matrix(self, name: str) -> Weight:
        return _matrix(self.store.whole(self.entries[name], self.kind))


class Trunk:
    """Everything but the routed experts: a `WeightSource` over a tensor store.

    Small tensors are read once, when the model is built; embedding rows are read singly.
    """

    def __init__(self, layout: Layout, store: TensorStore, reader: Reader) -> None:
        self._layout = layout
        self._store = store
        self._reader = reader

    def vector(self, layer: int | None, name: str) -> F32Array:
        entry = self._entries(layer)[name]
        return _widened(self._read(entry, entry.offset, entry.nbytes, ByteClass.TRUNK), entry).reshape(entry.shape)

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerWeights]:
        yield _Matrices(self._store, self._entries(index), ByteClass.TRUNK)

    @contextmanager
    def head(self) -> Iterator[LayerWeights]:
        yield _Matrices(self._store, self._entries(None), ByteClass.HEAD)

    def embed(self, ids: npt.NDArray[np.int64]) -> F32Array:
        entry = self._layout.top[EMBEDDING]
        row_bytes = entry.nbytes // entry.shape[0]
        rows = [self._read(entry, entry.offset + int(i) * row_bytes, row_bytes, ByteClass.EMBEDDING) for i in ids]
        return np.stack([_widened(row, entry) for row in rows])

    def _entries(self, layer: int | None) -> Mapping[str, TensorEntry]:
        return self._layout.top if layer is None else self._layout.layers[layer].tensors

    def _read(self, entry: TensorEntry, offset: int, nbytes: int, kind: ByteClass) -> npt.NDArray[np.uint8]:
        raw = np.empty(nbytes, np.uint8)
        self._reader.read(entry.path, offset, raw, kind)
        return raw


class RoutedExperts:
    """The routed experts: an `ExpertSource` over an expert store, with its requests counted."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self.requests = 0
        self.resident_hits = 0

    def fetch(self, layer: int, ids: npt.NDArray[np.int32]) -> Iterator[Expert | UnreadableExpert]:
        for expert in np.unique(ids).tolist():
            self.requests += 1
            self.resident_hits += self._store.resident(layer, expert)
            yield self._get(layer, expert)

    def _get(self, layer: int, expert: int) -> Expert | UnreadableExpert:
        try:
            tensors = self._store.get(layer, expert)
        except ReadError as error:
            return UnreadableExpert(expert, ExpertReadError(f"layer {layer}, expert {expert}: {error}"))

        def matrix(name: str) -> Mxfp4Weight:
            return Mxfp4Weight(tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"])

        return Expert(expert, matrix("w1"), matrix("w3"), matrix("w2"))


def _widened(raw: npt.NDArray[np.uint8], entry: TensorEntry) -> F32Array:
    stored = raw.view("<u2" if entry.dtype == "BF16" else "<f4")
    return widen_bf16(stored) if entry.dtype == "BF16" else stored


def _matrix(array: RawArray) -> Weight:
    return Bf16Weight(array) if array.dtype == np.uint16 else F32Weight(array)
