"""Where the files of a download go: which directory has each one, which drive has room for it.

Directories of one file system share its free space, which is counted once.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k3.errors import CheckpointError, MachineError

SHARD: Final = ".safetensors"
PART: Final = ".part"
"""What a file's name ends with until its checksum was found right."""


@dataclass(frozen=True, slots=True)
class Present:
    """What is there of a file: the directory, the bytes, and whether it has its final name."""

    directory: Path
    nbytes: int
    finished: bool


def look(name: str, nbytes: int, places: Iterable[Path]) -> Present | None:
    """What is there of a file of `nbytes` bytes: the first one that is finished, else the longest part.

    CheckpointError where a file of this name has another size.
    """
    begun = None
    for place in places:
        path = place / name
        if path.exists():
            found = path.stat().st_size if path.is_file() else None
            if found != nbytes:
                raise CheckpointError(
                    f"{path}: expected a file of {nbytes} bytes, found "
                    f"{'something else' if found is None else f'one of {found}'}. It is not a part of this download: "
                    "remove it, then run the same command again."
                )
            return Present(place, nbytes, finished=True)
        part = path.with_name(name + PART)
        if part.is_file():
            there = Present(place, min(part.stat().st_size, nbytes), finished=False)
            begun = there if begun is None or there.nbytes > begun.nbytes else begun
    return begun


def spread(
    sizes: Mapping[str, int], present: Mapping[str, Present], earlier: Mapping[str, Path], places: Sequence[Path]
) -> dict[str, Path]:
    """A directory for every file: `sizes` in bytes, by name.

    What is there of a file stays where it is, and an earlier choice is kept while it fits; parts of shards that can't
    be completed where they are leave, the shortest first. Of the others, what is no shard goes to the first directory;
    shards go, the largest first, to the drive with the most space left. So the choice depends on names, sizes and free
    space alone.

    Raises:
        MachineError: the drives lack the space.
    """
    drives = _Drives(places)
    chosen = {name: places[0] for name in sizes if not name.endswith(SHARD)}
    chosen |= {name: there.directory for name, there in present.items() if name in sizes}
    for name, place in chosen.items():
        drives.take(place, sizes[name] - (present[name].nbytes if name in present else 0))
    parts = [name for name in chosen if name in present and not present[name].finished and name.endswith(SHARD)]
    for name in sorted(parts, key=lambda name: (present[name].nbytes, name)):
        if drives.is_short(chosen[name]):
            drives.take(chosen.pop(name), -sizes[name])  # What it would need, and what it holds.
    waiting = [name for name in sizes if name not in chosen]
    kept = {name: earlier[name] for name in waiting if earlier.get(name) in drives.devices}
    if drives.fit(sizes, kept):
        chosen |= kept
        for name, place in kept.items():
            drives.take(place, sizes[name])
    for name in sorted((name for name in waiting if name not in chosen), key=lambda name: (-sizes[name], name)):
        place = drives.roomiest()
        chosen[name] = place
        drives.take(place, sizes[name])
    drives.refuse_lack()
    return chosen


class _Drives:
    """The free space behind some directories, less what was promised of it."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.devices = {place: place.stat().st_dev for place in places}
        self._homes = {device: place for place, device in reversed(self.devices.items())}
        self._free = {device: free_bytes(place) for device, place in self._homes.items()}
        self._left = dict(self._free)

    def take(self, place: Path, nbytes: int) -> None:
        self._left[self.devices[place]] -= nbytes

    def is_short(self, place: Path) -> bool:
        return self._left[self.devices[place]] < 0

    def fit(self, sizes: Mapping[str, int], choice: Mapping[str, Path]) -> bool:
        left = dict(self._left)
        for name, place in choice.items():
            left[self.devices[place]] -= sizes[name]
        return all(nbytes >= 0 for nbytes in left.values())

    def roomiest(self) -> Path:
        """Of the directories on the drive with the most space left, the first that was named."""
        return next(p for p, device in self.devices.items() if self._left[device] == max(self._left.values()))

    def refuse_lack(self) -> None:
        missing = -sum(min(left, 0) for left in self._left.values())
        if not missing:
            return
        needed = sum(self._free[device] - left for device, left in self._left.items())
        free = ", ".join(f"{self._free[device]:,} bytes are free at {place}" for device, place in self._homes.items())
        raise MachineError(
            f"The download still needs {needed:,} bytes; {free}; {missing:,} bytes of files find no room. "
            "Free some space, or name a directory on another drive with --extra-dir."
        )


def free_bytes(place: Path) -> int:
    """Bytes that this process may still write on a directory's drive."""
    return shutil.disk_usage(place).free
