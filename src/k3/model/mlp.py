"""The gated MLP with SiTU, as the dense first layer and the shared experts use it."""

from __future__ import annotations

from dataclasses import dataclass

from k3.checkpoint.config import ModelConfig
from k3.kernels import F32Array, Kernels
from k3.model.weights import LayerWeights, linear


@dataclass(frozen=True, slots=True)
class Situ:
    """situ(gate, up) = β·tanh(gate/β)·sig(gate) · λ·tanh(up/λ): the sigmoid takes the uncapped gate."""

    beta: float
    linear_beta: float

    @classmethod
    def of(cls, config: ModelConfig) -> Situ:
        return cls(config.activation_situ_beta, config.activation_situ_linear_beta)

    def __call__(self, ops: Kernels, gate: F32Array, up: F32Array) -> F32Array:
        return ops.situ(gate, up, self.beta, self.linear_beta)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(situ(gate x, up x)); the matrices are `<scope>.gate_proj`, `.up_proj` and `.down_proj`."""

    scope: str
    width: int
    hidden_size: int
    activation: Situ

    def __call__(self, ops: Kernels, weights: LayerWeights, x: F32Array) -> F32Array:
        gate = linear(ops, weights, f"{self.scope}.gate_proj.weight", x, self.width)
        up = linear(ops, weights, f"{self.scope}.up_proj.weight", x, self.width)
        hidden = self.activation(ops, gate, up)
        return linear(ops, weights, f"{self.scope}.down_proj.weight", hidden, self.hidden_size)
