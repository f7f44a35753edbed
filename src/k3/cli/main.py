"""`k3 COMMAND …`: finds the command's module, parses, runs, and turns errors into exit codes.

Nothing heavy is imported before a command does its work: the modules of the commands import the engine in `execute`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, TextIO

from k3 import __version__
from k3.errors import InterruptedRunError, K3Error, UsageError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


@dataclass(frozen=True, slots=True)
class Command:
    """A command's module under `k3.cli` and its line in the help."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command("demo", "run the embedded model: no checkpoint, no network"),
    "run": Command("run", "continue a text or a list of token ids"),
    "score": Command("score", "log-probability of each token of a text, and its perplexity"),
    "compare": Command("compare", "two logit dumps or result files: how far apart they are"),
    "doctor": Command("doctor", "check this machine: what fits, how fast, what to do next"),
    "plan": Command("plan", "the memory of a run, item by item, and what a token will cost"),
    "census": Command("census", "what a checkpoint's bytes are: classes, counts, totals"),
    "download": Command("download", "fetch the released checkpoint: resumable, spread over drives, checked"),
    "verify": Command("verify", "check a checkpoint: headers and sizes, every byte, known ids"),
    "tokenize": Command("tokenize", "token ids of a text, and back"),
    "pack": Command("pack", "write the packed trunk: the same weights, smaller and in the order of use"),
    "synth": Command("synth", "write a synthetic checkpoint in the released format"),
    "trace": Command("trace", "replay a recorded routing trace under each cache policy"),
    "bench": Command("bench", "measure, with the machine's own limits beside each figure"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` and takes no abbreviations."""

    def __init__(self, prog: str, description: str | None = None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Parse a whole command line; options may stand before, between and behind the other arguments."""
        parsed, rest = self.parse_known_args(arguments)
        if rest and self._subparsers is None:
            # Before Python 3.12.7 an optional argument counts as absent when an option stands before it.
            return self.parse_intermixed_args(arguments)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        # The inherited method drops what can't be written, and an unread help would be a success.
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        hint = " (a value that begins with a dash is written --option=-value)" if "expected one" in message else ""
        raise UsageError(f"{message}{hint}. `{self.prog} --help` lists what it takes.")


def run() -> NoReturn:
    """The entry point of the installed command."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What the locale's encoding can't write is spelled out instead of ending the run.
            stream.reconfigure(errors="backslashreplace")
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        _settle(stream)
    sys.exit(code)


def main(arguments: list[str]) -> int:
    """Run one command line; returns its exit code."""
    try:
        if sys.stdout is None:
            raise K3Error("standard output is closed, so there is no place for the result. Open it, or use /dev/null.")
        code = _dispatch(arguments)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return _explain(error, debug="--debug" in arguments)
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"k3 {__version__}")
        return 0
    if arguments[0] == "--list-presets":
        print(_presets())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        kind = "an option of k3 itself" if name.startswith("-") else "a command"
        raise UsageError(f"{name!r} is not {kind}. The commands are {', '.join(COMMANDS)}; `k3 --help` says more.")
    command = COMMANDS[name]
    module = import_module(f"k3.cli.{command.module}")
    parser = Parser(prog=f"k3 {name}", description=f"{command.summary[0].upper()}{command.summary[1:]}.")
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    try:
        parsed = parser.parse(rest)
    except SystemExit:  # The parser has printed its help.
        return 0
    return int(module.execute(parsed))


def _presets() -> str:
    from k3.engine.sizes import PRESETS

    lines = [f"{'preset':<14}{'--trunk-gb':>10}{'--cache-gb':>12}"]
    lines += [f"{name:<14}{preset.trunk_gb:>10g}{preset.cache_gb:>12g}" for name, preset in PRESETS.items()]
    return "\n".join([*lines, "", "All else that a run needs comes on top: about 1.3 GB at Kimi K3's full shape."])


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: k3 COMMAND ...\n\n"
        "Runs Kimi K3 exactly, on one ordinary machine.\n\n"
        f"commands:\n{commands}\n\n"
        "k3 COMMAND --help lists a command's options; k3 --version prints the version,\n"
        "k3 --list-presets the names of memory settings.\n"
        "MODEL is a checkpoint directory, or the word `demo` for the embedded model."
    )


def _explain(error: BaseException, *, debug: bool) -> int:
    """Say in one paragraph what ended the command; returns the exit code."""
    known = _known(error)
    _settle(sys.stdout)
    with contextlib.suppress(OSError):
        if debug:
            import traceback

            traceback.print_exception(error, file=sys.stderr)
        print(_paragraph(f"k3: {known}"), file=sys.stderr, flush=True)
    return known.exit_code


def _known(error: BaseException) -> K3Error:
    """The error in the words, and with the exit code, that a user gets."""
    match error:
        case K3Error():
            return error
        case KeyboardInterrupt():
            return InterruptedRunError("interrupted: the command was stopped before it had a result.")
        case BrokenPipeError():
            return K3Error("standard output: whoever read it has gone, and the command was not done. Read all of it.")
        case OSError(filename=None):
            return K3Error(f"standard output can't be written: {error.strerror or error}. Check where it leads to.")
        case OSError():
            return K3Error(f"{error.filename}: {error.strerror}. Check the path, its permissions and the disk's space.")
        case MemoryError():
            return K3Error("the memory ran out. Ask for a smaller --context or --chunk, or free memory.")
        case ImportError():
            return K3Error(f"this installation is not complete: {error}. Install the package again.")
        case _:
            place = f"{type(error).__name__}: {error}"
            return K3Error(f"internal error, please report it: {place}. --debug shows where.")


def _paragraph(text: str) -> str:
    """One line, or on a terminal a paragraph that fills it."""
    line = " ".join(text.split())
    if not sys.stderr.isatty():
        return line
    import textwrap

    from k3.cli.terminal import columns

    return textwrap.fill(line, columns(sys.stderr) - 1, break_long_words=False, break_on_hyphens=False)


def _settle(stream: TextIO | None) -> None:
    """Flush; what can't be written is dropped, so that the interpreter doesn't complain about it at its end."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
