"""What a model makes of this machine: whether it fits, how fast its drives are, what a token will take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from k3.engine.forecast.diagnosis import Check, Verdict, download_check, gigabytes, pack_check
from k3.engine.forecast.prediction import predict
from k3.engine.forecast.released import released_needs
from k3.engine.forecast.speeds import Speeds, measure_arithmetic, measure_drives, model_files
from k3.engine.loading import Bound, LoadOptions, bind_checkpoint
from k3.engine.machine import file_system, group_memory, memory_limit
from k3.engine.plan import MemoryPlan, MemoryRequest, Needs, plan_memory
from k3.errors import K3Error, MachineError
from k3.kernels import Kernels
from k3.storage.disk_bench import largest_on_each_drive, takes_direct_reads
from k3.text.tokenizer import load_tokenizer

SLOW_DRIVE = 2e9
"""Bytes/s below which a drive counts as slow."""
SLOW_TOKEN = 30.0
"""Seconds above which a token counts as slow."""

_TYPICAL_DRIVES = (3e9, 7e9)
_PACKED_SHARE = 0.76
_WORTH_PACKING = 10**9

Note = Callable[[str], None]
"""Is told what takes a moment."""


@dataclass
class Prognosis:
    """Findings about a model. `seconds_per_token` is None where it can't be told.

    `is_there`: something is at its place; `is_bound`: its headers are right; `has_tokenizer`: it takes texts.
    """

    checks: list[Check] = field(default_factory=list)
    seconds_per_token: float | None = None
    is_there: bool = False
    is_bound: bool = False
    has_tokenizer: bool = False


def released_prognosis(note: Note) -> Prognosis:
    """For the released model, whose files aren't here: with drives of ordinary speeds."""
    found = Prognosis()
    needs = released_needs()
    plan = _planned(found, needs, MemoryRequest())
    if plan is not None:
        note("measuring memory and arithmetic")
        memory, multiply_adds = measure_arithmetic(Kernels())
        parts = [
            f"{predict(needs, plan, Speeds(drive, memory, multiply_adds)).seconds:.3g} s a token from a drive of "
            f"{drive / 1e9:g} GB/s"
            for drive in _TYPICAL_DRIVES
        ]
        advice = "k3 doctor MODEL measures the drive that a checkpoint is on"
        found.checks.append(Check("Kimi K3 here", ", ".join(parts), Verdict.OK, advice))
    return found


def model_prognosis(directory: Path, loading: LoadOptions, note: Note) -> Prognosis:
    """For the checkpoint in `directory`."""
    found = Prognosis(is_there=directory.is_file() or (directory.is_dir() and any(directory.iterdir())))
    try:
        bound = bind_checkpoint(directory, loading)
    except (K3Error, OSError) as error:
        advice = "`k3 verify` says more about it" if found.is_there else "download it"
        found.checks.append(Check("checkpoint", str(error), Verdict.MISSING, advice, fatal=True))
        if not found.is_there:
            found.checks.append(download_check(directory))
        return found
    found.is_bound = True
    found.checks.append(_checkpoint(bound))
    found.checks.append(_tokenizer(found, directory))
    if not bound.synthetic and loading.trunk is None and bound.needs.matrix_bytes > _WORTH_PACKING:
        found.checks.append(pack_check(directory, round(_PACKED_SHARE * bound.needs.matrix_bytes)))
    plan = _planned(found, bound.needs, loading.memory)
    if plan is not None:
        _speed(found, bound, plan, note)
    return found


def _checkpoint(bound: Bound) -> Check:
    value = (
        f"{bound.layers} layers, {bound.layout.tensor_count:,} tensors, {bound.needs.experts:,} experts; headers and "
        "sizes are right"
    )
    return Check("checkpoint", value, Verdict.OK, "its weights are made up" if bound.synthetic else "")


