"""Text parsed as columns says what a JSON parser says, or leaves it to the parser."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import TINY_A, TINY_C, read_shard, write_shard
from k3.checkpoint.headers import members as header_members
from k3.checkpoint.headers import placements, weight_map
from k3.checkpoint.headers.names import NameTable
from k3.checkpoint.headers.safetensors import read_header
from k3.checkpoint.headers.text_columns import Text
from k3.checkpoint.headers.weight_map import WeightMap
from k3.checkpoint.index import INDEX_FILE
from k3.checkpoint.specs import EXPERT_TENSORS
from k3.errors import CheckpointError

EXPERT = "language_model.model.layers.3.block_sparse_moe.experts."


def header_text(experts: int = 3, prefix: str = "language_model.") -> bytes:
    """Two tensors around the experts of two layers, written as the library does."""
    stems = [f"{prefix}model.layers.{n}.block_sparse_moe.experts.{e}." for n in (1, 12) for e in range(experts)]
    names = [stem + tensor for stem in stems for tensor in EXPERT_TENSORS]
    header, end = {}, 0
    for name in [f"{prefix}model.layers.1.a", *names, f"{prefix}model.layers.1.b"]:
        rows = 1 + len(name) % 3
        header[name] = {"dtype": "U8", "shape": [rows, 5], "data_offsets": [end, end + rows * 5]}
        end += rows * 5
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def data_bytes(header: bytes) -> int:
    return max(entry["data_offsets"][1] for entry in json.loads(header).values())


def result(path: Path) -> Any:
    """All that a header says, or the text of its error."""
    try:
        header = read_header(path)
    except CheckpointError as error:
        return str(error)
    kinds = [header.kinds[kind] for kind in header.kind_ids]
    rows = sorted(zip(header.names, header.offsets.tolist(), kinds, strict=True), key=lambda row: row[0])
    return rows, header.metadata, header.data_start


def both_ways(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    found = result(path)
    with monkeypatch.context() as patch:
        patch.setattr(header_members, "_in_columns", lambda *_: None)
        return found, result(path)


@pytest.mark.parametrize("prefix", ["language_model.", ""])
@pytest.mark.parametrize("experts", [1, 12, 101])
def test_experts_are_read_as_columns(tmp_path: Path, experts: int, prefix: str) -> None:
    raw = header_text(experts, prefix)
    members = header_members._in_columns(raw, table := NameTable(), tmp_path)
    assert members is not None
    expected = json.loads(raw)
    assert sorted(table.name(key) for key in members.keys.tolist()) == sorted(expected)
    for key, kind, begin in zip(members.keys.tolist(), members.kind_ids, members.begins, strict=True):
        entry = expected[table.name(key)]
        assert list(members.kinds[kind].shape) == entry["shape"]
        assert [begin, begin + members.kinds[kind].nbytes] == entry["data_offsets"]


@pytest.mark.parametrize("source", [TINY_A, TINY_C], ids=["tiny-a", "tiny-c"])
def test_recorded_headers(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are, and written without spaces."""
    for path in source.glob("*.safetensors"):
        header, data = read_shard(path)
        compact = write_shard(tmp_path / path.name, json.dumps(header, separators=(",", ":")).encode(), data)
        for form in (path, compact):
            found, expected = both_ways(form, monkeypatch)
            assert found == expected
            assert len(found[0]) == len(header) - 1


W1 = b'experts.1.w1.weight_packed":{'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"experts.1.w1", b"experts.01.w1"),
        (b"experts.1.w1", b"experts.10000.w1"),
        (b"experts.1.w1", b"experts.99999999999999999999.w1"),
        (b"experts.1.w1", b"experts.0.w1"),  # named twice
        (b"experts.1.w1", b"experts.-1.w1"),
        (b"experts.1.w1", b"experts.\xef\xbc\x91.w1"),
        (b"experts.1.w1", b"experts.\xff.w1"),
        (b"experts.1.w1", b"experts.\\u0031.w1"),
        (b"layers.12.", b"layers.012."),
        (W1, W1.replace(b"w1", b"w4")),
        (W1, W1.replace(b"packed", b"packing")),
        (W1, W1.replace(b"packed", b"packed ")),
        (W1, W1.replace(b'":{', b'" : {')),
        (W1, W1 + b" "),
        (W1, W1 + b'"dtype":"U8",'),
        (W1, W1 + b'"x":1,'),
        (W1, W1[:-2] + b"{"),
        (W1, b"}," + W1),
        (W1, b'"},' + W1),
        (b'"U8","shape":[2,5]', b'"F4","shape":[2,10]'),
        (b'"U8","shape":[2,5]', b'"U9","shape":[2,5]'),
        (b'"U8","shape":[2,5]', b'"U8","shape":[3,5]'),
        (b'"U8","shape":[2,5]', b'"U8","shape":[02,5]'),
        (b'"U8","shape":[2,5]', b'"U8","shape":[2.0,5]'),
        (b'"shape":[2,5],"data_offsets":[', b'"shape":[2,5],"data_offsets":[ '),
        (b'"shape":[2,5],"data_offsets":[', b'"shape":[2,5],"data_offsets":[0'),
        (b'"shape":[2,5],"data_offsets":[', b'"shape":[2,5],"data_offsets":[-'),
        (b"]}}", b"]},}"),
        (b"]}}", b"]}}}"),
        (b"]}}", b"]}}\n"),
        (b"]}}", b"]}}\0"),
        (b"{", b"{ "),
        (b"{", b'{"__metadata__":{"a":"},\\""},'),
        (b"{", b'{"__metadata__":{"a":"b"},"__metadata__":{"a":"c"},'),
        (b"{", b'{"},":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'),
        (b"{", b'{"foo},'),
        (b"},", b"}, "),
        (b"},", b"},,"),
        (b"},", b"},\n"),
    ],
)
@pytest.mark.parametrize("times", [1, -1])
def test_unusual_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes, times: int) -> None:
    raw = header_text()
    assert old in raw
    path = write_shard(tmp_path / "x.safetensors", raw.replace(old, new, times), bytes(data_bytes(raw)))
    found, expected = both_ways(path, monkeypatch)
    assert found == expected


