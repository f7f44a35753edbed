"""The machine, as this process may use it: memory above all, processors, file systems."""

from __future__ import annotations

import os
import platform
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


def processor_name() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def allowed_cpus() -> int:
    """Hardware threads that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(process: Path = Path("/proc/self/cgroup"), root: Path = _ROOT) -> float | None:
    """Processors' worth of time that the tightest control group grants; None without a limit."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        home = root / "cpu" if controllers else root
        for place in _places(home, path):
            quota, period = _quota(place, old=bool(controllers))
            if quota is not None and quota > 0 and period:
                quotas.append(quota / period)
    return min(quotas, default=None)


def huge_pages() -> str | None:
    """The system's setting of transparent huge pages: always, madvise or never; None where there is none."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


def file_system(path: Path) -> str:
    """The kind of file system that holds an existing path, such as ext4."""
    place = path.resolve()
    found = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((found[folder] for folder in (place, *place.parents) if folder in found), "unknown")


def _limits(home: Path, path: str, limit_name: str, usage_name: str, file_name: str) -> list[GroupMemory]:
    """The limits from a group up to its root; a container sees its own group as the root."""
    found = []
    for place in _places(home, path):
        limit = _number(place / limit_name)
        if limit is not None and limit < _UNLIMITED:
            reclaimable = _statistics(place / "memory.stat").get(file_name, 0)
            found.append(GroupMemory(limit, max(0, (_number(place / usage_name) or 0) - reclaimable)))
    return found


def _places(home: Path, path: str) -> list[Path]:
    """The folders of a group and of those above it."""
    group = home / path.lstrip("/")
    places = [group, *group.parents][: len(Path(path).parts)] if group.is_dir() else []
    return list(dict.fromkeys([*places, home]))


def _quota(place: Path, *, old: bool) -> tuple[int | None, int | None]:
    """Microseconds of processor time in each period, and the period; None or -1 without a limit."""
    if old:
        return _number(place / "cpu.cfs_quota_us"), _number(place / "cpu.cfs_period_us")
    try:
        quota, period = (place / "cpu.max").read_text().split()
        return int(quota), int(period)
    except (OSError, ValueError):
        return None, None


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
