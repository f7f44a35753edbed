"""`k3 plan MODEL`: what a run will hold in memory, and what a token will cost, without loading a weight."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3.cli import options
from k3.cli.inputs import load_options
from k3.cli.terminal import Terminal, json_text

if TYPE_CHECKING:
    from k3.cli.progress import Progress
    from k3.engine.forecast.prediction import Prediction
    from k3.engine.forecast.speeds import Speeds
    from k3.engine.loading import Bound, LoadOptions
    from k3.engine.plan import MemoryPlan, Needs
    from k3.storage.disk_bench import DiskReport

_GIGA = 10**9


@dataclass(frozen=True, slots=True)
class Measured:
    """Speeds and where each comes from: "measured", "given", or why it isn't known."""

    speeds: Speeds
    drive: str
    memory: str
    multiply_adds: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "k3 plan MODEL [options]"
    options.add_model(parser)
    options.add_loading(parser)
    parser.add_argument(
        "--sequences", metavar="N", type=options.positive, default=1, help="live at a time, a token each a step"
    )
    speeds = parser.add_argument_group(
        "speeds",
        "What is not given is measured. With all three the plan may be another machine's, whatever this one has.",
    )
    speeds.add_argument("--disk-gbps", metavar="X", type=rate, help="GB/s of the drives that hold the model")
    speeds.add_argument("--memory-gbps", metavar="Y", type=rate, help="GB/s that all threads read from memory")
    speeds.add_argument("--gmacs", metavar="Z", type=rate, help="10^9 multiply-adds/s of all threads, MXFP4, one row")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_quiet(parser)


def execute(arguments: argparse.Namespace) -> int:
    from k3.api import model_path
    from k3.cli.progress import Progress
    from k3.engine.forecast.prediction import predict
    from k3.engine.loading import bind_checkpoint
    from k3.engine.machine import group_memory, memory_limit
    from k3.engine.plan import plan_memory

    wanted = planned_options(arguments)
    bound = bind_checkpoint(model_path(arguments.model), wanted)
    tokenizer = _tokenizer(arguments)
    with Terminal(quiet=arguments.quiet) as terminal:
        limit = memory_limit(wanted.memory.total, group_memory())
        if _is_elsewhere(arguments):
            limit = wanted.memory.total or limit
        plan = plan_memory(bound.needs, wanted.memory, limit)
        del tokenizer
        found = measure(arguments, bound, Progress(terminal, verbose=False))
        prediction = predict(bound.needs, plan, found.speeds, arguments.sequences)
        if arguments.json:
            terminal.write(json_text(_record(bound.needs, plan, prediction, found, arguments.sequences)))
        else:
            lines = [*plan_lines(bound.needs, plan, arguments.sequences), "", *prediction_lines(prediction, found)]
            terminal.write("\n".join(lines))
    return 0


def _is_elsewhere(arguments: argparse.Namespace) -> bool:
    """Whether all speeds are given: the plan is for another machine, so --memory is taken at its word."""
    return None not in (arguments.disk_gbps, arguments.memory_gbps, arguments.gmacs)


