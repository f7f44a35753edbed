"""Routing traces: which experts a run's tokens chose, recorded step by step, and replayed under a cache policy.

`expert_trace.bin` is pairs (layer, expert) of little-endian int32. Each step is written in the order of its work:
layer by layer, within a layer row by row, a row's experts in router-rank order. `expert_hist.json` is
`{"layers": {"1": [how often expert 0, 1, … was chosen]}}`.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3.errors import K3Error, UsageError
from k3.storage.policies import Ids, Policy

TRACE_FILE = "expert_trace.bin"
HISTOGRAM_FILE = "expert_hist.json"

_PAIR_BYTES = 8
_COPY_BYTES = 1 << 20

Pairs = npt.NDArray[np.int32]
"""(layer, expert): [requests, 2]."""


class TraceRecorder:
    """Writes a run's trace into a folder, whole steps only.

    Steps gather in a nameless file. Every `seconds_between` seconds at most, and in `close`, both results are written
    beside their place and renamed into it: a process that is killed leaves what was there before or a whole new file,
    at worst a histogram one publication older than its trace.

    Raises:
        UsageError: nothing can be written into the folder.
    """

    def __init__(self, folder: Path, num_experts: int, seconds_between: float = 30.0) -> None:
        self._folder = folder
        self._num_experts = num_experts
        self._seconds_between = seconds_between
        self._published_at = -seconds_between
        self._published = self._whole = 0
        self._step: dict[int, Pairs] = {}
        self._counts: dict[int, npt.NDArray[np.int64]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._gathered = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        except OSError as error:
            raise UsageError(
                f"{folder}: a routing trace can't be written there: {error.strerror}. Name a folder for it."
            ) from error

    def record(self, layer: int, ids: Ids) -> None:
        """Note a layer's experts: int32 [rows, top_k], rank order. Layers ascend within a step.

        Where they don't, the step before was abandoned, and what was noted of it is dropped.
        """
        if self._step and layer <= max(self._step):
            self._step = {}
        self._step[layer] = np.stack([np.full(ids.size, layer, "<i4"), ids.ravel().astype("<i4")], axis=1)

    def end_step(self) -> None:
        """The step is whole.

        Raises:
            K3Error: it can't be written.
        """
        step, self._step = self._step, {}
        data = b"".join(pairs.tobytes() for pairs in step.values())
        try:
            _write(self._gathered.fileno(), data, self._whole)
            self._whole += len(data)
            for layer, pairs in step.items():
                counts = np.bincount(pairs[:, 1], minlength=self._num_experts)
                self._counts[layer] = counts + self._counts.get(layer, 0)
            if time.monotonic() >= self._published_at + self._seconds_between:
                self._publish()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Publish what was not published yet; a step that didn't end is dropped.

        Raises:
            K3Error: it can't be written.
        """
        try:
            if self._published < self._whole:
                self._publish()
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            self._gathered.close()

    def _publish(self) -> None:
        layers = {str(layer): counts.tolist() for layer, counts in sorted(self._counts.items())}
        results = {
            TRACE_FILE: self._read_whole_steps(),
            HISTOGRAM_FILE: iter([json.dumps({"layers": layers}).encode()]),
        }
        beside = {name: self._folder / f".{name}.{os.getpid()}.tmp" for name in results}
        try:
            for name, data in results.items():
                with beside[name].open("wb") as file:
                    file.writelines(data)
            for name, path in beside.items():
                path.replace(self._folder / name)
        finally:
            for path in beside.values():
                path.unlink(missing_ok=True)
        self._published = self._whole
        self._published_at = time.monotonic()

    def _read_whole_steps(self) -> Iterator[bytes]:
        for start in range(0, self._whole, _COPY_BYTES):
            yield os.pread(self._gathered.fileno(), min(_COPY_BYTES, self._whole - start), start)

    def _unwritable(self, error: OSError) -> K3Error:
        return K3Error(
            f"{self._folder}: the routing trace could not be written: {error.strerror}. "
            "Check the folder and the disk's space."
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """The experts that consecutive tokens chose: int32 [tokens, layers, top_k], in rank order."""

    layers: tuple[int, ...]
    ids: npt.NDArray[np.int32]

    @classmethod
    def read(cls, path: Path, top_k: int, num_experts: int, tokens: int | None = None) -> Trace:
        """Read a trace and put it into token order.

        A step begins where the layers begin anew. Steps follow each other as their tokens do, unless each of them
        begins with all of the step before: such a run read its whole prefix again for every token, and the last step
        alone is what a run that doesn't would have chosen. `tokens` takes so many tokens at the end as one step.

        Raises:
            UsageError: there is no such file, or it is not such a trace.
        """
        pairs = _read_pairs(path, num_experts)
        steps = _one_step(path, pairs, top_k, tokens) if tokens is not None else _steps(pairs)
        parts = [_by_token(path, number, step, top_k) for number, step in enumerate(steps, 1)]
        layers = parts[0].layers
        for number, part in enumerate(parts, 1):
            if part.layers != layers:
                raise UsageError(
                    f"{path}: expected every step to visit the same {len(layers)} layers, step {number} visits "
                    f"{len(part.layers)}. The file is cut off, or --tokens doesn't fit it."
                )
        ids = [part.ids for part in parts]
        return cls(layers, ids[-1] if _each_repeats_the_last(ids) else np.concatenate(ids))

    def visits(self) -> Iterator[tuple[int, Ids]]:
        """Each layer's visit of each token, as decoding makes them: ids int32 [1, top_k]."""
        for token in self.ids:
            for layer, ids in zip(self.layers, token, strict=True):
                yield layer, ids[None]

    def part(self, start: int, end: int) -> Trace:
        """Tokens `start` to `end`."""
        return Trace(self.layers, self.ids[start:end])


def replay(trace: Trace, policy: Policy) -> int:
    """How many of a trace's requests find their expert held, one token a step, from whatever the policy holds."""
    hits = 0
    for layer, ids in trace.visits():
        hits += sum((layer, expert) in policy for expert in ids.ravel().tolist())
        policy.visit(layer, ids)
    return hits


def _read_pairs(path: Path, num_experts: int) -> Pairs:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}. Name a file that --dump-cache-trace wrote.") from error
    if not data or len(data) % _PAIR_BYTES:
        raise UsageError(
            f"{path}: expected (layer, expert) pairs of {_PAIR_BYTES} bytes, found {len(data)} bytes. "
            f"Name an {TRACE_FILE} of --dump-cache-trace."
        )
    pairs = np.frombuffer(data, "<i4").reshape(-1, 2)
    bad = np.flatnonzero((pairs[:, 0] < 0) | (pairs[:, 1] < 0) | (pairs[:, 1] >= num_experts))
    if len(bad):
        layer, expert = pairs[bad[0]].tolist()
        raise UsageError(
            f"{path}: expected layers from 0 up and experts from 0 to {num_experts - 1}, found layer {layer}, expert "
            f"{expert} at pair {int(bad[0])}. Name a trace, and --experts where the model has another number of them."
        )
    return pairs


