"""Fetching a checkpoint: pinned to one commit, resumable, spread over drives, every byte checked.

    download(Path("K3"), DownloadOptions(extra_dirs=(Path("/mnt/b"),)), Hub())

A file is fetched into `NAME.part`, read back from the drive, compared with the hub's checksum, and then takes its
name. `k3-download.json` says what was begun, so that the same call goes on where the last one stopped, however that
one ended.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from k3.checkpoint.checksums import Checksum, compute
from k3.checkpoint.fetch.hub import Hub, Part, TransferStoppedError
from k3.checkpoint.fetch.record import DOWNLOAD_FILE, SMALL_FILES, DownloadRecord, RemoteFile
from k3.checkpoint.fetch.spread import PART, Present, look, spread
from k3.checkpoint.released import RELEASED_FILES
from k3.errors import CheckpointError, InterruptedRunError, K3Error, UsageError

RELEASED_REPO: Final = "moonshotai/Kimi-K3"
RELEASED_REVISION: Final = "main"

_RESUME: Final = "What is there is kept, and the same command goes on from it."
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SECONDS_BETWEEN_REPORTS: Final = 0.2


@dataclass(frozen=True, slots=True)
class DownloadOptions:
    """What to fetch and where to. None is what was begun, at first the main branch of the released repository."""

    repo: str | None = None
    revision: str | None = None
    extra_dirs: tuple[Path, ...] = ()
    connections: int = 4


@dataclass(frozen=True, slots=True)
class DownloadEvents:
    """What a download tells while it works: sentences, and bytes done and in all of fetching and of checking."""

    note: Callable[[str], None] = field(default=lambda _: None)
    fetched: Callable[[int, int], None] = field(default=lambda *_: None)
    checked: Callable[[int, int], None] = field(default=lambda *_: None)


def download(
    directory: Path, options: DownloadOptions, hub: Hub, events: DownloadEvents | None = None
) -> DownloadRecord:
    """Fetch what is missing of a checkpoint into `directory` and the extra ones; returns the record of what is there.

    Raises:
        UsageError: a directory, repository or revision is not what it should be, or gives no access.
        MachineError: the drives lack the space; nothing was fetched.
        CheckpointError: a file's size or checksum is wrong.
        K3Error: the network or a drive failed. What is there is kept.
        InterruptedRunError: Ctrl-C. What is there is kept.
    """
    tell = events or DownloadEvents()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory}: the directory can't be made: {error.strerror}. Name another place.") from error
    with _sole_use(directory):
        record = DownloadRecord.read(directory)
        if record is not None:
            record.require(directory, options.repo, options.revision)
            tell.note(f"going on with {record.repo} at commit {record.commit}")
        places = _places(directory, options.extra_dirs, record)
        if record is None:
            record = _begin(places, options, hub, tell)
        transfer = _Transfer(directory, places, record, hub, tell)
        transfer.run(options.connections)
        transfer.check()
        return transfer.record


@contextmanager
def _sole_use(directory: Path) -> Iterator[None]:
    """Hold the directory against a second download; the system lets go of it when the process ends, however it does."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{directory}: another download is at work here. Wait for it, or stop it.") from None
        except OSError:
            pass  # A file system without locks.
        yield
    finally:
        os.close(descriptor)


def _places(directory: Path, extra_dirs: tuple[Path, ...], record: DownloadRecord | None) -> list[Path]:
    """The directories of this download: those that are named, and those where an earlier run put files.

    Raises:
        UsageError: one is no directory, or one that holds files has gone.
    """
    for place in extra_dirs:
        if not place.is_dir():
            raise UsageError(
                f"--extra-dir: {place} is not a directory. Mount the drive, make the directory on it, then try again."
            )
    places = {place.resolve(): None for place in (directory, *extra_dirs)}
    elsewhere: dict[Path, list[str]] = {}
    for name, file in record.files.items() if record else ():
        if file.directory:
            elsewhere.setdefault(Path(file.directory), []).append(name)
    places |= {place.resolve(): None for place in elsewhere if place.is_dir()}
    for place, names in elsewhere.items():
        there = [any((p / (name + end)).exists() for p in places for end in ("", PART)) for name in names]
        finished = record is not None and any(record.files[name].checked_mtime_ns is not None for name in names)
        # An empty directory that held files is where a drive should be mounted.
        if (finished and not any(there)) or not (place.is_dir() or all(there)):
            raise UsageError(
                f"{directory / DOWNLOAD_FILE}: files were put in {place}, and they are not there. Mount that drive; if "
                "it is mounted elsewhere now, name that place with --extra-dir. If they are lost, remove "
                f"{DOWNLOAD_FILE}: the command then begins anew, and uses what it finds."
            )
    return list(places)


