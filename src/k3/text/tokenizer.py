"""The tokenizer: token ids of a text and back, straight from a checkpoint's two tokenizer files.

`tiktoken.model` holds the ordinary tokens (one `base64 rank` line each), `tokenizer_config.json` the spelling
of the 256 special slots behind them. Nothing else is read: no network, no cache.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
from binascii import a2b_base64, b2a_base64
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from k3.errors import TokenizerError, UsageError

VOCABULARY_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

SPECIAL_SLOTS = 256
"""Slots for control tokens, behind the ordinary tokens."""

CONTROL_OFFSETS: Mapping[str, int] = MappingProxyType(
    {
        "[BOS]": 0,
        "[EOS]": 1,
        "<|end_of_msg|>": 2,
        "<|open|>": 3,
        "<|close|>": 4,
        "<|sep|>": 5,
        "[start_header_id]": 6,
        "[end_header_id]": 7,
        "[EOT]": 9,
        "<|media_begin|>": 18,
        "<|media_content|>": 19,
        "<|media_end|>": 20,
        "<|media_pad|>": 21,
        "<osagent_mode>": 65,
        "[UNK]": 254,
        "[PAD]": 255,
    }
)
"""The named control tokens of the released map: name → id − number of ordinary tokens."""

STOP_NAMES = ("<|end_of_msg|>", "[EOS]", "[EOT]")
"""Control tokens that end a generation, whatever the configs say."""

RELEASED_ORDINARY = 163_584
RELEASED_SHA256 = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"

PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How a text is cut into pieces before byte-pair merging (syntax of Rust's `fancy-regex`)."""

_MAX_FILE_BYTES = 64 << 20
_REMEDY = (
    f"Put {VOCABULARY_FILE} and {CONFIG_FILE} exactly as released beside the checkpoint "
    "(`k3 download DIR` fetches both), or name the directory that has them with --tok."
)


@dataclass(frozen=True, slots=True)
class LengthGuards:
    """The released tokenizer's limits on what is encoded in one go; they change the ids of very long texts.

    A text is cut into slices of `slice_characters`; a slice is cut again so that no run of consecutive
    whitespace or of consecutive non-whitespace (as `str.isspace` says) has more than `run_characters`. Each
    part is encoded by itself.
    """

    slice_characters: int = 400_000
    run_characters: int = 25_000

    def parts(self, text: str) -> Iterator[str]:
        """The parts of `text`, in order; the time is linear in its length."""
        for start in range(0, len(text), self.slice_characters):
            yield from self._cut_runs(text[start : start + self.slice_characters])

    def _cut_runs(self, text: str) -> Iterator[str]:
        if len(text) <= self.run_characters:
            yield text
            return
        too_long = self.run_characters + 1
        # The lookbehinds let a match start only where a run starts: without them the search is quadratic.
        long_runs = re.compile(rf"(?<!\S)\S{{{too_long},}}|(?<!\s)\s{{{too_long},}}")
        start = 0
        for run in long_runs.finditer(text):
            for cut in range(run.start() + self.run_characters, run.end(), self.run_characters):
                yield text[start:cut]
                start = cut
        yield text[start:]


RELEASED_GUARDS = LengthGuards()


