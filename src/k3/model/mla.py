"""Gated multi-head latent attention without positions (NoPE), always in the absorbed form.

The cache keeps the normed latent and the rope part of each position. A head's key matrix is applied to the query
instead of to every cached latent, its value matrix to the attended latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from k3.checkpoint.config import ModelConfig
from k3.kernels import F32Array, Kernels
from k3.model.batch import Batch
from k3.model.norm import MLA_INNER_EPS, RmsNorm
from k3.model.state import MlaCache
from k3.model.weights import LayerWeights, WeightSource, linear


@dataclass(frozen=True, slots=True)
class Mla:
    """One MLA layer with its two inner norms bound."""

    layer: int
    config: ModelConfig
    q_norm: RmsNorm
    kv_norm: RmsNorm

    @classmethod
    def bind(cls, config: ModelConfig, source: WeightSource, layer: int) -> Mla:
        def norm(name: str) -> RmsNorm:
            return RmsNorm(source.vector(layer, f"self_attn.{name}.weight"), MLA_INNER_EPS)

        return cls(layer, config, norm("q_a_layernorm"), norm("kv_a_layernorm"))

    def __call__(self, ops: Kernels, weights: LayerWeights, x: F32Array, batch: Batch) -> F32Array:
        """From normed rows float32 [rows, hidden_size] to [rows, hidden_size]; the caches in `batch` grow."""
        c = self.config
        heads, rank, rope_dim = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim

        def project(name: str, inputs: F32Array, out_features: int) -> F32Array:
            return linear(ops, weights, f"self_attn.{name}.weight", inputs, out_features)

        q_latent = self.q_norm(ops, project("q_a_proj", x, c.q_lora_rank))
        q = project("q_b_proj", q_latent, c.mla_query_size)
        compressed = project("kv_a_proj_with_mqa", x, rank + rope_dim)
        latent, rope = self.kv_norm(ops, compressed[:, :rank]), compressed[:, rank:]
        kv_b = weights.matrix("self_attn.kv_b_proj.weight")
        o = np.empty((x.shape[0], c.mla_output_size), np.float32)
        for part in batch:
            rows = part.rows
            cache = cast("MlaCache", part.states[self.layer])
            start = len(cache)
            o[rows] = ops.mla_attention(
                q[rows],
                kv_b,
                cache.append(latent[rows], rope[rows]),
                start=start,
                heads=heads,
                nope=c.qk_nope_head_dim,
                v_dim=c.v_head_dim,
                scale=c.qk_head_dim**-0.5,
            )
        gate = project("g_proj", x, c.mla_output_size)
        return project("o_proj", ops.gated(o, gate), c.hidden_size)
