"""`k3 run --dump-cache-trace`: what the file holds, when it is there, and that a replay finds the run's own hits."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cli_helpers import Cli
from k3.engine import generation
from k3.errors import K3Error, NonFiniteError
from k3.kernels import Kernels

EXPERTS, TOP_K, MOE_LAYERS = 16, 4, 7


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture
def routed(monkeypatch):
    """What every call of the router chose: int32 [rows, top_k], rank order."""
    chosen = []
    route = Kernels.route

    def spy(self, *arguments, **named):
        result = route(self, *arguments, **named)
        chosen.append(result[0].copy())
        return result

    monkeypatch.setattr(Kernels, "route", spy)
    return chosen


def pairs_of(routed):
    """The file that these choices make: MoE layers 1 to 7 of each step, in order."""
    layers = [1 + number % MOE_LAYERS for number in range(len(routed))]
    return [(layer, expert) for layer, ids in zip(layers, routed, strict=True) for expert in ids.ravel().tolist()]


def read(folder):
    pairs = np.frombuffer((folder / "expert_trace.bin").read_bytes(), "<i4").reshape(-1, 2)
    return [tuple(pair) for pair in pairs.tolist()]


def run(cli, folder, *arguments):
    return cli(
        "run", "demo", "--ids", "5,6,7,8,9", "--gen", 6, "--ignore-eos", "--dump-cache-trace", folder, *arguments
    )


@pytest.mark.parametrize("how", [(), ("--chunk", 2), ("--chunk", 1, "--cache-experts", 9), ("--full-recompute",)])
def test_every_step_is_recorded_in_the_order_of_its_work(cli, tmp_path, routed, how):
    assert run(cli, tmp_path, *how).code == 0
    assert read(tmp_path) == pairs_of(routed)
    histogram = json.loads((tmp_path / "expert_hist.json").read_bytes())["layers"]
    expected = np.zeros((MOE_LAYERS + 1, EXPERTS), int)
    for layer, expert in pairs_of(routed):
        expected[layer, expert] += 1
    assert histogram == {str(layer): expected[layer].tolist() for layer in range(1, MOE_LAYERS + 1)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expert_hist.json", "expert_trace.bin"]


@pytest.mark.parametrize("slots", [0, 1, 7, 20, 28, 45, 80, 111])
def test_a_replay_finds_the_run_s_own_hits(cli, tmp_path, slots):
    out = tmp_path / "o.json"
    arguments = ("--cache-experts", slots, "--chunk", 1, "--out", out)
    assert run(cli, tmp_path / "trace", *arguments, "--gen", 20).code == 0
    steps = json.loads(out.read_bytes())["steps"]
    hits, requests = (sum(step[f"expert_{name}"] for step in steps) for name in ("resident_hits", "requests"))
    replayed = cli.ok(
        *("trace", "replay", tmp_path / "trace" / "expert_trace.bin", "--json"),
        *("--top-k", TOP_K, "--experts", EXPERTS, "--expert-bytes", 10**6, "--sizes", slots / 1000),
    )
    [size] = json.loads(replayed.out)["sizes"]
    assert size["slots"] == slots
    found = size["policies"]["rank-recency"]
    assert (found["hits"], found["requests"]) == (hits, requests)
    assert hits > 0 or slots < 2


def test_recording_changes_nothing(cli, tmp_path):
    written = []
    for more in ((), ("--dump-cache-trace", tmp_path / "trace")):
        cli.ok("run", "demo", "--ids", "5,6,7", "--ignore-eos", "--out", tmp_path / "o.json", *more)
        written.append(json.loads((tmp_path / "o.json").read_bytes()))
    assert written[0]["logits_sha256"] == written[1]["logits_sha256"]


def test_demo_records_too(cli, tmp_path):
    cli.ok("demo", "--gen", 2, "--dump-cache-trace", tmp_path / "a" / "b")
    assert len(read(tmp_path / "a" / "b")) == (len("The river") - 2 + 1) * MOE_LAYERS * TOP_K


@pytest.mark.parametrize("place", ["file", "file/folder", "/proc/trace"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(cli, tmp_path, place):
    (tmp_path / "file").write_text("")
    ran = run(cli, tmp_path / place)
    assert (ran.code, ran.out) == (2, "")
    assert "memory plan" not in ran.err
    assert "a routing trace can't be written there" in ran.complaint


def test_a_run_that_fails_leaves_its_whole_steps(cli, tmp_path, routed, monkeypatch):
    prefill = generation.prefill
    calls = []

    def failing(engine, sequence, ids, *rest):
        calls.append(1)
        if len(calls) == 3:
            damage()
        return prefill(engine, sequence, ids, *rest)

    def damage():
        """From now on the router of the fourth MoE layer chooses from what is not finite."""
        route = Kernels.route
        seen = []

        def broken(self, logits, *rest, **named):
            seen.append(1)
            return route(self, logits * np.float32("nan") if len(seen) == 4 else logits, *rest, **named)

        monkeypatch.setattr(Kernels, "route", broken)

    monkeypatch.setattr(generation, "prefill", failing)
    assert run(cli, tmp_path).code == 4
    assert read(tmp_path) == pairs_of(routed[: 2 * MOE_LAYERS])


def test_an_interrupted_run_leaves_its_whole_steps(cli, tmp_path, routed, monkeypatch):
    from k3.cli import progress

    def interrupt(_, step):
        if step.token == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.Progress, "token", interrupt)
    assert run(cli, tmp_path).code == 3
    assert read(tmp_path) == pairs_of(routed) != []


def test_a_trace_that_cannot_be_written_ends_the_run_but_not_in_place_of_another_error(cli, tmp_path, monkeypatch):
    from k3.storage import trace

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace, "_write", full)
    ran = run(cli, tmp_path / "a")
    assert ran.code == 1
    assert "the routing trace could not be written: No space left on device" in ran.complaint

    monkeypatch.undo()

    def void(*_):
        raise NonFiniteError("a logit is not finite.")

    monkeypatch.setattr(generation, "prefill", void)
    close = trace.TraceRecorder.close

    def failing_close(recorder):
        close(recorder)
        raise K3Error("the trace could not be written.")

    monkeypatch.setattr(trace.TraceRecorder, "close", failing_close)
    assert run(cli, tmp_path / "b").code == 4
