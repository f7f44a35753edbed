"""A status line that is rewritten in place and never breaks the text that a command prints."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from typing import TextIO

_ERASE = "\x1b[K"


class Terminal:
    """Results on stdout, and on stderr one status line or plain lines.

    Where both are the same terminal the status stands on the line below the text; the cursor returns to the text.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, *, quiet: bool = False) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self.quiet = quiet
        self.interactive = self._err.isatty()
        self._below_text = self.interactive and self._out.isatty()
        self._column = 0
        self._showing = False

    def write(self, text: str) -> None:
        """Print a piece of the result as it is."""
        self.clear()
        self._out.write(text)
        self._out.flush()
        self._column = _width(text.rpartition("\n")[2]) + (0 if "\n" in text else self._column)

    def end_text(self) -> None:
        """End the result's last line."""
        if self._column:
            self.write("\n")

    def status(self, text: str) -> None:
        """Rewrite the status line; does nothing where stderr is no terminal."""
        if not self.interactive or self.quiet:
            return
        columns = shutil.get_terminal_size().columns
        line = text[: columns - 1]
        if not self._below_text:
            self._err.write(f"\r{line}{_ERASE}")
        elif self._column and self._column % columns == 0:
            return  # The cursor waits behind the last column: a move from there would break the text.
        else:
            self._err.write(f"\n\r{line}{_ERASE}\x1b[A\x1b[{self._column % columns + 1}G")
        self._err.flush()
        self._showing = True

    def clear(self) -> None:
        """Take the status line away."""
        if self._showing:
            columns = shutil.get_terminal_size().columns
            back = f"\n\r{_ERASE}\x1b[A\x1b[{self._column % columns + 1}G" if self._below_text else f"\r{_ERASE}"
            self._err.write(back)
            self._err.flush()
            self._showing = False

    def line(self, text: str) -> None:
        """A plain line on stderr, below whatever stands there."""
        if self.quiet:
            return
        self.clear()
        if self._below_text and self._column:
            self._err.write("\n")
            self._column = 0
        self._err.write(f"{text}\n")
        self._err.flush()


def _width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    marks = sum(unicodedata.combining(c) != 0 for c in text)
    return len(text) + wide - marks
