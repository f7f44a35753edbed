"""Which tensors make the model, and the binding of a config to an index."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import (
    REPOSITORY,
    TINY_A,
    TINY_C,
    edit_json,
    edit_shard,
    read_shard,
    shard_of,
    shared_file,
    write_shard,
)
from k3.checkpoint.config import ModelConfig
from k3.checkpoint.index import INDEX_FILE, SYNTHETIC_MARK, TensorIndex
from k3.checkpoint.layout import Layout, bind, check_a_log, wanted_tensors
from k3.checkpoint.specs import EXPERT_TENSORS, expert_shapes, layer_specs, top_specs
from k3.errors import CheckpointError, UsageError

PREFIX = "language_model."
LAYER = PREFIX + "model.layers."


def config_of(model_dir: Path) -> ModelConfig:
    return ModelConfig.read(model_dir / "config.json")


def bound(model_dir: Path, layers: int | None = None, **changes: Any) -> Layout:
    config = dataclasses.replace(config_of(model_dir), **changes)
    return bind(TensorIndex.open(model_dir, wanted_tensors(config, layers)), config, layers)


def refusal(model_dir: Path, layers: int | None = None, **changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        bound(model_dir, layers, **changes)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 5000
    return str(caught.value)


def expected_names(config: ModelConfig) -> list[str]:
    names = [PREFIX + spec.local for spec in top_specs(config)]
    for layer in range(config.num_hidden_layers):
        names += [f"{LAYER}{layer}.{spec.local}" for spec in layer_specs(config, layer)]
    for layer in config.moe_layers:
        stem = f"{LAYER}{layer}.block_sparse_moe.experts"
        names += [f"{stem}.{expert}.{name}" for expert in range(config.num_experts) for name in EXPERT_TENSORS]
    return names


def stored_dtype(local: str) -> str:
    """Released storage: everything is BF16 but seven small families."""
    f32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    return "F32" if local.endswith(f32) else "BF16"


def test_the_config_names_exactly_the_released_tensors() -> None:
    """497,220 tensors, of which 168 belong to the vision tower and its projector."""
    released = json.loads(gzip.decompress(shared_file("data/released-index.json.gz").read_bytes()))
    names = expected_names(ModelConfig.read(shared_file("data/released-config.json")))
    assert len(names) == len(set(names)) == 497_220 - 168
    others = set(released["weight_map"]) - set(names)
    assert set(names) <= set(released["weight_map"])
    assert len(others) == 168
    assert all(name.startswith(("vision_tower.", "mm_projector.")) for name in others)


def test_shapes_add_up_to_the_released_bytes() -> None:
    """The index states the sum of all tensors; the files of the vision tower hold what the text model doesn't."""
    released = json.loads(gzip.decompress(shared_file("data/released-index.json.gz").read_bytes()))
    sizes = dict(line.split() for line in shared_file("data/released-shard-sizes.txt").read_text().splitlines())
    config = ModelConfig.read(shared_file("data/released-config.json"))
    specs = [*top_specs(config), *(s for layer in range(93) for s in layer_specs(config, layer))]
    trunk = sum(math.prod(s.shape) * (4 if stored_dtype(s.local) == "F32" else 2) for s in specs)
    expert = sum(math.prod(shape) for shape in expert_shapes(config))
    assert expert == 17_547_264
    vision = released["metadata"]["total_size"] - trunk - 92 * 896 * expert
    files = sum(int(sizes[f"model-000{n}-of-000096.safetensors"]) for n in (95, 96))
    assert 0 < files - vision < 50_000  # their headers


