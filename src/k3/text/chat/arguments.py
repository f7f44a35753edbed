"""A tool call's arguments as JSON text, assembled while they are being written."""

from __future__ import annotations

import json
from typing import Literal

from k3.text.chat.errors import ConversationError
from k3.text.chat.fields import check_json


class ArgumentsWriter:
    """Gives the arguments of one call piece by piece; all pieces, joined, are a JSON object.

    A string argument streams; a value of another type comes with its end, when it is known whether it is JSON. A
    block, which a call may have in place of arguments, is passed on as it is. Arguments behind a block, a block behind
    arguments and an argument whose key was there before are dropped.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._block = False
        self._current: Literal["text", "value", "block", "dropped"] = "dropped"
        self._key = ""
        self._held = ""
        self._written = False

    @property
    def empty(self) -> bool:
        """Whether neither an argument nor a block has begun."""
        return not self._keys and not self._block

    def begin(self, key: str, kind: str | None) -> str:
        """An argument begins; `kind` names its type, None where the model gave none."""
        if self._block or key in self._keys:
            self._current = "dropped"
            return ""
        self._keys.add(key)
        self._key, self._held = key, ""
        self._current = "text" if kind == "string" else "value"
        return f'{self._label()}"' if kind == "string" else ""

    def begin_block(self) -> None:
        """A block begins that stands in place of arguments."""
        self._current = "block" if self.empty else "dropped"
        self._block = not self._keys

    def text(self, text: str) -> str:
        """The next piece of the argument or block."""
        if self._current == "text":
            return _quoted(text)[1:-1]
        if self._current == "block":
            self._written = self._written or bool(text.strip())
            return text
        self._held += text
        return ""

    def end(self, cut: bool = False) -> str:
        """The argument or block ends; a value that was cut off is dropped, since its rest might change it."""
        current, self._current = self._current, "dropped"
        if current == "text":
            return '"'
        if current == "value" and not cut:
            return self._label() + _json_or_text(self._held)
        return ""

    def finish(self, cut: bool = False) -> str:
        """The call ends, and with it what is still open."""
        rest = self.end(cut)
        if not self._written:
            return f"{rest}{{}}"
        return rest if self._block else f"{rest}}}"

    def _label(self) -> str:
        mark = ", " if self._written else "{"
        self._written = True
        return f"{mark}{_quoted(self._key)}: "


def _json_or_text(text: str) -> str:
    """A value as the model wrote it, or as a string if that is no JSON or has what no JSON can hold."""
    try:
        check_json(json.loads(text), "argument")
    except (ValueError, RecursionError, ConversationError):
        return _quoted(text)
    return text.strip()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
