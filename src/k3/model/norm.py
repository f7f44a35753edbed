"""RMS norm with its weight bound."""

from __future__ import annotations

from dataclasses import dataclass

from k3.kernels import F32Array, Kernels

MLA_INNER_EPS = 1e-6
"""The two norms inside MLA are built without an eps argument and get this default, not `rms_norm_eps`."""


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """y = weight · (x / sqrt(mean(x²) + eps)); weight is float32 [n]."""

    weight: F32Array
    eps: float

    def __call__(self, ops: Kernels, x: F32Array) -> F32Array:
        return ops.rms_norm(x, self.weight, self.eps)
