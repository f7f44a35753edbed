"""Every kernel against its definition in NumPy float32, bit for bit: lanes, order of sums, roundings."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import kernel_helpers as define
from k3.kernels import Bf16Weight, F32Weight, Kernels, Mxfp4Weight, Weight, widen_bf16
from kernel_helpers import ISAS, ONE, assert_same_bits, kernels, normal

EPS = 1e-5


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def _round_to_float32(value: Fraction) -> float:
    """Nearest float32 of a rational number, ties to even, by exact comparison with the candidates around it."""
    near = np.float32(float(value))
    around = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
    distance = {x: abs(Fraction(float(x)) - value) for x in around}
    best = min(distance.values())
    ties = [x for x in around if distance[x] == best]
    return float(next((x for x in ties if x.view(np.uint32) % 2 == 0), ties[0]))


def test_the_emulated_fma_is_exact(rng: np.random.Generator) -> None:
    """The tests' own multiply-add against rational arithmetic, near ties and among denormals."""
    a, b, c = (normal(rng, 600) for _ in range(3))
    a[100:200] = np.float32(1) + np.arange(100, dtype=np.float32) * np.float32(2**-23)
    b[100:200] = a[100:200][::-1]
    c[100:150] = np.float32(2**-24) * np.float32(2**-24)
    c[150:200] = -np.float32(2**-48)
    a[200:300] *= np.float32(2**-100)
    b[200:300] *= np.float32(2**-45)
    c[200:300] = np.float32(2**-149) * rng.integers(-9, 9, 100).astype(np.float32)
    c[300:400] = -(a * b)[300:400]
    got = define.fma(a, b, c)
    for i in range(600):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        assert float(got[i]) == _round_to_float32(exact)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 40, 48, 63, 64, 255, 1000])
@pytest.mark.parametrize("rows", [1, 5])
def test_matmul(ops: Kernels, rng: np.random.Generator, n: int, rows: int) -> None:
    x, w = normal(rng, rows, n), normal(rng, 7, n)
    bits = define.to_bf16(w)
    assert_same_bits(ops.matmul(x, F32Weight(w)), define.dot(x[:, None], w[None]))
    assert_same_bits(ops.matmul(x, Bf16Weight(bits)), define.dot(x[:, None], widen_bf16(bits)[None]))


@pytest.mark.parametrize("groups", [1, 2, 5, 112])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_matmul_mxfp4(ops: Kernels, rng: np.random.Generator, groups: int, rows: int) -> None:
    packed = rng.integers(0, 256, (5, groups * 16), dtype=np.uint8)
    scales = rng.integers(110, 135, (5, groups), dtype=np.uint8)
    x = normal(rng, rows, groups * 32)
    wide = define.widen_mxfp4(packed, scales)
    assert_same_bits(ops.matmul(x, Mxfp4Weight(packed, scales)), define.dot(x[:, None], wide[None]))


@pytest.mark.parametrize(("n", "negative"), [(32, True), (33, False), (63, False), (64, True)])
def test_padding_is_executed(ops: Kernels, n: int, negative: bool) -> None:
    """Products that vanish leave -0 in every lane; a padding zero multiplied in makes +0 of it."""
    x, w = np.full((1, n), -1e-30, np.float32), np.full((3, n), 1e-30, np.float32)
    for weight in (F32Weight(w), Bf16Weight(define.to_bf16(w))):
        got = ops.matmul(x, weight)
        assert (got == 0).all()
        assert (np.signbit(got) == negative).all()
    assert_same_bits(ops.matmul(x, F32Weight(w)), define.dot(x[:, None], w[None]))


@pytest.mark.parametrize("n", [1, 16, 31, 33, 40, 200])
def test_rms_norm(ops: Kernels, rng: np.random.Generator, n: int) -> None:
    x, w = normal(rng, 3, n), normal(rng, n)
    assert_same_bits(ops.rms_norm(x, w, EPS), w * (x * define.inverse_rms(x, EPS)))


@pytest.mark.parametrize("count", [1, 2, 9, 17])
def test_residual_mix(ops: Kernels, rng: np.random.Generator, count: int) -> None:
    sources = [normal(rng, 3, 70) for _ in range(count)]
    norm, proj = normal(rng, 70), normal(rng, 70)
    expected = define.define_residual_mix(ops, sources, norm, proj, EPS)
    assert_same_bits(ops.residual_mix(sources, norm, proj, EPS), expected)


