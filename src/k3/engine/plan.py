"""The memory plan: what a run will hold, itemised before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from k3.checkpoint.config import ModelConfig
from k3.errors import MachineError
from k3.model.state import KdaState, MlaCache

_USABLE_SHARE = 0.9
"""Of the memory that the machine calls available; the rest is left to everything else that runs."""

_WORKING_BUFFERS = 64 << 20
"""Read buffers and the kernels' scratch."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the bound weights: the trunk with the head (without the embedding), and all routed experts."""

    trunk: int
    experts: int
    largest_expert: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a run holds in memory, in bytes by item, and what follows from it.

    Weights that are not resident are read each time they are needed. `context` is the room of a sequence in positions.
    """

    items: dict[str, int]
    trunk_resident: bool
    experts_resident: bool
    context: int
    chunk: int

    @property
    def total_bytes(self) -> int:
        return sum(self.items.values())


def usable_memory() -> int:
    """Bytes that a run may take on this machine now, what this process holds already included."""
    return int(_USABLE_SHARE * psutil.virtual_memory().available) + psutil.Process().memory_info().rss


def plan_memory(
    config: ModelConfig, weights: WeightBytes, *, layers: int, chunk: int, context: int | None, usable: int
) -> MemoryPlan:
    """Plan one sequence in `usable` bytes: experts and trunk become resident where they fit, the trunk first.

    Without `context` it is the smaller of the model's limit and what fits in half of the memory left over.

    Raises:
        MachineError: even reading everything on demand does not fit.
    """
    kda_layers = sum(config.is_kda(index) for index in range(layers))
    per_position = (layers - kda_layers) * MlaCache.nbytes_per_position(config)
    items = {
        "interpreter, libraries, index": psutil.Process().memory_info().rss,
        "working buffers": _WORKING_BUFFERS + weights.largest_expert,
        "activations": chunk * _activation_bytes(config),
        "recurrent states": kda_layers * KdaState.nbytes(config),
        "latent cache": per_position * (context or 1),
    }
    needed = sum(items.values())
    if needed > usable:
        raise MachineError(_refusal(items, usable))
    trunk_resident = needed + weights.trunk <= usable
    experts_resident = trunk_resident and needed + weights.trunk + weights.experts <= usable
    items["trunk and head"] = weights.trunk if trunk_resident else 0
    items["experts"] = weights.experts if experts_resident else 0
    if context is None:
        context = config.max_position_embeddings
        if per_position:
            left = usable - sum(items.values())
            context = max(1, min(context, left // 2 // per_position))
        items["latent cache"] = per_position * context
    return MemoryPlan(items, trunk_resident, experts_resident, context, chunk)


def _activation_bytes(config: ModelConfig) -> int:
    """Bytes that one row of a step takes at its widest: the residual stream and one layer's intermediate values."""
    attention = max(8 * config.kda_projection_size, 2 * config.mla_query_size + 4 * config.mla_output_size)
    routed = 2 * config.num_experts_per_token * config.routed_expert_hidden_size + 3 * config.num_experts
    feed_forward = max(3 * config.intermediate_size, routed + 3 * config.shared_intermediate_size)
    stream = (config.num_snapshots + 6) * config.hidden_size
    return 4 * (stream + max(attention, feed_forward, 2 * config.vocab_size))


def _refusal(items: dict[str, int], usable: int) -> str:
    listed = "; ".join(f"{name} {nbytes / 1e9:.2f} GB" for name, nbytes in items.items())
    short = (sum(items.values()) - usable) / 1e9
    return (
        f"the run needs {sum(items.values()) / 1e9:.2f} GB of memory ({listed}), {usable / 1e9:.2f} GB are available: "
        f"{short:.2f} GB are missing. Ask for a smaller context (--context) or chunk (--chunk), or free memory."
    )
