"""The run report: every figure is what was measured, and the parts add up."""

from __future__ import annotations

import errno
import io
import json
import mmap
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import k3
from cli_helpers import Cli, environment, finish, spawn
from conftest import TINY_A, copy_checkpoint, edit_json
from k3.api import model_path
from k3.cli.terminal import Terminal
from k3.engine import weights
from k3.engine.costs import Costs
from k3.engine.report import Drive, Phases, RunReport, StepReport, Totals, peak_rss_bytes, rss_bytes
from k3.storage import expert_cache, stream
from k3.storage.arena import Arena
from k3.storage.reader import ByteClass, BytesRead, Read, Reader, aligned_span

ON_DEMAND = ("--trunk-gb", 0, "--cache-experts", 30)


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture
def run(cli, tmp_path):
    """Runs `k3 run`; gives what it printed and the content of its `--out`."""

    def run(*arguments, model="demo"):
        out = tmp_path / "o.json"
        ran = cli.ok("run", model, "--ids", "5,6,7", "--gen", 4, "--ignore-eos", *arguments, "--out", out)
        return ran, json.loads(out.read_bytes())

    return run


# --- sums ---


def test_costs_subtract_field_by_field():
    before = Costs(BytesRead(1, 2, 3, 4), 5, 6, 7, 0.5, 0.25, 8, 1.0)
    after = Costs(BytesRead(11, 22, 33, 44), 55, 66, 77, 1.0, 1.25, 88, 3.0)
    assert after - before == Costs(BytesRead(10, 20, 30, 40), 50, 60, 70, 0.5, 1.0, 80, 2.0)


def test_what_is_not_waiting_is_computing():
    step = StepReport.of(3, 10.0, Costs(BytesRead(1, 2, 3, 4), 5, 6, 2, 4.0, 1.5, 9, 8.0), rss_bytes=77)
    assert step.phases == Phases(4.0, 1.5, 4.5)
    assert step == StepReport(3, 10.0, BytesRead(1, 2, 3, 4), 6, 2, 5, Phases(4.0, 1.5, 4.5), Drive(9, 8.0), 77)


def test_totals():
    first = StepReport(1, 6.0, BytesRead(1, 2, 3, 4), 8, 1, 5, Phases(1, 2, 3), Drive(3 * 10**9, 1.5), 100)
    second = StepReport(2, 2.0, BytesRead(10, 20, 30, 40), 2, 2, 50, Phases(0.5, 0.5, 1), Drive(10**9, 0.5), 200)
    totals = RunReport([1], steps=[first, second]).totals
    assert totals == Totals(8.0, BytesRead(11, 22, 33, 44), 55, 10, 3, Phases(1.5, 2.5, 4), Drive(4 * 10**9, 2.0))
    assert totals.as_dict() | asdict(totals) == totals.as_dict()
    derived = {"resident_hit_rate": 0.3, "drive_busy_share": 0.25, "drive_gb_per_second": 2.0}
    assert totals.as_dict().items() >= derived.items()


def test_totals_of_nothing_have_no_rates():
    totals = RunReport([1]).totals.as_dict()
    assert [totals[name] for name in ("resident_hit_rate", "drive_busy_share", "drive_gb_per_second")] == [None] * 3


def test_memory_held_is_what_the_system_says(tmp_path):
    statm = tmp_path / "statm"
    statm.write_text("9999 1234 99 1 0 99 0\n")
    assert rss_bytes(statm) == 1234 * mmap.PAGESIZE
    held = psutil.Process().memory_info().rss
    assert rss_bytes() == pytest.approx(held, rel=0.2)
    assert rss_bytes(tmp_path / "missing") == pytest.approx(held, rel=0.2)


