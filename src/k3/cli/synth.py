"""`k3 synth KIND DIR`: a synthetic checkpoint in the released format."""

from __future__ import annotations

import argparse
from pathlib import Path

from k3.cli import options
from k3.cli.terminal import Terminal
from k3.errors import UsageError

KINDS = {"tiny": "2 MB, in a second", "wide": "the real widths in 12 GB"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
    parser.add_argument("kind", metavar="KIND", choices=list(KINDS), help=kinds)
    parser.add_argument("dir", metavar="DIR", type=Path, help="a directory that doesn't exist yet or is empty")
    parser.add_argument("--seed", metavar="N", type=options.whole, default=0, help="other weights (default: 0)")
    options.add_quiet(parser)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.dir.name in ("", ".."):
        raise UsageError(f"DIR: expected a directory that can be made anew, found '{arguments.dir}'. Name another.")
    from k3.checkpoint.synth import write_synthetic
    from k3.cli.progress import Progress

    with Terminal(quiet=arguments.quiet) as terminal:
        progress = Progress(terminal, verbose=False)
        write_synthetic(arguments.kind, arguments.dir, seed=arguments.seed, progress=progress.writing)
        terminal.write(f"{arguments.dir}\n")
    return 0
