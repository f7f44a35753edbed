"""The whole model in float64 NumPy: the readable specification of what the engine computes.

Read it from top to bottom with the K3 report at hand: one function per component, and no caches, no blocks,
no cleverness. `x` is [T, n], one row per position of one sequence; every projection is a bias-free `x @ W.T`
with `W` stored [out, in]. All arrays are float64 unless said otherwise.

It is also the oracle of the test suite for shapes that no recorded result covers. It shares no arithmetic
with the engine: attention is written in its expanded form, the engine's is absorbed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from k3.checkpoint.config import ModelConfig
from k3.checkpoint.index import TensorEntry, TensorIndex

Array: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]

NAMES = "language_model."
"""What the names of all tensors of the language model begin with."""

MLA_NORM_EPS = 1e-6
"""Of the two norms inside MLA, which are built without an eps argument; all others take `rms_norm_eps`."""

L2_EPS = 1e-6
"""Of the l2 norm of KDA's q and k."""

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""What the sixteen codes of an E2M1 number stand for: bit 3 is the sign, so code 8 is -0."""


@dataclass(frozen=True)
class Weights:
    """The tensors below one prefix of the names; float64, or uint8 where they are MXFP4 bytes."""

    read: Callable[[str], npt.NDArray[Any]]
    prefix: str = ""

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.read(self.prefix + name)

    def at(self, prefix: str) -> Weights:
        return Weights(self.read, self.prefix + prefix)


@dataclass
class KdaState:
    """What one KDA layer carries from token to token.

    `recurrent` is [heads, key, value]. `conv` holds for each of q, k and v the last W inputs of its
    convolution [channels, W], oldest first, zeros before the start.
    """

    recurrent: Array
    conv: dict[str, Array]


@dataclass
class Trace:
    """What a forward pass leaves behind for tests, keyed by layer where there is one per layer.

    `hidden` is the running sum after the layer, `blocks` are the residual snapshots in order, `final_mix` is
    what enters the last norm; router ids are ascending, their weights aligned.
    """

    hidden: dict[int, Array] = field(default_factory=dict)
    router_ids: dict[int, Ids] = field(default_factory=dict)
    router_weights: dict[int, Array] = field(default_factory=dict)
    kda_states: dict[int, KdaState] = field(default_factory=dict)
    blocks: list[Array] = field(default_factory=list)
    final_mix: Array = field(default_factory=lambda: np.empty((0, 0)))


# --- numbers on disk ---


def bf16(bits: npt.NDArray[np.uint16]) -> Array:
    """A bfloat16 is the upper half of a float32 word."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def mxfp4(packed: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Array:
    """Matrix [R, n] of packed nibbles [R, n/2], low one first, and E8M0 scales [R, n/32]: 2^(byte - 127)."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    scale = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int32) - 127))
    return np.asarray(FP4_VALUES[codes] * np.repeat(scale, 32, axis=1))


def read_tensor(entry: TensorEntry) -> npt.NDArray[Any]:
    """A tensor from its shard: uint8 as it is stored, all else as float64."""
    stored = np.dtype({"BF16": "<u2", "F32": "<f4", "U8": "u1"}[entry.dtype])
    count = entry.nbytes // stored.itemsize
    raw = np.fromfile(entry.shard_path, stored, count, offset=entry.offset).reshape(entry.shape)
    match entry.dtype:
        case "BF16":
            return bf16(raw)
        case "F32":
            return raw.astype(np.float64)
    return raw


# --- small functions ---


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def softmax(x: Array) -> Array:
    """Along the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis."""
    return np.asarray(weight * (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)))


def l2_norm(x: Array) -> Array:
    """Unit length over the last axis; the eps is under the root, beside the sum (not the mean)."""
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2_EPS))


def situ(gate: Array, up: Array, beta: float, linear_beta: float) -> Array:
    """SiTU-GLU: each side is capped by a tanh of its own, the sigmoid takes the uncapped gate."""
    return np.asarray(beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta))


def residual_mix(sources: Sequence[Array], norm: Array, proj: Array, eps: float) -> Array:
    """Attention residual: each position attends over its snapshots and its running sum [T, H].

    Keys are normed, values raw.
    """
    values = np.stack(sources)  # [S, T, H]
    keys = rms_norm(values, norm, eps)
    p = softmax((keys @ proj.reshape(-1)).T)  # [T, S]
    return np.asarray(np.einsum("ts,sth->th", p, values))


# --- Kimi Delta Attention ---


def short_conv(u: Array, taps: Array) -> Array:
    """Depthwise causal convolution of u [T, C] with taps [C, 1, W]: the last tap meets the current token."""
    width = taps.shape[-1]
    padded = np.concatenate([np.zeros((width - 1, u.shape[1])), u])
    windows = np.stack([padded[j : j + len(u)] for j in range(width)], axis=-1)  # [T, C, W]
    return np.asarray((windows * taps[:, 0]).sum(axis=-1))


def conv_silu(u: Array, taps: Array) -> Array:
    """Short convolution, then SiLU."""
    y = short_conv(u, taps)
    return y * sigmoid(y)


def conv_state(u: Array, width: int) -> Array:
    """The last `width` inputs of a convolution [C, width], oldest first, zeros before the start."""
    return np.concatenate([np.zeros((width, u.shape[1])), u])[-width:].T


def kda_gate(z: Array, a_log: Array, dt_bias: Array, heads: int, lower_bound: float) -> Array:
    """Log decay [T, heads, D], in (lower_bound, 0), of z [T, heads * D].

    `a_log` is stored as long as a head is wide, but holds one value per head and zeros after them.
    """
    rate = np.exp(a_log[:heads, None])
    return lower_bound * sigmoid(rate * (z + dt_bias).reshape(len(z), heads, -1))


def delta_rule(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The gated delta rule, token by token.

    q, k, v, g are [T, heads, D], beta is [T, heads], state [heads, key, value].
    Decay along the key dimension, write what the decayed state gets wrong about k, then read the updated
    state. Returns what was read, [T, heads, D], and the last state.
    """
    read = np.empty_like(v)
    for t in range(len(q)):
        state = np.exp(g[t])[:, :, None] * state
        error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][:, :, None] * (beta[t][:, None] * error)[:, None, :]
        read[t] = np.einsum("hkv,hk->hv", state, q[t])
    return read, state


