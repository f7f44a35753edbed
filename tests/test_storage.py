"""Storage: complete reads or a plain refusal, bytes counted where they are read, buffers that are reused."""

from __future__ import annotations

import os

import numpy as np
import pytest

from conftest import TINY_C
from k3.checkpoint.config import ModelConfig
from k3.checkpoint.index import TensorIndex
from k3.checkpoint.layout import bind
from k3.errors import ReadError
from k3.storage import tensors
from k3.storage.arena import ALIGNMENT, Arena
from k3.storage.experts import OnDemandExperts, ResidentExperts
from k3.storage.reader import ByteClass, BytesRead, Reader
from k3.storage.tensors import OnDemandTensors, ResidentTensors


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


@pytest.fixture(scope="module")
def layout():
    return bind(TensorIndex.open(TINY_C), ModelConfig.read(TINY_C / "config.json"))


def stored(entry):
    data = entry.path.read_bytes()
    return data[entry.offset : entry.offset + entry.nbytes]


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


@pytest.mark.parametrize("block", [1, 5000, 1 << 24])
def test_on_demand_blocks_are_the_tensor(reader, layout, monkeypatch, block):
    monkeypatch.setattr(tensors, "_BLOCK_BYTES", block)
    store = OnDemandTensors(reader)
    for entry in (layout.top["lm_head.weight"], layout.layers[0].tensors["mlp.down_proj.weight"]):
        found, rows = [], 0
        for start, array in store.blocks(entry, ByteClass.TRUNK):
            assert start == rows
            rows += len(array)
            assert array.nbytes <= max(block, entry.nbytes // entry.shape[0])
            found.append(array.tobytes())
        assert rows == entry.shape[0]
        assert b"".join(found) == stored(entry)
        assert store.whole(entry, ByteClass.TRUNK).tobytes() == stored(entry)


def test_resident_tensors(reader, layout):
    entries = list(layout.layers[3].tensors.values())
    seen = []
    store = ResidentTensors(reader, [(entry, ByteClass.TRUNK) for entry in entries], lambda *s: seen.append(s))
    total = sum(entry.nbytes for entry in entries)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert reader.bytes_read() == BytesRead(trunk=total)
    for entry in entries:
        [(start, array)] = store.blocks(entry, ByteClass.TRUNK)
        assert start == 0
        assert array.shape == entry.shape
        assert array.tobytes() == store.whole(entry, ByteClass.TRUNK).tobytes() == stored(entry)
    assert reader.bytes_read().total == total


@pytest.mark.parametrize("contiguous", [True, False])
def test_experts(reader, layout, monkeypatch, contiguous):
    if not contiguous:
        monkeypatch.setattr(type(layout.experts[1]), "record", lambda *_: None)
    for store in (OnDemandExperts(reader, layout), ResidentExperts(reader, layout, lambda *_: None)):
        for layer, expert in ((1, 0), (8, 11), (4, 5)):
            found = store.get(layer, expert)
            wanted = layout.expert(layer, expert)
            assert list(found) == list(wanted)
            for name, entry in wanted.items():
                assert found[name].shape == entry.shape
                assert found[name].tobytes() == stored(entry)
