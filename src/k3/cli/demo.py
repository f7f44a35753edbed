"""`k3 demo [PROMPT]`: the embedded model."""

from __future__ import annotations

import argparse
import sys

from k3.api import DEMO
from k3.cli import options, run

DEFAULT_PROMPT = "The river"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", default=DEFAULT_PROMPT, help=f"default: {DEFAULT_PROMPT!r}"
    )
    parser.add_argument(
        "--special", action="store_true", help="spelled control tokens in the prompt are control tokens"
    )
    options.add_sampling(parser)
    options.add_loading(parser)
    options.add_output(parser)
    parser.set_defaults(model=DEMO, prompt_file=None, ids=None, gen=24)


def execute(arguments: argparse.Namespace) -> int:
    if not arguments.quiet:
        print(
            "The embedded model has random weights: it shows that everything works, not what Kimi K3 says.",
            file=sys.stderr,
        )
    return run.execute(arguments)
