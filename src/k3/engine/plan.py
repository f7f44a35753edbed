"""The memory plan: what a run will hold, itemised before anything is allocated.

`--memory` is a promise about the peak. What a run can't do without comes first; what is left over goes to weights kept
in memory: first to pins of the trunk, then to experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from k3.checkpoint.config import ModelConfig
from k3.engine.machine import resident_bytes
from k3.errors import MachineError
from k3.model.state import KdaState, MlaCache
from k3.storage.reader import PAGE, aligned_span
from k3.storage.stream import StoredBlock, StoredMatrix, pinned_blocks, pinned_bytes

GROWTH = 24 << 20
"""What the interpreter, its libraries and the threads still add to what they hold when the plan is made."""

_KERNEL_ROWS = 64
"""Rows of x that a product packs at once."""

_KERNEL_SCRATCH = 8 << 20
"""Scores and partial sums of all threads."""

RING_SIZES = (1 << 30, 512 << 20, 256 << 20, 128 << 20, 64 << 20, 32 << 20)
"""While a layer's experts are on their way the stream goes on into the ring; once a ring is full the drive rests."""

_ENOUGH_RING = 256 << 20
"""What is given up before the chunk shrinks."""

CHUNKS = (64, 32, 16, 8, 4, 2, 1)
"""Prompt rows a step, while memory is short."""

LONG_CHUNKS = (1024, 512, 256, 128)
"""Prompt rows a step where there is memory: a prompt reads its weights once a chunk."""

_SHARE_OF_LONG_CHUNKS = 4
"""A long chunk takes at most this part of what is left over: it costs every token what the pins would have saved."""

