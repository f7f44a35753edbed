"""State files: the state of a sequence on disk, whole or not at all.

    8 bytes   "k3state" and a line feed
    8 bytes   length of the header, little-endian
    header    JSON, `StateHeader`
    data      float32, little-endian: layer by layer, for KDA the recurrent state and the tails of q, k and v, for MLA
              the latent rows of all tokens
    32 bytes  SHA-256 of all that stands before

Arrays are written and read where they lie: a state is never in memory twice.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, Self

import msgspec
import numpy as np

from k3.checkpoint.packed.identity import listed
from k3.engine.states.identity import ModelIdentity
from k3.errors import K3Error, StateFileError
from k3.kernels import F32Array

VERSION: Final = 1
"""Changes with the form of the file and with any change of the numeric contract."""

DTYPE: Final = "<f4"

_MAGIC: Final = b"k3state\n"
_LENGTH_BYTES: Final = 8
_DIGEST_BYTES: Final = 32
_MAX_HEADER_BYTES: Final = 1 << 28
_SLICE: Final = 4 << 20


class StateHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a state file says of itself. `nbytes` is the length of the data.

    `request` is what a generation needs to go on (`k3.engine.states.record`), `mark` what a prefix cache notes.
    """

    model: ModelIdentity
    tokens: list[int]
    nbytes: int
    request: dict[str, Any] | None = None
    mark: dict[str, Any] | None = None
    dtype: str = DTYPE
    version: int = VERSION


class _Version(msgspec.Struct, frozen=True):
    version: int


def write_state(path: Path, header: StateHeader, arrays: Iterable[F32Array]) -> None:
    """Write a state file beside and rename it into place, when its bytes are durable.

    Raises:
        K3Error: it can't be written; a file that was there before is untouched.
    """
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            with beside.open("wb", buffering=0) as file:
                _write(file, header, arrays)
                os.fsync(file.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
        _sync_directory(target.parent)
    except OSError as error:
        raise K3Error(
            f"{path}: the state could not be written: {error.strerror}. Check the folder and the disk's space."
        ) from error


class StateFile:
    """An open state file whose header was found right. Use it as a context manager.

    Raises:
        StateFileError: it is no state file, from a newer version, cut off, or not one of the model `model`.
    """

    def __init__(self, path: Path, model: ModelIdentity) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            raise StateFileError(f"{path}: the state can't be read: {error.strerror}. Check the path.") from error
        try:
            self.header, self._start = self._read_header(model)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def verify(self) -> Self:
        """Read all of the file, a little at a time.

        Raises:
            StateFileError: a byte is not the one that was written.
        """
        buffer = memoryview(bytearray(_SLICE))
        left = self.header.nbytes
        self._check(buffer[: min(_SLICE, left - done)] for done in range(0, left, _SLICE))
        return self

    def read_into(self, arrays: Iterable[F32Array]) -> None:
        """Fill the arrays with the data; their lengths must add up to it.

        Raises:
            StateFileError: they don't, or a byte is not the one that was written; the arrays are then spoilt.
        """
        every = list(arrays)
        wanted = sum(array.nbytes for array in every)
        if wanted != self.header.nbytes:
            self._damaged(
                f"expected {wanted} bytes of state for {len(self.header.tokens)} tokens, found {self.header.nbytes}"
            )
        self._check(piece for array in every for piece in _slices(array))

    def _check(self, pieces: Iterable[memoryview]) -> None:
        """Read the data into `pieces`, one after another, and compare the checksum."""
        self._file.seek(0)
        digest = hashlib.sha256(self._exactly(self._start))
        for piece in pieces:
            self._fill(piece)
            digest.update(piece)
        if self._exactly(_DIGEST_BYTES) != digest.digest():
            self._damaged("the checksum is wrong")

    def _read_header(self, model: ModelIdentity) -> tuple[StateHeader, int]:
        size = os.fstat(self._file.fileno()).st_size
        if self._file.read(len(_MAGIC)) != _MAGIC:
            raise StateFileError(
                f"{self.path}: this is no state file of k3: it doesn't begin with {_MAGIC!r}. Name one that "
                "--save-state wrote."
            )
        length = int.from_bytes(self._exactly(_LENGTH_BYTES), "little")
        start = len(_MAGIC) + _LENGTH_BYTES + length
        if length > min(size, _MAX_HEADER_BYTES):
            self._damaged(f"expected a header within the {size} bytes of the file, found one of {length}")
        raw = self._exactly(length)
        header = self._decode(raw)
        if size != start + header.nbytes + _DIGEST_BYTES:
            self._damaged(f"expected {start + header.nbytes + _DIGEST_BYTES} bytes, found {size}")
        found = listed(header.model.differences(model))
        if found:
            raise StateFileError(
                f"{self.path}: this state belongs to another checkpoint, or to this one before it changed: {found}. "
                "Use the checkpoint, and the --layers and --config, that it was saved with."
            )
        return header, start

    def _decode(self, raw: bytes) -> StateHeader:
        try:
            version = msgspec.json.decode(raw, type=_Version).version
            if version != VERSION:
                raise StateFileError(
                    f"{self.path}: this state was saved by another version of k3: expected form {VERSION}, found "
                    f"{version}. Go on with the k3 that saved it."
                )
            header = msgspec.json.decode(raw, type=StateHeader)
        except (msgspec.DecodeError, UnicodeError) as error:
            self._damaged(f"the header can't be read ({error})")
        if header.dtype != DTYPE or sys.byteorder != "little":
            raise StateFileError(
                f"{self.path}: expected numbers of the kind {DTYPE!r}, found {header.dtype!r} on a "
                f"{sys.byteorder}-endian machine."
            )
        return header

    def _exactly(self, length: int) -> bytes:
        buffer = bytearray(length)
        self._fill(memoryview(buffer))
        return bytes(buffer)

    def _fill(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            try:
                count = self._file.readinto(piece[done:])  # type: ignore[attr-defined]
            except OSError as error:
                raise StateFileError(f"{self.path}: the state can't be read: {error.strerror}.") from error
            if not count:
                self._damaged("it ends too early")
            done += count

    def _damaged(self, what: str) -> NoReturn:
        raise StateFileError(
            f"{self.path}: this state file is damaged or cut off: {what}. Use another copy, or begin again."
        )


def _write(file: BinaryIO, header: StateHeader, arrays: Iterable[F32Array]) -> None:
    raw = msgspec.json.encode(header)
    digest = hashlib.sha256()

    def put(piece: memoryview) -> None:
        digest.update(piece)
        while len(piece):
            piece = piece[file.write(piece) :]

    put(memoryview(_MAGIC + len(raw).to_bytes(_LENGTH_BYTES, "little") + raw))
    for array in arrays:
        for piece in _slices(array):
            put(piece)
    file.write(digest.digest())


def _slices(array: F32Array) -> Iterator[memoryview]:
    """The bytes of a contiguous array, a few MB at a time, where they lie."""
    flat = array.reshape(-1).view(np.uint8).data
    for start in range(0, len(flat), _SLICE):
        yield flat[start : start + _SLICE]


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


IdentityOf = Callable[[], ModelIdentity]
"""Gives the identity of the loaded model; it is worked out when it is first asked for."""
