"""The status line never breaks the text: what a terminal shows is what it shows without a status line."""

from __future__ import annotations

import fcntl
import io
import os
import random
import struct
import termios
from pathlib import Path

import pytest

from k3.cli.terminal import Terminal

STATUS = "token 3 of 120, 0.010 s, 1.1 s left, 67.0 kB/s, 98 % of experts resident"


class Tty(io.StringIO):
    """A terminal with a given width that records what it is sent."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor


@pytest.fixture
def tty(monkeypatch):
    """Makes terminals of a given size."""
    monkeypatch.setenv("TERM", "xterm")
    opened = []

    def make(columns: int = 80, rows: int = 24) -> Tty:
        pair = os.openpty()
        opened.extend(pair)
        fcntl.ioctl(pair[1], termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        return Tty(pair[1])

    yield make
    for descriptor in opened:
        os.close(descriptor)


def shown(data: str, columns: int, rows: int) -> list[str]:
    """The lines that a terminal shows, those that scrolled away included, without the empty ones at the end."""
    pyte = pytest.importorskip("pyte", reason="needs the terminal emulator pyte")

    class Screen(pyte.HistoryScreen):
        """With the rule of terminals that pyte lacks: a wide character that doesn't fit goes to the next row."""

        def draw(self, data: str) -> None:
            for character in data:
                if pyte.screens.wcwidth(character) == 2 and self.cursor.x == self.columns - 1:
                    self.carriage_return()
                    self.linefeed()
                super().draw(character)

    screen = Screen(columns, rows, history=10_000, ratio=0.5)
    # A terminal's driver sends a carriage return with each line feed.
    pyte.Stream(screen).feed(data.replace("\n", "\r\n"))
    scrolled = ["".join(row[x].data for x in range(columns)) for row in screen.history.top]
    lines = [line.rstrip() for line in [*scrolled, *screen.display]]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def pieces(seed: int, count: int = 60) -> list[str]:
    """Tokens with wide characters, marks, newlines and tabs."""
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefgh     日本語é\u0301\n\t", k=draw.randrange(9))) for _ in range(count)]


@pytest.mark.parametrize("columns", [2, 3, 7, 20, 40, 80])
@pytest.mark.parametrize("rows", [2, 5, 24])
@pytest.mark.parametrize("seed", range(4))
def test_text_is_shown_as_without_a_status_line(tty, columns, rows, seed):
    plain, both = tty(columns, rows), tty(columns, rows)
    with Terminal(plain, plain) as terminal:
        for piece in pieces(seed):
            terminal.write(piece)
    with Terminal(both, both) as terminal:
        for number, piece in enumerate(pieces(seed)):
            if number % 7 == 3:
                terminal.status("prompt")
            terminal.write(piece)
            terminal.status(STATUS)
    assert shown(both.getvalue(), columns, rows) == shown(plain.getvalue(), columns, rows)


def test_the_status_stands_below_the_text_and_the_cursor_behind_it(tty):
    pyte = pytest.importorskip("pyte", reason="needs the terminal emulator pyte")
    screen = pyte.Screen(20, 3)
    stream = pyte.Stream(screen)
    both = tty(20, 3)
    terminal = Terminal(both, both)
    terminal.write("one\ntwo\nthree\nfour")  # The last line of the screen.
    terminal.status(STATUS)
    stream.feed(both.getvalue().replace("\n", "\r\n"))
    assert [line.rstrip() for line in screen.display] == ["three", "four", STATUS[:19]]
    assert (screen.cursor.y, screen.cursor.x) == (1, 4)


def test_a_status_before_any_text_takes_the_line_and_gives_it_back(tty):
    both = tty()
    terminal = Terminal(both, both)
    terminal.status("loading")
    assert shown(both.getvalue(), 80, 24) == ["loading"]
    terminal.write("text")
    assert shown(both.getvalue(), 80, 24) == ["text"]


def test_no_status_while_the_cursor_waits_behind_the_last_column(tty):
    both = tty(4)
    terminal = Terminal(both, both)
    terminal.write("abcd")
    terminal.status("status")
    assert both.getvalue() == "abcd"


@pytest.mark.parametrize("text", ["abcdef", "abc日", "ab\tcdef"])
def test_the_status_is_back_when_the_text_has_wrapped(tty, text):
    both = tty(4)
    terminal = Terminal(both, both)
    terminal.write(text)
    terminal.status("status")
    assert shown(both.getvalue(), 4, 24)[-1] == "sta"


