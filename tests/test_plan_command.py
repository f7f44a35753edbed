"""`k3 plan`: the plan that a run would make, bytes that a run then reads, seconds by the definition."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from cli_helpers import Cli
from conftest import TINY_A, TINY_C
from k3.checkpoint.census import ROUTED, TRUNK, take_census
from k3.checkpoint.index import TensorIndex
from k3.engine import plan as plan_module
from k3.engine.forecast import speeds as speeds_module
from k3.engine.forecast.prediction import expected_hits, predict
from k3.engine.forecast.released import released_needs
from k3.engine.forecast.speeds import Speeds, measure_arithmetic, measure_drives
from k3.engine.loading import LoadOptions, bind_checkpoint
from k3.engine.plan import MemoryRequest, plan_memory
from k3.kernels import Kernels
from k3.storage.disk_bench import DiskReport

BIG = 1 << 45
BY_HAND = ("--disk-gbps", "2", "--memory-gbps", "20", "--gmacs", "40")
GB = 10**9


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """What the process holds doesn't move while a test compares plans."""
    monkeypatch.setattr(plan_module, "resident_bytes", lambda: 60_000_000)


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture(scope="module")
def needs():
    """Those of the released model."""
    return released_needs()


def planned(needs, **request):
    return plan_memory(needs, MemoryRequest(**{"context": 4096, "trunk_bytes": 0, "cache_bytes": 0} | request), BIG)


def record(cli, *arguments):
    return json.loads(cli.ok("plan", *arguments, "--json", "--quiet").out)


# --- the released model, by the figures of its description ---


def test_a_token_of_the_released_model(needs):
    found = predict(needs, planned(needs), Speeds(4.6e9, 100e9, 1000e9))
    assert found.needed.experts == 1472 * 17_547_264
    assert found.needed.trunk + needs.small_bytes // 2 == pytest.approx(108.81e9, rel=5e-4)
    assert found.needed.head == 163_840 * 7168 * 2
    assert found.needed.embedding == 7168 * 2
    assert found.read == found.needed
    assert found.multiply_adds == pytest.approx((54.4 + 1.17 + 48.6) * 1e9, rel=2e-3)
    assert found.seconds == pytest.approx((108.81 + 2.35 + 25.83) / 4.6, rel=1e-3)
    assert found.bound == "the drive"


def test_with_the_trunk_kept_the_experts_alone_are_read(needs):
    found = predict(needs, planned(needs, trunk_bytes=None), Speeds(4.6e9, 1e15, 1e15))
    assert (found.read.trunk, found.read.head) == (0, 0)
    assert found.seconds == pytest.approx(25.83 / 4.6, rel=1e-3)
    assert found.load_seconds == pytest.approx(needs.matrix_bytes / 4.6e9)


def test_experts_are_read_after_the_arithmetic_that_chooses_them(needs):
    found = predict(needs, planned(needs, trunk_bytes=None), Speeds(5e9, 20e9, 1e15))
    shared = 92 * 3 * 7168 * 6144 * 2
    state = 2 * needs.state_bytes
    before = (found.needed.trunk - shared + found.needed.head + state) / 20e9
    assert found.seconds == pytest.approx(25.83e9 / 5e9 + before, rel=1e-3)
    assert found.bound == "experts read after the arithmetic that chooses them"


def test_with_everything_kept_memory_or_multiply_adds_bound_it(needs):
    everything = planned(needs, trunk_bytes=None, cache_bytes=None)
    assert everything.expert_slots == needs.experts
    total = 108.81 + 2.35 + 25.83 + 2 * needs.state_bytes / 1e9
    assert predict(needs, everything, Speeds(None, 50e9, 1e15)).seconds == pytest.approx(total / 50, rel=2e-3)
    assert predict(needs, everything, Speeds(None, 1e15, 25e9)).seconds == pytest.approx(104.2 / 25, rel=5e-3)
    assert predict(needs, everything, Speeds(2e9, 50e9, 1e15)).load_seconds == pytest.approx(1558.3e9 / 2e9, rel=2e-3)


def test_without_a_drive_speed_seconds_are_unknown(needs):
    found = predict(needs, planned(needs), Speeds(None, 50e9, 1e12))
    assert (found.seconds, found.drive_seconds, found.bound, found.load_seconds) == (None, None, None, None)


@pytest.mark.parametrize(("gigabytes", "percent"), [(4, 8.5), (8, 15.0), (16, 24.0), (32, 34.0), (64, 39.6)])
def test_expert_hits_are_the_measured_ones(needs, gigabytes, percent):
    plan = planned(needs, cache_bytes=gigabytes * GB)
    found = predict(needs, plan, Speeds(4e9, 50e9, 1e12))
    assert 100 * found.hit_rate == pytest.approx(percent, abs=0.15)
    assert found.hits_are_estimated
    assert found.read.experts == pytest.approx(25.83e9 * (1 - percent / 100), rel=5e-3)


