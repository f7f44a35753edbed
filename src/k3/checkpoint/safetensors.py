"""The header of one safetensors file: where every tensor of a shard lies.

A file is eight bytes N (little-endian), N bytes of JSON, then the tensors' bytes. The JSON maps each name to
`dtype`, `shape` and `data_offsets` ([begin, end), counted from the end of the header); `__metadata__` maps
strings to strings. The tensors cover the data without gaps or overlaps, in any order of names.

`read_header(path)` checks all of it and reads nothing else. Whatever is wrong is a `CheckpointError` that
names the file; nothing is allocated before the length field has been found plausible. Files are never mapped.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import msgspec
import numpy as np

from k3.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

MAX_HEADER_BYTES: Final = 100_000_000
_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"

DTYPE_BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, by the names that the format gives its element types."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What many tensors have in common: element type, shape, and hence size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One shard's tensors in the header's order: `names[i]`, `kinds[kind_ids[i]]`, `offsets[i]`.

    `kind_ids` is int64 [n]; `offsets` is int64 [n], counted from the start of the file.
    """

    path: Path
    file_size: int
    data_start: int
    metadata: dict[str, str]
    names: list[str]
    kinds: list[TensorKind]
    kind_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Info(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_entries_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_info_decoder = msgspec.json.Decoder(_Info)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


def read_header(path: Path, *, allow_holes: bool = False) -> ShardHeader:
    """The checked header of this shard.

    `allow_holes` accepts a sparse file, whose unwritten ranges read as zeros: right for synthetic checkpoints
    only. CheckpointError for everything that is wrong.
    """
    descriptor = _open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        raw = _read_json(descriptor, path, size)
        header = _parse(raw, path, size)
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
        _damaged(path, f"expected at least {_LENGTH_BYTES} bytes, found {size}")
    length = int.from_bytes(prefix, "little")
    room = size - _LENGTH_BYTES
    if length < _LENGTH_BYTES:
        _damaged(path, f"expected a header of at least {_LENGTH_BYTES} bytes, its length field says {length}")
    if length > MAX_HEADER_BYTES:
        _damaged(path, f"expected a header of at most {MAX_HEADER_BYTES} bytes, its length field says {length}")
    if length > room:
        _damaged(path, f"the file is truncated inside its header: expected {length} bytes of it, found {room}")
    raw = bytearray()
    while len(raw) < length:
        piece = os.pread(descriptor, length - len(raw), _LENGTH_BYTES + len(raw))
        if not piece:
            _damaged(path, f"expected {length} bytes of header, found {len(raw)}: the file shrank while read")
        raw += piece
    return bytes(raw)


def _parse(raw: bytes, path: Path, size: int) -> ShardHeader:
    if raw[:1] != b"{":
        _damaged(path, f"expected the header to begin with '{{', found byte {raw[0]:#04x}")
    try:
        entries = _entries_decoder.decode(raw)
        metadata = _metadata_decoder.decode(entries.pop(_METADATA)) if _METADATA in entries else None
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        _damaged(path, f"expected a JSON object that maps names to tensors, found malformed JSON: {error}")
    names = list(entries)
    kinds = _Kinds(path)
    kind_ids, begins = [], []
    for name, value in entries.items():
        kind, begin = kinds.place(name, value)
        kind_ids.append(kind)
        begins.append(begin)
    _refuse_duplicates(raw, names, metadata, path)
    header = ShardHeader(
        path,
        size,
        _LENGTH_BYTES + len(raw),
        metadata or {},
        names,
        kinds.table,
        np.array(kind_ids, np.int64),
        np.array(begins, np.int64) + (_LENGTH_BYTES + len(raw)),
    )
    _check_cover(header)
    return header


class _Kinds:
    """Numbers the distinct (dtype, shape) pairs of one header."""

    def __init__(self, path: Path) -> None:
        self.table: list[TensorKind] = []
        self._path = path
        self._ids: dict[tuple[str, tuple[int, ...]], int] = {}

    def place(self, name: str, value: msgspec.Raw) -> tuple[int, int]:
        """The kind of this entry and the first byte of its data."""
        try:
            info = _info_decoder.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            _damaged(self._path, f"tensor {name!r}: {error}")
        key = (info.dtype, info.shape)
        kind = self._ids.get(key)
        if kind is None:
            kind = self._ids[key] = len(self.table)
            self.table.append(TensorKind(*key, self._size(name, *key)))
        begin, end = info.data_offsets
        if end - begin != self.table[kind].nbytes:
            _damaged(
                self._path,
                f"tensor {name!r}: expected {self.table[kind].nbytes} bytes for {info.dtype} "
                f"{list(info.shape)}, data_offsets [{begin}, {end}] hold {end - begin}",
            )
        return kind, begin

    def _size(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        bits = DTYPE_BITS.get(dtype)
        if bits is None:
            _damaged(self._path, f"tensor {name!r}: expected one of {', '.join(DTYPE_BITS)}, found dtype {dtype!r}")
        if len(shape) > 16:
            _damaged(self._path, f"tensor {name!r}: expected at most 16 dimensions, found {len(shape)}")
        total = bits * math.prod(shape)
        if total % 8 or total >= 2**62:
            _damaged(self._path, f"tensor {name!r}: {dtype} {list(shape)} is not a possible number of whole bytes")
        return total // 8


def _refuse_duplicates(raw: bytes, names: list[str], metadata: dict[str, str] | None, path: Path) -> None:
    """JSON decoders keep the last of two equal keys, which would hide a tensor.

    A tensor has exactly three fields, so without repetition there are four colons a tensor, besides those
    inside strings. Only where the count differs, or escapes make it unreliable, a second parse looks closer.
    """
    texts = [*names] if metadata is None else [*names, *metadata, *metadata.values()]
    colons = 4 * len(names) + (0 if metadata is None else 1 + len(metadata))
    if b"\\" not in raw and raw.count(b":") == colons + sum(text.count(":") for text in texts):
        return
    repeated: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        repeated.extend(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)

    json.loads(raw, object_pairs_hook=note)
    if repeated:
        _damaged(path, f"expected every name once, {repeated[0]!r} occurs more than once in the header")


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
        _damaged(header.path, f"the file is truncated: expected {end} bytes, found {header.file_size}")
    if header.file_size > end:
        _damaged(
            header.path,
            f"{header.file_size - end} bytes after the last tensor: expected {end} bytes, found {header.file_size}",
        )


def _refuse_gap(header: ShardHeader, order: npt.NDArray[np.int64], at: int, gap: int) -> NoReturn:
    name = header.names[order[at]]
    before = repr(header.names[order[at - 1]]) if at else "the header"
    if gap > 0:
        _damaged(header.path, f"{gap} bytes between {before} and tensor {name!r} belong to no tensor")
    _damaged(header.path, f"tensor {name!r} overlaps {before} by {-gap} bytes")


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
        f"a hole: bytes from {hole} on, inside tensor {header.names[last]!r}, were never written, "
        f"expected {header.file_size} bytes with content",
        "Download this file again; if its zeros are meant, rewrite it with `cp --sparse=never`.",
    )


def _damaged(path: Path, what: str) -> NoReturn:
    _fail(path, what, "The file is damaged or incomplete: download it again.")


def _fail(path: Path, what: str, advice: str) -> NoReturn:
    raise CheckpointError(f"{path}: {what}. {advice}")
