"""Reads a reply token by token: reasoning, content and tool calls, told apart by token id."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from k3.text.chat.arguments import ArgumentsWriter
from k3.text.chat.reply import Delta, Reply, ReplyCall
from k3.text.chat.segments import CLOSE, OPEN, SEP, unescape
from k3.text.stop import StopMatcher
from k3.text.stream import TextStream
from k3.text.tokenizer import Tokenizer

_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')


class _Place(Enum):
    """Where in a reply the next text stands."""

    THINK = auto()
    RESPONSE = auto()
    BETWEEN = auto()
    TOOLS = auto()
    CALL = auto()
    ARGUMENT = auto()
    BEHIND = auto()


_CHANNELS = {"think": _Place.THINK, "response": _Place.RESPONSE, "tools": _Place.TOOLS}
_WITHIN_TOOLS = (_Place.TOOLS, _Place.CALL, _Place.ARGUMENT)


@dataclass(slots=True)
class _Header:
    """What stands between a mark that opens or closes an element and the separator."""

    opens: bool
    raw: bytearray = field(default_factory=bytearray)

    def parse(self) -> tuple[str, dict[str, str]]:
        """Tag and attributes."""
        tag, *rest = self.raw.decode(errors="replace").split(maxsplit=1) or [""]
        attributes = _ATTRIBUTE.findall(rest[0]) if rest else []
        return tag, {key: unescape(value) for key, value in attributes}


class ReplyReader:
    """Turns the tokens that follow a prompt into deltas.

    Structure is what control tokens say; text that spells one is text. Marks never come out as text. A reply that
    breaks the format loses as little as possible: what opens closes whatever can't hold it, text beside the channels
    is content, marks that mean nothing where they stand are passed over, and a header that the reply ends in is
    dropped.

    How the tokens are divided over calls makes no difference to the deltas.

    Attributes:
        reply: all that has come.
        ended: whether the reply is over, so that no further token belongs to it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool = True,
        stop: str | Sequence[str] = (),
        call_prefix: str | None = None,
    ) -> None:
        """Begin where the prompt ends.

        Args:
            tokenizer: the one that the prompt was encoded with.
            thinking: whether the prompt ends in the thinking channel, not in the response.
            stop: strings of which any ends the content before it; they are not looked for elsewhere.
            call_prefix: what the ids of calls begin with; None draws one at random.

        Raises:
            UsageError: a stop string is empty or not a string.
        """
        self._tokenizer = tokenizer
        self._open, self._close, self._sep = (tokenizer.control[mark] for mark in (OPEN, CLOSE, SEP))
        self._stream = TextStream(tokenizer)
        self._matcher = StopMatcher(stop)
        self._call_prefix = call_prefix or f"call_{secrets.token_hex(8)}_"
        self._place = _Place.THINK if thinking else _Place.RESPONSE
        self._header: _Header | None = None
        self._arguments: ArgumentsWriter | None = None
        self._deltas: list[Delta] = []
        self.reply = Reply()
        self.ended = False

    def push(self, token: int) -> list[Delta]:
        """What the next token adds.

        Raises:
            UsageError: the id is not in the vocabulary.
        """
        raw = self._tokenizer.token_bytes(token)
        if self.ended:
            return []
        if token >= self._tokenizer.n_ordinary:
            self._take_control(token)
        elif self._header is not None:
            self._header.raw += raw
        else:
            self._take_text(self._stream.push(token))
        return self._taken()

    def finish(self, reason: Literal["stop", "length"]) -> list[Delta]:
        """There are no more tokens: a stop id or stop string ended them, or the limit on their number."""
        self._take_text(self._stream.flush())
        self._header = None
        cut = reason == "length" and self._place is not _Place.BEHIND and not self.ended
        self._leave(cut)
        self._place = _Place.BEHIND
        self.ended = True
        self.reply.finish_reason = "length" if cut else "tool_calls" if self.reply.calls else "stop"
        return self._taken()

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _take_control(self, token: int) -> None:
        # A character that is not whole here never will be.
        self._take_text(self._stream.flush())
        if token in self._tokenizer.stop_ids or self._place is _Place.BEHIND:
            self._leave()
            self._place = _Place.BEHIND
            self.ended = True
        elif token in (self._open, self._close, self._sep):
            # A header that another mark breaks off lacks its separator only.
            header, self._header = self._header, None
            if header:
                self._apply(header)
            if token != self._sep:
                self._header = _Header(opens=token == self._open)

    def _apply(self, header: _Header) -> None:
        tag, attributes = header.parse()
        if header.opens:
            self._opened(tag, attributes)
        else:
            self._closed(tag)

    def _opened(self, tag: str, attributes: dict[str, str]) -> None:
        if tag in _CHANNELS:
            self._leave()
            self._place = _CHANNELS[tag]
        elif tag == "call":
            self._leave()
            self._place = _Place.CALL
            self._begin_call(attributes.get("tool", ""))
        elif tag in ("argument", "json") and self._arguments:
            self._add_arguments(self._arguments.end())
            self._place = _Place.ARGUMENT
            if tag == "json":
                self._arguments.begin_block()
            else:
                self._add_arguments(self._arguments.begin(attributes.get("key", ""), attributes.get("type")))
        elif tag == "message" and attributes.get("role", "assistant") != "assistant":
            # Another's turn, which is not the model's to write.
            self._leave()
            self._place = _Place.BEHIND
            self.ended = True

    def _closed(self, tag: str) -> None:
        if tag == "message":
            self._leave()
            self._place = _Place.BEHIND
        elif tag in _CHANNELS and (self._place is _CHANNELS[tag] or (tag == "tools" and self._place in _WITHIN_TOOLS)):
            self._leave()
            self._place = _Place.BETWEEN
        elif tag == "call" and self._arguments:
            self._leave()
            self._place = _Place.TOOLS
        elif tag in ("argument", "json") and self._arguments:
            self._add_arguments(self._arguments.end())
            self._place = _Place.CALL

    def _leave(self, cut: bool = False) -> None:
        """End what is open; `cut` says that it is not all there."""
        if self._place is _Place.RESPONSE:
            self._add("content", self._matcher.flush())
        if self._arguments:
            self._add_arguments(self._arguments.finish(cut))
            self._arguments = None
            self.reply.calls[-1].complete = not cut

    def _take_text(self, text: str) -> None:
        if not text:
            return
        match self._place:
            case _Place.THINK:
                self._add("reasoning", text)
            case _Place.RESPONSE:
                self._add_content(text)
            case _Place.BETWEEN if text.strip():
                self._place = _Place.RESPONSE
                self._add_content(text.lstrip())
            case _Place.CALL if self._arguments and self._arguments.empty and text.strip():
                self._place = _Place.ARGUMENT
                self._arguments.begin_block()
                self._add_arguments(self._arguments.text(text.lstrip()))
            case _Place.ARGUMENT if self._arguments:
                self._add_arguments(self._arguments.text(text))
            case _Place.BEHIND:
                self.ended = True

    def _add_content(self, text: str) -> None:
        self._add("content", self._matcher.push(text))
        self.ended = self._matcher.matched is not None

    def _add(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if not text:
            return
        if kind == "content":
            self.reply.content += text
        else:
            self.reply.reasoning += text
        self._deltas.append(Delta(kind, text))

    def _begin_call(self, name: str) -> None:
        self._arguments = ArgumentsWriter()
        index = len(self.reply.calls)
        call = ReplyCall(f"{self._call_prefix}{index}", name)
        self.reply.calls.append(call)
        self._deltas.append(Delta("tool_call", "", index, call.id, call.name))

    def _add_arguments(self, text: str) -> None:
        if not text:
            return
        index = len(self.reply.calls) - 1
        call = self.reply.calls[index]
        call.arguments += text
        self._deltas.append(Delta("tool_call", text, index, call.id, call.name))
