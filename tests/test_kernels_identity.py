"""The same bits on every instruction set, for any number of threads and rows, any row order and row stride."""

from __future__ import annotations

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from k3.kernels import Bf16Weight, F32Weight, Kernels, Mxfp4Weight, Packed12Weight, _native
from kernel_helpers import ISAS, assert_same_bits, kernels, normal, pack12, to_bf16

Rows = list[np.ndarray]

ROWS = 33


@dataclass(frozen=True)
class Case:
    """A kernel with its row inputs (first axis: rows); `call` takes them and `out`, which may be None."""

    name: str
    rows: Rows
    call: Callable[[Kernels, Rows, np.ndarray | None], np.ndarray]
    sequence: bool = False  # rows depend on the rows before them
    takes_out: bool = True


def _cases() -> list[Case]:
    rng = np.random.default_rng(3)
    # Large enough that two threads share the work.
    x, y = normal(rng, ROWS, 544), normal(rng, ROWS, 544)
    wide, gate = normal(rng, ROWS, 2085, scale=9), normal(rng, ROWS, 2085, scale=9)
    w = normal(rng, 301, 544)
    odd = normal(rng, 13, 535)
    packed = rng.integers(0, 256, (301, 272), dtype=np.uint8)
    fp4 = Mxfp4Weight(packed, rng.integers(110, 126, (301, 17), dtype=np.uint8))
    norm, proj, bias = normal(rng, 544), normal(rng, 544), normal(rng, 544, scale=0.1)
    heads, dim = 8, 68
    decay = rng.random((ROWS, heads * dim), np.float32)
    beta = rng.random((ROWS, heads), np.float32)
    a_log = normal(rng, heads)
    state = normal(rng, heads, dim, dim)
    taps, tail = normal(rng, 4, 2085), normal(rng, 3, 2085)
    experts = normal(rng, ROWS, 5, 544)
    kv_b = Bf16Weight(to_bf16(normal(rng, 6 * 44, 72)))
    kv_b32 = F32Weight(normal(rng, 6 * 44, 72))
    packed12 = pack12(to_bf16(w))
    kv_b12 = pack12(to_bf16(normal(rng, 6 * 44, 64)))
    cache = normal(rng, 50 + ROWS, 80)
    q = normal(rng, ROWS, 6 * 32)

    def attend(weight: F32Weight | Bf16Weight | Packed12Weight) -> Callable[..., np.ndarray]:
        rows = cache[:, : weight.cols + 8]
        return lambda k, r, out: k.mla_attention(r[0], weight, rows, 50, 6, 24, 20, 0.176, out=out)

    return [
        Case("matmul_f32", [x], lambda k, r, out: k.matmul(r[0], F32Weight(w), out)),
        Case("matmul_odd", [x[:, :535]], lambda k, r, out: k.matmul(r[0], F32Weight(odd), out)),
        Case("matmul_bf16", [x], lambda k, r, out: k.matmul(r[0], Bf16Weight(to_bf16(w)), out)),
        Case("matmul_bf16_odd", [x[:, :535]], lambda k, r, out: k.matmul(r[0], Bf16Weight(to_bf16(odd)), out)),
        Case("matmul_mxfp4", [x], lambda k, r, out: k.matmul(r[0], fp4, out)),
        Case("matmul_packed12", [x], lambda k, r, out: k.matmul(r[0], packed12, out)),
        Case("rms_norm", [x], lambda k, r, out: k.rms_norm(r[0], norm, 1e-5, out)),
        Case("residual_mix", [x, y, x + y], lambda k, r, out: k.residual_mix(r, norm, proj, 1e-5, out)),
        Case("situ", [wide, gate], lambda k, r, out: k.situ(r[0], r[1], 4.0, 25.0, out)),
        Case("exp", [wide], lambda k, r, out: k.exp(r[0], out)),
        Case("log", [abs(wide)], lambda k, r, out: k.log(r[0], out)),
        Case("tanh", [wide], lambda k, r, out: k.tanh(r[0], out)),
        Case("sigmoid", [wide], lambda k, r, out: k.sigmoid(r[0], out)),
        Case("gated", [wide, gate], lambda k, r, out: k.gated(r[0], r[1], out)),
        Case("add", [wide, gate], lambda k, r, out: k.add(r[0], r[1], out)),
        Case("kda_gate", [x], lambda k, r, out: k.kda_gate(r[0], a_log, bias, -5.0, out)),
        Case("kda_output", [x, y], lambda k, r, out: k.kda_output(r[0], norm[:dim], r[1], 1e-5, out)),
        Case("route_weights", [x], lambda k, r, _: k.route(r[0], bias, 16, 2.5, True).weights, takes_out=False),
        Case("route_ids", [x], lambda k, r, _: k.route(r[0], bias, 16, 2.5, True).ids, takes_out=False),
        Case("experts", [experts, y[:, :5]], lambda k, r, out: k.accumulate_experts(r[0], r[1], out)),
        Case("argmax", [x], lambda k, r, _: k.argmax(r[0]), takes_out=False),
        Case("all_finite", [x], lambda k, r, _: k.all_finite(r[0]), takes_out=False),
        Case("conv", [wide], lambda k, r, out: k.short_conv(r[0], taps, tail.copy(), out), sequence=True),
        Case(
            "recurrence",
            [x, y, x + y, decay, beta],
            lambda k, r, out: k.kda_recurrence(*r, state.copy(), out=out),
            sequence=True,
        ),
        Case("mla_bf16", [q], attend(kv_b), sequence=True),
        Case("mla_f32", [q], attend(kv_b32), sequence=True),
        Case("mla_packed12", [q], attend(kv_b12), sequence=True),
    ]


