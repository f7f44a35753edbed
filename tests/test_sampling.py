"""Sampling against the contract's rule, written out token by token in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest

from k3.engine.sampling import Sampler, SamplingParams, log_probabilities
from k3.errors import NonFiniteError, UsageError
from k3.kernels import Kernels


@pytest.fixture(scope="module")
def ops():
    return Kernels(threads=1)


def by_definition(ops, logits, params, position):
    """The rule of the contract: divide, sort by (−logit, id), top-k, sum in order, top-p, first sum above u·total."""
    if params.temperature == 0:
        return min(range(len(logits)), key=lambda i: (-logits[i], i))
    scaled = [np.float32(z) / np.float32(params.temperature) for z in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))[: params.top_k or None]
    shifted = np.array([[scaled[i] - scaled[order[0]] for i in order]], np.float32)
    weights = [float(w) for w in ops.exp(shifted)[0]]
    total = 0.0
    for weight in weights:
        total += weight
    kept, so_far = 0, 0.0
    while kept < 1 or so_far < params.top_p * total:
        so_far += weights[kept]
        kept += 1
    bits = np.random.Philox(key=params.seed, counter=[position, 0, 0, 0]).random_raw()
    threshold = (int(bits) >> 11) * 2.0**-53 * so_far
    so_far = 0.0
    for i in range(kept):
        so_far += weights[i]
        if so_far > threshold:
            return order[i]
    raise AssertionError("no token")


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-9])
@pytest.mark.parametrize("top_k", [0, 1, 5, 10_000])
def test_the_rule(ops, temperature, top_p, top_k):
    rng = np.random.default_rng(3)
    for position in range(40):
        logits = (rng.standard_normal(300) * 3).astype(np.float32)
        params = SamplingParams(temperature, top_p, top_k, seed=12345)
        assert Sampler(ops, params).choose(logits, position) == by_definition(ops, logits, params, position)


def test_equal_logits_go_by_id(ops):
    logits = np.zeros(64, np.float32)
    assert Sampler(ops, SamplingParams()).choose(logits, 0) == 0
    for position in range(30):
        params = SamplingParams(1.0, top_k=4, seed=1)
        chosen = Sampler(ops, params).choose(logits, position)
        assert chosen == by_definition(ops, logits, params, position) < 4


def test_frequencies_follow_the_probabilities(ops):
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    sampler = Sampler(ops, SamplingParams(1.0, seed=9))
    counts = np.bincount([sampler.choose(logits, position) for position in range(8000)], minlength=4) / 8000
    assert np.abs(counts - [0.5, 0.25, 0.125, 0.125]).max() < 0.02


def test_a_draw_depends_on_seed_and_position_only(ops):
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    sampler = Sampler(ops, SamplingParams(1.0, seed=5))
    forward = [sampler.choose(logits, position) for position in range(20)]
    backward = [sampler.choose(logits, position) for position in reversed(range(20))]
    assert forward == backward[::-1]
    assert forward != [Sampler(ops, SamplingParams(1.0, seed=6)).choose(logits, p) for p in range(20)]


def test_a_seed_is_drawn_and_reported_where_there_is_none(ops):
    first, second = (Sampler(ops, SamplingParams(1.0)).seed for _ in range(2))
    assert first is not None
    assert first != second
    assert Sampler(ops, SamplingParams(0.0, seed=4)).seed is None


def test_minus_infinity_is_a_token_that_never_comes(ops):
    logits = np.array([0.0, -np.inf, 0.0], np.float32)
    sampler = Sampler(ops, SamplingParams(1.0, seed=3))
    assert {sampler.choose(logits, position) for position in range(60)} == {0, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_never_a_token(ops, temperature):
    logits = np.zeros(50, np.float32)
    logits[20] = np.nan
    with pytest.raises(NonFiniteError, match="position 7"):
        Sampler(ops, SamplingParams(temperature, seed=1)).choose(logits, 7)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
    ],
)
def test_values_out_of_range(values, name):
    with pytest.raises(UsageError, match=f"{name}: expected .* found"):
        SamplingParams(**values)


def test_log_probabilities(ops):
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((6, 500)) * 8).astype(np.float32)
    ids = rng.integers(0, 500, 6)
    wide = logits.astype(np.float64)
    exact = wide[np.arange(6), ids] - np.log(np.exp(wide).sum(axis=1))
    assert np.abs(log_probabilities(ops, logits, ids) - exact).max() < 4e-6
