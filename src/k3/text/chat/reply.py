"""What a reply says: typed deltas while it streams, and all of it at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["reasoning", "content", "tool_call"]
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a reply.

    Of a tool call, `text` is the next piece of its arguments as JSON, and empty in its first delta; `index` counts the
    reply's calls from 0, `id` and `name` are the call's.
    """

    kind: Kind
    text: str
    index: int | None = None
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class ReplyCall:
    """A tool call. `arguments` is a JSON object, or what the model wrote in place of one.

    `complete` is False while the call is being written, and stays so if the reply was cut off within it.
    """

    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class Reply:
    """A reply as far as it has come; `finish_reason` is None until it ends."""

    reasoning: str = ""
    content: str = ""
    calls: list[ReplyCall] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def message(self) -> dict[str, object]:
        """The reply as an assistant message, to go on with; calls that were cut off are left out."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
            if call.complete
        ]
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls:
            message["tool_calls"] = calls
        return message
