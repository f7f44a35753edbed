"""The expert cache: right bytes at the moment of use, each expert read once a step, no buffer lost."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.checkpoint.layout import ExpertTable, Layout
from k3.checkpoint.specs import EXPERT_TENSORS
from k3.errors import ReadError
from k3.storage import expert_cache
from k3.storage.expert_cache import ExpertCache, ExpertCounts, LostExpert, StoredExpert, expert_buffer_bytes
from k3.storage.policies import LayerLru, Lru, Pins, RankRecency
from k3.storage.reader import PAGE, BytesRead, Read, Reader, aligned_span

LAYERS = (1, 2, 5)
EXPERTS = 48
SHAPES = ((24, 16), (24, 2), (24, 16), (24, 2), (32, 12), (32, 1))
KINDS = tuple(SimpleNamespace(dtype="U8", shape=shape, nbytes=int(np.prod(shape))) for shape in SHAPES)
EXPERT_BYTES = sum(kind.nbytes for kind in KINDS)


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    """Experts of random bytes in two files, in shuffled order and at odd offsets; every fifth is in pieces."""
    folder = tmp_path_factory.mktemp("experts")
    random = np.random.default_rng(7)
    shards = (folder / "a", folder / "b")
    ends = [0, 0]
    tables = {}
    for layer in LAYERS:
        offsets, owners = np.zeros((EXPERTS, 6), np.int64), np.zeros((EXPERTS, 6), np.uint16)
        for expert in random.permutation(EXPERTS):
            owner = int(random.integers(2))
            for column, kind in enumerate(KINDS):
                if expert % 5 == 0:
                    owner = int(random.integers(2))
                    ends[owner] += int(random.integers(1, 5000))
                offsets[expert, column], owners[expert, column] = ends[owner], owner
                ends[owner] += kind.nbytes
        tables[layer] = ExpertTable(layer, "", shards, KINDS, offsets, owners)
    for path, end in zip(shards, ends, strict=True):
        path.write_bytes(random.bytes(end))
    return Layout(SimpleNamespace(num_experts=EXPERTS), "", {}, (), tables)


@pytest.fixture(scope="module")
def digests(layout):
    """What each expert's bytes hash to, read plainly."""
    data = {path: path.read_bytes() for path in layout.experts[1].shards}
    return {
        (layer, expert): digest(
            data[entry.path][entry.offset : entry.offset + entry.nbytes] for entry in table.entries(expert).values()
        )
        for layer, table in layout.experts.items()
        for expert in range(EXPERTS)
    }


def digest(parts):
    return hashlib.sha256(b"".join(bytes(part) for part in parts)).hexdigest()


@pytest.fixture(scope="module")
def reader():
    reader = Reader()
    yield reader
    reader.close()


class Requests:
    """A reader that notes what it is asked for, and may answer late, out of order, wrongly or never."""

    def __init__(self, answer="now"):
        self.answer = answer
        self.reads = []
        self.waiting = []
        self.counted = 0
        self.failing = set()
        self.interrupt_at = None

    def submit(self, path, offset, nbytes, buffer, kind, *, demand):
        assert demand
        assert kind.value == "experts"
        assert buffer.ctypes.data % PAGE == 0
        assert buffer.size >= aligned_span(offset, nbytes)
        read = Read(path, offset, nbytes, buffer, kind)
        self.reads.append(read)
        if self.answer == "now":
            self.finish(read)
        else:
            self.waiting.append(read)
            if self.answer == "last first" and len(self.waiting) == 4:
                self.finish_waiting()
            elif self.answer == "last first":
                threading.Timer(0.002, self.finish_waiting).start()
        if self.interrupt_at == len(self.reads):
            raise KeyboardInterrupt
        return read

    def count(self, read):
        assert read.done()
        self.counted += read.nbytes

    def finish(self, read):
        if (read.path, read.offset) in self.failing:
            read.buffer[:] = 0xEE
            read.finish(ReadError(f"{read.path}: broken"))
            return
        first = read.offset // PAGE * PAGE
        with read.path.open("rb") as file:
            file.seek(first)
            data = file.read(read.span)
        read.buffer[: len(data)] = np.frombuffer(data, np.uint8)
        read.finish(None)

    def finish_waiting(self):
        waiting, self.waiting = self.waiting, []
        for read in reversed(waiting):
            self.finish(read)


