"""The published conversations, and the replies in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from conftest import DATA
from k3.text.tokenizer import Tokenizer

CASES: dict[str, dict[str, Any]] = json.loads((DATA / "chat_goldens.json").read_bytes())["cases"]
GOOD = {name: case for name, case in CASES.items() if "segments" in case}


@dataclass(frozen=True)
class GoldenReply:
    """A past assistant message as it stands in a prompt, without the header that a prompt would end in."""

    segments: list[tuple[str, bool]]
    message: dict[str, Any]

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        return [token for text, control in self.segments for token in tokenizer.encode_segment(text, control)]


def golden_replies() -> dict[str, GoldenReply]:
    """Every assistant message of the conversations that are rendered with thinking on."""
    replies = {}
    for name, case in GOOD.items():
        messages = [message for message in case["messages"] if message["role"] == "assistant"]
        segments = [(text, control) for text, control in case["segments"]]
        for number, message in enumerate(messages):
            header = [("message", False), (" role", False), ('="', False), ("assistant", False)]
            starts = [place for place in range(len(segments)) if segments[place : place + 4] == header]
            begin = segments.index(("think", False), starts[number]) + 2
            end = segments.index(("<|end_of_msg|>", True), begin) + 1
            replies[f"{name}-{number}"] = GoldenReply(segments[begin:end], message)
    return replies