def test_lines_stand_on_rows_of_their_own(tty):
    both = tty()
    with Terminal(both, both) as terminal:
        terminal.line("plan")
        terminal.write("some ")
        terminal.line("token 1")
        terminal.status("status")
        terminal.write("text\n")
        terminal.line("token 2")
    assert shown(both.getvalue(), 80, 24) == ["plan", "some", "token 1", "text", "token 2"]


def test_an_error_leaves_neither_a_status_nor_an_open_line(tty):
    both = tty()
    terminal = Terminal(both, both)

    def interrupted():
        with terminal:
            terminal.write("some text")
            terminal.status("status")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert shown(both.getvalue() + "next", 80, 24) == ["some text", "next"]


def test_a_result_in_a_file_gets_the_text_alone(tty):
    out, err = io.StringIO(), tty()
    with Terminal(out, err) as terminal:
        terminal.status("loading")
        terminal.write("some \x1b[31mtext")
        terminal.status(STATUS)
        terminal.line("report")
    assert out.getvalue() == "some \x1b[31mtext\n"
    assert shown(err.getvalue(), 80, 24) == ["report"]


@pytest.mark.parametrize("columns", [1, 2, 20, 76])
def test_a_status_never_fills_a_row(tty, columns):
    err = tty(columns)
    Terminal(io.StringIO(), err).status(STATUS)
    assert err.getvalue() == f"\r\x1b[K{STATUS[: columns - 1]}"


def test_a_terminal_that_does_not_know_its_width_is_taken_for_80_columns(tty):
    err = tty(0, 0)
    Terminal(io.StringIO(), err).status("x" * 100)
    assert err.getvalue() == "\r\x1b[K" + "x" * 79


def test_what_is_no_terminal_gets_plain_lines():
    out, err = io.StringIO(), io.StringIO()
    with Terminal(out, err) as terminal:
        terminal.status("never")
        terminal.line("plan")
        terminal.write("text")
        terminal.status("never")
        terminal.line("report")
    assert (out.getvalue(), err.getvalue()) == ("text\n", "plan\nreport\n")


@pytest.mark.parametrize("term", ["dumb", None])
def test_a_terminal_without_control_sequences_gets_plain_lines(tty, monkeypatch, term):
    both = tty()
    monkeypatch.delenv("TERM")
    if term is not None:
        monkeypatch.setenv("TERM", term)
    terminal = Terminal(both, both)
    terminal.write("text")
    terminal.status("never")
    terminal.line("line")
    assert not terminal.interactive
    assert both.getvalue() == "text\nline\n"


def test_one_pipe_for_both_keeps_lines_and_text_apart(tmp_path):
    with (
        (tmp_path / "log").open("w") as out,
        os.fdopen(os.dup(out.fileno()), "w") as err,
        Terminal(out, err) as terminal,
    ):
        terminal.write("some")
        terminal.line("token 1")
        terminal.write("text")
    assert (tmp_path / "log").read_text() == "some\ntoken 1\ntext\n"


def test_quiet_says_nothing(tty):
    both = tty()
    with Terminal(both, both, quiet=True) as terminal:
        terminal.line("plan")
        terminal.status("status")
        terminal.write("text\n")
    assert both.getvalue() == "text\n"


def test_control_characters_are_shown_on_a_terminal_not_obeyed(tty):
    both = tty()
    with Terminal(both, both) as terminal:
        terminal.write("\x1b]0;title\x07 \r\x08 \x7f \x9b2J a\tb\n")
    assert both.getvalue() == "^[]0;title^G ^M^H ^? \\x9b2J a\tb\n"


def test_a_line_is_ended_once():
    for text, expected in (("", ""), ("a", "a\n"), ("a\n", "a\n"), ("\u0301", "\u0301\n")):
        out = io.StringIO()
        with Terminal(out, io.StringIO()) as terminal:
            terminal.write(text)
        assert out.getvalue() == expected


def test_a_full_stderr_does_not_end_the_run():
    with Path("/dev/full").open("w") as full:
        out = io.StringIO()
        with Terminal(out, full) as terminal:
            terminal.line("plan")
            terminal.write("text")
        assert out.getvalue() == "text\n"
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
