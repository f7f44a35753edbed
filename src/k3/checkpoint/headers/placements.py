"""The weight map of an index file as columns, read in pieces: as strings it is far larger.

Each piece is a run of members `"tensor": "shard"`. In a text without backslashes every quote begins or ends a
string, so all members are found at once; only names that are not routed experts' become Python strings. A piece
that is written in an unusual way goes to a JSON parser.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt

from k3.checkpoint.headers.names import Keys, NameTable
from k3.checkpoint.headers.text_columns import Positions, Text

_PIECE: Final = 2 << 20
_SPACE: Final = b" \t\n\r"
_COLON: Final = re.compile(rb"[ \t\n\r]*:[ \t\n\r]*")
_COMMA: Final = re.compile(rb"[ \t\n\r]*,[ \t\n\r]*")
_HEAD: Final = re.compile(
    rb'[ \t\n\r]*\{[ \t\n\r]*(?:"metadata"[ \t\n\r]*:[ \t\n\r]*(\{[^{}]*\})[ \t\n\r]*,[ \t\n\r]*)?'
    rb'"weight_map"[ \t\n\r]*:[ \t\n\r]*\{'
)
_MAX_REST: Final = 8 * _PIECE


class RepeatedNameError(ValueError):
    """A name occurs more than once; it is the only argument."""


class Placements:
    """Columns that grow: the name with key `keys[i]` (uint64) is placed in shard number `homes[i]` (uint32).

    `shards` numbers the shards' names.
    """

    def __init__(self, names: NameTable) -> None:
        self.shards: dict[str, int] = {}
        self._names = names
        self._keys: list[Keys] = []
        self._homes: list[npt.NDArray[np.uint32]] = []

    def columns(self) -> tuple[Keys, npt.NDArray[np.uint32]]:
        """`keys` and `homes`; RepeatedNameError where a name is placed twice."""
        keys = np.concatenate([np.empty(0, np.uint64), *self._keys])
        ordered = np.sort(keys)
        repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
        if len(repeated):
            raise RepeatedNameError(self._names.name(int(ordered[repeated[0]])))
        return keys, np.concatenate([np.empty(0, np.uint32), *self._homes])

    def add(self, weight_map: Mapping[str, str]) -> None:
        """Add these names with their shards."""
        self._keys.append(self._names.add(weight_map.keys()))
        self._homes.append(np.fromiter(map(self._home, weight_map.values()), np.uint32, len(weight_map)))

    def add_members(self, raw: bytes) -> bool:
        """Add the members in this stretch of a JSON object; False where it is none. RepeatedNameError."""
        return self._add_columns(raw) or self._add_parsed(raw)

    def _add_columns(self, raw: bytes) -> bool:
        text = Text(raw)
        quotes = np.flatnonzero(text.codes == ord('"'))
        if b"\\" in raw or len(quotes) % 4 or not len(quotes) or not _is_uniform(text, quotes):
            return False
        begins, ends, shard_begins, shard_ends = quotes.reshape(-1, 4).T + np.array([[1], [0], [1], [0]])
        width = int(shard_ends[0] - shard_begins[0])
        if not width or (shard_ends - shard_begins != width).any():
            return False
        keys, behind, found = text.expert_names(begins, self._names)
        others = np.flatnonzero(~found | (behind != ends))
        shards = text.strings(shard_begins, width)
        firsts = np.flatnonzero(np.concatenate(([True], shards[1:] != shards[:-1])))
        try:
            keys[others] = self._names.add([raw[begins[i] : ends[i]].decode() for i in others.tolist()])
            homes = [self._home(raw[shard_begins[i] : shard_ends[i]].decode()) for i in firsts.tolist()]
        except UnicodeDecodeError:
            return False
        self._keys.append(keys)
        self._homes.append(np.repeat(np.array(homes, np.uint32), np.diff(firsts, append=len(shards))))
        return True

    def _add_parsed(self, raw: bytes) -> bool:
        members = b"{%b}" % raw
        try:
            weight_map = _weight_map_decoder.decode(members)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return False
        refuse_repetition(members, len(weight_map))
        self.add(weight_map)
        return bool(weight_map)

    def _home(self, shard: str) -> int:
        return self.shards.setdefault(shard, len(self.shards))


_weight_map_decoder = msgspec.json.Decoder(dict[str, str])
_metadata_decoder = msgspec.json.Decoder(dict[str, Any])


def read_placements(path: Path, names: NameTable) -> tuple[Placements, dict[str, Any]] | None:
    """The weight map and the metadata of this file; None where it isn't written in the usual way.

    The usual way is that of Python's json module, with the weight map last. RepeatedNameError; OSError.
    """
    placements = Placements(names)
    with path.open("rb", buffering=0) as file:
        start = _HEAD.match(file.read(_PIECE))
        if start is None:
            return None
        try:
            metadata = _metadata_decoder.decode(start[1] or b"{}")
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return None
        file.seek(start.end())
        sound = all(map(placements.add_members, _pieces(file)))
    return (placements, metadata) if sound else None


def refuse_repetition(members: bytes, count: int) -> None:
    """RepeatedNameError where this JSON object of strings, already found sound, has more than `count` members."""
    if members.count(b'"') == 4 * count:
        return
    repeated: list[str] = []

    def note(pairs: list[tuple[str, object]]) -> None:
        repeated.extend(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)

    json.loads(members, object_pairs_hook=note)
    if repeated:
        raise RepeatedNameError(repeated[0])


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """The rest of the file up to the closing braces, cut at commas between members; an empty piece is a failure."""
    rest = b""
    while len(rest) <= _MAX_REST and (piece := file.read(_PIECE)):
        rest += piece
        cut = rest.rfind(b'",')
        if cut >= 0:
            yield rest[: cut + 1]
            rest = rest[cut + 2 :]
    for _ in ("of the weight map", "of the file"):
        rest = rest.rstrip(_SPACE)
        rest = rest[:-1] if rest.endswith(b"}") else b""
    yield rest


def _is_uniform(text: Text, quotes: Positions) -> bool:
    """Whether all members have the same colon and the same comma, with the same space around, and no control codes.

    `quotes` are the positions of all quotes, four a member.
    """
    raw = text.raw
    colon = raw[quotes[1] + 1 : quotes[2]]
    comma = raw[quotes[3] + 1 : quotes[4]] if len(quotes) > 4 else b","
    around = (raw[: quotes[0]], raw[quotes[-1] + 1 :])
    if not _COLON.fullmatch(colon) or not _COMMA.fullmatch(comma) or any(part.strip(_SPACE) for part in around):
        return False
    ends, begins = quotes[1:-1:2] + 1, quotes[2::2]
    alike = (
        (begins[::2] - ends[::2] == len(colon)).all()
        and (begins[1::2] - ends[1::2] == len(comma)).all()
        and text.literal(ends[::2], colon).all()
        and text.literal(ends[1::2], comma).all()
    )
    members = len(quotes) // 4
    outside = members * _controls(colon) + (members - 1) * _controls(comma) + sum(map(_controls, around))
    return bool(alike) and _controls(raw) == outside


def _controls(raw: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(raw, np.uint8) < ord(" ")))
