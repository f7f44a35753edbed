"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from k3.errors import UsageError


def add_model(parser: argparse.ArgumentParser) -> None:
    """The MODEL argument."""
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, or `demo` for the embedded model")


def add_loading(parser: argparse.ArgumentParser) -> None:
    """How a checkpoint is loaded; no choice here but --layers and --config changes a result."""
    group = parser.add_argument_group("loading")
    group.add_argument("--tok", metavar="DIR", type=Path, help="where the tokenizer's files are (default: MODEL)")
    group.add_argument("--config", metavar="PATH", type=Path, help="a config file instead of MODEL/config.json")
    group.add_argument("--layers", metavar="N", type=whole, help="bind the first N layers only; not the model's output")
    group.add_argument("--threads", metavar="N", type=positive, help="threads that compute (default: physical cores)")
    group.add_argument("--chunk", metavar="N", type=positive, default=64, help="prompt rows a step (default: 64)")
    group.add_argument("--context", metavar="N", type=whole, help="positions to make room for (default: by memory)")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen and when they end."""
    group = parser.add_argument_group("generation")
    group.add_argument("--gen", metavar="N", type=positive, default=8, help="tokens to generate (default: 8)")
    group.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 takes the best token (default)")
    group.add_argument("--top-p", metavar="P", type=float, default=1.0, help="keep the likeliest tokens up to this sum")
    group.add_argument("--top-k", metavar="K", type=whole, default=0, help="keep the K likeliest tokens (default: all)")
    group.add_argument("--seed", metavar="N", type=whole, help="makes sampling repeatable (default: drawn, reported)")
    group.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before TEXT; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's stop tokens")
    how = group.add_mutually_exclusive_group()
    how.add_argument("--incremental", action="store_true", help="carry the state from token to token (the default)")
    how.add_argument("--full-recompute", action="store_true", help="run the whole prefix for every token: for checks")


def add_output(parser: argparse.ArgumentParser) -> None:
    """What is written, and how much is said."""
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="FILE.json", type=Path, help="write ids, text, costs and hash of the run")
    group.add_argument(
        "--dump-logits", metavar="PATH", type=Path, help="write the last prompt position's logits, float32"
    )
    talk = group.add_mutually_exclusive_group()
    talk.add_argument("--verbose", action="store_true", help="a line a token")
    talk.add_argument("--quiet", action="store_true", help="nothing but errors on stderr")


def _number(lowest: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"expected a whole number from {lowest} up, found {text!r}")
        return value

    return parse


whole = _number(0)
positive = _number(1)


def parse_ids(text: str) -> list[int]:
    """Token ids separated by commas.

    Raises:
        UsageError: something else stands between the commas.
    """
    try:
        ids = [int(item) for item in text.split(",")]
    except ValueError:
        raise UsageError(f"--ids: expected token ids separated by commas, found {text!r}.") from None
    return ids


def read_text(path: Path, option: str) -> str:
    """The text of a file, byte for byte.

    Raises:
        UsageError: there is no such file, or it is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{option}: {path} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}. "
            "Convert the file to UTF-8."
        ) from None
    except OSError as error:
        raise UsageError(f"{option}: {path}: {error.strerror}. Name a readable file.") from error