def kda_recurrence(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """`delta_rule` on q and k of unit length, q scaled by D^-0.5."""
    return delta_rule(l2_norm(q) * q.shape[-1] ** -0.5, l2_norm(k), v, g, beta, state)


def kda_output(o: Array, weight: Array, gate: Array, eps: float) -> Array:
    """Per head: the norm first, then the gate. All [T, heads, D], the weight [D] shared by the heads."""
    return rms_norm(o, weight, eps) * sigmoid(gate)


def kda_inputs(u: dict[str, Array], w: Weights, heads: int) -> list[Array]:
    """q, k and v [T, heads, D]: all three go through convolution and SiLU."""
    return [conv_silu(u[name], w[f"{name}_conv1d.weight"]).reshape(len(u[name]), heads, -1) for name in "qkv"]


def kda_layer(x: Array, w: Weights, lower_bound: float, eps: float) -> tuple[Array, KdaState]:
    """Kimi Delta Attention of x [T, H] from an empty state."""
    heads = len(w["b_proj.weight"])
    projected = {name: x @ w[f"{name}_proj.weight"].T for name in "qkv"}
    q, k, v = kda_inputs(projected, w, heads)
    z = x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T
    g = kda_gate(z, w["A_log"], w["dt_bias"], heads, lower_bound)
    beta = sigmoid(x @ w["b_proj.weight"].T)
    o, state = kda_recurrence(q, k, v, g, beta, np.zeros((heads, q.shape[-1], v.shape[-1])))
    gate = (x @ w["g_proj.weight"].T).reshape(o.shape)
    y = kda_output(o, w["o_norm.weight"], gate, eps).reshape(len(x), -1) @ w["o_proj.weight"].T
    width = w["q_conv1d.weight"].shape[-1]
    return y, KdaState(state, {name: conv_state(u, width) for name, u in projected.items()})


# --- multi-head latent attention ---


def mla_queries(x: Array, w: Weights, heads: int) -> Array:
    """[T, heads, nope + rope]."""
    latent = rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], MLA_NORM_EPS)
    return np.asarray(latent @ w["q_b_proj.weight"].T).reshape(len(x), heads, -1)


