"""Files of a repository on a model hub. `huggingface_hub` lists and transfers them; it is imported at first use.

What is added here: errors that say what to do, and a transfer that goes on from the bytes that are there.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self, cast

from k3.checkpoint.checksums import GIT_SHA1, SHA256, Checksum
from k3.checkpoint.fetch.record import RemoteFile
from k3.checkpoint.synthetic.shards import write_at
from k3.errors import K3Error, UsageError

WAITS: Final = (5.0, 10.0, 20.0, 40.0, 80.0)
"""Seconds between attempts to go on with a file that got no further byte: some minutes, as a router needs."""

_LISTING_SECONDS: Final = 30.0


class TransferError(K3Error):
    """The hub could not be reached, or a transfer broke off (exit code 1): trying again later may help."""


class TransferStoppedError(Exception):
    """A transfer was told to stop."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a revision is: its commit and its files by name, folders left out."""

    commit: str
    files: dict[str, RemoteFile]


class Hub:
    """The hub at `endpoint`; None takes HF_ENDPOINT or the public one. Calls may come from several threads.

    Raises:
        UsageError: HF_TOKEN can't be a token.
    """

    def __init__(self, endpoint: str | None = None, waits: Sequence[float] = WAITS) -> None:
        self._endpoint = endpoint
        self._waits = waits
        _quieten()
        if not re.fullmatch("[!-~]*", _token() or ""):
            raise UsageError(
                "HF_TOKEN: expected letters, digits and signs of ASCII, found something else. Set it anew."
            )

    def list_files(self, repo: str, revision: str) -> Listing:
        """The commit that a revision means now, and its files with sizes and checksums.

        Raises:
            UsageError: no such repository or revision, or no access to it.
            TransferError: the hub could not be asked.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        where = f"{repo} at {revision}"
        try:
            info = HfApi(self._endpoint).model_info(
                repo, revision=revision, files_metadata=True, timeout=_LISTING_SECONDS
            )
        except HFValidationError as error:
            raise UsageError(f"--repo: {repo!r} can't be the name of a repository: {_say(error)}.") from error
        except _failures() as error:
            raise _translated(error, where) from error
        except ValueError as error:
            raise _nonsense(where, _say(error)) from error
        if not info.sha or not info.siblings:
            raise _nonsense(where, "it has no commit or no files")
        files = {s.rfilename: _remote_file(where, s) for s in info.siblings if "/" not in s.rfilename}
        return Listing(info.sha, files)

    def fetch(self, repo: str, commit: str, name: str, part: Part) -> None:
        """Fetch what is missing of a file, however often the connection breaks, as long as bytes come.

        Raises:
            UsageError: no such file, or no access to it.
            TransferError: no further byte came for some minutes.
            OSError: the drive refused what was to be written.
            TransferStoppedError: `part` was told to stop.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(repo, name, revision=commit, endpoint=self._endpoint)
        # A compressed answer would have other offsets than the file.
        headers = {**build_hf_headers(), "accept-encoding": "identity"}
        waits = iter(self._waits)
        while part.nbytes < part.expected:
            before = part.nbytes
            try:
                http_get(
                    url,
                    cast("BinaryIO", part),
                    resume_size=before,
                    headers=headers,
                    expected_size=part.expected,
                    displayed_filename=name,
                )
            except _failures() as error:
                if part.failure is not None:
                    raise part.failure from None
                failure = _translated(error, f"{name} of {repo}")
                if not isinstance(failure, TransferError):
                    raise failure from error
                if part.nbytes > before:
                    waits = iter(self._waits)
                seconds = next(waits, None)
                if seconds is None:
                    raise failure from error
                part.wait(seconds)


