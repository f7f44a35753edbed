"""Packs small checkpoints and reads them back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from k3.checkpoint.config import ModelConfig
from k3.checkpoint.index import TensorEntry, TensorIndex
from k3.checkpoint.layout import Layout, bind, wanted_tensors
from k3.checkpoint.packed.format import PACKED12, PackedTensor, PackedTrunk
from k3.engine.packing.writer import Packed, PackEvents, PackOptions, PackPlan, pack_trunk
from k3.kernels.packed12 import decode_panel
from k3.storage.packed import open_trunk


def pack(model: Path, trunk: Path, plans: list[PackPlan] | None = None, **options: Any) -> Packed:
    """Pack with the face that the command line uses; the plan goes into `plans`."""
    events = PackEvents(on_plan=plans.append) if plans is not None else PackEvents()
    return pack_trunk(model, trunk, PackOptions(**options), events)


def bound(model: Path, layers: int | None = None) -> Layout:
    """The layout of a checkpoint directory."""
    config = ModelConfig.read(model / "config.json")
    return bind(TensorIndex.open(model, wanted_tensors(config, layers)), config, layers)


def opened(model: Path, trunk: Path, layers: int | None = None) -> PackedTrunk:
    """A packed trunk, checked against its checkpoint."""
    return open_trunk(trunk, model, bound(model, layers))


def decoded(trunk: PackedTrunk, matrix: PackedTensor) -> bytes:
    """The matrix as the checkpoint has it, put together from its panels."""
    data = trunk.path.read_bytes()
    table = np.frombuffer(bytes.fromhex(matrix.table), np.uint8)
    rows = []
    for panel in matrix.panels:
        stored = np.frombuffer(data, np.uint8, panel.nbytes, panel.offset)
        if matrix.encoding == PACKED12:
            stored = decode_panel(stored, panel.rows, matrix.cols, table)
        rows.append(stored.tobytes())
    return b"".join(rows)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def flip_bit(entry: TensorEntry, position: int) -> None:
    """Change one bit of a tensor in its shard, and nothing else; byte `position` counts from the end if negative."""
    with entry.path.open("r+b") as file:
        file.seek(entry.offset + position % entry.nbytes)
        [value] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([value ^ 1]))


def make_sparse(model: Path) -> None:
    """Say in the index that holes in this checkpoint's shards are meant."""
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    index["metadata"] = {**(index.get("metadata") or {}), "synthetic": True}
    path.write_text(json.dumps(index))