def test_the_peak_is_that_of_the_program_alone(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tk3\nVmPeak:\t  999999 kB\nVmHWM:\t    1234 kB\nVmRSS:\t    1000 kB\n")
    assert peak_rss_bytes(status) == 1234 * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for other in (tmp_path / "missing", tmp_path):
        assert peak_rss_bytes(other) >= largest


# --- where it is measured ---


class Clock:
    """A clock that moves when something is waited for, and not else."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of the places that measure waits: one second for a block of the stream, a hundred for an expert."""
    clock = Clock()
    for module in (stream, expert_cache, weights):
        monkeypatch.setattr(module, "time", clock)
    wait, get = Read.wait, expert_cache.ExpertCache._next_arrival

    def slow_wait(read):
        clock.now += 1.0 if read.kind in (ByteClass.TRUNK, ByteClass.HEAD) else 0.0
        return wait(read)

    def slow_get(cache, visit):
        clock.now += 100.0
        return get(cache, visit)

    monkeypatch.setattr(Read, "wait", slow_wait)
    monkeypatch.setattr(expert_cache.ExpertCache, "_next_arrival", slow_get)
    return clock


def test_waits_are_counted_where_they_happen(clock):
    with k3.load("demo", trunk_gb=0, cache_experts=30, context=64) as model:
        before = clock.now
        list(model.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True))
        waited = model.report().totals
    misses = waited.expert_requests - waited.expert_resident_hits
    assert misses > 0
    assert waited.phases.waiting_for_experts == 100.0 * misses
    # A block is waited for when it is used, and once more, at no cost in earnest, when its place is freed.
    assert waited.phases.waiting_for_trunk == clock.now - before - 100.0 * misses > 0


@pytest.mark.usefixtures("clock")
def test_nothing_waits_for_what_lies_in_memory():
    with k3.load("demo", context=64) as model:
        list(model.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True))
        totals = model.report().totals
    assert (totals.phases.waiting_for_trunk, totals.phases.waiting_for_experts) == (0, 0)
    assert totals.drive == Drive(0, 0.0)
    assert totals.resident_hit_rate == 1


def test_embedding_rows_are_waited_for(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(weights, "time", clock)
    read = Reader.read

    def slow(reader, path, offset, out, kind):
        clock.now += kind is ByteClass.EMBEDDING
        read(reader, path, offset, out, kind)

    monkeypatch.setattr(Reader, "read", slow)
    with k3.load("demo", context=64) as model:
        list(model.generate([5, 6, 7], max_new_tokens=2, ignore_eos=True))
        assert [step.phases.waiting_for_trunk for step in model.report().steps] == [3, 1]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, 20_000, np.uint8).tobytes())
    return path


def submit(reader, path, offset, nbytes):
    span = aligned_span(offset, nbytes)
    return reader.submit(path, offset, nbytes, Arena(span).take(span), ByteClass.TRUNK, demand=False)


def test_the_drive_delivers_whole_pages_used_or_not(file, tmp_path):
    reader = Reader()
    submit(reader, file, 100, 5000).wait()
    submit(reader, file, 4096, 4096).wait()
    reader.read(file, 0, np.zeros(50, np.uint8), ByteClass.EMBEDDING)
    with pytest.raises(k3.K3Error):
        submit(reader, tmp_path / "missing", 0, 4096).wait()
    reader.close()
    assert reader.delivered_bytes() == 2 * 4096 + 4096
    assert reader.bytes_read() == BytesRead(embedding=50)


def test_direct_is_false_once_a_part_came_from_the_page_cache(file, monkeypatch):
    real = os.preadv
    reader = Reader()
    assert submit(reader, file, 0, 9000).wait().tobytes() == file.read_bytes()[:9000]
    assert reader.direct
    # The first read stops in the middle, as some file systems do; the rest is read through the cache.
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:4096]], at))
    assert submit(reader, file, 0, 9000).wait().tobytes() == file.read_bytes()[:9000]
    assert not reader.direct
    reader.close()


def test_direct_stays_true_at_the_end_of_a_file(file):
    reader = Reader()
    assert submit(reader, file, 19_000, 1000).wait().tobytes() == file.read_bytes()[19_000:]
    assert reader.direct
    reader.close()


