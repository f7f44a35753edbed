"""How fast the drive gives what the engine reads: random direct reads by the engine's own reader.

Each figure is a median of rounds. Within a round no region is read twice, and the rounds of a size go on where the
last one ended, so that caches of the drive or of the system don't help; holes, which no drive is asked for, are
refused. What the system says that it fetched from a drive is compared with what was read, since a file system may
accept `O_DIRECT` and cache all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from statistics import median

import numpy as np
import psutil

from k3.errors import UsageError
from k3.storage.arena import Arena
from k3.storage.reader import DEFAULT_THREADS, PAGE, ByteClass, RawBytes, Read, Reader

EXPERT_BYTES = 17_547_264
"""An expert of the released model: 4,284 pages."""
BLOCK_BYTES = 8 << 20
"""A block of the weight stream."""
SIZES = (EXPERT_BYTES, BLOCK_BYTES, 1 << 20, 128 << 10)
DEPTHS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 3
"""An odd number, so that a median is a round that was measured."""

_FEWEST = 2
"""Reads that each place of the queue must get for a figure."""

Progress = Callable[[int, int], None]
"""Called with rounds done and rounds in all, first with none when the files were found right."""


@dataclass(frozen=True, slots=True)
class Region:
    """Whole pages of a file: `nbytes` bytes from byte `offset`."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Cell:
    """Reads of `nbytes` bytes, `depth` at a time: median bytes/s, None where file or memory are too small for it."""

    depth: int
    nbytes: int
    rate: float | None


@dataclass(frozen=True, slots=True)
class DiskReport:
    """All cells; `direct`: no read went through the page cache as far as the reader knows.

    `from_drive` is the share of the bytes that the system fetched from a drive, None where it doesn't tell.
    """

    files: tuple[Path, ...]
    file_bytes: int
    cells: tuple[Cell, ...]
    bytes_read: int
    direct: bool
    from_drive: float | None

    @property
    def best(self) -> Cell | None:
        """The fastest cell."""
        return max((c for c in self.cells if c.rate is not None), key=lambda c: c.rate or 0.0, default=None)

    @property
    def rate(self) -> float | None:
        """Mean bytes/s of the cells that were measured."""
        rates = [cell.rate for cell in self.cells if cell.rate is not None]
        return sum(rates) / len(rates) if rates else None

    @property
    def honest(self) -> bool:
        """Whether the figures are the drive's."""
        return self.direct and (self.from_drive is None or self.from_drive > 0.95)


def largest_shards(directory: Path) -> tuple[Path, ...]:
    """The largest shard of a checkpoint directory on each drive that holds some.

    Raises:
        UsageError: there are no shards.
    """
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise UsageError(f"{directory}: expected a file, or a directory with *.safetensors files, found none of them.")
    return largest_on_each_drive(shards)


