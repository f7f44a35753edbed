"""The trunk's matrices as the stream reads them and as the kernels multiply them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from k3.checkpoint.index import TensorEntry
from k3.checkpoint.layout import Layout
from k3.checkpoint.packed.format import PACKED12, PackedTensor, PackedTrunk
from k3.checkpoint.packed.identity import trunk_matrices
from k3.checkpoint.specs import HEAD
from k3.kernels import Bf16Weight, F32Weight, Packed12Weight, Weight
from k3.storage.packed import stored_matrices
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
    """The walk over a checkpoint's own shards: matrices by name, in execution order."""
    return {entry.name: _plain(entry, block_bytes) for entry in trunk_matrices(layout)}


def packed_matrices(trunk: PackedTrunk) -> dict[str, TrunkMatrix]:
    """The walk over a packed trunk: matrices by name, in execution order."""
    stored = stored_matrices(trunk)
    return {m.name: TrunkMatrix(s, _packed(m)) for m, s in zip(trunk.matrices, stored, strict=True)}


def _plain(entry: TensorEntry, block_bytes: int) -> TrunkMatrix:
    rows, cols = entry.shape
    row = entry.nbytes // rows
    step = rows if entry.name.endswith(KV_B) else max(1, block_bytes // row)
    blocks = tuple(
        StoredBlock(start, count, entry.path, entry.offset + start * row, count * row)
        for start in range(0, rows, step)
        for count in (min(step, rows - start),)
    )

    kind = ByteClass.HEAD if entry.name.endswith(HEAD) else ByteClass.TRUNK
    return TrunkMatrix(StoredMatrix(entry.name, kind, blocks), _as_stored(entry.dtype, cols))


def _packed(matrix: PackedTensor) -> Callable[[Piece], Weight]:
    if matrix.encoding != PACKED12:
        return _as_stored(matrix.encoding, matrix.cols)
    table = np.frombuffer(bytes.fromhex(matrix.table), np.uint8)
    return lambda piece: Packed12Weight(piece.data, piece.rows, matrix.cols, table)


def _as_stored(dtype: str, cols: int) -> Callable[[Piece], Weight]:
    if dtype == "BF16":
        return lambda piece: Bf16Weight(piece.data.view("<u2").reshape(piece.rows, cols))
    return lambda piece: F32Weight(piece.data.view("<f4").reshape(piece.rows, cols))
