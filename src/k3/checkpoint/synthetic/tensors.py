"""The tensors of a synthetic checkpoint: names, shapes and dtypes as released, and how values are drawn.

Every value is a 16-bit random word looked up in a table of 65,536 values, which is the distribution: the
quantiles of a normal one for most tensors, bell-shaped pairs of FP4 codes for experts. The words come from a
counter-based stream per tensor (Philox4x64-10), so bytes depend on the seed and the tensor's name only.

Scales are chosen such that activations keep their size from layer to layer, routers choose diverse experts
and logits spread by a few units.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import log2, sqrt
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from k3.checkpoint.released import vision_shards
from k3.checkpoint.synthetic.shards import DTYPE_BYTES, StoredTensor

SPECIAL_SLOTS = 256
"""Ids at the end of the vocabulary that stand for control tokens."""

_BLOCK = 1 << 19
_NAMES = "language_model."

# --- distributions ---


@dataclass(frozen=True, slots=True)
class Bell:
    """Normal values."""

    std: float
    mean: float = 0.0


@dataclass(frozen=True, slots=True)
class Even:
    """Values spread evenly from `low` to `high`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Codes:
    """Bytes of two FP4 codes each, bell-shaped around zero, standard deviation 2."""


@dataclass(frozen=True, slots=True)
class Scales:
    """E8M0 bytes: `middle` half of the time, else one below or above it."""

    middle: int


@dataclass(frozen=True, slots=True)
class Hole:
    """Zeros that are not written."""


Distribution: TypeAlias = Bell | Even | Codes | Scales | Hole


@lru_cache(maxsize=1)
def _quantiles() -> npt.NDArray[np.float64]:
    """65,536 equally likely values of the standard normal distribution, ascending and symmetric."""
    normal = NormalDist()
    lower = np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(32768)])
    return np.concatenate([lower, -lower[::-1]])


def _nibbles() -> npt.NDArray[np.uint8]:
    """FP4 codes of 256 equally likely normal values; bit 3 is the sign, so -0 is as common as 0."""
    values = 2.0 * _quantiles()[128::256]
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = np.abs(np.abs(values)[:, None] - magnitudes).argmin(axis=1)
    return np.asarray(nearest + 8 * (values < 0), dtype=np.uint8)


def round_to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; finite values only."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@lru_cache(maxsize=256)
def _table(distribution: Distribution, dtype: str) -> npt.NDArray[Any]:
    """What each 16-bit word stands for, as stored: uint16 bits of BF16, float32 or uint8 [65536]."""
    match distribution:
        case Codes():
            nibbles = _nibbles()
            return (nibbles[:, None] << 4 | nibbles[None, :]).reshape(-1)
        case Scales(middle):
            return np.repeat(np.array([middle - 1, middle, middle, middle + 1], dtype=np.uint8), 16384)
        case Bell(std, mean):
            values = (mean + std * _quantiles()).astype(np.float32)
        case Hole():
            raise ValueError("holes have no values")
        case Even(low, high):
            values = (low + (high - low) * (np.arange(65536) + 0.5) / 65536).astype(np.float32)
    return round_to_bf16(values) if dtype == "BF16" else values


