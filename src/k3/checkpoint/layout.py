"""Which tensors make the model, in the order in which a step uses them, and where each one lies.

    index = TensorIndex.open(model_dir, wanted_tensors(config, layers))
    layout = bind(index, config, layers)
    layout.top["model.norm.weight"]                         # TensorEntry
    layout.layers[3].tensors["self_attn.q_a_proj.weight"]   # TensorEntry; the dict is in execution order
    layout.experts[3].entries(17)["w1.weight_packed"]       # TensorEntry
    layout.experts[3].record(17)                            # the whole expert as one range, where it is one

Local names are the checkpoint's without the prefix `language_model.` (which may be absent) and, in a layer,
without `model.layers.N.`. `k3.checkpoint.specs` says what the config asks for; `bind` checks that it is
there, with the right shape and an exact dtype, and that the bound layers hold nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from k3.checkpoint.config import ModelConfig
from k3.checkpoint.headers.kinds import TensorKind
from k3.checkpoint.index import TensorEntry, TensorIndex
from k3.checkpoint.specs import (
    EMBEDDING,
    EXPERT_TENSORS,
    EXPERTS,
    LAYERS,
    PREFIXES,
    TensorSpec,
    expert_shapes,
    layer_specs,
    top_specs,
)
from k3.errors import CheckpointError, UsageError

_LISTED: Final = 20
_PARTS: Final = ("weight_packed", "weight_scale")
# Stored in the released files, used only where `latent_moe_use_norm` is true.
_MAY_BE_UNUSED: Final = "block_sparse_moe.routed_expert_norm.weight"


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """An expert whose six tensors lie back to back: `nbytes` bytes from byte `offset` of `path`.

    `starts` gives the first byte of each of EXPERT_TENSORS within the record.
    """

    path: Path
    offset: int
    nbytes: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class ExpertTable:
    """Where the routed experts of one layer lie; columns follow EXPERT_TENSORS.

    `offsets` is int64 [experts, 6], from the start of the file; `shard_ids` is uint16 [experts, 6], into
    `shards`; `kinds` gives dtype, shape and bytes of each column.
    """

    layer: int
    prefix: str
    shards: tuple[Path, ...]
    kinds: tuple[TensorKind, ...]
    offsets: npt.NDArray[np.int64]
    shard_ids: npt.NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert, all six tensors."""
        return sum(kind.nbytes for kind in self.kinds)

    @cached_property
    def contiguous(self) -> npt.NDArray[np.bool_]:
        """Whether each expert's six tensors lie back to back in one file, in any order: bool [experts]."""
        order = np.argsort(self.offsets, axis=1, kind="stable")
        begins = np.take_along_axis(self.offsets, order, axis=1)
        ends = begins + np.array([kind.nbytes for kind in self.kinds], np.int64)[order]
        one_file = (self.shard_ids == self.shard_ids[:, :1]).all(axis=1)
        joined: npt.NDArray[np.bool_] = one_file & (begins[:, 1:] == ends[:, :-1]).all(axis=1)
        return joined

    def entries(self, expert: int) -> dict[str, TensorEntry]:
        """The six tensors, by their names within the expert, in the order of EXPERT_TENSORS."""
        shards, offsets = self.shard_ids[expert].tolist(), self.offsets[expert].tolist()
        stem = f"{self.prefix}{LAYERS}{self.layer}.{EXPERTS}{expert}."
        return {
            name: TensorEntry(stem + name, kind.dtype, kind.shape, self.shards[shard], offset, kind.nbytes)
            for name, kind, shard, offset in zip(EXPERT_TENSORS, self.kinds, shards, offsets, strict=True)
        }

    def record(self, expert: int) -> ExpertRecord | None:
        """The expert as one range of one file, or None where it isn't `contiguous`."""
        if not self.contiguous[expert]:
            return None
        offsets = self.offsets[expert].tolist()
        first = min(offsets)
        path = self.shards[self.shard_ids[expert, 0]]
        return ExpertRecord(path, first, self.expert_bytes, tuple(o - first for o in offsets))


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer without its routed experts. `tensors` maps local names to places, in execution order."""

    index: int
    specs: tuple[TensorSpec, ...]
    tensors: Mapping[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        """Bytes of these tensors as stored."""
        return sum(entry.nbytes for entry in self.tensors.values())


@dataclass(frozen=True)
class Layout:
    """The bound model: the top level, the first layers, and the experts of those that have them, by layer."""

    config: ModelConfig
    prefix: str
    top: Mapping[str, TensorEntry]
    layers: tuple[LayerLayout, ...]
    experts: Mapping[int, ExpertTable]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the bound layers that have routed experts, ascending."""
        return tuple(self.experts)

    @property
    def num_experts(self) -> int:
        """Routed experts of one layer."""
        return self.config.num_experts

    def expert(self, layer: int, expert: int) -> dict[str, TensorEntry]:
        """The six tensors of one routed expert, by their names within it."""
        return self.experts[layer].entries(expert)

    @cached_property
    def trunk_bytes(self) -> int:
        """Stored bytes that every step needs: the layers without experts, the final norms, the head."""
        top = sum(entry.nbytes for name, entry in self.top.items() if name != EMBEDDING)
        return top + sum(layer.nbytes for layer in self.layers)

    @cached_property
    def expert_bytes(self) -> int:
        """Stored bytes of all bound routed experts."""
        return sum(len(table) * table.expert_bytes for table in self.experts.values())

    @cached_property
    def largest_expert_bytes(self) -> int:
        """Stored bytes of the largest expert; 0 without experts."""
        return max((table.expert_bytes for table in self.experts.values()), default=0)

    @cached_property
    def tensor_count(self) -> int:
        """How many tensors are bound."""
        trunk = len(self.top) + sum(len(layer.tensors) for layer in self.layers)
        return trunk + sum(table.offsets.size for table in self.experts.values())


