"""Synthetic checkpoints: the released format to the byte, the same bytes for a seed, weights that work."""

from __future__ import annotations

import errno
import json
import shutil
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open

from k3.checkpoint import synth
from k3.checkpoint.config import ModelConfig, stop_ids
from k3.checkpoint.index import TensorIndex
from k3.checkpoint.layout import bind
from k3.checkpoint.shards import plan_shard, shard_name
from k3.checkpoint.synth import KINDS, synthetic_size, write_synthetic
from k3.checkpoint.synth_tensors import round_to_bf16, shard_tensors
from k3.errors import K3Error, MachineError, UsageError
from k3.reference import FP4_VALUES, Reference, Trace, read_tensor
from k3.text.tokenizer import load_tokenizer
from oracle import DATA, SETS

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("synth") / "tiny"
    write_synthetic("tiny", path)
    return path


def contents(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def planned(config):
    return [plan_shard(tensor.spec for tensor in tensors) for tensors in shard_tensors(config)]


# --- format ---


@pytest.mark.parametrize("name", SETS)
def test_layout_is_that_of_the_recorded_checkpoints(name):
    """Names, dtypes, shapes and order of every shard.

    Those have a metadata entry besides, which the released ones lack, as their sizes show.
    """
    config = json.loads((DATA / name / "config.json").read_text())
    for number, plan in enumerate(planned(config), 1):
        [path] = (DATA / name).glob(f"model-{number:05}-of-*.safetensors")
        raw = path.read_bytes()
        want = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        del want["__metadata__"]
        assert json.loads(plan.header[8:]) == want


def test_layout_of_the_released_config_has_the_released_sizes(shared):
    """The 94 shards of the language model to the byte, headers included."""
    config = json.loads((shared / "data" / "released-config.json").read_text())
    lines = (shared / "data" / "released-shard-sizes.txt").read_text().split("\n")
    released = {name: int(size) for name, size in (line.split() for line in lines if line)}
    plans = planned(config)
    assert len(plans) == 94
    assert [plan.nbytes for plan in plans] == [released[shard_name(n, 96)] for n in range(1, 95)]


def test_files_are_what_the_index_says(tiny):
    index = json.loads((tiny / INDEX).read_text())
    found, total = {}, 0
    for path in sorted(tiny.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(name)
                found[name] = path.name
                total += prod(part.get_shape()) * {"BF16": 2, "F32": 4, "U8": 1}[part.get_dtype()]
    assert found == index["weight_map"]
    assert total == index["metadata"]["total_size"]
    sizes = sum(path.stat().st_size for path in tiny.glob("*.safetensors"))
    assert sizes == synthetic_size("tiny")


def test_own_readers_accept_it(tiny):
    config = ModelConfig.read(tiny / "config.json")
    layout = bind(TensorIndex.open(tiny), config)
    assert all(table.contiguous.all() for table in layout.experts.values())
    assert stop_ids(tiny, config) == {770}
    tokenizer = load_tokenizer(tiny)
    text = "the words of a language, 你好 and 🚀"
    ids = tokenizer.encode(text)
    assert max(ids) < 768
    assert tokenizer.decode(ids) == text


def test_tiny_is_small_and_has_every_part(tiny):
    config = ModelConfig.read(tiny / "config.json")
    assert sum(len(data) for data in contents(tiny).values()) <= 3_000_000
    assert config.mla_layers == (3, 7)
    assert not config.is_moe(0)
    assert config.moe_layers == tuple(range(1, 8))
    assert config.num_hidden_layers / config.attn_res_block_size >= 2.5
    assert config.vocab_size == 768 + 256


def test_wide_has_the_released_widths():
    """Checked from the plan: it takes 12 GB."""
    text = KINDS["wide"]["text_config"]
    config = ModelConfig.from_json(json.dumps(KINDS["wide"]).encode(), "wide")
    assert config.linear_attn_config.kda_layers == (1, 2, 3, 5)
    assert config.linear_attn_config.full_attn_layers == (4,)
    assert (config.hidden_size, config.intermediate_size, config.shared_intermediate_size) == (
        7168,
        33792,
        6144,
    )
    assert (config.num_experts, config.num_experts_per_token, text["vocab_size"]) == (64, 16, 16384)
    plans = planned(KINDS["wide"])
    # Bytes from the released shapes: bf16 trunk, MXFP4 experts of 17,547,264 bytes.
    kda = 2 * (5 * 12288 * 7168 + 128 * (7168 + 12288) + 96 * 7168) + 4 * (3 * 12288 * 4 + 12288 + 128 + 128)
    around = 2 * 6 * 7168
    moe = 2 * (2 * 3584 * 7168 + 3584 + 3 * 6144 * 7168 + 64 * 7168) + 4 * 64 + 64 * 17_547_264
    data = [plan.nbytes - len(plan.header) for plan in plans]
    assert data[0] == kda + around + 2 * 3 * 33792 * 7168
    assert data[1] == data[2] == data[4] == kda + around + moe
    assert data[5] == 2 * (2 * 16384 * 7168 + 3 * 7168)
    assert 11.5e9 < synthetic_size("wide") < 12.5e9


def test_config_fields_are_those_of_the_released_one(shared):
    released = json.loads((shared / "data" / "released-config.json").read_text())
    wide = KINDS["wide"]
    assert set(wide) <= set(released)
    assert set(wide["text_config"]) <= set(released["text_config"])
    assert wide["text_config"]["quantization_config"] == released["text_config"]["quantization_config"]
    differing = {key for key, value in wide["text_config"].items() if value != released["text_config"][key]}
    assert differing == {
        *("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"),
        *("linear_attn_config", "num_experts", "num_hidden_layers"),
    }


# --- values ---


def test_bytes_depend_on_kind_and_seed_only(tiny, tmp_path):
    for number, (seed, threads) in enumerate([(0, 1), (0, 3), (1, 2)]):
        write_synthetic("tiny", tmp_path / str(number), seed, threads=threads)
    one, three, other = (contents(tmp_path / str(number)) for number in range(3))
    assert one == three == contents(tiny)
    assert set(one) == set(other)
    shards = {name for name in one if name.endswith(".safetensors")}
    assert {name for name in one if one[name] != other[name]} == shards


def test_values_are_bell_shaped_and_of_sane_size(tiny):
    index = TensorIndex.open(tiny)
    layer = "language_model.model.layers.1."
    q = read_tensor(index[f"{layer}self_attn.q_proj.weight"])
    assert np.isclose(q.std(), 64**-0.5, rtol=0.05)
    assert np.isclose(np.mean(np.abs(q) < q.std()), 0.683, atol=0.02)
    a_log = read_tensor(index[f"{layer}self_attn.A_log"])
    assert a_log.shape == (32,)
    assert a_log[:3].all()
    assert not a_log[3:].any()
    experts = f"{layer}block_sparse_moe.experts."
    packed = np.stack([read_tensor(index[f"{experts}{e}.w1.weight_packed"]) for e in range(16)])
    counts = np.bincount(np.concatenate([packed & 15, packed >> 4], axis=None), minlength=16)
    assert counts.min() > 0
    assert np.isclose(counts[8], counts[0], rtol=0.15)
    # Every code in the proportion that a normal distribution of standard deviation 2 gives it.
    assert np.isclose(np.sqrt(np.average(FP4_VALUES**2, weights=counts)), 2.0, rtol=0.05)
    scales = np.stack([read_tensor(index[f"{experts}{e}.w1.weight_scale"]) for e in range(16)])
    assert len(np.unique(scales)) == 3


def test_same_values_nowhere_else(tiny):
    """Streams of different tensors have nothing in common."""
    index = TensorIndex.open(tiny)
    names = [f"language_model.model.layers.{n}.self_attn.{p}_proj.weight" for n in (0, 1, 2) for p in "qkvg"]
    drawn = {read_tensor(index[name]).tobytes() for name in names}
    assert len(drawn) == len(names)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (1.0 + 2**-8, 0x3F80),  # halfway: to even
        (1.0 + 3 * 2**-8, 0x3F82),  # halfway: to even
        (1.0 + 2**-8 + 2**-20, 0x3F81),
        (-(1.0 + 2**-8 + 2**-20), 0xBF81),
        (1.9999, 0x4000),
        (-0.0, 0x8000),
        (1e-40, 0x0001),
    ],
)
def test_round_to_bf16(value, bits):
    assert round_to_bf16(np.array([value], np.float32))[0] == bits