def test_expert_hits_rise_to_all(needs):
    rates = [expected_hits(slots, 16, 896) for slots in np.linspace(0, 896, 300)]
    assert rates[0] == 0.0
    assert rates[-1] == 1.0
    assert all(a <= b for a, b in pairwise(rates))
    # With few experts even random choices come back.
    assert expected_hits(32, 16, 64) == 0.5
    assert expected_hits(4, 4, 16) == pytest.approx(expected_hits(16, 16, 64))
    assert not predict(needs, planned(needs), Speeds(4e9, 50e9, 1e12)).hits_are_estimated


def test_several_sequences_share_trunk_and_experts(needs):
    rng = np.random.default_rng(1)
    drawn = np.mean([len(np.unique([rng.permutation(896)[:16] for _ in range(5)])) for _ in range(400)])
    one, five = (predict(needs, planned(needs), Speeds(4e9, 50e9, 1e12), rows) for rows in (1, 5))
    assert five.needed.trunk == one.needed.trunk
    assert five.needed.experts == pytest.approx(92 * drawn * 17_547_264, rel=0.01)
    assert five.multiply_adds == 5 * one.multiply_adds
    assert five.seconds_per_token == pytest.approx(five.seconds / 5)
    assert five.seconds_per_token < one.seconds_per_token


def test_a_step_has_room_for_a_chunk_and_a_token_of_each_other_sequence(needs):
    def rows(chunk, sequences):
        return planned(needs, chunk=chunk, sequences=sequences).items["activations"]

    assert rows(8, 4) == rows(11, 1)
    assert rows(1, 16) == rows(16, 1)


def test_several_sequences_have_states_and_latents_each(needs):
    one, four = (planned(needs, sequences=count) for count in (1, 4))
    for item in ("recurrent states", "latent cache"):
        assert four.items[item] == 4 * one.items[item] > 0
    others = {name for name in one.items if name not in ("recurrent states", "latent cache", "activations")}
    assert all(abs(four.items[name] - one.items[name]) < 1 << 20 for name in others)
    limit = planned(needs, context=None).total_bytes // 40
    contexts = [
        plan_memory(needs, MemoryRequest(sequences=n, trunk_bytes=0, cache_bytes=0), limit).context for n in (1, 2)
    ]
    assert 0 < contexts[1] < contexts[0]


# --- the command ---


@pytest.mark.parametrize("checkpoint", [TINY_A, TINY_C])
def test_needed_bytes_are_those_of_the_checkpoint(cli, checkpoint):
    found = record(cli, checkpoint, *BY_HAND)
    index = TensorIndex.open(checkpoint)
    census = take_census(index)
    bound = bind_checkpoint(checkpoint, LoadOptions())
    small = sum(
        layer.tensors[spec.local].nbytes
        for layer in bound.layout.layers
        for spec in layer.specs
        if spec.role == "small"
    )
    norms = sum(entry.nbytes for name, entry in bound.layout.top.items() if "norm" in name or "res_proj" in name)
    needed = found["step"]["needed_bytes"]
    assert needed["trunk"] == census.total(TRUNK).nbytes - small - norms
    share = bound.config.num_experts_per_token / bound.config.num_experts
    assert needed["experts"] == census.total([ROUTED]).nbytes * share
    assert found["kept"]["of_experts"] == found["kept"]["experts"] == census.experts


@pytest.mark.parametrize("packed", [False, True])
def test_a_run_then_reads_what_was_predicted(cli, tmp_path, packed):
    memory = ("--trunk-gb", "0.0004", "--cache-gb", "0", "--context", "64")
    if packed:
        cli.ok("pack", "demo", tmp_path / "trunk", "--quiet")
        memory += ("--trunk", str(tmp_path / "trunk"))
    found = record(cli, "demo", *memory, *BY_HAND)
    out = tmp_path / "out.json"
    cli.ok("run", "demo", "--ids", "1,2,3", "--gen", 3, "--ignore-eos", "--out", out, "--quiet", *memory)
    step = json.loads(out.read_text())["steps"][2]
    assert found["step"]["read_bytes"] == step["bytes_read"]
    assert 0 < found["kept"]["trunk_and_head_bytes"] <= 400_000
    assert found["bytes_per_token"] == sum(step["bytes_read"].values())
    assert found["seconds_per_token"] == pytest.approx(found["bytes_per_token"] / 2e9)


def test_a_run_makes_the_same_plan(cli, tmp_path):
    memory = ("--memory", "120MB", "--context", "64", "--chunk", "8", "--cache-experts", "9")
    found = record(cli, "demo", *memory, *BY_HAND)
    out = tmp_path / "out.json"
    cli.ok("run", "demo", "--ids", "1", "--gen", 1, "--out", out, "--quiet", *memory)
    items = json.loads(out.read_text())["plan"]["items"]
    own = "interpreter, libraries, index"
    assert found["plan"]["items"].keys() == items.keys()
    assert {k: v for k, v in found["plan"]["items"].items() if k != own} == {k: v for k, v in items.items() if k != own}
    assert found["plan"]["total_bytes"] == sum(found["plan"]["items"].values())
    assert (found["context"], found["chunk"], found["kept"]["experts"]) == (64, 8, 9)


