"""Writing safetensors shards: headers as the safetensors library writes them, contents in any order."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

_LENGTH_BYTES = 8

DTYPE_BYTES = {"F32": 4, "BF16": 2, "U8": 1}
"""Bytes an element takes, of the dtypes that a released checkpoint holds."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Name, safetensors dtype and shape of a tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard: its header, ready to be written, and where in the file each tensor starts, in file order."""

    header: bytes
    tensors: tuple[tuple[StoredTensor, int], ...]
    nbytes: int


def shard_name(number: int, count: int) -> str:
    """File name of shard `number` (from one) of `count`; the total has a digit more, as in released files."""
    return f"model-{number:05}-of-{count:06}.safetensors"


def plan_shard(specs: Iterable[StoredTensor], nbytes: int | None = None) -> ShardPlan:
    """Lay tensors out as the safetensors library does: the widest dtype first, then by name.

    So each expert's six tensors (`w1.weight_packed`, `w1.weight_scale`, `w2…`, `w3…`) lie back to back. The header
    is padded with spaces to make a file of `nbytes` bytes. ValueError where that is too short.
    """
    ordered = sorted(specs, key=lambda spec: (-DTYPE_BYTES[spec.dtype], spec.name))
    entries: dict[str, object] = {}
    offsets, end = [], 0
    for spec in ordered:
        offsets.append(end)
        end += spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offsets[-1], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    room = -(-len(text) // 8) * 8 if nbytes is None else nbytes - end - _LENGTH_BYTES
    if len(text) > room:
        raise ValueError(f"the header takes {len(text)} bytes, {nbytes} bytes leave {room} for it")
    header = struct.pack("<Q", room) + text.ljust(room)
    tensors = tuple((spec, len(header) + offset) for spec, offset in zip(ordered, offsets, strict=True))
    return ShardPlan(header, tensors, len(header) + end)


def index_lines(plan: ShardPlan, file_name: str) -> str:
    """The shard's members of a weight map, as lines parted by commas."""
    return ",\n".join(f'    {json.dumps(spec.name)}: "{file_name}"' for spec, _ in plan.tensors)


def index_pieces(lines: Iterable[str], metadata: dict[str, object]) -> Iterator[str]:
    """Text of `model.safetensors.index.json` with these `index_lines`, piece by piece."""
    start = json.dumps({"metadata": metadata, "weight_map": {}}, indent=2)
    yield start.removesuffix("{}\n}")
    for number, shard in enumerate(lines):
        yield (",\n" if number else "{\n") + shard
    yield "\n  }\n}\n"


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; one call may take only part of it. Raises OSError."""
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
