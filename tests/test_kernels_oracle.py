"""Every kernel against the official model's float64 numbers."""

from __future__ import annotations

import numpy as np
import pytest

from k3.kernels import Bf16Weight, F32Weight, Kernels, Mxfp4Weight
from kernel_helpers import ISAS, kernels, to_bf16
from oracle import ops as vectors

# Largest |got - truth| allowed, as a part of the largest |truth| of the row group. 2^-24 = 6e-8 is half a unit in the
# last place; each factor says how many roundings pile up.
TOLERANCE = {
    "rmsnorm": 5e-7,  # sum of 96 squares, root, three products
    "situ_glu": 1e-6,  # two tanh, a sigmoid, four products
    "shortconv": 1e-6,  # four multiply-adds that may cancel, a sigmoid
    "kda_gate": 3e-6,  # exp of up to -5: an absolute error of 3e-7 in the exponent, times the slope
    "kda_recurrence": 2e-6,  # eighty decaying steps over 32 x 32 states
    "kda_onorm": 1e-6,  # norm and sigmoid
    "kda_layer": 2e-5,  # ten operations in a row; tiny k makes the l2 norm divide by its eps
    "mla_layer": 1e-5,  # absorbed form: two products more than the expanded one
    "router": 2e-6,  # sigmoid and one division
    "attn_res": 2e-6,  # softmax of up to nine scores
    "mxfp4_matvec": 2e-6,  # 160 products
    "moe_layer": 1e-5,  # three products in a row per expert, five experts, a norm
}


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


def f32(name: str) -> np.ndarray:
    return np.ascontiguousarray(vectors()[name], np.float32)


def rows_of(name: str) -> np.ndarray:
    """The vectors as a matrix of positions by everything else."""
    x = f32(name)
    return x.reshape(len(x), -1)


def bf16(name: str) -> Bf16Weight:
    return Bf16Weight(to_bf16(f32(name)))


def check(group: str, got: np.ndarray, name: str) -> None:
    truth = vectors()[f"{name}_f64"]
    error = np.abs(got.reshape(truth.shape) - truth).max()
    assert error <= TOLERANCE[group] * np.abs(truth).max(), f"{name}: {error}"


def test_rmsnorm(ops: Kernels) -> None:
    for power in (5, 6):
        got = ops.rms_norm(f32("rmsnorm.x"), f32("rmsnorm.weight"), 10.0**-power)
        truth = vectors()[f"rmsnorm.y_eps1e-{power}_f64"]
        # rows differ in size by orders of magnitude: each is held to its own
        limit = TOLERANCE["rmsnorm"] * np.abs(truth).max(axis=1, keepdims=True)
        assert (np.abs(got - truth) <= limit).all()


def test_situ_glu(ops: Kernels) -> None:
    gate, up = np.split(f32("situ_glu.x"), 2, axis=1)
    for beta, bound in ((4, 25), (3, 17)):
        check("situ_glu", ops.situ(gate, up, beta, bound), f"situ_glu.y_b{beta}_{bound}")


def test_shortconv(ops: Kernels) -> None:
    taps = np.ascontiguousarray(f32("shortconv.weight")[:, 0].T)
    tail = np.zeros((3, 40), np.float32)
    for piece in range(4):
        got = ops.short_conv(f32(f"shortconv.x{piece}"), taps, tail)
        check("shortconv", got, f"shortconv.y{piece}")
        np.testing.assert_array_equal(tail.T, vectors()[f"shortconv.state{piece}_f64"][:, 1:])


def test_kda_gate(ops: Kernels) -> None:
    for bound in (4, 5):
        got = ops.kda_gate(f32("kda_gate.z"), f32("kda_gate.A_log")[:5], f32("kda_gate.dt_bias"), -float(bound))
        check("kda_gate", got, f"kda_gate.decay_lb{bound}")


@pytest.mark.parametrize("group", ["kda_recur1", "kda_recur80"])
def test_kda_recurrence(ops: Kernels, group: str) -> None:
    q, k, v, g = (rows_of(f"{group}.{name}") for name in "qkvg")
    beta = ops.sigmoid(f32(f"{group}.beta_logit"))
    state = f32(f"{group}.S0").copy()
    got = ops.kda_recurrence(q, k, v, ops.exp(g), beta, state)
    check("kda_recurrence", got, f"{group}.o")
    check("kda_recurrence", state, f"{group}.S")


def test_kda_output(ops: Kernels) -> None:
    got = ops.kda_output(rows_of("kda_onorm.o"), f32("kda_onorm.weight"), rows_of("kda_onorm.gate"), 1e-5)
    check("kda_onorm", got, "kda_onorm.y")