class Tokenizer:
    """Text to token ids and back.

    Ids 0 … `n_ordinary` − 1 are ordinary tokens, the 256 after them control tokens. Nothing is put before or
    after the ids of a text (no beginning-of-sequence token). Instances don't change; threads may share one.

    Attributes:
        n_ordinary: number of ordinary tokens.
        n_vocab: number of ids, `n_ordinary` + 256.
        control: id of each of the 256 control tokens by its spelling.
        stop_ids: ids that end a generation: `<|end_of_msg|>`, `[EOS]`, `[EOT]` and the config's `eos_token`.
    """

    def __init__(self, tokens: Sequence[bytes], control_names: Sequence[str], eos_token: str | None = None) -> None:
        """Build from checked parts; `Tokenizer.load` reads and checks the files.

        Args:
            tokens: the bytes of the ordinary tokens by id; all 256 single bytes are among them.
            control_names: the spelling of the 256 special slots, in order.
            eos_token: the spelling of a further control token that ends a generation.
        """
        from tiktoken import Encoding

        self.n_ordinary = len(tokens)
        self.n_vocab = self.n_ordinary + len(control_names)
        control = {name: self.n_ordinary + slot for slot, name in enumerate(control_names)}
        self.control: Mapping[str, int] = MappingProxyType(control)
        stop_names = (*STOP_NAMES, eos_token) if eos_token else STOP_NAMES
        self.stop_ids = frozenset(control[name] for name in stop_names)
        self._bytes = [*tokens, *(name.encode() for name in control_names)]
        self._encoding = Encoding(
            "k3",
            pat_str=PATTERN,
            mergeable_ranks=dict(zip(tokens, range(self.n_ordinary), strict=True)),
            special_tokens=control,
        )

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Tokenizer:
        """Read `tiktoken.model` and `tokenizer_config.json` from `directory`.

        Raises:
            TokenizerError: a file is missing, unreadable, damaged, or not of the released kind.
        """
        tokens = _read_vocabulary(Path(directory) / VOCABULARY_FILE)
        config = _Config.read(Path(directory) / CONFIG_FILE)
        names = config.control_names(len(tokens))
        return cls(tokens, names, config.eos_token(names))

    def encode(self, text: str, allow_special: bool = False, *, guards: LengthGuards = RELEASED_GUARDS) -> list[int]:
        """The ids of `text`.

        Unless `allow_special`, what spells a control token is plain text and gives ordinary ids only. With
        it, the 256 spellings give their ids. As in the released code the length guards come first: a spelling
        that one of their cuts goes through is plain text.

        Raises:
            UsageError: the text holds a lone surrogate, which no encoding of characters can write.
        """
        _check_characters(text)
        encode = self._encode_special if allow_special else self._encoding.encode_ordinary
        return [token for part in guards.parts(text) for token in encode(part)]

    def encode_segment(self, text: str, control: bool) -> list[int]:
        """The ids of one segment of a rendered conversation; only a control segment has control tokens."""
        return self.encode(text, allow_special=control)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, control tokens as they are spelled; U+FFFD stands for bytes that are not UTF-8.

        Raises:
            UsageError: an id is not in the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, not necessarily whole characters; a control token's are its spelling.

        Raises:
            UsageError: the id is not in the vocabulary.
        """
        index = operator.index(token)
        if not 0 <= index < self.n_vocab:
            raise UsageError(
                f"Token id {index} is not in the vocabulary: ids go from 0 to {self.n_vocab - 1}. "
                "Check that the ids were made with this checkpoint's tokenizer."
            )
        return self._bytes[index]

    def _encode_special(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Read the tokenizer of the checkpoint directory `path`; only its two tokenizer files are needed.

    Raises:
        TokenizerError: a file is missing, unreadable, damaged, or not of the released kind.
    """
    return Tokenizer.load(path)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"The text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}. It "
            "is half of a character and can't be encoded; remove it or give the whole character."
        ) from None


def _fail(path: Path, problem: str) -> NoReturn:
    raise TokenizerError(f"{path}: {problem} {_REMEDY}")


