"""Positional reads from shards, complete or refused, with every byte counted by class."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3.errors import ReadError

_LARGEST_READ = 1 << 30
"""Linux transfers at most 2 GiB - 4 KiB a call; larger ranges are read in pieces of this size."""


class ByteClass(Enum):
    """What bytes are read for."""

    TRUNK = "trunk"
    EXPERTS = "experts"
    HEAD = "head"
    EMBEDDING = "embedding"


@dataclass(slots=True)
class BytesRead:
    """Payload bytes by class."""

    trunk: int = 0
    experts: int = 0
    head: int = 0
    embedding: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def __sub__(self, other: BytesRead) -> BytesRead:
        return BytesRead(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class Reader:
    """Reads ranges of files into given memory. Files are opened once; calls may come from several threads."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._counts = BytesRead()
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, out: npt.NDArray[np.uint8], kind: ByteClass) -> None:
        """Fill `out` (uint8, contiguous) with the bytes of `path` from `offset`; a failed read is tried once more.

        Raises:
            ReadError: the range could not be read twice.
        """
        try:
            self._fill(path, offset, out)
        except OSError:
            try:
                self._fill(path, offset, out)
            except OSError as error:
                raise ReadError(
                    f"{path}: reading {out.size} bytes at offset {offset} failed twice: {error}. "
                    "Check the drive, and that the file was not changed while it was in use."
                ) from error
        with self._lock:
            setattr(self._counts, kind.value, getattr(self._counts, kind.value) + out.size)

    def bytes_read(self) -> BytesRead:
        """Payload bytes so far."""
        with self._lock:
            return BytesRead(*(getattr(self._counts, f.name) for f in fields(BytesRead)))

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            files, self._files = self._files, {}
        for descriptor in files.values():
            os.close(descriptor)

    def _fill(self, path: Path, offset: int, out: npt.NDArray[np.uint8]) -> None:
        descriptor = self._open(path)
        view = out.data
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + _LARGEST_READ]], offset + done)
            if count == 0:
                raise OSError(f"the file ends at offset {offset + done}")
            done += count

    def _open(self, path: Path) -> int:
        with self._lock:
            descriptor = self._files.get(path)
            if descriptor is None:
                descriptor = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return descriptor
