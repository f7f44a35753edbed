"""The header of one safetensors file: where every tensor of a shard lies.

A file is eight bytes N (little-endian), N bytes of JSON, then the tensors' bytes. The JSON maps each name to
`dtype`, `shape` and `data_offsets` ([begin, end), counted from the end of the header); `__metadata__` maps
strings to strings. The tensors cover the data without gaps or overlaps, in any order of names.

`read_header(path)` checks all of it and reads nothing else. Whatever is wrong is a `CheckpointError` that
names the file; nothing is allocated before the length field has been found plausible. Files are never mapped.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from k3.checkpoint.headers.kinds import DTYPE_BITS, TensorKind
from k3.checkpoint.headers.members import damaged, read_members
from k3.checkpoint.headers.names import Keys, NameTable
from k3.errors import CheckpointError

__all__ = ["DTYPE_BITS", "MAX_HEADER_BYTES", "ShardHeader", "TensorKind", "read_header"]

MAX_HEADER_BYTES: Final = 100_000_000
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One shard's tensors: tensor i has the key `keys[i]` in `table`, kind `kinds[kind_ids[i]]` and `offsets[i]`.

    `keys` is uint64 [n]; `kind_ids` is int64 [n]; `offsets` is int64 [n], counted from the start of the file.
    """

    path: Path
    file_size: int
    data_start: int
    metadata: dict[str, str]
    table: NameTable
    keys: Keys
    kinds: list[TensorKind]
    kind_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    @property
    def names(self) -> list[str]:
        """The tensors' names, made anew."""
        return [self.name(row) for row in range(len(self.keys))]

    def name(self, row: int) -> str:
        """The name of tensor `row`."""
        return self.table.name(int(self.keys[row]))


def read_header(path: Path, table: NameTable | None = None, *, allow_holes: bool = False) -> ShardHeader:
    """The checked header of this shard; its names enter `table`, or a new one.

    `allow_holes` accepts a sparse file, whose unwritten ranges read as zeros: right for synthetic checkpoints
    only. CheckpointError for everything that is wrong.
    """
    descriptor = _open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        raw = _read_json(descriptor, path, size)
        header = _parse(raw, path, size, NameTable() if table is None else table)
        if not allow_holes:
            _refuse_hole(descriptor, header)
        return header
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}. Check the drive and the file.") from error
    finally:
        os.close(descriptor)


def _open_regular(path: Path) -> int:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            _fail(path, "this is not a regular file", "Replace it with the shard itself.")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be opened: {error}. Check the path and its permissions.") from error


def _read_json(descriptor: int, path: Path, size: int) -> bytes:
    prefix = os.pread(descriptor, _LENGTH_BYTES, 0)
    if len(prefix) < _LENGTH_BYTES:
        damaged(path, f"expected at least {_LENGTH_BYTES} bytes, found {size}")
    length = int.from_bytes(prefix, "little")
    room = size - _LENGTH_BYTES
    if length < _LENGTH_BYTES:
        damaged(path, f"expected a header of at least {_LENGTH_BYTES} bytes, its length field says {length}")
    if length > MAX_HEADER_BYTES:
        damaged(path, f"expected a header of at most {MAX_HEADER_BYTES} bytes, its length field says {length}")
    if length > room:
        damaged(path, f"the file is truncated inside its header: expected {length} bytes of it, found {room}")
    pieces, found = [], 0
    while found < length:
        pieces.append(os.pread(descriptor, length - found, _LENGTH_BYTES + found))
        if not pieces[-1]:
            damaged(path, f"expected {length} bytes of header, found {found}: the file shrank while read")
        found += len(pieces[-1])
    return b"".join(pieces)


def _parse(raw: bytes, path: Path, size: int, table: NameTable) -> ShardHeader:
    if raw[:1] != b"{":
        damaged(path, f"expected the header to begin with '{{', found byte {raw[0]:#04x}")
    members, start = read_members(raw, table, path), _LENGTH_BYTES + len(raw)
    metadata, offsets = members.metadata or {}, members.begins + start
    header = ShardHeader(path, size, start, metadata, table, members.keys, members.kinds, members.kind_ids, offsets)
    _check_cover(header)
    return header


def _check_cover(header: ShardHeader) -> None:
    """The tensors must cover the data exactly, from the end of the header to the end of the file."""
    sizes = np.array([kind.nbytes for kind in header.kinds], np.int64)[header.kind_ids]
    order = np.lexsort((sizes, header.offsets))
    begins, ends = header.offsets[order], (header.offsets + sizes)[order]
    previous = np.concatenate(([header.data_start], ends[:-1])) if len(order) else ends
    wrong = np.flatnonzero(begins != previous)
    if len(wrong):
        _refuse_gap(header, order, int(wrong[0]), int(begins[wrong[0]] - previous[wrong[0]]))
    end = int(ends[-1]) if len(order) else header.data_start
    if header.file_size < end:
        damaged(header.path, f"the file is truncated: expected {end} bytes, found {header.file_size}")
    if header.file_size > end:
        damaged(
            header.path,
            f"{header.file_size - end} bytes after the last tensor: expected {end} bytes, found {header.file_size}",
        )


def _refuse_gap(header: ShardHeader, order: npt.NDArray[np.int64], at: int, gap: int) -> NoReturn:
    name = header.name(int(order[at]))
    before = repr(header.name(int(order[at - 1]))) if at else "the header"
    if gap > 0:
        damaged(header.path, f"{gap} bytes between {before} and tensor {name!r} belong to no tensor")
    damaged(header.path, f"tensor {name!r} overlaps {before} by {-gap} bytes")


def _refuse_hole(descriptor: int, header: ShardHeader) -> None:
    """A range that was never written reads as zeros: an interrupted copy or download, not weights."""
    try:
        hole = os.lseek(descriptor, header.data_start, os.SEEK_HOLE)
    except OSError:
        return  # An empty data section, or a file system that doesn't tell.
    if hole >= header.file_size:
        return
    last = int(np.flatnonzero(header.offsets <= hole)[np.argmax(header.offsets[header.offsets <= hole])])
    _fail(
        header.path,
        f"a hole: bytes from {hole} on, inside tensor {header.name(last)!r}, were never written, "
        f"expected {header.file_size} bytes with content",
        "Download this file again; if its zeros are meant, rewrite it with `cp --sparse=never`.",
    )


def _fail(path: Path, what: str, advice: str) -> NoReturn:
    raise CheckpointError(f"{path}: {what}. {advice}")
