"""Decoding a few tokens under a setting of the memory dial, for the benchmarks beside this file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import k3


@dataclass(frozen=True)
class Decoded:
    """Medians over the tokens; bytes are payload."""

    seconds: float
    nbytes: float
    hits: float
    planned: int
    trunk_kept: int
    experts_kept: int


def decode(model_dir: Path, tokens: int, **settings: Any) -> Decoded:
    """Load, warm up with one prompt of 32 rows, decode `tokens` tokens."""
    with k3.load(model_dir, context=512, **settings) as model:
        engine, vocab = model.engine, model.config.vocab_size
        sequence = engine.new_sequence()
        for start in range(0, 32, model.plan.chunk):
            engine.step([(sequence, [i * 31 % vocab for i in range(start, min(32, start + model.plan.chunk))])])
        seconds, nbytes, hits = [], [], []
        for token in range(tokens):
            before, began = engine.costs(), time.perf_counter()
            engine.step([(sequence, [(token * 7919 + 1) % vocab])])
            seconds.append(time.perf_counter() - began)
            spent = engine.costs() - before
            nbytes.append(spent.bytes_read.total)
            hits.append(spent.expert_resident_hits / max(1, spent.expert_requests))
        plan = model.plan
        kept = sum(block.nbytes for block in plan.pinned)
        return Decoded(median(seconds), median(nbytes), median(hits), plan.total_bytes, kept, plan.expert_slots)
