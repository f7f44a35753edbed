"""The memory dial: one answer, whatever is kept and however the rest is read, and the bytes that this implies."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import k3
from conftest import TINY_A, TINY_C, copy_checkpoint
from k3.checkpoint.synthetic import synth
from k3.engine.packing.writer import PackEvents, PackOptions, pack_trunk

PROMPT = [(7 * i + 3) % 200 for i in range(21)]
TOKENS = 3
SHARES = (0, 0.25, 0.5, 1)
MEMORY = ("floor", "auto", *itertools.product(SHARES, SHARES))
FACTORS = {
    "memory": MEMORY,
    "trunk": ("plain", "raw", "packed"),
    "direct": (True, False),
    "directories": (1, 2),
    "threads": (1, 2),
}
CACHED = {"experts": (0, 16, 17, 40, None), "chunk": (1, None), "trunk": ("plain", "packed")}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint in one directory and over two, with its packed trunks."""

    one: Path
    two: tuple[Path, Path]
    trunks: dict[str, Path | None]


def thirteen_layers():
    """Random, 13 layers, 64 experts a layer of which 8 are chosen."""
    shape = synth._TINY | {"num_hidden_layers": 13, "num_experts": 64, "num_experts_per_token": 8, "vocab_size": 512}
    return synth._config(shape, kda_heads=3, kda_head_dim=32, mla_layers=[4, 8, 12, 13])


@pytest.fixture(scope="module", params=["tiny-a", "tiny-c", "thirteen"])
def checkpoint(request, tmp_path_factory):
    home = tmp_path_factory.mktemp(request.param)
    if request.param == "thirteen":
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(synth.KINDS, "thirteen", thirteen_layers())
            synth.write_synthetic("thirteen", home / "one")
    else:
        copy_checkpoint({"tiny-a": TINY_A, "tiny-c": TINY_C}[request.param], home / "one")
    shutil.copytree(home / "one", home / "two")
    (home / "more").mkdir()
    for shard in sorted((home / "two").glob("*.safetensors"))[::2]:
        shard.rename(home / "more" / shard.name)
    for name in ("raw", "packed"):
        pack_trunk(home / "one", home / name, PackOptions(raw=name == "raw"), PackEvents())
    trunks = {"plain": None, "raw": home / "raw", "packed": home / "packed"}
    return Checkpoint(home / "one", (home / "two", home / "more"), trunks)


def load(checkpoint, directories=1, trunk="plain", **settings):
    path, *more = (checkpoint.one,) if directories == 1 else checkpoint.two
    settings = {"context": 64} | settings
    return k3.load(path, extra_dirs=more, trunk=checkpoint.trunks[trunk], **settings)


@cache
def whole(checkpoint, trunk):
    """Bytes of the walk, of an expert, and how many experts there are."""
    with load(checkpoint, trunk=trunk) as model:
        kept = sum(block.nbytes for block in model.plan.pinned)
        table = model.engine._experts._cache._layout.experts
        return kept, next(iter(table.values())).expert_bytes, sum(map(len, table.values()))


@cache
def floor(checkpoint, trunk):
    """The least memory that a run can be planned with."""
    with load(checkpoint, trunk=trunk, trunk_gb=0, cache_gb=0, chunk=1) as model:
        return model.plan.total_bytes


@cache
def expected(checkpoint):
    with load(checkpoint, threads=1, chunk=len(PROMPT)) as model:
        return answer(model)


def answer(model):
    assert len(list(model.generate(PROMPT, TOKENS, ignore_eos=True))) == TOKENS
    return model.report().logits_sha256


def memory_settings(checkpoint, trunk, memory):
    walk, expert, experts = whole(checkpoint, trunk)
    if memory == "auto":
        return {}
    if memory == "floor":
        return {"memory": floor(checkpoint, trunk) + (24 << 20)}
    return {"trunk_gb": memory[0] * walk / 1e9, "cache_gb": (memory[1] * experts * expert + 1) / 1e9}


def check_bytes(checkpoint, model, trunk):
    """Every decoded token reads what is not kept: the walk less the pins, and the experts that were missing."""
    walk, expert, experts = whole(checkpoint, trunk)
    pinned = sum(block.nbytes for block in model.plan.pinned)
    for step in model.report().steps[1:]:
        assert step.bytes_read.trunk + step.bytes_read.head == walk - pinned
        assert step.bytes_read.experts == (step.expert_requests - step.expert_resident_hits) * expert
        assert step.expert_resident_hits == 0 or model.plan.expert_slots
        assert step.expert_resident_hits == step.expert_requests or model.plan.expert_slots < experts
    return walk, pinned


def check_run(checkpoint, memory, trunk, direct, directories, threads):
    settings = memory_settings(checkpoint, trunk, memory)
    with load(checkpoint, directories, trunk, direct=direct, threads=threads, **settings) as model:
        assert answer(model) == expected(checkpoint)
        assert model.direct_io == direct
        walk, pinned = check_bytes(checkpoint, model, trunk)
        if isinstance(memory, tuple):
            largest = max(
                b.nbytes for m in model.engine._transformer._source._matrices.values() for b in m.stored.blocks
            )
            assert memory[0] * walk - largest <= pinned <= memory[0] * walk
            assert model.plan.expert_slots == int(memory[1] * whole(checkpoint, trunk)[2])
        if memory == "auto":
            assert pinned == walk
            assert model.plan.expert_slots == whole(checkpoint, trunk)[2]


def pairwise(factors):
    """Few combinations in which every pair of values of two factors occurs."""
    names = list(factors)
    combinations = list(itertools.product(*factors.values()))
    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    while missing:
        rows = [dict(zip(names, values, strict=True)) for values in combinations]
        row = max(rows, key=lambda row: sum(row[a] == x and row[b] == y for a, x, b, y in missing))
        missing = {(a, x, b, y) for a, x, b, y in missing if not (row[a] == x and row[b] == y)}
        yield tuple(row.values())


@pytest.mark.parametrize("combination", list(pairwise(FACTORS)), ids=str)
def test_pairwise(checkpoint, combination):
    check_run(checkpoint, *combination)


@pytest.mark.slow
@pytest.mark.parametrize("combination", list(itertools.product(*FACTORS.values())), ids=str)
def test_whole_grid(checkpoint, combination):
    check_run(checkpoint, *combination)


@pytest.mark.parametrize("combination", list(itertools.product(*CACHED.values())), ids=str)
def test_experts_kept(checkpoint, combination):
    experts, chunk, trunk = combination
    with load(checkpoint, trunk=trunk, trunk_gb=0, cache_experts=experts, chunk=chunk) as model:
        assert answer(model) == expected(checkpoint)
        walk, pinned = check_bytes(checkpoint, model, trunk)
        assert pinned == 0
        wanted = whole(checkpoint, trunk)[2] if experts is None else experts
        assert model.plan.expert_slots == min(wanted, whole(checkpoint, trunk)[2])
        assert walk > 0