def test_released_shapes() -> None:
    """Shapes of one layer of each kind, by the published table."""
    config = ModelConfig.read(shared_file("data/released-config.json"))

    def shapes(layer: int) -> dict[str, tuple[int, ...]]:
        return {spec.local: spec.shape for spec in layer_specs(config, layer)}

    kda, mla = shapes(0), shapes(3)
    assert kda["self_attn.q_proj.weight"] == (12288, 7168)
    assert kda["self_attn.o_proj.weight"] == (7168, 12288)
    assert kda["self_attn.k_conv1d.weight"] == (12288, 1, 4)
    assert kda["self_attn.f_a_proj.weight"] == (128, 7168)
    assert kda["self_attn.f_b_proj.weight"] == (12288, 128)
    assert kda["self_attn.b_proj.weight"] == (96, 7168)
    assert kda["self_attn.A_log"] == kda["self_attn.o_norm.weight"] == (128,)
    assert kda["self_attn.dt_bias"] == (12288,)
    assert kda["mlp.up_proj.weight"] == (33792, 7168)
    assert kda["mlp.down_proj.weight"] == (7168, 33792)
    assert mla["self_attn.q_a_proj.weight"] == (1536, 7168)
    assert mla["self_attn.q_b_proj.weight"] == (18432, 1536)
    assert mla["self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert mla["self_attn.kv_a_layernorm.weight"] == (512,)
    assert mla["self_attn.kv_b_proj.weight"] == (24576, 512)
    assert mla["self_attn.g_proj.weight"] == (12288, 7168)
    assert mla["mlp_res_proj.weight"] == (1, 7168)
    assert mla["block_sparse_moe.gate.weight"] == (896, 7168)
    assert mla["block_sparse_moe.gate.e_score_correction_bias"] == (896,)
    assert mla["block_sparse_moe.routed_expert_down_proj.weight"] == (3584, 7168)
    assert mla["block_sparse_moe.routed_expert_norm.weight"] == (3584,)
    assert mla["block_sparse_moe.shared_experts.down_proj.weight"] == (7168, 6144)
    assert dict(zip(EXPERT_TENSORS, expert_shapes(config), strict=True)) == {
        "w1.weight_packed": (3072, 1792), "w1.weight_scale": (3072, 112),
        "w3.weight_packed": (3072, 1792), "w3.weight_scale": (3072, 112),
        "w2.weight_packed": (3584, 1536), "w2.weight_scale": (3584, 96),
    }  # fmt: skip


def test_order_of_execution() -> None:
    """A layer's matrices in the order in which its formulas need them."""
    config = config_of(TINY_A)

    def matrices(layer: int) -> list[str]:
        return [s.local.removesuffix(".weight") for s in layer_specs(config, layer) if s.role == "matrix"]

    attention = [f"self_attn.{n}_proj" for n in ("q", "k", "v", "f_a", "f_b", "b", "g", "o")]
    assert matrices(0) == [*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    latent = ["self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"]
    moe = ["gate", "routed_expert_down_proj", *(f"shared_experts.{n}_proj" for n in ("gate", "up", "down"))]
    assert matrices(3) == [
        *latent, "self_attn.g_proj", "self_attn.o_proj",
        *(f"block_sparse_moe.{n}" for n in (*moe, "routed_expert_up_proj")),
    ]  # fmt: skip


@pytest.mark.parametrize("source", [TINY_A, TINY_C], ids=["tiny-a", "tiny-c"])
def test_everything_of_the_text_model_is_bound_once(source: Path) -> None:
    layout = bound(source)
    entries = [*layout.top.values()]
    for layer in layout.layers:
        assert list(layer.tensors) == [spec.local for spec in layer.specs]
        entries += layer.tensors.values()
    for number in layout.moe_layers:
        for expert in range(layout.num_experts):
            entries += layout.expert(number, expert).values()
    names = [entry.name for entry in entries]
    stored = json.loads((source / INDEX_FILE).read_bytes())["weight_map"]
    assert sorted(names) == sorted(name for name in stored if name.startswith(PREFIX))
    assert len(names) == layout.tensor_count
    index = TensorIndex.open(source)
    assert all(index[entry.name] == entry for entry in entries)
    assert layout.top["lm_head.weight"].name == PREFIX + "lm_head.weight"
    embedding = layout.top["model.embed_tokens.weight"].nbytes
    assert layout.trunk_bytes + layout.expert_bytes + embedding == sum(entry.nbytes for entry in entries)
    assert layout.largest_expert_bytes * layout.num_experts * len(layout.moe_layers) == layout.expert_bytes


def test_tensors_of_each_kind_of_layer() -> None:
    """Exact counts: 6 of every layer, 14 of KDA, 8 of MLA, 3 of a dense MLP, 8 of a mixture and 6 an expert."""
    layout = bound(TINY_A)
    counts = [len(layer.tensors) for layer in layout.layers]
    mla = {3, 7, 11, 12}
    assert counts == [6 + (8 if i in mla else 14) + (8 if i else 3) for i in range(13)]
    assert [len(table) for table in layout.experts.values()] == [16] * 12
    assert layout.tensor_count == sum(counts) + 12 * 16 * 6 + 5


def test_an_expert_is_one_range() -> None:
    layout = bound(TINY_C)
    for table in layout.experts.values():
        assert table.contiguous.all()
        for expert in range(len(table)):
            record = table.record(expert)
            assert record is not None
            raw = record.path.read_bytes()[record.offset : record.offset + record.nbytes]
            for start, entry in zip(record.starts, table.entries(expert).values(), strict=True):
                whole = entry.shard_path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
                assert raw[start : start + entry.nbytes] == whole


def test_an_expert_in_pieces(checkpoint: Path) -> None:
    """Tensors may lie in any order; an expert whose six are apart has no single range, but entries."""
    path = shard_of(checkpoint, 2)
    header, data = read_shard(path)
    del header["__metadata__"]
    moved = f"{LAYER}1.block_sparse_moe.experts.3.w1.weight_packed"
    order = sorted(header, key=lambda name: (name == moved, header[name]["data_offsets"]))
    rewrite(path, {name: (header[name]["dtype"], header[name]["shape"], stored(header, data, name)) for name in order})
    table = bound(checkpoint).experts[1]
    assert [table.record(e) is None for e in range(12)] == [e == 3 for e in range(12)]
    entry = table.entries(3)["w1.weight_packed"]
    raw = path.read_bytes()
    assert raw[entry.offset : entry.offset + entry.nbytes] == stored(header, data, moved)


def stored(header: dict[str, Any], data: bytes, name: str) -> bytes:
    begin, end = header[name]["data_offsets"]
    return data[begin:end]


def rewrite(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Write a shard with these tensors in this order."""
    header, end = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    write_shard(path, header, b"".join(raw for _, _, raw in tensors.values()))


def test_float32_in_place_of_bfloat16(checkpoint: Path) -> None:
    path = shard_of(checkpoint, 10)
    header, data = read_shard(path)
    del header["__metadata__"]
    widened = {
        name: (
            "F32",
            header[name]["shape"],
            (np.frombuffer(stored(header, data, name), "<u2").astype("<u4") << 16).tobytes(),
        )
        for name in header
    }
    rewrite(path, widened)
    assert {entry.dtype for entry in bound(checkpoint).top.values()} == {"F32"}


def test_first_layers_only(checkpoint: Path) -> None:
    for number in (*range(4, 10), 11, 12):
        shard_of(checkpoint, number).unlink()
    layout = bound(checkpoint, 3)
    assert len(layout.layers) == 3
    assert layout.moe_layers == (1, 2)
    assert len(layout.top) == 5
    assert "names 6 files" in refusal(checkpoint, 9)


@pytest.mark.parametrize("layers", [0, -1, 10, 10**9])
def test_layers_out_of_range(layers: int) -> None:
    config = config_of(TINY_C)
    for call in (lambda: wanted_tensors(config, layers), lambda: bind(TensorIndex.open(TINY_C), config, layers)):
        with pytest.raises(UsageError, match=f"expected a number from 1 to 9, found {layers}") as caught:
            call()
        assert caught.value.exit_code == 2


def test_names_without_the_prefix(checkpoint: Path) -> None:
    def strip(mapping: dict[str, Any]) -> None:
        for name in list(mapping):
            mapping[name.removeprefix(PREFIX)] = mapping.pop(name)

    for number in range(1, 13):
        edit_shard(shard_of(checkpoint, number), strip)
    edit_json(checkpoint / INDEX_FILE, lambda index: strip(index["weight_map"]))
    layout, original = bound(checkpoint, 4), bound(TINY_C, 4)
    assert layout.prefix == ""
    assert layout.tensor_count == original.tensor_count
    assert list(layout.top) == list(original.top)
    assert layout.expert(3, 5)["w2.weight_scale"].name == "model.layers.3.block_sparse_moe.experts.5.w2.weight_scale"


def test_names_with_and_without_the_prefix(checkpoint: Path) -> None:
    rename(checkpoint, 10, PREFIX + "model.norm.weight", "model.norm.weight")
    assert "both with and without 'language_model.'" in refusal(checkpoint)


def test_wanted_names() -> None:
    wanted = wanted_tensors(config_of(TINY_C), 2)
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.0.x", "model.layers.1.y.2"):
        assert wanted(name)
        assert wanted(PREFIX + name)
    for name in (
        "model.layers.2.x", "model.layers.10.x", "vision_tower.blocks.0.x", "mm_projector.x", "", "model.layers.",
        "model.layers.x.y", "model.layers.²", "model.layers." + "1" * 5000 + ".x", "other.model.layers.0.x",
    ):  # fmt: skip
        assert not wanted(name)


def rename(model_dir: Path, number: int, old: str, new: str) -> None:
    """Rename a tensor in its shard and in the index."""
    edit_shard(shard_of(model_dir, number), lambda header: header.update({new: header.pop(old)}))
    edit_json(model_dir / INDEX_FILE, lambda i: i["weight_map"].update({new: i["weight_map"].pop(old)}))


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (10, PREFIX + "model.norm.weight"),
        (10, PREFIX + "lm_head.weight"),
        (1, LAYER + "0.self_attn.A_log"),
        (1, LAYER + "0.self_attention_res_proj.weight"),
        (4, LAYER + "3.self_attn.kv_a_layernorm.weight"),
        (9, LAYER + "8.block_sparse_moe.gate.e_score_correction_bias"),
        (9, LAYER + "8.block_sparse_moe.routed_expert_norm.weight"),
        (9, LAYER + "8.block_sparse_moe.experts.11.w2.weight_scale"),
    ],
)
def test_missing_tensor(checkpoint: Path, number: int, name: str) -> None:
    rename(checkpoint, number, name, "unrelated.weight")
    message = refusal(checkpoint)
    assert message.startswith(f"The checkpoint contradicts its config: {name}: missing. ")


@pytest.mark.parametrize(
    ("number", "name", "change", "said"),
    [
        (10, PREFIX + "lm_head.weight", {"shape": [96, 272]}, "expected shape [272, 96], found [96, 272]"),
        (10, PREFIX + "model.norm.weight", {"shape": [1, 96]}, "expected shape [96], found [1, 96]"),
        (10, PREFIX + "model.norm.weight", {"dtype": "F16"}, "expected BF16 or F32, found F16"),
        (1, LAYER + "0.self_attn.q_conv1d.weight", {"shape": [96, 4]}, "expected shape [96, 1, 4], found [96, 4]"),
        (1, LAYER + "0.self_attn.dt_bias", {"dtype": "I32"}, "expected BF16 or F32, found I32"),
        (4, LAYER + "3.self_attn.q_b_proj.weight", {"shape": [64, 192]}, "expected shape [192, 64], found [64, 192]"),
        (9, LAYER + "8.block_sparse_moe.experts.7.w3.weight_packed", {"dtype": "I8"}, "expected U8, found I8"),
        (9, LAYER + "8.block_sparse_moe.experts.7.w2.weight_scale", {"shape": [96]}, "expected shape [32, 3], found"),
    ],
)  # fmt: skip
def test_tensor_of_another_kind(checkpoint: Path, number: int, name: str, change: dict[str, Any], said: str) -> None:
    edit_shard(shard_of(checkpoint, number), lambda header: header[name].update(change))
    assert f"{name}: {said}" in refusal(checkpoint)


def test_a_config_of_another_model(checkpoint: Path) -> None:
    """One message names what differs; a long list is cut and counted."""
    message = refusal(checkpoint, hidden_size=128)
    assert "expected shape [272, 128], found [272, 96]" in message
    assert message.count("expected shape") == 20
    assert "; and " in message


def test_fewer_experts_in_the_config(checkpoint: Path) -> None:
    message = refusal(checkpoint, num_experts=10)
    assert f"{LAYER}1.block_sparse_moe.gate.weight: expected shape [10, 96], found [12, 96]" in message


def test_more_experts_in_the_config(checkpoint: Path) -> None:
    said = "experts.12.w1.weight_packed: missing, and so it is for 1 more experts of this layer"
    assert said in refusal(checkpoint, 3, num_experts=14)


def test_other_attention_in_the_config(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    kda = dataclasses.replace(config.linear_attn_config, kda_layers=(1, 2, 3, 4, 5, 6, 7), full_attn_layers=(8, 9))
    message = refusal(checkpoint, linear_attn_config=kda)
    assert f"{LAYER}3.self_attn.A_log: missing" in message
    assert f"{LAYER}3.self_attn.kv_b_proj.weight: the config has no place for this tensor" in message


@pytest.mark.parametrize(
    "name", ["self_attn.q_proj.bias", "mlp.up_proj.weight_scale", "self_attn.rotary.7.1.2.3", "extra"]
)
def test_tensors_without_a_place(checkpoint: Path, name: str) -> None:
    """A bias, say, would change every answer if it were overlooked."""
    stranger = f"{LAYER}2.{name}"
    header, data = read_shard(shard_of(checkpoint, 3))
    header[stranger] = {"dtype": "U8", "shape": [1], "data_offsets": [len(data), len(data) + 1]}
    write_shard(shard_of(checkpoint, 3), header, data + b"\0")
    edit_json(checkpoint / INDEX_FILE, lambda i: i["weight_map"].update({stranger: shard_of(checkpoint, 3).name}))
    assert f"{stranger}: the config has no place for this tensor. " in refusal(checkpoint)
    assert len(bound(checkpoint, 2).layers) == 2


def test_norm_that_the_config_turns_off(checkpoint: Path) -> None:
    """Stored or not, `routed_expert_norm` is not bound then."""
    layout = bound(checkpoint, latent_moe_use_norm=False)
    assert all("block_sparse_moe.routed_expert_norm.weight" not in layer.tensors for layer in layout.layers)
    rename(checkpoint, 9, f"{LAYER}8.block_sparse_moe.routed_expert_norm.weight", "unrelated.weight")
    assert bound(checkpoint, latent_moe_use_norm=False).tensor_count == layout.tensor_count


def test_a_log_of_the_tiny_checkpoints() -> None:
    for source in (TINY_A, TINY_C):
        layout, config = bound(source), config_of(source)
        for number in config.kda_layers:
            entry = layout.layers[number].tensors["self_attn.A_log"]
            raw = entry.shard_path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
            values = np.frombuffer(raw, "<f4")
            assert len(values) == 32
            check_a_log(values, config.linear_attn_config.num_heads, entry.name)


@pytest.mark.parametrize("value", [1.0, -1e-30, float("nan"), float("inf")])
def test_a_log_beyond_the_heads(value: float) -> None:
    values = np.zeros(128, np.float32)
    values[:96] = np.linspace(-0.5, 1, 96)
    values[96] = -0.0
    check_a_log(values, 96, "layer 3: A_log")
    values[[100, 127]] = value
    with pytest.raises(CheckpointError) as caught:
        check_a_log(values, 96, "layer 3: A_log")
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert message.startswith("layer 3: A_log: expected zeros from entry 96 on")
    assert f"found {float(np.float32(value))!r} in entry 100 (2 entries are not zero)" in message


def test_a_log_shorter_than_the_heads() -> None:
    for values in (np.zeros(95, np.float32), np.zeros((96, 1), np.float32)):
        with pytest.raises(CheckpointError, match="one value for each of 96 heads"):
            check_a_log(values, 96, "A_log")
    check_a_log(np.ones(96, np.float32), 96, "A_log")


def write_full_shape(target: Path, config: ModelConfig) -> None:
    """The released checkpoint's 96 shards as sparse files: true headers, no data."""
    released = json.loads(gzip.decompress(shared_file("data/released-index.json.gz").read_bytes()))
    kinds = {PREFIX + s.local: (stored_dtype(s.local), s.shape) for s in top_specs(config)}
    for layer in range(config.num_hidden_layers):
        stem = f"{LAYER}{layer}."
        kinds |= {stem + s.local: (stored_dtype(s.local), s.shape) for s in layer_specs(config, layer)}
    experts = dict(zip(EXPERT_TENSORS, expert_shapes(config), strict=True))
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for name, shard in released["weight_map"].items():
        homes[shard].append(name)
    for shard, names in homes.items():
        header, end = {}, 0
        for name in sorted(names):
            dtype, shape = kinds.get(name) or ("U8", experts.get(name[-16:].lstrip("."), (1,)))
            begin, end = end, end + math.prod(shape) * {"F32": 4, "BF16": 2, "U8": 1}[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        path = write_shard(target / shard, json.dumps(header, separators=(",", ":")).encode())
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + end)
    metadata = {**released["metadata"], SYNTHETIC_MARK: True}
    (target / INDEX_FILE).write_text(json.dumps({"metadata": metadata, "weight_map": released["weight_map"]}, indent=2))


MEASURE = """
import json, re, sys, time
from pathlib import Path
from k3.checkpoint.config import ModelConfig
from k3.checkpoint.index import TensorIndex
from k3.checkpoint.layout import bind, wanted_tensors
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
config, before, start = ModelConfig.read(sys.argv[1]), peak(), time.perf_counter()
index = TensorIndex.open(sys.argv[2])
opened = time.perf_counter()
layout = bind(index, config)
print(json.dumps({"open_s": opened - start, "bind_s": time.perf_counter() - opened, "peak_bytes": peak() - before,
    "index_bytes": index.nbytes, "tensors": len(index), "bound": layout.tensor_count, "trunk_bytes": layout.trunk_bytes,
    "expert_bytes": layout.expert_bytes, "contiguous": all(t.contiguous.all() for t in layout.experts.values())}))
"""


@pytest.mark.slow
def test_full_shape(tmp_path: Path) -> None:
    """Headers of 1.56 TB in little memory, with the released index as it is; the figures are printed with -s."""
    released = shared_file("data/released-config.json")
    write_full_shape(tmp_path, ModelConfig.read(released))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(released), str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=REPOSITORY / "src",
    )  # fmt: skip
    figures = json.loads(done.stdout)
    print(figures)
    assert figures["tensors"] == 497_220
    assert figures["bound"] == 497_052
    assert figures["contiguous"]
    assert figures["expert_bytes"] == 92 * 896 * 17_547_264
    assert abs(figures["trunk_bytes"] - (108.81e9 + 2.35e9)) < 0.02e9
    assert figures["index_bytes"] < 12e6
    assert figures["peak_bytes"] < 120e6
