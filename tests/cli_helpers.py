"""Runs command lines, in this process or in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import k3
from k3.cli.main import main

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Ran:
    """What a command line gave."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one paragraph that explains a failure; everything else on stderr is lines of progress."""
        lines = [line for line in self.err.splitlines() if line.startswith("k3: ")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0], self.err
        assert "Traceback" not in self.err
        return lines[0].removeprefix("k3: ")


class Cli:
    """Calls `main` and collects what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Ran:
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        printed = self._capsys.readouterr()
        ran = Ran(code, printed.out, printed.err)
        if code:
            assert ran.complaint
        return ran

    def ok(self, *arguments: object) -> Ran:
        """The same for a command line that must succeed."""
        ran = self(*arguments)
        assert ran.code == 0, ran.err
        return ran

    def refused(self, *arguments: object, code: int = 2) -> str:
        """The complaint about a command line that must fail, with nothing on stdout."""
        ran = self(*arguments)
        assert (ran.code, ran.out) == (code, "")
        return ran.complaint


def environment(**changes: str) -> dict[str, str]:
    """The environment of a child that imports the same package."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("K3_", "PYTHONIOENCODING"))}
    return kept | {"PYTHONPATH": str(Path(k3.__file__).parents[1]), "K3_THREADS": "1"} | changes


def spawn(*arguments: str | bytes, stdout: int | None = subprocess.PIPE, **changes: str) -> subprocess.Popen[bytes]:
    """Start `python -m k3` in a process of its own."""
    command = [sys.executable, "-m", "k3", *arguments]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=environment(**changes))


def finish(child: subprocess.Popen[bytes]) -> Ran:
    """Wait for a child and read what it printed."""
    out, err = child.communicate(timeout=60)
    ran = Ran(child.returncode, (out or b"").decode(), err.decode())
    if child.returncode:
        assert ran.complaint
    return ran