def mla_keys_values(x: Array, w: Weights, heads: int, nope: int) -> tuple[Array, Array]:
    """Keys [T, heads, nope + rope] and values [T, heads, v].

    The "rope" part is one head shared by all, neither normed nor rotated: the model has no position encoding.
    """
    compressed = x @ w["kv_a_proj_with_mqa.weight"].T
    rank = len(w["kv_a_layernorm.weight"])
    latent = rms_norm(compressed[:, :rank], w["kv_a_layernorm.weight"], MLA_NORM_EPS)
    kv = (latent @ w["kv_b_proj.weight"].T).reshape(len(x), heads, -1)
    shared = np.repeat(compressed[:, None, rank:], heads, axis=1)
    return np.concatenate([kv[:, :, :nope], shared], axis=-1), kv[:, :, nope:]


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Softmax attention [T, heads, v]; the scale counts every dimension of a key."""
    scores = np.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    hidden = np.triu(np.ones(scores.shape[1:], dtype=bool), 1)
    return np.asarray(np.einsum("hts,shv->thv", softmax(np.where(hidden, -np.inf, scores)), v))


def mla_layer(x: Array, w: Weights, heads: int, nope: int) -> Array:
    """Gated multi-head latent attention of x [T, H], in its expanded form."""
    k, v = mla_keys_values(x, w, heads, nope)
    o = causal_attention(mla_queries(x, w, heads), k, v).reshape(len(x), -1)
    return np.asarray((o * sigmoid(x @ w["g_proj.weight"].T)) @ w["o_proj.weight"].T)


# --- feed-forward ---


@dataclass(frozen=True)
class MoeSettings:
    """The scalars of a feed-forward layer, named as in the configuration."""

    top_k: int
    renormalize: bool
    scaling: float
    use_norm: bool
    beta: float
    linear_beta: float
    eps: float

    @classmethod
    def of(cls, config: ModelConfig) -> MoeSettings:
        return cls(
            top_k=config.num_experts_per_token,
            renormalize=config.moe_renormalize,
            scaling=config.routed_scaling_factor,
            use_norm=config.latent_moe_use_norm,
            beta=config.activation_situ_beta,
            linear_beta=config.activation_situ_linear_beta,
            eps=config.rms_norm_eps,
        )


def mlp(x: Array, w: Weights, s: MoeSettings) -> Array:
    """A dense SiTU MLP: layer 0, and the shared experts, which are one MLP of their joint width."""
    gate, up = x @ w["gate_proj.weight"].T, x @ w["up_proj.weight"].T
    return np.asarray(situ(gate, up, s.beta, s.linear_beta) @ w["down_proj.weight"].T)


def router(x: Array, weight: Array, bias: Array, s: MoeSettings) -> tuple[Ids, Array]:
    """Ids [T, k], ascending, and weights [T, k]. The bias selects only; ties go to the lower id."""
    scores = sigmoid(x @ weight.T)
    ids = np.sort(np.argsort(-(scores + bias), axis=-1, kind="stable")[:, : s.top_k], axis=-1)
    chosen = np.take_along_axis(scores, ids, axis=-1)
    if s.renormalize and s.top_k > 1:
        chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, chosen * s.scaling


def expert(z: Array, w: Weights, s: MoeSettings) -> Array:
    """One routed expert on the latent: w1 is the gate, w3 the other side, w2 the way back."""
    w1, w2, w3 = (mxfp4(w[f"{m}.weight_packed"], w[f"{m}.weight_scale"]) for m in ("w1", "w2", "w3"))
    return np.asarray(situ(z @ w1.T, z @ w3.T, s.beta, s.linear_beta) @ w2.T)


def routed_experts(z: Array, w: Weights, ids: Ids, weights: Array, s: MoeSettings) -> Array:
    """Weighted sum [T, latent] of each row's experts, normed once, after the sum."""
    total = np.zeros_like(z)
    for e in np.unique(ids):
        rows, slots = np.nonzero(ids == e)
        total[rows] += weights[rows, slots, None] * expert(z[rows], w.at(f"experts.{e}."), s)
    return rms_norm(total, w["routed_expert_norm.weight"], s.eps) if s.use_norm else total


