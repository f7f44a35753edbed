"""Page-aligned memory on huge pages, allocated once and reused."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

ALIGNMENT = mmap.PAGESIZE
"""Every array handed out begins on a page, as direct reads want it."""


class Arena:
    """Anonymous memory of a fixed size, handed out piece by piece.

    Huge pages save the address look-ups that otherwise bound a matrix product over memory. Pages count as used
    once they are written.
    """

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._used = 0

    @property
    def nbytes(self) -> int:
        return int(self._bytes.size)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The next `nbytes` bytes: uint8 [nbytes]; the arena must have been made large enough."""
        start = aligned(self._used)
        if start + nbytes > self._bytes.size:
            raise ValueError(f"the arena holds {self._bytes.size} bytes, {start} are taken, {nbytes} more don't fit")
        self._used = start + nbytes
        return self._bytes[start : self._used]

    def reset(self) -> None:
        """Forget what was taken; the memory is handed out again."""
        self._used = 0


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
