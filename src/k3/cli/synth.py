"""`k3 synth KIND DIR`: a synthetic checkpoint in the released format."""

from __future__ import annotations

import argparse
from pathlib import Path

from k3.checkpoint.synth import KINDS, write_synthetic
from k3.cli import options
from k3.cli.progress import Progress
from k3.cli.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", choices=sorted(KINDS), help=", ".join(sorted(KINDS)))
    parser.add_argument("dir", metavar="DIR", type=Path, help="a directory that doesn't exist yet or is empty")
    parser.add_argument("--seed", metavar="N", type=options.whole, default=0, help="other weights (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="nothing but errors on stderr")


def execute(arguments: argparse.Namespace) -> int:
    terminal = Terminal(quiet=arguments.quiet)
    progress = Progress(terminal, verbose=False)
    write_synthetic(arguments.kind, arguments.dir, seed=arguments.seed, progress=progress.writing)
    terminal.clear()
    print(arguments.dir)
    return 0
