"""The numeric contract in NumPy float32, one rounding per operation, and ways to compare bits.

Nothing here calls the kernels' arithmetic except where a function takes `ops` for its exponentials, whose accuracy
`test_kernels_math.py` measures.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from k3.kernels import Kernels, Packed12Weight, available_isas, encode_panel, high_byte_table

F32 = npt.NDArray[np.float32]

ISAS = available_isas()
ONE = np.float32(1)


@cache
def kernels(isa: str, threads: int = 1) -> Kernels:
    """Kernels are costly to make and hold no state that a result could depend on."""
    return Kernels(threads, isa)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> F32:
    """Random float32 numbers."""
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def to_bf16(x: F32) -> npt.NDArray[np.uint16]:
    """Bits of x cut to bfloat16."""
    return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)


def pack12(bits: npt.NDArray[np.uint16], table: npt.NDArray[np.uint8] | None = None) -> Packed12Weight:
    """The 12-bit form of bfloat16 bits, 64-byte aligned."""
    table = high_byte_table(bits) if table is None else table
    panel = np.frombuffer(encode_panel(bits, table), np.uint8)
    room = np.empty(len(panel) + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + len(panel)] = panel
    return Packed12Weight(room[start : start + len(panel)], *bits.shape, table)


def assert_same_bits(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Equal bits; NaN equals NaN whatever its payload."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if got.dtype != np.float32:
        np.testing.assert_array_equal(got, expected)
        return
    a, b = np.ascontiguousarray(got).view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)
    differ = (a != b) & ~(np.isnan(got) & np.isnan(expected))
    where = np.argwhere(differ)[:3].tolist()
    assert not differ.any(), f"{differ.sum()} of {differ.size} differ, first at {where}"


def fma(a: Any, b: Any, c: Any) -> F32:
    """round(a * b + c) to float32, once: the product is exact in float64, the sum is rounded to odd there."""
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        term = np.asarray(c, np.float64)
        total = product + term
        part = total - product
        lost = (product - (total - part)) + (term - part)
        even = (total.view(np.uint64) & np.uint64(1)) == 0
        inexact = np.isfinite(total) & np.isfinite(lost) & (lost != 0) & even
        odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
        return np.where(inexact, odd, total).astype(np.float32)


def dot(x: F32, w: F32) -> F32:
    """The contract's dot product over the last axis, leading axes broadcast."""
    x, w = np.broadcast_arrays(x, w)
    blocks = -(-x.shape[-1] // 32)
    padded = np.zeros((2, *x.shape[:-1], blocks * 32), np.float32)
    padded[0, ..., : x.shape[-1]] = x
    padded[1, ..., : x.shape[-1]] = w
    x, w = padded.reshape(2, *x.shape[:-1], blocks, 16, 2)
    acc = np.zeros((*x.shape[:-3], 16), np.float32)
    for block in range(blocks):
        for parity in (0, 1):
            acc = fma(x[..., block, :, parity], w[..., block, :, parity], acc)
    with np.errstate(all="ignore"):
        for half in (8, 4, 2, 1):
            acc = acc[..., :half] + acc[..., half : 2 * half]
    return acc[..., 0]


def transposed(a: F32, matrix: F32) -> F32:
    """acc[c] = fma(a[i], matrix[i, c], acc[c]) in ascending i, from +0."""
    acc = np.zeros(matrix.shape[1], np.float32)
    for factor, row in zip(a, matrix, strict=True):
        acc = fma(factor, row, acc)
    return acc


def inverse_rms(x: F32, eps: float) -> F32:
    """1 / sqrt(sum x^2 / n + eps) over the last axis, kept as an axis of one."""
    mean = dot(x, x)[..., None] / np.float32(x.shape[-1])
    return ONE / np.sqrt(mean + np.float32(eps))


def define_residual_mix(ops: Kernels, sources: list[F32], norm: F32, proj: F32, eps: float) -> F32:
    scores = np.stack([inverse_rms(v, eps)[:, 0] * dot(v, norm * proj) for v in sources])
    e = ops.exp(scores - scores.max(axis=0))
    total = e[0]
    for row in e[1:]:
        total = total + row
    acc = np.zeros_like(sources[0])
    for weight, v in zip(e / total, sources, strict=True):
        acc = fma(weight[:, None], v, acc)
    return acc


def define_short_conv(ops: Kernels, x: F32, taps: F32, tail: F32) -> F32:
    inputs = np.concatenate([tail, x])
    acc = np.zeros_like(x)
    for j, tap in enumerate(taps):
        acc = fma(tap, inputs[j : j + len(x)], acc)
    return acc * ops.sigmoid(acc)


def define_kda_recurrence(q: F32, k: F32, v: F32, decay: F32, beta: F32, state: F32) -> tuple[F32, F32]:
    """Outputs [T, H D] and the state afterwards."""
    heads, dim, _ = state.shape
    state = state.copy()
    out = np.zeros_like(q)
    scale = np.float32(dim**-0.5)
    for t in range(len(q)):
        for h in range(heads):
            at = slice(h * dim, (h + 1) * dim)
            unit = [x[t, at] * (ONE / np.sqrt(dot(x[t, at], x[t, at]) + np.float32(1e-6))) for x in (q, k)]
            decayed = decay[t, at][:, None] * state[h]
            u = beta[t, h] * (v[t, at] - transposed(unit[1], decayed))
            state[h] = fma(unit[1][:, None], u, decayed)
            out[t, at] = transposed(unit[0] * scale, state[h])
    return out, state


def define_mla(
    ops: Kernels, q: F32, kv_b: F32, cache: F32, start: int, heads: int, nope: int, v_dim: int, scale: float
) -> F32:
    latent = kv_b.shape[1]
    parts = kv_b.reshape(heads, nope + v_dim, latent)
    out = np.zeros((len(q), heads, v_dim), np.float32)
    for t, row in enumerate(q.reshape(len(q), heads, -1)):
        keys = cache[: start + t + 1]
        for h in range(heads):
            query = np.concatenate([transposed(row[h, :nope], parts[h, :nope]), row[h, nope:]])
            scores = dot(query, keys) * np.float32(scale)
            e = ops.exp((scores - scores.max())[None])[0]
            context = transposed(e, keys[:, :latent]) / dot(e, np.ones_like(e))
            out[t, h] = dot(context, parts[h, nope:])
    return out.reshape(len(q), -1)


def define_route(
    ops: Kernels, logits: F32, bias: F32, top_k: int, scaling: float, renormalize: bool
) -> tuple[npt.NDArray[np.int32], F32]:
    scores = ops.sigmoid(logits)
    order = np.lexsort((np.broadcast_to(np.arange(len(bias)), logits.shape), -(scores + bias)), axis=1)
    ids = order[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=1)
    if renormalize and top_k > 1:
        chosen = np.take_along_axis(scores, np.sort(ids, axis=1), axis=1)
        total = chosen[:, 0]
        for column in chosen.T[1:]:
            total = total + column
        weights = weights / (total + np.float32(1e-20))[:, None]
    return ids.astype(np.int32), weights * np.float32(scaling)


CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def widen_mxfp4(packed: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> F32:
    """Value = code * 2^(scale - 127), scale byte 255 is NaN (OCP Microscaling Formats 1.0)."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    factor = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    with np.errstate(all="ignore"):
        return (CODES[codes] * np.repeat(factor, 32, axis=1)).astype(np.float32)


def define_panel(bits: npt.NDArray[np.uint16], table: npt.NDArray[np.uint8]) -> bytes:
    """A panel of 12-bit weights, block by block and byte by byte as `k3.kernels.packed12` describes it."""
    code_of = {int(byte): code for code, byte in reversed(list(enumerate(table)))}
    body, raw, numbers = bytearray(), bytearray(), bytearray()
    blocks = bits.shape[1] // 32
    for row, words in enumerate(bits.tolist()):
        for first in range(0, blocks, 4):
            unit = [words[32 * b : 32 * b + 32] for b in range(first, min(first + 4, blocks))]
            for k, block in enumerate(unit):
                if any(word >> 8 not in code_of for word in block):
                    raw += np.array(block, "<u2").tobytes()
                    numbers += (row * blocks + first + k).to_bytes(4, "little")
            low = [[word & 255 for word in block] for block in unit]
            code = [[code_of.get(word >> 8, 0) for word in block] for block in unit]
            if len(unit) == 4:
                pairs = [
                    [(k + pair, e) for e0 in range(0, 32, 8) for k in (0, 1) for e in range(e0, e0 + 8)]
                    for pair in (0, 2)
                ]
                for places in pairs:
                    body += bytes(low[k][e] for k, e in places)
                body += bytes(code[k][e] | code[m][f] << 4 for (k, e), (m, f) in zip(*pairs, strict=True))
                continue
            for block_low, block_code in zip(low, code, strict=True):
                body += bytes(block_low)
                body += bytes(block_code[i] | block_code[16 + i] << 4 for i in range(16))
    return bytes(body + raw + numbers)
