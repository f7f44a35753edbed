"""`k3 tokenize MODEL`: token ids of a text, and back; a conversation's prompt in segments and ids."""

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
    parser.add_argument(
        "--messages",
        metavar="F.json",
        type=options.json_of_file,
        help="a conversation: a list of messages, or an object with `messages`, `tools`, `reasoning_effort`, …",
    )
    options.add_special(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(arguments: argparse.Namespace) -> int:
    if [arguments.text, arguments.file, arguments.messages].count(None) != 2:
        raise UsageError("expected TEXT, --file PATH or --messages F.json. `k3 tokenize --help` lists what it takes.")
    if arguments.messages is not None and arguments.special:
        raise UsageError("--special is for TEXT and --file. What a conversation spells is always text: leave it out.")
    if arguments.messages is not None:
        _print_conversation(arguments)
    else:
        _print_text(arguments)
    return 0


def _print_text(arguments: argparse.Namespace) -> None:
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


def _print_conversation(arguments: argparse.Namespace) -> None:
    """The segments with the ids of each, and the ids of the whole prompt."""
    from k3.api import model_path
    from k3.text.chat.conversation import Conversation
    from k3.text.chat.segments import encode_segments
    from k3.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_path(arguments.model))
    segments = Conversation.read(arguments.messages).segments()
    ids = encode_segments(tokenizer, segments)
    if arguments.json:
        tokens = [tokenizer.decode([token]) for token in ids]
        print(json_text({"ids": ids, "tokens": tokens, "text": tokenizer.decode(ids), "segments": segments}))
        return
    for segment in segments:
        kind = "control" if segment.control else "text"
        print(f"{kind:<8}{segment.text!r}  {','.join(map(str, encode_segments(tokenizer, [segment])))}")
    print(",".join(map(str, ids)))
