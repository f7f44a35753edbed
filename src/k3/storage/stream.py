"""The weight stream: matrices in the order in which a step uses them, some kept, the rest read just ahead of use.

A walk is the list of a step's matrices. Each is cut into blocks of rows; some blocks are pinned in memory, the others
flow through a small ring, in order, step after step. Since the order is known, the drive reads the next blocks while
the arithmetic works on this one, and when a walk ends the next one's first blocks are already on their way.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3.errors import ReadError
from k3.storage.arena import Arena, aligned
from k3.storage.reader import ByteClass, RawBytes, Read, Reader, aligned_span, as_completed

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Rows `start` to `start + rows` of a matrix: `nbytes` bytes from byte `offset` of the file `path`."""

    start: int
    rows: int
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix in blocks that follow each other on disk and in rows.

    The bytes of neighbouring blocks are those of one larger block where `joinable`.
    """

    name: str
    kind: ByteClass
    blocks: tuple[StoredBlock, ...]
    joinable: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `start + rows` of a matrix, in memory: uint8 [bytes as stored]."""

    start: int
    rows: int
    data: RawBytes


def pinned_blocks(matrices: Sequence[StoredMatrix], budget: int) -> frozenset[StoredBlock]:
    """Blocks of at most `budget` bytes in all, spread evenly over the walk.

    With pins in proportion everywhere, the drive has something to read under all of the arithmetic.
    """
    blocks = [block for matrix in matrices for block in matrix.blocks]
    total = sum(block.nbytes for block in blocks)
    budget = min(budget, total)
    chosen, credit = [], 0
    for block in blocks:
        credit += block.nbytes * budget
        if credit >= block.nbytes * total:
            credit -= block.nbytes * total
            chosen.append(block)
    return frozenset(chosen)


def pinned_bytes(matrices: Sequence[StoredMatrix], pinned: frozenset[StoredBlock]) -> int:
    """Memory that these pins take, page alignment included."""
    return sum(aligned(aligned_span(run.offset, run.nbytes)) for m in matrices for run in _runs(m, pinned))


class WeightStream:
    """Hands out the matrices of a walk, in order. One thread uses it."""

    def __init__(
        self,
        reader: Reader,
        matrices: Sequence[StoredMatrix],
        pinned: frozenset[StoredBlock],
        ring_bytes: int,
        progress: Progress = lambda *_: None,
    ) -> None:
        """Load the pins; `ring_bytes` must hold the largest block that is not pinned, in whole pages.

        Raises:
            ReadError: a pinned block could not be read.
        """
        self._reader = reader
        self._matrices = {matrix.name: matrix for matrix in matrices}
        self._pins = _load_pins(reader, matrices, pinned, progress)
        order = [(block, m.kind) for m in matrices for block in m.blocks if block not in pinned]
        self._order = order
        self._before_head = sum(kind is not ByteClass.HEAD for _, kind in order)
        self._stop = len(order)
        self._next = 0
        self._queue: deque[tuple[StoredBlock, Read]] = deque()
        self._ring = _Ring(ring_bytes if order else 0)
        self._in_use = False
        self.wait_seconds = 0.0
        """Seconds in which walks had to wait for bytes."""

    def begin(self, *, head: bool) -> None:
        """Begin a walk; without `head` it ends before the head's blocks."""
        self._release()
        self._stop = len(self._order) if head else self._before_head
        first = self._order[0][0] if self._order else None
        self._discard_until(first)
        if not self._queue:
            self._next = 0
        self._fill()

    def pieces(self, name: str) -> Iterator[Piece]:
        """The matrix in pieces, ascending; a piece is valid until the next one, of any matrix, is asked for.

        Raises:
            ReadError: a block could not be read.
        """
        matrix = self._matrices[name]
        pins = self._pins.get(name, {})
        row = 0
        for block in matrix.blocks:
            if block.start < row:
                continue  # Part of a run that was handed out.
            piece = pins.get(block.start) or Piece(block.start, block.rows, self._take(block))
            row = piece.start + piece.rows
            yield piece

    def _take(self, block: StoredBlock) -> RawBytes:
        """The bytes of the next block; what the walk has left out is discarded."""
        self._release()
        self._discard_until(block)
        if not self._queue:
            self._next = next(i for i, (other, _) in enumerate(self._order) if other is block)
            self._fill()
        read = self._queue[0][1]
        data = self._wait(read)
        self._reader.count(read)
        self._in_use = True
        return data

    def _wait(self, read: Read) -> RawBytes:
        began = time.perf_counter()
        try:
            return read.wait()
        finally:
            self.wait_seconds += time.perf_counter() - began

    def _release(self) -> None:
        if self._in_use:
            self._in_use = False
            self._pop()
            self._fill()

    def _discard_until(self, block: StoredBlock | None) -> None:
        while self._queue and self._queue[0][0] is not block:
            self._pop()

    def _pop(self) -> None:
        """Free the oldest block's place in the ring, once nothing writes to it any more."""
        _, read = self._queue.popleft()
        with contextlib.suppress(ReadError):
            self._wait(read)  # Nobody wanted the bytes of a failed read; who does reads them again.
        self._ring.free_oldest()

    def _fill(self) -> None:
        """Ask for the next blocks as long as the ring has room, into the next walk if need be."""
        while len(self._queue) < self._stop:
            if self._next >= self._stop:
                self._next = 0
            block, kind = self._order[self._next]
            place = self._ring.allocate(aligned_span(block.offset, block.nbytes))
            if place is None:
                return
            read = self._reader.submit(block.path, block.offset, block.nbytes, place, kind, demand=False)
            self._queue.append((block, read))
            self._next += 1


