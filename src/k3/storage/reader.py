"""How bytes leave the drive: large direct reads by a few threads, two priorities, every byte counted by class.

Matrices and experts are read past the page cache (`O_DIRECT`) into page-aligned buffers: the enclosing range of whole
pages is read, and the payload is a view in it. Where a file system refuses that, the file is read through the cache,
and `direct` says so. Small tensors and embedding rows always go through the cache.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from k3.errors import ReadError

PAGE = 4096
"""Direct reads begin and end at multiples of this, in the file and in memory."""

DEFAULT_THREADS = 64
"""Most reads in flight. Eight fill a drive at sizes of megabytes; one that others use gives more to a deeper queue."""

_LARGEST_READ = 1 << 30
"""Linux transfers at most 2 GiB - 4 KiB a call; larger ranges are read in pieces of this size."""

RawBytes = npt.NDArray[np.uint8]


class ByteClass(Enum):
    """What bytes are read for."""

    TRUNK = "trunk"
    EXPERTS = "experts"
    HEAD = "head"
    EMBEDDING = "embedding"


@dataclass(slots=True)
class BytesRead:
    """Payload bytes by class."""

    trunk: int = 0
    experts: int = 0
    head: int = 0
    embedding: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __sub__(self, other: BytesRead) -> BytesRead:
        return BytesRead(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


def aligned_span(offset: int, nbytes: int) -> int:
    """Bytes of the range of whole pages that encloses `nbytes` bytes at `offset`."""
    return -(-(offset + nbytes) // PAGE) * PAGE - offset // PAGE * PAGE


class Read:
    """One read under way: `wait` gives its payload."""

    def __init__(self, path: Path, offset: int, nbytes: int, buffer: RawBytes, kind: ByteClass) -> None:
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.buffer = buffer
        self.kind = kind
        self._finished = threading.Event()
        self._error: ReadError | None = None
        self._listeners: list[SimpleQueue[Read]] = []
        self._lock = threading.Lock()

    @property
    def span(self) -> int:
        """Bytes that the read takes from the drive, whole pages."""
        return aligned_span(self.offset, self.nbytes)

    @property
    def data(self) -> RawBytes:
        """The payload: uint8 [nbytes], a view in the buffer."""
        head = self.offset % PAGE
        return self.buffer[head : head + self.nbytes]

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> RawBytes:
        """Wait for the payload.

        Raises:
            ReadError: the range could not be read twice.
        """
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return self.data

    def finish(self, error: ReadError | None) -> None:
        """Mark as done, and tell those who listen."""
        self._error = error
        with self._lock:
            self._finished.set()
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.put(self)

    def listen(self, queue: SimpleQueue[Read]) -> None:
        """Put this read into `queue` when it is done, or now if it is."""
        with self._lock:
            if not self._finished.is_set():
                self._listeners.append(queue)
                return
        queue.put(self)


def as_completed(reads: Iterable[Read]) -> Iterator[Read]:
    """The reads in the order in which they are done, failed ones included."""
    queue: SimpleQueue[Read] = SimpleQueue()
    pending = list(reads)
    for read in pending:
        read.listen(queue)
    for _ in pending:
        yield queue.get()


class Reader:
    """Reads ranges of files. Files are opened once; calls may come from several threads."""

    def __init__(self, *, direct: bool = True, threads: int = DEFAULT_THREADS) -> None:
        self._files = _Files(direct)
        self._counts = dict.fromkeys(ByteClass, 0)
        self._padding = 0
        self._delivered = 0
        self._waiting: list[tuple[bool, int, Read]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._closed = False
        self._in_flight = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._most_threads = threads
        self._threads: list[threading.Thread] = []

    @property
    def direct(self) -> bool:
        """Whether every byte of the submitted reads so far came past the page cache."""
        return self._files.direct

    def submit(self, path: Path, offset: int, nbytes: int, buffer: RawBytes, kind: ByteClass, *, demand: bool) -> Read:
        """Begin to read `nbytes` bytes of `path` from `offset`; demanded reads go before the others.

        `buffer` is page-aligned uint8 with at least `aligned_span(offset, nbytes)` bytes, which the read overwrites.
        The read is counted with `count` by whoever uses it.
        """
        read = Read(path, offset, nbytes, buffer, kind)
        if buffer.ctypes.data % PAGE or buffer.size < read.span:
            raise ValueError(f"a direct read of {read.span} bytes needs a page-aligned buffer of that size")
        with self._work:
            if self._closed:
                raise ReadError(f"{path}: the model is closed, so nothing more can be read. Load it again.")
            heapq.heappush(self._waiting, (not demand, next(self._numbers), read))
            if not self._in_flight:
                self._busy_since = time.perf_counter()
            self._in_flight += 1
            if len(self._threads) < min(self._in_flight, self._most_threads):
                self._threads.append(threading.Thread(target=self._serve, name="k3-read", daemon=True))
                self._threads[-1].start()
            self._work.notify()
        return read

    def count(self, read: Read) -> None:
        """Count a finished read's bytes, in the step that uses them."""
        self._count(read.kind, read.nbytes, read.span - read.nbytes)

    def read(self, path: Path, offset: int, out: RawBytes, kind: ByteClass) -> None:
        """Fill `out` (uint8, contiguous) through the page cache, at once; counted. For small pieces.

        Raises:
            ReadError: the range could not be read twice.
        """
        error = _try_twice(lambda: _fill(self._files.cached(path), offset, out), path, offset, out.size)
        if error is not None:
            raise error
        self._count(kind, out.size, 0)

    def bytes_read(self) -> BytesRead:
        """Bytes counted so far."""
        with self._lock:
            return BytesRead(*(self._counts[kind] for kind in ByteClass))

    def padding_bytes(self) -> int:
        """What alignment added to the bytes counted so far."""
        with self._lock:
            return self._padding

    def delivered_bytes(self) -> int:
        """What submitted reads have brought so far, counted or not, in whole pages."""
        with self._lock:
            return self._delivered

    def busy_seconds(self) -> float:
        """Seconds in which at least one submitted read was under way."""
        with self._lock:
            running = time.perf_counter() - self._busy_since if self._in_flight else 0.0
            return self._busy_seconds + running

    def close(self) -> None:
        """End the threads and close the files; reads that wait fail."""
        with self._work:
            self._closed = True
            waiting, self._waiting = self._waiting, []
            self._work.notify_all()
        for _, _, read in waiting:
            read.finish(ReadError(f"{read.path}: the model was closed while this read was waiting."))
        for thread in self._threads:
            thread.join()
        self._files.close()

    def _serve(self) -> None:
        while True:
            with self._work:
                while not self._waiting and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                _, _, read = heapq.heappop(self._waiting)
            error = self._perform(read)
            with self._lock:
                self._delivered += read.span if error is None else 0
                self._in_flight -= 1
                if not self._in_flight:
                    self._busy_seconds += time.perf_counter() - self._busy_since
            read.finish(error)

    def _count(self, kind: ByteClass, payload: int, padding: int) -> None:
        with self._lock:
            self._counts[kind] += payload
            self._padding += padding

    def _perform(self, read: Read) -> ReadError | None:
        first = read.offset // PAGE * PAGE
        out = read.buffer[: read.span]
        needed = read.offset + read.nbytes - first

        def attempt() -> None:
            done = self._fill_direct(read.path, first, out)
            if done < needed:
                self._files.direct = False
                _fill(self._files.cached(read.path), first + done, out[done:needed])

        return _try_twice(attempt, read.path, read.offset, read.nbytes)

    def _fill_direct(self, path: Path, offset: int, out: RawBytes) -> int:
        """Read past the page cache as far as that goes: to the end, or to the first read that stops short."""
        descriptor = self._files.direct_descriptor(path)
        done = 0
        while descriptor is not None and done < out.size:
            piece = out[done : done + _LARGEST_READ]
            try:
                count = os.preadv(descriptor, [piece.data], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._files.give_up_direct(path)
                return done
            done += count
            if count < piece.size:
                break
        return done


class _Files:
    """Open files: each through the page cache and, where that works, past it."""

    def __init__(self, direct: bool) -> None:
        self._cached: dict[Path, int] = {}
        self._direct: dict[Path, int | None] = {}
        self._retired: list[int] = []
        self._lock = threading.Lock()
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._try_direct = self.direct

    def cached(self, path: Path) -> int:
        """A descriptor that reads through the page cache."""
        with self._lock:
            if path not in self._cached:
                self._cached[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._cached[path]

    def direct_descriptor(self, path: Path) -> int | None:
        """A descriptor that reads past the page cache, or None where that is not wanted or not to be had."""
        if not self._try_direct:
            return None
        with self._lock:
            if path not in self._direct:
                self._direct[path] = self._open_direct(path)
            return self._direct[path]

    def give_up_direct(self, path: Path) -> None:
        """Read this file through the page cache from now on: its file system refuses direct reads."""
        with self._lock:
            descriptor = self._direct[path]
            if descriptor is not None:
                self._retired.append(descriptor)  # Another thread may still be using it.
            self._direct[path] = None

    def close(self) -> None:
        with self._lock:
            held = [*self._cached.values(), *self._direct.values(), *self._retired]
            self._cached, self._direct, self._retired = {}, {}, []
        for descriptor in held:
            if descriptor is not None:
                os.close(descriptor)

    def _open_direct(self, path: Path) -> int | None:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return None


def _fill(descriptor: int, offset: int, out: RawBytes) -> None:
    """Fill `out` with the bytes from `offset` on."""
    view = out.data
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + _LARGEST_READ]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends at offset {offset + done}")
        done += count


def _try_twice(attempt: Callable[[], None], path: Path, offset: int, nbytes: int) -> ReadError | None:
    """Run a read, once more if it fails; the error of the second failure."""
    try:
        attempt()
    except OSError:
        try:
            attempt()
        except OSError as error:
            return ReadError(
                f"{path}: reading {nbytes} bytes at offset {offset} failed twice: {error}. "
                "Check the drive, and that the file was not changed while it was in use."
            )
    return None
