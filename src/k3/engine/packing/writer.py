"""Writing a packed trunk: `k3 pack`.

Everything is written in `<trunk>.partial`, which is renamed when it is complete. A journal there says which tensors
are durable; a run that was stopped in whatever way continues behind the last of them. The bytes depend on nothing but
the checkpoint and the options.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from k3.checkpoint.index import TensorEntry, TensorIndex
from k3.checkpoint.layout import Layout, bind, wanted_tensors
from k3.checkpoint.packed.format import (
    DATA_FILE,
    FORMAT,
    MANIFEST_FILE,
    PAGE,
    PARTIAL_SUFFIX,
    VERSION,
    Manifest,
    PackedTensor,
    Panel,
    Source,
    can_pack,
    read_manifest,
)
from k3.checkpoint.packed.identity import Identity, trunk_matrices
from k3.checkpoint.synthetic.shards import write_at
from k3.engine.loading import read_config
from k3.engine.packing.encoding import Encoded, Form, PanelEncoder, data_bytes
from k3.engine.packing.journal import JOURNAL_FILE, Journal, JournalHead
from k3.errors import CheckpointError, InterruptedRunError, K3Error, MachineError, UsageError
from k3.kernels.select import choose_threads
from k3.storage.packed import open_trunk
from k3.storage.reader import RawBytes

_COMMIT_BYTES = 256 << 20
"""How much is written between two commits of the journal."""

_PACKED_SHARE = 0.76
"""What packing leaves of bell-shaped weights; 0.75 and the few blocks that stay raw."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """What to pack: the first `layers` layers, without encoding if `raw`. `config` stands for the model's own file."""

    raw: bool = False
    threads: int | None = None
    layers: int | None = None
    extra_dirs: tuple[Path, ...] = ()
    config: Path | None = None


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What is ahead: tensors and their bytes in the checkpoint, those already packed, and bytes of disk."""

    tensors: int
    source_bytes: int
    tensors_done: int
    source_bytes_done: int
    needed_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class PackEvents:
    """What a packer tells: the plan before it writes, then bytes of the checkpoint packed, of those still to pack."""

    on_plan: Callable[[PackPlan], None] = field(default=lambda *_: None)
    on_bytes: Callable[[int, int], None] = field(default=lambda *_: None)


@dataclass(frozen=True, slots=True)
class Packed:
    """A complete packed trunk, and whether it was there before."""

    manifest: Manifest
    was_there: bool


def pack_trunk(model_dir: Path, trunk: Path, options: PackOptions, events: PackEvents) -> Packed:
    """Write the packed trunk of a checkpoint into the directory `trunk`, or continue.

    Does nothing where a complete one of this checkpoint and these options is there already.

    Raises:
        UsageError: the directory, or its `.partial`, holds something else.
        ConfigError, CheckpointError: the checkpoint can't be used.
        MachineError: the disk lacks the space.
        K3Error: reading or writing failed; the same call continues.
        InterruptedRunError: Ctrl-C; the same call continues.
    """
    config = read_config(model_dir, options.config)
    wanted = wanted_tensors(config, options.layers)
    layout = bind(TensorIndex.open(model_dir, wanted, extra_dirs=options.extra_dirs), config, options.layers)
    head = JournalHead(len(layout.layers), options.raw, Identity.of(model_dir, layout, options.config))
    threads = choose_threads(options.threads)
    if _occupied(trunk):
        return Packed(_existing(trunk, model_dir, layout, head, options), was_there=True)
    partial = trunk.with_name(trunk.name + PARTIAL_SUFFIX)
    with _explained(partial), _data_file(partial) as data:
        entries = list(trunk_matrices(layout))
        with Journal(partial, data, head, entries) as journal:
            plan = _plan(partial, entries, len(journal.tensors), raw=options.raw)
            _check_space(partial, plan)
            events.on_plan(plan)
            _Writer(data, journal, events).write(entries, raw=options.raw, threads=threads)
            return Packed(_finish(partial, trunk, data, journal, head), was_there=False)


def _occupied(trunk: Path) -> bool:
    if not trunk.exists():
        return False
    if not trunk.is_dir():
        raise UsageError(f"{trunk}: expected a directory to be made, found a file. Name another place for the trunk.")
    return any(trunk.iterdir())


def _existing(trunk: Path, model_dir: Path, layout: Layout, head: JournalHead, options: PackOptions) -> Manifest:
    """The manifest of what is there, if it is what was asked for."""
    try:
        manifest = read_manifest(trunk)
        open_trunk(trunk, model_dir, layout, options.config)
    except CheckpointError as error:
        raise UsageError(
            f"{trunk} can't be written: something else is there. {error} Nothing is overwritten: name another "
            "directory, or remove this one."
        ) from error
    (trunk / JOURNAL_FILE).unlink(missing_ok=True)  # A run may have been killed at its very end.
    found, asked = (manifest.layers, manifest.raw), (head.layers, head.raw)
    if found != asked:
        raise UsageError(
            f"{trunk} has a packed trunk of this checkpoint with other options: expected {_options(*asked)}, found "
            f"{_options(*found)}. Name another directory, or remove this one."
        )
    return manifest


def _options(layers: int, raw: bool) -> str:
    return f"{layers} layers {'as they are (--raw)' if raw else 'packed'}"


@contextmanager
def _data_file(partial: Path) -> Iterator[int]:
    try:
        partial.mkdir(parents=True, exist_ok=True)
        data = os.open(partial / DATA_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageError(f"{partial} can't be made: {error.strerror}. Name another place for the trunk.") from error
    try:
        yield data
    finally:
        os.close(data)


@contextmanager
def _explained(partial: Path) -> Iterator[None]:
    """Errors of the disk and interrupts in the words that a user gets."""
    again = "What is done is kept: the same command continues."
    try:
        yield
    except OSError as error:
        raise K3Error(
            f"{error.filename or partial}: packing stopped: {error.strerror}. Free some space, or check the drive. "
            f"{again}"
        ) from error
    except KeyboardInterrupt:
        raise InterruptedRunError(f"{partial}: packing was interrupted. {again}") from None


def _plan(partial: Path, entries: Sequence[TensorEntry], done: int, *, raw: bool) -> PackPlan:
    """What is left to do. Holes of a synthetic checkpoint take no space."""
    needed = 0.0
    for entry in entries[done:]:
        share = 1.0 if raw or not can_pack(entry) else _PACKED_SHARE
        needed += share * data_bytes(entry.path, entry.offset, entry.nbytes)
    return PackPlan(
        len(entries),
        sum(entry.nbytes for entry in entries),
        done,
        sum(entry.nbytes for entry in entries[:done]),
        int(needed),
        shutil.disk_usage(partial).free,
    )


def _check_space(partial: Path, plan: PackPlan) -> None:
    if plan.free_bytes < plan.needed_bytes:
        raise MachineError(
            f"{partial}: the packed trunk needs about {plan.needed_bytes / 1e9:.3f} GB more, and "
            f"{plan.free_bytes / 1e9:.3f} GB are free. Free some space, or name another place."
        )


class _Writer:
    """Appends panels to the data file behind the durable ones."""

    def __init__(self, data: int, journal: Journal, events: PackEvents) -> None:
        self._data = data
        self._journal = journal
        self._events = events
        self._end = _page_up(journal.end)
        self._panels: list[Panel] = []

    def write(self, entries: Sequence[TensorEntry], *, raw: bool, threads: int) -> None:
        """Write the panels of all tensors that are not durable yet; those that are done are kept in any case."""
        os.ftruncate(self._data, self._journal.end)  # What a stopped run left behind would show where a hole belongs.
        left = entries[len(self._journal.tensors) :]
        try:
            with PanelEncoder(left, raw=raw, threads=threads) as encoder:
                self._append_all(encoder, sum(entry.nbytes for entry in left))
        except BaseException:
            with contextlib.suppress(OSError):
                self._journal.commit(self._end)
                self._journal.settle()
            raise
        self._journal.commit(self._end)
        self._journal.settle()

    def _append_all(self, encoder: PanelEncoder, total: int) -> None:
        done, uncommitted = 0, 0
        for panel in encoder.panels():
            self._append(panel)
            done += panel.rows * (panel.form.entry.nbytes // panel.form.entry.shape[0])
            uncommitted += panel.data.size
            if panel.last and uncommitted >= _COMMIT_BYTES:
                self._journal.commit(self._end)
                uncommitted = 0
            self._events.on_bytes(done, total)

    def _append(self, panel: Encoded) -> None:
        write_sparse(self._data, panel.data, self._end)
        self._panels.append(Panel(self._end, panel.data.size, panel.start, panel.rows, panel.crc32, panel.source_crc32))
        self._end = _page_up(self._end + panel.data.size)
        if panel.last:
            self._journal.add(_record(panel.form, tuple(self._panels)))
            self._panels.clear()


def write_sparse(descriptor: int, data: RawBytes, offset: int) -> None:
    """Write uint8 [n] at `offset`, a multiple of the page, but leave out pages that are all zeros."""
    pages = data.size // PAGE
    used = data[: pages * PAGE].reshape(pages, PAGE).view(np.uint64).any(axis=1)
    used = np.append(used, data[pages * PAGE :].any())
    edges = np.flatnonzero(np.diff(used, prepend=False, append=False))
    for first, last in edges.reshape(-1, 2).tolist():
        write_at(descriptor, data[first * PAGE : last * PAGE].data, offset + first * PAGE)


def _record(form: Form, panels: tuple[Panel, ...]) -> PackedTensor:
    entry = form.entry
    source = Source(
        entry.path.name, entry.offset, entry.nbytes, entry.dtype, (entry.shape[0], entry.shape[1]), form.sample
    )
    return PackedTensor(entry.name, form.encoding, form.table.tobytes().hex(), source, panels)


def _finish(partial: Path, trunk: Path, data: int, journal: Journal, head: JournalHead) -> Manifest:
    """Write the manifest and give the directory its name."""
    file_bytes = _page_up(journal.end)
    os.ftruncate(data, file_bytes)
    os.fsync(data)
    tensors = tuple(journal.tensors)
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        complete=True,
        layers=head.layers,
        raw=head.raw,
        identity=head.identity,
        source_bytes=sum(tensor.source.nbytes for tensor in tensors),
        stored_bytes=sum(tensor.nbytes for tensor in tensors),
        file_bytes=file_bytes,
        tensors=tensors,
    )
    _write_durably(partial / MANIFEST_FILE, msgspec.json.encode(manifest))
    partial.rename(trunk)
    _sync_directory(trunk.parent)
    (trunk / JOURNAL_FILE).unlink()
    return manifest


def _write_durably(path: Path, content: bytes) -> None:
    beside = path.with_name(f"{path.name}.tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _page_up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
