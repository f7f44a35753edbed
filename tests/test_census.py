"""What the bytes of a checkpoint are, counted."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from cli_helpers import Cli
from conftest import TINY_A, TINY_C, edit_json, read_shard, shard_of, write_shard
from k3.checkpoint.census import (
    CLASSES,
    DENSE,
    EMBEDDING_CLASS,
    HEAD_CLASS,
    KDA,
    LATENT,
    MLA,
    OTHERS,
    ROUTED,
    ROUTERS,
    SHARED,
    SMALL,
    TRUNK,
    Census,
    take_census,
)
from k3.checkpoint.config import ModelConfig
from k3.checkpoint.headers.names import NameTable
from k3.checkpoint.headers.safetensors import read_header
from k3.checkpoint.index import INDEX_FILE, TensorIndex
from k3.checkpoint.layout import bind
from k3.checkpoint.synthetic.synth import shard_plans

ELEMENT_BYTES = {"F32": 4, "BF16": 2, "U8": 1}


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def counts(census: Census, group: str) -> dict[str, tuple[int, int, int]]:
    return {line.part: (line.tensors, line.nbytes, line.parameters) for line in census.lines if line.group == group}


@pytest.mark.parametrize("source", [TINY_A, TINY_C], ids=["tiny-a", "tiny-c"])
def test_every_tensor_is_counted_once(source: Path) -> None:
    """Against the headers, and against what binding calls trunk and experts."""
    headers = [read_shard(path)[0] for path in source.glob("model-*.safetensors")]
    entries = {name: entry for header in headers for name, entry in header.items() if name != "__metadata__"}
    index = TensorIndex.open(source)
    census, layout = take_census(index), bind(index, ModelConfig.read(source / "config.json"))
    total = census.total()
    assert total.tensors == len(entries)
    assert total.nbytes == sum(e["data_offsets"][1] - e["data_offsets"][0] for e in entries.values())
    assert census.groups() == list(CLASSES)
    assert census.total([ROUTED]).nbytes == layout.expert_bytes
    assert census.total((*TRUNK, HEAD_CLASS)).nbytes == layout.trunk_bytes
    assert census.total([EMBEDDING_CLASS]).nbytes == layout.top["model.embed_tokens.weight"].nbytes
    assert census.total([OTHERS]).tensors == sum(not name.startswith("language_model.") for name in entries)
    assert census.expert_bytes == layout.largest_expert_bytes
    assert census.experts == layout.num_experts * len(layout.moe_layers)


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> Census:
    """The first four layers of the released shape: headers in sparse files."""
    table, headers, directory = NameTable(), [], tmp_path_factory.mktemp("census")
    for number, plan in enumerate(itertools.islice(shard_plans("full-shape"), 4)):
        path = directory / f"{number}.safetensors"
        path.write_bytes(plan.header)
        os.truncate(path, plan.nbytes)
        headers.append(read_header(path, table, allow_holes=True))
    return take_census(TensorIndex(table, headers))


def bf16(tensors: int, rows: int, columns: int) -> tuple[int, int, int]:
    return tensors, tensors * rows * columns * 2, tensors * rows * columns


def test_released_shape(census: Census) -> None:
    """Three KDA layers, the first of them dense, and one MLA layer; shapes by the published table."""
    experts = 3 * 896
    packed = (experts, experts * 3072 * 1792, experts * 3072 * 3584)
    scales = (experts, experts * 3072 * 112, 0)
    parts = {f"{matrix} packed": packed for matrix in ("w1", "w2", "w3")}
    assert counts(census, ROUTED) == parts | {f"{matrix} scales": scales for matrix in ("w1", "w2", "w3")}
    assert (census.expert_bytes, census.experts) == (17_547_264, experts)
    assert counts(census, SHARED) == {f"{name}_proj": bf16(3, 6144, 7168) for name in ("gate", "up", "down")}
    assert counts(census, LATENT) == {f"{name}_proj": bf16(3, 3584, 7168) for name in ("up", "down")}
    assert counts(census, ROUTERS) == {"matrix": bf16(3, 896, 7168), "selection bias": (3, 3 * 896 * 4, 3 * 896)}
    assert counts(census, KDA) == {f"{name}_proj": bf16(3, 12288, 7168) for name in "qkvgo"} | {
        "f_a_proj": bf16(3, 128, 7168),
        "f_b_proj": bf16(3, 12288, 128),
        "b_proj": bf16(3, 96, 7168),
    }
    assert counts(census, MLA) == {
        "q_a_proj": bf16(1, 1536, 7168),
        "q_b_proj": bf16(1, 18432, 1536),
        "kv_a_proj_with_mqa": bf16(1, 576, 7168),
        "kv_b_proj": bf16(1, 24576, 512),
        "g_proj": bf16(1, 12288, 7168),
        "o_proj": bf16(1, 7168, 12288),
    }
    assert counts(census, DENSE) == {f"{name}_proj": bf16(1, 33792, 7168) for name in ("gate", "up", "down")}
    norms = 4 * 4 * 7168 + 1536 + 512 + 3 * 3584
    assert counts(census, SMALL) == {
        "norms": (4 * 4 + 2 + 3 + 3, norms * 2 + 3 * 128 * 4, norms + 3 * 128),
        "residual mixes": bf16(8, 1, 7168),
        "convolution taps": (9, 9 * 12288 * 4 * 4, 9 * 12288 * 4),
        "decay": (6, 3 * (12288 + 128) * 4, 3 * (12288 + 128)),
    }
    assert census.total([HEAD_CLASS, EMBEDDING_CLASS, OTHERS]).tensors == 0


def test_unknown_names_and_unlike_experts(checkpoint: Path) -> None:
    """Another size of one expert leaves no size that is every expert's."""
    name = "language_model.model.layers.2.block_sparse_moe.experts.4.w1.weight_scale"
    path = shard_of(checkpoint, 3)
    header, data = read_shard(path)
    header |= {"language_model.model.layers.2.strange.thing": {"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]}}  # fmt: skip  # noqa: E501
    moved = header.pop(name)
    begin, end = moved["data_offsets"]
    header[name + "s"] = moved
    header[name] = {"dtype": "U8", "shape": [1], "data_offsets": [len(data) + 4, len(data) + 5]}
    write_shard(path, header, data + bytes(5))
    (checkpoint / INDEX_FILE).unlink()
    census = take_census(TensorIndex.open(checkpoint))
    assert counts(census, OTHERS)["of the text model"] == (2, 4 + end - begin, 1 + end - begin)
    assert census.expert_bytes is None


def test_table(cli: Cli) -> None:
    lines = cli.ok("census", TINY_A).out.splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if line.startswith("total")) + 1]
    assert len({len(line) for line in table}) == 1
    assert table[0].split() == ["class", "tensors", "bytes", "share", "parameters"]
    total = take_census(TensorIndex.open(TINY_A)).total()
    assert table[-1].split() == [
        "total",
        f"{total.tensors:,}",
        f"{total.nbytes:,}",
        "100.000",
        "%",
        f"{total.parameters:,}",
    ]
    assert lines[-1].startswith(f"{len(list(TINY_A.glob('model-*')))} shards of ")


