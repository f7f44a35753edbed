"""How fast this machine is at what a token asks of it, measured in a second or two."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from k3.engine.loading import Bound
from k3.engine.machine import group_memory, memory_limit
from k3.errors import K3Error
from k3.kernels import MXFP4_GROUP, F32Array, Kernels, Mxfp4Weight
from k3.kernels.bench import MXFP4_COLUMNS, huge_buffer
from k3.storage.disk_bench import DiskReport, has_holes, largest_on_each_drive, measure_drive

_BUFFER = 512 << 20
_ROUNDS = 5
_PRODUCT_BYTES = 128 << 20
_LEAST_TO_READ = 256 << 20


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes/s of the drives, None where unknown; bytes/s of the memory, and multiply-adds/s, of all threads."""

    drive: float | None
    memory: float
    multiply_adds: float


def measure_arithmetic(ops: Kernels) -> tuple[float, float]:
    """Bytes/s of a plain read of memory, and multiply-adds/s of a one-row product with experts, of all threads.

    Matrices in bf16 are bound by the memory; the multiply-adds of experts in MXFP4, with their decoding, are what may
    take longer, so they are what is measured. Takes up to 512 MiB while it runs, a quarter of what is to be had.
    """
    nbytes = min(_BUFFER, memory_limit(None, group_memory()) // 4)
    buffer = huge_buffer(nbytes)
    bandwidth = median(ops.measure_read_bandwidth(buffer, all_threads=True) for _ in range(_ROUNDS))
    row = MXFP4_COLUMNS // 2
    packed = buffer[: min(nbytes, _PRODUCT_BYTES) // row * row].reshape(-1, row)
    weight = Mxfp4Weight(packed, np.full((len(packed), MXFP4_COLUMNS // MXFP4_GROUP), 121, np.uint8))
    x = np.random.default_rng(0).standard_normal((1, MXFP4_COLUMNS)).astype(np.float32)
    out = np.empty((1, weight.rows), np.float32)
    return bandwidth, weight.rows * weight.cols / median(_seconds(ops, x, weight, out) for _ in range(_ROUNDS))


def measure_drives(bound: Bound, *, direct: bool = True) -> DiskReport | str:
    """A short measurement of the drives, by the model's own files and as a run reads; or why there is none."""
    files = largest_on_each_drive(model_files(bound))
    if any(has_holes(path) for path in files):
        return "the files have holes, which no drive is asked for"
    if sum(path.stat().st_size for path in files) < _LEAST_TO_READ:
        return "the files are too small to measure by"
    try:
        return measure_drive(files, bound.layout.largest_expert_bytes, direct=direct)
    except K3Error as error:
        return str(error)


def model_files(bound: Bound) -> list[Path]:
    """The files that a run reads weights from."""
    paths = {block.path for matrix in bound.needs.matrices for block in matrix.blocks}
    return sorted(paths.union(*(table.shards for table in bound.layout.experts.values())))


def _seconds(ops: Kernels, x: F32Array, weight: Mxfp4Weight, out: F32Array) -> float:
    began = time.perf_counter()
    ops.matmul(x, weight, out)
    return time.perf_counter() - began
