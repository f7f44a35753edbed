"""Which routed experts stay in memory: cache policies, shared by the engine and by `k3 trace replay`.

A policy is told of every visit of a layer, the experts that the step's tokens chose there, and says what is held from
then on. It never moves bytes and never looks ahead (but for `Belady`, which replays a recorded future).

A token visits the layers in a fixed order and wants about 16 new experts of each, so one list over all layers that is
smaller than a token's experts has always just dropped what comes next. `RankRecency` splits the slots over the layers
instead; docs/expert-cache.md has the figures.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice, pairwise
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Key: TypeAlias = tuple[int, int]
"""An expert of the model: its layer and its number there."""

Ids: TypeAlias = npt.NDArray[np.int32]
"""The experts that a step's rows chose in a layer: [rows, top_k], a row's experts in router-rank order, best first."""


class Policy(Protocol):
    """Holds at most `slots` experts of all layers together."""

    @property
    def slots(self) -> int:
        """Most experts held at a time."""
        ...

    def visit(self, layer: int, ids: Ids) -> Collection[Key]:
        """Take note of a layer's visit; returns what was held before it and is held no longer.

        What is held afterwards was held before or is among `ids`.
        """
        ...

    def __contains__(self, key: Key) -> bool:
        """Whether the expert is held since the last visit."""
        ...


def split_slots(slots: int, layers: int) -> tuple[int, ...]:
    """Slots of each layer: equal but for a remainder, whose single slots are spread evenly over the walk.

    All layers are worth the same (each wants top_k experts a token and repeats about as many of them), and evenly
    spread hits leave the drive an even load: 228 slots over 92 layers are 2, 2, 3, 2, 3, 2, …
    """
    return tuple(end - start for start, end in pairwise(slots * i // layers for i in range(layers + 1)))


class _LayerLists(ABC):
    """Each layer holds the first experts of an order that begins with the newest ones."""

    def __init__(self, slots: int, layers: Sequence[int]) -> None:
        self.slots = slots
        self._room = dict(zip(layers, split_slots(slots, len(layers)), strict=True)) if layers else {}
        self._held: dict[int, dict[int, None]] = {layer: {} for layer in layers}

    def visit(self, layer: int, ids: Ids) -> Collection[Key]:
        before = self._held[layer]
        ordered = dict.fromkeys(chain(self._newest_first(ids).ravel().tolist(), before))
        after = self._held[layer] = dict.fromkeys(islice(ordered, self._room[layer]))
        return [(layer, expert) for expert in before if expert not in after]

    def __contains__(self, key: Key) -> bool:
        return key[1] in self._held[key[0]]

    @staticmethod
    @abstractmethod
    def _newest_first(ids: Ids) -> Ids:
        """The step's experts, the one most worth keeping first."""


class RankRecency(_LayerLists):
    """In each layer, the experts of the newest token in the router's order, then those of the token before, and so on.

    An expert counts where it appears first. There is nothing to tune.
    """

    @staticmethod
    def _newest_first(ids: Ids) -> Ids:
        return ids[::-1]


class LayerLru(_LayerLists):
    """In each layer the experts used last. A token's experts are used in rank order, so the worst of them lead."""

    @staticmethod
    def _newest_first(ids: Ids) -> Ids:
        return ids[::-1, ::-1]


class Lru:
    """The experts used last, one list over all layers; a token's experts are used in rank order."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._held: dict[Key, None] = {}

    def visit(self, layer: int, ids: Ids) -> Collection[Key]:
        used = dict.fromkeys((layer, expert) for expert in ids.ravel()[::-1].tolist())
        new = [key for key in used if key not in self._held]
        for key in reversed(used):
            self._held.pop(key, None)
            self._held[key] = None
        given_up = list(islice(self._held, max(0, len(self._held) - self.slots)))
        for key in given_up:
            del self._held[key]
        return set(given_up).difference(new)

    def __contains__(self, key: Key) -> bool:
        return key in self._held


class Pins:
    """A fixed set of experts."""

    def __init__(self, experts: Iterable[Key]) -> None:
        self._held = frozenset(experts)
        self.slots = len(self._held)

    @classmethod
    def most_popular(cls, slots: int, visits: Iterable[tuple[int, Ids]]) -> Pins:
        """The experts chosen most often in some visits, whatever their layers; ties go to lower keys."""
        counts = Counter((layer, expert) for layer, ids in visits for expert in ids.ravel().tolist())
        return cls(sorted(counts, key=lambda key: (-counts[key], key))[:slots])

    def visit(self, layer: int, ids: Ids) -> Collection[Key]:  # noqa: ARG002
        return ()

    def __contains__(self, key: Key) -> bool:
        return key in self._held


class Belady:
    """The optimum: whatever is needed again soonest, of all layers. It must know the visits that will come, in order.

    Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966; here an expert may
    also be used without being kept.
    """

    def __init__(self, slots: int, visits: Iterable[tuple[int, Ids]]) -> None:
        self.slots = slots
        self._uses: defaultdict[Key, deque[int]] = defaultdict(deque)
        for time, (layer, ids) in enumerate(visits):
            for expert in set(ids.ravel().tolist()):
                self._uses[layer, expert].append(time)
        self._held: dict[Key, int] = {}
        self._latest: list[tuple[int, Key]] = []

    def visit(self, layer: int, ids: Ids) -> Collection[Key]:
        given_up, new = set(), set()
        for key in {(layer, expert) for expert in ids.ravel().tolist()}:
            self._uses[key].popleft()
            if key not in self._held:
                new.add(key)
            if self._uses[key]:
                self._held[key] = self._uses[key][0]
                heapq.heappush(self._latest, (-self._held[key], key))
            elif self._held.pop(key, None) is not None:
                given_up.add(key)
        while len(self._held) > self.slots:
            time, key = heapq.heappop(self._latest)
            if self._held.get(key, math.inf) == -time:
                del self._held[key]
                given_up.add(key)
        return given_up - new

    def __contains__(self, key: Key) -> bool:
        return key in self._held
