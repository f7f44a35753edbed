"""Synthetic checkpoints: random weights in the released on-disk format, to run all without the real one.

A kind is a configuration. All else follows from it: `synth_tensors` says which tensors there are and how they
are drawn, in the released sharding (layer N in file N + 1, the rest in the last).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from k3.checkpoint.shards import ShardPlan, index_json, plan_shard, shard_name, write_at
from k3.checkpoint.synth_tensors import SPECIAL_SLOTS, Block, Tensor, shard_tensors, tensor_blocks
from k3.errors import K3Error, MachineError, UsageError
from k3.text.vocabulary import write_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes in all."""

# --- kinds ---

_QUANTIZATION: dict[str, Any] = {
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

_COMMON: dict[str, Any] = {
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
    "quantization_config": _QUANTIZATION,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "use_grouped_topk": True,
}

_TINY: dict[str, Any] = {
    "attn_res_block_size": 3,
    "hidden_size": 64,
    "intermediate_size": 160,
    "kv_lora_rank": 32,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_hidden_layers": 8,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "routed_expert_hidden_size": 32,
    "v_head_dim": 16,
    "vocab_size": 1024,
}

_WIDE: dict[str, Any] = {
    "attn_res_block_size": 12,
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 3072,
    "num_attention_heads": 96,
    "num_experts": 64,
    "num_experts_per_token": 16,
    "num_hidden_layers": 5,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_expert_hidden_size": 3584,
    "v_head_dim": 128,
    "vocab_size": 16384,
}


def _config(shape: dict[str, Any], kda_heads: int, kda_head_dim: int, mla_layers: list[int]) -> dict[str, Any]:
    """A `config.json` in the released nested shape, without the vision part; `mla_layers` count from one."""
    first_special = shape["vocab_size"] - SPECIAL_SLOTS
    special = {
        "bos_token_id": first_special,
        "eos_token_id": first_special + 2,
        "pad_token_id": shape["vocab_size"] - 1,
    }
    linear = {
        "full_attn_layers": mla_layers,
        "gate_lower_bound": -5.0,
        "head_dim": kda_head_dim,
        "kda_layers": [n for n in range(1, shape["num_hidden_layers"] + 1) if n not in mla_layers],
        "num_heads": kda_heads,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    }
    text = {"linear_attn_config": linear, "num_key_value_heads": shape["num_attention_heads"]}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "media_placeholder_token_id": first_special + 21,
        "model_type": "kimi_k3",
        **special,
        "text_config": dict(sorted({**_COMMON, **shape, **special, **text}.items())),
        "tie_word_embeddings": False,
    }


KINDS: dict[str, dict[str, Any]] = {
    "tiny": _config(_TINY, kda_heads=3, kda_head_dim=32, mla_layers=[4, 8]),
    "wide": _config(_WIDE, kda_heads=96, kda_head_dim=128, mla_layers=[4]),
}
"""Each kind's configuration: `tiny` for tests and demonstrations, `wide` has released widths, few layers."""

# --- writing ---


@dataclass(frozen=True)
class _Shard:
    tensors: dict[str, Tensor]
    plan: ShardPlan

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Self:
        return cls({t.spec.name: t for t in tensors}, plan_shard(t.spec for t in tensors))

    def blocks(self) -> Iterator[Block]:
        for spec, offset in self.plan.tensors:
            yield from tensor_blocks(self.tensors[spec.name], offset)


def synthetic_size(kind: str) -> int:
    """Bytes of all shards of `kind`, headers included. Raises UsageError for a kind that does not exist."""
    return sum(shard.plan.nbytes for shard in _shards(_config_of(kind)))


def write_synthetic(
    kind: str,
    directory: str | os.PathLike[str],
    seed: int = 0,
    progress: Progress | None = None,
    threads: int | None = None,
) -> None:
    """Write a checkpoint of `kind` (a key of KINDS), tokenizer included, into a new or empty `directory`.

    The bytes depend on kind and seed (0 ≤ seed < 2^64) only. They are written into `<directory>.partial`,
    which is renamed when complete and removed when writing fails. Memory stays below about 10 MB a thread; by
    default there is one thread for each processor that this process may use, four at most.

    Raises:
        UsageError: no such kind; the directory holds something; a `.partial` one is left from a killed run.
        MachineError: the file system lacks the space.
        K3Error: a write failed.
    """
    config = _config_of(kind)
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"The seed {seed} is out of range. Choose one from 0 to 2^64 - 1.")
    shards = _shards(config)
    out = Path(directory)
    partial = out.with_name(out.name + ".partial")
    _check_target(out, partial)
    _check_space(out, sum(shard.plan.nbytes for shard in shards))
    try:
        partial.mkdir(parents=True)
        try:
            _write_shards(partial, shards, seed, progress, threads or min(4, len(os.sched_getaffinity(0))))
            _write_texts(partial, config, shards)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise K3Error(
            f"Writing the synthetic checkpoint {out} failed: {error}. What was written is removed. Free some "
            "space or choose another place, and try again."
        ) from error


def _config_of(kind: str) -> dict[str, Any]:
    if kind not in KINDS:
        kinds = ", ".join(KINDS)
        raise UsageError(f"There is no synthetic checkpoint of kind {kind!r}. Choose one of {kinds}.")
    return KINDS[kind]


def _shards(config: dict[str, Any]) -> list[_Shard]:
    return [_Shard.of(tensors) for tensors in shard_tensors(config)]


def _check_target(out: Path, partial: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            f"The synthetic checkpoint can't be written to {out}: something is there already. Name a "
            "directory that does not exist or is empty."
        )
    if partial.exists():
        raise UsageError(
            f"The synthetic checkpoint can't be written: {partial} is there, as a killed run leaves it. "
            "Remove it, and try again."
        )


def _check_space(out: Path, needed: int) -> None:
    existing = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise MachineError(
            f"The synthetic checkpoint {out} takes {needed / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free "
            f"at {existing}. Free some space or choose another place."
        )


def _write_shards(partial: Path, shards: list[_Shard], seed: int, progress: Progress | None, threads: int) -> None:
    total, done = sum(shard.plan.nbytes for shard in shards), 0
    for number, shard in enumerate(shards, 1):
        for written in _write_shard(partial / shard_name(number, len(shards)), shard, seed, threads):
            done += written
            if progress is not None:
                progress(done, total)


def _write_shard(path: Path, shard: _Shard, seed: int, threads: int) -> Iterator[int]:
    """Write one shard; yields the bytes of each piece when it is on its way to the disk."""
    # The pool is left first: no thread may write to a descriptor that is closed.
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(threads) as pool:
        descriptor = file.fileno()

        def write(block: Block) -> int:
            write_at(descriptor, block.draw(seed).data, block.offset)
            return block.nbytes

        write_at(descriptor, shard.plan.header, 0)
        yield len(shard.plan.header)
        yield from pool.map(write, shard.blocks())
        os.fsync(descriptor)


def _write_texts(partial: Path, config: dict[str, Any], shards: list[_Shard]) -> None:
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    index = index_json([shard.plan for shard in shards])
    _write_text(partial / "model.safetensors.index.json", index)
    _write_text(partial / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    _write_text(partial / "config.json", json.dumps(config, indent=2) + "\n")
    write_vocabulary(partial, config["text_config"]["vocab_size"])


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
