"""The engine is in none of the traps: it agrees with the reference, and with no misreading of it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import k3
from conftest import TINY_C, edit_tensor
from k3 import reference
from k3.errors import CheckpointError
from k3.kernels import Kernels
from oracle import DATA, SETS, expected, moe_settings, ops
from traps import TRAPS

AGREES = 1e-4
DIFFERS = 1e-3
"""Of the largest logit. The recorded traps move a logit by a hundred times that, or more."""

PROMPT = {"tiny-a": 0, "tiny-c": 3}
NOT_IN_LOGITS = {"weights_not_renormalised", "weights_not_scaled"}
"""A common factor of a row's router weights cancels in the norm behind the experts."""


@cache
def engine_logits(name):
    with k3.load(DATA / name, context=128) as model:
        return model.logits(expected(name)[f"p{PROMPT[name]}.input_ids"].tolist()).astype(np.float64)


def distance_to_reference(name):
    wanted = reference.Reference.from_checkpoint(DATA / name).logits(expected(name)[f"p{PROMPT[name]}.input_ids"])
    return np.abs(engine_logits(name) - wanted).max() / np.abs(engine_logits(name)).max()


def router_distance(scaling):
    """Between the kernel's router weights and the reference's, on the recorded inputs."""
    data = {name: ops()[f"router.{name}"] for name in ("x", "weight", "bias", "ids")}
    top_k = data["ids"].shape[1]
    x, weight = data["x"].astype(np.float64), data["weight"].astype(np.float64)
    settings = moe_settings(top_k, scaling)
    wanted_ids, wanted = reference.router(x, weight, data["bias"].astype(np.float64), settings)
    routing = Kernels(threads=1).route((x @ weight.T).astype(np.float32), data["bias"], top_k, scaling, True)
    order = np.argsort(routing.ids, axis=1)
    assert np.array_equal(np.take_along_axis(routing.ids, order, 1), np.sort(wanted_ids, axis=1))
    wanted = np.take_along_axis(wanted, np.argsort(wanted_ids, axis=1), 1)
    return np.abs(np.take_along_axis(routing.weights, order, 1) - wanted).max()


@pytest.mark.parametrize("name", SETS)
def test_the_engine_agrees_with_the_reference(name):
    assert distance_to_reference(name) < AGREES
    assert router_distance(2.5) < 1e-6


@pytest.mark.parametrize("trap", [trap for trap in TRAPS if trap.number != 13], ids=str)
def test_the_engine_differs_from_a_misreading(trap):
    with trap.fallen_into():
        if trap.title in NOT_IN_LOGITS:
            assert router_distance(2.5) > DIFFERS
        else:
            assert max(distance_to_reference(name) for name in SETS) > DIFFERS


@pytest.mark.parametrize("layer_lists", ["zero-based", "swapped"])
def test_another_layer_map_is_refused(checkpoint, layer_lists):
    """Layer lists are 1-based; read otherwise they ask for tensors that are not there."""
    from conftest import edit_json

    def change(config):
        lists = config["text_config"]["linear_attn_config"]
        layers = config["text_config"]["num_hidden_layers"]
        if layer_lists == "swapped":
            lists["kda_layers"], lists["full_attn_layers"] = lists["full_attn_layers"], lists["kda_layers"]
        else:
            full = {(number + 1) % layers + 1 for number in lists["full_attn_layers"]}
            lists["full_attn_layers"] = sorted(full)
            lists["kda_layers"] = sorted(set(range(1, layers + 1)) - full)

    edit_json(checkpoint / "config.json", change)
    with pytest.raises(CheckpointError, match=r"self_attn") as raised:
        k3.load(checkpoint)
    assert raised.value.exit_code == 2


def test_a_log_beyond_the_heads_is_refused(checkpoint):
    name = "language_model.model.layers.1.self_attn.A_log"
    edit_tensor(checkpoint, name, "<f4", lambda values: values.__setitem__(30, 0.25))
    with pytest.raises(CheckpointError, match=r"layer 1: self_attn.A_log: expected zeros from entry 3 on") as raised:
        k3.load(checkpoint)
    assert raised.value.exit_code == 2
    assert TINY_C.is_dir()


def test_heads_go_with_their_rates(checkpoint):
    """Exchanging two heads everywhere they appear in a layer changes nothing but rounding order of o_proj."""
    at = "language_model.model.layers.1.self_attn."
    ids = [9, 8, 7, 6, 5, 4]
    with k3.load(checkpoint, context=64) as model:
        before = model.logits(ids)

    def exchange(axis_size):
        def change(values):
            heads = values.reshape(3, -1) if axis_size is None else values.reshape(-1, 3, axis_size)
            if axis_size is None:
                heads[[0, 1]] = heads[[1, 0]]
            else:
                heads[:, [0, 1]] = heads[:, [1, 0]]

        return change

    for name, dtype in (
        ("q_proj", "<u2"),
        ("k_proj", "<u2"),
        ("v_proj", "<u2"),
        ("g_proj", "<u2"),
        ("b_proj", "<u2"),
        ("f_b_proj", "<u2"),
        ("q_conv1d", "<f4"),
        ("k_conv1d", "<f4"),
        ("v_conv1d", "<f4"),
    ):
        edit_tensor(checkpoint, f"{at}{name}.weight", dtype, exchange(None))
    edit_tensor(checkpoint, f"{at}dt_bias", "<f4", exchange(None))
    edit_tensor(checkpoint, f"{at}o_proj.weight", "<u2", exchange(32))
    with k3.load(checkpoint, context=64) as model:
        rates_left_behind = model.logits(ids)
    edit_tensor(checkpoint, f"{at}A_log", "<f4", lambda values: values.__setitem__([0, 1], values[[1, 0]]))
    with k3.load(checkpoint, context=64) as model:
        after = model.logits(ids)
    largest = np.abs(before).max()
    assert np.abs(after - before).max() / largest < AGREES
    assert np.abs(rates_left_behind - before).max() / largest > DIFFERS
