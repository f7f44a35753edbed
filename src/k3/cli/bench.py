"""`k3 bench kernels`: the kernels' speed beside the machine's own limits."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from k3.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    kernels = what.add_parser("kernels", help="matrix products, of one core and of all threads")
    kernels.add_argument("--threads", metavar="N", type=options.positive, help="threads (default: physical cores)")
    kernels.add_argument("--repeats", metavar="N", type=options.positive, default=7, help="rounds (default: 7)")
    kernels.add_argument("--json", action="store_true", help="print one JSON object")
    kernels.add_argument("--debug", action="store_true", help="show where an error comes from")


def execute(arguments: argparse.Namespace) -> int:
    from k3.kernels.bench import measure

    report = measure(threads=arguments.threads, repeats=arguments.repeats)
    print(json.dumps(asdict(report)) if arguments.json else "\n".join(report.lines()))
    return 0
