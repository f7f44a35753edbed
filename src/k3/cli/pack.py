"""`k3 pack MODEL TRUNK`: the matrices that every step needs, packed and in execution order."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from k3.cli import options
from k3.cli.terminal import Terminal
from k3.errors import UsageError

if TYPE_CHECKING:
    from k3.cli.progress import Progress
    from k3.engine.packing.writer import PackPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "trunk", metavar="TRUNK", type=Path, help="the directory to make; a run that was stopped is continued"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--raw", action="store_true", help="keep bf16: only order and alignment change")
    kind.add_argument(
        "--check", action="store_true", help="write nothing: compare every byte of TRUNK and MODEL with its checksum"
    )
    parser.add_argument("--layers", metavar="N", type=options.positive, help="pack the first N layers and the head")
    parser.add_argument("--threads", metavar="N", type=options.positive, help="threads that encode (default: cores)")
    parser.add_argument(
        "--extra-dir", metavar="DIR", type=Path, action="append", default=[], help="more places of shards; repeatable"
    )
    parser.add_argument("--config", metavar="PATH", type=Path, help="a config file instead of MODEL/config.json")
    options.add_quiet(parser)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.trunk.name in ("", ".."):
        raise UsageError(f"TRUNK: expected a directory that can be made anew, found '{arguments.trunk}'. Name another.")
    from k3.api import model_path
    from k3.cli.progress import Progress, size
    from k3.engine.packing.check import check_trunk
    from k3.engine.packing.writer import PackEvents, PackOptions, pack_trunk

    wanted = PackOptions(
        arguments.raw, arguments.threads, arguments.layers, tuple(arguments.extra_dir), arguments.config
    )
    with Terminal(quiet=arguments.quiet) as terminal:
        progress = Progress(terminal, verbose=False)
        if arguments.check:
            check_trunk(model_path(arguments.model), arguments.trunk, wanted, progress.checking)
            terminal.write(f"{arguments.trunk}: every byte is as it was packed\n")
            return 0
        events = PackEvents(lambda plan: _tell(progress, plan), progress.packing)
        packed = pack_trunk(model_path(arguments.model), arguments.trunk, wanted, events)
        source, stored = packed.manifest.source_bytes, packed.manifest.stored_bytes
        done = "was complete already" if packed.was_there else "complete"
        progress.note(f"{done}: {size(source)} of weights in {size(stored)} ({stored / source:.4f})")
        terminal.write(f"{arguments.trunk}\n")
    return 0


def _tell(progress: Progress, plan: PackPlan) -> None:
    from k3.cli.progress import size

    if plan.tensors_done:
        progress.note(
            f"continuing: {plan.tensors_done} of {plan.tensors} tensors, {size(plan.source_bytes_done)} of "
            f"{size(plan.source_bytes)}, are packed already"
        )
    progress.note(
        f"disk: about {size(plan.needed_bytes)} needed for {size(plan.source_bytes - plan.source_bytes_done)} of "
        f"weights, {size(plan.free_bytes)} free"
    )