SCORED_ROWS = 64
"""Rows of a step whose logits may all be asked for."""


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What the user asked for. `trunk_bytes` and `cache_bytes` fix a share by hand; None leaves it to the plan.

    `sequences` of them live at a time, each with room for `context` positions.
    """

    total: int | None = None
    trunk_bytes: int | None = None
    cache_bytes: int | None = None
    cache_experts: int | None = None
    context: int | None = None
    chunk: int | None = None
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Needs:
    """The facts that a plan is made of. `matrices` is the walk; experts count all bound layers."""

    config: ModelConfig
    layers: int
    matrices: Sequence[StoredMatrix]
    small_bytes: int
    expert_bytes: int
    experts: int

    @property
    def kda_layers(self) -> int:
        return sum(self.config.is_kda(index) for index in range(self.layers))

    @property
    def bytes_per_position(self) -> int:
        """Latent cache of one position, all bound MLA layers."""
        return (self.layers - self.kda_layers) * MlaCache.nbytes_per_position(self.config)

    @property
    def state_bytes(self) -> int:
        """Recurrent states and convolution tails of one sequence."""
        return self.kda_layers * KdaState.nbytes(self.config)

    @property
    def matrix_bytes(self) -> int:
        """Stored bytes of the walk."""
        return sum(block.nbytes for matrix in self.matrices for block in matrix.blocks)

    @property
    def largest_block(self) -> int:
        """Pages of the largest block of the walk, in bytes."""
        return max(aligned_span(b.offset, b.nbytes) for matrix in self.matrices for b in matrix.blocks)

    @property
    def expert_buffer(self) -> int:
        """Pages that hold an expert wherever it begins, in bytes."""
        return -(-self.expert_bytes // PAGE) * PAGE + PAGE if self.experts else 0


@dataclass(frozen=True)
class MemoryPlan:
    """What a run holds in memory, in bytes by item, and what follows from it.

    `trunk_budget` bounds the stored bytes of trunk and head kept between tokens, `expert_slots` the experts kept;
    `arrivals` experts may be on their way at once. `context` is the room of a sequence in positions.
    """

    items: dict[str, int]
    limit: int
    context: int
    chunk: int
    ring_bytes: int
    trunk_budget: int
    expert_slots: int
    arrivals: int
    pinned: frozenset[StoredBlock] = field(repr=False, default=frozenset())

    @property
    def total_bytes(self) -> int:
        return sum(self.items.values())

    @property
    def scored_chunk(self) -> int:
        """Prompt rows of a step that gives the logits of all of them."""
        return min(self.chunk, SCORED_ROWS)


def plan_memory(needs: Needs, request: MemoryRequest, limit: int) -> MemoryPlan:
    """Plan the asked-for sequences within `limit` bytes.

    Without a chunk it is the largest of CHUNKS that leaves the run feasible, or one of LONG_CHUNKS where that takes
    at most a quarter of what is left over; without a context it is the smaller of the model's limit and what fits in
    half of the memory left over.

    Raises:
        MachineError: it does not fit; the message has the items and the shortfall.
    """
    smallest: MemoryPlan | None = None
    for attempt in _attempts(needs, request):
        if attempt.total_bytes <= limit:
            return _spend(needs, request, attempt, limit)
        smallest = attempt
    assert smallest is not None
    raise MachineError(_refusal(smallest.items, limit))


def _attempts(needs: Needs, request: MemoryRequest) -> Sequence[MemoryPlan]:
    """Plans of the bare minimum, the most comfortable first."""
    context = request.context or needs.config.max_position_embeddings
    chunks = tuple(
        dict.fromkeys(min(rows, context) for rows in (CHUNKS if request.chunk is None else (request.chunk,)))
    )
    top_k = needs.config.num_experts_per_token
    arrivals = [n for n in dict.fromkeys((top_k, top_k // 2, top_k // 4, 2, 1)) if n] if needs.experts else [0]
    steps = [(chunks[0], ring, arrivals[0]) for ring in RING_SIZES if ring >= _ENOUGH_RING]
    steps += [(chunk, _ENOUGH_RING, arrivals[0]) for chunk in chunks[1:]]
    steps += [(chunks[-1], ring, arrivals[0]) for ring in RING_SIZES if ring < _ENOUGH_RING]
    steps += [(chunks[-1], RING_SIZES[-1], count) for count in arrivals[1:]]
    return [_minimum(needs, request, *step) for step in steps]


def _minimum(needs: Needs, request: MemoryRequest, chunk: int, ring: int, arrivals: int) -> MemoryPlan:
    trunk = request.trunk_bytes or 0
    slots = _asked_slots(needs, request) or 0
    pinned = pinned_blocks(needs.matrices, trunk)
    ring = _ring_bytes(needs, ring, pinned)
    items = {
        "interpreter, libraries, index": resident_bytes() + GROWTH,
        "norms and other small tensors": needs.small_bytes,
        "recurrent states": needs.state_bytes * request.sequences,
        "latent cache": needs.bytes_per_position * request.sequences * (request.context or 2),
        "activations": _step_bytes(needs, request, chunk),
        "ring": ring,
        "arriving experts": arrivals * needs.expert_buffer,
        "trunk and head kept": pinned_bytes(needs.matrices, pinned),
        "experts kept": slots * needs.expert_buffer,
    }
    return MemoryPlan(items, 0, request.context or 2, chunk, ring, trunk, slots, arrivals, pinned)


def _spend(needs: Needs, request: MemoryRequest, minimum: MemoryPlan, limit: int) -> MemoryPlan:
    """Give what is left over to a longer chunk, the context, the pins and the experts, in this order."""
    items = dict(minimum.items)
    left = limit - minimum.total_bytes
    chunk = _longest_chunk(needs, request, minimum, left // _SHARE_OF_LONG_CHUNKS)
    items["activations"] = _step_bytes(needs, request, chunk)
    left -= items["activations"] - minimum.items["activations"]
    context = minimum.context
    if request.context is None:
        context = needs.config.max_position_embeddings
        row = needs.bytes_per_position * request.sequences
        if row:
            context = min(context, max(2, left // 2 // row))
        items["latent cache"] = row * context
        left -= items["latent cache"] - minimum.items["latent cache"]
    trunk, pinned, ring = minimum.trunk_budget, minimum.pinned, minimum.ring_bytes
    if request.trunk_bytes is None:
        trunk, pinned = _largest_pins(needs, left + ring, ring)
        ring = _ring_bytes(needs, ring, pinned)
        left += items["ring"] - ring - pinned_bytes(needs.matrices, pinned)
        items |= {"ring": ring, "trunk and head kept": pinned_bytes(needs.matrices, pinned)}
    slots = minimum.expert_slots
    if _asked_slots(needs, request) is None and needs.experts:
        slots = min(needs.experts, left // needs.expert_buffer)
        items["experts kept"] = slots * needs.expert_buffer
    return MemoryPlan(items, limit, context, chunk, ring, trunk, slots, minimum.arrivals, pinned)


def _longest_chunk(needs: Needs, request: MemoryRequest, minimum: MemoryPlan, room: int) -> int:
    """The minimum's chunk, or a longer one that takes at most `room` bytes more."""
    if request.chunk is not None or minimum.chunk < CHUNKS[0]:
        return minimum.chunk
    context = request.context or needs.config.max_position_embeddings
    for chunk in (min(rows, context) for rows in LONG_CHUNKS):
        if _step_bytes(needs, request, chunk) - minimum.items["activations"] <= room:
            return chunk
    return minimum.chunk


