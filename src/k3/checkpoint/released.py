"""Facts of the released checkpoint: its files and their sizes, its totals, its configuration."""

from __future__ import annotations

from typing import Any, Final

_SIZES: Final = (
    2341216112, 16990911504, 16990911504, 16567501776, 16990911504, 16990911504, 16990911504, 16567501776,
    16990911504, 16990911504, 16990916912, 16567507176, 16990916912, 16990916912, 16990916912, 16567507176,
    16990916912, 16990916912, 16990916912, 16567507176, 16990916912, 16990916912, 16990916912, 16567507176,
    16990916912, 16990916912, 16990916912, 16567507176, 16990916912, 16990916912, 16990916912, 16567507176,
    16990916912, 16990916912, 16990916912, 16567507176, 16990916912, 16990916912, 16990916912, 16567507176,
    16990916912, 16990916912, 16990916912, 16567507176, 16990916912, 16990916912, 16990916912, 16567507176,
    16990916912, 16990916912, 16990916912, 16567507176, 16990916912, 16990916912, 16990916912, 16567507176,
    16990916912, 16990916912, 16990916912, 16567507176, 16990916912, 16990916912, 16990916912, 16567507176,
    16990916912, 16990916912, 16990916912, 16567507176, 16990916912, 16990916912, 16990916912, 16567507176,
    16990916912, 16990916912, 16990916912, 16567507176, 16990916912, 16990916912, 16990916912, 16567507176,
    16990916912, 16990916912, 16990916912, 16567507176, 16990916912, 16990916912, 16990916912, 16567507176,
    16990916912, 16990916912, 16990916912, 16567507176, 16567507176, 4697664072, 92289328, 802448352,
)  # fmt: skip

RELEASED_FILES: Final[dict[str, int]] = {
    f"model-{number:05}-of-{len(_SIZES):06}.safetensors": size for number, size in enumerate(_SIZES, 1)
}
"""Bytes of each shard, headers included: layer N in file N + 1, the top level in 94, the vision part in 95 and 96."""

RELEASED_TENSORS: Final = 497_220
RELEASED_TENSOR_BYTES: Final = 1_560_860_324_864
"""Tensors in all shards, and their bytes: the index's `total_size`."""

QUANTIZATION: Final[dict[str, Any]] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

CONSTANTS: Final[dict[str, Any]] = {
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "architectures": ["KimiLinearForCausalLM"],
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "initializer_range": 0.02,
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 2,
    "quantization_config": QUANTIZATION,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "use_grouped_topk": True,
}
"""Fields of `text_config` that don't depend on the model's size."""

SHAPE: Final[dict[str, Any]] = {
    "attn_res_block_size": 12,
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 3072,
    "num_attention_heads": 96,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_hidden_layers": 93,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_expert_hidden_size": 3584,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
"""Fields of `text_config` that give its size."""

KDA_HEADS: Final = 96
KDA_HEAD_DIM: Final = 128
MLA_LAYERS: Final = (*range(4, 93, 4), 93)
"""Layers with full attention, counted from one; the others are KDA."""

_VISION_WIDTH: Final = 1024
_VISION_QKV: Final = 1536
_VISION_MLP: Final = 4096
_VISION_BLOCKS: Final = 27


def vision_shards() -> tuple[dict[str, int], dict[str, int]]:
    """Elements of each BF16 tensor that the text model doesn't use, by name: the projector's and the tower's file.

    The counts follow from `vision_config`; they add up to the bytes that the released files have beside headers.
    """
    width, wide = _VISION_WIDTH, 4 * _VISION_WIDTH
    hidden = SHAPE["hidden_size"]
    projector = {"post_norm": hidden, "proj.0": wide * wide, "proj.2": hidden * wide}
    block = {"norm0": width, "norm1": width, "wqkv": 3 * _VISION_QKV * width, "wo": width * _VISION_QKV}
    block |= {"mlp.fc0": _VISION_MLP * width, "mlp.fc1": width * _VISION_MLP}
    tower = {f"encoder.blocks.{n}.{name}": count for n in range(_VISION_BLOCKS) for name, count in block.items()}
    tower |= {"encoder.final_layernorm": width, "patch_embed.pos_emb": 64 * 64 * width}
    tower |= {"patch_embed.proj": width * 3 * 14 * 14}
    return (
        {f"mm_projector.{name}.weight": count for name, count in projector.items()},
        {f"vision_tower.{name}.weight": count for name, count in tower.items()},
    )
