"""The rows of one step, grouped by sequence, and what became of each group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3.errors import K3Error
from k3.model.state import LayerState


@dataclass(slots=True)
class Part:
    """The rows `start:stop` of a step: consecutive positions of one sequence, the first at `position`."""

    states: list[LayerState]
    position: int
    start: int
    stop: int
    error: K3Error | None = None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


class Batch:
    """The parts of a step that are still alive. Rows of different parts never mix."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def fail(self, rows: npt.NDArray[np.bool_], error: K3Error) -> None:
        """Mark the parts that own a row of the mask `rows` [rows of the step] as failed; a first error stays."""
        for part in self._parts:
            if part.error is None and rows[part.rows].any():
                part.error = error

    def drop_failed(self) -> npt.NDArray[np.int64] | None:
        """Drop failed parts and renumber the rest; returns the old rows that stay, None when all do."""
        if not any(part.error for part in self._parts):
            return None
        kept = [part for part in self._parts if part.error is None]
        rows = [np.arange(part.start, part.stop) for part in kept]
        start = 0
        for part in kept:
            part.start, part.stop = start, start + part.stop - part.start
            start = part.stop
        self._parts = kept
        return np.concatenate(rows) if rows else np.empty(0, np.int64)
