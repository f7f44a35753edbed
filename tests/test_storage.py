"""Storage: complete reads or a plain refusal, bytes counted where they are read, buffers that are reused."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest

from k3.errors import ReadError
from k3.storage.arena import ALIGNMENT, Arena
from k3.storage.reader import PAGE, ByteClass, BytesRead, Reader, aligned_span, as_completed


@pytest.fixture
def reader():
    reader = Reader()
    yield reader
    reader.close()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, 10_000, np.uint8).tobytes())
    return path


@pytest.mark.parametrize("largest", [1, 7, 4096])
def test_short_reads_are_continued(reader, file, monkeypatch, largest):
    real = os.preadv

    def short(descriptor, buffers, offset):
        return real(descriptor, [buffers[0][:largest]], offset)

    monkeypatch.setattr(os, "preadv", short)
    out = np.zeros(5000, np.uint8)
    reader.read(file, 123, out, ByteClass.TRUNK)
    assert out.tobytes() == file.read_bytes()[123:5123]
    assert reader.bytes_read() == BytesRead(trunk=5000)


def test_no_single_read_is_larger_than_the_system_takes(reader, file, monkeypatch):
    monkeypatch.setattr("k3.storage.reader._LARGEST_READ", 1000)
    asked = []
    real = os.preadv

    def record(descriptor, buffers, offset):
        asked.append(len(buffers[0]))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", record)
    out = np.zeros(2500, np.uint8)
    reader.read(file, 0, out, ByteClass.TRUNK)
    assert asked == [1000, 1000, 500]
    assert out.tobytes() == file.read_bytes()[:2500]


def fail(monkeypatch, times):
    """Let the next `times` reads fail."""
    left = [times]
    real = os.preadv

    def broken(descriptor, buffers, offset):
        if left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)


def test_a_failed_read_is_tried_once_more(reader, file, monkeypatch):
    fail(monkeypatch, 1)
    out = np.zeros(100, np.uint8)
    reader.read(file, 0, out, ByteClass.EXPERTS)
    assert out.tobytes() == file.read_bytes()[:100]
    assert reader.bytes_read() == BytesRead(experts=100)


def test_a_read_that_fails_twice_is_an_error(reader, file, monkeypatch):
    fail(monkeypatch, 2)
    with pytest.raises(
        ReadError, match=r"bytes: reading 100 bytes at offset 50 failed twice: .*Input/output"
    ) as raised:
        reader.read(file, 50, np.zeros(100, np.uint8), ByteClass.EXPERTS)
    assert raised.value.exit_code == 1
    assert reader.bytes_read().total == 0


def test_a_file_that_became_shorter(reader, file):
    with pytest.raises(ReadError, match="the file ends at offset 10000"):
        reader.read(file, 9990, np.zeros(11, np.uint8), ByteClass.HEAD)


def test_counts_by_class(reader, file):
    for kind, size in zip(ByteClass, (1, 20, 300, 4000), strict=True):
        reader.read(file, 0, np.zeros(size, np.uint8), kind)
    assert reader.bytes_read() == BytesRead(trunk=1, experts=20, head=300, embedding=4000)
    assert reader.bytes_read().total == 4321
    assert reader.bytes_read() - BytesRead(trunk=1, head=100) == BytesRead(experts=20, head=200, embedding=4000)


def submit(reader, path, offset, nbytes, kind=ByteClass.TRUNK, demand=False):
    span = aligned_span(offset, nbytes)
    return reader.submit(path, offset, nbytes, Arena(span).take(span), kind, demand=demand)


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def direct_reader(request):
    reader = Reader(direct=request.param, threads=3)
    yield reader
    reader.close()


@pytest.mark.parametrize("offset", [0, 1, 8, 511, 512, 4095, 4096, 5000])
@pytest.mark.parametrize("nbytes", [1, 511, 4096, 4097, 8192])
def test_any_range_of_a_file(direct_reader, file, offset, nbytes):
    nbytes = min(nbytes, 10_000 - offset)
    read = submit(direct_reader, file, offset, nbytes)
    assert read.wait().tobytes() == file.read_bytes()[offset : offset + nbytes]
    assert read.span % PAGE == 0
    assert read.span - nbytes < 2 * PAGE


def test_a_submitted_read_is_counted_by_who_uses_it(direct_reader, file):
    read = submit(direct_reader, file, 100, 5000, ByteClass.EXPERTS)
    read.wait()
    assert direct_reader.bytes_read().total == 0
    direct_reader.count(read)
    assert direct_reader.bytes_read() == BytesRead(experts=5000)
    assert direct_reader.padding_bytes() == 2 * PAGE - 5000


@pytest.mark.parametrize("largest", [1, 700, 4096, 6000])
def test_short_direct_reads_are_completed(direct_reader, file, monkeypatch, largest):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:largest]], at))
    if direct_reader.direct and largest % 512:
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: min(real(fd, buffers, at), largest))
    assert submit(direct_reader, file, 3, 9000).wait().tobytes() == file.read_bytes()[3:9003]


def test_a_file_system_that_refuses_direct_reads(file, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    reader = Reader()
    assert reader.direct
    assert submit(reader, file, 7, 5000).wait().tobytes() == file.read_bytes()[7:5007]
    assert not reader.direct
    reader.close()


def test_a_file_system_that_refuses_at_the_first_read(file, monkeypatch):
    real, direct = os.preadv, []

    def refuse(descriptor, buffers, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    reader = Reader(threads=1)
    for start in (0, 4096, 9000):
        assert submit(reader, file, start, 900).wait().tobytes() == file.read_bytes()[start : start + 900]
    assert direct == [0], "the file is read through the cache from then on"
    assert not reader.direct
    reader.close()


def test_demanded_reads_go_first(file, monkeypatch):
    gate, done = threading.Event(), SimpleQueue()
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: (gate.wait(), real(*arguments))[1])
    reader = Reader(direct=False, threads=1)
    first = submit(reader, file, 0, 10)
    while reader._waiting:
        time.sleep(0.001)
    reads = [submit(reader, file, 100, 10), submit(reader, file, 200, 10)]
    reads += [submit(reader, file, 300, 10, demand=True), submit(reader, file, 400, 10, demand=True)]
    for read in (first, *reads):
        read.listen(done)
    gate.set()
    assert [done.get().offset for _ in range(5)] == [0, 300, 400, 100, 200]
    reader.close()


def test_as_completed_gives_failed_reads_too(reader, file, tmp_path):
    good, bad = submit(reader, file, 0, 10), submit(reader, tmp_path / "missing", 0, 10)
    assert set(as_completed([good, bad])) == {good, bad}
    with pytest.raises(ReadError, match=r"missing: reading 10 bytes at offset 0 failed twice: .*No such file"):
        bad.wait()


def test_a_buffer_that_is_not_on_a_page_is_refused(reader, file):
    with pytest.raises(ValueError, match="page-aligned"):
        reader.submit(file, 0, 10, Arena(2 * PAGE).take(2 * PAGE)[1:], ByteClass.TRUNK, demand=False)


def test_closing_ends_what_waits(file, monkeypatch):
    gate = threading.Event()
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: (gate.wait(), real(*arguments))[1])
    reader = Reader(threads=1)
    reads = [submit(reader, file, 0, 10) for _ in range(5)]
    threading.Timer(0.05, gate.set).start()
    reader.close()
    assert reads[-1].done()
    with pytest.raises(ReadError, match="closed"):
        reads[-1].wait()
    with pytest.raises(ReadError, match="closed"):
        submit(reader, file, 0, 10)


def test_arena():
    arena = Arena(3 * ALIGNMENT)
    first, second = arena.take(10), arena.take(700)
    assert all(piece.ctypes.data % ALIGNMENT == 0 for piece in (first, second))
    second[:] = 1
    assert not first.any()
    with pytest.raises(ValueError, match="don't fit"):
        arena.take(arena.nbytes)
    arena.reset()
    assert arena.take(10).ctypes.data == first.ctypes.data
