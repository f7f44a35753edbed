"""JSON values taken under rules; what breaks one is refused with its place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from k3.text.chat.errors import ConversationError

JsonObject = Mapping[str, Any]


def take_object(value: object, field: str) -> JsonObject:
    """An object's fields; those that are null count as absent.

    Raises:
        ConversationError: it is no object.
    """
    if not isinstance(value, Mapping):
        raise ConversationError(field, f"expected an object, found {kind_of(value)}.")
    return {name: item for name, item in value.items() if item is not None}


def take_list(value: object, field: str, expected: str = "a list") -> list[tuple[str, Any]]:
    """A list's items with their places.

    Raises:
        ConversationError: it is no list.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ConversationError(field, f"expected {expected}, found {kind_of(value)}.")
    return [(f"{field}[{place}]", item) for place, item in enumerate(value)]


def take_text(value: object, field: str) -> str:
    """A text.

    Raises:
        ConversationError: it is none, or has a lone surrogate.
    """
    if not isinstance(value, str):
        raise ConversationError(field, f"expected a text, found {kind_of(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConversationError(
            field, f"the text has a lone surrogate, U+{ord(value[error.start]):04X}, at character {error.start}."
        ) from None
    return value


def check_json(value: object, field: str) -> None:
    """Refuse what is no JSON value.

    Raises:
        ConversationError: a number is not finite, a text has a lone surrogate, or a value is of another type.
    """
    match value:
        case None | bool() | int():
            pass
        case float():
            if not math.isfinite(value):
                raise ConversationError(field, f"JSON has no number {value}.")
        case str():
            take_text(value, field)
        case Mapping():
            for name, item in value.items():
                check_json(item, f"{field}.{take_text(name, field)}")
        case _:
            for place, item in take_list(value, field, "a JSON value"):
                check_json(item, place)


def kind_of(value: object) -> str:
    """What a value is, in JSON's words where it has any."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case Mapping():
            return "an object"
        case list() | tuple():
            return "a list"
        case _:
            return f"a value of type {type(value).__name__}"
