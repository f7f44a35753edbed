"""Each trap of the model is visible in the recorded data: whoever falls into one is found out.

The measure is the distance of a result from the recorded float64 one, in units of the noise: the distance of
the recorded float32 one, which is another sound implementation.
"""

from __future__ import annotations

import numpy as np
import pytest

from k3.errors import CheckpointError
from k3.reference import Reference, Trace
from oracle import DATA, OPS, SETS, expected, ops
from traps import TRAPS

NOISES = 500
PROMPT = {"tiny-a": 0, "tiny-c": 3}


def distance(got, exact, other):
    """How far `got` is from `exact`, as a multiple of how far `other` is; infinite where it is not finite."""
    noise = max(np.abs(other - exact).max(), 1e-7 * np.abs(exact).max())
    error = np.abs(got - exact).max()
    return error / noise if np.isfinite(error) else np.inf


def in_logits(name):
    """The distance of the logits of one prompt of a set."""
    file, p = expected(name), PROMPT[name]
    logits = Reference.from_checkpoint(DATA / name).logits(file[f"p{p}.input_ids"], Trace())
    return distance(logits, file[f"p{p}.logits_f64"], file[f"p{p}.logits_f32"])


def in_component(group):
    """The largest distance in the vectors of one group; infinite where integers differ."""
    found = 0.0
    for key, got in OPS[group]().items():
        names = [f"{group}.{key}{suffix}" for suffix in ("", "_f64", "_f32")]
        exact, f64, f32 = (ops().get(name) for name in names)
        if exact is not None:
            found = max(found, 0.0 if np.array_equal(got, exact) else np.inf)
        elif f64 is not None:
            found = max(found, distance(got, f64, f32 if f32 is not None else f64))
    return found


def largest_distance():
    """Over logits first, then components; no further than it takes."""
    found = 0.0
    for measure, names in ((in_logits, SETS), (in_component, OPS)):
        for name in names:
            found = max(found, measure(name))
            if found >= NOISES:
                return found
    return found


def test_the_right_reading_is_closer_than_the_noise():
    assert largest_distance() < 0.01


@pytest.mark.parametrize("trap", TRAPS, ids=str)
def test_trap(trap):
    if trap.number == 13:
        # Read from zero, the lists name layers of the other kind, whose tensors are not there.
        with trap.fallen_into(), pytest.raises(CheckpointError, match="self_attn"):
            largest_distance()
        return
    with trap.fallen_into():
        assert largest_distance() >= NOISES


def test_every_trap_is_tried():
    assert {trap.number for trap in TRAPS} == set(range(1, 15))
