"""`k3 bench`: the kernels' speed beside the machine's own limits, and the drive's as the engine reads it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from k3.cli import options
from k3.cli.terminal import Terminal, json_text

if TYPE_CHECKING:
    from k3.storage.disk_bench import Cell, DiskReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    kernels = what.add_parser("kernels", help="matrix products, of one core and of all threads")
    kernels.add_argument("--threads", metavar="N", type=options.positive, help="threads (default: physical cores)")
    kernels.add_argument("--repeats", metavar="N", type=options.positive, default=7, help="rounds (default: 7)")
    kernels.add_argument("--json", action="store_true", help="print one JSON object")
    kernels.add_argument("--debug", action="store_true", help="show where an error comes from")

    disk = what.add_parser("disk", help="random reads of the engine's sizes, at queue depths of 1 to 64")
    disk.add_argument("file", metavar="FILE", type=Path, help="a large file, or a checkpoint directory: a shard of it")
    disk.add_argument("--seconds", metavar="S", type=_seconds, default=1.0, help="for each figure (default: 1)")
    disk.add_argument("--no-direct", action="store_true", help="read through the page cache, for comparison")
    disk.add_argument("--json", action="store_true", help="print one JSON object")
    disk.add_argument("--debug", action="store_true", help="show where an error comes from")
    options.add_quiet(disk)


def execute(arguments: argparse.Namespace) -> int:
    return _disk(arguments) if arguments.what == "disk" else _kernels(arguments)


def _kernels(arguments: argparse.Namespace) -> int:
    from k3.kernels.bench import measure

    report = measure(threads=arguments.threads, repeats=arguments.repeats)
    print(json.dumps(asdict(report)) if arguments.json else "\n".join(report.lines()))
    return 0


def _disk(arguments: argparse.Namespace) -> int:
    from k3.cli.progress import clock
    from k3.engine.machine import group_memory, memory_limit
    from k3.storage.disk_bench import ROUNDS, largest_shards, measure_disk

    file: Path = arguments.file
    files = largest_shards(file) if file.is_dir() else (file,)
    with Terminal(quiet=arguments.quiet) as terminal:

        def progress(done: int, total: int) -> None:
            if not done:
                terminal.line(f"measuring for about {clock(total * arguments.seconds / ROUNDS)}")
            terminal.status(f"round {done} of {total}")

        report = measure_disk(
            files,
            seconds=arguments.seconds,
            direct=not arguments.no_direct,
            room=memory_limit(None, group_memory()) // 4,
            progress=progress,
        )
        for remark in _remarks(report):
            terminal.line(remark)
        terminal.write(json_text(_disk_record(report)) if arguments.json else "\n".join(_disk_table(report)))
    return 0


def _disk_table(report: DiskReport) -> Iterator[str]:
    """Depths down, sizes across; GB/s."""
    from k3.cli.progress import size
    from k3.storage.reader import DEFAULT_THREADS

    sizes = list(dict.fromkeys(cell.nbytes for cell in report.cells))
    rates = {(cell.depth, cell.nbytes): cell for cell in report.cells}
    yield f"{', '.join(map(str, report.files))}: {size(report.file_bytes)}, {size(report.bytes_read)} read at random"
    yield f"direct I/O: {_directness(report)}"
    yield "GB/s         " + "".join(f"{_size_name(nbytes):>14}" for nbytes in sizes)
    for depth in dict.fromkeys(cell.depth for cell in report.cells):
        mark = "  as the engine reads" if depth == DEFAULT_THREADS else ""
        yield f"{depth:>3} at a time" + "".join(_rate(rates[depth, n], report.best) for n in sizes) + mark
    if report.best is not None:
        yield f"* the best: {report.best.depth} at a time of {_size_name(report.best.nbytes)}"


def _directness(report: DiskReport) -> str:
    how = "yes, past the page cache" if report.direct else "NO, through the page cache"
    if report.from_drive is None:
        return how
    return f"{how}; the system fetched {100 * min(report.from_drive, 1.0):.0f} % of the bytes from a drive"


def _size_name(nbytes: int) -> str:
    from k3.storage.disk_bench import EXPERT_BYTES

    if nbytes == EXPERT_BYTES:
        return "17.5 MB expert"
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _rate(cell: Cell, best: Cell | None) -> str:
    if cell.rate is None:
        return f"{'-':>13} "
    return f"{cell.rate / 1e9:>13.2f}{'*' if cell is best else ' '}"


def _remarks(report: DiskReport) -> Iterator[str]:
    """What must be known to trust the figures."""
    if not report.direct:
        yield "WARNING: these reads went through the page cache: the figures may be the memory's, not the drive's."
    elif not report.honest:
        share = 100 * (report.from_drive or 0.0)
        yield (
            f"WARNING: only {share:.0f} % of the bytes came from a drive: the file system takes direct reads but "
            "answers them from memory, so the figures are the memory's."
        )
    if report.bytes_read > report.file_bytes:
        times = report.bytes_read / report.file_bytes
        yield (
            f"each part of the file was read about {times:.0f} times in all, though never twice in one round. A drive "
            "with a large cache of its own needs a larger file."
        )


def _disk_record(report: DiskReport) -> dict[str, object]:
    def cell(found: Cell) -> dict[str, object]:
        gbps = None if found.rate is None else found.rate / 1e9
        return {"depth": found.depth, "bytes": found.nbytes, "gbps": gbps}

    return {
        "files": [str(path) for path in report.files],
        "file_bytes": report.file_bytes,
        "bytes_read": report.bytes_read,
        "direct_io": report.direct,
        "share_from_drive": report.from_drive,
        "cells": [cell(found) for found in report.cells],
        "best": None if report.best is None else cell(report.best),
    }


def _seconds(value: str) -> float:
    """Seconds above zero.

    Raises:
        argparse.ArgumentTypeError: it is no such number.
    """
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, an hour at most, found {value[:40]!a}")
    return seconds
