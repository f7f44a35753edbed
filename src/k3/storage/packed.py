"""A packed trunk as the weight stream takes it, and the check that it still is its checkpoint's."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from k3.checkpoint.index import TensorEntry
from k3.checkpoint.layout import Layout
from k3.checkpoint.packed.format import PACKED12, PackedTensor, PackedTrunk, sampled_range
from k3.checkpoint.packed.identity import listed, trunk_matrices
from k3.checkpoint.specs import HEAD
from k3.errors import CheckpointError
from k3.storage.reader import ByteClass
from k3.storage.stream import StoredBlock, StoredMatrix

_SAMPLING_THREADS = 8


def open_trunk(directory: Path, model_dir: Path, layout: Layout, config: Path | None = None) -> PackedTrunk:
    """The packed trunk in `directory`, checked against the checkpoint: manifest, files, and a sample of each tensor.

    The samples find another set of weights under the same names, which no header shows: a release of the same shape,
    or a tensor changed after packing, as far as the middle 64 KB of each show it.

    Raises:
        CheckpointError: see `PackedTrunk.open`; or a sample differs.
    """
    trunk = PackedTrunk.open(directory, model_dir, layout, config)
    with ThreadPoolExecutor(_SAMPLING_THREADS, thread_name_prefix="k3-sample") as pool:
        found = pool.map(sample_crc32, trunk_matrices(layout))
        changed = [m.name for m, crc32 in zip(trunk.matrices, found, strict=True) if crc32 != m.source.sample]
    if changed:
        raise CheckpointError(
            f"{directory}: this packed trunk was made from other weights than those of {model_dir}: "
            f"{len(changed)} of {len(trunk.matrices)} tensors differ in a sample: {listed(changed)}. Use the "
            "checkpoint that it was made from, or pack this one: `k3 pack MODEL TRUNK`, to another directory."
        )
    return trunk


def stored_matrices(trunk: PackedTrunk) -> tuple[StoredMatrix, ...]:
    """The walk over a packed trunk: one block a panel. Only neighbours that are not encoded may be joined."""
    return tuple(
        StoredMatrix(
            matrix.name,
            ByteClass.HEAD if matrix.name.endswith(HEAD) else ByteClass.TRUNK,
            tuple(StoredBlock(p.start, p.rows, trunk.path, p.offset, p.nbytes) for p in matrix.panels),
            joinable=matrix.encoding != PACKED12 and _gapless(matrix),
        )
        for matrix in trunk.matrices
    )


def sample_crc32(entry: TensorEntry) -> int:
    """CRC-32 of a tensor's sample, read from its shard.

    Raises:
        CheckpointError: the shard can't be read.
    """
    start, length = sampled_range(entry.nbytes)
    try:
        descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            raw = os.pread(descriptor, length, entry.offset + start)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{entry.path} can't be read: {error}. Check the drive and the file.") from error
    return zlib.crc32(raw)


def _gapless(matrix: PackedTensor) -> bool:
    return all(panel.offset + panel.nbytes == following.offset for panel, following in pairwise(matrix.panels))
