"""The one normalisation above the bare encoder, for chat, files and every server interface alike.

Where the encoder leaves out what it doesn't know, this refuses it with its place; where settings are absent, this has
the defaults. What it lets through, `render_segments` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from k3.text.chat.errors import ConversationError
from k3.text.chat.fields import JsonObject, check_json, take_list, take_object, take_text
from k3.text.chat.instructions import schema_of
from k3.text.chat.render import render_segments
from k3.text.chat.segments import Segment
from k3.text.chat.tools import read_arguments

DEFAULT_EFFORT = "max"
"""How much the model thinks where nothing is said, as in the official service."""

EFFORT_NAMES: Mapping[str, str | None] = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""What may be asked for, and the effort that the model is told; None is no thinking at all."""

_TEXTS = {"name", "reasoning_content", "reasoning", "tool_call_id", "id", "tool"}
_FIELDS = {
    "system": {"role", "content", "name", "tools"},
    "developer": {"role", "content", "name", "tools"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "reasoning_content", "reasoning", "tool_calls"},
    "tool": {"role", "content", "name", "tool_call_id", "id", "tool"},
}
"""The fields of a message, by its role."""

_WITHOUT_EFFECT = {"id", "type", "status", "index", "refusal", "annotations", "cache_control"}
"""Fields that clients send along with messages, parts and calls, and that don't belong to the text."""

