"""The 12-bit encoding beside plain bfloat16: `python benchmarks/packed.py`, about a minute and 3 GiB.

Bell-shaped weights, encoded as a pack would. Every round reads the buffer, multiplies the bfloat16 matrix and then
the 12-bit one; medians are of all rounds. A rate is weights per second, for all rows of x together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from k3.kernels import (
    Bf16Weight,
    Kernels,
    Packed12Weight,
    Weight,
    available_isas,
    decode_panel,
    encode_panel_into,
    high_byte_counts,
    panel_limit,
    table_of_counts,
)
from k3.kernels.bench import BF16_COLUMNS, huge_buffer

TILE_ROWS = 512
X_ROWS = (1, 2, 4, 8)


def bell_shaped(size: int) -> np.ndarray:
    """bfloat16 bits [rows, 7168] of about `size` bytes: normal weights of deviation 0.02, a tile of them repeated."""
    row = 2 * BF16_COLUMNS
    bits = huge_buffer(size // row * row).view(np.uint16).reshape(-1, BF16_COLUMNS)
    values = np.random.default_rng(0).standard_normal((TILE_ROWS, BF16_COLUMNS), np.float32) * np.float32(0.02)
    tile = (values.view(np.uint32) >> 16).astype(np.uint16)
    for start in range(0, len(bits), TILE_ROWS):
        bits[start : start + TILE_ROWS] = tile[: len(bits) - start]
    return bits


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def encode(bits: np.ndarray, ops: Kernels) -> Packed12Weight:
    """The whole matrix as one panel on huge pages; prints how fast the steps of a pack are."""
    panel = np.empty(panel_limit(*bits.shape), np.uint8)
    table = table_of_counts(high_byte_counts(bits, ops))
    size = encode_panel_into(bits, table, panel, ops)
    counting = median(seconds(lambda: high_byte_counts(bits, ops)) for _ in range(3))
    encoding = median(seconds(lambda: encode_panel_into(bits, table, panel, ops)) for _ in range(3))
    print(
        f"{bits.nbytes / 2**20:.0f} MiB of bfloat16 take {size / bits.nbytes:.4f} of the bytes; "
        f"{ops.threads} threads count {bits.nbytes / counting / 1e9:.1f} GB/s, "
        f"encode {bits.nbytes / encoding / 1e9:.1f} GB/s"
    )
    kept = huge_buffer(size)
    kept[:] = panel[:size]
    assert (decode_panel(kept, *bits.shape, table, ops) == bits).all()
    return Packed12Weight(kept, *bits.shape, table)


def compare(ops: Kernels, plain: Bf16Weight, packed: Packed12Weight, rows: int, rounds: int) -> str:
    """One line of the table."""
    buffer = plain.data.reshape(-1).view(np.uint8)
    x = np.random.default_rng(1).standard_normal((rows, plain.cols), np.float32)
    outs = [np.empty((rows, plain.rows), np.float32) for _ in range(2)]
    weights: tuple[Weight, Weight] = (plain, packed)
    read: list[float] = []
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        read.append(ops.measure_read_bandwidth(buffer, all_threads=ops.threads > 1))
        for weight, out, times in zip(weights, outs, spent, strict=True):
            start = time.perf_counter()
            ops.matmul(x, weight, out)
            times.append(time.perf_counter() - start)
    assert (outs[0].view(np.uint32) == outs[1].view(np.uint32)).all()
    bandwidth, count = median(read), plain.rows * plain.cols
    columns = [
        f"{count / median(times) / 1e9:>10.2f}{weight.nbytes / median(times) / bandwidth:>14.2f}"
        for weight, times in zip(weights, spent, strict=True)
    ]
    ratio = median(spent[0]) / median(spent[1])
    return f"{ops.isa:<8}{ops.threads:>8}{rows:>6}{bandwidth / 1e9:>12.1f}{''.join(columns)}{ratio:>8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the bfloat16 matrix (default: 1024)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa", action="append", choices=available_isas(), help="default: all but the portable one")
    arguments = parser.parse_args()
    bits = bell_shaped(arguments.mib << 20)
    packed = encode(bits, Kernels())
    header = f"{'isa':<8}{'threads':>8}{'rows':>6}{'read GB/s':>12}"
    print(f"{header}{'bf16 G/s':>10}{'of bandwidth':>14}{'12b G/s':>10}{'of bandwidth':>14}{'ratio':>8}")
    for threads in sorted({1, Kernels().threads}):
        for isa in arguments.isa or available_isas()[1:] or available_isas():
            for rows in X_ROWS:
                print(compare(Kernels(threads, isa), Bf16Weight(bits), packed, rows, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
