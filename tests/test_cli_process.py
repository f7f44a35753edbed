"""`python -m k3` as a process: streams that fail, signals, locales, and a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from cli_helpers import environment, finish, spawn
from k3.api import model_path

LONG = ("demo", "--gen", "4000", "--ignore-eos", "--quiet")


def test_success_and_failure():
    ran = finish(spawn("run", "demo", "--ids", "1,2", "--gen", "2", "--quiet"))
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(r"\d+,\d+\n", ran.out)
    assert finish(spawn("run", "demo", "--ids", "x")).code == 2
    assert finish(spawn("run", "demo")).code == 2


FULL = [
    ("demo", "--gen", "1", "--quiet"),
    ("score", "demo", "--ids", "1,2", "--quiet"),
    ("tokenize", "demo", "a"),
    ("--help",),
    ("run", "--help"),
    ("--version",),
]


@pytest.mark.parametrize("arguments", FULL)
def test_a_full_stdout(arguments):
    with Path("/dev/full").open("wb") as full:
        ran = finish(spawn(*arguments, stdout=full.fileno()))
    assert ran.code == 1
    assert ran.err == "k3: standard output can't be written: No space left on device. Check where it leads to.\n"


def run_in_shell(redirection: str) -> subprocess.CompletedProcess[bytes]:
    command = f'"$0" -m k3 demo --gen 2 --quiet {redirection}'
    return subprocess.run(
        ["sh", "-c", command, sys.executable], env=environment(), capture_output=True, check=False, timeout=60
    )


def test_a_closed_stdout():
    ran = run_in_shell(">&-")
    assert ran.returncode == 1
    assert ran.stderr.startswith(b"k3: standard output is closed")


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "<&-"])
def test_a_stderr_or_stdin_that_is_not_there_does_no_harm(redirection):
    ran = run_in_shell(redirection)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout


def test_both_streams_full():
    assert run_in_shell(">/dev/full 2>&1").returncode == 1


def test_a_reader_that_goes_away():
    ours, theirs = os.pipe()
    child = spawn(*LONG, stdout=theirs)
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    ran = finish(child)
    assert ran.code == 1
    assert ran.err == "k3: standard output: whoever read it has gone, and the command was not done. Read all of it.\n"


def test_an_interrupt_names_the_ids_so_far(tmp_path):
    old = tmp_path / "old.json"
    old.write_text("old")
    ours, theirs = os.pipe()
    arguments = ("run", "demo", "--ids", "1,2", "--gen", "4000", "--ignore-eos", "--quiet", "--out", str(old))
    child = spawn(*arguments, stdout=theirs)
    os.close(theirs)
    with os.fdopen(ours) as printed:
        start = printed.read(40)
        child.send_signal(signal.SIGINT)
        ids = (start + printed.read()).strip().split(",")
    ran = finish(child)
    assert ran.code == 3
    found = re.fullmatch(r"interrupted\. Ids generated so far: \[(.*)\]\.", ran.complaint)
    assert found
    assert found[1].split(", ")[: len(ids)] == ids
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


@pytest.mark.parametrize(
    "changes",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
)
def test_locales(changes):
    ran = finish(spawn("tokenize", "demo", "--json", "é日".encode(), **changes))
    assert ran.code == 0
    assert json.loads(ran.out)["text"] == "é日"
    assert finish(spawn("demo", "--gen", "24", **changes)).code == 0


def test_what_an_encoding_lacks_is_spelled_out():
    child = spawn("tokenize", "demo", "é日", PYTHONIOENCODING="latin-1")
    out, _ = child.communicate(timeout=60)
    assert out.splitlines()[-1] == b"\xe9\\u65e5"


def test_a_path_that_is_not_utf8(tmp_path):
    place = os.fsencode(tmp_path) + b"/m\xff"
    shutil.copytree(model_path("demo"), os.fsdecode(place))
    out = tmp_path / "o.json"
    assert finish(spawn(b"run", place, b"--ids", b"1", b"--quiet", b"--out", os.fsencode(out))).code == 0
    assert json.loads(out.read_bytes())["model"] == os.fsdecode(place)
    assert finish(spawn(b"run", place + b"x", b"--ids", b"1")).code == 2


def on_a_terminal(columns: int, rows: int, *arguments: str) -> tuple[int, str]:
    """Run `python -m k3` with all streams on one terminal; its exit code and what it sent."""
    pid, terminal = pty.fork()
    if pid == 0:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(0, termios.TIOCSWINSZ, size)
        os.execve(sys.executable, [sys.executable, "-m", "k3", *arguments], environment(TERM="xterm"))
    received = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # How Linux says that the other side has closed.
            break
        if not piece:
            break
        received += piece
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), received.decode()


@pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (20, 5), (20, 60)])
def test_a_run_on_a_terminal_shows_its_text_whole(columns, rows):
    pyte = pytest.importorskip("pyte", reason="needs the terminal emulator pyte")
    arguments = ("run", "demo", "--prompt", "The river", "--gen", "60", "--ignore-eos")
    text = finish(spawn(*arguments, "--quiet", "--stop", "never there")).out.rstrip("\n").replace("\x7f", "^?")
    code, sent = on_a_terminal(columns, rows, *arguments)
    assert code == 0
    assert "token 60 of 60" in sent
    screen = pyte.HistoryScreen(columns, rows, history=1000, ratio=0.5)
    pyte.Stream(screen).feed(sent)
    scrolled = ["".join(row[x].data for x in range(columns)) for row in screen.history.top]
    shown = "".join([*scrolled, *screen.display])
    assert "".join(text.split()) in "".join(shown.split())
    assert "token 60 of 60" not in shown


@pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")
def test_a_failure_on_a_terminal_fills_it_without_breaking_words():
    code, sent = on_a_terminal(40, 24, "run", "nowhere", "--ids", "1")
    lines = sent.splitlines()
    assert code == 2
    assert len(lines) > 1
    assert all(len(line) < 40 for line in lines)
    assert " ".join(lines).startswith("k3: nowhere: expected a checkpoint directory")
