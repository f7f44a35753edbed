"""What the kernels run on: the instruction set and the number of threads."""

from __future__ import annotations

import os
from pathlib import Path

from k3.errors import MachineError, UsageError
from k3.kernels import _native

KNOWN_ISAS = ("scalar", "neon", "avx2", "avx512")
MAX_THREADS = 1024


def available_isas() -> tuple[str, ...]:
    """Names of the instruction sets that this machine and this build can run, the best one last."""
    return tuple(_native.available())


def choose_isa(isa: str | None) -> str:
    """The instruction set to use: the argument, else `K3_ISA`, else the best available.

    Raises:
        UsageError: no instruction set has that name.
        MachineError: the machine, or this build, lacks it.
    """
    source = "the argument isa" if isa is not None else "the environment variable K3_ISA"
    name = isa if isa is not None else os.environ.get("K3_ISA", "")
    available = available_isas()
    if not name:
        return available[-1]
    if name not in KNOWN_ISAS:
        raise UsageError(
            f"Unknown instruction set {name!r} in {source}: expected one of {', '.join(KNOWN_ISAS)}. "
            "Leave it out to use the best one that this machine has."
        )
    if name not in available:
        raise MachineError(
            f"The instruction set {name} asked for in {source} is not available here: this machine and this "
            f"build run {', '.join(available)}. Ask for one of these or leave it out; the bits are the same."
        )
    return name


def choose_threads(threads: int | None) -> int:
    """The number of threads: the argument, else `K3_THREADS`, else one per core this process may use.

    Raises:
        UsageError: not a whole number from 1 to 1024.
    """
    if threads is not None:
        return _checked(threads, str(threads), "the argument threads")
    text = os.environ.get("K3_THREADS", "")
    if not text:
        return physical_cores()
    try:
        value = int(text)
    except ValueError:
        value = 0
    return _checked(value, text, "the environment variable K3_THREADS")


def _checked(value: int, text: str, source: str) -> int:
    if not 1 <= value <= MAX_THREADS:
        raise UsageError(
            f"{source[0].upper()}{source[1:]} is {text!r}: expected a number of threads from 1 to {MAX_THREADS}."
        )
    return value


def physical_cores() -> int:
    """Cores that this process may run on, hardware threads of one core counted once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    return max(1, len({_core_of(cpu) for cpu in cpus}))


def _core_of(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)
