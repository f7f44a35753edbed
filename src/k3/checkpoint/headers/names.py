"""Tensor names as 64-bit keys.

A name is a template with its digit runs taken out, plus up to three numbers of up to four digits:
`model.layers.12.mlp.up_proj.weight` is `model.layers.{}.mlp.up_proj.weight` and 12. Further or longer runs, and those
with leading zeros, stay in the template, so name and key determine each other. Half a million names of a
mixture of experts have some sixty templates.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from k3.errors import CheckpointError

_NUMBER: Final = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,3})(?![0-9])")
_NUMBER_BITS: Final = 14  # four digits
_MAX_NUMBER: Final = 9999
_NUMBERS: Final = 3
_TEMPLATE_SHIFT: Final = _NUMBERS * _NUMBER_BITS
_MAX_TEMPLATES: Final = 1 << (64 - _TEMPLATE_SHIFT)
_MASK: Final = (1 << _NUMBER_BITS) - 1
_GAP: Final = "\0"

Keys = npt.NDArray[np.uint64]


class NameTable:
    """Numbers templates as they come; keys are comparable within one table."""

    def __init__(self) -> None:
        self._templates: list[str] = []
        self._ids: dict[str, int] = {}

    def add(self, names: Collection[str]) -> Keys:
        """Keys of these names: uint64 [len(names)]. CheckpointError for a name that can't have one."""
        return np.fromiter(map(self._add, names), np.uint64, len(names))

    def add_pattern(self, pattern: str, *numbers: npt.ArrayLike) -> Keys:
        """Keys of the names that `pattern` becomes with each `{}` replaced by `numbers`, broadcast together.

        The same as `add` of all those names. ValueError as in `keys_of`, or where a number has no place in a key.
        """
        template = pattern.replace("{}", _GAP)
        if template not in self._ids:
            self._ids[template] = self._new(template, pattern)
        keys, possible = self.keys_of(pattern, numbers)
        if not possible.all():
            raise ValueError(f"{pattern!r}: a number is not from 0 to {_MAX_NUMBER}")
        return keys

    def key(self, name: str) -> int | None:
        """The key of this name, or None where no name of its template was added."""
        parts = _NUMBER.split(name, _NUMBERS)
        template = self._ids.get(_GAP.join(parts[::2]))
        return None if template is None or _GAP in name else _pack(template, parts[1::2])

    def name(self, key: int) -> str:
        """The name that has this key."""
        texts = self._templates[key >> _TEMPLATE_SHIFT].split(_GAP)
        numbers = [str(key >> (_NUMBER_BITS * place) & _MASK) for place in reversed(range(_NUMBERS))]
        return texts[0] + "".join(number + text for number, text in zip(numbers, texts[1:], strict=False))

    def keys_of(self, pattern: str, numbers: Sequence[npt.ArrayLike]) -> tuple[Keys, npt.NDArray[np.bool_]]:
        """Keys of `pattern`, with each `{}` replaced by `numbers` broadcast together, and which of them can exist.

        ValueError where the pattern has other digit runs or another number of braces.
        """
        if pattern.count("{}") != len(numbers) or not 1 <= len(numbers) <= _NUMBERS or _NUMBER.search(pattern):
            raise ValueError(f"{pattern!r} does not have a pair of braces for each of {len(numbers)} numbers")
        columns = np.broadcast_arrays(*(np.asarray(n, np.int64) for n in numbers))
        template = self._ids.get(pattern.replace("{}", _GAP))
        keys = np.full(columns[0].shape, template or 0, np.uint64)
        for place in range(_NUMBERS):
            keys <<= np.uint64(_NUMBER_BITS)
            if place < len(columns):
                keys |= columns[place].astype(np.uint64) & np.uint64(_MASK)
        possible = np.logical_and.reduce([(c >= 0) & (c <= _MAX_NUMBER) for c in columns])
        return keys, possible & (template is not None)

    def under(self, keys: Keys, prefix: str) -> npt.NDArray[np.bool_]:
        """Which of these keys' names begin with `prefix`, which holds no digits."""
        ids = [i for i, text in enumerate(self._templates) if text.partition(_GAP)[0].startswith(prefix)]
        return np.isin(keys >> np.uint64(_TEMPLATE_SHIFT), ids)

    def _add(self, name: str) -> int:
        if _GAP in name:
            raise CheckpointError(f"The tensor name {name!r} holds a NUL character. Repair the shard.")
        parts = _NUMBER.split(name, _NUMBERS)
        template = _GAP.join(parts[::2])
        number = self._ids.get(template)
        if number is None:
            number = self._ids[template] = self._new(template, name)
        return _pack(number, parts[1::2])

    def _new(self, template: str, name: str) -> int:
        if len(self._templates) >= _MAX_TEMPLATES:
            raise CheckpointError(
                f"Expected at most {_MAX_TEMPLATES} different forms of tensor names, found more at {name!r}. "
                "This is not a Kimi K3 checkpoint."
            )
        self._templates.append(template)
        return len(self._templates) - 1


def first_number_bits(keys: Keys) -> Keys:
    """What names share that differ only behind their first number: template and that number, at most 36 bits."""
    return keys >> np.uint64(_TEMPLATE_SHIFT - _NUMBER_BITS)


def without_second_number(keys: Keys) -> Keys:
    """What names share that differ in their second number only."""
    return keys & ~np.uint64(_MASK << _NUMBER_BITS)


def first_numbers(keys: Keys) -> npt.NDArray[np.int64]:
    """The first number in each key's name; 0 where it has none."""
    return (first_number_bits(keys) & np.uint64(_MASK)).astype(np.int64)


def _pack(template: int, numbers: Sequence[str]) -> int:
    for number in numbers:
        template = template << _NUMBER_BITS | int(number)
    return template << _NUMBER_BITS * (_NUMBERS - len(numbers))
