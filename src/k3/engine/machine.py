"""The machine's memory, as this process may use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

AUTO_SHARE = 0.92
"""Of the memory that the machine calls available; the rest is left to everything else that runs."""

_UNLIMITED = 1 << 60
_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """A control group's limit and what is charged to it beyond reclaimable file pages, in bytes."""

    limit: int
    used: int

    @property
    def margin(self) -> int:
        """What the kernel may charge beside resident memory, kept free."""
        return max(3 * self.limit // 100, 48 << 20)


def resident_bytes() -> int:
    """What this process holds in memory."""
    return int(psutil.Process().memory_info().rss)


def memory_limit(asked: int | None = None, group: GroupMemory | None = None) -> int:
    """Bytes that this process may hold at its peak: what was asked for, within what the machine has.

    A control group's limit is lowered by its margin: memory asked for that equals the limit means that much less.
    """
    own = resident_bytes()
    available = psutil.virtual_memory().available
    bound = available + own
    if group is not None:
        bound = min(bound, group.limit - group.margin - max(0, group.used - own))
    if asked is not None:
        return min(asked, bound)
    return min(bound, int(AUTO_SHARE * available) + own)


def group_memory(process: Path = Path("/proc/self/cgroup"), root: Path = _ROOT) -> GroupMemory | None:
    """The tightest memory limit of the control groups (v2 or v1) that this process is in; None without one."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names, home = ("memory.max", "memory.current", "inactive_file"), root
        elif "memory" in controllers.split(","):
            names, home = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), root / "memory"
        else:
            continue
        found += _limits(home, path, *names)
    return min(found, key=lambda group: group.limit, default=None)


def _limits(home: Path, path: str, limit_name: str, usage_name: str, file_name: str) -> list[GroupMemory]:
    """The limits from a group up to its root; a container sees its own group as the root."""
    group = home / path.lstrip("/")
    places = [group, *group.parents][: len(Path(path).parts)] if group.is_dir() else []
    found = []
    for place in dict.fromkeys([*places, home]):
        limit = _number(place / limit_name)
        if limit is not None and limit < _UNLIMITED:
            reclaimable = _statistics(place / "memory.stat").get(file_name, 0)
            found.append(GroupMemory(limit, max(0, (_number(place / usage_name) or 0) - reclaimable)))
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistics(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return {}