def _begin(places: list[Path], options: DownloadOptions, hub: Hub, tell: DownloadEvents) -> DownloadRecord:
    """Choose the commit and the files of a new download, when the drives have room for them."""
    repo = RELEASED_REPO if options.repo is None else options.repo
    released = repo == RELEASED_REPO
    if released and options.revision is None:
        _arrange(RELEASED_FILES, {}, places)
    revision = options.revision or RELEASED_REVISION
    listing = hub.list_files(repo, revision)
    shards = {name: file for name, file in sorted(listing.files.items()) if name.endswith(".safetensors")}
    if "config.json" not in listing.files or not shards:
        raise UsageError(
            f"{repo} at {revision} has no config.json or no *.safetensors files, so it is not a checkpoint. "
            "Check --repo and --revision."
        )
    tell.note(f"{repo} at {revision} is commit {listing.commit}")
    if released and {name: file.bytes for name, file in shards.items()} != RELEASED_FILES:
        tell.note("its shards have other names or sizes than those that this version of k3 was made for.")
    small = {name: listing.files[name] for name in SMALL_FILES if name in listing.files}
    return DownloadRecord(repo=repo, revision=revision, commit=listing.commit, files=small | shards)


def _arrange(
    sizes: Mapping[str, int], earlier: Mapping[str, Path], places: list[Path]
) -> tuple[dict[str, Path], dict[str, Present]]:
    present = {name: found for name, size in sizes.items() if (found := look(name, size, places)) is not None}
    return spread(sizes, present, earlier, places), present


