"""The engine against what the official model computes: logits, hidden states, routers, states, greedy ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from safetensors.numpy import load_file

import k3
from conftest import TINY_A, TINY_C
from k3.kernels import Kernels
from k3.model.attention_residual import AttentionResidual, ResidualStream
from k3.model.kda import Kda
from k3.model.latent_moe import LatentMoe
from k3.model.mla import Mla

LOGITS = 1e-4
"""Of the largest magnitude: the promise of the numeric contract."""
HIDDEN = 1e-3
STATES = 1e-4
ROUTER_WEIGHTS = 1e-5
"""Absolute; weights lie in 0..1 and carry the error of a router score in float32."""

PROMPTS = [(TINY_A, 0), (TINY_A, 1), (TINY_C, 0), (TINY_C, 1), (TINY_C, 2), (TINY_C, 3)]


@pytest.fixture(scope="module", params=PROMPTS, ids=lambda p: f"{p[0].name}-{p[1]}")
def case(request):
    directory, prompt = request.param
    expected = load_file(directory / "expected.safetensors")
    prefix = f"p{prompt}."
    named = {name.removeprefix(prefix): value for name, value in expected.items() if name.startswith(prefix)}
    with k3.load(directory) as model:
        yield model, named


@dataclass
class Walk:
    """What passes through the layers of one step."""

    attention_mix: list[np.ndarray] = field(default_factory=list)
    mlp_mix: list[np.ndarray] = field(default_factory=list)
    attention_out: list[np.ndarray] = field(default_factory=list)
    mlp_out: list[np.ndarray] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)
    snapshots: list[np.ndarray] = field(default_factory=list)
    routing: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


@pytest.fixture
def walk(case, monkeypatch):
    """Run the prompt as one step, and record."""
    model, expected = case
    record = Walk()
    mixes: list[np.ndarray] = []
    mix, add, route, snapshot = AttentionResidual.__call__, ResidualStream.add, Kernels.route, ResidualStream.snapshot
    moe_layers = [i for i in range(model.config.num_hidden_layers) if model.config.is_moe(i)]

    def spy_mix(self, ops, stream):
        mixes.append(mix(self, ops, stream))
        return mixes[-1]

    def spy_add(self, ops, update):
        add(self, ops, update)
        into = record.attention_out if len(record.attention_out) == len(record.mlp_out) else record.mlp_out
        into.append(update)
        if into is record.mlp_out:
            record.hidden.append(self.prefix)

    def spy_route(self, *arguments):
        routing = route(self, *arguments)
        record.routing[moe_layers[len(record.routing)]] = (routing.ids, routing.weights)
        return routing

    def spy_snapshot(self):
        snapshot(self)
        record.snapshots.append(self.snapshots[-1])

    monkeypatch.setattr(AttentionResidual, "__call__", spy_mix)
    monkeypatch.setattr(ResidualStream, "add", spy_add)
    monkeypatch.setattr(ResidualStream, "snapshot", spy_snapshot)
    monkeypatch.setattr(Kernels, "route", spy_route)
    sequence = model.engine.new_sequence()
    [result] = model.engine.step([(sequence, expected["input_ids"].tolist())], logits="none")
    assert result.shape == (0, model.config.vocab_size)
    record.attention_mix, record.mlp_mix, final = mixes[0:-1:2], mixes[1:-1:2], mixes[-1]
    return model, expected, record, final, sequence


def close(found, expected, tolerance):
    error = float(np.abs(found - expected).max())
    assert error <= tolerance, f"differs by {error:.2e}, allowed {tolerance:.0e}"


def test_logits_at_every_position(case):
    model, expected = case
    logits = model.logits(expected["input_ids"].tolist())
    close(logits, expected["logits_f64"], LOGITS * np.abs(expected["logits_f64"]).max())


def test_greedy_continuation(case):
    model, expected = case
    greedy = expected["greedy_ids"].tolist()
    tokens = list(model.generate(expected["input_ids"].tolist(), max_new_tokens=len(greedy), ignore_eos=True))
    assert [token.id for token in tokens] == greedy


def test_logits_that_chose_each_token(case):
    model, expected = case
    sequence = model.engine.new_sequence()
    pending = expected["input_ids"].tolist()
    for token, wanted in zip(expected["greedy_ids"].tolist(), expected["greedy_logits_f64"], strict=True):
        [logits] = model.engine.step([(sequence, pending)])
        close(logits[0], wanted, LOGITS * np.abs(wanted).max())
        pending = [token]


def test_hidden_states_after_every_layer(walk):
    _, expected, record, final, _ = walk
    for layer, hidden in enumerate(record.hidden):
        close(hidden, expected[f"hidden.{layer}_f64"], HIDDEN)
        close(record.attention_mix[layer], expected[f"attn_mix.{layer}_f32"], HIDDEN)
        close(record.mlp_mix[layer], expected[f"mlp_mix.{layer}_f32"], HIDDEN)
        close(record.attention_out[layer], expected[f"attn_out.{layer}_f32"], HIDDEN)
        close(record.mlp_out[layer], expected[f"mlp_out.{layer}_f32"], HIDDEN)
    close(final, expected["final_mix_f64"], HIDDEN)
    close(np.stack(record.snapshots), expected["blocks_f64"], HIDDEN)


def test_router_choices_and_weights(walk):
    model, expected, record, _, _ = walk
    assert list(record.routing) == list(model.config.moe_layers)
    for layer, (ids, weights) in record.routing.items():
        order = np.argsort(ids, axis=1)
        assert np.array_equal(np.take_along_axis(ids, order, 1), expected[f"router_ids.{layer}"])
        close(np.take_along_axis(weights, order, 1), expected[f"router_w.{layer}_f64"], ROUTER_WEIGHTS)


def recorded_layers(expected, group):
    """Layers whose state was recorded, by the names of the group."""
    names = (name for name in expected if name.startswith(f"{group}.") and name.endswith("_f64"))
    return sorted({int(name.split(".")[1].removesuffix("_f64")) for name in names})


def test_states_after_the_prompt(walk):
    _, expected, _, _, sequence = walk
    layers = recorded_layers(expected, "kda_state_prompt")
    assert len(layers) == 2
    for layer in layers:
        close(sequence._states[layer].recurrent, expected[f"kda_state_prompt.{layer}_f64"], STATES)
    [layer] = recorded_layers(expected, "conv_state_prompt")
    for name in "qkv":
        tail = getattr(sequence._states[layer], f"{name}_tail").T
        close(tail, expected[f"conv_state_prompt.{layer}.{name}_f64"][:, -tail.shape[1] :], STATES)


def test_states_after_the_continuation(case):
    model, expected = case
    sequence = model.engine.new_sequence()
    ids = expected["input_ids"].tolist() + expected["greedy_ids"].tolist()[:-1]
    model.engine.step([(sequence, ids)])
    layers = recorded_layers(expected, "kda_state_end")
    assert len(layers) == 2
    for layer in layers:
        close(sequence._states[layer].recurrent, expected[f"kda_state_end.{layer}_f64"], STATES)


def test_every_layer_kind_is_there(case):
    model, _ = case
    layers = model.engine._transformer._layers
    assert {type(layer.attention) for layer in layers} == {Kda, Mla}
    assert isinstance(layers[-1].feed_forward, LatentMoe)
