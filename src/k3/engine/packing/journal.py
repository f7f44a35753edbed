"""What of a packed trunk is safely on disk while it is being written, so that a killed run can go on.

The journal is a file of JSON lines beside the data: what is being packed, then each tensor once its bytes are durable.
A line that was cut off by a crash counts as absent.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from k3.checkpoint.index import TensorEntry
from k3.checkpoint.packed.format import FORMAT, VERSION, PackedTensor
from k3.checkpoint.packed.identity import Identity
from k3.checkpoint.synthetic.shards import write_at
from k3.errors import UsageError

JOURNAL_FILE = "trunk.journal"

_Line = TypeVar("_Line")


class JournalHead(msgspec.Struct, frozen=True):
    """What is being packed: of which checkpoint, how many layers, and whether encodings are wanted."""

    layers: int
    raw: bool
    identity: Identity
    format: str = FORMAT
    version: int = VERSION


class Journal:
    """Tensors that are durable. Leave it as a context manager; one process at a time has it open."""

    def __init__(self, directory: Path, data: int, head: JournalHead, entries: Sequence[TensorEntry]) -> None:
        """Begin, or go on with, the journal in `directory` of the open data file `data`.

        Raises:
            UsageError: another process writes there, or it is the journal of something else than `head`.
            OSError: the file system refuses.
        """
        self._data = data
        self._file = os.open(directory / JOURNAL_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock(directory)
            self.tensors = self._read(directory, head, entries)
        except BaseException:
            os.close(self._file)
            raise
        self._waiting: list[PackedTensor] = []
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="k3-commit")
        self._commit: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._committer.shutdown()
        os.close(self._file)

    @property
    def end(self) -> int:
        """The first byte behind the last durable panel."""
        return _end(self.tensors)

    def add(self, tensor: PackedTensor) -> None:
        """Note a tensor that has been written; `commit` makes it durable."""
        self._waiting.append(tensor)

    def commit(self, file_bytes: int) -> None:
        """Begin to make all noted tensors durable, in another thread; waits for the commit before this one.

        Raises:
            OSError: this commit could not begin, or the one before it failed.
        """
        self.settle()
        if os.fstat(self._data).st_size < file_bytes:
            os.ftruncate(self._data, file_bytes)  # Zeros at the end are a hole.
        tensors, self._waiting = self._waiting, []
        self._commit = self._committer.submit(self._make_durable, tensors)

    def settle(self) -> None:
        """Wait for the commit under way.

        Raises:
            OSError: it failed.
        """
        commit, self._commit = self._commit, None
        if commit is not None:
            commit.result()

    def _make_durable(self, tensors: list[PackedTensor]) -> None:
        os.fdatasync(self._data)
        lines = b"".join(msgspec.json.encode(tensor) + b"\n" for tensor in tensors)
        write_at(self._file, lines, os.fstat(self._file).st_size)
        os.fsync(self._file)
        self.tensors += tensors

    def _lock(self, directory: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{directory}: another `k3 pack` is writing there. Wait for it, or name another directory."
            ) from None

    def _read(self, directory: Path, head: JournalHead, entries: Sequence[TensorEntry]) -> list[PackedTensor]:
        """The durable tensors; what stands behind them in the journal is cut off."""
        with open(self._file, "rb", closefd=False) as file:
            first, *lines = file.read().split(b"\n")
        is_same = _decoded(first, JournalHead) == head
        if not lines or (not is_same and len(lines) < 2):  # Nothing is durable yet, so nothing is lost.
            os.ftruncate(self._file, 0)
            write_at(self._file, msgspec.json.encode(head) + b"\n", 0)
            return []
        if not is_same:
            raise UsageError(
                f"{directory} holds an unfinished trunk of another checkpoint, or of other options (--raw, --layers, "
                "--config). Finish that one, or remove the directory and try again."
            )
        tensors: list[PackedTensor] = []
        length = len(first) + 1
        size = os.fstat(self._data).st_size
        for line, entry in zip(lines[:-1], entries, strict=False):
            tensor = _decoded(line, PackedTensor)
            if tensor is None or tensor.name != entry.name or _end([tensor]) > size:
                break
            tensors.append(tensor)
            length += len(line) + 1
        os.ftruncate(self._file, length)
        return tensors


def _end(tensors: Sequence[PackedTensor]) -> int:
    return tensors[-1].panels[-1].offset + tensors[-1].panels[-1].nbytes if tensors else 0


def _decoded(line: bytes, kind: type[_Line]) -> _Line | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeError):
        return None
