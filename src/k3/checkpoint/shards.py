"""Writing safetensors shards: headers as the safetensors library writes them, contents in any order."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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


def plan_shard(specs: Iterable[StoredTensor]) -> ShardPlan:
    """Lay tensors out as the safetensors library does: the widest dtype first, then by name.

    So each expert's six tensors (`w1.weight_packed`, `w1.weight_scale`, `w2…`, `w3…`) lie back to back.
    """
    ordered = sorted(specs, key=lambda spec: (-DTYPE_BYTES[spec.dtype], spec.name))
    entries: dict[str, object] = {}
    offsets, end = [], 0
    for spec in ordered:
        offsets.append(end)
        end += spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offsets[-1], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    tensors = tuple((spec, len(header) + offset) for spec, offset in zip(ordered, offsets, strict=True))
    return ShardPlan(header, tensors, len(header) + end)


def index_json(shards: Sequence[ShardPlan]) -> str:
    """Text of `model.safetensors.index.json` for these shards, in order."""
    names = {
        spec.name: shard_name(number, len(shards))
        for number, shard in enumerate(shards, 1)
        for spec, _ in shard.tensors
    }
    total = sum(spec.nbytes for shard in shards for spec, _ in shard.tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2) + "\n"


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; one call may take only part of it. Raises OSError."""
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
