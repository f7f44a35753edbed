"""The bare encoder: a conversation as the segments of a prompt, exactly as the model was taught."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from k3.text.chat.errors import ConversationError
from k3.text.chat.instructions import (
    EFFORTS,
    write_effort,
    write_more_tools,
    write_response_format,
    write_tool_choice,
    write_tools,
)
from k3.text.chat.segments import Attribute, Segment, SegmentWriter
from k3.text.chat.tools import Call, in_call_order, read_calls, read_result, write_calls

Message = Mapping[str, object]


def render_segments(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, object]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: object = None,
    response_format: Mapping[str, object] | None = None,
    image_prompts: Sequence[str] | None = None,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """The segments of a prompt, in order: (text, whether it may hold control tokens).

    Nothing is made better here: messages of an unknown role are left out, no default effort is chosen. See
    `k3.text.chat.conversation` for what chat and servers do first.

    Args:
        messages: objects with `role` (user, system, assistant, tool) and `content` (text, a list of parts, or none);
            assistants' also `reasoning_content` or `reasoning`, and `tool_calls`.
        tools: declared before everything else; none or an empty list declares nothing.
        thinking: whether the reply begins with a thinking channel, and past ones are kept.
        thinking_effort: low, medium, high or max; not looked at when `thinking` is off.
        tool_choice: "required" and "none" are told to the model; anything else isn't.
        response_format: an object whose `type` is json_object or json_schema is told to the model.
        image_prompts: the text for each image, in order; each becomes one control segment.
        add_generation_prompt: whether the prompt ends with the begin of the reply.

    Raises:
        ConversationError: something can't be rendered; its `field` says where.
    """
    out = SegmentWriter(image_prompts)
    try:
        if tools:
            write_tools(out, tools)
        if thinking and thinking_effort is not None:
            write_effort(out, _known_effort(thinking_effort))
        _write_messages(out, messages, thinking)
        write_tool_choice(out, tool_choice)
        write_response_format(out, response_format)
    except RecursionError:
        raise ConversationError("messages", "objects or lists are nested too deeply to be written.") from None
    if add_generation_prompt:
        out.open("message", ("role", "assistant"))
        out.open("think" if thinking else "response")
    return out.finish()


def _known_effort(effort: str) -> str:
    if effort not in EFFORTS:
        raise ConversationError("thinking_effort", f"expected one of {', '.join(EFFORTS)}, found {effort!r}.")
    return effort


def _write_messages(out: SegmentWriter, messages: Sequence[Message], thinking: bool) -> None:
    calls: list[Call] = []
    answered = 0
    placed = [(f"messages[{place}]", _checked(message, f"messages[{place}]")) for place, message in enumerate(messages)]
    # Results that follow each other directly are a run; a message that isn't written still ends one.
    for is_results, run in itertools.groupby(placed, key=lambda item: item[1].get("role") == "tool"):
        if is_results:
            results = [read_result(message, field) for field, message in run]
            for name, result in in_call_order(results, calls, answered):
                answered += 1
                with out.message("tool", ("tool", name), ("index", answered)):
                    _write_content(out, result.message, result.field)
            continue
        for field, message in run:
            if message.get("role") == "assistant":
                calls, answered = read_calls(message, field), 0
                _write_assistant(out, message, calls, field, thinking)
            else:
                _write_plain(out, message, field)


def _checked(message: object, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise ConversationError(field, "expected a message, which is an object.")
    return message


def _write_plain(out: SegmentWriter, message: Message, field: str) -> None:
    role = message.get("role")
    if role == "system" and message.get("tools"):
        write_more_tools(out, message["tools"])
    elif role in ("system", "user"):
        with out.message(str(role), *_name(message)):
            _write_content(out, message, field)


def _write_assistant(out: SegmentWriter, message: Message, calls: Sequence[Call], field: str, thinking: bool) -> None:
    with out.message("assistant", *_name(message)):
        if thinking:
            with out.element("think"):
                reasoning = message.get("reasoning_content") or message.get("reasoning")
                if isinstance(reasoning, str) and reasoning.strip():
                    out.text(reasoning, f"{field}.reasoning_content")
        with out.element("response"):
            _write_content(out, message, field)
        write_calls(out, calls)


def _name(message: Message) -> list[Attribute]:
    return [("name", message["name"])] if message.get("name") else []


def _write_content(out: SegmentWriter, message: Message, field: str) -> None:
    """A message's content: each part of a list by itself."""
    field = f"{field}.content"
    content = message.get("content")
    if isinstance(content, str):
        out.text(content, field)
    elif isinstance(content, Sequence):
        for place, part in enumerate(content):
            _write_part(out, part, f"{field}[{place}]")
    elif content is not None:
        raise ConversationError(field, "expected a text, a list of parts, or null.")


def _write_part(out: SegmentWriter, part: object, field: str) -> None:
    match part:
        case {"type": "image" | "image_url"}:
            out.image(field)
        case {"text": str(text)}:
            out.text(text, f"{field}.text")
        case _:
            raise ConversationError(field, "expected an image or a part with a `text`.")
