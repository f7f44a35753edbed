"""Cache policies: what any of them must keep to, each by its definition, and their worth on a real trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import shared_file
from k3.storage.policies import Belady, LayerLru, Lru, Pins, RankRecency, split_slots
from k3.storage.trace import Trace, replay

LAYERS = (1, 2, 5)
EXPERTS = 12
RELEASED_EXPERT_BYTES = 17_547_264


@st.composite
def walks(draw, max_rows=3):
    """Steps over all layers: [(layer, ids)], ids distinct within a row."""
    top_k = draw(st.integers(1, 4))
    row = st.permutations(range(EXPERTS)).map(lambda order: order[:top_k])
    visits = []
    for _ in range(draw(st.integers(1, 6))):
        rows = draw(st.integers(1, max_rows))
        for layer in LAYERS:
            visits.append((layer, np.array([draw(row) for _ in range(rows)], np.int32)))
    return visits


def every_policy(slots, visits):
    return [
        RankRecency(slots, LAYERS),
        LayerLru(slots, LAYERS),
        Lru(slots),
        Pins.most_popular(slots, visits),
        Belady(slots, visits),
    ]


def every_key():
    return {(layer, expert) for layer in LAYERS for expert in range(EXPERTS)}


def held(policy):
    return {key for key in every_key() if key in policy}


def keys(layer, ids):
    return {(layer, expert) for expert in ids.ravel().tolist()}


def count_hits(policy, visits):
    hits = 0
    for layer, ids in visits:
        hits += len(keys(layer, ids) & held(policy))
        policy.visit(layer, ids)
    return hits


@settings(max_examples=60, deadline=None)
@given(walks(), st.integers(0, 20))
def test_what_every_policy_keeps_to(visits, slots):
    for policy in every_policy(slots, visits):
        assert policy.slots <= slots
        for layer, ids in visits:
            before = held(policy)
            given_up = policy.visit(layer, ids)
            after = held(policy)
            assert len(after) <= slots
            assert after <= before | keys(layer, ids)
            assert len(given_up) == len(set(given_up))
            assert set(given_up) == before - after


@settings(max_examples=60, deadline=None)
@given(walks(), st.integers(0, 20))
def test_nothing_hits_more_than_belady(visits, slots):
    *others, best = every_policy(slots, visits)
    bound = count_hits(best, visits)
    for policy in others:
        if not isinstance(policy, Pins):  # These begin with experts that nobody has read.
            assert count_hits(policy, visits) <= bound


@settings(max_examples=25, deadline=None)
@given(walks(max_rows=1).filter(lambda visits: len(visits) <= 6), st.integers(0, 3))
def test_belady_hits_as_often_as_any_choice_can(visits, slots):
    from functools import cache
    from itertools import combinations

    @cache
    def most(time, kept):
        if time == len(visits):
            return 0
        wanted = keys(*visits[time])
        useful = sorted(key for key in kept | wanted if any(key in keys(*visit) for visit in visits[time + 1 :]))
        count = min(slots, len(useful))
        choices = (frozenset(choice) for choice in combinations(useful, count))
        return len(kept & wanted) + max(most(time + 1, choice) for choice in choices)

    assert count_hits(Belady(slots, visits), visits) == most(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(walks(), st.integers(0, 20))
def test_lru_by_its_definition(visits, slots):
    policy, history = Lru(slots), []
    for layer, ids in visits:
        policy.visit(layer, ids)
        history += [(layer, expert) for expert in ids.ravel().tolist()]
        last_use = {key: time for time, key in enumerate(history)}
        assert held(policy) == set(sorted(last_use, key=last_use.get, reverse=True)[:slots])


@settings(max_examples=60, deadline=None)
@given(walks(), st.integers(0, 20))
@pytest.mark.parametrize("best_last", [False, True])
def test_layer_policies_by_their_definition(best_last, visits, slots):
    """The newest token first; within a token, the best rank first (rank-recency) or the worst (LRU)."""
    policy = (RankRecency if best_last else LayerLru)(slots, LAYERS)
    room = dict(zip(LAYERS, split_slots(slots, len(LAYERS)), strict=True))
    history = {layer: [] for layer in LAYERS}
    for layer, ids in visits:
        policy.visit(layer, ids)
        for row in ids.tolist():
            history[layer] += reversed(row) if best_last else row
        newest_first = list(dict.fromkeys(reversed(history[layer])))
        expected = {(layer, expert) for expert in newest_first[: room[layer]]}
        assert {key for key in held(policy) if key[0] == layer} == expected


def test_pins():
    visits = [(1, np.array([[3, 4], [3, 5]], np.int32)), (2, np.array([[4, 3]], np.int32))]
    policy = Pins.most_popular(2, visits)
    assert held(policy) == {(1, 3), (1, 4)}
    assert not policy.visit(5, np.array([[1, 2]], np.int32))
    assert held(policy) == {(1, 3), (1, 4)}


@given(st.integers(0, 500), st.integers(1, 100))
def test_slots_are_split_evenly(slots, layers):
    rooms = split_slots(slots, layers)
    assert len(rooms) == layers
    assert sum(rooms) == slots
    assert max(rooms) - min(rooms) <= 1
    for end in range(layers + 1):  # Evenly over the walk too: no part of it is a whole slot short.
        assert abs(sum(rooms[:end]) - slots * end / layers) < 1


def test_the_split_that_the_documentation_shows():
    assert split_slots(228, 92)[:6] == (2, 2, 3, 2, 3, 2)
    assert split_slots(0, 92) == (0,) * 92


@pytest.fixture(scope="module")
def trace():
    return Trace.read(shared_file("data/expert_trace.bin"), top_k=16, num_experts=896)


def slots_of(gb):
    return round(gb * 10**9) // RELEASED_EXPERT_BYTES


def rate(trace, policy):
    return 100 * replay(trace, policy) / trace.ids.size


@pytest.mark.parametrize(
    ("gb", "ours", "lru", "belady"), [(4, 8, 0, 14), (8, 14, 0, 25), (16, 23, 0, 36), (32, 33, 31, 42)]
)
def test_hits_on_the_real_trace(trace, gb, ours, lru, belady):
    slots = slots_of(gb)
    assert rate(trace, RankRecency(slots, trace.layers)) >= ours
    assert int(rate(trace, Lru(slots))) == lru
    assert round(rate(trace, Belady(slots, trace.visits()))) == belady


def test_never_much_below_one_list(trace):
    for gb in np.arange(0.5, 64, 0.75):
        slots = slots_of(gb)
        assert rate(trace, RankRecency(slots, trace.layers)) >= rate(trace, Lru(slots)) - 1, f"at {gb} GB"


@pytest.mark.parametrize("part", [(0, 6), (6, 12), (3, 9)])
def test_parts_of_the_real_trace(trace, part):
    """The rule has nothing to tune, and parts of the trace rank the policies as the whole does."""
    tokens = trace.part(*part)
    for gb in (4, 8, 16, 32):
        slots = slots_of(gb)
        assert rate(tokens, RankRecency(slots, trace.layers)) > rate(tokens, LayerLru(slots, trace.layers))
        assert rate(tokens, RankRecency(slots, trace.layers)) > rate(tokens, Lru(slots))
