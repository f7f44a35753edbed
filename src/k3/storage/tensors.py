"""Tensors in memory or read when they are asked for, behind one face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from k3.checkpoint.index import TensorEntry
from k3.storage.arena import Arena, aligned
from k3.storage.reader import ByteClass, Reader

RawArray = npt.NDArray[Any]
"""A tensor as stored: uint16 for BF16, float32 for F32, uint8 for U8."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_LOADING_THREADS = 4
_BLOCK_BYTES = 16 << 20
_NUMPY_TYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4"), "U8": np.dtype("u1")}


def as_stored(entry: TensorEntry, raw: npt.NDArray[np.uint8]) -> RawArray:
    """View the bytes of a tensor in its stored type and shape."""
    return raw.view(_NUMPY_TYPES[entry.dtype]).reshape(entry.shape)


class TensorStore(Protocol):
    """Where the matrices of the trunk and the head come from."""

    def blocks(self, entry: TensorEntry, kind: ByteClass) -> Iterator[tuple[int, RawArray]]:
        """Row blocks as (first row, array), ascending; a block is valid until the next is asked for."""
        ...

    def whole(self, entry: TensorEntry, kind: ByteClass) -> RawArray:
        """The whole tensor, valid until the next whole tensor is asked for."""
        ...


class ResidentTensors:
    """Tensors loaded once into one arena.

    Raises:
        ReadError: a tensor could not be read.
    """

    def __init__(self, reader: Reader, entries: Iterable[tuple[TensorEntry, ByteClass]], progress: Progress) -> None:
        wanted = list(entries)
        total = sum(entry.nbytes for entry, _ in wanted)
        arena = Arena(sum(aligned(entry.nbytes) for entry, _ in wanted))
        buffers = [arena.take(entry.nbytes) for entry, _ in wanted]

        def load(position: int) -> int:
            entry, kind = wanted[position]
            reader.read(entry.path, entry.offset, buffers[position], kind)
            return entry.nbytes

        done = 0
        with ThreadPoolExecutor(_LOADING_THREADS, thread_name_prefix="k3-load") as pool:
            for nbytes in pool.map(load, range(len(wanted))):
                done += nbytes
                progress(done, total)
        self._arrays = {entry.name: as_stored(entry, raw) for (entry, _), raw in zip(wanted, buffers, strict=True)}

    def blocks(self, entry: TensorEntry, kind: ByteClass) -> Iterator[tuple[int, RawArray]]:  # noqa: ARG002
        yield 0, self._arrays[entry.name]

    def whole(self, entry: TensorEntry, kind: ByteClass) -> RawArray:  # noqa: ARG002
        return self._arrays[entry.name]


class OnDemandTensors:
    """Tensors read each time they are asked for, into buffers that are reused."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._block = Arena(_BLOCK_BYTES)
        self._whole = Arena(_BLOCK_BYTES)

    def blocks(self, entry: TensorEntry, kind: ByteClass) -> Iterator[tuple[int, RawArray]]:
        rows, *rest = entry.shape
        row_bytes = entry.nbytes // rows
        step = max(1, _BLOCK_BYTES // row_bytes)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            self._block = _ready(self._block, count * row_bytes)
            raw = self._block.take(count * row_bytes)
            self._reader.read(entry.path, entry.offset + start * row_bytes, raw, kind)
            yield start, raw.view(_NUMPY_TYPES[entry.dtype]).reshape(count, *rest)

    def whole(self, entry: TensorEntry, kind: ByteClass) -> RawArray:
        self._whole = _ready(self._whole, entry.nbytes)
        raw = self._whole.take(entry.nbytes)
        self._reader.read(entry.path, entry.offset, raw, kind)
        return as_stored(entry, raw)


def _ready(arena: Arena, nbytes: int) -> Arena:
    """The arena emptied, or a larger one where it is too small."""
    if arena.nbytes < nbytes:
        return Arena(nbytes)
    arena.reset()
    return arena
