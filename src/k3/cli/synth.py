"""`k3 synth KIND DIR`: a synthetic checkpoint in the released format."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from k3.cli import options
from k3.cli.terminal import Terminal
from k3.errors import UsageError

KINDS = {
    "tiny": "2 MB, in a second",
    "wide": "the real widths in 12 GB",
    "full-shape": "the released names, shapes and sizes in sparse files that take 1.3 GB; no tokenizer",
}

_BLOCK = 512
"""Bytes of the blocks in which a file's use of the disk is counted, whatever the file system's own are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "; ".join(f"{name}: {what}" for name, what in KINDS.items())
    parser.add_argument("kind", metavar="KIND", choices=list(KINDS), help=kinds)
    parser.add_argument("dir", metavar="DIR", type=Path, help="a directory that doesn't exist yet or is empty")
    parser.add_argument("--seed", metavar="N", type=options.whole, default=0, help="other weights (default: 0)")
    options.add_quiet(parser)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.dir.name in ("", ".."):
        raise UsageError(f"DIR: expected a directory that can be made anew, found '{arguments.dir}'. Name another.")
    from k3.checkpoint.synthetic.synth import write_synthetic
    from k3.cli.progress import Progress, clock, size

    began = time.perf_counter()
    with Terminal(quiet=arguments.quiet) as terminal:
        progress = Progress(terminal, verbose=False)
        write_synthetic(arguments.kind, arguments.dir, seed=arguments.seed, progress=progress.writing)
        files = [path.stat() for path in arguments.dir.iterdir()]
        apparent, stored = sum(file.st_size for file in files), sum(file.st_blocks for file in files) * _BLOCK
        seconds = clock(time.perf_counter() - began)
        terminal.line(f"{len(files)} files of {size(apparent)}, {size(stored)} on the disk, written in {seconds}")
        terminal.write(f"{arguments.dir}\n")
    return 0
