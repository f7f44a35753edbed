"""Kimi Delta Attention: a linear attention whose memory is one [K, V] matrix a head, whatever the length.

Projections run over all rows of a step; the convolutions and the recurrence run over each sequence's own rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from k3.checkpoint.config import ModelConfig
from k3.checkpoint.layout import check_a_log
from k3.kernels import F32Array, Kernels
from k3.model.batch import Batch
from k3.model.state import KdaState
from k3.model.weights import LayerWeights, WeightSource, linear


@dataclass(frozen=True, slots=True)
class Kda:
    """One KDA layer with its small tensors bound. Taps are float32 [kernel size, projection], oldest first."""

    layer: int
    config: ModelConfig
    q_taps: F32Array
    k_taps: F32Array
    v_taps: F32Array
    a_log: F32Array
    dt_bias: F32Array
    o_norm: F32Array

    @classmethod
    def bind(cls, config: ModelConfig, source: WeightSource, layer: int) -> Kda:
        """Read the layer's small tensors.

        Raises:
            CheckpointError: `A_log` holds something beyond the heads.
        """

        def vector(name: str) -> F32Array:
            return source.vector(layer, f"self_attn.{name}")

        def taps(name: str) -> F32Array:
            return np.ascontiguousarray(vector(f"{name}.weight")[:, 0, :].T)

        num_heads = config.linear_attn_config.num_heads
        a_log = vector("A_log")
        check_a_log(a_log, num_heads, f"layer {layer}: self_attn.A_log")
        return cls(
            layer,
            config,
            q_taps=taps("q_conv1d"),
            k_taps=taps("k_conv1d"),
            v_taps=taps("v_conv1d"),
            a_log=a_log[:num_heads],
            dt_bias=vector("dt_bias"),
            o_norm=vector("o_norm.weight"),
        )

    def __call__(self, ops: Kernels, weights: LayerWeights, x: F32Array, batch: Batch) -> F32Array:
        """From normed rows float32 [rows, hidden_size] to [rows, hidden_size]; the states in `batch` advance."""
        kda = self.config.linear_attn_config
        width = kda.projection_size

        def project(name: str, inputs: F32Array, out_features: int) -> F32Array:
            return linear(ops, weights, f"self_attn.{name}.weight", inputs, out_features)

        q = project("q_proj", x, width)
        k = project("k_proj", x, width)
        v = project("v_proj", x, width)
        z = project("f_b_proj", project("f_a_proj", x, kda.head_dim), width)
        beta = ops.sigmoid(project("b_proj", x, kda.num_heads))
        decay = ops.kda_gate(z, self.a_log, self.dt_bias, kda.gate_lower_bound)
        o = np.empty((x.shape[0], width), np.float32)
        for part in batch:
            rows = part.rows
            state = cast("KdaState", part.states[self.layer])
            o[rows] = ops.kda_recurrence(
                ops.short_conv(q[rows], self.q_taps, state.q_tail),
                ops.short_conv(k[rows], self.k_taps, state.k_tail),
                ops.short_conv(v[rows], self.v_taps, state.v_tail),
                decay[rows],
                beta[rows],
                state.recurrent,
            )
        gate = project("g_proj", x, width)
        y = ops.kda_output(o, self.o_norm, gate, self.config.rms_norm_eps)
        return project("o_proj", y, self.config.hidden_size)
