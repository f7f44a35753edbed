"""Stop strings against their definition, however the text is divided."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3.errors import UsageError
from k3.text.stop import StopMatcher


def by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop string that is complete first (the longest of those), and that stop string."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held_by_definition(text: str, stops: list[str]) -> str:
    """The longest suffix of `text` that begins a stop string without completing it."""
    for start in range(len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[start:]
    return ""


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    deltas = [matcher.push(piece) for piece in pieces]
    return [*deltas, matcher.flush()], matcher.matched


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=5)
PIECES = st.lists(st.text("ab", max_size=6), max_size=12)


@given(PIECES, STOPS)
@example(["aa", "b"], ["aab"])
@example(["abab", "ac"], ["ababac", "bac"])
@example(["a", "b", "c"], ["abcd", "bc"])
@settings(max_examples=1000, deadline=None)
def test_equals_the_definition(pieces: list[str], stops: list[str]) -> None:
    deltas, matched = run(pieces, stops)
    assert ("".join(deltas), matched) == by_definition("".join(pieces), stops)


@given(PIECES, STOPS)
@settings(max_examples=500, deadline=None)
def test_holds_back_only_what_could_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = sent = ""
    for piece in pieces:
        text += piece
        sent += matcher.push(piece)
        if matcher.matched is not None:
            break
        assert text == sent + held_by_definition(text, stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "deltas", "matched"),
    [
        (["E", "ND"], ["END"], ["", "", ""], "END"),
        (["the E", "N", "D of"], ["END"], ["the ", "", "", ""], "END"),
        (["the LEGEND"], ["END"], ["the LEG", ""], "END"),
        (["E", "N", "E", "ND"], ["END"], ["", "", "EN", "", ""], "END"),
        (["E", "N"], ["END"], ["", "", "EN"], None),
        (["abc"], ["abc", "ab"], ["", ""], "ab"),
        (["xabc"], ["bc", "abc"], ["x", ""], "abc"),
        (["abx"], ["b", "abc"], ["a", ""], "b"),
        (["one", "\n", "\n", "two"], ["\n\n"], ["one", "", "", "", ""], "\n\n"),
        (["🚀", "🔥x"], ["🔥"], ["🚀", "", ""], "🔥"),
        (["any", "thing"], [], ["any", "thing", ""], None),
        (["a1b2"], ["e", "d", "c", "b", "z"], ["a1", ""], "b"),
        (["aa", "aa"], ["aaa", "aaa"], ["", "", ""], "aaa"),
    ],
)
def test_cases(pieces: list[str], stops: list[str], deltas: list[str], matched: str | None) -> None:
    assert run(pieces, stops) == (deltas, matched)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("a END b") == "a "
    assert matcher.push("c END") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "END"


def test_a_flush_forgets_what_was_begun() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("EN") == ""
    assert matcher.flush() == "EN"
    assert matcher.push("D") == "D"


def test_a_string_on_its_own_is_one_stop_string() -> None:
    matcher = StopMatcher("END")
    assert matcher.push("N E D END") == "N E D "


@pytest.mark.parametrize("stops", ["", [""], ["a", ""], [None], [3]])
def test_what_is_no_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(UsageError, match="Stop string") as error:
        StopMatcher(stops)
    assert error.value.exit_code == 2


def test_linear_time() -> None:
    matcher = StopMatcher(["a" * 50_000 + "b", "a" * 49_999 + "c"])
    start = time.perf_counter()
    sent = "".join(matcher.push("a" * 1000) for _ in range(400)) + matcher.flush()
    assert len(sent) == 400_000
    assert time.perf_counter() - start < 5
