"""Whether the drive ever waits: `python benchmarks/drive.py MODEL [--trunk DIR]`.

With nothing kept in memory, decoding reads every byte of the trunk and of its experts. Its rate is compared with that
of a bare reader that takes the same ranges of the same files, in the same order, at the best number of reads in flight,
and does nothing with them. The two alternate; the medians of the pairwise ratios count. `k3 synth wide DIR` writes a
checkpoint for it.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median

import k3
from k3.checkpoint.layout import ExpertTable
from k3.engine.loading import Bound, LoadOptions, bind_checkpoint
from k3.storage.arena import Arena
from k3.storage.reader import PAGE, ByteClass, Read, Reader, aligned_span

Range = tuple[Path, int, int]


def token_ranges(bound: Bound, draw: Random) -> Iterator[Range]:
    """What a token reads: the blocks of the walk, and of each MoE layer as many experts as a token has, drawn anew."""
    experts = {
        layer: draw.sample(range(len(table)), bound.config.num_experts_per_token) for layer, table in tables(bound)
    }
    for layer, table in tables(bound):
        for expert in experts[layer]:
            record = table.record(expert)
            assert record is not None
            yield record.path, record.offset, record.nbytes
    for matrix in bound.matrices.values():
        for block in matrix.stored.blocks:
            yield block.path, block.offset, block.nbytes


def tables(bound: Bound) -> list[tuple[int, ExpertTable]]:
    return list(bound.layout.experts.items())


def bare_rate(bound: Bound, depth: int, seconds: float) -> float:
    """Bytes per second of whole tokens' ranges, `depth` reads in flight; pages that alignment adds are counted."""
    reader = Reader(threads=depth)
    largest = max(aligned_span(offset, nbytes) for _, offset, nbytes in token_ranges(bound, Random(0)))
    room = -(-largest // PAGE) * PAGE + PAGE
    arena = Arena((depth + 1) * room)
    free = deque(arena.take(room) for _ in range(depth + 1))
    flying: deque[Read] = deque()
    draw, done, began = Random(1), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for path, offset, nbytes in token_ranges(bound, draw):
            if not free:
                read = flying.popleft()
                read.wait()
                done += read.span
                free.append(read.buffer)
            flying.append(reader.submit(path, offset, nbytes, free.popleft(), ByteClass.TRUNK, demand=False))
    for read in flying:
        read.wait()
        done += read.span
    spent = time.perf_counter() - began
    if not reader.direct:
        raise SystemExit("the file system refuses direct reads: this would measure memory")
    reader.close()
    return done / spent


def engine_rate(model: k3.Model, sequence: k3.Sequence, seconds: float) -> tuple[float, float, float]:
    """Bytes per second while decoding, seconds a token, bytes a token; pages that alignment adds are counted."""
    before, began, tokens = model.engine.costs(), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        model.engine.step([(sequence, [(tokens * 7919 + 1) % model.config.vocab_size])])
        tokens += 1
    spent = time.perf_counter() - began
    costs = model.engine.costs() - before
    nbytes = costs.bytes_read.total + costs.padding_bytes
    return nbytes / spent, spent / tokens, nbytes / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trunk", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    bound = bind_checkpoint(arguments.model, LoadOptions(trunk=arguments.trunk))
    rates = {depth: bare_rate(bound, depth, arguments.seconds / 2) for depth in (8, 16, 32, 64)}
    print("bare reader:", ", ".join(f"{depth} in flight {rate / 1e9:.2f} GB/s" for depth, rate in rates.items()))
    best = max(rates, key=lambda depth: rates[depth])
    with k3.load(arguments.model, trunk=arguments.trunk, trunk_gb=0, cache_gb=0, context=512, chunk=1) as model:
        sequence = model.engine.new_sequence()
        model.engine.step([(sequence, [1])])
        pairs = []
        for _ in range(arguments.pairs):
            engine, per_token, nbytes = engine_rate(model, sequence, arguments.seconds)
            bare = bare_rate(bound, best, arguments.seconds)
            pairs.append((engine / bare, per_token / (nbytes / bare)))
            print(
                f"engine {engine / 1e9:.2f} GB/s, {per_token:.3f} s a token of {nbytes / 1e9:.2f} GB; "
                f"bare {bare / 1e9:.2f} GB/s"
            )
    print(f"rate, engine / bare reader: {median(rate for rate, _ in pairs):.3f}")
    print(f"seconds a token / (bytes / bare rate): {median(time for _, time in pairs):.3f}")


if __name__ == "__main__":
    main()
