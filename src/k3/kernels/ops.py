"""The typed face of the native kernels.

Formulas and their rounding order are those of the numeric contract: every multiply-add is one fused
operation or two rounded ones as written, and a sum over elements runs in sixteen lanes (element e of a block
of 32 goes to lane e // 2, even before odd) that are folded by +8, +4, +2, +1. All floats are float32.
Two-dimensional inputs may have any row stride but contiguous columns. Results are new arrays unless `out` is
given, which may itself be a slice of columns of a larger array.

Every method raises `ValueError` where a shape, an element type or a memory layout is not as documented.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from k3.kernels import _native
from k3.kernels.select import choose_isa, choose_threads
from k3.kernels.weights import F32Array, Mxfp4Weight, Packed12Weight, Weight

READ_STREAMS = (1, 2, 4, 8)


class _Elementwise(IntEnum):
    """Codes of `k3::Elementwise` in native/table.hpp."""

    EXP = 0
    LOG = 1
    TANH = 2
    SIGMOID = 3
    GATED = 4
    ADD = 5
    SITU = 6


class Routing(NamedTuple):
    """The router's choice for T rows.

    `ids` is int32 [T, k] in rank order, `weights` float32 [T, k] aligned with it, `finite` bool [T]: False where
    a logit or a biased score of the row is not finite, and then its ids and weights mean nothing (the ids are in
    range).
    """

    ids: npt.NDArray[np.int32]
    weights: F32Array
    finite: npt.NDArray[np.bool_]


class Kernels:
    """One set of kernels with its own threads. Calls from several threads are safe, one runs after another."""

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        """Chooses the instruction set and starts the threads.

        Args:
            threads: threads that share a call, the caller included. None: `K3_THREADS`, else one per core.
            isa: "scalar", "avx2", "avx512" or "neon". None: `K3_ISA`, else the best available.

        Raises:
            UsageError: a name or a number that means nothing.
            MachineError: an instruction set that this machine lacks.
        """
        self._engine = _native.Engine(choose_isa(isa), choose_threads(threads))

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._engine.isa

    @property
    def threads(self) -> int:
        """Threads that share a call, the caller included."""
        return self._engine.threads

    def matmul(self, x: F32Array, w: Weight, out: F32Array | None = None) -> F32Array:
        """Products x W^T: x [T, n], w [R, n] as stored -> [T, R], each element the contract's dot product."""
        _expect_ndim("x", x, 2)
        out = _result(out, (x.shape[0], w.rows))
        self._engine.matmul(x, *_stored(w), out)
        return out

    def rms_norm(self, x: F32Array, weight: F32Array, eps: float, out: F32Array | None = None) -> F32Array:
        """Weighted norm w (x r) with r = 1 / sqrt(sum x^2 / n + eps): x [T, n], weight [n] -> [T, n]."""
        out = _result_like(out, x)
        self._engine.rms_norm(x, weight, eps, out)
        return out

    def residual_mix(
        self,
        sources: Sequence[F32Array],
        norm_weight: F32Array,
        proj_weight: F32Array,
        eps: float,
        out: F32Array | None = None,
    ) -> F32Array:
        """Softmax mix of S sources [T, n] by the scores r_i dot(v_i, norm_weight * proj_weight) -> [T, n].

        The scores' maximum is subtracted, the exponentials are summed in order, and the mix is a chain of
        fused multiply-adds over the sources in order. `norm_weight` and `proj_weight` are [n].
        """
        if not sources:
            raise ValueError("residual_mix needs at least one source.")
        out = _result_like(out, sources[0])
        self._engine.residual_mix(list(sources), norm_weight, proj_weight, eps, out)
        return out

    def situ(
        self, gate: F32Array, up: F32Array, beta: float, linear_beta: float, out: F32Array | None = None
    ) -> F32Array:
        """((beta tanh(g / beta)) sigmoid(g)) (linear_beta tanh(u / linear_beta)): [T, n] twice -> [T, n]."""
        return self._map(_Elementwise.SITU, gate, up, out, beta, linear_beta)

    def short_conv(self, x: F32Array, taps: F32Array, tail: F32Array, out: F32Array | None = None) -> F32Array:
        """Causal convolution along rows, then a sigmoid(a): x [T, C], taps [W, C] oldest first -> [T, C].

        `tail` [W - 1, C] holds the inputs before x, oldest first, and is moved forward in place.
        """
        out = _result_like(out, x)
        _expect_writable("tail", tail)
        self._engine.short_conv(x, taps, tail, out)
        return out

    def kda_gate(
        self,
        z: F32Array,
        a_log: F32Array,
        dt_bias: F32Array,
        lower_bound: float,
        out: F32Array | None = None,
    ) -> F32Array:
        """Decay exp(lower_bound sigmoid(exp(A) (z + b))): z [T, H D], a_log [H], dt_bias [H D]."""
        out = _result_like(out, z)
        self._engine.kda_gate(z, a_log, dt_bias, lower_bound, out)
        return out

    def exp(self, x: F32Array, out: F32Array | None = None) -> F32Array:
        """Exponential e^x of [T, n], off by 0.8 units in the last place at most."""
        return self._map(_Elementwise.EXP, x, x, out)

    def log(self, x: F32Array, out: F32Array | None = None) -> F32Array:
        """Natural logarithm of [T, n], off by 0.9 units at most: -inf at zero, NaN below."""
        return self._map(_Elementwise.LOG, x, x, out)

    def tanh(self, x: F32Array, out: F32Array | None = None) -> F32Array:
        """Hyperbolic tangent of [T, n], off by 1.4 units in the last place at most."""
        return self._map(_Elementwise.TANH, x, x, out)

    def sigmoid(self, x: F32Array, out: F32Array | None = None) -> F32Array:
        """1 / (1 + e^-x) of [T, n], evaluated as written: zero where e^-x overflows (x < -88.72).

        Errors stay below 2 units in the last place except near x = -16.7, where the sum rounds to even just
        above a power of two: 2.48 there, and no exponential could better it.
        """
        return self._map(_Elementwise.SIGMOID, x, x, out)

    def gated(self, x: F32Array, gate: F32Array, out: F32Array | None = None) -> F32Array:
        """Product x sigmoid(gate): [T, n] twice -> [T, n]."""
        return self._map(_Elementwise.GATED, x, gate, out)

    def add(self, a: F32Array, b: F32Array, out: F32Array | None = None) -> F32Array:
        """Sum a + b: [T, n] twice -> [T, n]."""
        return self._map(_Elementwise.ADD, a, b, out)

    def kda_recurrence(
        self,
        q: F32Array,
        k: F32Array,
        v: F32Array,
        decay: F32Array,
        beta: F32Array,
        state: F32Array,
        out: F32Array | None = None,
    ) -> F32Array:
        """The gated delta rule, row after row: q, k, v, decay [T, H D], beta [T, H] -> outputs [T, H D].

        `state` [H, D, D], indexed [head, key, value], is moved forward in place. Per row and head, with q and k
        times 1 / sqrt(sum x^2 + 1e-6) and q times float32(D^-0.5): S' = d S; u = beta (v - S'^T k);
        S = S' + k u^T; o = S^T q. `beta` is already a sigmoid and `decay` an exponential.
        """
        out = _result_like(out, q)
        _expect_ndim("state", state, 3)
        _expect_writable("state", state)
        scale = float(np.float32(max(state.shape[1], 1) ** -0.5))
        self._engine.kda_recurrence(q, k, v, decay, beta, state, scale, out)
        return out

    def kda_output(
        self, o: F32Array, weight: F32Array, gate: F32Array, eps: float, out: F32Array | None = None
    ) -> F32Array:
        """((o r) w) sigmoid(g), r = 1 / sqrt(sum o^2 / D + eps) per head: o, gate [T, H D], weight [D]."""
        out = _result_like(out, o)
        self._engine.kda_output(o, weight, gate, eps, out)
        return out

    def mla_attention(
        self,
        q: F32Array,
        kv_b: Weight,
        cache: F32Array,
        start: int,
        heads: int,
        nope: int,
        v_dim: int,
        scale: float,
        out: F32Array | None = None,
    ) -> F32Array:
        """Latent attention in absorbed form, without its output gate -> [T, heads v_dim].

        Args:
            q: [T, heads (nope + rope)].
            kv_b: F32, Bf16 or Packed12Weight [heads (nope + v_dim), kv_lora]; per head W_k's rows, then W_v's.
            cache: [P >= start + T, kv_lora + rope], the rows of this call included.
            start: position of row 0; row t attends to positions 0 .. start + t.
            heads: number of heads.
            nope: width of the part of a query that W_k turns into a latent.
            v_dim: width of a head's output.
            scale: factor of the scores.
            out: where to put the result.
        """
        _expect_ndim("q", q, 2)
        if isinstance(kv_b, Mxfp4Weight):
            raise ValueError("kv_b is an MXFP4 matrix: latent attention multiplies float32, bfloat16 or 12-bit ones.")
        out = _result(out, (q.shape[0], heads * v_dim))
        self._engine.mla_attention(q, *_stored(kv_b), cache, start, heads, nope, v_dim, scale, out)
        return out

    def route(self, logits: F32Array, bias: F32Array, top_k: int, scaling: float, renormalize: bool) -> Routing:
        """Top-k experts by sigmoid(logit) + bias, ties to the lower id: logits [T, E], bias [E].

        A weight is the score without bias, divided by (the sum of the chosen scores in ascending id + 1e-20)
        where `renormalize` and k > 1, then times `scaling`.
        """
        _expect_ndim("logits", logits, 2)
        rows = logits.shape[0]
        shape = (rows, max(top_k, 0))
        ids = np.empty(shape, np.int32)
        weights = np.empty(shape, np.float32)
        finite = np.empty(rows, np.bool_)
        self._engine.route(logits, bias, top_k, scaling, renormalize, ids, weights, finite)
        return Routing(ids, weights, finite)

    def accumulate_experts(self, outputs: F32Array, weights: F32Array, out: F32Array | None = None) -> F32Array:
        """Weighted sum over experts in the order given: outputs [T, k, n], weights [T, k] -> [T, n]."""
        _expect_ndim("outputs", outputs, 3)
        out = _result(out, (outputs.shape[0], outputs.shape[2]))
        self._engine.accumulate_experts(outputs, weights, out)
        return out

    def argmax(self, logits: F32Array) -> npt.NDArray[np.int64]:
        """Column of each row's largest value, the lowest of equals; -1 where there is a NaN: [T, V] -> [T]."""
        _expect_ndim("logits", logits, 2)
        ids = np.empty(logits.shape[0], np.int64)
        self._engine.argmax(logits, ids)
        return ids

    def all_finite(self, x: F32Array) -> npt.NDArray[np.bool_]:
        """Whether each row of [T, n] holds finite values only -> bool [T]."""
        _expect_ndim("x", x, 2)
        finite = np.empty(x.shape[0], np.bool_)
        self._engine.all_finite(x, finite)
        return finite

    def count_high_bytes(self, bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
        """How often each high byte occurs in raw bfloat16 bits [R, n] -> int64 [256]."""
        counts = np.zeros(256, np.int64)
        self._engine.count_high_bytes(bits, counts)
        return counts

    def encode_panel(
        self, bits: npt.NDArray[np.uint16], table: npt.NDArray[np.uint8], panel: npt.NDArray[np.uint8]
    ) -> int:
        """Writes the 12-bit panel of bits [R, n] into `panel` and returns its length; see `k3.kernels.packed12`."""
        _expect_writable("panel", panel)
        return self._engine.encode12(bits, table, panel)

    def decode_panel(
        self, data: npt.NDArray[np.uint8], table: npt.NDArray[np.uint8], bits: npt.NDArray[np.uint16]
    ) -> None:
        """Writes the bfloat16 bits [R, n] of a 12-bit panel into `bits`; see `k3.kernels.packed12`."""
        _expect_writable("bits", bits)
        self._engine.decode12(data, table, bits)

    def measure_fma_peak(self) -> float:
        """Float32 multiply-adds per second of one core with this instruction set, doing nothing else."""
        return self._engine.fma_rate()

    def measure_read_bandwidth(self, buffer: npt.NDArray[np.uint8], *, all_threads: bool = False) -> float:
        """Bytes per second of the best plain read of a uint8 buffer, by one core or by all threads.

        The buffer should be larger than the caches, on huge pages, and already touched.
        """
        seconds = [self._engine.read_seconds(buffer, streams, all_threads) for streams in READ_STREAMS]
        return buffer.nbytes / min(seconds)

    def _map(
        self,
        op: _Elementwise,
        a: F32Array,
        b: F32Array,
        out: F32Array | None,
        beta: float = 1.0,
        linear_beta: float = 1.0,
    ) -> F32Array:
        out = _result_like(out, a)
        self._engine.elementwise(int(op), a, b, beta, linear_beta, out)
        return out


def _stored(w: Weight) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None, tuple[int, int] | None]:
    """A matrix as the native extension takes it: data, scales or table, and the shape where data doesn't show it."""
    if isinstance(w, Mxfp4Weight):
        return w.packed, w.scales, None
    if isinstance(w, Packed12Weight):
        return w.data, w.table, (w.rows, w.cols)
    return w.data, None, None


def _expect_ndim(name: str, array: F32Array, ndim: int) -> None:
    if array.ndim != ndim:
        raise ValueError(f"{name} has {array.ndim} dimensions, expected {ndim}.")


def _expect_writable(name: str, array: npt.NDArray[Any]) -> None:
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only, but this call updates it in place.")


def _result(out: F32Array | None, shape: tuple[int, ...]) -> F32Array:
    if out is None:
        return np.empty(shape, np.float32)
    _expect_writable("out", out)
    return out


def _result_like(out: F32Array | None, x: F32Array) -> F32Array:
    return _result(out, x.shape)
