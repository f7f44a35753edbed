"""Synthetic checkpoints: random weights in the released on-disk format, to run all without the real one.

A kind is a configuration. All else follows from it: `synth_tensors` says which tensors there are and how they
are drawn, in the released sharding (layer N in file N + 1, the rest in the last).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from k3.checkpoint.headers.weight_map import INDEX_FILE
from k3.checkpoint.index import SYNTHETIC_MARK
from k3.checkpoint.released import CONSTANTS, KDA_HEAD_DIM, KDA_HEADS, MLA_LAYERS, RELEASED_FILES, SHAPE
from k3.checkpoint.synthetic.shards import ShardPlan, index_lines, index_pieces, plan_shard, shard_name, write_at
from k3.checkpoint.synthetic.tensors import (
    SPECIAL_SLOTS,
    Block,
    Tensor,
    shard_tensors,
    sparse,
    tensor_blocks,
    vision_tensors,
)
from k3.errors import K3Error, MachineError, UsageError
from k3.text.vocabulary import write_vocabulary

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes in all."""

# --- kinds ---

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

_WIDE: dict[str, Any] = {**SHAPE, "num_experts": 64, "num_hidden_layers": 5, "vocab_size": 16384}


def _config(shape: dict[str, Any], kda_heads: int, kda_head_dim: int, mla_layers: Sequence[int]) -> dict[str, Any]:
    """A `config.json` in the released nested shape, without the vision part; `mla_layers` count from one."""
    first_special = shape["vocab_size"] - SPECIAL_SLOTS
    special = {
        "bos_token_id": first_special,
        "eos_token_id": first_special + 2,
        "pad_token_id": shape["vocab_size"] - 1,
    }
    linear = {
        "full_attn_layers": list(mla_layers),
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
        "text_config": dict(sorted({**CONSTANTS, **shape, **special, **text}.items())),
        "tie_word_embeddings": False,
    }


KINDS: dict[str, dict[str, Any]] = {
    "tiny": _config(_TINY, kda_heads=3, kda_head_dim=32, mla_layers=[4, 8]),
    "wide": _config(_WIDE, KDA_HEADS, KDA_HEAD_DIM, mla_layers=[4]),
    "full-shape": _config(SHAPE, KDA_HEADS, KDA_HEAD_DIM, MLA_LAYERS),
}
"""Each kind's configuration: `tiny` for tests and demonstrations; `wide` has released widths, few layers;
`full-shape` is as large as the released checkpoint, in sparse files."""

_SPARSE = "full-shape"
_RELEASED_SHARDS = tuple(RELEASED_FILES.values())

# --- writing ---


@dataclass(frozen=True)
class _Shard:
    tensors: dict[str, Tensor]
    plan: ShardPlan

    @classmethod
    def of(cls, tensors: list[Tensor], nbytes: int | None = None) -> Self:
        return cls({t.spec.name: t for t in tensors}, plan_shard((t.spec for t in tensors), nbytes))

    @property
    def written_bytes(self) -> int:
        return len(self.plan.header) + sum(t.written_bytes for t in self.tensors.values())

    def blocks(self) -> Iterator[Block]:
        for spec, offset in self.plan.tensors:
            yield from tensor_blocks(self.tensors[spec.name], offset)


def synthetic_size(kind: str) -> int:
    """Bytes of all shards of `kind`, headers and holes included. UsageError for a kind that does not exist."""
    return sum(plan.nbytes for plan in shard_plans(kind))


def shard_plans(kind: str) -> Iterator[ShardPlan]:
    """Headers and sizes of the shards of `kind`, one by one. UsageError for a kind that does not exist."""
    return (shard.plan for shard in _shards(kind))


