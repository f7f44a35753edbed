"""From a checkpoint directory to an engine: read headers, plan, then load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from k3.checkpoint.config import ModelConfig
from k3.checkpoint.index import TensorEntry, TensorIndex
from k3.checkpoint.layout import Layout, bind, count_layers, wanted_tensors
from k3.checkpoint.specs import HEAD
from k3.engine.costs import Costs
from k3.engine.engine import Engine
from k3.engine.generation import DEFAULT_CHUNK
from k3.engine.plan import MemoryPlan, WeightBytes, plan_memory, usable_memory
from k3.engine.weights import RoutedExperts, Trunk
from k3.errors import UsageError
from k3.kernels import Kernels
from k3.model.transformer import Transformer
from k3.storage.experts import ExpertStore, OnDemandExperts, ResidentExperts
from k3.storage.reader import ByteClass, Reader
from k3.storage.tensors import OnDemandTensors, Progress, ResidentTensors, TensorStore


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a checkpoint. `layers` binds the first layers only; `config` replaces the checkpoint's own file."""

    threads: int | None = None
    isa: str | None = None
    chunk: int = DEFAULT_CHUNK
    context: int | None = None
    layers: int | None = None
    config: Path | None = None


@dataclass(frozen=True, slots=True)
class LoadEvents:
    """What a loader tells while it works: the plan before anything is allocated, then bytes loaded and in all."""

    on_plan: Callable[[MemoryPlan], None] = field(default=lambda *_: None)
    on_bytes: Progress = field(default=lambda *_: None)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what it was made from; close `reader` when done."""

    engine: Engine
    config: ModelConfig
    plan: MemoryPlan
    reader: Reader


def load_engine(model_dir: Path, options: LoadOptions, events: LoadEvents) -> LoadedEngine:
    """Bind the checkpoint in `model_dir` and load what fits in memory.

    Raises:
        UsageError: an option is out of its range, or there is no such directory.
        ConfigError, CheckpointError: the checkpoint is not one that this engine computes exactly.
        MachineError: the memory or an instruction set is missing.
        ReadError: a tensor could not be read.
    """
    config = read_config(model_dir, options.config)
    _check(options, config)
    layers = count_layers(config, options.layers)
    layout = bind(TensorIndex.open(model_dir, wanted_tensors(config, layers)), config, layers)
    ops = Kernels(options.threads, options.isa)
    plan = plan_memory(
        config,
        WeightBytes(layout.trunk_bytes, layout.expert_bytes, layout.largest_expert_bytes),
        layers=layers,
        chunk=options.chunk,
        context=options.context,
        usable=usable_memory(),
    )
    events.on_plan(plan)
    reader = Reader()
    try:
        tensors, experts = _stores(layout, plan, reader, events.on_bytes)
        transformer = Transformer(config, Trunk(layout, tensors, reader), layers)
    except BaseException:
        reader.close()
        raise
    routed = RoutedExperts(experts)

    def costs() -> Costs:
        return Costs(reader.bytes_read(), routed.requests, routed.resident_hits)

    return LoadedEngine(Engine(ops, transformer, routed, plan.context, costs), config, plan, reader)


def read_config(model_dir: Path, config: Path | None = None) -> ModelConfig:
    """The config of a checkpoint directory, or the one in the file `config`."""
    if not model_dir.is_dir():
        raise UsageError(
            f"{model_dir}: expected a checkpoint directory (config.json, *.safetensors), found "
            f"{'a file' if model_dir.exists() else 'nothing'}. The word `demo` names the embedded model."
        )
    return ModelConfig.read(config or model_dir / "config.json")


def _check(options: LoadOptions, config: ModelConfig) -> None:
    if options.context is not None and not 2 <= options.context <= config.max_position_embeddings:
        raise UsageError(
            f"--context: expected 2 to the model's limit of {config.max_position_embeddings} positions, "
            f"found {options.context}."
        )
    if options.chunk < 1:
        raise UsageError(f"--chunk: expected a whole number from 1 up, found {options.chunk}.")


def _stores(layout: Layout, plan: MemoryPlan, reader: Reader, on_bytes: Progress) -> tuple[TensorStore, ExpertStore]:
    """The trunk's and the experts' stores as planned; what is resident is loaded here, the trunk first."""
    trunk = list(_matrices(layout)) if plan.trunk_resident else []
    trunk_bytes = sum(entry.nbytes for entry, _ in trunk)
    total = trunk_bytes + (layout.expert_bytes if plan.experts_resident else 0)
    tensors: TensorStore = OnDemandTensors(reader)
    if plan.trunk_resident:
        tensors = ResidentTensors(reader, trunk, lambda done, _: on_bytes(done, total))
    experts: ExpertStore = OnDemandExperts(reader, layout)
    if plan.experts_resident:
        experts = ResidentExperts(reader, layout, lambda done, _: on_bytes(trunk_bytes + done, total))
    return tensors, experts


def _matrices(layout: Layout) -> Iterator[tuple[TensorEntry, ByteClass]]:
    for layer in layout.layers:
        for spec in layer.specs:
            if spec.role == "matrix":
                yield layer.tensors[spec.local], ByteClass.TRUNK
    yield layout.top[HEAD], ByteClass.HEAD
