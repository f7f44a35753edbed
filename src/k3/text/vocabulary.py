"""Small vocabularies in the released form, for synthetic and home-made checkpoints."""

from __future__ import annotations

import itertools
import json
import os
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from k3.errors import UsageError
from k3.text.tokenizer import (
    CONFIG_FILE,
    CONTROL_OFFSETS,
    RELEASED_ORDINARY,
    SPECIAL_SLOTS,
    VOCABULARY_FILE,
)

_WORDS = """
    the of and to in a is that it was for on are as with his they at be this have from or one had by
    word but not what all were we when your can said there use an each which she do how their if will up
    other about out many then them these so some her would make like him into time has look two more
    write go see number no way could people my than first water been call who oil its now find long down
    day did get come made may part over new sound take only little work know place year live me back
    give most very after thing our just name good sentence man think say great where help through much
    before line right too mean old any same tell boy follow came want show also around form three small
    set put end does another well large must big even such because turn here why ask went men read need
    land different home us move try kind hand picture again change off play spell air away animal house
    point page letter mother answer found study still learn should world high every near add food
    between own below country plant last school father keep tree never start city earth eye light
    thought head under story saw left few while along might close something seem next hard open example
    begin life always those both paper together got group often run
"""
"""Common English words."""


def ordinary_tokens(count: int) -> list[bytes]:
    """The first `count` ≥ 256 tokens, by rank, of the hand-made vocabulary; the same on every machine.

    The 256 single bytes by value, runs of spaces, common English words with a space before them, the same
    without one, then numbers and letter sequences without end. Byte-pair merging reaches a word with a space
    inside a longer piece, whatever `count` is: its prefixes come before it, and what could break it up after.

    Raises:
        UsageError: `count` is below 256.
    """
    if count < 256:
        raise UsageError(f"A vocabulary of {count} ordinary tokens has no room for the 256 single bytes.")
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    for text in _texts():
        if len(tokens) >= count:
            break
        encoded = text.encode()
        tokens.update(dict.fromkeys(encoded[:end] for end in range(2, len(encoded) + 1)))
    return list(tokens)[:count]


def write_vocabulary(directory: str | os.PathLike[str], vocab_size: int) -> None:
    """Write a hand-made tokenizer of `vocab_size` ids (256 of them special slots) into `directory`.

    Raises:
        UsageError: fewer than 512 ids, or the released 163,840, whose place is the released vocabulary's.
    """
    if vocab_size < 256 + SPECIAL_SLOTS:
        raise UsageError(
            f"A vocabulary of {vocab_size} ids can't be written: 256 single bytes and {SPECIAL_SLOTS} special"
            f" slots need {256 + SPECIAL_SLOTS}. Choose a larger vocab_size."
        )
    write_tokenizer_files(directory, ordinary_tokens(vocab_size - SPECIAL_SLOTS))


def write_tokenizer_files(directory: str | os.PathLike[str], tokens: Sequence[bytes]) -> None:
    """Write `tiktoken.model` with `tokens` by rank and the `tokenizer_config.json` that goes with it.

    Each file appears whole or not at all; files of these names are replaced.

    Raises:
        UsageError: 163,584 tokens, a number by which the released vocabulary is known.
        OSError: the directory can't be written.
    """
    if len(tokens) == RELEASED_ORDINARY:
        raise UsageError(
            f"A vocabulary of {RELEASED_ORDINARY} ordinary tokens can't be made: the released one has as many"
            f" and a {VOCABULARY_FILE} of that length must have its checksum. Copy the released "
            f"{VOCABULARY_FILE} and {CONFIG_FILE}, or choose another vocab_size."
        )
    lines = [b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens)]
    _write_whole(Path(directory) / VOCABULARY_FILE, b"".join(lines))
    config = json.dumps(_tokenizer_config(len(tokens)), indent=1) + "\n"
    _write_whole(Path(directory) / CONFIG_FILE, config.encode())


def _texts() -> Iterator[str]:
    words = _WORDS.split()
    yield from (" " * 8, "\n\n")
    yield from (f" {word}" for word in words)
    yield from (f" {word.capitalize()}" for word in words)
    yield from words
    yield from map(str.capitalize, words)
    # The pattern cuts digits into groups of three, so longer numbers would never be used.
    yield from (f"{number:02}" for number in range(100))
    yield from (f"{number:03}" for number in range(1000))
    for length in itertools.count(2):
        yield from map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=length))


def _tokenizer_config(n_ordinary: int) -> dict[str, Any]:
    names = {offset: name for name, offset in CONTROL_OFFSETS.items()}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    slots = {
        str(token): {"content": names.get(token - n_ordinary, f"<|reserved_token_{token}|>"), **flags}
        for token in range(n_ordinary, n_ordinary + SPECIAL_SLOTS)
    }
    return {
        "added_tokens_decoder": slots,
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": 1_048_576,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def _write_whole(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