def rank_recency(slots):
    return RankRecency(slots, LAYERS)


def choose(*rows):
    return np.array(rows, np.int32)


def union(layer_ids):
    return sorted({int(expert) for expert in layer_ids.ravel()})


def check_use(found, layer, digests):
    """The expert's bytes are right now."""
    assert isinstance(found, StoredExpert), found
    assert list(found.tensors) == list(EXPERT_TENSORS)
    assert [tensor.shape for tensor in found.tensors.values()] == list(SHAPES)
    assert digest(tensor.tobytes() for tensor in found.tensors.values()) == digests[layer, found.id]


def use_all(cache, layer, ids, digests):
    """Run a visit to its end; returns the experts in the order of their coming."""
    seen = []
    for found in cache.begin(layer, ids):
        check_use(found, layer, digests)
        seen.append(found.id)
    assert sorted(seen) == union(ids)
    check_whole(cache)
    return seen


def check_whole(cache):
    """Between visits every buffer is in one place, and what is resident is what the policy holds."""
    cache.settle()
    places = [*cache._free, *cache._resident.values()]
    assert len(places) == len(set(places)) == len(cache._buffers)
    assert set(places) == set(cache._buffers)
    assert len(cache.resident) <= cache._policy.slots
    assert all(key in cache._policy for key in cache.resident)
    memory = [buffer._memory.ctypes.data for buffer in cache._buffers]
    assert len(set(memory)) == len(memory)


def test_buffers_are_as_large_as_the_most_awkward_expert(layout):
    def span(table, expert):
        record = table.record(expert)
        if record is not None:
            return aligned_span(record.offset, record.nbytes)
        return sum(aligned_span(entry.offset, entry.nbytes) for entry in table.entries(expert).values())

    spans = [span(table, expert) for table in layout.experts.values() for expert in range(EXPERTS)]
    assert expert_buffer_bytes(layout) == max(spans)
    assert expert_buffer_bytes(Layout(layout.config, "", {}, (), {})) == 0


