"""`--plot FILE`: what can be refused before the work that a picture is made of."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from k3.errors import UsageError

PICTURES = (".png", ".svg", ".pdf")


def picture_file(value: str) -> Path:
    """The path of a picture.

    Raises:
        argparse.ArgumentTypeError: its name ends in no known way.
    """
    path = Path(value)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"expected a file name that ends in {', '.join(PICTURES)}, found {value!r}")
    return path


def require_matplotlib(instead: str) -> None:
    """Refuse a picture that nothing here can draw; `instead` names the option that has its figures.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs the library matplotlib, which is not installed. Install it (`pip install 'k3[plot]'`), or "
            f"take the figures from {instead}."
        )
