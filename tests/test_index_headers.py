"""Shard headers: what is read, and every fault refused."""

from __future__ import annotations

import json
import os
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from conftest import TINY_A, TINY_C, read_shard, write_shard
from k3.checkpoint.headers.safetensors import DTYPE_BITS, read_header
from k3.errors import CheckpointError


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A = tensor("F32", [2], 0, 8)
B = tensor("BF16", [2, 3], 8, 20)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 1000
    return message


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_a_sound_shard(shard: Path) -> None:
    write_shard(shard, {"b": B, "__metadata__": {"format": "pt"}, "a": A}, bytes(range(20)))
    header = read_header(shard)
    assert header.names == ["b", "a"]
    assert [header.kinds[i].shape for i in header.kind_ids] == [(2, 3), (2,)]
    assert [header.kinds[i].dtype for i in header.kind_ids] == ["BF16", "F32"]
    assert [header.kinds[i].nbytes for i in header.kind_ids] == [12, 8]
    assert header.metadata == {"format": "pt"}
    raw = shard.read_bytes()
    assert [raw[o] for o in header.offsets] == [8, 0]


def test_what_the_library_writes(shard: Path) -> None:
    """Scalars, empty tensors and all element types that NumPy has."""
    names = [
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "float16",
        "uint32",
        "int32",
        "float32",
        "uint64",
        "int64",
    ]
    tensors = {name: np.ones((2, 3), name) for name in [*names, "float64"]}
    tensors |= {"scalar": np.array(3, np.float32), "empty": np.empty((0, 5), np.float32)}
    safetensors.numpy.save_file(tensors, shard)
    header = read_header(shard)
    assert set(header.names) == set(tensors)
    for name, kind, offset in zip(header.names, header.kind_ids, header.offsets, strict=True):
        assert header.kinds[kind].shape == tensors[name].shape
        assert header.kinds[kind].nbytes == tensors[name].nbytes
        assert shard.read_bytes()[offset : offset + tensors[name].nbytes] == tensors[name].tobytes()


def test_element_types_are_those_of_the_format() -> None:
    """Sizes by the names' own numbers."""
    for name, bits in DTYPE_BITS.items():
        digits = name.removeprefix("B").lstrip("FUIC").partition("_")[0]
        assert bits == (8 if name == "BOOL" else int(digits)), name


def test_padding_escapes_and_other_scripts(shard: Path) -> None:
    """Trailing spaces are the format's padding; names are any UTF-8."""
    for header in (
        json.dumps({"a": A}).encode() + b" " * 13,
        json.dumps({"größe:日本": A}, ensure_ascii=False).encode(),
        json.dumps({'gr\u00f6\u00dfe "q" \\ : /': A, "__metadata__": {"k:\n": "v:\t"}}).encode(),
        json.dumps({"a:b": A, "__metadata__": {"x": ":::", "dtype": "no", "shape": "none"}}).encode(),
        b'{"a":{"data_offsets":[0,8],"shape":[2],"dtype":"F32"}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{}}',
    ):
        write_shard(shard, header, bytes(8))
        assert len(read_header(shard).names) == 1


def test_a_shard_without_tensors(shard: Path) -> None:
    write_shard(shard, b"{}      ")
    assert read_header(shard).names == []


@pytest.mark.parametrize("length", [0, 1, 7])
def test_header_too_short(shard: Path, length: int) -> None:
    shard.write_bytes(struct.pack("<Q", length) + b"{}     ")
    assert f"at least 8 bytes, its length field says {length}" in refusal(shard)