def test_kda_layer(ops: Kernels) -> None:
    """All kernels of the block in a row, as the specification chains them: 66 tokens, then three single ones."""
    w, heads = "kda_layer.w.", 3
    tails = {name: np.zeros((3, 96), np.float32) for name in "qkv"}
    state = np.zeros((heads, 32, 32), np.float32)

    def advance(x: np.ndarray) -> np.ndarray:
        q, k, v = (
            ops.short_conv(
                ops.matmul(x, bf16(f"{w}{name}_proj.weight")),
                np.ascontiguousarray(f32(f"{w}{name}_conv1d.weight")[:, 0].T),
                tails[name],
            )
            for name in "qkv"
        )
        z = ops.matmul(ops.matmul(x, bf16(f"{w}f_a_proj.weight")), bf16(f"{w}f_b_proj.weight"))
        decay = ops.kda_gate(z, f32(f"{w}A_log")[:heads], f32(f"{w}dt_bias"), -5.0)
        beta = ops.sigmoid(ops.matmul(x, bf16(f"{w}b_proj.weight")))
        o = ops.kda_recurrence(q, k, v, decay, beta, state)
        gate = ops.matmul(x, bf16(f"{w}g_proj.weight"))
        return ops.matmul(ops.kda_output(o, f32(f"{w}o_norm.weight"), gate, 1e-5), bf16(f"{w}o_proj.weight"))

    x = f32("kda_layer.x")
    y = [advance(x[:66])]
    check("kda_layer", state, "kda_layer.S66")
    y += [advance(x[t : t + 1]) for t in (66, 67, 68)]
    check("kda_layer", np.concatenate(y), "kda_layer.y")
    check("kda_layer", state, "kda_layer.S69")


def test_mla_layer(ops: Kernels) -> None:
    w, heads, nope, v_dim, latent, rope = "mla_layer.w.", 6, 24, 20, 40, 8
    x = f32("mla_layer.x")
    cache = np.zeros((40, latent + rope), np.float32)
    compressed = ops.matmul(x, bf16(f"{w}kv_a_proj_with_mqa.weight"), out=cache)
    cache[:, :latent] = ops.rms_norm(
        np.ascontiguousarray(compressed[:, :latent]), f32(f"{w}kv_a_layernorm.weight"), 1e-6
    )
    low = ops.rms_norm(ops.matmul(x, bf16(f"{w}q_a_proj.weight")), f32(f"{w}q_a_layernorm.weight"), 1e-6)
    q = ops.matmul(low, bf16(f"{w}q_b_proj.weight"))
    scale = (nope + rope) ** -0.5
    o = np.concatenate(
        [
            ops.mla_attention(q[a:b], bf16(f"{w}kv_b_proj.weight"), cache, a, heads, nope, v_dim, scale)
            for a, b in ((0, 37), (37, 38), (38, 39), (39, 40))
        ]
    )
    gated = ops.gated(o, ops.matmul(x, bf16(f"{w}g_proj.weight")))
    check("mla_layer", ops.matmul(gated, bf16(f"{w}o_proj.weight")), "mla_layer.y")


def test_router(ops: Kernels) -> None:
    logits = ops.matmul(f32("router.x"), F32Weight(f32("router.weight")))
    for scaling in (1.0, 2.5):
        got = ops.route(logits, f32("router.bias"), 6, scaling, True)
        order = np.argsort(got.ids, axis=1)
        np.testing.assert_array_equal(np.take_along_axis(got.ids, order, 1), vectors()["router.ids"])
        name = f"router.w_s{scaling:g}"
        check("router", np.take_along_axis(got.weights, order, 1), name)


def test_residual_mix(ops: Kernels) -> None:
    sources = list(f32("attn_res.sources"))
    for count in range(1, 10):
        got = ops.residual_mix(sources[:count], f32("attn_res.norm"), f32("attn_res.proj")[0], 1e-5)
        check("attn_res", got, f"attn_res.y{count}")


def test_mxfp4_matvec(ops: Kernels) -> None:
    weight = Mxfp4Weight(vectors()["mxfp4_matvec.packed"], vectors()["mxfp4_matvec.scale"])
    check("mxfp4_matvec", ops.matmul(f32("mxfp4_matvec.x"), weight), "mxfp4_matvec.y")


def test_moe_layer(ops: Kernels) -> None:
    w, x = "moe_layer.w.", f32("moe_layer.x")

    def expert(number: int, part: str) -> Mxfp4Weight:
        name = f"{w}experts.{number}.{part}.weight"
        return Mxfp4Weight(vectors()[f"{name}_packed"], vectors()[f"{name}_scale"])

    def shared(part: str) -> Bf16Weight:
        return bf16(f"{w}shared_experts.{part}_proj.weight")

    logits = ops.matmul(x, bf16(f"{w}gate.weight"))
    chosen = ops.route(logits, f32(f"{w}gate.e_score_correction_bias"), 5, 1.0, True)
    order = np.argsort(chosen.ids, axis=1)
    ids, weights = (np.take_along_axis(a, order, 1) for a in (chosen.ids, chosen.weights))
    z = ops.matmul(x, bf16(f"{w}routed_expert_down_proj.weight"))
    outputs = np.zeros((11, 5, 32), np.float32)
    for t, j in np.ndindex(11, 5):
        row, number = z[t : t + 1], int(ids[t, j])
        gate, up = (ops.matmul(row, expert(number, part)) for part in ("w1", "w3"))
        outputs[t, j] = ops.matmul(ops.situ(gate, up, 4.0, 25.0), expert(number, "w2"))[0]
    mixed = ops.accumulate_experts(outputs, weights)
    normed = ops.rms_norm(mixed, f32(f"{w}routed_expert_norm.weight"), 1e-5)
    up = ops.matmul(normed, bf16(f"{w}routed_expert_up_proj.weight"))
    dense = ops.situ(ops.matmul(x, shared("gate")), ops.matmul(x, shared("up")), 4.0, 25.0)
    check("moe_layer", ops.add(up, ops.matmul(dense, shared("down"))), "moe_layer.y")
