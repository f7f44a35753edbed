"""The arithmetic: pure functions on NumPy arrays with the same bits on every machine.

`Kernels` chooses an instruction set at run time; no result depends on that choice, on the number of threads,
or on which rows share a call.
"""

from k3.kernels.ops import Kernels, Routing
from k3.kernels.select import available_isas
from k3.kernels.weights import (
    MXFP4_GROUP,
    Bf16Weight,
    F32Array,
    F32Weight,
    Mxfp4Weight,
    Weight,
    widen_bf16,
)

__all__ = [
    "MXFP4_GROUP",
    "Bf16Weight",
    "F32Array",
    "F32Weight",
    "Kernels",
    "Mxfp4Weight",
    "Routing",
    "Weight",
    "available_isas",
    "widen_bf16",
]