def test_logits_are_alive(tiny):
    model, trace = Reference.from_checkpoint(tiny), Trace()
    ids = np.random.default_rng(1).integers(0, 768, 40)
    logits = model.logits(ids, trace)
    assert np.isfinite(logits).all()
    assert 1.5 < logits[:, :768].std() < 5
    best = logits.argmax(axis=1)
    assert best.max() < 768
    assert len(np.unique(best)) > 20
    assert all(0.3 < hidden.std() < 10 for hidden in trace.hidden.values())
    assert all(len(np.unique(chosen)) > 12 for chosen in trace.router_ids.values())


# --- refusals ---


def test_refuses_what_is_there(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(UsageError, match="something is there already"):
        write_synthetic("tiny", tmp_path)
    with pytest.raises(UsageError, match="something is there already"):
        write_synthetic("tiny", tmp_path / "note")
    assert contents(tmp_path) == {"note": b"mine"}


def test_refuses_what_a_killed_run_left(tmp_path):
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(UsageError, match=r"out\.partial is there"):
        write_synthetic("tiny", tmp_path / "out")


def test_writes_into_an_empty_directory(tiny, tmp_path):
    out = tmp_path / "a" / "b"
    out.mkdir(parents=True)
    write_synthetic("tiny", out)
    assert contents(out) == contents(tiny)
    assert [path.name for path in out.parent.iterdir()] == ["b"]


@pytest.mark.parametrize(("kind", "seed", "message"), [("huge", 0, "tiny, wide"), ("tiny", -1, "out of range")])
def test_refuses_bad_arguments(tmp_path, kind, seed, message):
    with pytest.raises(UsageError, match=message):
        write_synthetic(kind, tmp_path / "out", seed)
    assert not list(tmp_path.iterdir())


def test_refuses_a_full_disk_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000_000))
    with pytest.raises(MachineError, match=r"takes 11\.903 GB, and 10\.000 GB are free"):
        write_synthetic("wide", tmp_path / "deep" / "out")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(synth, "write_at", full)
    with pytest.raises(K3Error, match="No space left on device"):
        write_synthetic("tiny", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing(tmp_path):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_synthetic("tiny", tmp_path / "out", progress=stop)
    assert not list(tmp_path.iterdir())


def test_progress_counts_every_byte(tmp_path):
    calls = []
    write_synthetic("tiny", tmp_path / "out", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1] == (synthetic_size("tiny"),) * 2
