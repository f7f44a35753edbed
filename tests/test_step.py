"""The step: its results, what voids a sequence, what it leaves alone, and the order in which it asks for weights."""

from __future__ import annotations

import numpy as np
import pytest

import k3
from conftest import TINY_A
from k3.checkpoint.specs import HEAD
from k3.engine.weights import Trunk
from k3.errors import (
    ExpertReadError,
    InvalidGenerationError,
    K3Error,
    NonFiniteError,
    ReadError,
    UsageError,
    VoidSequenceError,
)
from k3.model.latent_moe import LatentMoe
from k3.model.weights import Expert, UnreadableExpert

IDS = [5, 6, 7, 8, 9]
OTHER = [17, 3, 200]


@pytest.fixture
def model():
    with k3.load("demo", context=64, threads=2) as loaded:
        yield loaded


@pytest.fixture
def engine(model):
    return model.engine


def alone(engine, ids, logits="last"):
    [result] = engine.step([(engine.new_sequence(), ids)], logits=logits)
    assert not isinstance(result, K3Error), result
    return result


def test_shapes_of_the_results(engine):
    a, b = engine.new_sequence(), engine.new_sequence()
    vocab = engine.config.vocab_size
    for logits, rows in (("all", [5, 3]), ("last", [1, 1]), ("none", [0, 0])):
        results = engine.step([(a, IDS), (b, OTHER)], logits=logits)
        assert [result.shape for result in results] == [(n, vocab) for n in rows]
        assert all(result.dtype == np.float32 for result in results)
    assert a.tokens == tuple(IDS * 3)
    assert len(b) == 9


def test_last_is_the_last_of_all(engine):
    assert np.array_equal(alone(engine, IDS, "all")[-1:], alone(engine, IDS, "last"))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least one token"),
        ([1024], "not in the vocabulary"),
        ([-1], "not in the vocabulary"),
        ([1] * 65, "context"),
    ],
)
def test_a_step_that_cannot_run_changes_nothing(engine, ids, message):
    a, b = engine.new_sequence(), engine.new_sequence()
    with pytest.raises(UsageError, match=message):
        engine.step([(a, IDS), (b, ids)])
    assert len(a) == 0
    [result] = engine.step([(a, IDS)])
    assert np.array_equal(result, alone(engine, IDS))


def test_a_sequence_stands_once_in_a_step(engine):
    a = engine.new_sequence()
    with pytest.raises(UsageError, match="twice"):
        engine.step([(a, IDS), (a, OTHER)])
    with pytest.raises(UsageError, match="at least one sequence"):
        engine.step([])


def test_the_context_can_be_filled_to_its_end(engine):
    sequence = engine.new_sequence()
    engine.step([(sequence, [1] * 60)])
    engine.step([(sequence, [1] * 4)])
    with pytest.raises(UsageError, match="exceed the context of 64"):
        engine.step([(sequence, [1])])
    assert len(sequence) == 64


class BreakExpert:
    """An expert source in which one expert of one layer is unreadable, or decodes to infinity in one tensor."""

    def __init__(self, source, layer, expert, tensor=None):
        self.source, self.layer, self.expert, self.tensor = source, layer, expert, tensor
        self.asked = []

    def fetch(self, layer, ids):
        self.asked.append((layer, ids.copy()))
        for expert in self.source.fetch(layer, ids):
            if (layer, expert.id) != (self.layer, self.expert):
                yield expert
            elif self.tensor is None:
                yield UnreadableExpert(expert.id, ExpertReadError(f"layer {layer}, expert {expert.id}: no bytes"))
            else:
                yield self.damaged(expert)

    def damaged(self, expert):
        tensors = {name: getattr(expert, name) for name in ("w1", "w3", "w2")}
        matrix = tensors[self.tensor]
        scales = matrix.scales.copy()
        scales[:] = 255
        tensors[self.tensor] = type(matrix)(matrix.packed, scales)
        return Expert(expert.id, **tensors)


def experts_of(engine, ids, layer):
    """Experts that a sequence uses at a layer, from what it asks for."""
    spy = BreakExpert(engine._experts, -1, -1)
    engine._experts, kept = spy, engine._experts
    alone(engine, ids)
    engine._experts = kept
    [asked] = [ids for at, ids in spy.asked if at == layer]
    return set(asked.ravel().tolist())


@pytest.mark.parametrize("tensor", [None, "w1", "w3", "w2"])
@pytest.mark.parametrize("layer", [1, 4, 7])
def test_a_broken_expert_voids_only_who_needs_it(engine, layer, tensor):
    mine, others = experts_of(engine, [5], layer), experts_of(engine, [17], layer)
    expert = min(mine - others)
    wanted = alone(engine, [17], "all")
    whole = engine._experts
    engine._experts = BreakExpert(whole, layer, expert, tensor)
    a, b = engine.new_sequence(), engine.new_sequence()
    failed, fine = engine.step([(a, [5]), (b, [17])], logits="all")
    assert isinstance(failed, ExpertReadError if tensor is None else NonFiniteError)
    assert failed.exit_code == 4
    assert f"layer {layer}, expert {expert}" in str(failed)
    assert tensor is None or f"tensor {tensor}" in str(failed)
    assert np.array_equal(fine, wanted)
    later = [ids.shape[0] for at, ids in engine._experts.asked if at > layer]
    assert set(later) <= {1}, "rows of a void sequence ask for no more experts"
    engine._experts = whole
    with pytest.raises(VoidSequenceError, match="Begin a new sequence"):
        engine.step([(a, [1])])
    [more] = engine.step([(b, [1])])
    assert np.array_equal(more, alone(engine, [17, 1]))


