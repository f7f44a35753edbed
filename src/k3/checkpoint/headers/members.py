"""The members of a shard header's JSON object: tensors with their kinds and places, and the metadata.

Those that describe routed experts, nearly all of them, are parsed as columns (`text_columns`); what
stands between them goes to a JSON parser. Where anything is wrong or only unusual, the parser gets the whole header,
so it alone says what an error is.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from k3.checkpoint.headers.kinds import DTYPE_BITS, TensorKind
from k3.checkpoint.headers.names import Keys, NameTable
from k3.checkpoint.headers.text_columns import Mask, Positions, Text
from k3.errors import CheckpointError

_METADATA: Final = "__metadata__"
_OFFSETS: Final = b'"data_offsets":['
_OFFSET_DIGITS: Final = 15
_MAX_FORMS: Final = 32
"""Pairs of dtype and shape of experts' tensors in one header that are tried as columns."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Info(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_entries_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_info_decoder = msgspec.json.Decoder(_Info)
_metadata_decoder = msgspec.json.Decoder(dict[str, str])


class Members:
    """Columns that grow: tensor i has key `keys[i]`, kind `kinds[kind_ids[i]]` and first byte `begins[i]`.

    `keys` is uint64 [n]; `kind_ids` and `begins`, counted from the end of the header, are int64 [n].
    """

    def __init__(self, table: NameTable, path: Path) -> None:
        self.kinds: list[TensorKind] = []
        self.metadata: dict[str, str] | None = None
        self._table = table
        self._path = path
        self._kind_ids: dict[tuple[str, tuple[int, ...]], int] = {}
        self._parts: list[tuple[Keys, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []

    @property
    def keys(self) -> Keys:
        return np.concatenate([part[0] for part in self._parts])

    @property
    def kind_ids(self) -> npt.NDArray[np.int64]:
        return np.concatenate([part[1] for part in self._parts])

    @property
    def begins(self) -> npt.NDArray[np.int64]:
        return np.concatenate([part[2] for part in self._parts])

    def parse(self, raw: bytes) -> None:
        """Add the members of this JSON object; CheckpointError where it isn't one or a member can't be."""
        try:
            entries = _entries_decoder.decode(raw)
            metadata = _metadata_decoder.decode(entries.pop(_METADATA)) if _METADATA in entries else None
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            damaged(self._path, f"expected a JSON object that maps names to tensors, found malformed JSON: {error}")
        places = np.array([self._place(name, value) for name, value in entries.items()], np.int64).reshape(-1, 2)
        _refuse_duplicates(raw, list(entries), metadata, self._path)
        if metadata is not None and self.metadata is not None:
            damaged(self._path, f"expected every name once, {_METADATA!r} occurs more than once in the header")
        self.metadata = metadata if self.metadata is None else self.metadata
        self._parts.append((self._table.add(entries), places[:, 0], places[:, 1]))

    def parse_experts(self, text: Text, starts: Positions, ends: Positions) -> Mask:
        """Add those of the members in [starts, ends) that are routed experts' and written in the usual way."""
        keys, cursor, sound = text.expert_names(starts + 1, self._table)
        rows = np.flatnonzero(sound & text.literal(starts, b'"'))
        kind_ids, cursor = self._match_forms(text, cursor[rows], ends[rows])
        begins, cursor, first = text.numbers(cursor, _OFFSET_DIGITS)
        comma = text.literal(cursor, b",")
        stops, cursor, second = text.numbers(cursor + 1, _OFFSET_DIGITS)
        last = text.literal(cursor, b"]}") & (cursor + 2 == ends[rows])
        sizes = np.array([*(kind.nbytes for kind in self.kinds), -1], np.int64)[kind_ids]
        usable = (kind_ids >= 0) & first & comma & second & last & (stops - begins == sizes)
        self._parts.append((keys[rows][usable], kind_ids[usable], begins[usable]))
        found = np.zeros(len(starts), np.bool_)
        found[rows[usable]] = True
        return found

    def holds_a_name_twice(self) -> bool:
        """Whether members that were added in several parts have the same name."""
        keys = np.sort(self.keys)
        return bool((keys[1:] == keys[:-1]).any())

    def _match_forms(self, text: Text, at: Positions, ends: Positions) -> tuple[npt.NDArray[np.int64], Positions]:
        """Kinds of the members whose names end at `at`, -1 for unusual ones, and where their offsets begin.

        What stands between name and offsets differs in the kind only: each form is parsed once, and compared.
        """
        kind_ids, cursor = np.full(len(at), -1, np.int64), at.copy()
        left = np.arange(len(at))
        for _ in range(_MAX_FORMS):
            if not len(left):
                break
            first = left[0]
            begin, end = int(at[first]), int(ends[first])
            form = bytes(text.raw[begin : text.raw.find(_OFFSETS, begin, end) + len(_OFFSETS)])
            kind = self._kind_of_form(form)
            if kind is None:
                left = left[1:]
                continue
            alike = text.literal(at[left], form)
            kind_ids[left[alike]] = kind
            cursor[left[alike]] += len(form)
            left = left[~alike]
        return kind_ids, cursor

    def _kind_of_form(self, form: bytes) -> int | None:
        if not form.startswith(b'":{') or not form.endswith(_OFFSETS) or form.count(b":") != 4 or b"\\" in form:
            return None
        try:
            info = _info_decoder.decode(form[2:] + b"0,0]}")
            return self._kind("", info.dtype, info.shape)
        except (msgspec.DecodeError, RecursionError, UnicodeError, CheckpointError):
            return None

    def _place(self, name: str, value: msgspec.Raw) -> tuple[int, int]:
        """The kind of this entry and the first byte of its data."""
        try:
            info = _info_decoder.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            damaged(self._path, f"tensor {name!r}: {error}")
        kind = self._kind(name, info.dtype, info.shape)
        begin, end = info.data_offsets
        expected = self.kinds[kind].nbytes
        if end - begin != expected:
            damaged(
                self._path,
                f"tensor {name!r}: expected {expected} bytes for {info.dtype} {list(info.shape)}, "
                f"data_offsets [{begin}, {end}] hold {end - begin}",
            )
        return kind, begin

    def _kind(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        kind = self._kind_ids.get((dtype, shape))
        if kind is None:
            self.kinds.append(TensorKind(dtype, shape, self._size(name, dtype, shape)))
            kind = self._kind_ids[dtype, shape] = len(self.kinds) - 1
        return kind

    def _size(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        bits = DTYPE_BITS.get(dtype)
        if bits is None:
            damaged(self._path, f"tensor {name!r}: expected one of {', '.join(DTYPE_BITS)}, found dtype {dtype!r}")
        if len(shape) > 16:
            damaged(self._path, f"tensor {name!r}: expected at most 16 dimensions, found {len(shape)}")
        total = bits * math.prod(shape)
        if total % 8 or total >= 2**62:
            damaged(self._path, f"tensor {name!r}: {dtype} {list(shape)} is not a possible number of whole bytes")
        return total // 8


def read_members(raw: bytes, table: NameTable, path: Path) -> Members:
    """The members of this header, which begins with a brace; CheckpointError for everything that is wrong."""
    members = _in_columns(raw, table, path)
    if members is None:
        members = Members(table, path)
        members.parse(raw)
    return members


def damaged(path: Path, what: str) -> NoReturn:
    """Raise the CheckpointError of a damaged file."""
    raise CheckpointError(f"{path}: {what}. The file is damaged or incomplete: download it again.")


def _in_columns(raw: bytes, table: NameTable, path: Path) -> Members | None:
    """The members, where routed experts' can be told from the others; None where a parser must read all.

    Members are parted wherever a brace, a comma and a quote follow each other. That may be inside a string, but
    then neither side is a member that could be parsed alone. Members that can, joined by commas, are an object.
    """
    end = len(raw.rstrip(b" ")) - 1
    if raw[end - 1 : end + 1] != b"}}":
        return None
    text, members = Text(raw), Members(table, path)
    codes = text.codes
    gaps = np.flatnonzero((codes[:-2] == ord("}")) & (codes[1:-1] == ord(",")) & (codes[2:] == ord('"')))
    starts, ends = np.concatenate(([1], gaps + 2)), np.concatenate((gaps + 1, [end]))
    found = members.parse_experts(text, starts, ends)
    if not found.any():
        return None
    try:
        for first, last in _runs(~found):
            members.parse(b"{%b}" % raw[starts[first] : ends[last]])
    except CheckpointError:
        return None
    return None if members.holds_a_name_twice() else members


def _runs(mask: Mask) -> Iterator[tuple[int, int]]:
    """First and last place of each stretch that is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return ((int(begin), int(end) - 1) for begin, end in edges.reshape(-1, 2))


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
        damaged(path, f"expected every name once, {repeated[0]!r} occurs more than once in the header")
