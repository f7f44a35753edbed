"""Many similar lines of JSON text at once: literals, numbers and names of routed experts as array operations.

All but one in two hundred of a full checkpoint's tensors are routed experts', written in one way. Here a cursor is
an int64 array of positions in the text, one for each line, and a step says for which of them it succeeded. Nothing
is accepted that a JSON parser would read in another way; what doesn't match is the caller's to parse.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from k3.checkpoint.headers.names import Keys, NameTable
from k3.checkpoint.specs import EXPERT_TENSORS, EXPERTS, LAYERS, PREFIXES

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_NUMBER_DIGITS: Final = 4
"""Longer numbers have no place of their own in a name's key."""
_TAILS: Final = tuple((f".{tensor}", int(tensor[1])) for tensor in EXPERT_TENSORS)
_TAIL_BYTES: Final = min(len(tail) for tail, _ in _TAILS) + 1


class Text:
    """Bytes of a JSON text and the steps that a cursor can take in it."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.codes = np.frombuffer(raw, np.uint8)

    def strings(self, at: Positions, length: int) -> npt.NDArray[np.bytes_]:
        """`length` bytes from each position as one S array; positions too near the end give other bytes."""
        if not 0 < length <= len(self.codes):
            return np.zeros(len(at), f"S{max(length, 1)}")
        windows = np.ndarray((len(self.codes) - length + 1,), f"S{length}", self.codes, strides=(1,))
        return windows[np.clip(at, 0, len(windows) - 1)]

    def literal(self, at: Positions, text: bytes) -> Mask:
        """Whether `text`, which does not end in NUL, stands at each position."""
        found: Mask = self.strings(at, len(text)) == text
        return found & (at + len(text) <= len(self.codes))

    def numbers(self, at: Positions, digits: int) -> tuple[Positions, Positions, Mask]:
        """Values of the numbers at each position, the positions behind them, and which are numbers.

        A number has at most `digits` digits, no leading zero, and something else behind it.
        """
        window = self.strings(at, digits + 1).view(np.uint8).reshape(len(at), digits + 1).T - np.uint8(ord("0"))
        is_digit = window < 10
        values, length = np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
        running = np.ones(len(at), np.bool_)
        for place in range(digits):
            running &= is_digit[place]
            values = np.where(running, values * 10 + window[place], values)
            length += running
        whole = (length > 0) & ~(running & is_digit[digits]) & ((window[0] != 0) | (length == 1))
        return values, at + length, whole & (at + digits < len(self.codes))

    def expert_names(self, at: Positions, names: NameTable) -> tuple[Keys, Positions, Mask]:
        """Keys of the routed experts' tensors named at each position, positions behind the names, and which are such.

        A name is recognised together with the quote behind it; that in front of it is the caller's.
        """
        keys, ends, found = np.zeros(len(at), np.uint64), at.copy(), np.zeros(len(at), np.bool_)
        for prefix in PREFIXES:
            pattern = f"{prefix}{LAYERS}{{}}.{EXPERTS}{{}}.w{{}}."
            left = np.flatnonzero(~found & self.literal(at, f"{prefix}{LAYERS}".encode()))
            if not len(left):
                continue
            layers, cursor, sound = self.numbers(at[left] + len(prefix + LAYERS), _NUMBER_DIGITS)
            sound &= self.literal(cursor, f".{EXPERTS}".encode())
            experts, cursor, whole = self.numbers(cursor + len(EXPERTS) + 1, _NUMBER_DIGITS)
            sound &= whole
            tails = self.strings(cursor, _TAIL_BYTES)
            for tail, matrix in _TAILS:
                text = f'{tail}"'.encode()
                chosen = np.flatnonzero(sound & (tails == text[:_TAIL_BYTES]))
                chosen = chosen[self.literal(cursor[chosen], text)]
                if not len(chosen):
                    continue
                rows, part = left[chosen], tail.rpartition(".")[2]
                keys[rows] = names.add_pattern(pattern + part, layers[chosen], experts[chosen], matrix)
                ends[rows] = cursor[chosen] + len(tail)
                found[rows] = True
        return keys, ends, found
