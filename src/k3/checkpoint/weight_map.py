"""`model.safetensors.index.json`: which shard holds which tensor, and whether the shards agree.

The map is turned into two columns at once, and its strings are dropped: they are far larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from k3.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from k3.checkpoint.names import Keys, NameTable

    Wanted = Callable[[str], bool] | Collection[str]

INDEX_FILE: Final = "model.safetensors.index.json"
MAX_INDEX_BYTES: Final = 1 << 30
_LISTED: Final = 5


class _IndexFile(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Tensor i has the name with key `keys[i]` (uint64 [n]) and lies in shard `homes[i]` (uint32 [n])."""

    path: Path
    metadata: dict[str, Any]
    shards: dict[str, int]
    needed: tuple[str, ...]
    names: NameTable
    keys: Keys
    homes: npt.NDArray[np.uint32]

    @classmethod
    def read(cls, path: Path, names: NameTable, wanted: Wanted | None) -> WeightMap:
        """The map in this file; `needed` are the shards that hold a wanted tensor, all of them for None."""
        index = _decode(path)
        homes_by_name: dict[str, int] = {}
        homes = [homes_by_name.setdefault(shard, len(homes_by_name)) for shard in index.weight_map.values()]
        # Copies, made side by side: each of these strings would keep the memory around it, a whole megabyte
        # of Python's allocator, from being returned when the other half million are gone.
        shards = {shard.encode().decode(): home for shard, home in homes_by_name.items()}
        for shard in shards:
            _check_shard_name(shard, path)
        needed = set(range(len(shards)))
        if wanted is not None:
            is_wanted = wanted if callable(wanted) else frozenset(wanted).__contains__
            needed = {home for name, home in zip(index.weight_map, homes, strict=True) if is_wanted(name)}
        return cls(
            path,
            index.metadata or {},
            shards,
            tuple(sorted(shard for shard, home in shards.items() if home in needed)),
            names,
            names.add(index.weight_map),
            np.array(homes, np.uint32),
        )

    def locate(self, places: Sequence[Path]) -> list[Path]:
        """The needed shards, each in the first of these directories that has it."""
        candidates = {shard: [place / shard for place in places] for shard in self.needed}
        found = {shard: next(filter(_exists, paths), None) for shard, paths in candidates.items()}
        absent = [shard for shard, path in found.items() if path is None]
        if absent:
            raise CheckpointError(
                f"{self.path} names {len(absent)} files that are not in {' or '.join(map(str, places))}: "
                f"{_some(absent)}. Complete the download; --layers N needs only the files of the first N layers "
                "and of the top level."
            )
        return [path for path in found.values() if path is not None]

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


def _decode(path: Path) -> _IndexFile:
    advice = "Download this file again."
    try:
        size = path.stat().st_size
        if not path.is_file() or size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path}: expected a file of at most {MAX_INDEX_BYTES} bytes, found {size}. {advice}")
        index = msgspec.json.decode(path.read_bytes(), type=_IndexFile)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}. Check the file's permissions.") from error
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise CheckpointError(
            f"{path}: expected an object with a weight_map from names to shards, found: {error}. {advice}"
        ) from error
    if not index.weight_map:
        raise CheckpointError(f"{path}: expected a weight_map that names tensors, found an empty one. {advice}")
    return index


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