def test_situ(ops: Kernels, rng: np.random.Generator) -> None:
    gate, up = normal(rng, 3, 77, scale=5), normal(rng, 3, 77, scale=40)
    beta, bound = np.float32(4), np.float32(25)
    capped = bound * ops.tanh(up / bound)
    expected = ((beta * ops.tanh(gate / beta)) * ops.sigmoid(gate)) * capped
    assert_same_bits(ops.situ(gate, up, 4.0, 25.0), expected)
    # 3 is no power of two: division and multiplication by the inverse differ
    expected = ((np.float32(3) * ops.tanh(gate / np.float32(3))) * ops.sigmoid(gate)) * capped
    assert_same_bits(ops.situ(gate, up, 3.0, 25.0), expected)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("channels", [5, 16, 300])
@pytest.mark.parametrize("rows", [1, 2, 6])
def test_short_conv(ops: Kernels, rng: np.random.Generator, width: int, channels: int, rows: int) -> None:
    x, taps, tail = normal(rng, rows, channels), normal(rng, width, channels), normal(rng, width - 1, channels)
    expected = define.define_short_conv(ops, x, taps, tail)
    moved = np.concatenate([tail, x])[rows:]
    assert_same_bits(ops.short_conv(x, taps, tail), expected)
    assert_same_bits(tail, moved)


def test_kda_gate(ops: Kernels, rng: np.random.Generator) -> None:
    z, a_log, bias = normal(rng, 4, 3 * 40), normal(rng, 3), normal(rng, 3 * 40)
    rate = np.repeat(ops.exp(a_log[None])[0], 40)
    expected = ops.exp(np.float32(-5) * ops.sigmoid(rate * (z + bias)))
    assert_same_bits(ops.kda_gate(z, a_log, bias, -5.0), expected)


def test_kda_gate_takes_one_rate_per_head(ops: Kernels, rng: np.random.Generator) -> None:
    z, a_log, bias = normal(rng, 4, 3, 8), normal(rng, 3), normal(rng, 3, 8)
    order = [2, 0, 1]
    plain = ops.kda_gate(z.reshape(4, 24), a_log, bias.reshape(24), -5.0).reshape(4, 3, 8)
    moved = ops.kda_gate(z[:, order].reshape(4, 24), a_log[order], bias[order].reshape(24), -5.0)
    assert_same_bits(moved.reshape(4, 3, 8), plain[:, order])


@pytest.mark.parametrize("dim", [1, 5, 16, 40, 128, 144])
def test_kda_recurrence(ops: Kernels, rng: np.random.Generator, dim: int) -> None:
    heads, rows = 2, 3
    q, k, v = (normal(rng, rows, heads * dim) for _ in range(3))
    decay = rng.random((rows, heads * dim), np.float32)
    beta = rng.random((rows, heads), np.float32)
    state = normal(rng, heads, dim, dim)
    expected, moved = define.define_kda_recurrence(q, k, v, decay, beta, state)
    assert_same_bits(ops.kda_recurrence(q, k, v, decay, beta, state), expected)
    assert_same_bits(state, moved)


@pytest.mark.parametrize("dim", [5, 32, 128])
def test_kda_output(ops: Kernels, rng: np.random.Generator, dim: int) -> None:
    o, gate, weight = normal(rng, 3, 2, dim), normal(rng, 3, 2, dim), normal(rng, dim)
    expected = ((o * define.inverse_rms(o, EPS)) * weight) * ops.sigmoid(gate.reshape(3, -1)).reshape(o.shape)
    got = ops.kda_output(o.reshape(3, -1), weight, gate.reshape(3, -1), EPS)
    assert_same_bits(got, expected.reshape(3, -1))


@pytest.mark.parametrize(
    ("heads", "nope", "rope", "v_dim", "latent", "start", "rows"),
    [(3, 24, 8, 20, 40, 0, 1), (2, 16, 16, 16, 64, 30, 5), (9, 5, 0, 3, 33, 66, 1), (1, 8, 8, 8, 32, 0, 19)],
)
def test_mla_attention(
    ops: Kernels,
    rng: np.random.Generator,
    heads: int,
    nope: int,
    rope: int,
    v_dim: int,
    latent: int,
    start: int,
    rows: int,
) -> None:
    q = normal(rng, rows, heads * (nope + rope))
    bits = define.to_bf16(normal(rng, heads * (nope + v_dim), latent))
    wide = widen_bf16(bits)
    cache = normal(rng, start + rows + 3, latent + rope)
    expected = define.define_mla(ops, q, wide, cache, start, heads, nope, v_dim, 0.17)
    weights: list[Weight] = [F32Weight(wide), Bf16Weight(bits)]
    if latent % 32 == 0:
        weights.append(define.pack12(bits))
    for w in weights:
        assert_same_bits(ops.mla_attention(q, w, cache, start, heads, nope, v_dim, 0.17), expected)