# --- what a user gets ---


def test_every_step_says_where_its_time_and_bytes_went(run):
    _, written = run(*ON_DEMAND)
    for step in written["steps"]:
        assert step["phases"].keys() == {"waiting_for_trunk", "waiting_for_experts", "computing"}
        assert all(seconds >= 0 for seconds in step["phases"].values())
        assert sum(step["phases"].values()) == pytest.approx(step["seconds"])
        assert 0 < step["drive"]["busy_seconds"] <= step["seconds"]
        assert step["drive"]["bytes"] > 0
        assert 0 < step["rss_bytes"] <= written["peak_rss_bytes"]
    totals = written["totals"]
    for name in ("seconds", "padding_bytes", "expert_requests", "expert_resident_hits"):
        assert totals[name] == pytest.approx(sum(step[name] for step in written["steps"]))
    for group in ("bytes_read", "phases", "drive"):
        for name, value in totals[group].items():
            assert value == pytest.approx(sum(step[group][name] for step in written["steps"]))
    assert totals["resident_hit_rate"] == totals["expert_resident_hits"] / totals["expert_requests"]
    assert 0 < totals["drive_busy_share"] <= 1
    assert totals["drive_gb_per_second"] == totals["drive"]["bytes"] / 1e9 / totals["drive"]["busy_seconds"]
    used = sum(totals["bytes_read"].values()) - totals["bytes_read"]["embedding"] + totals["padding_bytes"]
    assert totals["drive"]["bytes"] >= used


def test_a_run_that_reads_nothing_large_has_no_rate(run):
    ran, written = run()
    assert written["totals"]["drive"] == {"bytes": 0, "busy_seconds": 0.0}
    assert written["totals"]["drive_gb_per_second"] is None
    assert "drive:" not in ran.err


def test_the_closing_lines(run):
    ran, written = run(*ON_DEMAND)
    totals = written["totals"]
    read, experts, time, drive, memory, summary = ran.err.splitlines()[-6:]
    assert read.startswith("read: ")
    assert all(f"{name} " in read for name in ("trunk", "experts", "head", "embedding"))
    assert read.endswith(" more by alignment")
    assert experts == (
        f"experts: {100 * totals['resident_hit_rate']:.1f} % of {totals['expert_requests']} requests "
        "found theirs in memory"
    )
    assert time.startswith(f"time: {totals['seconds']:.3f} s (")
    assert f"{totals['phases']['computing']:.3f} s computing" in time
    assert drive.startswith(f"drive: busy {100 * totals['drive_busy_share']:.0f} % of the time, ")
    assert drive.endswith(" GB/s while busy")
    assert memory.startswith("memory: peak ")
    assert " planned" in memory
    assert summary.startswith("4 tokens, ")


def test_without_direct_reads_the_report_says_so(run):
    ran, written = run(*ON_DEMAND, "--no-direct")
    assert written["direct_io"] is False
    assert "while busy, some or all of it from the page cache" in ran.err


