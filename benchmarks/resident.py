"""Decoding with all weights resident, beside the memory floor: `python benchmarks/resident.py MODEL`.

The floor of a token is the bytes of the weights that it multiplies, divided by the bandwidth of a plain read by the
same number of threads. Both are measured here, alternating, and medians are printed. `k3 synth wide DIR` writes a
checkpoint of real widths for it (12 GB).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import k3
from k3.kernels.bench import huge_buffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trunk", type=Path, help="a packed trunk")
    parser.add_argument("--tokens", type=int, default=15)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    buffer = huge_buffer(1 << 30)
    with k3.load(arguments.model, trunk=arguments.trunk, context=256, threads=arguments.threads) as model:
        engine, config, plan = model.engine, model.config, model.plan
        if plan.ring_bytes or plan.expert_slots < len(config.moe_layers) * config.num_experts:
            raise SystemExit("the weights do not fit in memory")
        experts = len(config.moe_layers) * config.num_experts_per_token
        expert_bytes = plan.items["experts kept"] // plan.expert_slots
        token_bytes = sum(block.nbytes for block in plan.pinned) + experts * expert_bytes
        sequence = engine.new_sequence()
        engine.step([(sequence, [1])])
        seconds, floors = [], []
        for token in range(arguments.tokens):
            began = time.perf_counter()
            engine.step([(sequence, [(token * 7919) % config.vocab_size])])
            seconds.append(time.perf_counter() - began)
            bandwidth = engine.ops.measure_read_bandwidth(buffer, all_threads=engine.ops.threads > 1)
            floors.append(token_bytes / bandwidth)
        ratios = [floor / spent for floor, spent in zip(floors, seconds, strict=True)]
        print(f"{engine.ops.isa}, {engine.ops.threads} threads, medians of {arguments.tokens} tokens")
        print(f"weights a token: {token_bytes / 1e9:.2f} GB ({experts} experts of {expert_bytes / 1e6:.1f} MB)")
        print(f"seconds a token: {median(seconds):.3f}")
        print(f"floor, bytes / bandwidth: {median(floors):.3f} s ({token_bytes / median(floors) / 1e9:.1f} GB/s)")
        print(f"fraction of the floor reached: {median(ratios):.2f}")


if __name__ == "__main__":
    main()