def largest_on_each_drive(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The largest of the files on each drive."""
    largest: dict[int, tuple[int, Path]] = {}
    for path in paths:
        status = path.stat()
        if status.st_size > largest.get(status.st_dev, (-1, path))[0]:
            largest[status.st_dev] = (status.st_size, path)
    return tuple(path for _, path in largest.values())


def has_holes(path: Path) -> bool:
    """Whether parts of a file are nowhere on the disk, as far as the file system tells."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE) < os.fstat(descriptor).st_size
    except OSError:
        return False
    finally:
        os.close(descriptor)


def measure_disk(
    files: Sequence[Path],
    *,
    sizes: Sequence[int] = SIZES,
    depths: Sequence[int] = DEPTHS,
    seconds: float = 1.0,
    rounds: int = ROUNDS,
    direct: bool = True,
    room: int = 2 << 30,
    progress: Progress = lambda *_: None,
) -> DiskReport:
    """Measure every size at every depth, about `seconds` each, in `rounds` rounds that take turns.

    Sizes are whole pages, in bytes. Buffers take `depth * size` bytes for the deepest cell that is measured; those
    that take more than `room` are left out.

    Raises:
        UsageError: a file has holes, isn't there, or it or the room is too small for any cell.
        ReadError: a region could not be read twice.
    """
    total = sum(_checked_size(path) for path in files)
    rng = np.random.default_rng()
    regions = {size: _shuffled(files, size, rng) for size in sizes}
    wanted = [(size, depth) for size in sizes for depth in depths]
    cells = [(s, d) for s, d in wanted if len(regions[s]) >= _FEWEST * d and s * d <= room]
    if not cells:
        raise UsageError(
            f"{', '.join(map(str, files))}: expected {_FEWEST * min(sizes) * min(depths)} bytes or more to read from, "
            f"found {total}, and memory for them, found {room}. Name a larger file: twice the memory's size is best."
        )
    progress(0, rounds * len(cells))
    memory = _touched(max(size * depth for size, depth in cells))
    before, read_bytes = _bytes_from_drive(), 0
    rates: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    places = dict.fromkeys(sizes, 0)
    with ExitStack() as stack:
        readers = {d: stack.enter_context(closing(Reader(direct=direct, threads=d))) for d in {d for _, d in cells}}
        for number in range(rounds * len(cells)):
            size, depth = cells[number % len(cells)]
            ring = regions[size]
            upcoming = (ring[i % len(ring)] for i in range(places[size], places[size] + len(ring)))
            count, rate = _round(readers[depth], upcoming, memory, depth, seconds / rounds)
            places[size] += count
            read_bytes += count * size
            rates[size, depth].append(rate)
            progress(number + 1, rounds * len(cells))
        went_direct = all(reader.direct for reader in readers.values())
    after = _bytes_from_drive()
    share = None if before is None or after is None else (after - before) / read_bytes
    found = [Cell(d, s, median(rates[s, d]) if (s, d) in rates else None) for s, d in wanted]
    return DiskReport(tuple(files), total, tuple(found), read_bytes, went_direct, share)


def measure_drive(
    files: Sequence[Path], expert_bytes: int = EXPERT_BYTES, seconds: float = 1.0, *, direct: bool = True
) -> DiskReport:
    """One short measurement as a run reads: experts' and blocks' sizes, as many reads at a time as the engine has.

    Raises:
        UsageError, ReadError: see `measure_disk`.
    """
    wanted = {-(-expert_bytes // PAGE) * PAGE, BLOCK_BYTES} - {0}
    each = seconds / len(wanted)
    return measure_disk(files, sizes=sorted(wanted), depths=(DEFAULT_THREADS,), seconds=each, direct=direct)


def takes_direct_reads(path: Path) -> bool:
    """Whether the file system accepts direct reads of this file; some cache them all the same.

    Raises:
        ReadError: it can't be read.
    """
    with closing(Reader(threads=1)) as reader:
        nbytes = min(PAGE, path.stat().st_size)
        reader.submit(path, 0, nbytes, Arena(PAGE).take(PAGE), ByteClass.TRUNK, demand=True).wait()
        return reader.direct


def _round(
    reader: Reader, regions: Iterator[Region], memory: RawBytes, depth: int, seconds: float
) -> tuple[int, float]:
    """Keep `depth` reads under way until the time is up; returns reads done and bytes/s."""
    began = time.perf_counter()
    done: SimpleQueue[Read] = SimpleQueue()

    def begin(region: Region, buffer: RawBytes) -> None:
        reader.submit(region.path, region.offset, region.nbytes, buffer, ByteClass.TRUNK, demand=False).listen(done)

    first = list(islice(regions, depth))
    size = first[0].nbytes
    for number, region in enumerate(first):
        begin(region, memory[number * size : (number + 1) * size])
    begun, count = len(first), 0
    while count < begun:
        read = done.get()
        read.wait()
        count += 1
        following = next(regions, None) if time.perf_counter() - began < seconds else None
        if following is not None:
            begin(following, read.buffer)
            begun += 1
    return count, count * size / (time.perf_counter() - began)


def _checked_size(path: Path) -> int:
    if not path.is_file():
        what = "a directory" if path.is_dir() else "nothing" if not path.exists() else "a device or a pipe"
        raise UsageError(f"{path}: expected a file, or a checkpoint directory, found {what}.")
    if has_holes(path):
        raise UsageError(
            f"{path}: this file has holes, which no drive is asked for: reading them would measure memory. Name a file "
            "whose every byte was written, such as a shard of a real checkpoint."
        )
    return path.stat().st_size


def _shuffled(files: Sequence[Path], size: int, rng: np.random.Generator) -> list[Region]:
    """Every region of this size, once, in random order."""
    regions = [Region(p, i * size, size) for p in files for i in range(p.stat().st_size // size)]
    return [regions[i] for i in rng.permutation(len(regions)).tolist()]


def _touched(nbytes: int) -> RawBytes:
    """Memory whose pages are there: the first touch of a page can be slower than a drive."""
    memory = Arena(nbytes).take(nbytes)
    memory[::PAGE] = 0
    return memory


def _bytes_from_drive() -> int | None:
    """What the system has fetched from drives for this process."""
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (psutil.Error, OSError, AttributeError, NotImplementedError):
        return None