def _steps(pairs: Pairs) -> list[Pairs]:
    return np.split(pairs, np.flatnonzero(np.diff(pairs[:, 0]) < 0) + 1)


def _one_step(path: Path, pairs: Pairs, top_k: int, tokens: int) -> list[Pairs]:
    count = tokens * top_k * len(np.unique(pairs[:, 0]))
    if count > len(pairs):
        raise UsageError(f"{path}: --tokens {tokens} asks for {count} requests, the trace has {len(pairs)}. Ask less.")
    return [pairs[len(pairs) - count :]]


def _by_token(path: Path, number: int, step: Pairs, top_k: int) -> Trace:
    """A step's requests by token instead of by layer."""
    layers, counts = np.unique(step[:, 0], return_counts=True)
    ascending = bool((np.diff(step[:, 0]) >= 0).all())
    if not ascending or counts[0] % top_k or (counts != counts[0]).any():
        raise UsageError(
            f"{path}: expected step {number} to choose {top_k} experts a token in every layer, layer by layer, found "
            f"{int(counts.min())} to {int(counts.max())} in a layer. The file is cut off, or --top-k or --tokens "
            "doesn't fit it."
        )
    return Trace(tuple(layers.tolist()), step[:, 1].reshape(len(layers), -1, top_k).transpose(1, 0, 2))


def _each_repeats_the_last(steps: list[npt.NDArray[np.int32]]) -> bool:
    return all(len(a) < len(b) and np.array_equal(a, b[: len(a)]) for a, b in pairwise(steps))


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
