"""`k3 demo [PROMPT]`: the embedded model."""

from __future__ import annotations

import argparse
import sys

from k3.cli import options, run

DEFAULT_PROMPT = "The river"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "k3 demo [PROMPT] [options]"
    parser.add_argument(
        "given",
        metavar="PROMPT",
        nargs="?",
        type=options.text,
        default=DEFAULT_PROMPT,
        help="the text to continue (default: %(default)r)",
    )
    options.add_special(parser)
    options.add_sampling(parser, gen=24)
    options.add_loading(parser)
    options.add_output(parser)
    parser.set_defaults(model="demo")


def execute(arguments: argparse.Namespace) -> int:
    if not arguments.quiet:
        print(
            "The embedded model has random weights: it shows that everything works, not what Kimi K3 says.",
            file=sys.stderr,
        )
    return run.execute(arguments)
