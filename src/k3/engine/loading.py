"""From a checkpoint directory to an engine: read headers, plan, then load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from pathlib import Path

from k3.checkpoint.config import ModelConfig
from k3.checkpoint.index import SYNTHETIC_MARK, TensorIndex
from k3.checkpoint.layout import Layout, bind, count_layers, wanted_tensors
from k3.checkpoint.specs import EMBEDDING, HEAD
from k3.engine.costs import Costs
from k3.engine.engine import Engine
from k3.engine.machine import group_memory, memory_limit
from k3.engine.plan import MemoryPlan, MemoryRequest, Needs, plan_memory
from k3.engine.states.file import IdentityOf
from k3.engine.states.identity import ModelIdentity
from k3.engine.trunk import TrunkMatrix, packed_matrices, plain_matrices
from k3.engine.weights import RoutedExperts, Trunk
from k3.errors import UsageError
from k3.kernels import Kernels
from k3.model.transformer import Transformer
from k3.model.weights import ExpertSource
from k3.storage.expert_cache import ExpertCache
from k3.storage.packed import open_trunk
from k3.storage.policies import RankRecency
from k3.storage.reader import Reader
from k3.storage.stream import Progress, WeightStream


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a checkpoint. `layers` binds the first layers only; `config` replaces the checkpoint's own file.

    `trunk` is a packed trunk. Shards may also lie in `extra_dirs`. `direct` reads past the page cache where the file
    system lets it.
    """

    memory: MemoryRequest = field(default_factory=MemoryRequest)
    threads: int | None = None
    isa: str | None = None
    layers: int | None = None
    config: Path | None = None
    trunk: Path | None = None
    extra_dirs: tuple[Path, ...] = ()
    direct: bool = True


@dataclass(frozen=True, slots=True)
class LoadEvents:
    """What a loader tells while it works: the plan before anything is allocated, then bytes loaded and in all."""

    on_plan: Callable[[MemoryPlan], None] = field(default=lambda *_: None)
    on_bytes: Progress = field(default=lambda *_: None)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and the reader of its weights; close `reader` when done."""

    engine: Engine
    reader: Reader


@dataclass(frozen=True, slots=True)
class Bound:
    """A checkpoint whose headers were read and found right: where its bytes lie, in the order of use."""

    config: ModelConfig
    layout: Layout
    layers: int
    matrices: dict[str, TrunkMatrix]
    synthetic: bool

    @property
    def needs(self) -> Needs:
        """What a memory plan asks."""
        layout = self.layout
        return Needs(
            self.config,
            self.layers,
            [matrix.stored for matrix in self.matrices.values()],
            small_bytes=_small_bytes(layout),
            expert_bytes=layout.largest_expert_bytes,
            experts=sum(len(table) for table in layout.experts.values()),
        )


def bind_checkpoint(model_dir: Path, options: LoadOptions) -> Bound:
    """Read config and headers, and check them.

    Raises:
        UsageError: an option is out of its range, or there is no such directory.
        ConfigError, CheckpointError: the checkpoint is not one that this engine computes exactly, or the packed
            trunk is not its own.
    """
    config = read_config(model_dir, options.config)
    _check(options, config)
    layers = count_layers(config, options.layers)
    index = TensorIndex.open(model_dir, wanted_tensors(config, layers), extra_dirs=options.extra_dirs)
    layout = bind(index, config, layers)
    synthetic = index.metadata.get(SYNTHETIC_MARK) is True
    if options.trunk is None:
        return Bound(config, layout, layers, plain_matrices(layout), synthetic)
    trunk = open_trunk(options.trunk, model_dir, layout, options.config)
    return Bound(config, layout, layers, packed_matrices(trunk), synthetic)


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """All that can be known before weights are read."""

    bound: Bound
    ops: Kernels
    plan: MemoryPlan
    direct: bool
    identity: IdentityOf


def prepare_engine(model_dir: Path, options: LoadOptions) -> PreparedEngine:
    """Bind the checkpoint in `model_dir` and plan its memory.

    Raises:
        K3Error: as `bind_checkpoint`.
        MachineError: the memory or an instruction set is missing.
    """
    bound = bind_checkpoint(model_dir, options)
    ops = Kernels(options.threads, options.isa)
    plan = plan_memory(bound.needs, options.memory, memory_limit(options.memory.total, group_memory()))
    identity = cache(partial(ModelIdentity.of, model_dir, bound.layout, options.config))
    return PreparedEngine(bound, ops, plan, options.direct, identity)


def load_engine(prepared: PreparedEngine, events: LoadEvents) -> LoadedEngine:
    """Load the weights that the plan keeps.

    Raises:
        ReadError: a tensor could not be read.
    """
    bound, plan = prepared.bound, prepared.plan
    events.on_plan(plan)
    reader = Reader(direct=prepared.direct)
    try:
        stored = [matrix.stored for matrix in bound.matrices.values()]
        stream = WeightStream(reader, stored, plan.pinned, plan.ring_bytes, events.on_bytes)
        trunk = Trunk(bound.layout, bound.matrices, stream, reader)
        transformer = Transformer(bound.config, trunk, bound.layers)
        kept = _expert_cache(bound, plan, reader, events.on_bytes)
        experts: ExpertSource = RoutedExperts(kept)
    except BaseException:
        reader.close()
        raise

    def costs() -> Costs:
        counts = kept.counts
        return Costs(
            reader.bytes_read(),
            reader.padding_bytes(),
            counts.requests,
            counts.resident_hits,
            trunk.wait_seconds,
            kept.wait_seconds,
            reader.delivered_bytes(),
            reader.busy_seconds(),
        )

    engine = Engine(prepared.ops, transformer, experts, plan.context, costs, prepared.identity)
    return LoadedEngine(engine, reader)


def read_config(model_dir: Path, config: Path | None = None) -> ModelConfig:
    """The config of a checkpoint directory, or the one in the file `config`."""
    if not model_dir.is_dir():
        raise UsageError(
            f"{model_dir}: expected a checkpoint directory (config.json, *.safetensors), found "
            f"{'a file' if model_dir.exists() else 'nothing'}. The word `demo` names the embedded model."
        )
    return ModelConfig.read(config or model_dir / "config.json")


def _check(options: LoadOptions, config: ModelConfig) -> None:
    context, chunk = options.memory.context, options.memory.chunk
    if context is not None and not 2 <= context <= config.max_position_embeddings:
        raise UsageError(
            f"--context: expected 2 to the model's limit of {config.max_position_embeddings} positions, "
            f"found {context}."
        )
    if chunk is not None and chunk < 1:
        raise UsageError(f"--chunk: expected a whole number from 1 up, found {chunk}.")


def _expert_cache(bound: Bound, plan: MemoryPlan, reader: Reader, progress: Progress) -> ExpertCache:
    """The expert cache; filled at once where it has room for every expert."""
    policy = RankRecency(plan.expert_slots, bound.layout.moe_layers)
    kept = ExpertCache(reader, bound.layout, policy, max(1, plan.arrivals))
    if plan.expert_slots == bound.needs.experts:
        kept.load_all(progress)
    return kept


def _small_bytes(layout: Layout) -> int:
    """Bytes of all small tensors as they are kept, in float32."""

    def elements() -> Iterator[int]:
        for layer in layout.layers:
            for spec in layer.specs:
                if spec.role == "small":
                    yield prod(spec.shape)
        for name, entry in layout.top.items():
            if name not in (EMBEDDING, HEAD):
                yield prod(entry.shape)

    return 4 * sum(elements())