def wanted_tensors(config: ModelConfig, layers: int | None = None) -> Callable[[str], bool]:
    """Whether a stored name belongs to what `bind(index, config, layers)` binds, with either prefix."""
    count = count_layers(config, layers)
    top = {spec.local for spec in top_specs(config)}

    def is_wanted(name: str) -> bool:
        local = name.removeprefix(PREFIXES[0])
        if not local.startswith(LAYERS):
            return local in top
        number = local[len(LAYERS) :].partition(".")[0]
        return number.isascii() and number.isdigit() and len(number) <= 4 and int(number) < count

    return is_wanted


def count_layers(config: ModelConfig, layers: int | None) -> int:
    """How many layers are bound: all of them for None. UsageError outside 1..num_hidden_layers."""
    if layers is None:
        return config.num_hidden_layers
    if not 1 <= layers <= config.num_hidden_layers:
        raise UsageError(
            f"--layers: expected a number from 1 to {config.num_hidden_layers}, found {layers}. The model has no more."
        )
    return layers


def bind(index: TensorIndex, config: ModelConfig, layers: int | None = None) -> Layout:
    """Resolve every tensor of the top level and of the first `layers` layers (None: all of them).

    One CheckpointError lists what is missing, has another shape or dtype than the config asks for, or lies
    in a bound layer without belonging there. UsageError where `layers` is out of range.
    """
    count = count_layers(config, layers)
    binder = _Binder(index, config, _detect_prefix(index, config))
    top = binder.resolve("", top_specs(config))
    bound = tuple(binder.layer(number) for number in range(count))
    experts = {number: binder.experts(number) for number in range(count) if config.is_moe(number)}
    layout = Layout(config, binder.prefix, top, bound, {n: table for n, table in experts.items() if table})
    binder.find_strangers(count)
    binder.refuse_problems()
    return layout


def check_a_log(values: npt.NDArray[np.float32], num_heads: int, where: str) -> None:
    """Refuse an `A_log` that says something beyond its heads.

    It is stored with head_dim entries, of which the first `num_heads` count, one for each head; zeros pad the
    rest. Anything else there means that the file is read in a wrong way. `values` is float32 [head_dim].
    """
    beyond = np.flatnonzero(values[num_heads:] != 0)
    if values.ndim != 1 or len(values) < num_heads:
        raise CheckpointError(
            f"{where}: expected one value for each of {num_heads} heads, found shape {list(values.shape)}. "
            "Use a checkpoint that matches its config."
        )
    if len(beyond):
        position = num_heads + int(beyond[0])
        raise CheckpointError(
            f"{where}: expected zeros from entry {num_heads} on, since there are {num_heads} heads, found "
            f"{float(values[position])!r} in entry {position} ({len(beyond)} entries are not zero). "
            "The tensor is damaged or belongs to another model: verify the checkpoint."
        )


def _detect_prefix(index: TensorIndex, config: ModelConfig) -> str:
    """The prefix of the names in this index; the released one where nothing is found under either."""
    layer = (f"{LAYERS}0.{spec.local}" for spec in layer_specs(config, 0))
    names = [*(spec.local for spec in top_specs(config)), *layer]
    used = [prefix for prefix in PREFIXES if any(prefix + name in index for name in names)]
    if len(used) > 1:
        raise CheckpointError(
            f"The checkpoint has tensors named both with and without {PREFIXES[0]!r}: it holds two models. "
            "Keep only the files of one."
        )
    return used[0] if used else PREFIXES[0]


