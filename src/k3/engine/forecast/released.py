"""What the released model needs, known without its files."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from math import prod
from pathlib import Path

from k3.checkpoint.config import ModelConfig
from k3.checkpoint.index import TensorEntry
from k3.checkpoint.layout import LayerLayout, Layout
from k3.checkpoint.specs import LAYERS, TensorSpec, expert_shapes, layer_specs, top_specs
from k3.checkpoint.synthetic.synth import KINDS
from k3.engine.loading import Bound
from k3.engine.plan import Needs
from k3.engine.trunk import plain_matrices

_FULL_SHAPE = "full-shape"
_BF16 = 2


def released_needs() -> Needs:
    """The needs of the released checkpoint's text model, as if its tensors lay in one file one after another."""
    config = ModelConfig.from_json(json.dumps(KINDS[_FULL_SHAPE]).encode(), "the released config")
    offsets = count()

    def place(stem: str, specs: tuple[TensorSpec, ...]) -> dict[str, TensorEntry]:
        return {
            spec.local: TensorEntry(stem + spec.local, "BF16", spec.shape, Path("released"), next(offsets) << 40, size)
            for spec in specs
            for size in (_BF16 * prod(spec.shape),)
        }

    layers = tuple(
        LayerLayout(number, specs, place(f"{LAYERS}{number}.", specs))
        for number in range(config.num_hidden_layers)
        for specs in (layer_specs(config, number),)
    )
    layout = Layout(config, "", place("", top_specs(config)), layers, {})
    needs = Bound(config, layout, len(layers), plain_matrices(layout), synthetic=False).needs
    expert_bytes = sum(prod(shape) for shape in expert_shapes(config))
    return replace(needs, expert_bytes=expert_bytes, experts=config.num_experts * len(config.moe_layers))