class _Transfer:
    """The files of a record on their way to their places."""

    def __init__(self, directory: Path, places: list[Path], record: DownloadRecord, hub: Hub, tell: DownloadEvents):
        self._directory = directory
        self._hub = hub
        self._tell = tell
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wrong: list[str] = []
        home = directory.resolve()
        sizes = {name: file.bytes for name, file in record.files.items()}
        earlier = {name: Path(file.directory) if file.directory else home for name, file in record.files.items()}
        chosen, present = _arrange(sizes, earlier, places)
        for name, there in present.items():
            if chosen[name] != there.directory:
                self._move(there.directory / f"{name}{PART}", chosen[name])
        self._paths = {name: place / name for name, place in chosen.items()}
        self._fetched = {name: present[name].nbytes if name in present else 0 for name in sizes}
        self._missing = [name for name in sizes if name not in present or not present[name].finished]
        self.record = record.replacing(
            {
                name: msgspec.structs.replace(file, directory="" if chosen[name] == home else str(chosen[name]))
                for name, file in record.files.items()
            }
        )
        self.record.write(directory)

    def _move(self, part: Path, place: Path) -> None:
        """Take a part to the drive on which it can be completed."""
        self._tell.note(f"moving {part} to {place}, where it has room")
        try:
            shutil.move(part, place / part.name)
        except OSError as error:
            raise K3Error(
                f"{part} can't be moved to {place}: {error.strerror}. Check both drives. {_RESUME}"
            ) from error

    def run(self, connections: int) -> None:
        """Fetch all that is missing, over so many connections at a time."""
        if not self._missing:
            return
        before = sum(self._fetched.values())
        total = self.record.nbytes - before
        self._tell.note(
            f"fetching {len(self._missing)} of {len(self.record.files)} files, "
            f"{total:,} of {self.record.nbytes:,} bytes"
        )
        with ThreadPoolExecutor(min(connections, len(self._missing)), "download") as pool:
            waiting = {pool.submit(self._work, name) for name in self._missing}
            try:
                while waiting:
                    done, waiting = wait(waiting, _SECONDS_BETWEEN_REPORTS, FIRST_COMPLETED)
                    self._tell.fetched(sum(self._fetched.values()) - before, total)
                    for future in done:
                        future.result()
            except BaseException as error:
                self._stop.set()
                _cancel(waiting)
                if isinstance(error, KeyboardInterrupt):
                    raise InterruptedRunError(f"interrupted: the download is not complete. {_RESUME}") from None
                raise
        self._refuse_wrong(
            "It was fetched twice and removed. Run the same command again; if the file stays wrong, check "
            "proxies, memory and drive."
        )

    def check(self) -> None:
        """Compare every file that was there before with its checksum, unless it was found right and is unchanged."""
        unchecked = [name for name, file in self.record.files.items() if not self._is_checked(name, file)]
        total, done = sum(self.record.files[name].bytes for name in unchecked), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self._tell.checked(done, total)

        for name in unchecked:
            path, file = self._paths[name], self.record.files[name]
            found = self._compute(path, file, advance)
            if found is None or found == file.checksum:
                self._note_checked(name)
            else:
                self._wrong.append(_difference(path, file, found))
                self._note_checked(name, right=False)
        self._refuse_wrong("Remove it, then run the same command to fetch it again.")
        unknown = [name for name, file in self.record.files.items() if file.checksum is None]
        if unknown:
            self._tell.note(f"the hub lists no checksum of {', '.join(unknown)}: only the size was compared.")

    def _work(self, name: str) -> None:
        """Fetch one file in a thread. The first failure stops all threads; a second one is of no interest."""
        try:
            if not self._stop.is_set():
                self._fetch(name)
        except TransferStoppedError:
            pass
        except BaseException:
            self._stop.set()
            raise

    def _fetch(self, name: str) -> None:
        """Fetch one file and give it its name when it is right. What arrived wrong is fetched once more."""
        path, file = self._paths[name], self.record.files[name]
        part_path = path.with_name(name + PART)
        for _ in range(2):
            try:
                self._fill(name, part_path, file)
                found = self._compute(part_path, file, self._still_wanted)
                if part_path.stat().st_size == file.bytes and (found is None or found == file.checksum):
                    part_path.rename(path)
                    self._note_checked(name)
                    return
                part_path.unlink()
            except OSError as error:
                raise self._drive_failure(part_path, error) from error
            except K3Error as error:
                raise type(error)(f"{error} {_RESUME}") from error
            self._fetched[name] = 0
        with self._lock:
            self._wrong.append(_difference(path, file, found))

    def _fill(self, name: str, part_path: Path, file: RemoteFile) -> None:
        with Part(part_path, file.bytes, self._stop, lambda nbytes: self._fetched.update({name: nbytes})) as part:
            self._hub.fetch(self.record.repo, self.record.commit, name, part)
            part.sync()

    def _still_wanted(self, _: int) -> None:
        if self._stop.is_set():
            raise TransferStoppedError

    def _compute(self, path: Path, file: RemoteFile, advance: Callable[[int], None]) -> Checksum | None:
        try:
            return None if file.checksum is None else compute(path, file.checksum.kind, advance)
        except OSError as error:
            raise K3Error(f"{path} can't be read back: {error.strerror}. Check the drive. {_RESUME}") from error

    def _is_checked(self, name: str, file: RemoteFile) -> bool:
        return file.checked_mtime_ns == self._paths[name].stat().st_mtime_ns

    def _note_checked(self, name: str, *, right: bool = True) -> None:
        when = self._paths[name].stat().st_mtime_ns if right else None
        with self._lock:
            checked = msgspec.structs.replace(self.record.files[name], checked_mtime_ns=when)
            self.record = self.record.replacing({**self.record.files, name: checked})
            self.record.write(self._directory)

    def _refuse_wrong(self, advice: str) -> None:
        if self._wrong:
            count = "a file is" if len(self._wrong) == 1 else f"{len(self._wrong)} files are"
            raise CheckpointError(f"{count} not what the hub lists: {'; '.join(sorted(self._wrong))}. {advice}")

    def _drive_failure(self, path: Path, error: OSError) -> K3Error:
        there = f"{sum(self._fetched.values()):,} of {self.record.nbytes:,} bytes are there"
        if error.errno in _FULL:
            return K3Error(
                f"{path.parent}: the drive is full ({error.strerror}), and {there}. Free some space, or add a "
                f"directory on another drive with --extra-dir. {_RESUME}"
            )
        return K3Error(f"{path}: the drive failed: {error.strerror or error}; {there}. Check the drive. {_RESUME}")


def _cancel(futures: set[Future[None]]) -> None:
    for future in futures:
        future.cancel()


def _difference(path: Path, file: RemoteFile, found: Checksum | None) -> str:
    return f"{path}: expected {file.bytes} bytes with {file.checksum}, found {found or 'another size'}"
