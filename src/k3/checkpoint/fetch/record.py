"""`k3-download.json`: which revision of which repository a directory holds or will hold, and its files.

It is written before the first byte of a file is fetched, so that later runs go on with the same revision.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from k3.checkpoint.checksums import KnownFile, read_record, write_record
from k3.checkpoint.headers.weight_map import INDEX_FILE
from k3.errors import UsageError
from k3.text.tokenizer import CONFIG_FILE, VOCABULARY_FILE

DOWNLOAD_FILE: Final = "k3-download.json"
SMALL_FILES: Final = ("config.json", "generation_config.json", INDEX_FILE, VOCABULARY_FILE, CONFIG_FILE)
"""What belongs to a checkpoint beside its shards; all but the first may be absent."""


class RemoteFile(KnownFile, frozen=True, kw_only=True, omit_defaults=True):
    """A file as the hub lists it, where it was put, and the state in which it was checked.

    `directory` is empty for the checkpoint's own, so that this one can be moved. `checked_mtime_ns` is the file's
    modification time when its checksum was found right.
    """

    directory: str = ""
    checked_mtime_ns: int | None = None


class DownloadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `k3-download.json`. `revision` is what was asked for, `commit` what it meant then."""

    repo: str
    revision: str
    commit: str
    files: dict[str, RemoteFile]

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{40}", self.commit):
            raise ValueError(f"expected a commit of 40 hexadecimal digits, found {self.commit!r}")
        for name in self.files:
            if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
                raise ValueError(f"expected plain file names, found {name!r}")

    @classmethod
    def read(cls, directory: Path) -> DownloadRecord | None:
        """The record in this directory, if there is one. CheckpointError if it is damaged."""
        return read_record(directory / DOWNLOAD_FILE, cls)

    def write(self, directory: Path) -> None:
        """Write the record, whole or not at all. K3Error where that fails."""
        write_record(directory / DOWNLOAD_FILE, self)

    def replacing(self, files: dict[str, RemoteFile]) -> DownloadRecord:
        """The same revision with these files."""
        return msgspec.structs.replace(self, files=files)

    def require(self, directory: Path, repo: str | None, revision: str | None) -> None:
        """Refuse to go on with another repository or revision than the one that was begun."""
        if repo is not None and repo != self.repo:
            self._refuse(directory, "--repo", self.repo, repo)
        if revision is not None and revision not in (self.revision, self.commit):
            self._refuse(directory, "--revision", f"{self.revision} (commit {self.commit})", revision)

    def _refuse(self, directory: Path, option: str, begun: str, asked: str) -> None:
        raise UsageError(
            f"{option}: {directory} holds a download of {begun}, and {asked} was asked for. Name another directory; "
            f"or, to go on with what was begun, ask for the same."
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())