CASES = _cases()
BY_NAME = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
EACH = pytest.mark.parametrize(("isa", "threads"), [(isa, threads) for isa in ISAS for threads in (1, 2)])
_expected: dict[str, np.ndarray] = {}


def expected(case: Case) -> np.ndarray:
    """All rows at once, portable code, one thread."""
    if case.name not in _expected:
        _expected[case.name] = case.call(kernels("scalar"), case.rows, None)
    return _expected[case.name]


@BY_NAME
@EACH
def test_any_number_of_rows(case: Case, isa: str, threads: int) -> None:
    ops = kernels(isa, threads)
    for count in range(1, ROWS + 1):
        got = case.call(ops, [x[:count] for x in case.rows], None)
        assert_same_bits(got, expected(case)[:count])


@pytest.mark.parametrize("case", [c for c in CASES if not c.sequence], ids=lambda case: case.name)
@EACH
def test_any_order_of_rows(case: Case, isa: str, threads: int) -> None:
    order = np.random.default_rng(0).permutation(ROWS)
    got = case.call(kernels(isa, threads), [x[order] for x in case.rows], None)
    assert_same_bits(got, expected(case)[order])


def _widened(x: np.ndarray) -> np.ndarray:
    """The same numbers as columns of a larger array, NaN around them."""
    larger = np.full((*x.shape[:-1], x.shape[-1] + 9), np.nan, x.dtype)
    view = larger[..., 3 : 3 + x.shape[-1]]
    view[...] = x
    return view


@BY_NAME
@EACH
def test_any_row_stride(case: Case, isa: str, threads: int) -> None:
    truth = expected(case)
    out = None
    if case.takes_out:
        frame = np.full((ROWS, truth.shape[1] + 6), 7, np.float32)
        out = frame[:, 2 : 2 + truth.shape[1]]
    got = case.call(kernels(isa, threads), [_widened(x) for x in case.rows], out)
    assert_same_bits(got, truth)
    if out is not None:
        assert got is out
        assert (np.delete(frame, np.s_[2 : 2 + truth.shape[1]], axis=1) == 7).all()


@EACH
def test_sequences_may_be_cut_anywhere(isa: str, threads: int) -> None:
    rng = np.random.default_rng(5)
    ops = kernels(isa, threads)
    q, k, v = (normal(rng, 20, 3 * 40) for _ in range(3))
    decay, beta = rng.random((20, 120), np.float32), rng.random((20, 3), np.float32)
    whole, pieces = normal(rng, 3, 40, 40), None
    pieces = whole.copy()
    taps, tail = normal(rng, 4, 120), normal(rng, 3, 120)
    tails = tail.copy()
    o = kernels("scalar").kda_recurrence(q, k, v, decay, beta, whole)
    y = kernels("scalar").short_conv(q, taps, tail)
    for a, b in ((0, 1), (1, 3), (3, 10), (10, 20)):
        part = ops.kda_recurrence(q[a:b], k[a:b], v[a:b], decay[a:b], beta[a:b], pieces)
        assert_same_bits(part, o[a:b])
        assert_same_bits(ops.short_conv(q[a:b], taps, tails), y[a:b])
    assert_same_bits(pieces, whole)
    assert_same_bits(tails, tail)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("positions", [1, 63, 64, 65, 700])
def test_attention_does_not_depend_on_company(isa: str, positions: int) -> None:
    """A head and a row alone, against the same among others: tiles of queries share passes over the cache."""
    rng = np.random.default_rng(positions)
    heads, nope, v_dim, latent, rope = 9, 16, 8, 40, 8
    cache = normal(rng, positions + 8, latent + rope)
    q = normal(rng, 9, heads * (nope + rope))
    weight = normal(rng, heads * (nope + v_dim), latent)
    ops = kernels(isa)
    start = positions - 1
    together = ops.mla_attention(q, F32Weight(weight), cache, start, heads, nope, v_dim, 0.2)
    for t, h in ((0, 0), (3, 8), (8, 4)):
        alone = ops.mla_attention(
            q[t : t + 1, h * (nope + rope) : (h + 1) * (nope + rope)],
            F32Weight(weight[h * (nope + v_dim) : (h + 1) * (nope + v_dim)]),
            cache[: start + t + 1],
            start + t,
            1,
            nope,
            v_dim,
            0.2,
        )
        assert_same_bits(alone[0], together[t, h * v_dim : (h + 1) * v_dim])


def test_calls_from_several_threads() -> None:
    ops = kernels(ISAS[-1], 2)
    work = [case for case in CASES for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda case: case.call(ops, case.rows, None), work))
    for case, got in zip(work, results, strict=True):
        assert_same_bits(got, expected(case))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="sets the bits of x86's MXCSR")
@EACH
@pytest.mark.parametrize("mode", [0x9FC0, 0x7F80], ids=["denormals flushed", "rounding towards zero"])
def test_the_callers_float_mode_changes_nothing(isa: str, threads: int, mode: int) -> None:
    ops = kernels(isa, threads)
    x = np.linspace(-104, -80, 4000, dtype=np.float32).reshape(2, 2000)
    tiny = np.full((300, 2000), 1e-42, np.float32)
    normally = ops.exp(x), ops.matmul(x, F32Weight(tiny))
    assert ((normally[0] > 0) & (normally[0] < 1e-38)).any()
    before = _native.float_mode()
    _native.set_float_mode(mode)
    try:
        results = ops.exp(x), ops.matmul(x, F32Weight(tiny))
        after = _native.float_mode()
    finally:
        _native.set_float_mode(before)
    assert after & 0xFFC0 == mode
    assert_same_bits(results[0], normally[0])
    assert_same_bits(results[1], normally[1])