def test_a_file_system_without_direct_reads_is_found_out(run, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert run(*ON_DEMAND)[1]["direct_io"] is False


def test_a_peak_above_the_plan_is_called_a_bug(cli, monkeypatch):
    from k3.engine import generation

    monkeypatch.setattr(generation, "peak_rss_bytes", lambda: 10**15)
    err = cli.ok("run", "demo", "--ids", "1", "--gen", 1).err
    assert "memory: peak 1000 TB of " in err
    assert "planned. More than planned is a bug, please report it\n" in err


def test_the_model_is_named(run, tmp_path):
    assert run()[1]["model"] == "demo"
    assert run(model=model_path("demo"))[1]["model"] == "demo"
    checkpoint = copy_checkpoint(TINY_A, tmp_path / "model")
    assert run(model=checkpoint)[1]["model"] == str(checkpoint)


def test_a_synthetic_checkpoint_is_called_one(run, tmp_path):
    checkpoint = copy_checkpoint(TINY_A, tmp_path / "model")
    plain, written = run(model=checkpoint)
    assert written["synthetic"] is False
    assert "synthetic" not in plain.err
    index = checkpoint / "model.safetensors.index.json"
    edit_json(index, lambda content: content.setdefault("metadata", {}).update(synthetic=True))
    ran, written = run(model=checkpoint)
    assert written["synthetic"] is True
    assert "synthetic checkpoint: its weights are made up" in ran.err


def test_python_has_the_same_figures():
    with k3.load("demo", context=64) as model:
        assert not model.synthetic
        tokens = model.generate([1, 2], max_new_tokens=3, ignore_eos=True)
        next(tokens)
        assert model.report().peak_rss_bytes is None
        list(tokens)
        report = model.report()
    assert report.peak_rss_bytes >= max(step.rss_bytes for step in report.steps) > 0
    assert report.totals.seconds == sum(step.seconds for step in report.steps)


# --- a log that takes both streams ---

DEMO = ("demo", "--gen", "20", "--ignore-eos")


def one_stream(*arguments):
    """The lines of both streams in one pipe."""
    command = [sys.executable, "-m", "k3", *arguments]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, timeout=60
    )
    return done.stdout.decode()


def test_a_log_of_both_streams_has_the_text_whole():
    text = finish(spawn(*DEMO, "--quiet")).out
    log = one_stream(*DEMO)
    assert text in log
    before, after = log.split(text)
    assert "memory plan: " in before
    assert "20 tokens, " in after
    assert "token 1 of" not in log


def test_verbose_has_lines_in_a_log_of_both_streams():
    log = one_stream(*DEMO, "--verbose")
    assert all(f"\ntoken {number} of 20, " in log for number in range(1, 21))


def test_a_file_of_its_own_has_a_line_a_token():
    ran = finish(spawn(*DEMO))
    assert all(f"\ntoken {number} of 20, " in ran.err for number in range(1, 21))


class Stream(io.StringIO):
    """A stream over a descriptor."""

    def __init__(self, descriptor, tty=False):
        super().__init__()
        self._place = (descriptor, tty)

    def fileno(self):
        return self._place[0]

    def isatty(self):
        return self._place[1]


def test_where_messages_would_break_the_text(monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    pipes, screen = os.pipe(), os.openpty()
    with (tmp_path / "file").open("w") as file:
        pipe, other = Stream(pipes[1]), Stream(pipes[0])
        tty, plain = Stream(screen[1], tty=True), Stream(file.fileno())
        assert Terminal(pipe, pipe).mixed
        assert Terminal(plain, plain).mixed
        assert Terminal(pipe, tty).mixed, "what reads the pipe may write to the same terminal"
        assert not Terminal(plain, tty).mixed
        assert not Terminal(tty, tty).mixed, "the status line keeps out of the text's way"
        assert not Terminal(pipe, plain).mixed
        assert not Terminal(tty, pipe).mixed
        assert not Terminal(io.StringIO(), io.StringIO()).mixed
        monkeypatch.setenv("TERM", "dumb")
        assert Terminal(tty, tty).mixed
        assert other.fileno() != pipe.fileno()
    for descriptor in (*pipes, *screen):
        os.close(descriptor)


def test_a_prompt_s_progress_stays_out_of_the_text_too(monkeypatch):
    """A full recompute runs the prompt again between two pieces of text."""
    from k3.cli import progress

    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", -1)
    terminal = SimpleNamespace(interactive=False, mixed=True, lines=[])
    terminal.line = terminal.lines.append
    shown = progress.Progress(terminal, verbose=False)
    shown.prompt(1, 3)
    assert len(terminal.lines) == 1
    shown.token(StepReport(1, 1.0, BytesRead(), 0, 0))
    shown.prompt(2, 3)
    assert len(terminal.lines) == 1
