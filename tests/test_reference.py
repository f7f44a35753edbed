"""The reference against the recorded results of the official model in float64."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from k3.reference import Reference, Trace
from oracle import DATA, OPS, SETS, expected, ops, prompts

RELATIVE = 1e-9

CASES = [(name, prompt) for name in SETS for prompt in prompts(name)]


def assert_close(got, want, name=""):
    """Equal within 1e-9 of the largest magnitude, where float64 leaves 7e-13."""
    assert got.shape == want.shape, name
    assert np.abs(got - want).max() <= RELATIVE * np.abs(want).max(), name


@cache
def run(name, prompt, generated=0):
    """Logits and trace over a prompt and its first `generated` recorded greedy ids."""
    file, trace = expected(name), Trace()
    ids = [*file[f"p{prompt}.input_ids"], *file[f"p{prompt}.greedy_ids"][:generated]]
    return Reference.from_checkpoint(DATA / name).logits(ids, trace), trace


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_logits_at_every_prompt_position(name, prompt):
    logits, _ = run(name, prompt)
    assert_close(logits, expected(name)[f"p{prompt}.logits_f64"])


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_hidden_states_and_snapshots(name, prompt):
    file, (_, trace) = expected(name), run(name, prompt)
    layers = sum(key.startswith(f"p{prompt}.hidden.") and key.endswith("_f64") for key in file)
    assert sorted(trace.hidden) == list(range(layers))
    for index, hidden in trace.hidden.items():
        assert_close(hidden, file[f"p{prompt}.hidden.{index}_f64"], f"layer {index}")
    assert_close(np.stack(trace.blocks), file[f"p{prompt}.blocks_f64"])
    assert_close(trace.final_mix, file[f"p{prompt}.final_mix_f64"])


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_router_ids_and_weights(name, prompt):
    file, (_, trace) = expected(name), run(name, prompt)
    recorded = {int(key.split(".")[2]) for key in file if key.startswith(f"p{prompt}.router_ids.")}
    assert set(trace.router_ids) == recorded
    for index in recorded:
        np.testing.assert_array_equal(trace.router_ids[index], file[f"p{prompt}.router_ids.{index}"])
        assert_close(trace.router_weights[index], file[f"p{prompt}.router_w.{index}_f64"], f"layer {index}")


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_states_after_the_prompt(name, prompt):
    file, (_, trace) = expected(name), run(name, prompt)
    start = f"p{prompt}.kda_state_prompt."
    layers = [int(key[len(start) : -4]) for key in file if key.startswith(start) and key.endswith("_f64")]
    assert len(layers) == 2
    for index in layers:
        assert_close(trace.kda_states[index].recurrent, file[f"{start}{index}_f64"])
    start = f"p{prompt}.conv_state_prompt."
    found = [key for key in file if key.startswith(start) and key.endswith("_f64")]
    assert found
    for key in found:
        index, which = key[len(start) : -4].split(".")
        assert_close(trace.kda_states[int(index)].conv[which], file[key])


@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_greedy_continuation(name, prompt):
    """One pass over the prompt and the recorded ids: each position's arg-max is the next recorded id.

    That is the greedy continuation, by induction, because logits don't depend on later ids; the prompt's own
    pass, compared above, shows that they don't.
    """
    file = expected(name)
    ids = file[f"p{prompt}.greedy_ids"]
    logits, trace = run(name, prompt, generated=len(ids) - 1)
    tail = logits[-len(ids) :]
    np.testing.assert_array_equal(tail.argmax(axis=1), ids)
    assert_close(tail, file[f"p{prompt}.greedy_logits_f64"])
    margin = np.diff(np.sort(tail, axis=1)[:, -2:], axis=1)[:, 0]
    np.testing.assert_allclose(margin, file[f"p{prompt}.greedy_margin_f64"], atol=1e-9)
    for key in file:
        if key.startswith(f"p{prompt}.kda_state_end.") and key.endswith("_f64"):
            index = int(key.split(".")[2].removesuffix("_f64"))
            assert_close(trace.kda_states[index].recurrent, file[key])


@pytest.mark.parametrize("group", OPS)
def test_component(group):
    results = OPS[group]()
    recorded = {key.removeprefix(f"{group}.").removesuffix("_f64") for key in ops() if key.startswith(f"{group}.")}
    assert {key for key in recorded if f"{group}.{key}_f64" in ops()} <= set(results)
    for key, got in results.items():
        want = next(ops()[name] for suffix in ("_f64", "_f32", "") if (name := f"{group}.{key}{suffix}") in ops())
        assert_close(got, want, key)


def test_mxfp4_is_decoded_exactly():
    results = OPS["mxfp4"]()
    np.testing.assert_array_equal(results["grid"], ops()["mxfp4.grid_f64"])
    np.testing.assert_array_equal(np.signbit(results["grid"]), np.signbit(ops()["mxfp4.grid_f64"]))
    np.testing.assert_array_equal(results["byte_values"], ops()["mxfp4.byte_values"])
    np.testing.assert_array_equal(OPS["mxfp4_matvec"]()["w"], ops()["mxfp4_matvec.w_f32"])
