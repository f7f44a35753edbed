"""`model.safetensors.index.json`: which shard holds which tensor, and whether the shards agree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from k3.checkpoint.headers.names import Keys, NameTable, first_number_bits
from k3.checkpoint.headers.placements import Placements, RepeatedNameError, read_placements, refuse_repetition
from k3.errors import CheckpointError

Wanted = Callable[[str], bool] | Collection[str]

INDEX_FILE: Final = "model.safetensors.index.json"
MAX_INDEX_BYTES: Final = 1 << 30
_LISTED: Final = 5
_ADVICE: Final = "Download this file again."
_HOME_BITS: Final = 28


class _IndexFile(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


class _RawMap(msgspec.Struct):
    weight_map: msgspec.Raw


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Tensor i has the name with key `keys[i]` (uint64 [n]) and lies in shard `homes[i]` (uint32 [n])."""

    path: Path
    metadata: dict[str, Any]
    shards: dict[str, int]
    names: NameTable
    keys: Keys
    homes: npt.NDArray[np.uint32]

    @classmethod
    def read(cls, path: Path, names: NameTable) -> WeightMap:
        """The map in this file; CheckpointError for everything that is wrong with it."""
        try:
            size = path.stat().st_size
            if not path.is_file() or size > MAX_INDEX_BYTES:
                expected = f"a file of at most {MAX_INDEX_BYTES} bytes"
                raise CheckpointError(f"{path}: expected {expected}, found {size}. {_ADVICE}")
            placements, metadata = read_placements(path, names) or _read_whole(path, names)
            keys, homes = placements.columns()
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error}. Check the file's permissions.") from error
        except RepeatedNameError as error:
            found = f"{error.args[0]!r} occurs more than once"
            raise CheckpointError(f"{path}: expected every tensor once in weight_map, {found}. {_ADVICE}") from error
        for shard in placements.shards:
            _check_shard_name(shard, path)
        return cls(path, metadata, placements.shards, names, keys, homes)

    def needed(self, wanted: Wanted | None) -> list[str]:
        """The shards that hold a wanted tensor, sorted; all of them for None.

        A function is asked about one of the names that differ only behind their first number, in each shard.
        """
        if wanted is None:
            return sorted(self.shards)
        if callable(wanted):
            groups = first_number_bits(self.keys) << np.uint64(_HOME_BITS) | self.homes
            rows = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
            rows = rows[np.unique(groups[rows], return_index=True)[1]]
            homes = {int(self.homes[row]) for row in rows if wanted(self.names.name(int(self.keys[row])))}
        else:
            keys = [key for name in wanted if (key := self.names.key(name)) is not None]
            homes = set(self.homes[np.isin(self.keys, np.array(keys, np.uint64))].tolist())
        return sorted(shard for shard, home in self.shards.items() if home in homes)

    def locate(self, shards: Sequence[str], places: Sequence[Path]) -> list[Path]:
        """These shards, each in the first of these directories that has it.

        CheckpointError where one is in none of them, or in two of them with different sizes.
        """
        absent, found = [], []
        for shard in shards:
            copies = [place / shard for place in places if _exists(place / shard)]
            refuse_different_copies(copies)
            found += copies[:1]
            absent += [] if copies else [shard]
        if absent:
            raise CheckpointError(
                f"{self.path} names {len(absent)} files that are not in {' or '.join(map(str, places))}: "
                f"{_some(absent)}. Complete the download; --layers N needs only the files of the first N layers "
                "and of the top level."
            )
        return found

    def check(self, shard: Path, keys: Keys) -> None:
        """Refuse a shard that does not hold exactly the tensors that are placed in it."""
        expected = self.keys[self.homes == self.shards[shard.name]]
        if not np.array_equal(np.sort(expected), np.sort(keys)):
            self._refuse(shard, np.setdiff1d(expected, keys), np.setdiff1d(keys, expected))

    def _refuse(self, shard: Path, absent: Keys, extra: Keys) -> NoReturn:
        files = list(self.shards)

        def describe(key: int) -> str:
            home = np.flatnonzero(self.keys == np.uint64(key))
            placed = f"places it in {files[self.homes[home[0]]]}" if len(home) else "doesn't place it here"
            return f"{self.names.name(key)!r} is in this shard, but the index {placed}"

        problems = [
            f"{self.names.name(key)!r} is placed in this shard by the index but absent from it"
            for key in absent.tolist()
        ]
        problems += [describe(key) for key in extra[:_LISTED].tolist()] + [""] * (len(extra) - _LISTED)
        raise CheckpointError(
            f"{shard} and {self.path.name} disagree: {_some(problems)}. "
            "They belong to different checkpoints or one is damaged: download both again."
        )


def refuse_different_copies(copies: Sequence[Path]) -> None:
    """CheckpointError where files that stand for one shard have different sizes: one of them isn't that shard."""
    sizes = [path.stat().st_size for path in copies] if len(copies) > 1 else []
    for path, size in zip(copies, sizes, strict=False):
        if size != sizes[0]:
            raise CheckpointError(
                f"{copies[0]} and {path} have one name and different sizes: {sizes[0]} and {size} bytes. One is "
                "incomplete or of another checkpoint: remove it."
            )


def _read_whole(path: Path, names: NameTable) -> tuple[Placements, dict[str, Any]]:
    """A file that is written in an unusual way, or malformed."""
    raw = path.read_bytes()
    try:
        index = msgspec.json.decode(raw, type=_IndexFile)
        weight_map = msgspec.json.decode(raw, type=_RawMap).weight_map
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise CheckpointError(
            f"{path}: expected an object with a weight_map from names to shards, found: {error}. {_ADVICE}"
        ) from error
    if not index.weight_map:
        raise CheckpointError(f"{path}: expected a weight_map that names tensors, found an empty one. {_ADVICE}")
    refuse_repetition(bytes(weight_map), len(index.weight_map))
    placements = Placements(names)
    placements.add(index.weight_map)
    return placements, index.metadata or {}


def _check_shard_name(shard: str, path: Path) -> None:
    if Path(shard).name != shard or "\\" in shard or "\0" in shard or not shard.endswith(".safetensors"):
        raise CheckpointError(
            f"{path}: expected shards to be plain names of .safetensors files, found {shard[:80]!r}. "
            "Don't use this index: it may point outside its directory."
        )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # A name too long to be a file.
        return False


def _some(findings: Sequence[str]) -> str:
    """The first few of many findings, and how many more there are."""
    more = f"; and {len(findings) - _LISTED} more" if len(findings) > _LISTED else ""
    return "; ".join(findings[:_LISTED]) + more
