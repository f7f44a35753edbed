"""The split between trunk and experts at one total: `python benchmarks/split.py MODEL --memory SIZE`.

The plan's own split is measured before, between and after the others; its median stands beside the best seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from decoding import Decoded, decode


def show(name: str, d: Decoded) -> None:
    print(
        f"{name:>12}{d.trunk_kept / 1e9:>10.2f}{d.experts_kept:>9}{d.seconds:>9.3f}{d.nbytes / 1e9:>10.2f}"
        f"{100 * d.hits:>8.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", default="5GB")
    parser.add_argument("--trunk", type=Path)
    parser.add_argument("--tokens", type=int, default=5)
    arguments = parser.parse_args()
    settings = {"memory": arguments.memory, "trunk": arguments.trunk}
    print(f"{'split':>12}{'trunk GB':>10}{'experts':>9}{'s/token':>9}{'GB/token':>10}{'hits %':>8}")
    own = [decode(arguments.model, arguments.tokens, **settings)]
    show("plan", own[0])
    best = float("inf")
    for quarters in (3, 2, 1, 0):
        share = own[0].trunk_kept * quarters / 4 / 1e9
        hand = decode(arguments.model, arguments.tokens, trunk_gb=share, **settings)
        show(f"{25 * quarters} % of it", hand)
        best = min(best, hand.seconds)
        own.append(decode(arguments.model, arguments.tokens, **settings))
        show("plan", own[-1])
    plan = median(d.seconds for d in own)
    print(f"plan / best seen: {plan / min(best, plan):.3f}")


if __name__ == "__main__":
    main()
