"""Element types of the safetensors format, and what a tensor is besides its name and place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DTYPE_BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, by the names that the format gives its element types."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What many tensors have in common: element type, shape, and hence size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
