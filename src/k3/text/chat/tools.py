"""Tool calls and their results, as a conversation holds them and as a prompt has them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from k3.text.chat.errors import ConversationError
from k3.text.chat.segments import SegmentWriter

Arguments = Mapping[str, object] | str
"""A call's arguments by name, or the text that was to be a JSON object and can't be parsed."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an assistant message. `field` is its place in the conversation."""

    id: str | None
    name: str
    arguments: Arguments
    field: str


@dataclass(frozen=True, slots=True)
class Result:
    """A tool message. `name` is the tool's as the message itself has it."""

    id: str | None
    name: str | None
    message: Mapping[str, object]
    field: str


def read_calls(message: Mapping[str, object], field: str) -> list[Call]:
    """The calls of an assistant message.

    Raises:
        ConversationError: a call has no name, or arguments that are not an object.
    """
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ConversationError(f"{field}.tool_calls", "expected a list of tool calls.")
    return [_read_call(call, f"{field}.tool_calls[{place}]") for place, call in enumerate(calls)]


def _read_call(call: object, field: str) -> Call:
    if not isinstance(call, Mapping):
        raise ConversationError(field, "expected a tool call, which is an object.")
    # Some clients leave the wrapper out.
    function = call.get("function", call)
    inside = f"{field}.function" if "function" in call else field
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(f"{inside}.name", "expected the called tool's name.")
    arguments = read_arguments(function.get("arguments"), f"{inside}.arguments")
    return Call(_id(call.get("id")), str(function["name"]), arguments, field)


def read_arguments(arguments: object, field: str) -> Arguments:
    """A call's arguments, given as an object, as its JSON, as text that is no JSON, or not at all.

    Raises:
        ConversationError: they are something else than an object.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
    if not isinstance(parsed, Mapping):
        raise ConversationError(field, "the arguments of a tool call must be a JSON object.")
    return parsed


def read_result(message: Mapping[str, object], field: str) -> Result:
    """A tool message."""
    name = message.get("tool", message.get("name"))
    return Result(
        _id(message.get("tool_call_id", message.get("id"))), None if name is None else str(name), message, field
    )


def _id(value: object) -> str | None:
    return None if value is None else str(value)


def in_call_order(run: Sequence[Result], calls: Sequence[Call], first: int) -> list[tuple[str, Result]]:
    """A run of results with the names of their tools.

    If all of them answer one of `calls` by its id, they come in the order of the calls and the calls name them. If
    one doesn't, they keep their order, and a result that names no tool is taken to answer the call at its place:
    `first`, counted from 0, for the run's first one.

    Raises:
        ConversationError: a result's tool can't be told.
    """
    places: dict[str | None, int] = {}
    for place, call in enumerate(calls):
        places.setdefault(call.id, place)
    if all(result.id is not None and result.id in places for result in run):
        ordered = sorted(run, key=lambda result: places[result.id])
        return [(calls[places[result.id]].name, result) for result in ordered]
    return [(_name(result, calls, first + offset), result) for offset, result in enumerate(run)]


def _name(result: Result, calls: Sequence[Call], place: int) -> str:
    if result.name is not None:
        return result.name
    if place < len(calls):
        return calls[place].name
    raise ConversationError(
        result.field,
        "the tool of this result can't be told: it has no `tool` or `name`, and neither its `tool_call_id` nor its "
        f"place, {place + 1}, is that of a call of the last assistant message.",
    )


def write_calls(out: SegmentWriter, calls: Iterable[Call]) -> None:
    """The calls of an assistant message; nothing if there are none."""
    calls = list(calls)
    if not calls:
        return
    with out.element("tools"):
        for number, call in enumerate(calls, start=1):
            with out.element("call", ("tool", call.name), ("index", number)):
                _write_arguments(out, call)


def _write_arguments(out: SegmentWriter, call: Call) -> None:
    if isinstance(call.arguments, str):
        with out.element("json", ("type", "object")):
            out.text(call.arguments, call.field)
        return
    for key, value in call.arguments.items():
        with out.element("argument", ("key", key), ("type", _type_name(value))):
            out.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), call.field)


def _type_name(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"
