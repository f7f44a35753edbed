"""`k3 COMMAND …`: finds the command's module, parses, runs, and turns errors into exit codes.

Nothing heavy is imported before a command is known.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import traceback
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

from k3 import __version__
from k3.errors import InterruptedRunError, K3Error, UsageError


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
    "tokenize": Command("tokenize", "token ids of a text, and back"),
    "synth": Command("synth", "write a synthetic checkpoint in the released format"),
    "bench": Command("bench", "measure, with the machine's own limits beside each figure"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` and takes no abbreviations."""

    def __init__(self, **settings: object) -> None:
        super().__init__(allow_abbrev=False, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. `{self.prog} --help` lists what it takes.")


def run() -> NoReturn:
    """The entry point of the installed command."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run one command line; returns its exit code."""
    debug = "--debug" in arguments
    try:
        return _dispatch([argument for argument in arguments if argument != "--debug"])
    except BrokenPipeError:
        # Whoever read our output has gone; keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _explain(InterruptedRunError("interrupted: the command was stopped before it had a result."), debug)
    except K3Error as error:
        return _explain(error, debug)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _explain(
            K3Error(f"{where}{error.strerror or error}. Check the path, its permissions and the disk's space."), debug
        )
    except MemoryError:
        return _explain(K3Error("the memory ran out. Ask for a smaller --context or --chunk, or free memory."), debug)
    except Exception as error:
        message = f"internal error, please report it: {type(error).__name__}: {error}. --debug shows where."
        return _explain(K3Error(message), debug)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"k3 {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(f"`{name}` is not a command. The commands are {', '.join(COMMANDS)}; `k3 --help` says more.")
    command = COMMANDS[name]
    module = import_module(f"k3.cli.{command.module}")
    parser = Parser(prog=f"k3 {name}", description=f"{command.summary[0].upper()}{command.summary[1:]}.")
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    return int(module.execute(parser.parse_args(rest)))


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return (
        "usage: k3 COMMAND ...\n\n"
        "Runs Kimi K3 exactly, on one ordinary machine.\n\n"
        f"commands:\n{commands}\n\n"
        "k3 COMMAND --help lists a command's options; k3 --version prints the version.\n"
        "MODEL is a checkpoint directory, or the word `demo` for the embedded model."
    )


def _explain(error: K3Error, debug: bool) -> int:
    sys.stdout.flush()
    if debug:
        traceback.print_exc()
    print(textwrap.fill(f"k3: {error}", width=110, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
    return error.exit_code