def _tokenizer(found: Prognosis, directory: Path) -> Check:
    try:
        tokenizer = load_tokenizer(directory)
    except K3Error as error:
        return Check("tokenizer", "its files can't be used", Verdict.MISSING, f"{error} Until then --ids works.")
    found.has_tokenizer = True
    return Check("tokenizer", f"{tokenizer.n_vocab:,} ids", Verdict.OK)


def _planned(found: Prognosis, needs: Needs, request: MemoryRequest) -> MemoryPlan | None:
    """The plan of a run, as a finding; None if it doesn't fit."""
    try:
        plan = plan_memory(needs, request, memory_limit(None, group_memory()))
    except MachineError as error:
        found.checks.append(Check("memory plan", str(error), Verdict.MISSING, "free some memory", fatal=True))
        return None
    kept = sum(block.nbytes for block in plan.pinned)
    value = (
        f"{gigabytes(plan.total_bytes)}; it keeps {100 * kept / needs.matrix_bytes:.3g} % of trunk and head and "
        f"{plan.expert_slots:,} of {needs.experts:,} experts, and has room for {plan.context:,} positions"
    )
    found.checks.append(Check("memory plan", value, Verdict.OK, "`k3 plan` shows it item by item"))
    return plan


def _speed(found: Prognosis, bound: Bound, plan: MemoryPlan, note: Note) -> None:
    """Drives, arithmetic, and what a token will take."""
    found.checks += _file_systems(bound)
    note("measuring the drive")
    report = measure_drives(bound)
    drive = None if isinstance(report, str) else report.rate
    honest = not isinstance(report, str) and report.honest
    found.checks.append(_drive(drive, honest=honest, reason=report if isinstance(report, str) else ""))
    note("measuring memory and arithmetic")
    speeds = Speeds(drive, *measure_arithmetic(Kernels()))
    arithmetic = f"memory {speeds.memory / 1e9:.3g} GB/s, {speeds.multiply_adds / 1e9:.3g} G multiply-adds/s"
    found.checks.append(Check("arithmetic", arithmetic, Verdict.OK))
    prediction = predict(bound.needs, plan, speeds)
    seconds = found.seconds_per_token = prediction.seconds
    if seconds is None:
        value = f"unknown: a token reads {gigabytes(prediction.read.total)}, from a drive of unknown speed"
        advice = "`k3 plan` predicts it for a drive of X GB/s with --disk-gbps X"
        found.checks.append(Check("expected speed", value, Verdict.MISSING, advice))
        return
    shown = f"{seconds:.3g} s" if seconds >= 0.01 else "below 0.01 s"
    value = f"{shown} a token, bound by {prediction.bound}"
    if seconds > SLOW_TOKEN:
        advice = "fewer bytes to read help: more memory, a packed trunk (`k3 pack`), shards on a second drive"
        found.checks.append(Check("expected speed", value, Verdict.SLOW, advice))
    else:
        found.checks.append(Check("expected speed", value, Verdict.OK))


def _file_systems(bound: Bound) -> Iterator[Check]:
    for path in largest_on_each_drive(model_files(bound)):
        where = f"{file_system(path)} at {path.parent}"
        if takes_direct_reads(path):
            yield Check("file system", f"{where}, takes direct reads", Verdict.OK)
        else:
            advice = "ext4 and XFS take them; through the page cache reads are slower and crowd memory"
            yield Check("file system", f"{where} refuses direct reads", Verdict.SLOW, advice)


def _drive(rate: float | None, *, honest: bool, reason: str) -> Check:
    if rate is None:
        return Check("drive", f"not measured: {reason}", Verdict.MISSING)
    value = f"{rate / 1e9:.2f} GB/s at random, as the engine reads"
    if not honest:
        return Check("drive", value, Verdict.SLOW, "these bytes came from memory in part: `k3 bench disk` says more")
    if rate < SLOW_DRIVE:
        advice = "an NVMe drive gives 3 to 7 GB/s; other work on the drive slows it too"
        return Check("drive", value, Verdict.SLOW, advice)
    return Check("drive", value, Verdict.OK)
