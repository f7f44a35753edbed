"""`k3` itself: help, unknown commands and options, values, how failures are told."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import k3
from cli_helpers import Cli, environment
from k3.cli import compare
from k3.cli.main import COMMANDS, main
from k3.errors import ConfigError, InvalidGenerationError, ReadError

VALID = {
    "demo": [],
    "run": ["demo", "--ids", "1"],
    "score": ["demo", "--ids", "1,2"],
    "compare": ["a", "b"],
    "tokenize": ["demo", "text"],
    "synth": ["tiny", "dir"],
    "bench": ["kernels"],
    "plan": ["demo"],
    "doctor": ["demo"],
}
LATER = [
    *(f"--{name}=1" for name in ("speculate", "save-state", "load-state", "min-p", "repetition-penalty", "logit-bias")),
    *(f"--{name}=1" for name in ("presence-penalty", "frequency-penalty", "json-schema", "regex")),
]


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


# --- help ---


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command(cli, arguments):
    out = cli.ok(*arguments).out
    assert all(f"  {name} " in out and command.summary in out for name, command in COMMANDS.items())


def test_version(cli):
    assert cli.ok("--version").out == f"k3 {k3.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_every_option_a_line_in_it(cli, name):
    out = cli.ok(name, "--help").out
    assert out.startswith(f"usage: k3 {name} ")
    described = [line.strip() for line in out.splitlines() if line.startswith("  -")]
    assert described
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("usage:"))


NOTHING_HEAVY = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        heavy = ("numpy", "tiktoken", "msgspec", "psutil", "regex", "huggingface_hub")
        if name.partition(".")[0] in heavy or name == "k3.kernels._native":
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
from k3.cli.main import main
codes = [main(["--help"]), main(["--version"])]
from k3.cli.main import COMMANDS
codes += [main([name, "--help"]) for name in COMMANDS]
codes += [main(["bench", "kernels", "--help"]), main(["run", "demo", "--frob"]) - 2]
sys.exit(any(codes))
"""


def test_help_imports_nothing_heavy():
    child = subprocess.run([sys.executable, "-c", NOTHING_HEAVY], env=environment(), capture_output=True, check=False)
    assert child.returncode == 0, child.stderr.decode()


def test_help_is_there_at_once():
    def seconds() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "k3", "--help"], env=environment(), capture_output=True, check=True)
        return time.perf_counter() - began

    assert min(seconds() for _ in range(5)) <= 0.15


# --- what is refused ---


@pytest.mark.parametrize("name", ["frob", "Run", "", "chat", "serve", "run "])
def test_an_unknown_command_is_refused(cli, name):
    assert "is not a command" in cli.refused(name)


@pytest.mark.parametrize("option", ["--frob", "-V", "-x"])
def test_an_unknown_option_before_the_command_is_refused(cli, option):
    assert f"'{option}' is not an option of k3 itself" in cli.refused(option, "demo")


@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize("option", ["--frob", "--frob=1", "-x", *LATER])
def test_an_unknown_option_is_refused(cli, name, option):
    complaint = cli.refused(name, *VALID[name], option)
    assert f"unrecognized arguments: {option}" in complaint
    assert f"`k3 {name} --help`" in complaint


@pytest.mark.parametrize("abbreviated", ["--gener", "--temp", "--full", "--verb", "--dump", "--contex", "--ignore"])
def test_abbreviations_are_refused(cli, abbreviated):
    assert abbreviated in cli.refused("run", "demo", "--ids", "1", abbreviated, "1")


@pytest.mark.parametrize("option", ["--gen", "--threads", "--chunk", "--context", "--layers"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "", "1_0", "٣", " 1", "1e3", "9" * 5000])
def test_whole_numbers_from_one_up(cli, option, value):
    complaint = cli.refused("run", "demo", "--ids", "1", f"{option}={value}")
    assert f"argument {option}: expected a whole number from 1 up, found" in complaint
    assert len(complaint) < 200


