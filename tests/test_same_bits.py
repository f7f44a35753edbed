"""One answer: no way of running the model changes a bit of its logits."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import pytest

import k3
from k3.kernels import available_isas

PROMPT = [int(i) for i in np.random.default_rng(5).integers(0, 700, 67)]
OTHERS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7]]
CHUNKS = [1, 3, 64, len(PROMPT)]
TOKENS = 5


@cache
def loaded(isa: str, threads: int):
    return k3.load("demo", isa=isa, threads=threads, context=256)


def run(model, chunk: int, company: bool) -> str:
    """Hash of the logits of TOKENS greedy positions after PROMPT, run in chunks, alone or with two others."""
    engine = model.engine
    sequence, others = engine.new_sequence(), [(engine.new_sequence(), ids) for ids in OTHERS]
    digest = hashlib.sha256()
    pending = PROMPT
    for _ in range(TOKENS):
        for start in range(0, len(pending), chunk):
            batch = [(sequence, pending[start : start + chunk])]
            if company:
                batch = [others[0], batch[0], others[1]]
                others = [(other, [(ids[0] + 1) % 700]) for other, ids in others]
            logits = engine.step(batch)[1 if company else 0]
        digest.update(logits.tobytes())
        pending = [int(np.argmax(logits))]
    return digest.hexdigest()


@cache
def expected() -> str:
    return run(loaded("scalar", 1), len(PROMPT), company=False)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("company", [False, True], ids=["alone", "in company"])
def test_grid(isa, threads, chunk, company):
    if isa not in available_isas():
        pytest.skip(f"this machine has no {isa}")
    assert run(loaded(isa, threads), chunk, company) == expected()


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
@pytest.mark.parametrize("full_recompute", [False, True], ids=["incremental", "full recompute"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_generation(isa, full_recompute, chunk):
    if isa not in available_isas():
        pytest.skip(f"this machine has no {isa}")
    model = loaded(isa, 2)
    params = k3.engine.generation.GenerationParams(TOKENS, full_recompute=full_recompute, chunk=chunk)
    generation = model.start(PROMPT, params)
    assert len(list(generation)) == TOKENS
    assert generation.report.logits_sha256 == expected()


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 15, 16, 17, 32, 33, len(PROMPT) - 1])
def test_states_do_not_depend_on_the_chunks(chunk):
    engine = loaded(available_isas()[-1], 2).engine
    whole, pieces = engine.new_sequence(), engine.new_sequence()
    [wanted] = engine.step([(whole, PROMPT)])
    for start in range(0, len(PROMPT), chunk):
        [found] = engine.step([(pieces, PROMPT[start : start + chunk])])
    assert np.array_equal(found, wanted)
    for a, b in zip(whole._states, pieces._states, strict=True):
        for name in ("recurrent", "q_tail", "k_tail", "v_tail"):
            if hasattr(a, name):
                assert np.array_equal(getattr(a, name), getattr(b, name))
        if hasattr(a, "_rows"):
            assert len(a) == len(b)
            assert np.array_equal(a._rows[: len(a)], b._rows[: len(b)])


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("experts", [0, 16, 17, 40, 112])
@pytest.mark.parametrize("trunk", [0, 0.0003, 0.0006, 1])
def test_where_the_weights_lie(trunk, experts, direct):
    with k3.load("demo", context=256, trunk_gb=trunk, cache_experts=experts, direct=direct) as model:
        assert run(model, 64, company=True) == expected()
        before = model.engine.costs()
        [_] = model.engine.step([(model.engine.new_sequence(), [5])])
        costs = model.engine.costs() - before
        walk = sum(block.nbytes for matrix in walk_of(model) for block in matrix.blocks)
        pinned = sum(block.nbytes for block in model.plan.pinned)
        assert pinned <= trunk * 1e9 < pinned + walk // 10 or pinned == walk
        assert costs.bytes_read.trunk + costs.bytes_read.head == walk - pinned
        misses = costs.expert_requests - costs.expert_resident_hits
        assert costs.bytes_read.experts == misses * 3264
        assert (misses == 0) == (experts == 112)
        assert (costs.expert_resident_hits == 0) == (experts == 0)


def walk_of(model):
    return model.engine._transformer._source._stream._matrices.values()


def test_a_recycled_place_starts_from_nothing():
    engine = loaded(available_isas()[-1], 2).engine
    [fresh] = engine.step([(engine.new_sequence(), [7])])
    used = engine.new_sequence()
    engine.step([(used, PROMPT)])
    del used
    [again] = engine.step([(engine.new_sequence(), [7])])
    assert np.array_equal(fresh, again)
