"""`k3 verify MODEL`: whether a checkpoint is whole, whether every byte is right, whether it says what it should."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from k3.cli import options
from k3.cli.terminal import Terminal
from k3.errors import InvalidGenerationError

if TYPE_CHECKING:
    from k3.cli.progress import Progress
    from k3.engine.golden import Comparison
    from k3.kernels import F32Array


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--extra-dir", metavar="DIR", type=Path, action="append", default=[], help="another directory with shards"
    )
    parser.add_argument("--deep", action="store_true", help="read every byte and compare checksums")
    parser.add_argument("--golden", action="store_true", help="run a known prompt and compare with the published ids")
    parser.add_argument(
        "--threads", metavar="N", type=options.positive, help="files read at a time by --deep (default: 4 at most)"
    )
    options.add_quiet(parser)


def execute(arguments: argparse.Namespace) -> int:
    from k3.api import model_path
    from k3.checkpoint.verify import check_bytes, check_structure
    from k3.cli.progress import Progress
    from k3.engine.golden import require_released

    with Terminal(quiet=arguments.quiet) as terminal:
        progress = Progress(terminal, verbose=False)
        structure = check_structure(model_path(arguments.model), tuple(arguments.extra_dir))
        _print(terminal, structure.lines())
        if arguments.golden:
            require_released(structure.config, structure.index.metadata, str(structure.directory))
        if arguments.deep:
            threads = arguments.threads or min(4, len(os.sched_getaffinity(0)))
            _print(terminal, check_bytes(structure, threads, progress.checking).lines())
        if arguments.golden:
            check_golden(terminal, lambda ids: _logits(arguments, ids, progress))
    return 0


def check_golden(terminal: Terminal, logits: Callable[[list[int]], F32Array], *golden: tuple[int, ...]) -> None:
    """Compare a model with published ids (those of the released checkpoint, or `golden`: prompt and continuation).

    Raises:
        InvalidGenerationError: an id differs, and not by a near tie.
    """
    from k3.engine.golden import compare

    comparison = compare(logits, *golden)
    _print(terminal, golden_lines(comparison))
    if not comparison.acceptable:
        raise InvalidGenerationError(
            "the model does not give the published ids: its output must not be trusted. Run `k3 verify MODEL --deep`, "
            "which finds damaged files; if every checksum is right, report this."
        )


def golden_lines(comparison: Comparison) -> Iterator[str]:
    """How a model compares with published ids, in a sentence for each difference."""
    yield f"golden     {comparison.agreeing} of {len(comparison.positions)} ids agree with the published ones"
    for number, position in comparison.differences:
        verdict = (
            "a near tie: the published ids come from an engine with a slightly different epsilon"
            if position.is_near_tie
            else "not a tie"
        )
        yield (
            f"golden     id {number}: published {position.published}, found {position.found}, whose logit is larger by "
            f"{position.margin:.4f}: {verdict}"
        )


def _logits(arguments: argparse.Namespace, ids: list[int], progress: Progress) -> F32Array:
    from k3.api import load

    with load(
        arguments.model,
        extra_dirs=arguments.extra_dir,
        context=len(ids) + 1,
        with_tokenizer=False,
        events=progress.events(),
    ) as model:
        progress.note(f"one pass over {len(ids)} positions")
        return model.logits(ids)


def _print(terminal: Terminal, lines: Iterator[str]) -> None:
    for line in lines:
        terminal.write(f"{line}\n")
