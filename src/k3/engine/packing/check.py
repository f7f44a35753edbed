"""Checking a packed trunk: every byte of it, and of what it was made from, against the checksums of its manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from zlib import crc32

from k3.checkpoint.index import TensorIndex
from k3.checkpoint.layout import Layout, bind, wanted_tensors
from k3.checkpoint.packed.format import PackedTrunk
from k3.checkpoint.packed.identity import listed, trunk_matrices
from k3.engine.loading import read_config
from k3.engine.packing.writer import PackOptions
from k3.errors import CheckpointError
from k3.kernels.select import choose_threads
from k3.storage.arena import Arena, aligned
from k3.storage.packed import open_trunk
from k3.storage.reader import PAGE, ByteClass, RawBytes, Reader

_MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes that must have a checksum; `what` names them in messages."""

    what: str
    path: Path
    offset: int
    nbytes: int
    crc32: int


def check_trunk(
    model_dir: Path, directory: Path, options: PackOptions, on_bytes: Callable[[int, int], None] = lambda *_: None
) -> PackedTrunk:
    """Read all panels of a packed trunk, and the matrices of the checkpoint that they were made from.

    `on_bytes` is told bytes read, and in all. Of the options those that say how to bind the checkpoint count.

    Raises:
        UsageError, ConfigError: the checkpoint can't be opened.
        CheckpointError: the trunk is not this checkpoint's, or any byte differs.
        ReadError: something could not be read.
    """
    config = read_config(model_dir, options.config)
    wanted = wanted_tensors(config, options.layers)
    layout = bind(TensorIndex.open(model_dir, wanted, extra_dirs=options.extra_dirs), config, options.layers)
    trunk = open_trunk(directory, model_dir, layout, options.config)
    ranges = list(_ranges(trunk, layout))
    total, done, wrong = sum(part.nbytes for part in ranges), 0, []
    threads = min(choose_threads(options.threads), _MOST_THREADS)
    with closing(Reader(threads=threads)) as reader, ThreadPoolExecutor(threads) as pool:
        room = aligned(max(part.nbytes for part in ranges)) + PAGE
        buffers: SimpleQueue[RawBytes] = SimpleQueue()
        for _ in range(threads):
            buffers.put(Arena(room).take(room))
        for part, is_sound in zip(ranges, pool.map(lambda part: _is_sound(part, reader, buffers), ranges), strict=True):
            done += part.nbytes
            wrong += [] if is_sound else [part.what]
            on_bytes(done, total)
    if wrong:
        raise CheckpointError(
            f"{directory}: {len(wrong)} of {len(ranges)} pieces differ from their checksums: {listed(wrong)}. Where it "
            "is the trunk that is damaged, remove it and pack again; where it is the checkpoint, verify that first."
        )
    return trunk


def _ranges(trunk: PackedTrunk, layout: Layout) -> Iterator[_Range]:
    for matrix, entry in zip(trunk.matrices, trunk_matrices(layout), strict=True):
        row_bytes = entry.nbytes // matrix.rows
        for panel in matrix.panels:
            rows = f"rows from {panel.start} on of {matrix.name}"
            yield _Range(f"{rows} in {trunk.path.name}", trunk.path, panel.offset, panel.nbytes, panel.crc32)
            start, nbytes = entry.offset + panel.start * row_bytes, panel.rows * row_bytes
            yield _Range(f"{rows} in {entry.path.name}", entry.path, start, nbytes, panel.source_crc32)


def _is_sound(part: _Range, reader: Reader, buffers: SimpleQueue[RawBytes]) -> bool:
    buffer = buffers.get()
    try:
        read = reader.submit(part.path, part.offset, part.nbytes, buffer, ByteClass.TRUNK, demand=True)
        return crc32(read.wait().data) == part.crc32
    finally:
        buffers.put(buffer)
