"""`k3 doctor [MODEL]`: what this machine has, what fits, how fast it will be, and what to do next."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from k3.cli import options
from k3.cli.terminal import Terminal, json_text
from k3.errors import MachineError

if TYPE_CHECKING:
    from k3.engine.forecast.diagnosis import Check
    from k3.engine.forecast.prognosis import Prognosis

_PROMPT = "The capital of France is"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "k3 doctor [MODEL] [options]"
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a checkpoint directory, or `demo` for the embedded model"
    )
    parser.add_argument(
        "--extra-dir", metavar="DIR", type=Path, action="append", default=[], help="more drives that hold shards"
    )
    parser.add_argument("--trunk", metavar="DIR", type=Path, help="a packed trunk, as `k3 pack` writes it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_quiet(parser)


def execute(arguments: argparse.Namespace) -> int:
    from k3.engine.forecast.diagnosis import download_check, machine_checks

    with Terminal(quiet=arguments.quiet) as terminal:
        checks = list(machine_checks())
        if arguments.model is None:
            checks.append(download_check(Path()))
        prognosis = None if _obstacle(checks) else _prognosis(arguments, terminal)
        checks += prognosis.checks if prognosis else []
        following = _next(arguments, checks, prognosis)
        if arguments.json:
            terminal.write(json_text(_record(checks, prognosis, following)))
        else:
            terminal.write("\n".join(_table(checks, following)))
    obstacle = _obstacle(checks)
    if obstacle is not None:
        raise MachineError(
            f"the model can't run here. {obstacle.what}: {obstacle.value.rstrip('.')}. What to do: {obstacle.advice}."
        )
    return 0


def _prognosis(arguments: argparse.Namespace, terminal: Terminal) -> Prognosis:
    from k3.api import model_path
    from k3.engine.forecast.prognosis import model_prognosis, released_prognosis
    from k3.engine.loading import LoadOptions

    if arguments.model is None:
        return released_prognosis(terminal.line)
    loading = LoadOptions(trunk=arguments.trunk, extra_dirs=tuple(arguments.extra_dir))
    return model_prognosis(model_path(arguments.model), loading, terminal.line)


def _obstacle(checks: list[Check]) -> Check | None:
    """The first finding that keeps the model from running."""
    return next((check for check in checks if check.fatal), None)


def _next(arguments: argparse.Namespace, checks: list[Check], prognosis: Prognosis | None) -> str | None:
    """The command to run next; None where something must be mended first."""
    from k3.engine.forecast.diagnosis import Verdict

    if prognosis is None or (prognosis.is_bound and _obstacle(checks)):
        return None
    if arguments.model is None:
        has_room = all(check.verdict is Verdict.OK for check in checks if check.what == "disk to download")
        return "k3 download DIR" if has_room and not _obstacle(checks) else "k3 demo"
    if prognosis.is_bound:
        prompt = ["--prompt", _PROMPT] if prognosis.has_tokenizer else ["--ids", "1,2,3"]
        words = ["k3", "run", arguments.model, *prompt]
        words += ["--trunk", str(arguments.trunk)] if arguments.trunk else []
    else:
        words = ["k3", "verify" if prognosis.is_there else "download", arguments.model]
    return shlex.join([*words, *(word for place in arguments.extra_dir for word in ("--extra-dir", str(place)))])


def _table(checks: list[Check], following: str | None) -> Iterator[str]:
    width = max(len(check.what) for check in checks)
    for check in checks:
        yield f"{check.what:<{width}}  {check.verdict.value:<7}  {check.value}"
        if check.advice:
            yield f"{'':<{width}}  {'':<7}  - {check.advice}"
    yield ""
    yield f"next: {following or 'mend what is missing, and ask again'}"


def _record(checks: list[Check], prognosis: Prognosis | None, following: str | None) -> dict[str, object]:
    return {
        "checks": [
            {"what": c.what, "value": c.value, "verdict": c.verdict.value, "advice": c.advice, "fatal": c.fatal}
            for c in checks
        ],
        "can_run": _obstacle(checks) is None,
        "seconds_per_token": None if prognosis is None else prognosis.seconds_per_token,
        "next": following,
    }
