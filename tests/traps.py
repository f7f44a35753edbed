"""Plausible misreadings of the model, each a patch of one name in `k3.reference`.

    with TRAPS[0].fallen_into():
        Reference.from_checkpoint(path).logits(ids)  # wrong

The numbers are those of the fourteen traps: each was fallen into by somebody, or waits for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from k3 import reference as right


@dataclass(frozen=True)
class Trap:
    """A misreading: `wrong` in the place of `k3.reference.<name>`."""

    number: int
    title: str
    name: str
    wrong: Any

    def __str__(self) -> str:
        return f"{self.number:02}_{self.title}"

    def fallen_into(self) -> AbstractContextManager[Any]:
        """A context in which the reference computes the wrong thing."""
        return mock.patch.object(right, self.name, self.wrong)


RIGHT = {name: getattr(right, name) for name in dir(right)}
"""The functions as they are, for misreadings that call what they replace."""


# --- 1, 2: the decay of KDA ---


def rate_per_channel(z, a_log, dt_bias, heads, lower_bound):
    x = (z + dt_bias).reshape(len(z), heads, -1)
    return lower_bound * right.sigmoid(np.exp(a_log) * x)


def rate_from_the_padding(z, a_log, dt_bias, heads, lower_bound):
    return RIGHT["kda_gate"](z, a_log[-heads:], dt_bias, heads, lower_bound)


def softplus_gate(z, a_log, dt_bias, heads, lower_bound):
    x = (z + dt_bias).reshape(len(z), heads, -1)
    return np.maximum(-np.exp(a_log[:heads, None]) * np.logaddexp(0, x), lower_bound)


def bias_outside_the_rate(z, a_log, dt_bias, heads, lower_bound):
    scaled = np.exp(a_log[:heads, None]) * z.reshape(len(z), heads, -1)
    return lower_bound * right.sigmoid(scaled + dt_bias.reshape(heads, -1))


# --- 4, 5, 6, 7: what enters KDA's recurrence, the recurrence, what leaves it ---


def mean_instead_of_sum(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) / np.sqrt(x.shape[-1])


def eps_outside_the_root(x):
    return x / (np.sqrt(np.sum(x * x, axis=-1, keepdims=True)) + 1e-6)


def queries_not_scaled(q, k, v, g, beta, state):
    return right.delta_rule(right.l2_norm(q), right.l2_norm(k), v, g, beta, state)


def values_without_silu(u, w, heads):
    q, k, _ = RIGHT["kda_inputs"](u, w, heads)
    return [q, k, right.short_conv(u["v"], w["v_conv1d.weight"]).reshape(q.shape)]


def values_without_convolution(u, w, heads):
    q, k, _ = RIGHT["kda_inputs"](u, w, heads)
    return [q, k, (u["v"] * right.sigmoid(u["v"])).reshape(q.shape)]


def values_of_unit_length(q, k, v, g, beta, state):
    return RIGHT["kda_recurrence"](q, k, right.l2_norm(v), g, beta, state)


def recurrence(step):
    """A delta rule that goes through the tokens with another step."""

    def wrong(q, k, v, g, beta, state):
        o = np.empty_like(v)
        for t in range(len(q)):
            o[t], state = step(q[t], k[t], v[t], np.exp(g[t]), beta[t][:, None], state)
        return o, state

    return wrong


def read(state, key):
    return np.einsum("hkv,hk->hv", state, key)


def written(state, k, u):
    return state + k[:, :, None] * u[:, None, :]


def delta_of_the_undecayed(q, k, v, decay, beta, state):
    state = written(decay[:, :, None] * state, k, beta * (v - read(state, k)))
    return read(state, q), state


def read_before_write(q, k, v, decay, beta, state):
    state = decay[:, :, None] * state
    return read(state, q), written(state, k, beta * (v - read(state, k)))


def decay_after_write(q, k, v, decay, beta, state):
    state = decay[:, :, None] * written(state, k, beta * (v - read(state, k)))
    return read(state, q), state


def decay_of_the_values(q, k, v, decay, beta, state):
    state = decay[:, None, :] * state
    state = written(state, k, beta * (v - read(state, k)))
    return read(state, q), state


def gate_before_norm(o, weight, gate, eps):
    return right.rms_norm(o * right.sigmoid(gate), weight, eps)


def gate_by_silu(o, weight, gate, eps):
    return RIGHT["kda_output"](o, weight, gate, eps) * gate


# --- 8: MLA ---


def rotated(q, k, v):
    """The last dimensions of q and k turned by position, as rotary embeddings do (here: the last eight)."""
    angles = np.arange(len(q))[:, None] * 10000.0 ** -(np.arange(4) / 4)

    def turn(x):
        a, b = x[..., -8:-4], x[..., -4:]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([x[..., :-8], a * cos - b * sin, a * sin + b * cos], axis=-1)

    return RIGHT["causal_attention"](turn(q), turn(k), v)


def scale_of_the_nope_part(q, k, v):
    nope = {48: 32, 32: 24}[q.shape[-1]]
    return RIGHT["causal_attention"](q * np.sqrt(q.shape[-1] / nope), k, v)


def shared_key_normed(x, w, heads, nope):
    k, v = RIGHT["mla_keys_values"](x, w, heads, nope)
    tail = right.rms_norm(k[:, :, nope:], np.ones(k.shape[-1] - nope), right.MLA_NORM_EPS)
    return np.concatenate([k[:, :, :nope], tail], axis=-1), v


# --- 9, 10, 11: the mixture of experts ---


def weights_with_bias(x, weight, bias, s):
    ids, _ = RIGHT["router"](x, weight, bias, s)
    chosen = np.take_along_axis(right.sigmoid(x @ weight.T) + bias, ids, axis=-1)
    return ids, chosen / chosen.sum(axis=-1, keepdims=True) * s.scaling


def selection_without_bias(x, weight, bias, s):
    return RIGHT["router"](x, weight, np.zeros_like(bias), s)


def weights_not_renormalised(x, weight, bias, s):
    ids, _ = RIGHT["router"](x, weight, bias, s)
    return ids, np.take_along_axis(right.sigmoid(x @ weight.T), ids, axis=-1) * s.scaling


def weights_not_scaled(x, weight, bias, s):
    ids, weights = RIGHT["router"](x, weight, bias, s)
    return ids, weights / s.scaling


def softmax_of_the_chosen(x, weight, bias, s):
    ids, _ = RIGHT["router"](x, weight, bias, s)
    return ids, right.softmax(np.take_along_axis(x @ weight.T, ids, axis=-1)) * s.scaling


def weighted_sum(z, w, ids, weights, s, each=lambda y: y):
    total = np.zeros_like(z)
    for e in np.unique(ids):
        rows, slots = np.nonzero(ids == e)
        total[rows] += weights[rows, slots, None] * each(right.expert(z[rows], w.at(f"experts.{e}."), s))
    return total


def norm_of_each_expert(z, w, ids, weights, s):
    norm = w["routed_expert_norm.weight"]
    return weighted_sum(z, w, ids, weights, s, lambda y: right.rms_norm(y, norm, s.eps))


def norm_of_the_latent(z, w, ids, weights, s):
    return weighted_sum(right.rms_norm(z, w["routed_expert_norm.weight"], s.eps), w, ids, weights, s)


def no_latent_norm(z, w, ids, weights, s):
    return weighted_sum(z, w, ids, weights, s)


def sigmoid_of_the_capped_gate(gate, up, beta, linear_beta):
    capped = beta * np.tanh(gate / beta)
    return capped * right.sigmoid(capped) * linear_beta * np.tanh(up / linear_beta)


def one_cap_for_both(gate, up, beta, _):
    return RIGHT["situ"](gate, up, beta, beta)


def up_not_capped(gate, up, beta, _):
    return beta * np.tanh(gate / beta) * right.sigmoid(gate) * up


# --- 12, 13: attention residuals, layer lists ---


def normed_values(sources, norm, proj, eps):
    values = np.stack(sources)
    keys = right.rms_norm(values, norm, eps)
    return np.einsum("ts,sth->th", right.softmax((keys @ proj.reshape(-1)).T), keys)


def raw_keys(sources, norm, proj, _):
    values = np.stack(sources)
    return np.einsum("ts,sth->th", right.softmax((values @ (norm * proj.reshape(-1))).T), values)


def layer(snapshot=lambda prefix, _: prefix, keep_sum=False, first=0):
    """A layer that takes another snapshot, keeps its sum at a boundary, or takes none before `first`."""

    def wrong(index, prefix, snapshots, w, config, trace):
        eps = config.rms_norm_eps
        h = right.mixed([*snapshots, prefix], w, "self_attention_res", eps) if snapshots else prefix
        if index % config.attn_res_block_size == 0 and index >= first:
            snapshots = [*snapshots, snapshot(prefix, h)]
            prefix = prefix if keep_sum else np.zeros_like(prefix)
        a = right.rms_norm(h, w["input_layernorm.weight"], eps)
        prefix = prefix + right.attention(index, a, w, config, trace)
        m = right.mixed([*snapshots, prefix], w, "mlp_res", eps)
        m = right.rms_norm(m, w["post_attention_layernorm.weight"], eps)
        return prefix + right.feed_forward(index, m, w, config, trace), snapshots

    return wrong


def zero_based_lists(index, x, w, config, trace):
    return RIGHT["attention"](index - 1, x, w, config, trace)


# --- 14: MXFP4 ---


def high_nibble_first(packed, scales):
    return RIGHT["mxfp4"](packed >> 4 | packed << 4, scales)


def scale_bias_of_128(packed, scales):
    return RIGHT["mxfp4"](packed, scales) / 2


TWOS_COMPLEMENT = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -6, -6, -4, -3, -2, -1.5, -1, -0.5])
"""Code 8 as the most negative number instead of -0."""


TRAPS = [
    Trap(1, "rate_per_channel", "kda_gate", rate_per_channel),
    Trap(1, "rate_from_the_padding", "kda_gate", rate_from_the_padding),
    Trap(2, "softplus_gate", "kda_gate", softplus_gate),
    Trap(2, "bias_outside_the_rate", "kda_gate", bias_outside_the_rate),
    Trap(3, "inner_norms_with_rms_norm_eps", "MLA_NORM_EPS", 1e-5),
    Trap(4, "mean_instead_of_sum", "l2_norm", mean_instead_of_sum),
    Trap(4, "eps_outside_the_root", "l2_norm", eps_outside_the_root),
    Trap(4, "queries_not_scaled", "kda_recurrence", queries_not_scaled),
    Trap(5, "values_without_silu", "kda_inputs", values_without_silu),
    Trap(5, "values_without_convolution", "kda_inputs", values_without_convolution),
    Trap(5, "values_of_unit_length", "kda_recurrence", values_of_unit_length),
    Trap(6, "delta_of_the_undecayed_state", "delta_rule", recurrence(delta_of_the_undecayed)),
    Trap(6, "read_before_write", "delta_rule", recurrence(read_before_write)),
    Trap(6, "decay_after_write", "delta_rule", recurrence(decay_after_write)),
    Trap(6, "decay_of_the_value_dimension", "delta_rule", recurrence(decay_of_the_values)),
    Trap(7, "gate_before_norm", "kda_output", gate_before_norm),
    Trap(7, "gate_by_silu", "kda_output", gate_by_silu),
    Trap(8, "rotated", "causal_attention", rotated),
    Trap(8, "scale_of_the_nope_part", "causal_attention", scale_of_the_nope_part),
    Trap(8, "shared_key_normed", "mla_keys_values", shared_key_normed),
    Trap(9, "weights_with_bias", "router", weights_with_bias),
    Trap(9, "selection_without_bias", "router", selection_without_bias),
    Trap(9, "weights_not_renormalised", "router", weights_not_renormalised),
    Trap(9, "weights_not_scaled", "router", weights_not_scaled),
    Trap(9, "softmax_of_the_chosen", "router", softmax_of_the_chosen),
    Trap(10, "norm_of_each_expert", "routed_experts", norm_of_each_expert),
    Trap(10, "norm_of_the_latent", "routed_experts", norm_of_the_latent),
    Trap(10, "no_latent_norm", "routed_experts", no_latent_norm),
    Trap(11, "sigmoid_of_the_capped_gate", "situ", sigmoid_of_the_capped_gate),
    Trap(11, "one_cap_for_both", "situ", one_cap_for_both),
    Trap(11, "up_not_capped", "situ", up_not_capped),
    Trap(12, "normed_values", "residual_mix", normed_values),
    Trap(12, "raw_keys", "residual_mix", raw_keys),
    Trap(12, "mixed_snapshot", "layer", layer(snapshot=lambda _, h: h)),
    Trap(12, "sum_not_cleared", "layer", layer(keep_sum=True)),
    Trap(12, "embedding_no_snapshot", "layer", layer(first=1)),
    Trap(13, "zero_based_lists", "attention", zero_based_lists),
    Trap(14, "high_nibble_first", "mxfp4", high_nibble_first),
    Trap(14, "scale_bias_of_128", "mxfp4", scale_bias_of_128),
    Trap(14, "twos_complement_codes", "FP4_VALUES", TWOS_COMPLEMENT),
]