_SETTINGS = ("messages", "tools", "reasoning_effort", "tool_choice", "response_format")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked conversation with its settings; `effort` None is thinking switched off."""

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject]
    effort: str | None
    tool_choice: object
    response_format: JsonObject | None

    @classmethod
    def of(
        cls,
        messages: object,
        tools: object = None,
        effort: object = None,
        tool_choice: object = None,
        response_format: object = None,
    ) -> Self:
        """Check and complete a conversation.

        Args:
            messages: a list of one message or more.
            tools: a list of function tools, or None.
            effort: a name of `EFFORT_NAMES`; None is `DEFAULT_EFFORT`.
            tool_choice: None, "auto", "none", "required", or an object that names a declared function.
            response_format: None, or an object whose `type` is text, json_object or json_schema.

        Raises:
            ConversationError: something is not known, not possible, or no JSON; its `field` says where.
        """
        try:
            checked = [_message(message, field) for field, message in take_list(messages, "messages")]
            declared = _tools(tools, "tools")
            response_format = _response_format(response_format)
        except RecursionError:
            raise ConversationError("messages", "objects or lists are nested too deeply.") from None
        if not checked:
            raise ConversationError("messages", "expected at least one message.")
        known = [*declared, *(tool for message in checked for tool in message.get("tools", ()))]
        choice = _tool_choice(tool_choice, {tool["function"]["name"] for tool in known})
        return cls(checked, declared, _effort(effort), choice, response_format)

    @classmethod
    def read(cls, value: object) -> Self:
        """A conversation from a JSON value: a list of messages, or an object with them and their settings.

        Raises:
            ConversationError: see `of`; or the object has another field.
        """
        if not isinstance(value, Mapping):
            return cls.of(value)
        for name in value:
            if name not in _SETTINGS:
                raise ConversationError(str(name), f"this field is not known; expected {', '.join(_SETTINGS)}.")
        return cls.of(*(value.get(name) for name in _SETTINGS))

    @property
    def thinking(self) -> bool:
        """Whether the reply begins in the thinking channel."""
        return self.effort is not None

    def segments(self, add_generation_prompt: bool = True) -> list[Segment]:
        """The prompt, by default up to the begin of the reply.

        Raises:
            ConversationError: it can't be told which tool a tool message's result is of.
        """
        return render_segments(
            self.messages,
            tools=self.tools,
            thinking=self.thinking,
            thinking_effort=self.effort,
            tool_choice=self.tool_choice,
            response_format=self.response_format,
            add_generation_prompt=add_generation_prompt,
        )


def _message(message: object, field: str) -> JsonObject:
    fields = take_object(message, field)
    role = fields.get("role")
    if not isinstance(role, str) or role not in _FIELDS:
        raise ConversationError(f"{field}.role", f"expected one of {', '.join(_FIELDS)}, found {role!r}.")
    _only(fields, _FIELDS[role], field)
    texts = _TEXTS & _FIELDS[role] & fields.keys()
    checked: dict[str, object] = {name: take_text(fields[name], f"{field}.{name}") for name in texts}
    # The model was taught no developer role; what it says is for the model what a system message says.
    checked["role"] = "system" if role == "developer" else role
    if "tools" in fields:
        checked["tools"] = _tools(fields["tools"], f"{field}.tools")
    if "tool_calls" in fields:
        checked["tool_calls"] = [_call(call, at) for at, call in take_list(fields["tool_calls"], f"{field}.tool_calls")]
    if "content" in fields or not (role == "assistant" or checked.get("tools")):
        checked["content"] = _content(fields.get("content"), f"{field}.content")
    return checked


def _content(content: object, field: str) -> object:
    if isinstance(content, str):
        return take_text(content, field)
    return [_part(part, place) for place, part in take_list(content, field, "a text or a list of parts")]


def _part(part: object, field: str) -> JsonObject:
    fields = take_object(part, field)
    kind = fields.get("type")
    if kind in ("image", "image_url"):
        raise ConversationError(f"{field}.type", "images can't be read by this version. Leave them out.")
    if kind != "text":
        raise ConversationError(f"{field}.type", f"expected 'text', found {kind!r}. Only texts can be read.")
    _only(fields, {"type", "text"}, field)
    return {"type": "text", "text": take_text(fields.get("text"), f"{field}.text")}


def _call(call: object, field: str) -> JsonObject:
    fields = take_object(call, field)
    _only(fields, {"id", "type", "function"}, field)
    if fields.get("type", "function") != "function":
        raise ConversationError(f"{field}.type", f"expected 'function', found {fields['type']!r}.")
    inside = f"{field}.function"
    function = take_object(fields.get("function"), inside)
    _only(function, {"name", "arguments"}, inside)
    arguments = read_arguments(function.get("arguments"), f"{inside}.arguments")
    check_json(arguments, f"{inside}.arguments")
    named = {"name": take_text(function.get("name"), f"{inside}.name"), "arguments": arguments}
    return {"id": take_text(fields["id"], f"{field}.id"), "function": named} if "id" in fields else {"function": named}


def _tools(tools: object, field: str) -> list[JsonObject]:
    """Function tools, which the prompt has as they were given."""
    return [] if tools is None else [_tool(tool, place) for place, tool in take_list(tools, field)]


def _tool(tool: JsonObject, field: str) -> JsonObject:
    fields = take_object(tool, field)
    if fields.get("type") != "function":
        raise ConversationError(f"{field}.type", f"expected 'function', found {fields.get('type')!r}.")
    function = take_object(fields.get("function"), f"{field}.function")
    if not take_text(function.get("name"), f"{field}.function.name"):
        raise ConversationError(f"{field}.function.name", "expected a name of one character or more.")
    check_json(tool, field)
    return tool


def _effort(effort: object) -> str | None:
    if effort is None:
        return DEFAULT_EFFORT
    if not isinstance(effort, str) or effort not in EFFORT_NAMES:
        raise ConversationError("reasoning_effort", f"expected one of {', '.join(EFFORT_NAMES)}, found {effort!r}.")
    return EFFORT_NAMES[effort]


def _tool_choice(choice: object, names: set[str]) -> object:
    match choice:
        case None | "auto" | "none":
            return choice
        case "required":
            if not names:
                raise ConversationError("tool_choice", "a tool must be called, but none is declared.")
            return choice
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                raise ConversationError("tool_choice.function.name", f"no tool {name!r} is declared.")
            return choice
        case _:
            raise ConversationError("tool_choice", "expected auto, none, required, or an object naming a function.")


def _response_format(response_format: object) -> JsonObject | None:
    if response_format is None:
        return None
    fields = take_object(response_format, "response_format")
    kind = fields.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ConversationError("response_format.type", f"expected text, json_object or json_schema, found {kind!r}.")
    if kind == "json_schema" and not isinstance(schema_of(fields), Mapping | bool):
        raise ConversationError("response_format.json_schema.schema", "expected a JSON schema, which is an object.")
    check_json(fields, "response_format")
    return fields


def _only(fields: JsonObject, known: set[str], field: str) -> None:
    """Refuse fields that would be ignored though they may matter."""
    for name, value in fields.items():
        if name not in known and name not in _WITHOUT_EFFECT and value not in ("", []):
            raise ConversationError(f"{field}.{name}", "this field is not known here.")
