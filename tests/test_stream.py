"""The weight stream: every piece has its bytes, whatever is pinned, however small the ring, wherever a walk ends."""

from __future__ import annotations

import numpy as np
import pytest

from k3.errors import ReadError
from k3.storage.reader import ByteClass, BytesRead, Reader, aligned_span
from k3.storage.stream import StoredBlock, StoredMatrix, WeightStream, pinned_blocks, pinned_bytes

ROWS, ROW = 40, 700
NAMES = ["a", "b", "c", "d", "head"]


@pytest.fixture
def reader():
    reader = Reader(threads=4)
    yield reader
    reader.close()


@pytest.fixture
def matrices(tmp_path):
    """Five matrices of 40 rows, in blocks of 1, 7, 16, 40 and 13 rows, one file each."""
    made = []
    for number, (name, step) in enumerate(zip(NAMES, (1, 7, 16, 40, 13), strict=True)):
        path = tmp_path / name
        path.write_bytes(np.random.default_rng(number).integers(0, 256, 100 + ROWS * ROW, np.uint8).tobytes())
        blocks = tuple(
            StoredBlock(row, min(step, ROWS - row), path, 100 + row * ROW, min(step, ROWS - row) * ROW)
            for row in range(0, ROWS, step)
        )
        kind = ByteClass.HEAD if name == "head" else ByteClass.TRUNK
        made.append(StoredMatrix(name, kind, blocks, joinable=name != "b"))
    return made


def blocks_of(matrices):
    return [block for matrix in matrices for block in matrix.blocks]


def total(blocks):
    return sum(block.nbytes for block in blocks)


def largest_span(matrices):
    return max(aligned_span(block.offset, block.nbytes) for block in blocks_of(matrices))


def check(stream, matrix):
    """Ask for a matrix, and compare every piece with the file while it is valid."""
    data = matrix.blocks[0].path.read_bytes()[100:]
    row = 0
    for piece in stream.pieces(matrix.name):
        assert piece.start == row
        row += piece.rows
        assert piece.data.tobytes() == data[piece.start * ROW : row * ROW]
    assert row == ROWS


@pytest.mark.parametrize("share", [0, 0.1, 0.25, 0.5, 0.9, 1])
@pytest.mark.parametrize("ring", [1, 2, 100])
def test_walks(reader, matrices, share, ring):
    pinned = pinned_blocks(matrices, int(share * total(blocks_of(matrices))))
    stream = WeightStream(reader, matrices, pinned, ring * largest_span(matrices))
    assert reader.bytes_read().total == total(pinned)
    flowing = {
        kind: total(b for m in matrices if m.kind is kind for b in m.blocks if b not in pinned) for kind in ByteClass
    }
    for _ in range(4):
        before = reader.bytes_read()
        stream.begin(head=True)
        for matrix in matrices:
            check(stream, matrix)
        assert reader.bytes_read() - before == BytesRead(flowing[ByteClass.TRUNK], 0, flowing[ByteClass.HEAD], 0)


@pytest.mark.parametrize("ring", [1, 3, 100])
def test_walks_with_and_without_the_head(reader, matrices, ring):
    stream = WeightStream(reader, matrices, frozenset(), ring * largest_span(matrices))
    for head in (False, False, True, False, True, True, False):
        before = reader.bytes_read()
        stream.begin(head=head)
        for matrix in matrices if head else matrices[:-1]:
            check(stream, matrix)
        assert (reader.bytes_read() - before).total == (5 if head else 4) * ROWS * ROW


@pytest.mark.parametrize("ring", [1, 3, 100])
@pytest.mark.parametrize("stop", [0, 1, 5, 40, 43, 50])
def test_a_walk_that_ends_in_the_middle(reader, matrices, ring, stop):
    stream = WeightStream(reader, matrices, pinned_blocks(matrices, 20_000), ring * largest_span(matrices))
    for _ in range(3):
        stream.begin(head=True)
        pieces = (piece for matrix in matrices for piece in stream.pieces(matrix.name))
        for _, _ in zip(range(stop), pieces, strict=False):
            pass
        stream.begin(head=True)
        for matrix in matrices:
            check(stream, matrix)


def test_matrices_may_be_left_out(reader, matrices):
    stream = WeightStream(reader, matrices, frozenset(), 2 * largest_span(matrices))
    for _ in range(3):
        stream.begin(head=True)
        for matrix in matrices[1::2]:
            check(stream, matrix)


def test_the_drive_works_ahead_of_use(reader, matrices):
    stream = WeightStream(reader, matrices, frozenset(), 100 * largest_span(matrices))
    stream.begin(head=True)
    pieces = stream.pieces("a")
    next(pieces)
    assert len(stream._queue) == len(blocks_of(matrices)), "a whole walk is under way"
    next(pieces)
    assert stream._queue[-1][0] is matrices[0].blocks[0], "and then the next one's first block"


def test_a_block_that_cannot_be_read(reader, matrices):
    path = matrices[2].blocks[0].path
    data = path.read_bytes()
    stream = WeightStream(reader, matrices, frozenset(), largest_span(matrices))
    path.write_bytes(data[: 100 + 20 * ROW])
    stream.begin(head=True)
    check(stream, matrices[0])
    with pytest.raises(ReadError, match=r"failed twice: .*the file ends"):
        check(stream, matrices[2])
    path.write_bytes(data)
    stream.begin(head=True)
    for matrix in matrices:
        check(stream, matrix)


def test_a_pin_that_cannot_be_read(reader, matrices):
    matrices[3].blocks[0].path.write_bytes(b"short")
    with pytest.raises(ReadError):
        WeightStream(reader, matrices, frozenset(blocks_of(matrices)), 0)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5, 0.77, 0.99])
def test_pins_are_within_the_budget_and_spread_evenly(share, tmp_path):
    blocks = tuple(StoredBlock(row, 1, tmp_path, row * ROW, ROW) for row in range(1000))
    matrix = StoredMatrix("m", ByteClass.TRUNK, blocks)
    pinned = pinned_blocks([matrix], int(share * 1000 * ROW))
    assert len(pinned) == int(share * 1000)
    for start in range(0, 1000, 100):
        here = sum(block in pinned for block in blocks[start : start + 100])
        assert abs(here - share * 100) <= 1


@pytest.mark.parametrize("budget", [0, 1, 699, 700, 20_000, 1 << 40])
def test_budgets(matrices, budget):
    pinned = pinned_blocks(matrices, budget)
    assert total(pinned) <= budget
    assert (len(pinned) == len(blocks_of(matrices))) == (budget >= total(blocks_of(matrices)))
    assert total(pinned) <= pinned_bytes(matrices, pinned) <= total(pinned) + 3 * 4096 * max(1, len(pinned))


def test_neighbouring_pins_are_one_piece_where_they_may_be(reader, matrices):
    stream = WeightStream(reader, matrices, frozenset(blocks_of(matrices)), 0)
    stream.begin(head=True)
    counts = {matrix.name: len(list(stream.pieces(matrix.name))) for matrix in matrices}
    assert counts == {"a": 1, "b": 6, "c": 1, "d": 1, "head": 1}


def test_progress_of_loading(reader, matrices):
    seen = []
    WeightStream(reader, matrices, frozenset(blocks_of(matrices)), 0, lambda *s: seen.append(s))
    assert seen[-1] == (5 * ROWS * ROW, 5 * ROWS * ROW)
    assert seen == sorted(seen)
