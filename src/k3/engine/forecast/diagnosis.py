"""What this machine has, each finding with a verdict and what to do about it. Needs no native extension.

What a model makes of it is in `k3.engine.forecast.prognosis`.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path

import psutil

from k3.engine import machine

DOWNLOAD_BYTES = 1_561_000_000_000
"""The released checkpoint, its small files included."""
COMFORTABLE_BYTES = 16 * 10**9
"""Below this nearly all of the trunk is read again for every token."""

_BEST_ISAS = ("avx2", "avx512", "neon")


class Verdict(Enum):
    """Whether a finding is fine, makes a run slow, or isn't there."""

    OK = "ok"
    SLOW = "slow"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. Where it is `fatal` nothing can run."""

    what: str
    value: str
    verdict: Verdict
    advice: str = ""
    fatal: bool = False


def machine_checks() -> Iterator[Check]:
    """Findings that need no model."""
    yield _system()
    yield _python()
    yield from _engine()
    yield _cores()
    yield _memory()
    yield _huge_pages()


def download_check(place: Path) -> Check:
    """Room for the released checkpoint at `place` or, where that isn't there yet, above it."""
    free = shutil.disk_usage(existing(place)).free
    value = f"{gigabytes(free)} free at {existing(place)}, the released checkpoint takes {gigabytes(DOWNLOAD_BYTES)}"
    if free >= DOWNLOAD_BYTES:
        return Check("disk to download", value, Verdict.OK)
    advice = "name a directory on a larger drive, or spread the shards: k3 download DIR --extra-dir DIR2"
    return Check("disk to download", value, Verdict.MISSING, advice)


def pack_check(place: Path, nbytes: int) -> Check:
    """Room for a packed trunk of about `nbytes` at `place`."""
    free = shutil.disk_usage(existing(place)).free
    value = f"{gigabytes(free)} free at {existing(place)}, a packed trunk takes about {gigabytes(nbytes)}"
    if free >= nbytes:
        return Check("disk to pack", value, Verdict.OK)
    return Check("disk to pack", value, Verdict.MISSING, "packing is optional; the trunk may lie on any drive")


def existing(place: Path) -> Path:
    """The place itself or the nearest folder above it that exists."""
    absolute = place.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.exists())


def gigabytes(nbytes: float) -> str:
    """Bytes as people read them, in MB, GB or TB."""
    if nbytes >= 1e12:
        return f"{nbytes / 1e12:.2f} TB"
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"


def _system() -> Check:
    value = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform.startswith("linux"):
        return Check("system", value, Verdict.OK)
    return Check("system", value, Verdict.SLOW, "tested on Linux only; reads may go through the system's cache")


def _python() -> Check:
    return Check("Python", platform.python_version(), Verdict.OK)


def _engine() -> Iterator[Check]:
    """The processor, and the native extension that uses it."""
    name = machine.processor_name()
    try:
        isas: tuple[str, ...] = import_module("k3.kernels").available_isas()
    except ImportError as error:
        yield Check("processor", name, Verdict.OK)
        advice = "install the package again, for this Python and this machine"
        yield Check("native extension", f"can't be imported: {error}", Verdict.MISSING, advice, fatal=True)
        return
    yield Check("processor", name, Verdict.OK)
    if isas[-1] in _BEST_ISAS:
        yield Check("instruction sets", ", ".join(isas), Verdict.OK)
    else:
        yield Check("instruction sets", ", ".join(isas), Verdict.SLOW, "a processor with AVX2 is many times as fast")


def _cores() -> Check:
    allowed, quota = machine.allowed_cpus(), machine.cpu_quota()
    all_cpus = psutil.cpu_count() or allowed
    value = f"{_physical_cores()} cores, {allowed} of {all_cpus} hardware threads allowed"
    if quota is not None and quota < _physical_cores():
        advice = f"the control group grants {quota:.3g} processors' time: run with --threads {max(1, int(quota))}"
        return Check("cores", value, Verdict.SLOW, advice)
    return Check("cores", value, Verdict.OK)


def _physical_cores() -> int:
    try:
        return int(import_module("k3.kernels.select").physical_cores())
    except ImportError:
        return psutil.cpu_count(logical=False) or machine.allowed_cpus()


def _memory() -> Check:
    memory, group = psutil.virtual_memory(), machine.group_memory()
    limit = machine.memory_limit(None, group)
    value = f"{gigabytes(memory.available)} of {gigabytes(memory.total)} available"
    if group is not None:
        value += f", control group's limit {gigabytes(group.limit)}"
    value += f": k3 takes up to {gigabytes(limit)}"
    if limit < COMFORTABLE_BYTES:
        return Check("memory", value, Verdict.SLOW, "every GB more is a GB less to read for each token")
    return Check("memory", value, Verdict.OK)


def _huge_pages() -> Check:
    setting = machine.huge_pages()
    if setting in ("always", "madvise"):
        return Check("huge pages", setting, Verdict.OK)
    advice = "let programs ask for them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root"
    return Check("huge pages", setting or "the system has none", Verdict.SLOW, advice)
