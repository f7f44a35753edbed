"""`k3 download DIR`: the released checkpoint, at a pinned revision, resumable, every byte checked."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from k3.cli import options
from k3.cli.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "k3 download DIR [--extra-dir DIR ...] [options]"
    parser.add_argument("dir", metavar="DIR", type=Path, help="where the checkpoint goes; made if it is not there")
    parser.add_argument(
        "--extra-dir", metavar="DIR", type=Path, action="append", default=[], help="another drive to put shards on"
    )
    parser.add_argument(
        "--repo", metavar="OWNER/NAME", help="another repository in the released format (default: what was begun)"
    )
    parser.add_argument("--revision", metavar="REV", help="a branch, tag or commit (default: what was begun, or main)")
    parser.add_argument(
        "--connections", metavar="N", type=options.positive, default=4, help="files fetched at a time (default: 4)"
    )
    options.add_quiet(parser)


def execute(arguments: argparse.Namespace) -> int:
    from k3.checkpoint.fetch.download import DownloadEvents, DownloadOptions, download
    from k3.checkpoint.fetch.hub import Hub
    from k3.cli.progress import Progress

    wanted = DownloadOptions(
        repo=arguments.repo,
        revision=arguments.revision,
        extra_dirs=tuple(arguments.extra_dir),
        connections=arguments.connections,
    )
    with Terminal(quiet=arguments.quiet) as terminal:
        progress = Progress(terminal, verbose=False)
        events = DownloadEvents(progress.note, progress.downloading, progress.checking)
        record = download(arguments.dir, wanted, Hub(), events)
        terminal.write(
            f"{arguments.dir}: {len(record.files)} files, {record.nbytes:,} bytes; names, sizes and checksums as "
            f"listed for {record.repo} at commit {record.commit}\n"
        )
        extra = sorted({file.directory for file in record.files.values() if file.directory})
        following = ["k3", "verify", str(arguments.dir), *(word for place in extra for word in ("--extra-dir", place))]
        progress.note(f"next: {shlex.join(following)}")
    return 0