def test_gated_and_add(ops: Kernels, rng: np.random.Generator) -> None:
    x, gate = normal(rng, 3, 50), normal(rng, 3, 50)
    assert_same_bits(ops.gated(x, gate), x * ops.sigmoid(gate))
    assert_same_bits(ops.add(x, gate), x + gate)


def test_sigmoid_is_evaluated_as_written(ops: Kernels, rng: np.random.Generator) -> None:
    x = normal(rng, 3, 500, scale=20)
    assert_same_bits(ops.sigmoid(x), ONE / (ONE + ops.exp(-x)))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (24, 6), (24, 1), (896, 16), (7, 7)])
def test_route(ops: Kernels, rng: np.random.Generator, experts: int, top_k: int, renormalize: bool) -> None:
    logits, bias = normal(rng, 5, experts), normal(rng, experts, scale=0.1)
    got = ops.route(logits, bias, top_k, 2.5, renormalize)
    ids, weights = define.define_route(ops, logits, bias, top_k, 2.5, renormalize)
    assert_same_bits(got.ids, ids)
    assert_same_bits(got.weights, weights)
    assert got.finite.all()


def test_route_ties_go_to_the_lower_id(ops: Kernels) -> None:
    logits = np.array([[1, 2, 2, 1, 2, 1, 0, 2]], np.float32)
    got = ops.route(logits, np.zeros(8, np.float32), 6, 1.0, True)
    assert got.ids.tolist() == [[1, 2, 4, 7, 0, 3]]


def test_route_bias_only_selects(ops: Kernels) -> None:
    logits = np.array([[0.5, 0.1, 0.2, 0.3]], np.float32)
    got = ops.route(logits, np.array([0, 5, 0, 4], np.float32), 2, 1.0, False)
    assert got.ids.tolist() == [[1, 3]]
    assert_same_bits(got.weights, ops.sigmoid(logits)[:, [1, 3]])


def test_route_flags_what_is_not_finite(ops: Kernels) -> None:
    logits = np.zeros((5, 40), np.float32)
    logits[1, 39], logits[2, 3], logits[3, 17] = np.nan, np.inf, -np.inf
    bias = np.zeros(40, np.float32)
    got = ops.route(logits, bias, 8, 1.0, True)
    assert got.finite.tolist() == [True, False, False, False, True]
    assert ((got.ids >= 0) & (got.ids < 40)).all()
    bias[4] = np.nan
    assert not ops.route(logits, bias, 8, 1.0, True).finite.any()
    all_nan = ops.route(np.full((1, 40), np.nan, np.float32), bias, 8, 1.0, True)
    assert sorted(all_nan.ids[0]) == list(range(8))


def test_accumulate_experts(ops: Kernels, rng: np.random.Generator) -> None:
    outputs, weights = normal(rng, 3, 5, 70), normal(rng, 3, 5)
    acc = np.zeros((3, 70), np.float32)
    for j in range(5):
        acc = define.fma(weights[:, j, None], outputs[:, j], acc)
    assert_same_bits(ops.accumulate_experts(outputs, weights), acc)


def test_argmax(ops: Kernels, rng: np.random.Generator) -> None:
    logits = normal(rng, 40, 333)
    assert ops.argmax(logits).tolist() == logits.argmax(axis=1).tolist()
    ties = np.zeros((6, 333), np.float32)
    ties[0, [5, 200]] = 1
    ties[1, [16, 31, 332]] = 2
    ties[2] = -np.inf
    ties[3, 332] = np.inf
    ties[4, 332] = np.nan
    ties[5, 0] = np.nan
    assert ops.argmax(ties).tolist() == [5, 16, 0, 332, -1, -1]


def test_all_finite(ops: Kernels) -> None:
    x = np.zeros((5, 50), np.float32)
    x[1, 49], x[2, 0], x[3, 20] = np.nan, np.inf, -np.inf
    x[4] = np.finfo(np.float32).max
    assert ops.all_finite(x).tolist() == [True, False, False, False, True]
