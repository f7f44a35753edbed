"""The trunk's matrices as the stream reads them and as the kernels multiply them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from k3.checkpoint.index import TensorEntry
from k3.checkpoint.layout import Layout
from k3.checkpoint.specs import HEAD
from k3.kernels import Bf16Weight, F32Weight, Weight
from k3.storage.reader import ByteClass
from k3.storage.stream import Piece, StoredBlock, StoredMatrix

BLOCK_BYTES = 8 << 20
"""Rows are read in blocks of about this size: large enough for the drive, small enough for a ring of many."""

KV_B = "self_attn.kv_b_proj.weight"
"""Used by heads, rows of keys and of values in turn, so it comes as a whole."""


@dataclass(frozen=True, slots=True)
class TrunkMatrix:
    """A matrix on disk, and what makes a weight of a piece of it."""

    stored: StoredMatrix
    weight: Callable[[Piece], Weight]


def plain_matrices(layout: Layout, block_bytes: int = BLOCK_BYTES) -> dict[str, TrunkMatrix]:
    """The walk over a checkpoint's own shards, by `layer.local name` (the head by its name alone)."""
    return {key: _plain(entry, kind, block_bytes) for key, entry, kind in walk(layout)}


def walk(layout: Layout) -> Iterator[tuple[str, TensorEntry, ByteClass]]:
    """Key, place and class of every matrix of a step but the experts, in execution order."""
    for layer in layout.layers:
        for spec in layer.specs:
            if spec.role == "matrix":
                yield f"{layer.index}.{spec.local}", layer.tensors[spec.local], ByteClass.TRUNK
    yield HEAD, layout.top[HEAD], ByteClass.HEAD


def _plain(entry: TensorEntry, kind: ByteClass, block_bytes: int) -> TrunkMatrix:
    rows, cols = entry.shape
    row = entry.nbytes // rows
    step = rows if entry.name.endswith(KV_B) else max(1, block_bytes // row)
    blocks = tuple(
        StoredBlock(start, count, entry.path, entry.offset + start * row, count * row)
        for start in range(0, rows, step)
        for count in (min(step, rows - start),)
    )

    def weight(piece: Piece) -> Weight:
        if entry.dtype == "BF16":
            return Bf16Weight(piece.data.view("<u2").reshape(piece.rows, cols))
        return F32Weight(piece.data.view("<f4").reshape(piece.rows, cols))

    return TrunkMatrix(StoredMatrix(entry.name, kind, blocks), weight)