def test_the_table(cli):
    ran = cli.ok("plan", "demo", *BY_HAND, "--sequences", 2, "--cache-experts", 20)
    for text in (
        "memory plan: ",
        "  latent cache  ",
        "20 of 112 experts",
        "for each of 2 sequences",
        "a step, 2 tokens",
        "  together  ",
        "an estimate from a recorded run",
        "drive 2 GB/s (given)",
        "seconds a token: ",
    ):
        assert text in ran.out
    assert ran.err == ""


def test_what_is_not_given_is_measured(cli, monkeypatch):
    report = DiskReport((), 0, (), 0, direct=True, from_drive=1.0)
    monkeypatch.setattr(DiskReport, "rate", 3e9)
    monkeypatch.setattr(speeds_module, "measure_drives", lambda *_, **__: report)
    monkeypatch.setattr(speeds_module, "measure_arithmetic", lambda ops: (ops.threads * 10e9, 50e9))
    found = record(cli, "demo", "--threads", 1)["speeds"]
    assert found == {
        "disk_gbps": 3.0,
        "memory_gbps": 10.0,
        "gmacs": 50.0,
        "disk": "measured",
        "memory": "measured",
        "arithmetic": "measured",
    }
    mixed = record(cli, "demo", "--threads", 2, "--gmacs", "7", "--disk-gbps", "1")["speeds"]
    assert (mixed["disk_gbps"], mixed["memory_gbps"], mixed["gmacs"]) == (1.0, 20.0, 7.0)
    assert (mixed["disk"], mixed["memory"], mixed["arithmetic"]) == ("given", "measured", "given")
    cached = DiskReport((), 0, (), 0, direct=False, from_drive=0.1)
    monkeypatch.setattr(speeds_module, "measure_drives", lambda *_, **__: cached)
    assert "cache" in record(cli, "demo")["speeds"]["disk"]


def test_a_drive_that_cannot_be_measured_is_unknown(cli, monkeypatch):
    monkeypatch.setattr(speeds_module, "_BUFFER", 4 << 20)
    ran = cli.ok("plan", "demo", "--trunk-gb", 0, "--cache-gb", 0)
    assert "drive unknown: the files are too small to measure by; --disk-gbps gives it" in ran.out
    assert "seconds a token: unknown" in ran.out
    monkeypatch.setattr(speeds_module, "has_holes", lambda _: True)
    found = record(cli, "demo", "--trunk-gb", 0, "--cache-gb", 0)
    assert "holes" in found["speeds"]["disk"]
    assert found["seconds_per_token"] is None


def test_drives_are_measured_by_the_model_itself(monkeypatch):
    bound = bind_checkpoint(TINY_A, LoadOptions())
    seen = []
    report = DiskReport((), 0, (), 0, direct=True, from_drive=None)
    monkeypatch.setattr(speeds_module, "_LEAST_TO_READ", 1)
    monkeypatch.setattr(speeds_module, "measure_drive", lambda *a, **k: seen.append((a, k)) or report)
    assert measure_drives(bound, direct=False) is report
    [((files, expert_bytes), options)] = seen
    assert files == (max(TINY_A.glob("model-*.safetensors"), key=lambda path: path.stat().st_size),)
    assert expert_bytes == bound.layout.largest_expert_bytes
    assert options == {"direct": False}


def test_arithmetic_is_measured(monkeypatch):
    monkeypatch.setattr(speeds_module, "_BUFFER", 4 << 20)
    bandwidth, multiply_adds = measure_arithmetic(Kernels(1))
    assert 1e8 < bandwidth < 1e13
    assert 1e7 < multiply_adds < 1e14


def test_another_machine_may_have_more_memory(cli):
    found = record(cli, "demo", *BY_HAND, "--memory", "900TB")
    assert found["limit_bytes"] == 900 * 10**12
    here = record(cli, "demo", *BY_HAND[:-2], "--memory", "900TB")
    assert here["limit_bytes"] < 900 * 10**12


def test_refusals(cli):
    complaint = cli.refused("plan", "demo", *BY_HAND, "--memory", "20MB")
    assert "interpreter, libraries, index" in complaint
    assert "are missing" in complaint
    for option in ("--disk-gbps", "--memory-gbps", "--gmacs"):
        for value in ("0", "-1", "nan", "inf", "x", "1e12"):
            assert f"{option}: expected a number above 0" in cli.refused("plan", "demo", f"{option}={value}")
    assert "--sequences" in cli.refused("plan", "demo", "--sequences", "0")
    assert "found nothing" in cli.refused("plan", "/nowhere/at/all")
    assert "tiktoken.model" in cli.refused("plan", TINY_A, *BY_HAND, "--tok", TINY_A)
