"""Encoding matrices panel by panel: reads ahead, encodes in threads, hands panels out in order."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from k3.checkpoint.index import TensorEntry
from k3.checkpoint.packed.format import PACKED12, PAGE, READ_WHOLE, can_pack
from k3.kernels.packed12 import encode_panel_into, high_byte_table, panel_limit
from k3.storage.arena import Arena, aligned
from k3.storage.packed import sample_crc32
from k3.storage.reader import ByteClass, RawBytes, Reader

PANEL_BYTES = 8 << 20
"""About what a panel takes in the checkpoint."""

_SAMPLE_BYTES = 4 << 20
_READING_THREADS = 4
_MOST_ENCODERS = 16
_AHEAD = 4
"""Panels on the way beyond one for each encoder. With at most 20 of about 15 MB each, memory stays below 500 MB."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a matrix is stored: `table` is uint8 [16] for the 12-bit encoding, else empty; `sample` is its source's."""

    entry: TensorEntry
    encoding: str
    table: npt.NDArray[np.uint8]
    sample: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows `start` to `start + rows` of a matrix as they are to be stored: uint8 [bytes]."""

    form: Form
    start: int
    rows: int
    data: RawBytes
    crc32: int
    source_crc32: int

    @property
    def last(self) -> bool:
        """Whether this is the matrix's last panel."""
        return self.start + self.rows == self.form.entry.shape[0]


@dataclass(frozen=True, slots=True)
class _Job:
    form: Form
    start: int
    rows: int

    @property
    def nbytes(self) -> int:
        return self.rows * _row_bytes(self.form.entry)

    @property
    def offset(self) -> int:
        return self.form.entry.offset + self.start * _row_bytes(self.form.entry)


def panel_rows(entry: TensorEntry) -> list[tuple[int, int]]:
    """First row and number of rows of each panel.

    A multiple of 16 rows each: where columns are one of 128, unencoded panels are whole pages and may be joined.
    """
    rows = entry.shape[0]
    if entry.name.endswith(READ_WHOLE):
        return [(0, rows)]
    count = max(1, round(entry.nbytes / PANEL_BYTES))
    step = -(-rows // (16 * count)) * 16
    return [(start, min(step, rows - start)) for start in range(0, rows, step)]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Memory for one panel on its way: as read, in whole pages, and as encoded."""

    source: RawBytes
    encoded: RawBytes


class PanelEncoder:
    """Encodes matrices with `threads` threads. Use it as a context manager.

    What an encoder hands out is the same for every number of threads.
    """

    def __init__(self, entries: Sequence[TensorEntry], *, raw: bool, threads: int) -> None:
        self._entries = entries
        self._raw = raw
        encoders = min(threads, _MOST_ENCODERS)
        self._depth = encoders + _AHEAD
        self._reader = Reader(threads=_READING_THREADS)
        self._pool = ThreadPoolExecutor(encoders, thread_name_prefix="k3-encode")
        self._slots = _slots(self._depth + 1, entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def panels(self) -> Iterator[Encoded]:
        """All panels in order; each is valid until the next one is asked for.

        Raises:
            ReadError: a matrix could not be read.
            CheckpointError: a sample of one could not.
        """
        window: deque[Future[Encoded]] = deque()
        for number, job in enumerate(self._jobs()):
            if len(window) == self._depth:
                yield window.popleft().result()
            window.append(self._begin(job, self._slots[number % len(self._slots)]))
        while window:
            yield window.popleft().result()

    def _jobs(self) -> Iterator[_Job]:
        """Panels to be encoded; a matrix's form is found while the one before it is under way."""
        forms: deque[Future[Form]] = deque()
        for number in range(len(self._entries)):
            for entry in self._entries[number + len(forms) : number + 2]:
                forms.append(self._pool.submit(self._form, entry))
            form = forms.popleft().result()
            for start, rows in panel_rows(form.entry):
                yield _Job(form, start, rows)

    def _form(self, entry: TensorEntry) -> Form:
        """How to store a matrix: packed where that makes a sample of its rows smaller."""
        sample = sample_crc32(entry)
        unpacked = Form(entry, entry.dtype, np.empty(0, np.uint8), sample)
        if self._raw or not can_pack(entry):
            return unpacked
        bits = self._sampled_rows(entry)
        table = high_byte_table(bits)
        room = np.empty(panel_limit(*bits.shape), np.uint8)
        is_smaller = encode_panel_into(bits, table, room) < bits.nbytes
        return Form(entry, PACKED12, table, sample) if is_smaller else unpacked

    def _sampled_rows(self, entry: TensorEntry) -> npt.NDArray[np.uint16]:
        """Rows at even distances, about 4 MB, or all of a small matrix: uint16 [rows, cols]."""
        rows, row_bytes = entry.shape[0], _row_bytes(entry)
        chosen = range(0, rows, -(-rows * row_bytes // _SAMPLE_BYTES))
        raw = np.empty((len(chosen), row_bytes), np.uint8)
        for row, out in zip(chosen, raw, strict=True):
            self._reader.read(entry.path, entry.offset + row * row_bytes, out, ByteClass.TRUNK)
        return raw.view("<u2")

    def _begin(self, job: _Job, slot: _Slot) -> Future[Encoded]:
        path = job.form.entry.path
        if data_bytes(path, job.offset, job.nbytes) == 0:
            return self._pool.submit(_encoded, job, _zeros(job.nbytes), slot)
        read = self._reader.submit(path, job.offset, job.nbytes, slot.source, ByteClass.TRUNK, demand=False)
        return self._pool.submit(lambda: _encoded(job, read.wait(), slot))


def data_bytes(path: Path, offset: int, nbytes: int) -> int:
    """How many bytes of this range are not in a hole; all of them where the file system doesn't tell."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found, position, end = 0, offset, offset + nbytes
        while position < end:
            try:
                begin = min(os.lseek(descriptor, position, os.SEEK_DATA), end)
            except OSError:
                return found  # There is only a hole up to the end of the file.
            position = min(os.lseek(descriptor, begin, os.SEEK_HOLE), end) if begin < end else end
            found += position - begin
        return found
    finally:
        os.close(descriptor)


def _row_bytes(entry: TensorEntry) -> int:
    return entry.nbytes // entry.shape[0]


def _slots(count: int, entries: Sequence[TensorEntry]) -> list[_Slot]:
    """Slots that hold any panel of these matrices; memory counts once it is written."""
    panels = [(rows, e) for e in entries for _, rows in panel_rows(e)]
    source = aligned(max((rows * _row_bytes(e) for rows, e in panels), default=0)) + PAGE
    encoded = max((panel_limit(rows, e.shape[1]) for rows, e in panels if can_pack(e)), default=PAGE)
    return [_Slot(Arena(source).take(source), Arena(encoded).take(encoded)) for _ in range(count)]


@lru_cache(maxsize=1)
def _zeros(nbytes: int) -> RawBytes:
    return np.zeros(nbytes, np.uint8)


def _encoded(job: _Job, raw: RawBytes, slot: _Slot) -> Encoded:
    crc32 = zlib.crc32(raw.data)
    if job.form.encoding != PACKED12:
        return Encoded(job.form, job.start, job.rows, raw, crc32, crc32)
    bits = np.require(raw.view("<u2"), requirements=["ALIGNED"]).reshape(job.rows, -1)
    data = slot.encoded[: encode_panel_into(bits, job.form.table, slot.encoded)]
    return Encoded(job.form, job.start, job.rows, data, zlib.crc32(data.data), crc32)
