"""Matrices as they lie on disk: what a kernel multiplies without expanding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

MXFP4_GROUP = 32
"""Columns that share one E8M0 scale byte (OCP Microscaling Formats 1.0)."""

F32Array: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _DenseWeight:
    """A matrix [rows, cols] with one number an element, C-contiguous."""

    data: npt.NDArray[Any]

    @property
    def rows(self) -> int:
        return int(self.data.shape[0])

    @property
    def cols(self) -> int:
        return int(self.data.shape[1])

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class F32Weight(_DenseWeight):
    """A float32 matrix."""

    data: F32Array


@dataclass(frozen=True, slots=True)
class Bf16Weight(_DenseWeight):
    """A bfloat16 matrix as its raw bits, uint16."""

    data: npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """A packed MXFP4 matrix.

    `packed` is uint8 [rows, cols / 2]: element i of a row is nibble i % 2 of byte i // 2, low nibble first.
    `scales` is uint8 [rows, cols / 32]: E8M0 exponents, value 2^(byte - 127), 255 is NaN.
    """

    packed: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]

    @property
    def rows(self) -> int:
        return int(self.packed.shape[0])

    @property
    def cols(self) -> int:
        return 2 * int(self.packed.shape[1])

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class Packed12Weight:
    """A bfloat16 matrix in the lossless 12-bit encoding, multiplied as it is (see `k3.kernels.packed12`).

    `data` is the uint8 [n] panel that `encode_panel` made of these rows, whole; any alignment will do, 64 bytes are
    fastest. `table` is uint8 [16], the high bytes that codes stand for. `cols` is a multiple of 32.
    """

    data: npt.NDArray[np.uint8]
    rows: int
    cols: int
    table: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


Weight: TypeAlias = F32Weight | Bf16Weight | Mxfp4Weight | Packed12Weight


def widen_bf16(bits: npt.NDArray[np.uint16]) -> F32Array:
    """Exact float32 values of raw bfloat16 bits: the upper half of the float32 word (same shape)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
