"""MXFP4 as the format defines it, and the packed product equal to the widened one."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from conftest import shared_file
from k3.kernels import F32Weight, Kernels, Mxfp4Weight
from kernel_helpers import CODES, ISAS, assert_same_bits, kernels, normal, widen_mxfp4
from oracle import ops as vectors


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


def _decode(ops: Kernels, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The matrix, read out through products with unit vectors: x + 0 is x, except that -0 comes out as +0."""
    unit = np.eye(packed.shape[1] * 2, dtype=np.float32)
    return ops.matmul(unit, Mxfp4Weight(packed, scales)).T


def test_every_code_under_every_scale(ops: Kernels) -> None:
    packed = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    packed |= np.arange(15, -1, -1, dtype=np.uint8) << 4
    scales = np.arange(256, dtype=np.uint8)[:, None]
    got = np.stack([_decode(ops, packed[r : r + 1], scales[r : r + 1])[0] for r in range(253)])
    assert_same_bits(got, widen_mxfp4(packed, scales)[:253] + np.float32(0))
    for byte, code, value in [(0, 1, 2.0**-128), (0, 7, 6 * 2.0**-127), (253, 4, 2.0**127), (254, 7, np.inf)]:
        one = np.zeros((1, 32), np.float32)
        one[0, 0] = 1
        row = np.zeros((1, 16), np.uint8)
        row[0, 0] = code
        scale = np.array([[byte]], np.uint8)
        assert float(ops.matmul(one, Mxfp4Weight(row, scale))[0, 0]) == value


def test_scale_255_is_nan_even_for_code_zero(ops: Kernels) -> None:
    weight = Mxfp4Weight(np.zeros((1, 16), np.uint8), np.array([[255]], np.uint8))
    assert np.isnan(ops.matmul(np.ones((1, 32), np.float32), weight)).all()


def test_the_recorded_grid(ops: Kernels) -> None:
    grid, scales = vectors()["mxfp4.grid_packed"], vectors()["mxfp4.grid_scale"]
    expected = vectors()["mxfp4.grid_f64"]
    with np.errstate(over="ignore"):
        wide = expected.astype(np.float32)
    for row in range(253):
        got = _decode(ops, grid[row : row + 1], scales[row : row + 1])
        assert_same_bits(got, wide[row : row + 1] + np.float32(0))


def test_the_recorded_bytes_and_scales(ops: Kernels) -> None:
    packed = vectors()["mxfp4.byte"].reshape(16, 16)
    got = _decode(ops, packed, np.full((16, 1), 127, np.uint8)).reshape(256, 2)
    assert_same_bits(got, vectors()["mxfp4.byte_values"] + np.float32(0))
    ones = np.full((255, 16), 0x22, np.uint8)
    got = _decode(ops, ones[:253], vectors()["mxfp4.scale_byte"][:253, None])[:, 0]
    assert_same_bits(got, vectors()["mxfp4.scale_f64"][:253].astype(np.float32))


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("low", [0, 118])
def test_packed_product_equals_widened_product(ops: Kernels, rows: int, low: int) -> None:
    """Any bytes, among them denormal, infinite and NaN groups, for any number of rows of x."""
    rng = np.random.default_rng(rows)
    packed = rng.integers(0, 256, (19, 16 * 6), dtype=np.uint8)
    scales = rng.integers(low, 256 if low == 0 else 126, (19, 6), dtype=np.uint8)
    x = normal(rng, rows, 32 * 6)
    wide = F32Weight(widen_mxfp4(packed, scales))
    assert_same_bits(ops.matmul(x, Mxfp4Weight(packed, scales)), ops.matmul(x, wide))


def test_packed_product_on_released_rows(ops: Kernels) -> None:
    released = json.loads(shared_file("data/mxfp4-released.json").read_text())
    packed, scales = (
        np.frombuffer(base64.b64decode(released[f"{name}_base64"]), np.uint8).reshape(released["rows"], -1)
        for name in ("packed", "scales")
    )
    x = normal(np.random.default_rng(0), 9, 2 * packed.shape[1])
    wide = F32Weight(widen_mxfp4(packed, scales))
    for rows in (1, 9):
        assert_same_bits(ops.matmul(x[:rows], Mxfp4Weight(packed, scales)), ops.matmul(x[:rows], wide))


def test_codes_are_those_of_the_format() -> None:
    """E2M1: sign, two exponent bits with bias 1, one mantissa bit; exponent zero is denormal."""
    for code in range(16):
        sign, exponent, mantissa = (-1.0) ** (code >> 3), code >> 1 & 3, code & 1
        value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert CODES[code] == sign * value
