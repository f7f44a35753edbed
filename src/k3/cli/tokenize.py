"""`k3 tokenize MODEL`: token ids of a text, and back."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from k3.api import model_path
from k3.cli import options
from k3.text.tokenizer import load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("text", metavar="TEXT", nargs="?", help="the text")
    source.add_argument("--file", metavar="PATH", type=Path, help="a file with the text, taken byte for byte")
    parser.add_argument("--special", action="store_true", help="spelled control tokens are control tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(arguments: argparse.Namespace) -> int:
    tokenizer = load_tokenizer(model_path(arguments.model))
    text = arguments.text if arguments.file is None else options.read_text(arguments.file, "--file")
    ids = tokenizer.encode(text, allow_special=arguments.special)
    tokens = [tokenizer.decode([token]) for token in ids]
    if arguments.json:
        print(json.dumps({"ids": ids, "tokens": tokens, "text": tokenizer.decode(ids)}, ensure_ascii=False))
        return 0
    print(",".join(map(str, ids)))
    print(" ".join(map(repr, tokens)))
    print(tokenizer.decode(ids))
    return 0