def _largest_pins(needs: Needs, room: int, ring: int) -> tuple[int, frozenset[StoredBlock]]:
    """About the largest budget whose pins, in whole pages, and the ring for the rest fit in `room` bytes."""
    low, high = 0, min(room, needs.matrix_bytes) + 1
    best = (0, pinned_blocks(needs.matrices, 0))
    budget = high - 1
    while high - low > needs.largest_block // 8:
        pinned = pinned_blocks(needs.matrices, budget)
        if pinned_bytes(needs.matrices, pinned) + _ring_bytes(needs, ring, pinned) <= room:
            low, best = budget, (budget, pinned)
        else:
            high = budget
        budget = (low + high) // 2
    return best


def _ring_bytes(needs: Needs, wanted: int, pinned: frozenset[StoredBlock]) -> int:
    """The ring's size: no larger than what flows through it, and room for two of the largest blocks at least."""
    flowing = [b for matrix in needs.matrices for b in matrix.blocks if b not in pinned]
    spans = [aligned_span(b.offset, b.nbytes) for b in flowing]
    return min(max(wanted, 2 * max(spans)), sum(spans)) if spans else 0


def _asked_slots(needs: Needs, request: MemoryRequest) -> int | None:
    asked = request.cache_experts
    if request.cache_bytes is not None and needs.expert_bytes:
        asked = request.cache_bytes // needs.expert_bytes
    return None if asked is None else min(asked, needs.experts)


def _step_bytes(needs: Needs, request: MemoryRequest, chunk: int) -> int:
    """What a step's rows take while they are computed: a prompt's chunk, and a token of each other sequence."""
    rows = chunk + request.sequences - 1
    logits = 4 * min(rows, SCORED_ROWS) * needs.config.vocab_size
    return rows * _activation_bytes(needs.config) + logits + _kernel_bytes(needs.config, rows)


def _kernel_bytes(config: ModelConfig, chunk: int) -> int:
    """Working memory of the kernels (packed rows of the widest matrix, scratch) and of choosing a token."""
    columns = max(config.hidden_size, config.intermediate_size, config.kda_projection_size, config.mla_output_size)
    return 4 * min(chunk, _KERNEL_ROWS) * columns + _KERNEL_SCRATCH + 40 * config.vocab_size


def _activation_bytes(config: ModelConfig) -> int:
    """Bytes that one row of a step takes at its widest: the residual stream and one layer's intermediate values."""
    attention = max(9 * config.kda_projection_size, 2 * config.mla_query_size + 4 * config.mla_output_size)
    routed = 2 * config.num_experts_per_token * config.routed_expert_hidden_size + 4 * config.num_experts
    inner = 6 * config.moe_intermediate_size
    feed_forward = max(3 * config.intermediate_size, routed + inner + 4 * config.shared_intermediate_size)
    stream = (config.num_snapshots + 8) * config.hidden_size
    return 4 * (stream + max(attention, feed_forward))


def _refusal(items: dict[str, int], limit: int) -> str:
    listed = "; ".join(f"{name} {nbytes / 1e9:.3f} GB" for name, nbytes in items.items() if nbytes)
    needed = sum(items.values())
    return (
        f"the run needs {needed / 1e9:.3f} GB of memory ({listed}), and {limit / 1e9:.3f} GB are to be had: "
        f"{(needed - limit) / 1e9:.3f} GB are missing. Give it more with --memory, keep less with --trunk-gb and "
        "--cache-gb, or ask for a smaller --context or --chunk."
    )