def write_synthetic(
    kind: str,
    directory: str | os.PathLike[str],
    seed: int = 0,
    progress: Progress | None = None,
    threads: int | None = None,
) -> None:
    """Write a checkpoint of `kind` (a key of KINDS) into a new or empty `directory`.

    A tokenizer is included, except in `full-shape`, whose text parts have the released names, shapes and sizes of
    files, while its vision parts are placeholders. It is nearly all holes, and its index is marked as synthetic.

    The bytes depend on kind and seed (0 ≤ seed < 2^64) only. They are written into `<directory>.partial`,
    which is renamed when complete and removed when writing fails. Memory stays below about 10 MB a thread; by
    default there is one thread for each processor that this process may use, four at most.

    Raises:
        UsageError: no such kind; the directory holds something; a `.partial` one is left from a killed run.
        MachineError: the file system lacks the space, or for `full-shape` holes in files.
        K3Error: a write failed.
    """
    _config_of(kind)
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"The seed {seed} is out of range. Choose one from 0 to 2^64 - 1.")
    out = Path(directory)
    partial = out.with_name(out.name + ".partial")
    _check_target(out, partial)
    written = [shard.written_bytes for shard in _shards(kind)]
    _check_space(out, sum(written))
    report = _Report(progress, sum(written))
    try:
        partial.mkdir(parents=True)
        try:
            lines, total = [], 0
            for number, shard in enumerate(_shards(kind), 1):
                name = shard_name(number, len(written))
                for nbytes in _write_shard(
                    partial / name, shard, seed, threads or min(4, len(os.sched_getaffinity(0)))
                ):
                    report.add(nbytes)
                if kind == _SPARSE and number == 1:
                    _require_holes(partial / name, shard)
                lines.append(index_lines(shard.plan, name))
                total += sum(spec.nbytes for spec, _ in shard.plan.tensors)
            _write_texts(partial, kind, index_pieces(lines, _metadata(kind, total)))
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


def _shards(kind: str) -> Iterator[_Shard]:
    """Made one by one: half a million tensors take more memory than they are worth."""
    config = _config_of(kind)
    if kind != _SPARSE:
        yield from map(_Shard.of, shard_tensors(config))
        return
    for tensors in shard_tensors(config):
        yield _Shard.of([sparse(tensor) for tensor in tensors])
    for tensors, nbytes in zip(vision_tensors(), _RELEASED_SHARDS[-2:], strict=True):
        yield _Shard.of(tensors, nbytes)


def _metadata(kind: str, total_size: int) -> dict[str, object]:
    mark = {SYNTHETIC_MARK: True} if kind == _SPARSE else {}
    return {"total_size": total_size, **mark}


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


def _require_holes(path: Path, shard: _Shard) -> None:
    """Refuse to go on where a file system writes out the zeros of a first shard: all would be 1.56 TB."""
    holes = shard.plan.nbytes - shard.written_bytes
    if _stored_bytes(path) - shard.written_bytes > holes / 2:
        raise MachineError(
            f"The file system of {path.parent.parent} keeps no holes in files: {path.name} takes "
            f"{_stored_bytes(path)} bytes of it, expected about {shard.written_bytes}. What was written is removed. "
            "Choose a place on ext4, XFS, Btrfs, APFS or another file system with sparse files."
        )


def _stored_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


class _Report:
    """Adds up what was written for a `Progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _write_shard(path: Path, shard: _Shard, seed: int, threads: int) -> Iterator[int]:
    """Write one shard; yields the bytes of each piece when it is on its way to the disk."""
    # The pool is left first: no thread may write to a descriptor that is closed.
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(threads) as pool:
        descriptor = file.fileno()

        def write(block: Block) -> int:
            write_at(descriptor, block.draw(seed).data, block.offset)
            return block.nbytes

        os.ftruncate(descriptor, shard.plan.nbytes)
        write_at(descriptor, shard.plan.header, 0)
        yield len(shard.plan.header)
        yield from pool.map(write, shard.blocks())
        os.fsync(descriptor)


def _write_texts(partial: Path, kind: str, index: Iterable[str]) -> None:
    config = KINDS[kind]
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_text(partial / INDEX_FILE, index)
    _write_text(partial / "generation_config.json", [json.dumps(generation, indent=2), "\n"])
    _write_text(partial / "config.json", [json.dumps(config, indent=2), "\n"])
    if kind != _SPARSE:
        write_vocabulary(partial, config["text_config"]["vocab_size"])


def _write_text(path: Path, pieces: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