@pytest.mark.parametrize("arrival", [1, 2, 15, 16, 17, 39, 40, 100])
@pytest.mark.parametrize("slots", [0, 1, 6, 100])
def test_a_union_larger_than_the_buffers(layout, digests, reader, slots, arrival):
    """A chunk that wants 40 experts, through any number of buffers: each read exactly once."""
    requests = Requests()
    for source in (reader, requests):
        cache = ExpertCache(source, layout, rank_recency(slots), arrival)
        before = len(requests.reads)
        random = np.random.default_rng(slots + arrival)
        for layer in LAYERS:
            ids = random.permutation(EXPERTS)[:40].reshape(10, 4).astype(np.int32)
            use_all(cache, layer, ids, digests)
    pieces = {(read.path, read.offset) for read in requests.reads}
    assert len(pieces) == len(requests.reads) - before
    assert requests.counted == 3 * 40 * EXPERT_BYTES
    assert cache.counts == ExpertCounts(3 * 40, 0, 3 * 40 * EXPERT_BYTES)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_walk(layout, digests, data):
    """Every policy, slots and buffers of any number, visits left in the middle: hits are what the policy held."""
    slots, arrival = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 20))
    kind = data.draw(st.sampled_from(["rank-recency", "layer-lru", "lru", "pins"]))
    policy = {
        "rank-recency": rank_recency(slots),
        "layer-lru": LayerLru(slots, LAYERS),
        "lru": Lru(slots),
        "pins": Pins((LAYERS[i % 3], i // 3) for i in range(slots)),
    }[kind]
    requests = Requests()
    cache = ExpertCache(requests, layout, policy, arrival)
    for _ in range(data.draw(st.integers(1, 4))):
        for layer in LAYERS:
            rows = st.lists(st.lists(st.integers(0, 19), min_size=4, max_size=4, unique=True), min_size=1, max_size=4)
            ids = np.array(data.draw(rows), np.int32)
            resident = {expert for expert in union(ids) if (layer, expert) in cache.resident}
            before, read_before = cache.counts, len(requests.reads)
            taken = data.draw(st.one_of(st.none(), st.integers(0, 8)))
            if taken is not None:
                for found, _ in zip(cache.begin(layer, ids), range(taken), strict=False):
                    check_use(found, layer, digests)
                check_whole(cache)
                continue
            seen = use_all(cache, layer, ids, digests)
            assert set(seen[: len(resident)]) == resident
            missing = set(seen) - resident
            pieces = sum(6 if layout.experts[layer].record(expert) is None else 1 for expert in missing)
            assert len(requests.reads) - read_before == pieces
            assert cache.counts.requests - before.requests == len(seen)
            assert cache.counts.resident_hits - before.resident_hits == len(resident)
            assert cache.counts.bytes - before.bytes == len(missing) * EXPERT_BYTES


def test_misses_are_asked_for_at_once_in_disk_order(layout):
    requests = Requests()
    cache = ExpertCache(requests, layout, rank_recency(0), 40)
    table = layout.experts[2]
    whole = [expert for expert in range(EXPERTS) if table.record(expert) is not None]
    cache.begin(2, np.array([whole], np.int32))
    places = [(read.path, read.offset) for read in requests.reads]
    assert len(places) == len(whole)
    assert places == sorted(places)


def test_duplicates_are_one_request(layout, digests):
    requests = Requests()
    cache = ExpertCache(requests, layout, rank_recency(0), 4)
    assert sorted(use_all(cache, 1, choose([1, 2], [2, 1], [1, 3]), digests)) == [1, 2, 3]
    assert cache.counts.requests == 3
    assert len(requests.reads) == 3


def test_what_lies_in_memory_comes_first_while_the_rest_is_read(layout, digests):
    requests = Requests()
    cache = ExpertCache(requests, layout, rank_recency(12), 4)
    use_all(cache, 1, choose([1, 2, 3, 4]), digests)
    requests.answer = "never"
    arriving = cache.begin(1, choose([6, 4, 7, 2]))
    assert len(requests.waiting) == 2
    assert {next(arriving).id, next(arriving).id} == {2, 4}
    requests.finish_waiting()
    assert {found.id for found in arriving} == {6, 7}
    assert cache.counts.resident_hits == 2
    check_whole(cache)


def test_experts_come_in_the_order_of_their_arrival(layout):
    requests = Requests("never")
    cache = ExpertCache(requests, layout, rank_recency(4), 4)
    arriving = cache.begin(1, choose([1, 2, 3, 4]))
    submitted = [read.offset for read in requests.reads]
    requests.finish_waiting()  # In reverse.
    starts = [layout.experts[1].record(found.id).offset for found in arriving]
    assert starts == submitted[::-1]


def test_an_expert_in_pieces_waits_for_all_of_them(layout, digests):
    requests = Requests("never")
    cache = ExpertCache(requests, layout, rank_recency(4), 4)
    arriving = cache.begin(1, choose([10, 7]))
    record = layout.experts[1].record(7)
    [whole] = [read for read in requests.waiting if (read.path, read.offset) == (record.path, record.offset)]
    *early, last = [read for read in requests.waiting if read is not whole]
    assert len(early) == 5
    for read in (*early, whole):
        requests.finish(read)
    later = threading.Timer(0.5, requests.finish, [last])
    later.start()
    found = next(arriving)
    assert found.id == 7
    assert not last.done()
    later.cancel()
    requests.finish(last)
    found = next(arriving)
    assert found.id == 10
    check_use(found, 1, digests)


@pytest.mark.parametrize("arrival", [1, 3, 50])
def test_late_answers(layout, digests, arrival):
    requests = Requests("last first")
    cache = ExpertCache(requests, layout, rank_recency(9), arrival)
    for layer in LAYERS * 2:
        use_all(cache, layer, choose(range(16), range(5, 21)), digests)
    assert cache.counts.resident_hits == 9


def test_an_evicted_expert_is_still_there_when_it_is_used(layout, digests):
    """One slot: the visit that gives up expert 7 also wants it, and others want a buffer meanwhile."""
    for arrival in (1, 2, 16):
        cache = ExpertCache(Requests(), layout, rank_recency(3), arrival)
        use_all(cache, 1, choose([7]), digests)
        seen = use_all(cache, 1, choose([9, *range(20, 35), 7]), digests)
        assert seen[0] == 7
        assert cache.counts.resident_hits == 1
        assert cache.resident == {(1, 9)}


def test_kept_experts_are_not_copied(layout, digests):
    cache = ExpertCache(Requests(), layout, rank_recency(3), 2)
    [first] = cache.begin(1, choose([7]))
    places = [tensor.ctypes.data for tensor in first.tensors.values()]
    for layer in (2, 5):
        use_all(cache, layer, choose(range(30)), digests)
    again = next(cache.begin(1, choose([7])))
    assert [tensor.ctypes.data for tensor in again.tensors.values()] == places
    check_use(again, 1, digests)


def test_memory_is_allocated_once(layout, digests, reader):
    cache = ExpertCache(reader, layout, rank_recency(10), 5)
    memory = {buffer._memory.ctypes.data for buffer in cache._buffers}
    for layer in LAYERS * 3:
        use_all(cache, layer, choose(range(layer, layer + 30)), digests)
    assert {buffer._memory.ctypes.data for buffer in cache._buffers} == memory
    assert len(memory) == 15


@pytest.mark.parametrize("expert", [7, 10], ids=["in one piece", "in six pieces"])
def test_an_expert_that_cannot_be_read(layout, digests, expert):
    requests = Requests()
    entries = list(layout.experts[1].entries(expert).values())
    record = layout.experts[1].record(expert)
    broken = (record or entries[4]).path, (record or entries[4]).offset
    requests.failing.add(broken)
    cache = ExpertCache(requests, layout, rank_recency(6), 2)
    for _ in range(2):
        found = {item.id: item for item in cache.begin(1, choose([expert, 1, 2, 3]))}
        assert isinstance(found.pop(expert), LostExpert)
        assert all(isinstance(item, StoredExpert) for item in found.values())
        assert len(found) == 3
        assert (1, expert) not in cache.resident
        check_whole(cache)
    assert requests.counted == cache.counts.bytes
    requests.failing.clear()
    use_all(cache, 1, choose([expert, 1, 2, 3]), digests)
    assert (1, expert) in cache.resident


def test_failures_of_the_real_reader(layout, digests, monkeypatch):
    real, failures = os.preadv, [1]

    def broken(descriptor, buffers, offset):
        if failures[0]:
            failures[0] -= 1
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    reader = Reader(threads=1)
    cache = ExpertCache(reader, layout, rank_recency(6), 4)
    use_all(cache, 1, choose([7, 1, 2]), digests)  # The second try succeeds.
    failures[0] = 2
    found = list(cache.begin(2, choose([1, 2, 3])))
    [lost] = [item for item in found if isinstance(item, LostExpert)]
    assert "failed twice" in str(lost.error)
    check_whole(cache)
    assert reader.bytes_read() == BytesRead(experts=5 * EXPERT_BYTES)
    assert cache.counts.bytes == 5 * EXPERT_BYTES
    use_all(cache, 2, choose([1, 2, 3]), digests)
    reader.close()


@pytest.mark.parametrize("taken", range(8))
def test_a_visit_left_in_the_middle(layout, digests, taken):
    """With reads under way: the next visit waits for them, and nothing half-read counts as resident."""
    requests = Requests()
    cache = ExpertCache(requests, layout, rank_recency(9), 4)
    use_all(cache, 1, choose([1, 2, 3]), digests)
    requests.answer = "never"
    arriving = cache.begin(1, choose([4, 2, 6, 1, 7, 8, 9]))
    for count in range(taken):
        if count == 2:
            requests.answer = "now"
            requests.finish_waiting()
        next(arriving)
    arriving.close()
    settling = threading.Thread(target=cache.settle)
    settling.start()
    if taken <= 2:
        settling.join(0.02)
        assert settling.is_alive()
        requests.answer = "now"
        requests.finish_waiting()
    settling.join(5)
    assert not settling.is_alive()
    check_whole(cache)
    for layer in LAYERS:
        use_all(cache, layer, choose(range(20)), digests)


@pytest.mark.parametrize("slots", [0, 9], ids=["missing", "in memory"])
def test_an_ended_visit_gives_nothing_more(layout, digests, slots):
    cache = ExpertCache(Requests(), layout, rank_recency(slots), 2)
    use_all(cache, 1, choose([1, 2, 3]), digests)
    old = cache.begin(1, choose([1, 2, 3]))
    next(old)
    new = cache.begin(2, choose([1, 2, 3]))
    check_use(next(new), 2, digests)
    with pytest.raises(RuntimeError, match="a visit that had ended"):
        next(old)


@pytest.mark.parametrize("at", range(1, 12))
def test_an_interrupt_just_after_a_read_began(layout, digests, at):
    """The read goes on into memory that the cache no longer uses."""
    requests = Requests("never")
    requests.interrupt_at = at
    cache = ExpertCache(requests, layout, rank_recency(6), 12)
    with pytest.raises(KeyboardInterrupt):
        cache.begin(1, choose([1, 2, 3, 4, 5, 6, 7]))
    *known, orphan = requests.waiting
    requests.waiting = known
    requests.finish_waiting()
    requests.answer = "now"
    cache.settle()
    check_whole(cache)
    found = cache.begin(1, choose(range(12)))
    for item in found:
        orphan.buffer[:] = 0xEE
        check_use(item, 1, digests)
    check_whole(cache)


class Interrupter:
    """Raises KeyboardInterrupt before a numbered line of the cache's code."""

    def __init__(self, line):
        self.left = line

    def __call__(self, frame, *_):
        return self.step if frame.f_code.co_filename == expert_cache.__file__ else None

    def step(self, _frame, event, _argument):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.step


def test_an_interrupt_anywhere(layout, digests):
    visits = [(1, choose([1, 2, 10])), (2, choose([1, 3])), (1, choose([2, 11, 4], [3, 1, 2]))]
    line, interrupted = 0, True
    while interrupted:
        line += 1
        interrupted = False
        cache = ExpertCache(Requests(), layout, rank_recency(6), 2)
        previous = sys.gettrace()
        sys.settrace(Interrupter(line))
        try:
            for layer, ids in visits:
                for _ in cache.begin(layer, ids):
                    pass
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(previous)
        check_whole(cache)
        use_all(cache, *visits[-1], digests)
        use_all(cache, 5, choose(range(20)), digests)
    assert line > 200  # The last round ran through without an interrupt.


def test_loading_all(layout, digests, reader):
    cache = ExpertCache(reader, layout, rank_recency(3 * EXPERTS), 2)
    seen = []
    cache.load_all(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (layout.expert_bytes, layout.expert_bytes)
    assert seen == sorted(seen)
    assert cache.counts == ExpertCounts()
    for layer in LAYERS * 2:
        use_all(cache, layer, choose(range(EXPERTS)), digests)
    assert cache.counts == ExpertCounts(6 * EXPERTS, 6 * EXPERTS, 0)


def test_loading_all_with_a_broken_expert(layout):
    requests = Requests()
    record = layout.experts[2].record(7)
    requests.failing.add((record.path, record.offset))
    cache = ExpertCache(requests, layout, rank_recency(3 * EXPERTS), 2)
    with pytest.raises(ReadError, match="broken"):
        cache.load_all(lambda *_: None)


def test_there_must_be_room_to_arrive(layout):
    with pytest.raises(ValueError, match="one arrival buffer or more, found 0"):
        ExpertCache(Requests(), layout, rank_recency(3), 0)