def latent_moe(x: Array, w: Weights, s: MoeSettings) -> tuple[Array, Ids, Array]:
    """Router and shared experts see the full width, routed experts the down-projected latent."""
    ids, weights = router(x, w["gate.weight"], w["gate.e_score_correction_bias"], s)
    z = x @ w["routed_expert_down_proj.weight"].T
    y = routed_experts(z, w, ids, weights, s)
    return y @ w["routed_expert_up_proj.weight"].T + mlp(x, w.at("shared_experts."), s), ids, weights


# --- the model ---


def mixed(sources: Sequence[Array], w: Weights, name: str, eps: float) -> Array:
    """`residual_mix` with the pair of tensors called `name`."""
    return residual_mix(sources, w[f"{name}_norm.weight"], w[f"{name}_proj.weight"], eps)


def attention(index: int, x: Array, w: Weights, config: ModelConfig, trace: Trace) -> Array:
    """KDA or MLA, as the configuration's lists say (they count layers from one)."""
    if not config.is_kda(index):
        return mla_layer(x, w.at("self_attn."), config.num_attention_heads, config.qk_nope_head_dim)
    lower_bound = config.linear_attn_config.gate_lower_bound
    y, trace.kda_states[index] = kda_layer(x, w.at("self_attn."), lower_bound, config.rms_norm_eps)
    return y


def feed_forward(index: int, x: Array, w: Weights, config: ModelConfig, trace: Trace) -> Array:
    """A dense MLP in the first layers, the mixture of experts in the others."""
    settings = MoeSettings.of(config)
    if not config.is_moe(index):
        return mlp(x, w.at("mlp."), settings)
    y, ids, weights = latent_moe(x, w.at("block_sparse_moe."), settings)
    trace.router_ids[index], trace.router_weights[index] = ids, weights
    return y


def layer(
    index: int, prefix: Array, snapshots: list[Array], w: Weights, config: ModelConfig, trace: Trace
) -> tuple[Array, list[Array]]:
    """One decoder layer: from the running sum and the snapshots before it to those after it.

    At a block boundary it mixes first, then keeps the unmixed sum as a snapshot, then starts a new sum.
    """
    eps = config.rms_norm_eps
    h = mixed([*snapshots, prefix], w, "self_attention_res", eps) if snapshots else prefix
    if index % config.attn_res_block_size == 0:
        snapshots, prefix = [*snapshots, prefix], np.zeros_like(prefix)
    h = rms_norm(h, w["input_layernorm.weight"], eps)
    prefix = prefix + attention(index, h, w, config, trace)
    h = mixed([*snapshots, prefix], w, "mlp_res", eps)
    h = rms_norm(h, w["post_attention_layernorm.weight"], eps)
    prefix = prefix + feed_forward(index, h, w, config, trace)
    trace.hidden[index] = prefix
    return prefix, snapshots


@dataclass(frozen=True)
class Reference:
    """The model: a configuration and weights, read when they are used and not kept."""

    config: ModelConfig
    weights: Weights

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Reference:
        """The checkpoint in a directory. Raises ConfigError, CheckpointError or UsageError."""
        config = ModelConfig.read(Path(path) / "config.json")
        index = TensorIndex.open(path, lambda name: name.startswith(NAMES))
        return cls(config, Weights(lambda name: read_tensor(index[name]), NAMES))

    def logits(self, ids: Sequence[int], trace: Trace | None = None) -> Array:
        """Logits [T, vocabulary] at every position of one sequence, from an empty state."""
        trace = Trace() if trace is None else trace
        eps = self.config.rms_norm_eps
        w = self.weights.at("model.")
        prefix, snapshots = w["embed_tokens.weight"][np.asarray(ids)], list[Array]()
        for index in range(self.config.num_hidden_layers):
            prefix, snapshots = layer(index, prefix, snapshots, w.at(f"layers.{index}."), self.config, trace)
        trace.blocks = snapshots
        trace.final_mix = mixed([*snapshots, prefix], w, "output_attn_res", eps)
        return np.asarray(rms_norm(trace.final_mix, w["norm.weight"], eps) @ self.weights["lm_head.weight"].T)