def test_json(cli: Cli) -> None:
    printed = json.loads(cli.ok("census", TINY_C, "--json").out)
    assert printed["total"]["bytes"] == sum(group["bytes"] for group in printed["classes"].values())
    assert sum(group["share"] for group in printed["classes"].values()) == pytest.approx(1)
    for group in printed["classes"].values():
        if group["parts"]:
            assert group["bytes"] == sum(part["bytes"] for part in group["parts"].values())
    assert printed["shards"] == 12
    assert printed["shard_bytes"] == sum(path.stat().st_size for path in TINY_C.glob("model-*.safetensors"))
    assert printed["trunk"]["bytes"] == sum(printed["classes"][group]["bytes"] for group in TRUNK)


def test_places_and_refusals(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    whole = cli.ok("census", checkpoint).out
    extra = tmp_path / "extra"
    extra.mkdir()
    moved = shard_of(checkpoint, 5)
    moved.rename(extra / moved.name)
    assert moved.name in cli.refused("census", checkpoint)
    assert cli.ok("census", checkpoint, "--extra-dir", extra).out == whole
    assert "is not a directory" in cli.refused("census", tmp_path / "absent")
    edit_json(checkpoint / INDEX_FILE, lambda index: index["weight_map"].clear())
    assert "an empty one" in cli.refused("census", checkpoint)