class _Ring:
    """Memory handed out and freed in the same order."""

    def __init__(self, nbytes: int) -> None:
        self._memory = Arena(nbytes).take(nbytes) if nbytes else None
        self._spans: deque[tuple[int, int]] = deque()

    def allocate(self, nbytes: int) -> RawBytes | None:
        """The next `nbytes` bytes in one piece, or None while there is no room."""
        if self._memory is None:
            return None
        start = self._place(nbytes, self._memory.size)
        if start is None:
            return None
        self._spans.append((start, start + nbytes))
        return self._memory[start : start + nbytes]

    def free_oldest(self) -> None:
        self._spans.popleft()

    def _place(self, nbytes: int, size: int) -> int | None:
        if not self._spans:
            return 0 if nbytes <= size else None
        first, last = self._spans[0][0], self._spans[-1][1]
        if last > first:
            if last + nbytes <= size:
                return last
            return 0 if nbytes <= first else None
        return last if last + nbytes <= first else None


def _runs(matrix: StoredMatrix, pinned: frozenset[StoredBlock]) -> Iterator[StoredBlock]:
    """The pinned blocks of a matrix, neighbours joined where they may be."""
    run: StoredBlock | None = None
    for block in matrix.blocks:
        if block not in pinned:
            continue
        if run is not None and matrix.joinable and run.start + run.rows == block.start:
            run = StoredBlock(run.start, run.rows + block.rows, run.path, run.offset, run.nbytes + block.nbytes)
            continue
        if run is not None:
            yield run
        run = block
    if run is not None:
        yield run


def _load_pins(
    reader: Reader, matrices: Sequence[StoredMatrix], pinned: frozenset[StoredBlock], progress: Progress
) -> dict[str, dict[int, Piece]]:
    """Read all pins into one arena: pieces by matrix and first row."""
    runs = [(matrix, run) for matrix in matrices for run in _runs(matrix, pinned)]
    spans = [aligned_span(run.offset, run.nbytes) for _, run in runs]
    if not runs:
        return {}
    arena = Arena(sum(aligned(span) for span in spans))
    reads = [
        reader.submit(run.path, run.offset, run.nbytes, arena.take(span), matrix.kind, demand=False)
        for (matrix, run), span in zip(runs, spans, strict=True)
    ]
    done, total = 0, sum(read.nbytes for read in reads)
    for read in as_completed(reads):
        read.wait()
        reader.count(read)
        done += read.nbytes
        progress(done, total)
    pins: dict[str, dict[int, Piece]] = {}
    for (matrix, run), read in zip(runs, reads, strict=True):
        pins.setdefault(matrix.name, {})[run.start] = Piece(run.start, run.rows, read.data)
    return pins
