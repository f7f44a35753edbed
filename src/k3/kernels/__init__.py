"""The arithmetic: pure functions on NumPy arrays with the same bits on every machine.

`Kernels` chooses an instruction set at run time; no result depends on that choice, on the number of threads,
or on which rows share a call.
"""

from k3.kernels.ops import Kernels, Routing
from k3.kernels.packed12 import (
    decode_panel,
    encode_panel,
    encode_panel_into,
    high_byte_counts,
    high_byte_table,
    panel_limit,
    table_of_counts,
)
from k3.kernels.select import available_isas
from k3.kernels.weights import (
    MXFP4_GROUP,
    Bf16Weight,
    F32Array,
    F32Weight,
    Mxfp4Weight,
    Packed12Weight,
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
    "Packed12Weight",
    "Routing",
    "Weight",
    "available_isas",
    "decode_panel",
    "encode_panel",
    "encode_panel_into",
    "high_byte_counts",
    "high_byte_table",
    "panel_limit",
    "table_of_counts",
    "widen_bf16",
]