class _Binder:
    """Looks specs up in an index and collects what is wrong."""

    def __init__(self, index: TensorIndex, config: ModelConfig, prefix: str) -> None:
        self.prefix = prefix
        self._index = index
        self._config = config
        self._problems: list[str] = []
        self._count = 0

    def layer(self, number: int) -> LayerLayout:
        specs = layer_specs(self._config, number)
        return LayerLayout(number, specs, self.resolve(f"{LAYERS}{number}.", specs))

    def resolve(self, stem: str, specs: tuple[TensorSpec, ...]) -> dict[str, TensorEntry]:
        entries = {}
        for spec in specs:
            name = f"{self.prefix}{stem}{spec.local}"
            entry = self._index.get(name)
            if entry is None:
                self._note(f"{name}: missing")
                continue
            self._compare(name, (entry.dtype, entry.shape), spec.dtypes, spec.shape)
            entries[spec.local] = entry
        return entries

    def experts(self, number: int) -> ExpertTable | None:
        index, shapes = self._index, expert_shapes(self._config)
        columns = self._expert_rows(np.int64(number))
        kinds = [
            self._check_column(number, name, shape, columns[:, column])
            for column, (name, shape) in enumerate(zip(EXPERT_TENSORS, shapes, strict=True))
        ]
        usable = tuple(kind for kind in kinds if kind is not None)
        if len(usable) < len(kinds):
            return None
        return ExpertTable(number, self.prefix, index.shards, usable, index.offsets[columns], index.shard_ids[columns])

    def find_strangers(self, count: int) -> None:
        """A tensor in a bound layer that the config has no place for would change the model's answers."""
        index = self._index
        layers = np.arange(count)
        expected = self._expert_rows(layers[[self._config.is_moe(n) for n in range(count)], None, None])
        unexpected = np.ones(len(index), np.bool_)
        unexpected[expected[expected >= 0]] = False
        rows = index.rows_under(self.prefix + LAYERS)
        rows = rows[unexpected[rows] & (index.first_numbers(rows) < count)]
        known = {
            f"{self.prefix}{LAYERS}{number}.{local}"
            for number in range(count)
            for local in (*(spec.local for spec in layer_specs(self._config, number)), _MAY_BE_UNUSED)
        }
        for name in (index.name(row) for row in rows.tolist()):
            if name not in known:
                self._note(f"{name}: the config has no place for this tensor")

    def refuse_problems(self) -> None:
        if self._problems:
            more = f"; and {self._count - len(self._problems)} more" if self._count > len(self._problems) else ""
            raise CheckpointError(
                f"The checkpoint contradicts its config: {'; '.join(self._problems)}{more}. "
                "Use the config and the shards of one release, completely downloaded."
            )

    def _expert_rows(self, layers: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Rows of the experts' tensors: `layers` broadcast against [experts, 6]."""
        stem = f"{self.prefix}{LAYERS}{{}}.{EXPERTS}{{}}.w{{}}."
        experts = np.arange(self._config.num_experts)[:, None]
        matrices = np.array([int(name[1]) for name in EXPERT_TENSORS])
        packed, scales = (self._index.find(stem + part, layers, experts, matrices) for part in _PARTS)
        return np.where([name.endswith(_PARTS[0]) for name in EXPERT_TENSORS], packed, scales)

    def _check_column(
        self, number: int, name: str, shape: tuple[int, int], rows: npt.NDArray[np.int64]
    ) -> TensorKind | None:
        """Note that experts' tensors `name` are missing or of another kind; their kind where all is well."""
        index = self._index
        stem = f"{self.prefix}{LAYERS}{number}.{EXPERTS}"
        missing = np.flatnonzero(rows < 0)
        if len(missing):
            others = f", and so it is for {len(missing) - 1} more experts of this layer"
            self._note(f"{stem}{missing[0]}.{name}: missing{others if len(missing) > 1 else ''}")
            return None
        kind_ids, firsts = np.unique(index.kind_ids[rows], return_index=True)
        kinds = [index.kinds[kind_id] for kind_id in kind_ids]
        sound = [
            self._compare(f"{stem}{expert}.{name}", (kind.dtype, kind.shape), ("U8",), shape)
            for kind, expert in zip(kinds, firsts.tolist(), strict=True)
        ]
        return kinds[0] if all(sound) else None

    def _compare(
        self, name: str, found: tuple[str, tuple[int, ...]], dtypes: tuple[str, ...], shape: tuple[int, ...]
    ) -> bool:
        dtype, found_shape = found
        if found_shape != shape:
            self._note(f"{name}: expected shape {list(shape)}, found {list(found_shape)}")
        if dtype not in dtypes:
            self._note(f"{name}: expected {' or '.join(dtypes)}, found {dtype}")
        return found_shape == shape and dtype in dtypes

    def _note(self, problem: str) -> None:
        self._count += 1
        if self._count <= _LISTED:
            self._problems.append(problem)
