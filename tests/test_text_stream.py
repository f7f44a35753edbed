"""Streamed decoding equals whole decoding, and never splits or withholds a character."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.errors import UsageError
from k3.text.stream import TextStream
from k3.text.tokenizer import Tokenizer, load_tokenizer
from k3.text.vocabulary import write_vocabulary

RELEASED = Path(__file__).resolve().parents[1].parent / "shared" / "data"
FFFD = "\ufffd"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """768 ordinary tokens, of which the first 256 are the single bytes by value."""
    directory = tmp_path_factory.mktemp("small")
    write_vocabulary(directory, 1024)
    return load_tokenizer(directory)


def stream(tokenizer: Tokenizer, ids: list[int] | bytes) -> list[str]:
    """What each id gives, then what the flush gives."""
    text_stream = TextStream(tokenizer)
    return [text_stream.push(token) for token in ids] + [text_stream.flush()]


CHARACTERS = ["é", "가", "한", "你", "🚀", "👨‍👩‍👧", "e\u0301", "\u200d", "\ufeff", "\U0010ffff", " the", "a"]
BROKEN = [
    b"\xff",
    b"\xc0\xaf",
    b"\xe0\x80",
    b"\xed\xa0\x80",
    b"\xf0\x9f",
    b"\xf4\x90",
    b"\xf5",
    b"\x80",
    b"\xc3",
]
BYTES = st.lists(
    st.one_of(
        st.sampled_from([text.encode() for text in CHARACTERS]),
        st.sampled_from(BROKEN),
        st.binary(min_size=1, max_size=3),
    ),
    max_size=15,
).map(b"".join)


@functools.cache
def beginnings() -> frozenset[bytes]:
    """All proper beginnings of encoded characters."""
    encoded = (chr(code).encode() for code in [*range(0x80, 0xD800), *range(0xE000, 0x110000)])
    return frozenset(data[:length] for data in encoded for length in range(1, len(data)))


def available(data: bytes) -> str:
    """All text that `data` determines: an end that may still become a character is left out, nothing else."""
    for length in (3, 2, 1):
        if data[-length:] in beginnings():
            data = data[:-length]
            break
    return data.decode("utf-8", errors="replace")


@given(BYTES)
@settings(max_examples=500, deadline=None)
def test_bytes_one_at_a_time(tokenizer: Tokenizer, data: bytes) -> None:
    deltas = stream(tokenizer, data)
    for count in range(len(data) + 1):
        assert "".join(deltas[:count]) == available(data[:count])
    assert "".join(deltas) == data.decode("utf-8", errors="replace")


@given(st.lists(st.one_of(st.integers(0, 1023), st.integers(128, 255)), max_size=40))
@settings(max_examples=500, deadline=None)
def test_any_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_valid_text_has_no_replacement(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace(FFFD, "")
    deltas = stream(tokenizer, text.encode())
    assert FFFD not in "".join(deltas)
    assert "".join(deltas) == text
    assert deltas[-1] == ""


def test_every_two_bytes(tokenizer: Tokenizer) -> None:
    for first in range(0x80, 0x100):
        for second in range(0x100):
            data = bytes([first, second])
            assert "".join(stream(tokenizer, data)[:-1]) == available(data), data


@pytest.mark.parametrize(
    ("data", "deltas"),
    [
        (b"\x80", [FFFD, ""]),
        (b"\xffa", [FFFD, "a", ""]),
        (b"\xf0\x9f\x9a\x80", ["", "", "", "🚀", ""]),
        (b"\xf0\x9f\x9aa", ["", "", "", FFFD + "a", ""]),
        (b"\xf0\x9f", ["", "", FFFD]),
        (b"\xed\xa0\x80", ["", FFFD * 2, FFFD, ""]),
        (b"\xed\x9f\xbf", ["", "", "\ud7ff", ""]),
        (b"\xc3\xc3\xa9", ["", FFFD, "é", ""]),
    ],
)
def test_when_replacements_come(tokenizer: Tokenizer, data: bytes, deltas: list[str]) -> None:
    assert stream(tokenizer, data) == deltas


def test_control_tokens_come_as_spelled(tokenizer: Tokenizer) -> None:
    ids = [0xF0, 0x9F, tokenizer.control["<|sep|>"], 0x61]
    assert stream(tokenizer, ids) == ["", "", FFFD + "<|sep|>", "a", ""]


def test_a_second_sequence_after_a_flush(tokenizer: Tokenizer) -> None:
    text_stream = TextStream(tokenizer)
    assert text_stream.push(0xF0) == ""
    assert text_stream.flush() == FFFD
    assert text_stream.flush() == ""
    assert [text_stream.push(byte) for byte in "é".encode()] == ["", "é"]


def test_unknown_id_leaves_the_stream_as_it_was(tokenizer: Tokenizer) -> None:
    text_stream = TextStream(tokenizer)
    text_stream.push(0xC3)
    with pytest.raises(UsageError, match="1024"):
        text_stream.push(1024)
    assert text_stream.push(0xA9) == "é"


def test_released_emoji_over_several_tokens() -> None:
    if not (RELEASED / "tiktoken.model").exists():
        pytest.skip("the released vocabulary is not on this machine")
    released = load_tokenizer(RELEASED)
    assert stream(released, [5885, 40101, 66957, 98]) == ["", "🚀", "", "🔥", ""]
    assert "".join(stream(released, [5885, 40101, 66957])) == "🚀" + FFFD
    for text in ["👨‍👩‍👧", "안녕하세요, 세계!", "हिन्दी", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢"]:
        deltas = stream(released, released.encode(text))
        assert FFFD not in "".join(deltas)
        assert "".join(deltas) == text
