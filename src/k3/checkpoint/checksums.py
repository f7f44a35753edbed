r"""Checksums of a checkpoint's files, and the two records that hold them beside the checkpoint.

`k3-download.json` (`k3.checkpoint.fetch.record`) has what the hub lists; `k3-checksums.json` has what `k3 verify
--deep` computed where nothing was known. Large files of a hub have a sha256. Small ones have the id that git gives
their content, SHA-1 over `blob <bytes>\0` and the bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from k3.errors import CheckpointError, K3Error

CHECKSUM_FILE: Final = "k3-checksums.json"
SHA256: Final = "sha256"
GIT_SHA1: Final = "git_sha1"
_DIGITS: Final = {SHA256: 64, GIT_SHA1: 40}
_READ_BYTES: Final = 8 << 20

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum in lower-case hexadecimal; `kind` is SHA256 or GIT_SHA1."""

    kind: str
    value: str

    def __post_init__(self) -> None:
        if not re.fullmatch(f"[0-9a-f]{{{_DIGITS[self.kind]}}}", self.value):
            raise ValueError(f"expected {_DIGITS[self.kind]} hexadecimal digits of {self.kind}, found {self.value!r}")

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"


class KnownFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a record says about one file: its size, and a checksum or none."""

    bytes: int
    sha256: str | None = None
    git_sha1: str | None = None

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise ValueError(f"expected a number of bytes, found {self.bytes}")
        _ = self.checksum

    @property
    def checksum(self) -> Checksum | None:
        """The strongest checksum there is."""
        if self.sha256 is not None:
            return Checksum(SHA256, self.sha256)
        return None if self.git_sha1 is None else Checksum(GIT_SHA1, self.git_sha1)


class ChecksumRecord(msgspec.Struct, frozen=True):
    """The content of `k3-checksums.json`."""

    files: dict[str, KnownFile]

    @classmethod
    def read(cls, directory: Path) -> ChecksumRecord:
        """The record beside the checkpoint; an empty one where there is none. CheckpointError if it is damaged."""
        return read_record(directory / CHECKSUM_FILE, cls) or cls({})

    def with_files(self, files: Mapping[str, KnownFile]) -> ChecksumRecord:
        """This record and these files."""
        return ChecksumRecord(dict(sorted((self.files | dict(files)).items())))

    def write(self, directory: Path) -> None:
        """Write the record, whole or not at all. K3Error where that fails."""
        write_record(directory / CHECKSUM_FILE, self)


def compute(path: Path, kind: str, on_bytes: Callable[[int], None] = lambda _: None) -> Checksum:
    """The checksum of a file, as the drive has it: pages of the file that memory holds are dropped first.

    `on_bytes` is called with the size of each piece that is done, and may raise to stop. Releases the interpreter
    lock while it reads and computes. Raises OSError.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256() if kind == SHA256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        _forget(file.fileno(), 0, 0)
        buffer = memoryview(bytearray(min(_READ_BYTES, size) or 1))
        done = 0
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            _forget(file.fileno(), done, count)
            done += count
            on_bytes(count)
    return Checksum(kind, digest.hexdigest())


def _forget(descriptor: int, offset: int, nbytes: int) -> None:
    """Let go of cached pages: a terabyte that is read once would push everything else out of memory."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def read_record(path: Path, kind: type[_Record]) -> _Record | None:
    """A record of this kind, or None where there is no such file. CheckpointError if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, ValueError, RecursionError, OSError) as error:
        raise CheckpointError(
            f"{path}: this record of checksums can't be read: {error}. Restore it, or remove it to begin a new one."
        ) from error


def write_record(path: Path, record: Any) -> None:
    """Write a record beside its place and rename it. K3Error where that fails; what was there before stays."""
    text = json.dumps(msgspec.to_builtins(record), indent=1) + "\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with beside.open("w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise K3Error(
            f"{path}: the record of checksums could not be written: {error.strerror}. Check the directory's "
            "permissions and the drive's space."
        ) from error
