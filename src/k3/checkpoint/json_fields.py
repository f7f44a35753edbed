"""Fields of a JSON object, taken under rules that say what is acceptable, with every problem noted.

A `Rule` accepts a value or not and can say what it expects. A `Reader` stands for one object of the file and
collects one sentence per field that can't be used. Neither has defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from k3.errors import ConfigError

MAX_BYTES: Final = 16 << 20
ADVICE: Final = "Use the config.json that was released with this checkpoint."


class Missing:
    """Stands for a field that the file does not have."""


MISSING: Final = Missing()


class Rule(Protocol):
    def accepts(self, value: object) -> bool: ...

    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `low` to `high`; neither true/false nor 1.0 is one."""

    low: int
    high: int
    multiple_of: int = 1

    def accepts(self, value: object) -> bool:
        return type(value) is int and self.low <= value <= self.high and value % self.multiple_of == 0

    def __str__(self) -> str:
        kind = "a whole number" if self.multiple_of == 1 else f"a multiple of {self.multiple_of}"
        return f"{kind} from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class Number:
    """A number whose float32 value is finite and not zero."""

    low: float
    high: float

    def accepts(self, value: object) -> bool:
        return type(value) in (int, float) and self.low <= value <= self.high  # type: ignore[operator]

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few JSON values, compared with their types: 1 is not true."""

    values: tuple[object, ...]

    def accepts(self, value: object) -> bool:
        return any(type(value) is type(v) and value == v for v in self.values)

    def __str__(self) -> str:
        return " or ".join("absent" if v is MISSING else show(v) for v in self.values)


@dataclass(frozen=True, slots=True)
class WholeList:
    """A list of whole numbers; their range depends on other fields and is checked with them."""

    def accepts(self, value: object) -> bool:
        return type(value) is list and all(type(v) is int for v in value)

    def __str__(self) -> str:
        return "a list of whole numbers"


@dataclass(frozen=True)
class Reader:
    """Takes fields of one JSON object; `path` is the object's place in the file, `problems` grows."""

    fields: Mapping[str, object]
    path: str
    problems: list[str]

    def take(self, name: str, rule: Rule) -> object:
        """The field's value, or MISSING after noting why it can't be used."""
        value = self.fields.get(name, MISSING)
        if rule.accepts(value):
            return value
        self.problem(name, f"expected {rule}, found {show(value)}")
        return MISSING

    def check(self, rules: Mapping[str, Rule]) -> dict[str, Any]:
        """Usable values of these fields; the others are noted as problems."""
        taken = {name: self.take(name, rule) for name, rule in rules.items()}
        return {name: value for name, value in taken.items() if value is not MISSING}

    def child(self, name: str) -> Reader | None:
        """The object in this field, or None after noting that there is none."""
        value = self.fields.get(name, MISSING)
        if isinstance(value, dict):
            return Reader(value, f"{self.path}{name}.", self.problems)
        self.problem(name, f"expected an object, found {show(value)}")
        return None

    def problem(self, name: str, text: str) -> None:
        self.problems.append(f"{self.path}{name}: {text}")


def some(numbers: list[int]) -> str:
    """The first few of many layers."""
    shown = ", ".join(show(n) for n in numbers[:5])
    return shown if len(numbers) <= 5 else f"{shown} and {len(numbers) - 5} more"


def show(value: object) -> str:
    """A JSON value in a few words, however large it is."""
    match value:
        case Missing():
            return "no such field"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case int() | float():
            digits = str(value)
            return digits if len(digits) <= 24 else f"{digits[:12]}... ({len(digits)} characters)"
        case str():
            return f'"{value}"' if len(value) <= 40 else f'"{value[:40]}..." ({len(value)} characters)'
        case list():
            return f"a list of {len(value)}"
        case _:
            return "an object"


def read_small_file(path: Path) -> bytes:
    try:
        if not path.is_file():
            kind = "is not a regular file" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {kind}. Give a checkpoint directory that holds it, or --config PATH.")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{path}: expected at most {MAX_BYTES} bytes, found {size}: not a config. {ADVICE}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Check the path and its permissions.") from error


def decode_object(data: bytes, where: str) -> dict[str, object]:
    try:
        value = msgspec.json.decode(data)
    except RecursionError as error:
        raise ConfigError(f"{where}: expected a flat JSON object, found one nested too deeply. {ADVICE}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigError(f"{where}: expected a JSON object, found malformed JSON: {error}. {ADVICE}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {show(value)}. {ADVICE}")
    return value