class Part:
    """The beginning of a file, written on from its end. What `http_get` takes for an open file.

    Bytes go to the drive at once, so that those that are counted are there. Use it as a context manager.
    """

    def __init__(
        self, path: Path, expected: int, stop: threading.Event, on_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        """`on_bytes` is called with the bytes that are there, whenever that number changes."""
        self.path = path
        self.expected = expected
        self.failure: OSError | None = None
        """What the drive answered when it refused a write."""
        self._stop = stop
        self._on_bytes = on_bytes
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.nbytes = os.fstat(self._descriptor).st_size
        if self.nbytes > expected:
            self.seek(0)
            self.truncate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes) -> int:
        if self._stop.is_set():
            raise TransferStoppedError
        try:
            write_at(self._descriptor, data, self.nbytes)
        except OSError as error:
            self.failure = error
            self.nbytes = os.fstat(self._descriptor).st_size
            raise
        self.nbytes += len(data)
        self._on_bytes(self.nbytes)
        return len(data)

    def tell(self) -> int:
        return self.nbytes

    def seek(self, offset: int) -> int:
        self.nbytes = offset
        self._on_bytes(offset)
        return offset

    def truncate(self) -> int:
        os.ftruncate(self._descriptor, self.nbytes)
        return self.nbytes

    def sync(self) -> None:
        """Have everything on the drive, whatever happens to the machine."""
        os.fsync(self._descriptor)

    def wait(self, seconds: float) -> None:
        """Pause, unless the transfer is told to stop."""
        if self._stop.wait(seconds):
            raise TransferStoppedError


def _remote_file(where: str, sibling: Any) -> RemoteFile:
    size = sibling.lfs.size if sibling.lfs else sibling.size
    if not isinstance(size, int) or size < 0:
        raise _nonsense(where, f"{sibling.rfilename} has no size")
    try:
        if sibling.lfs:
            return RemoteFile(bytes=size, sha256=Checksum(SHA256, sibling.lfs.sha256).value)
        if sibling.blob_id:
            return RemoteFile(bytes=size, git_sha1=Checksum(GIT_SHA1, sibling.blob_id).value)
    except ValueError as error:
        raise _nonsense(where, f"{sibling.rfilename}: {error}") from error
    return RemoteFile(bytes=size)


def _failures() -> tuple[type[Exception], ...]:
    """What a request may raise: the hub's errors, and the base of its HTTP client's, whichever client that is."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)


def _translated(error: Exception, where: str) -> K3Error:
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return UsageError(
            f"{where}: access to this repository must be asked for on its page. Do so, and set HF_TOKEN to a token of "
            "that account."
        )
    if isinstance(error, RevisionNotFoundError):
        return UsageError(f"{where}: the hub has no such revision. Name a branch, a tag or a commit with --revision.")
    if isinstance(error, RepositoryNotFoundError):
        return UsageError(
            f"{where}: the hub has no such repository, or shows it to its owners only. Check --repo; for a private "
            f"repository set HF_TOKEN{'' if _token() is None else ', which is set but gives no access'}."
        )
    if status in (401, 403):
        return UsageError(
            f"{where}: the hub refuses access (status {status}). Check HF_TOKEN: "
            f"{'it is not set' if _token() is None else 'the one that is set is not accepted'}."
        )
    if status == 404:
        return UsageError(f"{where}: the hub has no such file (status 404). Check --repo and --revision.")
    if isinstance(error, OfflineModeIsEnabled):
        return UsageError(f"{where}: HF_HUB_OFFLINE forbids any request. Unset it.")
    return TransferError(
        f"{where}: the transfer failed: {_say(error)}. Check the network, and HF_ENDPOINT if it is set."
    )


def _nonsense(where: str, detail: str) -> TransferError:
    return TransferError(
        f"{where}: the hub's answer is not a list of files with sizes: {detail}. Check HF_ENDPOINT and any proxy."
    )


def _say(error: Exception) -> str:
    """The kind of an error and its first line, without a token and without the queries of signed addresses."""
    first = re.sub(r"\?[^\s'\"]+", "", str(error).strip().partition("\n")[0]).rstrip(".")
    token = _token()
    if token:
        first = first.replace(token, "(token)")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _token() -> str | None:
    from huggingface_hub import get_token

    return get_token()


def _quieten() -> None:
    """Keep the library's own messages and bars from the terminal: ours say the same once."""
    from huggingface_hub.utils import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        disable_progress_bars()