@pytest.mark.parametrize("option", ["--top-k", "--seed"])
def test_whole_numbers_from_zero_up(cli, option):
    assert f"{option}: expected a whole number from 0 up" in cli.refused("run", "demo", "--ids", "1", f"{option}=-1")


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--temperature", ["nan", "inf", "-1", "-0.001", "warm"]),
        ("--top-p", ["nan", "0", "-1", "1.01", "inf"]),
        ("--seed", [str(1 << 64), "9" * 30]),
    ],
)
def test_sampling_values_out_of_range(cli, option, values):
    for value in values:
        complaint = cli.refused("run", "demo", "--ids", "1", f"{option}={value}")
        assert option.strip("-").replace("-", "_") in complaint.replace("-", "_")
        assert "memory plan" not in complaint


def test_a_value_that_begins_with_a_dash_has_its_own_spelling(cli):
    assert "written --option=-value" in cli.refused("run", "demo", "--prompt", "-x")
    assert cli.ok("run", "demo", "--prompt=-x", "--gen", 1, "--quiet").out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("run", "MODEL"),
        ("tokenize", "MODEL"),
        ("tokenize demo a b", "unrecognized arguments: b"),
        ("run demo", "--prompt --prompt-file --ids"),
        ("run demo --prompt a --ids 1", "not allowed with"),
        ("run demo --prompt a --prompt-file /dev/null", "not allowed with"),
        ("run demo --ids 1 --verbose --quiet", "not allowed with"),
        ("run demo --ids 1 --incremental --full-recompute", "not allowed with"),
        ("run demo --ids", "expected one argument"),
        ("run demo demo --ids 1", "unrecognized arguments: demo"),
        ("score demo", "--text --file --ids"),
        ("tokenize demo", "TEXT, --file PATH or --messages"),
        ("tokenize demo a --file /dev/null", "TEXT, --file PATH or --messages"),
        ("compare a", "B"),
        ("synth huge dir", "tiny"),
        ("synth tiny", "DIR"),
        ("bench", "WHAT"),
    ],
)
def test_usage(cli, arguments, complaint):
    assert complaint in cli.refused(*arguments.split())


# --- how failures are told ---


@pytest.fixture
def failing(monkeypatch):
    """Makes `k3 compare` raise."""

    def install(error: BaseException) -> None:
        def execute(_):
            raise error

        monkeypatch.setattr(compare, "execute", execute)

    return install


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ReadError("shard 3 is gone."), 1, "shard 3 is gone."),
        (ConfigError("two\n  lines."), 2, "two lines."),
        (KeyboardInterrupt(), 3, "interrupted"),
        (InvalidGenerationError("a NaN."), 4, "a NaN."),
        (MemoryError(), 1, "the memory ran out"),
        (FileNotFoundError(2, "No such file", "x.bin"), 1, "x.bin: No such file."),
        (OSError(28, "No space left on device"), 1, "standard output can't be written: No space left on device."),
        (BrokenPipeError(32, "Broken pipe"), 1, "whoever read it has gone"),
        (ModuleNotFoundError("No module named 'k3.kernels._native'"), 1, "installation is not complete"),
        (ZeroDivisionError("division by zero"), 1, "internal error, please report it: ZeroDivisionError: division"),
    ],
)
def test_a_failure_has_its_exit_code_and_one_paragraph(cli, failing, error, code, message):
    failing(error)
    assert message in cli.refused("compare", "a", "b", code=code)


def test_debug_adds_the_traceback(capsys, failing):
    failing(ReadError("shard 3 is gone."))
    assert main(["compare", "a", "b", "--debug"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("k3: shard 3 is gone.\n")


def test_debug_after_two_dashes_is_a_text(cli):
    assert cli.ok("tokenize", "demo", "--", "--debug").out.endswith("\n--debug\n")


def test_an_installation_without_the_extension_says_so(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "k3.api", None)
    assert "installation is not complete" in cli.refused("run", "demo", "--ids", "1", code=1)
