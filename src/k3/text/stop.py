"""Stop strings: cuts a streamed text before the first of several strings."""

from __future__ import annotations

from collections.abc import Sequence

from k3.errors import UsageError


class StopMatcher:
    """Passes a streamed text on up to the first stop string.

    The stop string that is complete first ends the text; of those that are complete at the same character,
    the longest. So no match ever waits for more text, and how the text is divided over pushes makes no
    difference. Only the longest suffix that could still become a stop string is held back. Time is linear in
    the text (Knuth, Morris and Pratt's automaton for each string).

    Attributes:
        matched: the stop string that ended the text, None so far.
    """

    def __init__(self, stops: str | Sequence[str]) -> None:
        """Watch for `stops`; a string on its own is one stop string, no strings at all stop nothing.

        Raises:
            UsageError: a stop string is empty or not a string.
        """
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise UsageError(f"Stop string {stop!r} can't be used: expected one character or more.")
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._progress = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now sure to stand before any stop string; nothing after a match."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            if completed := self._advance(character):
                self.matched = max(completed, key=len)
                self._held = ""
                return pending[: end - len(self.matched)]
        cut = len(pending) - max(self._progress, default=0)
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """End the text: what was held back and belongs to no stop string."""
        rest, self._held = self._held, ""
        self._progress = [0] * len(self._stops)
        return rest

    def _advance(self, character: str) -> list[str]:
        """Move every automaton on by one character; the stop strings that it completes."""
        completed = []
        for index, stop in enumerate(self._stops):
            length = _extend(stop, self._fallbacks[index], self._progress[index], character)
            self._progress[index] = length
            if length == len(stop):
                completed.append(stop)
        return completed


def _extend(stop: str, fallbacks: list[int], length: int, character: str) -> int:
    """How much of `stop` the text ends in after `character`, if it ended in `length` characters before."""
    while length and stop[length] != character:
        length = fallbacks[length]
    return length + 1 if stop[length] == character else 0


def _fallbacks(stop: str) -> list[int]:
    """Entry n: the longest proper prefix of `stop` that its first n characters end in."""
    fallbacks = [0, 0]
    for character in stop[1:]:
        fallbacks.append(_extend(stop, fallbacks, fallbacks[-1], character))
    return fallbacks
