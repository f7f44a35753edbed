"""Latent mixture of experts: routed experts work on a down-projected latent, shared experts on the full width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3.checkpoint.config import ModelConfig
from k3.errors import NonFiniteError
from k3.kernels import F32Array, Kernels, Mxfp4Weight
from k3.model.batch import Batch
from k3.model.mlp import GatedMlp, Situ
from k3.model.norm import RmsNorm
from k3.model.weights import Expert, ExpertSource, LayerWeights, UnreadableExpert, WeightSource, linear

_SCOPE = "block_sparse_moe"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where each row goes.

    `ids` is int32 [rows, top_k] in router-rank order. `slots` gives, in the same order, each expert's place among
    the row's ids in ascending order, `weights` float32 [rows, top_k] stands in that ascending order.
    """

    ids: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    weights: F32Array

    @classmethod
    def of(cls, ids: npt.NDArray[np.int32], weights: F32Array) -> Dispatch:
        order = np.argsort(ids, axis=1)
        return cls(ids, np.argsort(order, axis=1), np.take_along_axis(weights, order, axis=1))


@dataclass(frozen=True, slots=True)
class LatentMoe:
    """One MoE block with its small tensors bound. `routed_norm` is None without `latent_moe_use_norm`."""

    layer: int
    config: ModelConfig
    correction_bias: F32Array
    routed_norm: RmsNorm | None
    shared_experts: GatedMlp
    activation: Situ

    @classmethod
    def bind(cls, config: ModelConfig, source: WeightSource, layer: int) -> LatentMoe:
        def vector(name: str) -> F32Array:
            return source.vector(layer, f"{_SCOPE}.{name}")

        activation = Situ.of(config)
        norm = None
        if config.latent_moe_use_norm:
            norm = RmsNorm(vector("routed_expert_norm.weight"), config.rms_norm_eps)
        shared = GatedMlp(f"{_SCOPE}.shared_experts", config.shared_intermediate_size, config.hidden_size, activation)
        return cls(layer, config, vector("gate.e_score_correction_bias"), norm, shared, activation)

    def __call__(
        self, ops: Kernels, weights: LayerWeights, experts: ExpertSource, x: F32Array, batch: Batch
    ) -> F32Array:
        """From normed rows float32 [rows, hidden_size] to [rows, hidden_size]; failures are marked in `batch`."""
        c = self.config
        routing = self._route(ops, weights, x, batch)
        arriving = experts.fetch(self.layer, routing.ids)
        down = f"{_SCOPE}.routed_expert_down_proj.weight"
        z = linear(ops, weights, down, x, c.routed_expert_hidden_size)
        batch.fail(~ops.all_finite(z), NonFiniteError(f"layer {self.layer}: {down} gave a value that is not finite."))
        shared = self.shared_experts(ops, weights, x)
        outputs = self._run_experts(ops, arriving, routing, z, batch)
        y = ops.accumulate_experts(outputs, routing.weights)
        if self.routed_norm is not None:
            y = self.routed_norm(ops, y)
        return ops.add(linear(ops, weights, f"{_SCOPE}.routed_expert_up_proj.weight", y, c.hidden_size), shared)

    def _route(self, ops: Kernels, weights: LayerWeights, x: F32Array, batch: Batch) -> Dispatch:
        c = self.config
        logits = linear(ops, weights, f"{_SCOPE}.gate.weight", x, c.num_experts)
        ids, expert_weights, finite = ops.route(
            logits, self.correction_bias, c.num_experts_per_token, c.routed_scaling_factor, c.moe_renormalize
        )
        batch.fail(
            ~finite, NonFiniteError(f"layer {self.layer}: a router score is not finite, so no expert can be chosen.")
        )
        return Dispatch.of(ids, expert_weights)

    def _run_experts(
        self,
        ops: Kernels,
        arriving: Iterator[Expert | UnreadableExpert],
        routing: Dispatch,
        z: F32Array,
        batch: Batch,
    ) -> F32Array:
        """Every expert's output for its rows: float32 [rows, top_k, latent], a row's experts in ascending id."""
        outputs = np.zeros((*routing.ids.shape, z.shape[1]), np.float32)
        for expert in arriving:
            rows, ranks = np.nonzero(routing.ids == expert.id)
            if isinstance(expert, UnreadableExpert):
                batch.fail(_mask(rows, z.shape[0]), expert.error)
                continue
            outputs[rows, routing.slots[rows, ranks]] = self._run_expert(ops, expert, rows, z, batch)
        return outputs

    def _run_expert(
        self, ops: Kernels, expert: Expert, rows: npt.NDArray[np.int64], z: F32Array, batch: Batch
    ) -> F32Array:
        def project(name: str, matrix: Mxfp4Weight, inputs: F32Array) -> F32Array:
            out = ops.matmul(inputs, matrix)
            finite = ops.all_finite(out)
            if not finite.all():
                where = f"layer {self.layer}, expert {expert.id}, tensor {name}"
                error = NonFiniteError(
                    f"{where}: the product is not finite, so the tensor's bytes are damaged or its values overflow. "
                    "Check the checkpoint's files against their published checksums."
                )
                batch.fail(_mask(rows[~finite], z.shape[0]), error)
            return out

        inputs = z[rows]
        gate, up = project("w1", expert.w1, inputs), project("w3", expert.w3, inputs)
        return project("w2", expert.w2, self.activation(ops, gate, up))


def _mask(rows: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros(count, np.bool_)
    mask[rows] = True
    return mask
