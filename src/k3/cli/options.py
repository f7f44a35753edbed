"""Options that several commands share, and the values that they take."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from k3.cli.plot import picture_file
from k3.errors import UsageError


def add_model(parser: argparse.ArgumentParser) -> None:
    """The MODEL argument."""
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, or `demo` for the embedded model")


def add_input(parser: argparse.ArgumentParser, text_option: str, file_option: str, what: str) -> None:
    """A text, a file with a text, or token ids, all as `given`: str or list[int]."""
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(text_option, dest="given", metavar="TEXT", type=text, help=f"the text to {what}")
    group.add_argument(
        file_option, dest="given", metavar="PATH", type=text_of_file, help="a file with the text, taken byte for byte"
    )
    group.add_argument(
        "--ids", dest="given", metavar="1,2,3", type=token_ids, help="token ids instead; no tokenizer is needed"
    )
    add_special(parser)


def add_special(parser: argparse.ArgumentParser) -> None:
    """How a text is read."""
    parser.add_argument(
        "--special", action="store_true", help="control tokens spelled in the text are control tokens, else text"
    )


def add_loading(parser: argparse.ArgumentParser) -> None:
    """How a checkpoint is loaded; no choice here but --layers and --config changes a result."""
    group = parser.add_argument_group("loading")
    group.add_argument("--tok", metavar="DIR", type=Path, help="where the tokenizer's files are (default: MODEL)")
    group.add_argument("--config", metavar="PATH", type=Path, help="a config file instead of MODEL/config.json")
    group.add_argument("--layers", metavar="N", type=positive, help="bind the first N layers; not the model's output")
    group.add_argument("--threads", metavar="N", type=positive, help="threads that compute (default: physical cores)")
    group.add_argument(
        "--extra-dir",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="more shards are there; may be repeated",
    )
    group.add_argument("--trunk", metavar="DIR", type=Path, help="a packed trunk, as `k3 pack` writes it")
    group.add_argument("--no-direct", action="store_true", help="read through the page cache")
    add_memory(parser)


def add_memory(parser: argparse.ArgumentParser) -> None:
    """How much memory a run takes, and for what. A later flag wins over an earlier one that names the same number."""
    group = parser.add_argument_group("memory")
    group.add_argument("--memory", metavar="SIZE", default="auto", help="peak of memory, such as 8GB (default: auto)")
    group.add_argument("--trunk-gb", metavar="X", type=gigabytes, help="GB of trunk and head kept between tokens")
    group.add_argument("--cache-gb", metavar="Y", type=gigabytes, help="GB of experts kept between tokens")
    group.add_argument("--cache-experts", metavar="N", type=whole, help="experts kept, as a number: for experiments")
    group.add_argument("--preset", action=_Preset, help="such a pair of GB; `k3 --list-presets` names them")
    group.add_argument(
        "--chunk", metavar="N", type=positive, help="prompt rows a step (default: up to 1024, by memory)"
    )
    group.add_argument("--context", metavar="N", type=positive, help="positions to make room for (default: by memory)")


class _Preset(argparse.Action):
    """Sets the two numbers that a preset stands for, as their own flags would."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:  # noqa: A002
        from k3.engine.sizes import PRESETS

        super().__init__(option_strings, dest, choices=sorted(PRESETS), metavar="NAME", help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        from k3.engine.sizes import PRESETS

        preset = PRESETS[str(values)]
        namespace.trunk_gb, namespace.cache_gb = preset.trunk_gb, preset.cache_gb
        namespace.cache_experts = None


def gigabytes(value: str) -> float:
    """A number of GB, from zero up.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{0,9})?", value):
        raise argparse.ArgumentTypeError(f"expected a number of GB from 0 up, found {_shown(value)}")
    return float(value)


def add_sampling(parser: argparse.ArgumentParser, gen: int = 8) -> None:
    """How tokens are chosen and when they end."""
    group = parser.add_argument_group("generation")
    group.add_argument("--gen", metavar="N", type=positive, default=gen, help=f"tokens to generate (default: {gen})")
    group.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 takes the best token (default)")
    group.add_argument("--top-p", metavar="P", type=float, default=1.0, help="keep the likeliest tokens up to this sum")
    group.add_argument("--top-k", metavar="K", type=whole, default=0, help="keep the K likeliest tokens (default: all)")
    group.add_argument("--seed", metavar="N", type=whole, help="makes sampling repeatable (default: drawn, reported)")
    group.add_argument(
        "--stop", metavar="TEXT", type=stop_text, action="append", default=[], help="end before TEXT; may be repeated"
    )
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
    group.add_argument(
        "--dump-cache-trace", metavar="DIR", type=Path, help="write which experts the run chose, for `k3 trace replay`"
    )
    group.add_argument(
        "--plot", metavar="FILE.png", type=picture_file, help="draw bytes, time, hits and memory (png, svg, pdf)"
    )
    talk = group.add_mutually_exclusive_group()
    talk.add_argument("--verbose", action="store_true", help="a line a token")
    add_quiet(talk)


def add_quiet(parser: argparse._ActionsContainer) -> None:
    """Silence on stderr."""
    parser.add_argument("--quiet", action="store_true", help="nothing but errors on stderr")


def _number(lowest: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,30}", value) or int(value) < lowest:
            raise argparse.ArgumentTypeError(f"expected a whole number from {lowest} up, found {_shown(value)}")
        return int(value)

    return parse


whole = _number(0)
positive = _number(1)


def text(value: str) -> str:
    """A text from the command line.

    Raises:
        UsageError: it is not UTF-8.
    """
    with contextlib.suppress(UnicodeEncodeError):
        value.encode()
        return value
    try:
        # Bytes that the locale can't decode come as surrogates; they may well be UTF-8.
        return os.fsencode(value).decode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UsageError(
            f"the text {_shown(value)} on the command line is not UTF-8: {error.reason} at byte {error.start}. "
            "Convert it to UTF-8, or check the terminal's encoding."
        ) from None


def stop_text(value: str) -> str:
    """A stop string.

    Raises:
        argparse.ArgumentTypeError, UsageError: it is empty or not UTF-8.
    """
    if not value:
        raise argparse.ArgumentTypeError("expected one character or more, found none")
    return text(value)


def text_of_file(value: str) -> str:
    """The text of a file, byte for byte.

    Raises:
        UsageError: there is no such file, or it is not UTF-8.
    """
    try:
        return Path(value).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{value}: the file is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start} "
            f"({error.reason}). Convert it to UTF-8."
        ) from None
    except OSError as error:
        raise UsageError(f"{value}: {error.strerror}. Name a readable file with the text.") from error


def json_of_file(value: str) -> object:
    """The value that a JSON file holds.

    Raises:
        UsageError: there is no such file, or it is not JSON in UTF-8.
    """
    try:
        return json.loads(text_of_file(value))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{value}: the file is not JSON: {error}.") from None


def token_ids(value: str) -> list[int]:
    """Token ids separated by commas; spaces around them don't matter.

    Raises:
        argparse.ArgumentTypeError: something else stands between the commas.
    """
    items = [item.strip() for item in value.split(",")]
    for place, item in enumerate(items, 1):
        if not re.fullmatch(r"[0-9]{1,18}", item):
            raise argparse.ArgumentTypeError(
                f"expected token ids separated by commas, found {_shown(item)} at place {place} of {len(items)}"
            )
    return [int(item) for item in items]


def _shown(value: str) -> str:
    return ascii(value if len(value) <= 40 else f"{value[:40]}…")