def _read_file(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size <= _MAX_FILE_BYTES:
            return path.read_bytes()
    except FileNotFoundError:
        _fail(path, "this tokenizer file is missing.")
    except OSError as error:
        _fail(path, f"this tokenizer file can't be read: {error.strerror}.")
    _fail(path, f"the file has {size} bytes; a tokenizer file has at most {_MAX_FILE_BYTES}.")


def _read_vocabulary(path: Path) -> list[bytes]:
    """The tokens of a `tiktoken.model` by rank."""
    data = _read_file(path)
    lines = data.splitlines()
    if len(lines) == RELEASED_ORDINARY and (found := hashlib.sha256(data).hexdigest()) != RELEASED_SHA256:
        _fail(
            path,
            f"the file has the {RELEASED_ORDINARY} lines of the released vocabulary but is damaged: expected "
            f"sha256 {RELEASED_SHA256}, found {found}.",
        )
    tokens = [_parse_line(path, rank, line) for rank, line in enumerate(lines)]
    distinct = set(tokens)
    if len(distinct) != len(tokens):
        _fail_duplicate(path, tokens)
    if missing := [byte for byte in range(256) if bytes([byte]) not in distinct]:
        _fail(
            path,
            f"{len(missing)} of the 256 single bytes are not among its {len(tokens)} tokens (the first is "
            f"0x{missing[0]:02x}), so some text could not be encoded.",
        )
    return tokens


def _parse_line(path: Path, rank: int, line: bytes) -> bytes:
    encoded, _, number = line.partition(b" ")
    if number != b"%d" % rank:
        _fail(
            path,
            f"line {rank + 1} is {_excerpt(line)}; expected a base64 token, one space and the rank {rank} "
            "(ranks count up from 0 without a gap).",
        )
    try:
        token = a2b_base64(encoded)
    except ValueError:
        token = b""
    # The decoder skips characters that are not base64; only the one exact spelling of a token is accepted.
    if not token or b2a_base64(token, newline=False) != encoded:
        _fail(path, f"line {rank + 1} is {_excerpt(line)}; expected a token in base64 before the space.")
    return token


def _excerpt(line: bytes) -> str:
    return ascii(line[:60].decode("latin-1")) + ("…" if len(line) > 60 else "")


def _fail_duplicate(path: Path, tokens: list[bytes]) -> NoReturn:
    token = next(token for token, count in Counter(tokens).items() if count > 1)
    first = tokens.index(token)
    second = tokens.index(token, first + 1)
    _fail(path, f"lines {first + 1} and {second + 1} hold the same token {_excerpt(token)}; expected it once.")


@dataclass(frozen=True, slots=True)
class _Config:
    """`tokenizer_config.json`, of which the special slots and the eos token are used."""

    path: Path
    fields: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Config:
        data = _read_file(path)
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError) as error:
            _fail(path, f"the file is not JSON: {error}.")
        if not isinstance(fields, dict):
            _fail(path, f"expected a JSON object, found {type(fields).__name__}.")
        return cls(path, fields)

    def control_names(self, n_ordinary: int) -> list[str]:
        """The spelling of the 256 special slots behind `n_ordinary` ordinary tokens.

        A slot that the map leaves out is `<|reserved_token_N|>`, N being its id. Every name of
        `CONTROL_OFFSETS` must stand at its offset.
        """
        listed = self._listed_names()
        end = n_ordinary + SPECIAL_SLOTS
        for token in listed:
            if not n_ordinary <= token < end:
                _fail(
                    self.path,
                    f"added_tokens_decoder holds id {token} ({listed[token]}), but {VOCABULARY_FILE} beside "
                    f"it has {n_ordinary} ordinary tokens; expected special slots {n_ordinary} to {end - 1}. "
                    "One of the two files is cut short or belongs to another checkpoint.",
                )
        names = [listed.get(token, f"<|reserved_token_{token}|>") for token in range(n_ordinary, end)]
        for name, offset in CONTROL_OFFSETS.items():
            found = [n_ordinary + slot for slot, other in enumerate(names) if other == name]
            if found != [n_ordinary + offset]:
                where = " and ".join(map(str, found)) if found else "nowhere"
                _fail(
                    self.path,
                    f"added_tokens_decoder has the control token {name} at {where}; expected at id "
                    f"{n_ordinary + offset}, {offset} behind the first special slot.",
                )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            _fail(self.path, f"added_tokens_decoder spells more than one special slot {twice[0]}.")
        return names

    def eos_token(self, names: list[str]) -> str | None:
        """The spelling of `eos_token`, which may be a string, an object with `content`, null or absent."""
        token = self.fields.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            return None
        if token not in names:
            _fail(self.path, f"eos_token is {token!a}; expected the spelling of a special slot.")
        return str(token)

    def _listed_names(self) -> dict[int, str]:
        entries = self.fields.get("added_tokens_decoder")
        if not isinstance(entries, dict):
            _fail(
                self.path,
                "added_tokens_decoder, which names the special slots by id, is missing or no object.",
            )
        return {self._slot(key): self._spelling(key, entry) for key, entry in entries.items()}

    def _slot(self, key: str) -> int:
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", key):
            _fail(self.path, f"added_tokens_decoder has the key {key!a}; expected a token id.")
        return int(key)

    def _spelling(self, key: str, entry: Any) -> str:
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            _fail(self.path, f"added_tokens_decoder has no content for id {key}; expected the token's spelling.")
        try:
            content.encode()
        except UnicodeEncodeError:
            _fail(self.path, f"added_tokens_decoder spells id {key} with a lone surrogate.")
        return content
