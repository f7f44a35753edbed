"""Which tensors the config asks for, in the order in which a step uses them: names, shapes, dtypes, roles.

Local names are the checkpoint's without the prefix `language_model.` and, in a layer, without
`model.layers.N.`. Shapes are those of the released files; float tensors may be stored as BF16 or F32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from k3.checkpoint.config import ModelConfig

PREFIXES: Final = ("language_model.", "")
"""What stands before every name of the language model: in released files, and in its own."""
LAYERS: Final = "model.layers."
EXPERTS: Final = "block_sparse_moe.experts."
HEAD: Final = "lm_head.weight"
EMBEDDING: Final = "model.embed_tokens.weight"

FLOAT_DTYPES: Final = ("BF16", "F32")
"""Stored types that widen to float32 without rounding."""

EXPERT_TENSORS: Final = tuple(f"w{n}.weight_{part}" for n in (1, 3, 2) for part in ("packed", "scale"))
"""The six tensors of a routed expert in the order of use: gate, up, down, each packed nibbles and scales."""

_GROUP: Final = 32

Role: TypeAlias = Literal["embedding", "head", "matrix", "small"]
"""How a tensor is used: its rows are looked up, it is the last product or one of every layer, or it is small
enough to be widened once and kept."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that the model needs, by its local name."""

    local: str
    shape: tuple[int, ...]
    role: Role
    dtypes: tuple[str, ...] = FLOAT_DTYPES


def top_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The tensors outside the layers, in the order of use."""
    vocab, hidden = config.vocab_size, config.hidden_size
    return (
        TensorSpec(EMBEDDING, (vocab, hidden), "embedding"),
        TensorSpec("model.output_attn_res_norm.weight", (hidden,), "small"),
        TensorSpec("model.output_attn_res_proj.weight", (1, hidden), "small"),
        TensorSpec("model.norm.weight", (hidden,), "small"),
        TensorSpec(HEAD, (vocab, hidden), "head"),
    )


def layer_specs(config: ModelConfig, layer: int) -> tuple[TensorSpec, ...]:
    """The tensors of layer `layer` (0-based) but for its routed experts, in the order of use."""
    hidden = config.hidden_size
    attention = _kda_specs(config) if config.is_kda(layer) else _mla_specs(config)
    if config.is_moe(layer):
        feed_forward = _within("block_sparse_moe.", _moe_specs(config))
    else:
        feed_forward = _within("mlp.", _mlp_specs(hidden, config.intermediate_size))
    return (
        TensorSpec("self_attention_res_norm.weight", (hidden,), "small"),
        TensorSpec("self_attention_res_proj.weight", (1, hidden), "small"),
        TensorSpec("input_layernorm.weight", (hidden,), "small"),
        *_within("self_attn.", attention),
        TensorSpec("mlp_res_norm.weight", (hidden,), "small"),
        TensorSpec("mlp_res_proj.weight", (1, hidden), "small"),
        TensorSpec("post_attention_layernorm.weight", (hidden,), "small"),
        *feed_forward,
    )


def expert_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Shapes of EXPERT_TENSORS, all of them U8: two 4-bit codes or one scale of 32 columns to a byte."""
    latent, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
    matrices = ((inner, latent), (inner, latent), (latent, inner))
    return tuple(shape for rows, cols in matrices for shape in ((rows, cols // 2), (rows, cols // _GROUP)))


def _kda_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    kda = config.linear_attn_config
    hidden, width, dim = config.hidden_size, kda.projection_size, kda.head_dim
    taps = (width, 1, kda.short_conv_kernel_size)
    return (
        TensorSpec("q_proj.weight", (width, hidden), "matrix"),
        TensorSpec("k_proj.weight", (width, hidden), "matrix"),
        TensorSpec("v_proj.weight", (width, hidden), "matrix"),
        TensorSpec("f_a_proj.weight", (dim, hidden), "matrix"),
        TensorSpec("f_b_proj.weight", (width, dim), "matrix"),
        TensorSpec("b_proj.weight", (kda.num_heads, hidden), "matrix"),
        TensorSpec("A_log", (dim,), "small"),
        TensorSpec("dt_bias", (width,), "small"),
        TensorSpec("q_conv1d.weight", taps, "small"),
        TensorSpec("k_conv1d.weight", taps, "small"),
        TensorSpec("v_conv1d.weight", taps, "small"),
        TensorSpec("g_proj.weight", (width, hidden), "matrix"),
        TensorSpec("o_norm.weight", (dim,), "small"),
        TensorSpec("o_proj.weight", (hidden, width), "matrix"),
    )


def _mla_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    hidden, q_rank, kv_rank = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
    return (
        TensorSpec("q_a_proj.weight", (q_rank, hidden), "matrix"),
        TensorSpec("q_a_layernorm.weight", (q_rank,), "small"),
        TensorSpec("q_b_proj.weight", (config.mla_query_size, q_rank), "matrix"),
        TensorSpec("kv_a_proj_with_mqa.weight", (config.mla_cache_width, hidden), "matrix"),
        TensorSpec("kv_a_layernorm.weight", (kv_rank,), "small"),
        TensorSpec("kv_b_proj.weight", (config.mla_kv_size, kv_rank), "matrix"),
        TensorSpec("g_proj.weight", (config.mla_output_size, hidden), "matrix"),
        TensorSpec("o_proj.weight", (hidden, config.mla_output_size), "matrix"),
    )


def _mlp_specs(hidden: int, width: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("gate_proj.weight", (width, hidden), "matrix"),
        TensorSpec("up_proj.weight", (width, hidden), "matrix"),
        TensorSpec("down_proj.weight", (hidden, width), "matrix"),
    )


def _moe_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Shared experts stand before the routed ones' norm: they compute while routed experts arrive."""
    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    shared = _mlp_specs(hidden, config.shared_intermediate_size)
    norm = (TensorSpec("routed_expert_norm.weight", (latent,), "small"),) if config.latent_moe_use_norm else ()
    return (
        TensorSpec("gate.weight", (config.num_experts, hidden), "matrix"),
        TensorSpec("gate.e_score_correction_bias", (config.num_experts,), "small"),
        TensorSpec("routed_expert_down_proj.weight", (latent, hidden), "matrix"),
        *_within("shared_experts.", shared),
        *norm,
        TensorSpec("routed_expert_up_proj.weight", (hidden, latent), "matrix"),
    )


def _within(scope: str, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, local=scope + spec.local) for spec in specs)