def test_when_all_sequences_fail_there_are_only_errors(engine):
    expert = min(experts_of(engine, IDS, 1))
    engine._experts = BreakExpert(engine._experts, 1, expert)
    results = engine.step([(engine.new_sequence(), IDS), (engine.new_sequence(), IDS)])
    assert all(isinstance(result, ExpertReadError) for result in results)


def test_a_router_score_that_is_not_finite(engine, monkeypatch):
    route = type(engine.ops).route

    def nan_in_first_row(self, logits, *rest):
        logits = logits.copy()
        if len(logits) > 1:
            logits[0, 3] = np.nan
        return route(self, logits, *rest)

    wanted = alone(engine, [17])
    monkeypatch.setattr(type(engine.ops), "route", nan_in_first_row)
    failed, fine = engine.step([(engine.new_sequence(), [5]), (engine.new_sequence(), [17])])
    assert isinstance(failed, NonFiniteError)
    assert "router score" in str(failed)
    assert np.array_equal(fine, wanted)


def test_a_state_that_is_not_finite_spoils_nobody_else(engine):
    a, b = engine.new_sequence(), engine.new_sequence()
    engine.step([(a, IDS), (b, OTHER)])
    a._states[0].recurrent[0, 0, 0] = np.nan
    failed, fine = engine.step([(a, [1]), (b, [2])])
    assert isinstance(failed, NonFiniteError)
    assert np.array_equal(fine, alone(engine, [*OTHER, 2]))


def test_a_logit_that_is_not_finite(engine, monkeypatch):
    logits = type(engine._transformer).logits

    def infinite(self, ops, hidden):
        result = logits(self, ops, hidden)
        result[0, 7] = np.inf
        return result

    monkeypatch.setattr(type(engine._transformer), "logits", infinite)
    failed, fine = engine.step([(engine.new_sequence(), IDS), (engine.new_sequence(), OTHER)])
    assert isinstance(failed, NonFiniteError)
    assert "a logit at positions 0 to 4" in str(failed)
    assert isinstance(fine, np.ndarray)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ReadError("the drive is gone")])
@pytest.mark.parametrize("layer", [0, 3, 7])
def test_a_step_that_stops_voids_all_its_sequences(engine, monkeypatch, error, layer):
    a, b, outside = engine.new_sequence(), engine.new_sequence(), engine.new_sequence()
    real = Trunk.layer

    def stop(self, index):
        if index == layer:
            raise error
        return real(self, index)

    monkeypatch.setattr(Trunk, "layer", stop)
    with pytest.raises(type(error)):
        engine.step([(a, IDS), (b, OTHER)])
    monkeypatch.undo()
    for sequence in (a, b):
        with pytest.raises(VoidSequenceError):
            engine.step([(sequence, [1])])
    [result] = engine.step([(outside, IDS)])
    assert np.array_equal(result, alone(engine, IDS))


def test_void_errors_end_with_exit_code_four():
    assert issubclass(VoidSequenceError, InvalidGenerationError)
    assert InvalidGenerationError.exit_code == 4


@pytest.mark.parametrize("path", ["demo", TINY_A])
def test_weights_are_asked_for_in_the_order_of_the_layout(path, monkeypatch):
    asked = []

    class Recorder:
        def __init__(self, inner, where):
            self.inner, self.where = inner, where

        def blocks(self, name):
            asked.append((self.where, name))
            return self.inner.blocks(name)

        def matrix(self, name):
            asked.append((self.where, name))
            return self.inner.matrix(name)

    with k3.load(path, context=64) as model:
        layout = model.engine._transformer._source._layout
        layer, head = Trunk.layer, Trunk.head
        monkeypatch.setattr(Trunk, "layer", lambda self, index: Recorder(layer(self, index), index))
        monkeypatch.setattr(Trunk, "head", lambda self: Recorder(head(self), "head"))
        alone(model.engine, IDS)
    expected = [(at.index, spec.local) for at in layout.layers for spec in at.specs if spec.role == "matrix"]
    assert asked == [*expected, ("head", HEAD)]


def test_every_distinct_expert_is_fetched_once_for_all_rows(engine, monkeypatch):
    spy = BreakExpert(engine._experts, -1, -1)
    engine._experts = spy
    run = LatentMoe._run_expert
    ran = []

    def record(self, ops, expert, rows, z, batch):
        ran.append((self.layer, expert.id))
        return run(self, ops, expert, rows, z, batch)

    monkeypatch.setattr(LatentMoe, "_run_expert", record)
    before = engine.costs()
    engine.step([(engine.new_sequence(), IDS * 4), (engine.new_sequence(), OTHER * 5)])
    distinct = [(layer, expert) for layer, ids in spy.asked for expert in sorted(set(ids.ravel().tolist()))]
    assert sorted(ran) == distinct
    assert [layer for layer, _ in ran] == sorted(layer for layer, _ in ran)
    assert (engine.costs() - before).expert_requests == len(distinct)
