"""The dial: seconds and bytes a token over `--memory`: `python benchmarks/ladder.py MODEL [SIZE …]`.

`k3 synth wide DIR` writes a checkpoint for it; there the whole of the weights is 12 GB.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from decoding import decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("sizes", nargs="*", default=["1GB", "2GB", "4GB", "6GB", "8GB", "10GB", "13GB"])
    parser.add_argument("--trunk", type=Path)
    parser.add_argument("--tokens", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'--memory':>9}{'planned GB':>12}{'trunk GB':>10}{'experts':>9}{'s/token':>9}{'GB/token':>10}{'hits %':>8}")
    for size in arguments.sizes:
        d = decode(arguments.model, arguments.tokens, memory=size, trunk=arguments.trunk)
        print(
            f"{size:>9}{d.planned / 1e9:>12.2f}{d.trunk_kept / 1e9:>10.2f}{d.experts_kept:>9}"
            f"{d.seconds:>9.3f}{d.nbytes / 1e9:>10.2f}{100 * d.hits:>8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
