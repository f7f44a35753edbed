"""Routed experts in memory: a fixed set of equal buffers, some holding experts between visits, the others arriving.

    cache = ExpertCache(reader, layout, RankRecency(slots, layout.moe_layers), arrival_buffers=16)
    arriving = cache.begin(layer, ids)      # the missing experts' reads are under way from here on
    for expert in arriving:                 # those in memory first, then the others as they arrive
        ...                                 # expert.tensors are valid until the next expert is asked for

There are `slots + arrival_buffers` buffers, allocated once. An expert that stays takes its buffer along, and one that
goes leaves it, so no byte is copied. A step with more missing experts than free buffers reads them in waves, each
expert once.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from k3.checkpoint.index import TensorEntry
from k3.checkpoint.layout import ExpertTable, Layout
from k3.errors import ReadError
from k3.storage.arena import Arena
from k3.storage.policies import Ids, Key, Policy
from k3.storage.reader import PAGE, ByteClass, RawBytes, Read, Reader
from k3.storage.stream import Progress


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """An expert's six tensors as stored (uint8), by their names within it; valid until the next one is asked for."""

    id: int
    tensors: Mapping[str, RawBytes]


@dataclass(frozen=True, slots=True)
class LostExpert:
    """An expert that could not be read."""

    id: int
    error: ReadError


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Distinct experts of a step and layer that were asked for; how many lay in memory; payload bytes of the rest."""

    requests: int = 0
    resident_hits: int = 0
    bytes: int = 0


def expert_buffer_bytes(layout: Layout) -> int:
    """Bytes of one buffer, whole pages: what reading the most awkwardly placed expert takes."""
    return max((_largest_span(table) for table in layout.experts.values()), default=0)


class ExpertCache:
    """The routed experts of all bound layers. One visit at a time; for one thread.

    A visit that is not iterated to its end leaves the cache as it was but for the experts it had begun to bring in:
    the next visit, or `settle`, waits for their reads and takes their buffers back.
    """

    def __init__(self, reader: Reader, layout: Layout, policy: Policy, arrival_buffers: int) -> None:
        if arrival_buffers < 1:
            raise ValueError(f"expected one arrival buffer or more, found {arrival_buffers}")
        self._reader = reader
        self._layout = layout
        self._policy = policy
        self._counts = ExpertCounts()
        self._disk_order = {layer: _disk_order(table) for layer, table in layout.experts.items()}
        count, nbytes = policy.slots + arrival_buffers, expert_buffer_bytes(layout)
        arena = Arena(count * nbytes)
        self._buffers = [_Buffer(arena.take(nbytes)) for _ in range(count)]
        self._free = self._buffers[:]
        self._resident: dict[Key, _Buffer] = {}
        self._visit: _Visit | None = None
        self.wait_seconds = 0.0
        """Seconds in which visits had to wait for experts."""

    @property
    def counts(self) -> ExpertCounts:
        """What was asked for and read so far."""
        return self._counts

    @property
    def resident(self) -> frozenset[Key]:
        """The experts that lie in memory between visits."""
        return frozenset(self._resident)

    def begin(self, layer: int, ids: Ids) -> Iterator[StoredExpert | LostExpert]:
        """Begin to fetch each distinct expert of `ids` (int32 [rows, top_k], rank order) once.

        Missing ones are read in the order in which they lie on disk. Experts in memory come first, the others in
        the order of their arrival; a failed read has been tried twice.
        """
        self.settle()
        wanted = np.unique(ids)
        # From here on until the visit's end an interrupt leaves work for `settle`.
        visit = self._visit = _Visit(layer)
        given_up = self._policy.visit(layer, ids)
        for expert in wanted[np.argsort(self._disk_order[layer][wanted])].tolist():
            (visit.hits if (layer, expert) in self._resident else visit.missing).append(expert)
        for key in given_up:
            if key[0] != layer or key[1] not in visit.hits:
                self._drop(key)
        requests, hits = self._counts.requests + len(wanted), self._counts.resident_hits + len(visit.hits)
        self._counts = replace(self._counts, requests=requests, resident_hits=hits)
        self._submit(visit)
        return self._arrivals(visit)

    def settle(self) -> None:
        """Bring a visit that was left in the middle to its end; does nothing after a whole one."""
        if self._visit is None:
            return
        for buffer in self._buffers:
            buffer.settle()
        self._resident = {key: buffer for key, buffer in self._resident.items() if key in self._policy}
        taken = set(self._resident.values())
        self._free = [buffer for buffer in self._buffers if buffer not in taken]
        self._visit = None

    def load_all(self, progress: Progress) -> None:
        """Read every expert of every layer once, uncounted; for a cache with a slot for each.

        Raises:
            ReadError: an expert could not be read.
        """
        before, done = self._counts, 0
        every = np.arange(self._layout.num_experts, dtype=np.int32)[None]
        for layer, table in self._layout.experts.items():
            for expert in self.begin(layer, every):
                if isinstance(expert, LostExpert):
                    raise expert.error
                done += table.expert_bytes
                progress(done, self._layout.expert_bytes)
        self._counts = before

    def _arrivals(self, visit: _Visit) -> Iterator[StoredExpert | LostExpert]:
        for expert in visit.hits:
            key = (visit.layer, expert)
            yield StoredExpert(expert, self._resident[key].tensors)
            self._check(visit)
            if key not in self._policy:
                self._drop(key)
                self._submit(visit)
        while visit.arriving:
            began = time.perf_counter()
            key, buffer = self._next_arrival(visit)
            self.wait_seconds += time.perf_counter() - began
            found = self._collect(key, buffer)
            yield found
            self._check(visit)
            if isinstance(found, StoredExpert) and key in self._policy:
                self._resident[key] = buffer
            else:
                self._free.append(buffer)
            self._submit(visit)
        self._visit = None

    def _check(self, visit: _Visit) -> None:
        if self._visit is not visit:
            raise RuntimeError("experts were asked for of a visit that had ended: another one has begun since")

    def _drop(self, key: Key) -> None:
        """Let a resident expert go, if it is one: a policy may hold what could not be read."""
        buffer = self._resident.pop(key, None)
        if buffer is not None:
            self._free.append(buffer)

    def _submit(self, visit: _Visit) -> None:
        """Read as many of the missing experts as there are free buffers."""
        while visit.missing and self._free:
            expert, buffer = visit.missing.popleft(), self._free.pop()
            buffer.submit(self._reader, self._layout.experts[visit.layer], expert)
            visit.arriving[buffer] = (visit.layer, expert)
            for read in buffer.reads:
                visit.buffer_of[read] = buffer
                read.listen(visit.done)

    def _next_arrival(self, visit: _Visit) -> tuple[Key, _Buffer]:
        """Wait until all reads of some expert are done."""
        while True:
            buffer = visit.buffer_of.pop(visit.done.get())
            if buffer in visit.arriving and all(read.done() for read in buffer.reads):
                return visit.arriving.pop(buffer), buffer

    def _collect(self, key: Key, buffer: _Buffer) -> StoredExpert | LostExpert:
        try:
            buffer.collect(self._reader)
        except ReadError as error:
            return LostExpert(key[1], error)
        nbytes = self._layout.experts[key[0]].expert_bytes
        self._counts = replace(self._counts, bytes=self._counts.bytes + nbytes)
        return StoredExpert(key[1], buffer.tensors)


class _Buffer:
    """Room for one expert, and the reads that fill it."""

    def __init__(self, memory: RawBytes) -> None:
        self.tensors: Mapping[str, RawBytes] = {}
        self.reads: list[Read] = []
        self._memory = memory
        self._ranges: list[_Range] = []

    def submit(self, reader: Reader, table: ExpertTable, expert: int) -> None:
        """Begin to read an expert."""
        self.reads, self._ranges = [], []
        start = 0
        for wanted in _ranges(table, expert):
            # Noted before the read exists, so that `settle` can tell when an interrupt came between the two.
            self._ranges.append(wanted)
            memory = self._memory[start:]
            read = reader.submit(wanted.path, wanted.offset, wanted.nbytes, memory, ByteClass.EXPERTS, demand=True)
            self.reads.append(read)
            start += read.span

    def collect(self, reader: Reader) -> None:
        """Wait for the reads, count them, and view the expert's tensors.

        Raises:
            ReadError: one of them failed.
        """
        payloads = [read.wait() for read in self.reads]
        for read in self.reads:
            reader.count(read)
        self.tensors = {
            name: payload[start : start + entry.nbytes].reshape(entry.shape)
            for wanted, payload in zip(self._ranges, payloads, strict=True)
            for name, (start, entry) in wanted.tensors.items()
        }

    def settle(self) -> None:
        """Wait until nothing is being read into the buffer."""
        if len(self.reads) < len(self._ranges):
            # A read may be under way that nobody can wait for. It keeps that memory; the buffer gets other.
            self._memory = Arena(self._memory.size).take(self._memory.size)
        for read in self.reads:
            with contextlib.suppress(ReadError):
                read.wait()
        self._ranges = self._ranges[: len(self.reads)]


@dataclass(slots=True)
class _Visit:
    """What is left to do for a layer."""

    layer: int
    hits: list[int] = field(default_factory=list)
    missing: deque[int] = field(default_factory=deque)
    arriving: dict[_Buffer, Key] = field(default_factory=dict)
    buffer_of: dict[Read, _Buffer] = field(default_factory=dict)
    done: SimpleQueue[Read] = field(default_factory=SimpleQueue)


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes to read at once, and where in them which tensors begin."""

    path: Path
    offset: int
    nbytes: int
    tensors: Mapping[str, tuple[int, TensorEntry]]


def _ranges(table: ExpertTable, expert: int) -> list[_Range]:
    """One range where an expert's tensors lie back to back, else one for each of them."""
    entries, record = table.entries(expert), table.record(expert)
    if record is None:
        return [_Range(entry.path, entry.offset, entry.nbytes, {name: (0, entry)}) for name, entry in entries.items()]
    places = zip(record.starts, entries.values(), strict=True)
    return [_Range(record.path, record.offset, record.nbytes, dict(zip(entries, places, strict=True)))]


def _largest_span(table: ExpertTable) -> int:
    """Most bytes that one expert's whole pages take."""

    def span(offsets: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return -(-(offsets + nbytes) // PAGE) * PAGE - offsets // PAGE * PAGE

    sizes = np.array([kind.nbytes for kind in table.kinds], np.int64)
    together, apart = span(table.offsets.min(axis=1), sizes.sum()), span(table.offsets, sizes).sum(axis=1)
    return int(np.where(table.contiguous, together, apart).max())


def _disk_order(table: ExpertTable) -> npt.NDArray[np.int64]:
    """Each expert's place in the order in which a layer's experts lie on disk: int64 [experts]."""
    return np.argsort(np.lexsort((table.offsets.min(axis=1), table.shard_ids[:, 0])))
