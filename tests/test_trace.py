"""Routing traces: recorded whole or not at all, read in token order, replayed under every policy."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import Cli
from conftest import shared_file
from k3.errors import K3Error, UsageError
from k3.storage.policies import LayerLru
from k3.storage.trace import HISTOGRAM_FILE, TRACE_FILE, Trace, TraceRecorder, replay

LAYERS, TOP_K, EXPERTS = (1, 2, 4), 3, 10


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture(scope="module")
def real():
    return shared_file("data/expert_trace.bin")


def tokens(count, seed=0):
    """Random routing: int32 [tokens, layers, top_k]."""
    random = np.random.default_rng(seed)
    order = [[random.permutation(EXPERTS)[:TOP_K] for _ in LAYERS] for _ in range(count)]
    return np.array(order, np.int32)


def record_step(recorder, routing):
    for place, layer in enumerate(LAYERS):
        recorder.record(layer, routing[:, place])
    recorder.end_step()


def pairs_of(routing):
    """A step as the file has it, spelled out."""
    return [(layer, int(expert)) for place, layer in enumerate(LAYERS) for token in routing for expert in token[place]]


def write_trace(path, *steps):
    path.write_bytes(np.array([pair for step in steps for pair in pairs_of(step)], "<i4").tobytes())
    return path


def read(path, count=None):
    return Trace.read(path, TOP_K, EXPERTS, count)


def test_what_is_recorded(tmp_path):
    steps = [tokens(4, 1), tokens(1, 2), tokens(1, 3)]
    recorder = TraceRecorder(tmp_path / "new" / "folder", EXPERTS)
    for step in steps:
        record_step(recorder, step)
    recorder.close()
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == sorted([HISTOGRAM_FILE, TRACE_FILE])
    written = np.frombuffer((folder / TRACE_FILE).read_bytes(), "<i4").reshape(-1, 2).tolist()
    assert [tuple(pair) for pair in written] == [pair for step in steps for pair in pairs_of(step)]
    counts = {str(layer): [0] * EXPERTS for layer in LAYERS}
    for layer, expert in written:
        counts[str(layer)][expert] += 1
    assert json.loads((folder / HISTOGRAM_FILE).read_bytes()) == {"layers": counts}
    trace = read(folder / TRACE_FILE)
    assert trace.layers == LAYERS
    assert np.array_equal(trace.ids, np.concatenate(steps))


def test_a_step_that_does_not_end_leaves_nothing(tmp_path):
    recorder = TraceRecorder(tmp_path, EXPERTS)
    whole = tokens(2, 1), tokens(2, 2)
    record_step(recorder, whole[0])
    recorder.record(1, tokens(2, 9)[:, 0])
    recorder.record(2, tokens(2, 9)[:, 1])
    record_step(recorder, whole[1])  # Layer 1 again: the step before was abandoned.
    recorder.record(1, tokens(2, 9)[:, 0])
    recorder.close()
    assert np.array_equal(read(tmp_path / TRACE_FILE).ids, np.concatenate(whole))


def test_nothing_recorded_leaves_what_was_there(tmp_path):
    (tmp_path / TRACE_FILE).write_bytes(b"before")
    recorder = TraceRecorder(tmp_path, EXPERTS)
    recorder.record(1, tokens(1)[:, 0])
    recorder.close()
    assert (tmp_path / TRACE_FILE).read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == [TRACE_FILE]


def test_published_from_time_to_time(tmp_path):
    path = tmp_path / TRACE_FILE
    always, seldom = TraceRecorder(tmp_path, EXPERTS, seconds_between=0), None
    for count in range(1, 4):
        record_step(always, tokens(2, count))
        assert len(read(path).ids) == 2 * count
    always.close()
    seldom = TraceRecorder(tmp_path, EXPERTS, seconds_between=3600)
    for count in range(1, 4):
        record_step(seldom, tokens(1, count))
        assert len(read(path).ids) == 1
    seldom.close()
    assert len(read(path).ids) == 3


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="a routing trace can't be written there"):
        TraceRecorder(tmp_path / "file", EXPERTS)


def test_a_full_disk(tmp_path, monkeypatch):
    """An error that says so, the last whole publication in place, no litter; the trace stays whole afterwards."""
    recorder = TraceRecorder(tmp_path, EXPERTS, seconds_between=0)
    record_step(recorder, tokens(2, 1))
    before = (tmp_path / TRACE_FILE).read_bytes()
    real = os.pwrite

    def full(descriptor, data, offset):
        real(descriptor, data[:5], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(K3Error, match="could not be written: No space left"):
        record_step(recorder, tokens(2, 2))
    monkeypatch.setattr(os, "pwrite", real)
    assert (tmp_path / TRACE_FILE).read_bytes() == before
    record_step(recorder, tokens(2, 3))
    recorder.close()
    assert np.array_equal(read(tmp_path / TRACE_FILE).ids, np.concatenate([tokens(2, 1), tokens(2, 3)]))
    assert len(list(tmp_path.iterdir())) == 2
    assert_histogram_counts(tmp_path, 4)


@pytest.mark.parametrize("name", [TRACE_FILE, HISTOGRAM_FILE])
def test_a_full_disk_while_publishing(tmp_path, monkeypatch, name):
    recorder = TraceRecorder(tmp_path, EXPERTS, seconds_between=0)
    record_step(recorder, tokens(2, 1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real = Path.open

    def full(path, *arguments):
        if name in path.name:
            real(path, *arguments).close()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *arguments)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(K3Error, match="could not be written: No space left"):
        record_step(recorder, tokens(2, 2))
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    recorder.close()
    assert np.array_equal(read(tmp_path / TRACE_FILE).ids, np.concatenate([tokens(2, 1), tokens(2, 2)]))
    assert_histogram_counts(tmp_path, 4)


def assert_histogram_counts(folder, count):
    layers = json.loads((folder / HISTOGRAM_FILE).read_bytes())["layers"]
    assert {name: sum(row) for name, row in layers.items()} == {str(layer): count * TOP_K for layer in LAYERS}


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from k3.storage import trace
import test_trace

class Killer:
    def __init__(self, point):
        self.left = point
    def __call__(self, frame, event, argument):
        return self.step if frame.f_code.co_filename == trace.__file__ else None
    def step(self, frame, event, argument):
        self.left -= event == "line"
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.step

def child(folder, point):
    recorder = trace.TraceRecorder(folder, test_trace.EXPERTS, seconds_between=0)
    sys.settrace(Killer(point))
    for seed in range(3):
        test_trace.record_step(recorder, test_trace.tokens(2, seed))
    recorder.close()
    os._exit(0)

for point in map(int, sys.argv[3:]):
    if not (process := os.fork()):
        child(Path(sys.argv[2]) / str(point), point)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


def test_killed_anywhere(tmp_path):
    """A kill -9 before many lines of the recorder: the old files, or whole new ones."""
    points = range(10, 300, 7)
    old_trace, old_counts = b"old trace", b'{"layers": "old"}'
    for point in points:
        folder = tmp_path / str(point)
        folder.mkdir()
        (folder / TRACE_FILE).write_bytes(old_trace)
        (folder / HISTOGRAM_FILE).write_bytes(old_counts)
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path), *map(str, points)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    codes = [int(line) for line in done.stdout.split()]
    assert codes.count(-signal.SIGKILL) >= 10
    routing = np.concatenate([tokens(2, seed) for seed in range(3)])
    lengths = set()
    for point in points:
        folder = tmp_path / str(point)
        data, counts = (folder / TRACE_FILE).read_bytes(), (folder / HISTOGRAM_FILE).read_bytes()
        if data != old_trace:
            trace = read(folder / TRACE_FILE)
            assert np.array_equal(trace.ids, routing[: len(trace.ids)])
            assert len(trace.ids) % 2 == 0
            lengths.add(len(trace.ids))
        if counts != old_counts:
            layers = json.loads(counts)["layers"]
            assert {sum(row) for row in layers.values()} <= {2 * TOP_K, 4 * TOP_K, 6 * TOP_K}
    assert lengths == {2, 4, 6}


def test_a_run_that_read_its_prefix_again_for_every_token(tmp_path):
    routing = tokens(5)
    path = write_trace(tmp_path / "trace", routing[:3], routing[:4], routing)
    assert np.array_equal(read(path).ids, routing)


def test_steps_follow_each_other_unless_they_repeat(tmp_path):
    routing = tokens(9)
    path = write_trace(tmp_path / "trace", routing[:2], routing[2:5], routing[5:])
    assert np.array_equal(read(path).ids, routing)
    path = write_trace(tmp_path / "trace", routing[:2], routing[:3], routing[5:])
    assert len(read(path).ids) == 2 + 3 + 4


def test_tokens_of_the_last_step(tmp_path):
    routing = tokens(5)
    path = write_trace(tmp_path / "trace", tokens(4, 1), routing)
    assert np.array_equal(read(path, 5).ids, routing)
    with pytest.raises(UsageError, match="asks for 90 requests, the trace has 81"):
        read(path, 10)
    with pytest.raises(UsageError, match="--top-k or --tokens"):
        read(path, 4)


def test_one_layer(tmp_path):
    recorder = TraceRecorder(tmp_path, EXPERTS)
    routing = tokens(4)[:, :1]
    for token in routing:
        recorder.record(7, token)
        recorder.end_step()
    recorder.close()
    trace = read(tmp_path / TRACE_FILE)
    assert trace.layers == (7,)
    assert np.array_equal(trace.ids, routing)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:0], "found 0 bytes"),
        (lambda data: data[:-3], "pairs of 8 bytes, found"),
        (lambda data: data[:-8], "step 2 to choose 3 experts"),
        (lambda data: data[: -8 * TOP_K * 2], "step 2 visits 2"),
        (lambda data: data[:4] + b"\x0a\0\0\0" + data[8:], "expert 10 at pair 0"),
        (lambda data: data[:4] + b"\xff\xff\xff\xff" + data[8:], "expert -1 at pair 0"),
    ],
)
def test_what_is_no_trace(tmp_path, damage, message):
    path = write_trace(tmp_path / "trace", tokens(2, 1), tokens(2, 2))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=message):
        read(path)


def test_replay_counts_what_is_held_before_each_visit():
    one = np.array([[[1, 2, 3]] * 3] * 4, np.int32)
    trace = Trace(LAYERS, one)
    assert replay(trace, LayerLru(9, LAYERS)) == 3 * 9  # All but the cold first token.
    assert replay(trace, LayerLru(0, LAYERS)) == 0
    assert [layer for layer, _ in trace.visits()] == list(LAYERS) * 4


def test_the_real_trace_in_token_order(real):
    trace = Trace.read(real, 16, 896)
    assert trace.ids.shape == (12, 92, 16)
    assert trace.layers == tuple(range(1, 93))
    pairs = np.fromfile(real, "<i4").reshape(-1, 2)[-12 * 92 * 16 :]
    for layer, token, rank in ((1, 0, 0), (1, 11, 15), (92, 11, 15), (40, 7, 3)):
        place = (layer - 1) * 12 * 16 + token * 16 + rank
        assert pairs[place].tolist() == [layer, trace.ids[token, layer - 1, rank]]
    assert np.array_equal(Trace.read(real, 16, 896, tokens=12).ids, trace.ids)


def test_cli_json(cli, real):
    found = json.loads(cli.ok("trace", "replay", real, "--sizes", "32,4,8,16", "--json").out)
    assert {name: found[name] for name in ("tokens", "layers", "top_k", "expert_bytes")} == {
        "tokens": 12,
        "layers": 92,
        "top_k": 16,
        "expert_bytes": 17_547_264,
    }
    assert [row["gb"] for row in found["sizes"]] == [4, 8, 16, 32]
    assert [row["slots"] for row in found["sizes"]] == [227, 455, 911, 1823]
    for row, ours, lru, belady in zip(found["sizes"], (8, 14, 23, 33), (0, 0, 0, 31), (14, 25, 36, 42), strict=True):
        policies = row["policies"]
        assert policies["rank-recency"]["hit_rate"] * 100 >= ours
        assert int(policies["lru"]["hit_rate"] * 100) == lru
        assert round(policies["belady"]["hit_rate"] * 100) == belady
        for name, result in policies.items():
            count = 12 if name != "pins" else 6
            assert result["requests"] == count * 1472
            assert result["hit_rate"] == result["hits"] / result["requests"]
            missed = (result["requests"] - result["hits"]) * 17_547_264
            assert result["gb_per_token"] == pytest.approx(missed / count / 1e9)


def test_cli_table(cli, tmp_path):
    path = write_trace(tmp_path / "trace", np.array([[[1, 2, 3]] * 3] * 4, np.int32))
    options = ("--top-k", 3, "--experts", 10, "--expert-bytes", 100_000_000, "--sizes", "0,0.9")
    lines = cli.ok("trace", "replay", path, *options).out.splitlines()
    assert lines[0] == "4 tokens, 3 layers, 3 experts a token and layer: 0.9 GB a token uncached"
    assert lines[1].split() == ["cache", "slots", "rank-recency", "layer-lru", "lru", "belady", "pins"]
    assert lines[3].split() == ["0", "0", *["0.0", "%", "0.9"] * 5]
    assert lines[4].split() == ["0.9", "9", *["75.0", "%", "0.225"] * 4, "100.0", "%", "0"]


def test_cli_one_token_has_no_half(cli, tmp_path):
    path = write_trace(tmp_path / "trace", tokens(1))
    found = json.loads(cli.ok("trace", "replay", path, "--top-k", 3, "--experts", 10, "--json").out)
    assert "pins" not in found["sizes"][0]["policies"]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_cli_plot(cli, tmp_path, kind):
    pytest.importorskip("matplotlib", reason="needs the optional library matplotlib")
    path = write_trace(tmp_path / "trace", tokens(4))
    picture = tmp_path / f"hits.{kind}"
    cli.ok("trace", "replay", path, "--top-k", 3, "--experts", 10, "--sizes", "1,2", "--plot", picture)
    assert {"png": b"\x89PNG", "svg": b"<svg"}[kind] in picture.read_bytes()[:1000]


def test_cli_plot_without_the_library(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = write_trace(tmp_path / "trace", tokens(4))
    complaint = cli.refused("trace", "replay", path, "--plot", tmp_path / "hits.png")
    assert "matplotlib" in complaint
    assert "k3[plot]" in complaint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sizes", "4,x"), "sizes in GB"),
        (("--sizes", "nan"), "sizes in GB"),
        (("--sizes=-1",), "sizes in GB"),
        (("--top-k", "0"), "whole number from 1"),
        (("--plot", "hits.gif"), ".png, .svg, .pdf"),
        (("--plot", "/nowhere/hits.png"), "can't be written"),
        (("--lru",), "unrecognized"),
    ],
)
def test_cli_usage(cli, tmp_path, options, message):
    path = write_trace(tmp_path / "trace", tokens(2))
    assert message in cli.refused("trace", "replay", path, *options)


def test_cli_no_such_file(cli, tmp_path):
    assert "No such file" in cli.refused("trace", "replay", tmp_path / "none")