@pytest.mark.parametrize("length", [100_000_001, 2**32, 2**63, 2**64 - 1])
def test_header_too_long(shard: Path, length: int) -> None:
    """Refused at once and without allocation, even where the file is as long as it says."""
    with shard.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(min(length + 8, 1 << 40))
    tracemalloc.start()
    start = time.monotonic()
    assert f"at most 100000000 bytes, its length field says {length}" in refusal(shard)
    assert time.monotonic() - start < 0.5
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("length", [99_999, 100_000_000])
def test_header_longer_than_the_file(shard: Path, length: int) -> None:
    shard.write_bytes(struct.pack("<Q", length) + b"{}      ")
    assert f"truncated inside its header: expected {length} bytes of it, found 8" in refusal(shard)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_file_without_a_length(shard: Path, size: int) -> None:
    shard.write_bytes(bytes(size))
    assert f"expected at least 8 bytes, found {size}" in refusal(shard)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"[]      ", "to begin with '{', found byte 0x5b"),
        (b" {}     ", "to begin with '{', found byte 0x20"),
        (b"\0" * 8, "to begin with '{', found byte 0x00"),
        (b'{"a": {} ', "malformed JSON"),
        (b'{"a": 1}', "tensor 'a': Expected `object`, got `int`"),
        (b'{"\xff": {}}', "malformed JSON"),
        (b"{}     \0", "malformed JSON"),
        (b"{}{}    ", "malformed JSON"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "malformed JSON"),
        (b'{"a":' + b"[" * 99_999, "malformed JSON"),
    ],
)
def test_header_is_not_what_the_format_says(shard: Path, header: bytes, said: str) -> None:
    write_shard(shard, header)
    assert said in refusal(shard)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "F33"}, "found dtype 'F33'"),
        ({"dtype": 32}, "Expected `str`, got `int`"),
        ({"dtype": None}, "Expected `str`, got `null`"),
        ({"shape": [-2]}, "Expected `int` >= 0"),
        ({"shape": [2.0]}, "Expected `int`, got `float`"),
        ({"shape": [True]}, "Expected `int`, got `bool`"),
        ({"shape": "2"}, "Expected `array`, got `str`"),
        ({"shape": [3]}, "expected 12 bytes for F32 [3], data_offsets [0, 8] hold 8"),
        ({"shape": []}, "expected 4 bytes for F32 [], data_offsets [0, 8] hold 8"),
        ({"shape": [2**40, 2**40]}, "not a possible number of whole bytes"),
        ({"shape": [2**63]}, "Expected `int` <="),
        ({"shape": [10**30]}, "tensor 'a': "),
        ({"shape": [1] * 17 + [2]}, "at most 16 dimensions, found 18"),
        ({"shape": [3], "dtype": "F4"}, "not a possible number of whole bytes"),
        ({"data_offsets": [-8, 0]}, "Expected `int` >= 0"),
        ({"data_offsets": [8, 0]}, "data_offsets [8, 0] hold -8"),
        ({"data_offsets": [0]}, "Expected `array` of length 2"),
        ({"data_offsets": [0, 8, 8]}, "Expected `array` of length 2"),
        ({"data_offsets": [0.0, 8]}, "Expected `int`, got `float`"),
        ({"data_offsets": [2**63, 2**63 + 8]}, "Expected `int` <="),
        ({"extra": 1}, "unknown field `extra`"),
    ],
)
def test_a_tensor_that_cannot_be(shard: Path, changes: dict[str, Any], said: str) -> None:
    write_shard(shard, {"a": {**A, **changes}}, bytes(8))
    message = refusal(shard)
    assert "tensor 'a'" in message
    assert said in message


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
def test_a_tensor_without_a_field(shard: Path, field: str) -> None:
    write_shard(shard, {"a": {k: v for k, v in A.items() if k != field}}, bytes(8))
    assert f"tensor 'a': Object missing required field `{field}`" in refusal(shard)


@pytest.mark.parametrize("metadata", [1, [], {"a": 1}, {"a": None}, {"a": {}}, "x"])
def test_metadata_maps_strings_to_strings(shard: Path, metadata: object) -> None:
    write_shard(shard, {"__metadata__": metadata, "a": A}, bytes(8))
    assert "malformed JSON" in refusal(shard)


@pytest.mark.parametrize(
    ("second", "size", "said"),
    [
        (tensor("F32", [2], 12, 20), 20, "4 bytes between 'a' and tensor 'b' belong to no tensor"),
        (tensor("F32", [2], 4, 12), 12, "tensor 'b' overlaps 'a' by 4 bytes"),
        (tensor("F32", [2], 0, 8), 8, "overlaps"),
        (tensor("F32", [1], 2, 6), 8, "tensor 'b' overlaps 'a' by 6 bytes"),
        (tensor("F32", [2], 8, 16), 15, "truncated: expected {0} bytes, found {1}"),
        (tensor("F32", [2], 8, 16), 0, "truncated: expected {0} bytes, found {1}"),
        (tensor("F32", [2], 8, 16), 24, "8 bytes after the last tensor: expected {0} bytes, found {1}"),
        (tensor("F32", [2], 8, 16), 17, "1 bytes after the last tensor: expected {0} bytes, found {1}"),
    ],
)
def test_tensors_cover_the_data_exactly(shard: Path, second: dict[str, Any], size: int, said: str) -> None:
    write_shard(shard, {"a": A, "b": second}, bytes(size))
    found = shard.stat().st_size
    assert said.format(found - size + 16, found) in refusal(shard)


