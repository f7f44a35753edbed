"""How fast the kernels are, beside what the machine could do, measured in the same run.

Two limits count: the multiply-adds per second of one core in a loop of nothing else (with the best instruction
set), and the bytes per second of a plain read. Every repeat measures the limits and all products once, one after
another, and medians are taken at the end, so that a disturbance of the machine meets both sides of a fraction.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from k3.kernels.ops import Kernels
from k3.kernels.packed12 import BLOCK, LISTED_BLOCK_BYTES, PACKED_BLOCK_BYTES
from k3.kernels.select import available_isas
from k3.kernels.weights import MXFP4_GROUP, Bf16Weight, Mxfp4Weight, Packed12Weight, Weight

BF16_COLUMNS = 7168
"""Width of the residual stream: the columns of most trunk matrices."""
MXFP4_COLUMNS = 3584
"""Width of the latent: the columns of an expert's w1 and w3."""
EXPERT_ROWS = 3072
LISTED_PART = 0.005
"""Blocks that bell-shaped weights keep raw in the 12-bit encoding."""
_PATTERN = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """The machine's own limits. `peak` in multiply-adds/s of one core; bandwidths in bytes/s."""

    peak: float
    bandwidth: float
    threads: int
    bandwidth_of_threads: float
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One product. `giga` is 10^9 multiply-adds/s, `gigabytes` 10^9 weight bytes/s; fractions are of the limits."""

    name: str
    isa: str
    threads: int
    rows: int
    giga: float
    gigabytes: float
    of_bandwidth: float
    of_peak: float


@dataclass(frozen=True, slots=True)
class Report:
    """Limits and products of one run, medians of `repeats`."""

    limits: Limits
    measurements: tuple[Measurement, ...]
    repeats: int

    def lines(self) -> list[str]:
        """A table for people."""
        limits = self.limits
        head = (
            f"one core: {limits.peak / 1e9:.1f} G multiply-adds/s, reads {limits.bandwidth / 1e9:.1f} GB/s; "
            f"{limits.threads} threads read {limits.bandwidth_of_threads / 1e9:.1f} GB/s "
            f"(buffer {limits.buffer_bytes / 2**20:.0f} MiB, medians of {self.repeats})"
        )
        columns = f"{'product':<28}{'isa':>8}{'threads':>8}{'rows':>6}{'G/s':>8}{'GB/s':>8}"
        rows = [
            f"{m.name:<28}{m.isa:>8}{m.threads:>8}{m.rows:>6}{m.giga:>8.1f}{m.gigabytes:>8.1f}"
            f"{m.of_bandwidth:>14.2f}{m.of_peak:>9.2f}"
            for m in self.measurements
        ]
        return [head, f"{columns}{'of bandwidth':>14}{'of peak':>9}", *rows]


@dataclass(frozen=True, slots=True)
class _Product:
    """A product to time: x [rows, n] with a matrix, called `calls` times in a row."""

    name: str
    ops: Kernels
    weight: Weight
    rows: int
    calls: int

    def seconds(self) -> float:
        """Mean time of a call."""
        x = np.random.default_rng(0).standard_normal((self.rows, self.weight.cols)).astype(np.float32)
        out = np.empty((self.rows, self.weight.rows), np.float32)
        start = time.perf_counter()
        for _ in range(self.calls):
            self.ops.matmul(x, self.weight, out)
        return (time.perf_counter() - start) / self.calls

    def measurement(self, seconds: float, limits: Limits) -> Measurement:
        """The product's speed, as fractions of what its threads could do."""
        threads = self.ops.threads
        speed = self.rows * self.weight.rows * self.weight.cols / seconds
        read = self.weight.nbytes / seconds
        bandwidth = limits.bandwidth if threads == 1 else limits.bandwidth_of_threads
        return Measurement(
            name=self.name,
            isa=self.ops.isa,
            threads=threads,
            rows=self.rows,
            giga=speed / 1e9,
            gigabytes=read / 1e9,
            of_bandwidth=read / bandwidth,
            of_peak=speed / (limits.peak * threads),
        )


def huge_buffer(size: int) -> npt.NDArray[np.uint8]:
    """`size` bytes on huge pages where the system has them, all touched.

    The bytes are finite numbers of moderate size as bfloat16 and any codes as MXFP4.
    """
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    pattern = np.random.default_rng(0).integers(0x38, 0x40, _PATTERN, dtype=np.uint8)
    for start in range(0, size, _PATTERN):
        buffer[start : start + _PATTERN] = pattern[: size - start]
    return buffer