def test_names_that_could_be_one_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the members out of the middle must not make an object of what is left."""
    raw = header_text(2)
    end = data_bytes(raw)
    last = b'":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}}' % (end, end + 1)
    for first in (b'{"foo},', b'{"foo"},'):
        text = first + raw.rstrip()[1:-1] + b"," + last
        found, expected = both_ways(write_shard(tmp_path / "x.safetensors", text, bytes(end + 1)), monkeypatch)
        assert found == expected
        assert "malformed JSON" in found


def test_random_damage_of_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(11)
    raw = header_text(2)
    size, path = data_bytes(raw), tmp_path / "x.safetensors"
    pieces = [b"", b'"', b"{", b"}", b",", b"0", b"1", b"},", b'},"', b"\\", b":", b" ", b"experts", b"\xe9"]
    for _ in range(400):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.choice((0, 1, 1, 20))] = rng.choice(pieces)
        write_shard(path, bytes(damaged), bytes(size))
        found, expected = both_ways(path, monkeypatch)
        assert found == expected


# --- the index file ---


def mapping_of(path: Path) -> Any:
    """The weight map as a dictionary, or the text of its error."""
    names = NameTable()
    try:
        found = WeightMap.read(path, names)
    except CheckpointError as error:
        return str(error)
    shards = list(found.shards)
    homes = {names.name(key): shards[home] for key, home in zip(found.keys.tolist(), found.homes, strict=True)}
    return homes, found.metadata


@pytest.mark.parametrize("piece", [64, 500, 1 << 20])
def test_random_damage_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Read in pieces of any size, or as a whole by a JSON parser: the same map, or the same error."""
    rng = random.Random(piece)
    index = json.loads((TINY_C / INDEX_FILE).read_bytes())
    chosen = [name for name in index["weight_map"] if rng.random() < 0.02 or name.startswith(EXPERT + "1.")]
    few = {"metadata": index["metadata"], "weight_map": {name: index["weight_map"][name] for name in chosen}}
    path = tmp_path / INDEX_FILE
    monkeypatch.setattr(placements, "_PIECE", piece)
    monkeypatch.setattr(placements, "_MAX_REST", 8 * piece)
    path.write_text(json.dumps(few, indent=2))
    if piece > 64:
        assert placements.read_placements(path, NameTable()) is not None
    assert mapping_of(path) == (few["weight_map"], few["metadata"])
    pieces = [b"", b'"', b"{", b"}", b",", b"0", b"1", b'",', b"\\", b":", b" ", b"experts", b"\xe9", b"\n", b"\x01"]
    for _ in range(200):
        damaged = bytearray(json.dumps(few, indent=2).encode())
        for _ in range(rng.randint(0, 3)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.choice((0, 1, 1, 20))] = rng.choice(pieces)
        path.write_bytes(damaged)
        found = mapping_of(path)
        with monkeypatch.context() as patch:
            patch.setattr(weight_map, "read_placements", lambda *_: None)
            assert found == mapping_of(path)


# --- steps of a cursor ---


def test_numbers() -> None:
    raw = b"0 7 12 9999 12345 00 01 x -1 4"
    at = np.array([0, 2, 4, 7, 12, 18, 21, 24, 26, 29])
    values, ends, found = Text(raw).numbers(at, 4)
    assert found.tolist() == [True, True, True, True, False, False, False, False, False, False]
    assert values[found].tolist() == [0, 7, 12, 9999]
    assert ends[found].tolist() == [1, 3, 6, 11]
    assert not Text(raw).numbers(at + 1000, 4)[2].any()
    assert not Text(b"12").numbers(np.array([0]), 4)[2].any()


def test_literals() -> None:
    text = Text(b"abcabc\0ab")
    assert text.literal(np.array([0, 1, 3, 7, 8, 9, 100]), b"ab").tolist() == [1, 0, 1, 1, 0, 0, 0]
    assert text.literal(np.array([0]), b"abcabc\0abc").tolist() == [0]
    assert text.literal(np.empty(0, np.int64), b"ab").tolist() == []


def test_patterns_have_the_keys_of_their_names() -> None:
    table, numbers = NameTable(), [0, 7, 10, 999, 9999]
    keys = table.add_pattern("layers.{}.experts.{}.w", 3, numbers)
    names = [f"layers.3.experts.{number}.w" for number in numbers]
    assert keys.tolist() == table.add(names).tolist()
    assert [table.name(key) for key in keys.tolist()] == names
    for wrong in (-1, 10_000):
        with pytest.raises(ValueError, match="from 0 to 9999"):
            table.add_pattern("layers.{}.x", wrong)


def test_a_nul_is_no_number() -> None:
    """The gap between the parts of a name is no character that a name may have."""
    table = NameTable()
    table.add(["a1b"])
    with pytest.raises(CheckpointError, match="NUL"):
        table.add(["a\0b"])