def rate(value: str) -> float:
    """A speed above zero.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {value[:40]!a}")
    return number


def planned_options(arguments: argparse.Namespace) -> LoadOptions:
    """What a run with the same options would load, for as many sequences as were asked for.

    Raises:
        UsageError: a size means nothing.
    """
    from dataclasses import replace

    loading = load_options(arguments)
    return replace(loading, memory=replace(loading.memory, sequences=arguments.sequences))


def measure(arguments: argparse.Namespace, bound: Bound, progress: Progress) -> Measured:
    """The speeds that were given, and measurements of the others."""
    from k3.engine.forecast.speeds import Speeds, measure_arithmetic, measure_drives
    from k3.kernels import Kernels

    drive, drive_source = arguments.disk_gbps, "given"
    if drive is None:
        progress.note("measuring the drive")
        drive, drive_source = _drive_speed(measure_drives(bound, direct=not arguments.no_direct))
    else:
        drive *= _GIGA
    memory, multiply_adds = arguments.memory_gbps, arguments.gmacs
    sources = ["measured" if value is None else "given" for value in (memory, multiply_adds)]
    measured = (0.0, 0.0)
    if "measured" in sources:
        progress.note("measuring memory and arithmetic")
        measured = measure_arithmetic(Kernels(arguments.threads))
    speeds = Speeds(
        drive,
        measured[0] if memory is None else memory * _GIGA,
        measured[1] if multiply_adds is None else multiply_adds * _GIGA,
    )
    return Measured(speeds, drive_source, *sources)


def _drive_speed(report: DiskReport | str) -> tuple[float | None, str]:
    """Bytes/s, and how they are known or why not."""
    if isinstance(report, str):
        return None, f"unknown: {report}; --disk-gbps gives it"
    return report.rate, "measured" if report.honest else "measured, but partly from the system's cache"


def plan_lines(needs: Needs, plan: MemoryPlan, sequences: int = 1) -> Iterator[str]:
    """The itemised plan for people."""
    from k3.cli.progress import size

    yield f"memory plan: {size(plan.total_bytes)} of the {size(plan.limit)} to be had"
    for name, nbytes in plan.items.items():
        yield f"  {name:<30}{size(nbytes):>10}"
    kept = sum(block.nbytes for block in plan.pinned)
    share = 100 * kept / needs.matrix_bytes
    yield (
        f"kept between tokens: {size(kept)} of {size(needs.matrix_bytes)} of trunk and head ({share:.3g} %), "
        f"{plan.expert_slots:,} of {needs.experts:,} experts"
    )
    each = f" for each of {sequences} sequences" if sequences > 1 else ""
    rows = f"{plan.chunk} prompt row{'' if plan.chunk == 1 else 's'}"
    yield f"context: {plan.context:,} positions{each}; {rows} a step"


def prediction_lines(prediction: Prediction, found: Measured) -> Iterator[str]:
    """What a step costs, for people."""
    from k3.cli.progress import clock, size

    rows = prediction.rows
    what = "a token" if rows == 1 else f"a step, {rows} tokens"
    yield f"{what:<20}{'needed':>12}{'in memory':>12}{'read':>12}"
    needed, read = asdict(prediction.needed), asdict(prediction.read)
    for name in ("trunk", "experts", "head", "embedding"):
        yield _bytes_line(name, needed[name], read[name])
    yield _bytes_line("together", prediction.needed.total, prediction.read.total)
    if prediction.hits_are_estimated:
        yield (
            f"experts in memory: about {100 * prediction.hit_rate:.1f} %, an estimate from a recorded run of the "
            "released model"
        )
    speeds = found.speeds
    drive = found.drive if speeds.drive is None else f"{size(speeds.drive)}/s ({found.drive})"
    yield (
        f"speeds: drive {drive}; memory {size(speeds.memory)}/s ({found.memory}); "
        f"{speeds.multiply_adds / _GIGA:.3g} G multiply-adds/s ({found.multiply_adds})"
    )
    seconds = prediction.seconds_per_token
    if seconds is None or prediction.seconds is None:
        yield "seconds a token: unknown, for want of the drive's speed"
        return
    parts = [f"arithmetic and memory {prediction.arithmetic_seconds:.3g} s"]
    if prediction.drive_seconds is not None and prediction.read.total > prediction.read.embedding:
        parts.insert(0, f"drive {prediction.drive_seconds:.3g} s")
    step = "" if rows == 1 else f" ({prediction.seconds:.3g} s a step)"
    shown = f"{seconds:.3g}" if seconds >= 0.01 else "below 0.01"
    yield f"seconds a token: {shown}{step}, bound by {prediction.bound} ({', '.join(parts)})"
    if prediction.load_seconds:
        yield f"before the first token: {clock(prediction.load_seconds)} to load what is kept"


def _bytes_line(name: str, needed: int, read: int) -> str:
    from k3.cli.progress import size

    return f"  {name:<18}{size(needed):>12}{size(needed - read):>12}{size(read):>12}"


def _tokenizer(arguments: argparse.Namespace) -> object:
    """The tokenizer that a run would load, so that its memory is counted; None without one."""
    from k3.api import model_path
    from k3.text.tokenizer import CONFIG_FILE, VOCABULARY_FILE, load_tokenizer

    where = model_path(arguments.tok or arguments.model)
    if arguments.tok is None and not any((Path(where) / name).exists() for name in (VOCABULARY_FILE, CONFIG_FILE)):
        return None
    return load_tokenizer(where)


def _record(
    needs: Needs, plan: MemoryPlan, prediction: Prediction, found: Measured, sequences: int
) -> dict[str, object]:
    speeds = found.speeds
    return {
        "plan": {"items": plan.items, "total_bytes": plan.total_bytes},
        "limit_bytes": plan.limit,
        "context": plan.context,
        "chunk": plan.chunk,
        "sequences": sequences,
        "kept": {
            "trunk_and_head_bytes": sum(block.nbytes for block in plan.pinned),
            "of_bytes": needs.matrix_bytes,
            "experts": plan.expert_slots,
            "of_experts": needs.experts,
        },
        "step": {
            "tokens": prediction.rows,
            "needed_bytes": asdict(prediction.needed),
            "read_bytes": asdict(prediction.read),
            "multiply_adds": prediction.multiply_adds,
            "expert_hit_rate": prediction.hit_rate,
            "expert_hit_rate_is_estimate": prediction.hits_are_estimated,
            "drive_seconds": prediction.drive_seconds,
            "arithmetic_seconds": prediction.arithmetic_seconds,
            "seconds": prediction.seconds,
            "bound_by": prediction.bound,
        },
        "bytes_per_token": prediction.read.total / prediction.rows,
        "seconds_per_token": prediction.seconds_per_token,
        "load_seconds": prediction.load_seconds,
        "speeds": {
            "disk_gbps": None if speeds.drive is None else speeds.drive / _GIGA,
            "memory_gbps": speeds.memory / _GIGA,
            "gmacs": speeds.multiply_adds / _GIGA,
            "disk": found.drive,
            "memory": found.memory,
            "arithmetic": found.multiply_adds,
        },
    }
