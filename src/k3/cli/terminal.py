"""Results on stdout; on stderr plain lines, and on a terminal one status line that never breaks the results."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import unicodedata
from types import TracebackType
from typing import Self, TextIO

# Control sequences of the VT100 that every terminal in use understands.
_ERASE = "\r\x1b[K"
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_DOWN, _UP = "\x1b[B", "\x1b[A"
_MAKE_ROOM = f"\x1bD{_UP}"
"""Down one row in the same column, which scrolls at the bottom of the screen, and up again."""

_TAB = 8
_VISIBLE = {code: f"^{chr(code ^ 0x40)}" for code in (*range(0x20), 0x7F) if chr(code) not in "\n\t"}
_VISIBLE |= {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
"""How control characters are shown on a terminal, which would otherwise obey them."""


class Terminal:
    """Results on `out`, messages on `err`. Leaving it as a context manager ends what stands on the screen.

    The status line replaces itself. Where text and status share a terminal and a line of text is open, the status
    stands on the row below and the cursor goes back to the text. It is taken away before more text comes.

    What can't be written to `err` is dropped; errors of `out` are raised.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, *, quiet: bool = False) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._quiet = quiet
        self.interactive = _obeys_controls(self._err)
        self._out_is_screen = self._out.isatty()
        self._shared = (self.interactive and self._out_is_screen) or _same_file(self._out, self._err)
        self.mixed = _mixed(self._out, self._err)
        """Whether messages between pieces of text would break it, since both go one way that keeps no places."""
        self._column = 0
        self._line_open = False
        self._showing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end_text()
        else:
            with contextlib.suppress(OSError):  # The error that is on its way says more.
                self.end_text()

    def write(self, text: str) -> None:
        """Print a piece of the result: as it is, but with control characters made visible on a terminal."""
        if not text:
            return
        self.clear()
        shown = text.translate(_VISIBLE) if self._out_is_screen else text
        self._out.write(shown)
        self._out.flush()
        self._line_open = not text.endswith("\n")
        self._column = _column_after(shown, self._column, columns(self._out))

    def end_text(self) -> None:
        """Take the status away and end the result's last line."""
        self.clear()
        if self._line_open:
            self.write("\n")

    def status(self, text: str) -> None:
        """Rewrite the status line; does nothing where stderr is not a terminal."""
        if not self.interactive or self._quiet:
            return
        width = columns(self._err)
        line = text[: width - 1]
        if not (self._shared and self._line_open):
            self._say(f"{_ERASE}{line}")
        elif self._column < width:
            self._say(f"{_MAKE_ROOM}{_SAVE}{_DOWN}{_ERASE}{line}{_RESTORE}")
        else:
            return  # The cursor waits behind the last column, a place to which it can't be brought back.
        self._showing = True

    def clear(self) -> None:
        """Take the status line away."""
        if self._showing:
            below = self._shared and self._line_open
            self._say(f"{_SAVE}{_DOWN}{_ERASE}{_RESTORE}" if below else _ERASE)
            self._showing = False

    def line(self, text: str) -> None:
        """A plain line on stderr, below whatever stands there."""
        if self._quiet:
            return
        self.clear()
        if self._shared and self._line_open:
            text = f"\n{text}"
            self._line_open, self._column = False, 0
        self._say(f"{text}\n")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._err.write(text)
            self._err.flush()


def columns(stream: TextIO) -> int:
    """Columns of the terminal that a stream writes to; 80 where it is none or doesn't know."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def json_text(content: object) -> str:
    """One line of JSON, in ASCII where stdout can't be trusted with more."""
    readable = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(content, ensure_ascii=not readable)


def _obeys_controls(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _mixed(out: TextIO, err: TextIO) -> bool:
    """Both in one file or pipe, or on a terminal without controls; or what reads a pipe may share stderr's terminal."""
    if err.isatty() and not out.isatty():
        return _is_pipe(out)
    return not _obeys_controls(err) and _same_file(out, err)


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except OSError:
        return False


def _same_file(a: TextIO, b: TextIO) -> bool:
    try:
        return os.path.sameopenfile(a.fileno(), b.fileno())
    except OSError:
        return False


def _column_after(text: str, column: int, width: int) -> int:
    """The column (0-based) after printing `text` from `column`; `width` while the cursor waits at the row's end."""
    for character in text:
        if character == "\n":
            column = 0
        elif character == "\t":
            column = min(column - column % _TAB + _TAB, width - 1)
        else:
            taken = _width(character)
            column = column + taken if column + taken <= width else taken
    return column


def _width(character: str) -> int:
    """Columns that a character takes on a terminal."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
