"""The system messages that the format itself writes: tools, thinking effort, tool choice, response format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from k3.text.chat.segments import SegmentWriter

EFFORTS = ("low", "medium", "high", "max")
"""How much to think, as the model was taught."""

_TOOLS = """\
# Tools
Here are the available tools, described in JSONSchema.

```json
{}
```"""

_MORE_TOOLS = """\
## New Tools Available
The system dynamically extends the toolset via lazy-loading.
You have access to all existing and extended tools.
Here are the specs for the extended tools.

```json
{}
```"""

_EFFORT = """\
`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), \
supported values include `low`, `medium`, `high`, and `max`.
Now the system is invoked with `thinking_effort={}`."""

_TOOL_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}

_RESPONSE_FORMAT = """\
The system is invoked with `response_format={}`.
Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."""

_SCHEMA = """\
The JSON data must match the following schema:
```json
{}
```"""


def write_tools(out: SegmentWriter, tools: object) -> None:
    """The declaration of the tools that a conversation has from the start."""
    _write(out, "tool-declare", _TOOLS.format(_canonical(tools)))


def write_more_tools(out: SegmentWriter, tools: object) -> None:
    """The declaration of the tools that a system message adds."""
    _write(out, "tool-declare", _MORE_TOOLS.format(_canonical(tools)))


def write_effort(out: SegmentWriter, effort: str) -> None:
    """How much to think; one of `EFFORTS`."""
    _write(out, "thinking-effort", _EFFORT.format(effort))


def write_tool_choice(out: SegmentWriter, choice: object) -> None:
    """Whether tools must or must not be called; any other choice says nothing."""
    if isinstance(choice, str) and choice in _TOOL_CHOICES:
        _write(out, "tool-choice", _TOOL_CHOICES[choice])


def write_response_format(out: SegmentWriter, response_format: Mapping[str, object] | None) -> None:
    """That the response must be JSON, perhaps by a schema; any other format says nothing."""
    kind = response_format.get("type") if response_format else None
    if kind == "json_object":
        _write(out, "response-format", _RESPONSE_FORMAT.format(kind))
    elif response_format and kind == "json_schema":
        schema = _SCHEMA.format(_canonical(schema_of(response_format)))
        _write(out, "response-format", f"{_RESPONSE_FORMAT.format(kind)}\n{schema}")


def schema_of(response_format: Mapping[str, object]) -> object:
    """The JSON schema that a `json_schema` response format holds, in whichever of its three places."""
    holder = response_format.get("json_schema")
    for name in ("schema", "json_schema"):
        if isinstance(holder, Mapping) and name in holder:
            return holder[name]
    return holder


def _write(out: SegmentWriter, kind: str, body: str) -> None:
    with out.message("system", ("type", kind)):
        out.verbatim(body)


def _canonical(value: object) -> str:
    return json.dumps(_sorted(value), ensure_ascii=False, separators=(",", ":"))


def _sorted(value: object) -> object:
    """The value with the keys of every object in it sorted."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_sorted(item) for item in value]
    return value