def measure(
    isas: Sequence[str] | None = None,
    threads: int | None = None,
    buffer_bytes: int = 1 << 30,
    repeats: int = 7,
) -> Report:
    """Times products with bfloat16, 12-bit and MXFP4 matrices, on one core and on all threads.

    Args:
        isas: instruction sets to time on one core; None: all available but the portable one.
        threads: threads of the parallel rows; None: the physical cores.
        buffer_bytes: size of the matrices in memory; where caches are as large, fractions mislead.
        repeats: rounds whose medians are reported.
    """
    available = available_isas()
    names = list(isas or available[1:] or available)
    best = Kernels(1, available[-1])
    parallel = Kernels(threads, available[-1])
    everything = huge_buffer(buffer_bytes + buffer_bytes // 64)
    buffer, packed = everything[:buffer_bytes], packed12_over(everything, buffer_bytes)
    products = [p for name in names for p in _products(Kernels(1, name), buffer, packed)]
    products += _products(parallel, buffer, packed) if parallel.threads > 1 else []
    seconds: list[list[float]] = [[] for _ in products]
    limits: list[Limits] = []
    for _ in range(repeats):
        limits.append(_limits(best, parallel, buffer))
        for times, product in zip(seconds, products, strict=True):
            times.append(product.seconds())
    middle = Limits(
        peak=median(limit.peak for limit in limits),
        bandwidth=median(limit.bandwidth for limit in limits),
        threads=parallel.threads,
        bandwidth_of_threads=median(limit.bandwidth_of_threads for limit in limits),
        buffer_bytes=buffer_bytes,
    )
    rows = [p.measurement(median(times), middle) for p, times in zip(products, seconds, strict=True)]
    return Report(middle, tuple(rows), repeats)


def _limits(best: Kernels, parallel: Kernels, buffer: npt.NDArray[np.uint8]) -> Limits:
    return Limits(
        peak=best.measure_fma_peak(),
        bandwidth=best.measure_read_bandwidth(buffer),
        threads=parallel.threads,
        bandwidth_of_threads=parallel.measure_read_bandwidth(buffer, all_threads=True),
        buffer_bytes=buffer.nbytes,
    )


def packed12_over(buffer: npt.NDArray[np.uint8], body_bytes: int) -> Packed12Weight:
    """A 12-bit matrix whose packed rows are the first bytes of a buffer, whatever they are.

    Its listed blocks are written behind them: what follows `body_bytes` must have room for them.
    """
    row_blocks = BF16_COLUMNS // BLOCK
    rows = body_bytes // (row_blocks * PACKED_BLOCK_BYTES)
    blocks = rows * row_blocks
    listed = np.flatnonzero(np.random.default_rng(0).random(blocks) < LISTED_PART)
    start = blocks * PACKED_BLOCK_BYTES
    end = start + len(listed) * LISTED_BLOCK_BYTES
    buffer[end - 4 * len(listed) : end] = listed.astype("<u4").view(np.uint8)
    high_bytes = np.concatenate([np.arange(0x38, 0x40), np.arange(0xB8, 0xC0)]).astype(np.uint8)
    return Packed12Weight(buffer[:end], rows, BF16_COLUMNS, high_bytes)


def _products(ops: Kernels, buffer: npt.NDArray[np.uint8], packed: Packed12Weight) -> list[_Product]:
    words = buffer[: buffer.nbytes // 2 * 2].view(np.uint16)
    trunk = Bf16Weight(words[: len(words) // BF16_COLUMNS * BF16_COLUMNS].reshape(-1, BF16_COLUMNS))
    expert = _mxfp4(buffer[: EXPERT_ROWS * MXFP4_COLUMNS // 2])
    experts = _mxfp4(buffer)
    return [
        *(_Product("bf16, in memory", ops, trunk, rows, 1) for rows in (1, 8)),
        *(_Product("bf16 in 12 bits, in memory", ops, packed, rows, 1) for rows in (1, 8)),
        *(_Product("mxfp4, one expert", ops, expert, rows, 8) for rows in (1, 2, 4, 8, 32)),
        *(_Product("mxfp4, in memory", ops, experts, rows, 1) for rows in (1, 8)),
    ]


def _mxfp4(buffer: npt.NDArray[np.uint8]) -> Mxfp4Weight:
    row = MXFP4_COLUMNS // 2
    packed = buffer[: len(buffer) // row * row].reshape(-1, row)
    scales = np.full((len(packed), MXFP4_COLUMNS // MXFP4_GROUP), 121, np.uint8)
    return Mxfp4Weight(packed, scales)
