"""Synthetic checkpoints: the released format to the byte, the same bytes for a seed, weights that work."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import re
import shutil
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open

from k3.checkpoint.census import EMBEDDING_CLASS, HEAD_CLASS, OTHERS, ROUTED, TRUNK, take_census
from k3.checkpoint.config import ModelConfig, stop_ids
from k3.checkpoint.index import TensorIndex
from k3.checkpoint.layout import bind
from k3.checkpoint.released import RELEASED_FILES, RELEASED_TENSOR_BYTES, RELEASED_TENSORS, vision_shards
from k3.checkpoint.synthetic import synth
from k3.checkpoint.synthetic.shards import StoredTensor, plan_shard, shard_name
from k3.checkpoint.synthetic.synth import KINDS, shard_plans, synthetic_size, write_synthetic
from k3.checkpoint.synthetic.tensors import round_to_bf16, shard_tensors
from k3.cli.main import main
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


def test_released_facts(shared):
    """File sizes, totals and configuration, as released."""
    lines = (shared / "data" / "released-shard-sizes.txt").read_text().split("\n")
    assert list(RELEASED_FILES.items()) == [
        (name, int(size)) for name, size in (line.split() for line in lines if line)
    ]
    index = json.loads(gzip.decompress((shared / "data" / "released-index.json.gz").read_bytes()))
    assert index["metadata"] == {"total_size": RELEASED_TENSOR_BYTES}
    assert len(index["weight_map"]) == RELEASED_TENSORS
    for shard, names in zip(list(RELEASED_FILES)[-2:], vision_shards(), strict=True):
        assert {name for name, home in index["weight_map"].items() if home == shard} == set(names)


def test_first_shards_of_the_released_shape():
    """A dense KDA layer, two KDA layers with experts and an MLA one: the released sizes to the byte."""
    plans = itertools.islice(shard_plans("full-shape"), 4)
    assert [plan.nbytes for plan in plans] == list(RELEASED_FILES.values())[:4]


def test_headers_can_be_padded():
    """With spaces, as the format has it, to a file of a given size."""
    tensors = [StoredTensor("a", "F32", (3,)), StoredTensor("b", "U8", (5,))]
    least = plan_shard(tensors)
    padded = plan_shard(tensors, least.nbytes + 24)
    assert padded.nbytes == least.nbytes + 24
    assert json.loads(padded.header[8:]) == json.loads(least.header[8:])
    assert padded.header.endswith(b"}}" + b" " * (24 + least.header.count(b" ")))
    assert len(padded.header) == 8 + int.from_bytes(padded.header[:8], "little")
    with pytest.raises(ValueError, match="leave"):
        plan_shard(tensors, 100)


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
    wide, full = KINDS["wide"], KINDS["full-shape"]
    assert full["text_config"].items() <= released["text_config"].items()
    assert {k: v for k, v in full.items() if k != "text_config"}.items() <= released.items()
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


# --- sparse ---

PLACEHOLDERS = 894_717_952
"""Bytes of the released vision part."""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """What `full-shape` is, with the configuration of `tiny`."""
    path = tmp_path_factory.mktemp("synth") / "small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "full-shape", KINDS["tiny"])
        write_synthetic("full-shape", path)
    return path


def test_sparse_files(small, tiny):
    config = ModelConfig.read(small / "config.json")
    index = TensorIndex.open(small)
    layout = bind(index, config)
    text = set(TensorIndex.open(tiny))
    vision = [index[name] for name in index if not name.startswith("language_model.")]
    assert len(vision) == 168
    assert set(index) == text | {entry.name for entry in vision}
    assert {entry.dtype for entry in vision} == {"BF16"}
    assert {len(entry.shape) for entry in vision} == {1}
    assert sum(entry.nbytes for entry in vision) == PLACEHOLDERS
    assert sorted({entry.shard_path.name for entry in vision}) == [shard_name(n, 11) for n in (10, 11)]
    assert [(small / shard_name(n, 11)).stat().st_size for n in (10, 11)] == list(RELEASED_FILES.values())[-2:]
    embedding = layout.top["model.embed_tokens.weight"].nbytes
    total = layout.trunk_bytes + layout.expert_bytes + embedding + PLACEHOLDERS
    assert index.metadata == {"total_size": total, "synthetic": True}
    assert stop_ids(small, config) == {770}
    assert not list(small.glob("*tok*"))
    assert sum(file.stat().st_blocks * 512 for file in small.iterdir()) < 5_000_000


def test_sparse_values(small):
    """Norms are one; the first embeddings and the routers are drawn; all else is zero."""
    index = TensorIndex.open(small)
    for name in index:
        if not name.startswith("language_model."):
            continue
        values = read_tensor(index[name])
        if name.endswith("norm.weight"):
            assert (values == 1).all(), name
        elif name.endswith("embed_tokens.weight"):
            assert np.isclose(values[:64].std(), 1.0, rtol=0.05)
            assert not values[64:].any()
        elif name.endswith(".gate.weight"):
            assert np.isclose(values.std(), 0.02, rtol=0.1), name
        else:
            assert not values.any(), name


def test_sparse_routing_differs(small):
    """By token and by layer, so that experts are read as in a real run."""
    model, trace = Reference.from_checkpoint(small), Trace()
    logits = model.logits(np.arange(64), trace)
    assert np.isfinite(logits).all()
    chosen = {layer: np.sort(ids, axis=1) for layer, ids in trace.router_ids.items()}
    assert len(chosen) == 7
    for ids in chosen.values():
        assert len(np.unique(ids, axis=0)) > 32
    assert len({ids.tobytes() for ids in chosen.values()}) == len(chosen)


def test_sparse_files_need_holes(tmp_path, monkeypatch):
    """A file system that writes zeros out would be full before the end."""
    monkeypatch.setitem(KINDS, "full-shape", KINDS["tiny"])
    monkeypatch.setattr(synth, "_stored_bytes", lambda path: path.stat().st_size)
    with pytest.raises(MachineError, match=r"keeps no holes in files: model-00001-of-000011"):
        write_synthetic("full-shape", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_command_says_what_it_took(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(KINDS, "full-shape", KINDS["tiny"])
    out = tmp_path / "out"
    assert main(["synth", "full-shape", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert re.search(r"14 files of 89\d MB, [0-9.]+ [kM]B on the disk, written in [0-9.]+ s", printed.err)


@pytest.mark.slow
def test_full_shape(tmp_path):
    """All files of 1.56 TB with the released sizes, in 1.3 GB of disk."""
    path = tmp_path / "full"
    write_synthetic("full-shape", path)
    assert {file.name: file.stat().st_size for file in path.glob("*.safetensors")} == RELEASED_FILES
    assert sum(file.stat().st_blocks * 512 for file in path.iterdir()) < 1.5e9
    assert json.loads((path / INDEX).read_bytes())["metadata"] == {
        "total_size": RELEASED_TENSOR_BYTES,
        "synthetic": True,
    }
    index = TensorIndex.open(path)
    assert len(index) == RELEASED_TENSORS
    assert bind(index, ModelConfig.read(path / "config.json")).tensor_count == RELEASED_TENSORS - 168
    census = take_census(index)
    assert census.expert_bytes == 17_547_264
    assert census.total([ROUTED]).nbytes == 92 * 896 * 17_547_264
    assert census.total([OTHERS]).nbytes == PLACEHOLDERS
    assert census.total([HEAD_CLASS]).nbytes == census.total([EMBEDDING_CLASS]).nbytes == 163_840 * 7168 * 2
    assert round(census.total(TRUNK).nbytes / 1e7) == 10881
    assert round(census.total().parameters / 1e10) == 278
    assert census.total().nbytes == RELEASED_TENSOR_BYTES


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
