"""`k3 tokenize MODEL`: token ids of a text, and back."""

from __future__ import annotations

import argparse

from k3.cli import options
from k3.cli.terminal import json_text
from k3.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("text", metavar="TEXT", nargs="?", type=options.text, help="the text")
    parser.add_argument(
        "--file", metavar="PATH", type=options.text_of_file, help="a file with the text, taken byte for byte"
    )
    options.add_special(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(arguments: argparse.Namespace) -> int:
    if (arguments.text is None) == (arguments.file is None):
        raise UsageError("expected either TEXT or --file PATH. `k3 tokenize --help` lists what it takes.")
    from k3.api import model_path
    from k3.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_path(arguments.model))
    text = arguments.text if arguments.file is None else arguments.file
    ids = tokenizer.encode(text, allow_special=arguments.special)
    tokens = [tokenizer.decode([token]) for token in ids]
    if arguments.json:
        print(json_text({"ids": ids, "tokens": tokens, "text": tokenizer.decode(ids)}))
    else:
        print(",".join(map(str, ids)))
        print(" ".join(map(repr, tokens)))
        print(tokenizer.decode(ids))
    return 0