def test_data_begins_after_the_header(shard: Path) -> None:
    write_shard(shard, {"a": tensor("F32", [2], 4, 12)}, bytes(12))
    assert "4 bytes between the header and tensor 'a' belong to no tensor" in refusal(shard)


def test_bytes_without_tensors(shard: Path) -> None:
    write_shard(shard, b"{}      ", bytes(3))
    assert "3 bytes after the last tensor: expected 16 bytes, found 19" in refusal(shard)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":%b,"a":%b}',
        b'{"b":%b,"a":%b,"b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
        b'{"a":%b,"\\u0061":%b}',
        b'{"a\\n":%b,"a\\u000a":%b}',
        b'{"a:b":%b,"a\\u003ab":%b}',
        b'{"__metadata__":{"x":"1"},"a":%b,"a":%b}',
        b'{"a":%b,"__metadata__":{},"__metadata__":{}}',
        b'{"a":%b,"__metadata__":{"x":"1","x":"2"}}',
    ],
)
def test_a_repeated_name_is_not_dropped_in_silence(shard: Path, header: bytes) -> None:
    """Even where both entries say the same, so that the last one alone would cover the data."""
    entry = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    write_shard(shard, header.replace(b"%b", entry), bytes(8))
    assert "occurs more than once in the header" in refusal(shard)


def test_a_repeated_field(shard: Path) -> None:
    write_shard(shard, b'{"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', bytes(8))
    assert "'shape' occurs more than once" in refusal(shard)


@pytest.mark.parametrize("source", [TINY_A, TINY_C], ids=["tiny-a", "tiny-c"])
def test_cut_and_extended_shards(shard: Path, source: Path) -> None:
    raw = next(source.glob("model-00003-*")).read_bytes()
    for damaged, said in [
        (raw[:-1], f"truncated: expected {len(raw)} bytes, found {len(raw) - 1}"),
        (raw[: len(raw) // 2], f"truncated: expected {len(raw)} bytes, found {len(raw) // 2}"),
        (raw + bytes(8), f"8 bytes after the last tensor: expected {len(raw)} bytes, found {len(raw) + 8}"),
    ]:
        shard.write_bytes(damaged)
        assert said in refusal(shard)


def test_a_hole_is_found(shard: Path) -> None:
    """A range that was never written reads as zeros, which no other check of a header would see."""
    header = {"a": tensor("U8", [1 << 20], 0, 1 << 20), "b": tensor("U8", [1 << 20], 1 << 20, 1 << 21)}
    write_shard(shard, header, b"\1" * (1 << 21))
    assert read_header(shard).names == ["a", "b"]
    start = shard.stat().st_size - (1 << 21)
    write_shard(shard, header)
    with shard.open("r+b") as file:
        file.seek(start)
        file.write(b"\1" * ((1 << 20) + 70_000))
        file.seek(start + (1 << 21) - 1)
        file.write(b"\1")
    descriptor = os.open(shard, os.O_RDONLY)
    hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    os.close(descriptor)
    if hole >= shard.stat().st_size:
        pytest.skip("the file system of the temporary directory keeps no holes")
    assert f"a hole: bytes from {hole} on, inside tensor 'b', were never written" in refusal(shard)
    assert read_header(shard, allow_holes=True).names == ["a", "b"]


def test_files_that_cannot_be_shards(tmp_path: Path) -> None:
    assert "can't be opened" in refusal(tmp_path / "absent.safetensors")
    assert "not a regular file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a regular file" in refusal(tmp_path / "pipe.safetensors")


def test_random_damage_of_a_header(tmp_path: Path) -> None:
    """Seeded mutations: a header or a CheckpointError, and never anything else."""
    rng = random.Random(5)
    header, _ = read_shard(next(TINY_C.glob("model-00001-*")))
    few = dict(list(header.items())[:6])
    raw = json.dumps(few).encode()
    path = tmp_path / "x.safetensors"
    for _ in range(1500):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.choice((0, 1, 1, 8))] = rng.randbytes(rng.choice((0, 1, 1, 3)))
        write_shard(path, bytes(damaged), bytes(rng.choice((0, 100))))
        try:
            read_header(path)
        except CheckpointError as error:
            assert error.exit_code == 2  # noqa: PT017