# --- tensors ---


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor and how its elements are drawn: `parts` are counts of elements in storage order."""

    spec: StoredTensor
    parts: tuple[tuple[int, Distribution], ...]

    @property
    def written_bytes(self) -> int:
        """Bytes that are written: all but the holes."""
        written = sum(count for count, distribution in self.parts if distribution != Hole())
        return written * DTYPE_BYTES[self.spec.dtype]


def _drawn(name: str, dtype: str, shape: tuple[int, ...], distribution: Distribution) -> Tensor:
    spec = StoredTensor(name, dtype, shape)
    return Tensor(spec, ((spec.count, distribution),))


def _linear(name: str, rows: int, cols: int, gain: float = 1.0) -> Tensor:
    """A projection that keeps the size of its input, times `gain`."""
    return _drawn(f"{name}.weight", "BF16", (rows, cols), Bell(gain / sqrt(cols)))


def _norm(name: str, size: int, dtype: str = "BF16") -> Tensor:
    return _drawn(f"{name}.weight", dtype, (size,), Bell(0.1, mean=1.0))


def _mixer(name: str, hidden: int) -> Iterator[Tensor]:
    yield _norm(f"{name}_norm", hidden)
    yield _linear(f"{name}_proj", 1, hidden)


def _kda(at: str, c: dict[str, Any]) -> Iterator[Tensor]:
    linear, hidden = c["linear_attn_config"], c["hidden_size"]
    heads, width = linear["num_heads"], linear["head_dim"]
    channels = heads * width
    for name in ("q", "k", "v"):
        yield _linear(f"{at}{name}_proj", channels, hidden)
        taps = (channels, 1, linear["short_conv_kernel_size"])
        yield _drawn(f"{at}{name}_conv1d.weight", "F32", taps, Bell(0.5))
    yield _linear(f"{at}g_proj", channels, hidden)
    yield _linear(f"{at}o_proj", hidden, channels, gain=2.0)
    yield _linear(f"{at}f_a_proj", width, hidden)
    yield _linear(f"{at}f_b_proj", channels, width)
    yield _linear(f"{at}b_proj", heads, hidden)
    # One value per head, in the range of the released ones, then zeros up to the width of a head.
    padding = max(width - heads, 0)
    a_log = StoredTensor(f"{at}A_log", "F32", (heads + padding,))
    yield Tensor(a_log, ((heads, Even(-0.47, 1.01)), (padding, Even(0.0, 0.0))))
    # Log decays of about -0.002 to -0.5 a token where the projection is zero.
    yield _drawn(f"{at}dt_bias", "F32", (channels,), Even(-7.8, -2.2))
    yield _norm(f"{at}o_norm", width, "F32")


def _mla(at: str, c: dict[str, Any]) -> Iterator[Tensor]:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, v_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield _linear(f"{at}q_a_proj", c["q_lora_rank"], hidden)
    yield _norm(f"{at}q_a_layernorm", c["q_lora_rank"])
    yield _linear(f"{at}q_b_proj", heads * (nope + rope), c["q_lora_rank"])
    yield _linear(f"{at}kv_a_proj_with_mqa", rank + rope, hidden)
    yield _norm(f"{at}kv_a_layernorm", rank)
    yield _linear(f"{at}kv_b_proj", heads * (nope + v_dim), rank)
    yield _linear(f"{at}g_proj", heads * v_dim, hidden)
    yield _linear(f"{at}o_proj", hidden, heads * v_dim, gain=2.0)


def _mlp(at: str, hidden: int, width: int) -> Iterator[Tensor]:
    yield _linear(f"{at}gate_proj", width, hidden)
    yield _linear(f"{at}up_proj", width, hidden)
    yield _linear(f"{at}down_proj", hidden, width)


def _packed(name: str, rows: int, cols: int) -> Iterator[Tensor]:
    """An MXFP4 matrix that keeps the size of its input: codes have standard deviation 2."""
    middle = 127 + round(log2(0.5 / sqrt(cols)))
    yield _drawn(f"{name}.weight_packed", "U8", (rows, cols // 2), Codes())
    yield _drawn(f"{name}.weight_scale", "U8", (rows, cols // 32), Scales(middle))


def _moe(at: str, c: dict[str, Any]) -> Iterator[Tensor]:
    hidden, latent, width = c["hidden_size"], c["routed_expert_hidden_size"], c["moe_intermediate_size"]
    yield _linear(f"{at}gate", c["num_experts"], hidden, gain=1.5)
    yield _drawn(f"{at}gate.e_score_correction_bias", "F32", (c["num_experts"],), Bell(0.05))
    yield _linear(f"{at}routed_expert_down_proj", latent, hidden)
    yield _norm(f"{at}routed_expert_norm", latent)
    yield _linear(f"{at}routed_expert_up_proj", hidden, latent)
    yield from _mlp(f"{at}shared_experts.", hidden, width * c["num_shared_experts"])
    for number in range(c["num_experts"]):
        yield from _packed(f"{at}experts.{number}.w1", width, latent)
        yield from _packed(f"{at}experts.{number}.w3", width, latent)
        yield from _packed(f"{at}experts.{number}.w2", latent, width)


def _layer(index: int, c: dict[str, Any]) -> Iterator[Tensor]:
    at, hidden = f"{_NAMES}model.layers.{index}.", c["hidden_size"]
    yield _norm(f"{at}input_layernorm", hidden)
    yield _norm(f"{at}post_attention_layernorm", hidden)
    yield from _mixer(f"{at}self_attention_res", hidden)
    yield from _mixer(f"{at}mlp_res", hidden)
    is_kda = index + 1 in c["linear_attn_config"]["kda_layers"]
    yield from (_kda if is_kda else _mla)(f"{at}self_attn.", c)
    if index < c["first_k_dense_replace"]:
        yield from _mlp(f"{at}mlp.", hidden, c["intermediate_size"])
    else:
        yield from _moe(f"{at}block_sparse_moe.", c)


def _top(c: dict[str, Any]) -> Iterator[Tensor]:
    vocabulary, hidden = c["vocab_size"], c["hidden_size"]
    yield _drawn(f"{_NAMES}model.embed_tokens.weight", "BF16", (vocabulary, hidden), Bell(1.0))
    yield _norm(f"{_NAMES}model.norm", hidden)
    yield from _mixer(f"{_NAMES}model.output_attn_res", hidden)
    # Control tokens get small logits, so that a random model does not end its text by chance.
    special = SPECIAL_SLOTS * hidden
    head = StoredTensor(f"{_NAMES}lm_head.weight", "BF16", (vocabulary, hidden))
    ordinary, damped = Bell(2.5 / sqrt(hidden)), Bell(0.25 / sqrt(hidden))
    yield Tensor(head, ((head.count - special, ordinary), (special, damped)))


def shard_tensors(config: dict[str, Any]) -> Iterator[list[Tensor]]:
    """The tensors of each shard of a `config.json`: layer N in shard N + 1, the top level in the last."""
    text = config["text_config"]
    for layer in range(text["num_hidden_layers"]):
        yield list(_layer(layer, text))
    yield list(_top(text))


# --- sparse checkpoints ---

WRITTEN_IDS = 64
"""Token ids, from 0 on, whose embeddings a sparse checkpoint holds."""
_ROUTER = ".block_sparse_moe.gate.weight"


def sparse(tensor: Tensor) -> Tensor:
    """The tensor with holes in place of nearly all that is large.

    Norms are 1. The first embeddings and the routers are drawn, so that routing differs by token and layer.
    """
    spec = tensor.spec
    if spec.name.endswith("norm.weight"):
        return _drawn(spec.name, spec.dtype, spec.shape, Even(1.0, 1.0))
    if spec.name.endswith(_ROUTER):
        return _drawn(spec.name, spec.dtype, spec.shape, Bell(0.02))
    if spec.name.endswith("embed_tokens.weight"):
        drawn = min(WRITTEN_IDS, spec.shape[0]) * spec.shape[1]
        return Tensor(spec, ((drawn, Bell(1.0)), (spec.count - drawn, Hole())))
    return Tensor(spec, ((spec.count, Hole()),))


def vision_tensors() -> Iterator[list[Tensor]]:
    """What the released files hold beside the text model, as placeholders of one dimension, for each of two shards."""
    for shard in vision_shards():
        yield [_drawn(name, "BF16", (count,), Hole()) for name, count in shard.items()]


# --- values ---


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of one tensor, small enough to be held in memory.

    `number` counts within the tensor, `offset` is where it goes in the shard.
    """

    name: str
    number: int
    count: int
    table: npt.NDArray[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        return self.count * self.table.itemsize

    def draw(self, seed: int) -> npt.NDArray[Any]:
        """The values, which depend on nothing but the seed, the tensor's name and the block's number."""
        stream = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little")
        words = np.random.Philox(key=[seed, stream], counter=[0, 0, 0, self.number])
        index = words.random_raw(-(-self.count // 4)).view(np.uint16)[: self.count]
        return np.take(self.table, index)


def tensor_blocks(tensor: Tensor, offset: int) -> Iterator[Block]:
    """The tensor, of which the first byte lies at `offset`, in pieces and without its holes."""
    number = 0
    for count, distribution in tensor.parts:
        if distribution == Hole():
            offset += count * DTYPE_BYTES[tensor.spec.dtype]
            continue
        table = _table(distribution, tensor.spec.dtype)
        for start in range(0, count, _BLOCK):
            block = Block(tensor.spec.name, number, min(_BLOCK, count - start), table, offset)
            yield block
            number, offset = number + 1, offset + block.nbytes
