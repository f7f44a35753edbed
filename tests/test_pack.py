"""`k3 pack`: every matrix comes back to the bit, and a run that was stopped anywhere continues to the same bytes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cli_helpers import Cli, environment
from conftest import TINY_A, TINY_C, copy_checkpoint, edit_tensor
from k3.api import model_path
from k3.checkpoint.packed.format import PACKED12, PAGE, READ_WHOLE, sampled_range
from k3.engine.packing import encoding as pack_encoding
from k3.engine.packing import journal as pack_journal
from k3.engine.packing import writer as packing
from k3.errors import InterruptedRunError, K3Error, MachineError, ReadError, UsageError
from k3.storage import packed
from k3.storage.packed import stored_matrices
from pack_helpers import bound, contents, decoded, flip_bit, make_sparse, opened, pack

CHECKPOINTS = {"tiny-a": TINY_A, "tiny-c": TINY_C, "demo": model_path("demo")}


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The packed trunk of the smaller tiny checkpoint."""
    path = tmp_path_factory.mktemp("complete") / "trunk"
    pack(TINY_C, path)
    return path


def source_bytes(entry):
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.nbytes)


def entries_in_order(layout):
    """The matrices in the order in which a step asks for them, written down once more."""
    for layer in layout.layers:
        for local, entry in layer.tensors.items():
            is_matrix = len(entry.shape) == 2 and not local.endswith("_res_proj.weight")
            if is_matrix:
                yield entry
    yield layout.top["lm_head.weight"]


# --- what is written ---


@pytest.mark.parametrize("raw", [False, True], ids=["packed", "raw"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_matrix_comes_back_to_the_bit_in_execution_order(tmp_path, name, raw):
    model = CHECKPOINTS[name]
    pack(model, tmp_path / "trunk", raw=raw)
    trunk = opened(model, tmp_path / "trunk")
    entries = list(entries_in_order(bound(model)))
    assert [matrix.name for matrix in trunk.matrices] == [entry.name for entry in entries]
    for matrix, entry in zip(trunk.matrices, entries, strict=True):
        assert decoded(trunk, matrix) == source_bytes(entry)
        assert (matrix.encoding == PACKED12) == (not raw and entry.dtype == "BF16" and entry.shape[1] % 32 == 0)


def test_packing_makes_it_smaller(complete):
    """0.755 of bf16, as the 12 bits and the listed blocks come to; less of what can't be packed."""
    manifest = opened(TINY_C, complete).manifest
    packed = [tensor for tensor in manifest.tensors if tensor.encoding == PACKED12]
    assert sum(t.nbytes for t in packed) < 0.80 * sum(t.source.nbytes for t in packed)
    assert manifest.stored_bytes == sum(t.nbytes for t in manifest.tensors)
    assert manifest.source_bytes == sum(t.source.nbytes for t in manifest.tensors)


def test_panels_lie_on_pages_and_have_their_checksums(complete):
    trunk = opened(TINY_C, complete)
    data = trunk.path.read_bytes()
    assert len(data) % PAGE == 0
    for matrix, entry in zip(trunk.matrices, entries_in_order(bound(TINY_C)), strict=True):
        source = source_bytes(entry)
        for panel in matrix.panels:
            assert panel.offset % PAGE == 0
            assert zlib.crc32(data[panel.offset : panel.offset + panel.nbytes]) == panel.crc32
            row_bytes = len(source) // matrix.rows
            rows = source[panel.start * row_bytes : (panel.start + panel.rows) * row_bytes]
            assert zlib.crc32(rows) == panel.source_crc32
        start, length = sampled_range(len(source))
        assert matrix.source.sample == zlib.crc32(source[start : start + length])


@pytest.mark.parametrize("raw", [False, True], ids=["packed", "raw"])
def test_large_matrices_are_cut_into_panels_and_small_panels_decode(tmp_path, monkeypatch, raw):
    monkeypatch.setattr(pack_encoding, "PANEL_BYTES", 1 << 12)
    pack(TINY_C, tmp_path / "trunk", raw=raw)
    trunk = opened(TINY_C, tmp_path / "trunk")
    assert max(len(matrix.panels) for matrix in trunk.matrices) > 3
    for matrix, entry in zip(trunk.matrices, entries_in_order(bound(TINY_C)), strict=True):
        assert decoded(trunk, matrix) == source_bytes(entry)
        assert len(matrix.panels) == 1 or not matrix.name.endswith(READ_WHOLE)


@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_do_not_depend_on_threads(tmp_path, monkeypatch, complete, threads):
    monkeypatch.setattr(pack_encoding, "_AHEAD", 1)
    pack(TINY_C, tmp_path / "trunk", threads=threads)
    assert contents(tmp_path / "trunk") == contents(complete)


def test_a_matrix_that_packing_would_not_shrink_stays_as_it_is(tmp_path, checkpoint):
    layout = bound(checkpoint)
    entry = next(e for e in entries_in_order(layout) if e.dtype == "BF16" and e.shape[1] % 32 == 0)
    noise = np.random.default_rng(1).integers(0, 1 << 16, entry.nbytes // 2)
    edit_tensor(checkpoint, entry.name, "<u2", lambda values: values.__setitem__(slice(None), noise))
    pack(checkpoint, tmp_path / "trunk")
    trunk = opened(checkpoint, tmp_path / "trunk")
    [matrix] = [m for m in trunk.matrices if m.name == entry.name]
    assert (matrix.encoding, matrix.table) == ("BF16", "")
    assert decoded(trunk, matrix) == noise.astype("<u2").tobytes()


def test_a_matrix_at_an_odd_offset(tmp_path, checkpoint):
    """A header's length is any number, so that weights may begin on an odd byte."""
    for shard in checkpoint.glob("*.safetensors"):
        raw = shard.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        shard.write_bytes((length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :])
    entries = list(entries_in_order(bound(checkpoint)))
    assert any(entry.offset % 2 for entry in entries)
    pack(checkpoint, tmp_path / "trunk")
    trunk = opened(checkpoint, tmp_path / "trunk")
    for matrix, entry in zip(trunk.matrices, entries, strict=True):
        assert decoded(trunk, matrix) == source_bytes(entry)


# --- what the stream gets ---


def test_the_walk_names_every_panel(complete):
    trunk = opened(TINY_C, complete)
    walk = stored_matrices(trunk)
    assert [matrix.kind.value for matrix in walk] == ["trunk"] * (len(walk) - 1) + ["head"]
    for stored, matrix in zip(walk, trunk.matrices, strict=True):
        assert stored.name == matrix.name
        assert [(b.start, b.rows, b.path, b.offset, b.nbytes) for b in stored.blocks] == [
            (p.start, p.rows, complete / "trunk.bin", p.offset, p.nbytes) for p in matrix.panels
        ]
        assert not (stored.joinable and matrix.encoding == PACKED12)


def test_joinable_panels_lie_back_to_back(tmp_path, monkeypatch):
    monkeypatch.setattr(pack_encoding, "PANEL_BYTES", 1 << 12)
    pack(TINY_C, tmp_path / "trunk", raw=True)
    joinable = [m for m in stored_matrices(opened(TINY_C, tmp_path / "trunk")) if m.joinable and len(m.blocks) > 1]
    assert joinable
    for matrix in joinable:
        ends = [block.offset + block.nbytes for block in matrix.blocks]
        assert [block.offset for block in matrix.blocks[1:]] == ends[:-1]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_run_of_fewer_layers_uses_the_same_trunk(complete, layers):
    trunk = opened(TINY_C, complete, layers)
    assert [m.name for m in trunk.matrices] == [e.name for e in entries_in_order(bound(TINY_C, layers))]


def test_the_first_layers_of_a_partial_download(tmp_path, checkpoint):
    layout = bound(checkpoint, 2)
    needed = {entry.path for tensors in (layout.top, *(n.tensors for n in layout.layers)) for entry in tensors.values()}
    for shard in set(checkpoint.glob("*.safetensors")) - needed:
        shard.rename(tmp_path / shard.name)
    pack(checkpoint, tmp_path / "two", layers=2)
    assert len(opened(checkpoint, tmp_path / "two", 1).matrices) > 3
    pack(checkpoint, tmp_path / "all", extra_dirs=(tmp_path,))
    assert len(opened(TINY_C, tmp_path / "all").matrices) == len(list(entries_in_order(bound(TINY_C))))


# --- stopped and continued ---

DRIVER = """
import os, signal, sys, threading
from pathlib import Path
from k3.checkpoint.synthetic.shards import write_at
from k3.engine.packing import journal as pack_journal, writer as packing

model, trunk, deadline = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
lock, count = threading.Lock(), 0

def die_in_time(half=lambda: None):
    global count
    with lock:
        count += 1
        if count == deadline:
            half()
            os.kill(os.getpid(), signal.SIGKILL)

def torn_write(descriptor, data, offset):
    die_in_time(lambda: write_at(descriptor, memoryview(data)[: len(data) // 2], offset))
    write_at(descriptor, data, offset)

def before(function):
    def call(*arguments):
        die_in_time()
        return function(*arguments)
    return call

packing._COMMIT_BYTES = 1 << 14
packing.write_at = pack_journal.write_at = torn_write
os.fsync, os.fdatasync, os.ftruncate = before(os.fsync), before(os.fdatasync), before(os.ftruncate)
Path.rename, Path.unlink = before(Path.rename), before(Path.unlink)
packing.pack_trunk(model, trunk, packing.PackOptions(threads=1), packing.PackEvents())
print(count)
"""


def drive(trunk, deadline):
    command = [sys.executable, "-c", DRIVER, str(TINY_C), str(trunk), str(deadline)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)


@pytest.fixture(scope="module")
def steps_of_a_run(tmp_path_factory):
    """Writes, flushes and renames of an undisturbed run."""
    done = drive(tmp_path_factory.mktemp("whole") / "trunk", 0)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("point", [*range(10), "last but two", "last but one", "last"])
def test_killed_anywhere_it_continues_to_the_same_bytes(tmp_path, complete, steps_of_a_run, point):
    ends = {"last but two": steps_of_a_run - 2, "last but one": steps_of_a_run - 1, "last": steps_of_a_run}
    deadline = ends[point] if point in ends else 1 + point * steps_of_a_run // 10
    killed = drive(tmp_path / "trunk", deadline)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    plans = []
    pack(TINY_C, tmp_path / "trunk", plans)
    assert contents(tmp_path / "trunk") == contents(complete)
    assert [path.name for path in tmp_path.iterdir()] == ["trunk"]
    if point in range(3, 10):
        assert 0 < plans[0].tensors_done < plans[0].tensors


def stop_after(monkeypatch, writes, error):
    """Let a number of panels be written, then raise `error` once, and from then on where it is of the disk."""
    left = [writes]
    original = packing.write_at

    def write(descriptor, data, offset):
        left[0] -= 1
        if left[0] == 0 or (left[0] < 0 and isinstance(error, OSError)):
            raise error
        original(descriptor, data, offset)

    monkeypatch.setattr(packing, "_COMMIT_BYTES", 1)
    monkeypatch.setattr(packing, "write_at", write)


def test_a_full_disk_is_a_failure_that_can_be_continued(tmp_path, monkeypatch, complete, cli):
    with monkeypatch.context() as patch:
        stop_after(patch, 9, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        complaint = cli.refused("pack", TINY_C, tmp_path / "trunk", code=1)
    assert "No space left" in complaint
    assert "the same command continues" in complaint
    plans = []
    pack(TINY_C, tmp_path / "trunk", plans)
    assert plans[0].tensors_done > 0
    assert contents(tmp_path / "trunk") == contents(complete)


def test_a_disk_that_is_full_when_the_bytes_are_flushed(tmp_path, monkeypatch, complete):
    calls = [0]

    def flush(_):
        calls[0] += 1
        if calls[0] >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_COMMIT_BYTES", 1)
        patch.setattr(os, "fdatasync", flush)
        with pytest.raises(K3Error, match="No space left") as caught:
            pack(TINY_C, tmp_path / "trunk")
    assert caught.value.exit_code == 1
    plans = []
    pack(TINY_C, tmp_path / "trunk", plans)
    assert 0 < plans[0].tensors_done < plans[0].tensors
    assert contents(tmp_path / "trunk") == contents(complete)


def test_an_interrupt_keeps_what_is_done(tmp_path, monkeypatch, complete):
    with monkeypatch.context() as patch:
        stop_after(patch, 9, KeyboardInterrupt())
        patch.setattr(packing, "_COMMIT_BYTES", 1 << 40)
        with pytest.raises(InterruptedRunError, match="continues"):
            pack(TINY_C, tmp_path / "trunk")
    plans = []
    pack(TINY_C, tmp_path / "trunk", plans)
    assert plans[0].tensors_done == 8
    assert contents(tmp_path / "trunk") == contents(complete)


def test_a_source_that_can_not_be_read(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = threading.active_count()
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ReadError, match="failed twice"):
        pack(TINY_C, tmp_path / "trunk")
    assert threading.active_count() <= before


def test_a_damaged_journal_is_read_up_to_the_damage(tmp_path, monkeypatch, complete):
    with monkeypatch.context() as patch:
        stop_after(patch, 20, KeyboardInterrupt())
        with pytest.raises(InterruptedRunError):
            pack(TINY_C, tmp_path / "trunk")
    journal = tmp_path / "trunk.partial" / pack_journal.JOURNAL_FILE
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([*lines[:6], b'{"name": 3}', *lines[7:]]))
    plans = []
    pack(TINY_C, tmp_path / "trunk", plans)
    assert plans[0].tensors_done == 5
    assert contents(tmp_path / "trunk") == contents(complete)


@pytest.mark.parametrize("missing", [1, 2, 200])
def test_a_journal_whose_first_line_was_cut_off(tmp_path, monkeypatch, complete, missing):
    with monkeypatch.context() as patch:
        stop_after(patch, 1, KeyboardInterrupt())
        with pytest.raises(InterruptedRunError):
            pack(TINY_C, tmp_path / "trunk")
    journal = tmp_path / "trunk.partial" / pack_journal.JOURNAL_FILE
    os.truncate(journal, journal.stat().st_size - missing)
    with monkeypatch.context() as patch:
        stop_after(patch, 20, KeyboardInterrupt())
        with pytest.raises(InterruptedRunError):
            pack(TINY_C, tmp_path / "trunk")
    plans = []
    pack(TINY_C, tmp_path / "trunk", plans)
    assert plans[0].tensors_done > 5
    assert contents(tmp_path / "trunk") == contents(complete)


def test_data_shorter_than_the_journal_says(tmp_path, monkeypatch, complete):
    with monkeypatch.context() as patch:
        stop_after(patch, 20, KeyboardInterrupt())
        with pytest.raises(InterruptedRunError):
            pack(TINY_C, tmp_path / "trunk")
    os.truncate(tmp_path / "trunk.partial" / "trunk.bin", 3 * PAGE)
    pack(TINY_C, tmp_path / "trunk")
    assert contents(tmp_path / "trunk") == contents(complete)


# --- holes ---


def holes(path):
    """Ranges that take no space, in pages."""
    with path.open("rb") as file:
        size, position, found = os.fstat(file.fileno()).st_size, 0, []
        while position < size:
            begin = os.lseek(file.fileno(), position, os.SEEK_HOLE)
            if begin >= size:
                break
            try:
                position = os.lseek(file.fileno(), begin, os.SEEK_DATA)
            except OSError:
                position = size
            found += range(begin // PAGE, position // PAGE)
        return found


@pytest.fixture
def with_holes(tmp_path):
    (tmp_path / "probe").write_bytes(b"")
    os.truncate(tmp_path / "probe", 4 * PAGE)
    if holes(tmp_path / "probe") != [0, 1, 2, 3]:
        pytest.skip("the file system has no holes")


@pytest.mark.usefixtures("with_holes")
def test_pages_of_zeros_are_left_out(tmp_path):
    data = np.zeros(6 * PAGE + 100, np.uint8)
    data[[0, 2 * PAGE, 3 * PAGE - 1, 6 * PAGE + 99]] = 1
    path = tmp_path / "file"
    with path.open("wb") as file:
        packing.write_sparse(file.fileno(), data, PAGE)
    assert path.read_bytes() == bytes(PAGE) + data.tobytes()
    assert holes(path) == [0, 2, 4, 5, 6]


@pytest.mark.usefixtures("with_holes")
@pytest.mark.parametrize("raw", [False, True], ids=["packed", "raw"])
def test_a_sparse_checkpoint_makes_a_sparse_trunk(tmp_path, checkpoint, monkeypatch, raw):
    make_sparse(checkpoint)
    for shard in checkpoint.glob("*.safetensors"):
        data = shard.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        shard.write_bytes(data[:begin])
        os.truncate(shard, len(data))
    plans = []
    pack(checkpoint, tmp_path / "trunk", plans, raw=raw)
    trunk = opened(checkpoint, tmp_path / "trunk")
    assert plans[0].needed_bytes < plans[0].source_bytes / 10
    assert trunk.path.stat().st_blocks * 512 < trunk.manifest.file_bytes / 10
    for matrix in trunk.matrices:
        assert not any(decoded(trunk, matrix))
    with monkeypatch.context() as patch:
        stop_after(patch, 3, KeyboardInterrupt())
        patch.setattr(packing, "write_sparse", lambda *arguments: packing.write_at(*arguments))
        with pytest.raises(InterruptedRunError):
            pack(checkpoint, tmp_path / "stopped", raw=raw)
    pack(checkpoint, tmp_path / "stopped", raw=raw)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "trunk")


# --- places and space ---


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(MachineError, match=r"needs about 0\.\d+ GB more, and 0\.000 GB are free"):
        pack(TINY_C, tmp_path / "trunk")
    assert (tmp_path / "trunk.partial" / "trunk.bin").stat().st_size == 0
    monkeypatch.undo()
    pack(TINY_C, tmp_path / "trunk", raw=True)
    assert opened(TINY_C, tmp_path / "trunk").manifest.raw


def test_a_complete_trunk_is_left_alone(tmp_path, complete, cli):
    shutil.copytree(complete, tmp_path / "trunk")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "trunk").iterdir()}
    assert pack(TINY_C, tmp_path / "trunk").was_there
    assert "complete already" in cli.ok("pack", TINY_C, tmp_path / "trunk").err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "trunk").iterdir()} == before


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (TINY_A, {}, "another checkpoint"),
        (TINY_C, {"layers": 2}, "expected 2 layers packed, found 9 layers packed"),
        (TINY_C, {"raw": True}, "expected 9 layers as they are"),
    ],
)
def test_a_complete_trunk_of_something_else_is_not_overwritten(tmp_path, complete, model, options, said):
    shutil.copytree(complete, tmp_path / "trunk")
    with pytest.raises(UsageError, match=said):
        pack(model, tmp_path / "trunk", **options)
    assert contents(tmp_path / "trunk") == contents(complete)


def test_an_unfinished_trunk_of_something_else_is_not_continued(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 5, KeyboardInterrupt())
        with pytest.raises(InterruptedRunError):
            pack(TINY_C, tmp_path / "trunk")
    before = contents(tmp_path / "trunk.partial")
    for model, options in ((TINY_A, {}), (TINY_C, {"raw": True}), (TINY_C, {"layers": 2})):
        with pytest.raises(UsageError, match="unfinished trunk of another checkpoint, or of other options"):
            pack(model, tmp_path / "trunk", **options)
    assert contents(tmp_path / "trunk.partial") == before


def test_two_processes_do_not_write_the_same_trunk(tmp_path):
    def again(_):
        with pytest.raises(UsageError, match="another `k3 pack` is writing"):
            pack(TINY_C, tmp_path / "trunk")

    packing.pack_trunk(TINY_C, tmp_path / "trunk", packing.PackOptions(), packing.PackEvents(on_plan=again))
    assert opened(TINY_C, tmp_path / "trunk")


@pytest.mark.parametrize("kind", ["a file", "a folder with other things"])
def test_other_things_are_not_overwritten(tmp_path, cli, kind):
    place = tmp_path / "trunk"
    if kind == "a file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "notes.txt").write_text("mine")
    assert str(place) in cli.refused("pack", TINY_C, place)
    assert (place if kind == "a file" else place / "notes.txt").read_text() == "mine"


def test_an_empty_folder_takes_the_trunk(tmp_path):
    (tmp_path / "trunk").mkdir()
    pack(TINY_C, tmp_path / "trunk")
    assert opened(TINY_C, tmp_path / "trunk")


# --- the command ---


def test_the_command_says_disk_result_and_place(tmp_path, cli):
    ran = cli.ok("pack", "demo", tmp_path / "trunk", "--layers", "2", "--threads", "1")
    assert ran.out == f"{tmp_path / 'trunk'}\n"
    assert "needed for" in ran.err
    assert "free" in ran.err
    assert opened(model_path("demo"), tmp_path / "trunk", 2).manifest.layers == 2
    assert cli.ok("pack", "demo", tmp_path / "quiet", "--quiet", "--raw").err == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pack", "absent", "trunk"], "absent"),
        (["pack", TINY_C, "trunk", "--layers", "99"], "99"),
        (["pack", TINY_C, "trunk", "--extra-dir", "absent"], "absent"),
        (["pack", TINY_C, "trunk", "--config", "absent"], "absent"),
        (["pack", TINY_C, "trunk", "--threads", "0"], "--threads"),
        (["pack", TINY_C, ".."], "TRUNK"),
        (["pack", TINY_C, "/proc/trunk"], "/proc/trunk"),
        (["pack", TINY_C], "TRUNK"),
        (["pack", TINY_C, "absent", "--check"], "absent"),
        (["pack", TINY_C, "trunk", "--check", "--raw"], "--raw"),
    ],
)
def test_what_can_be_known_before_the_first_byte(tmp_path, monkeypatch, cli, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert said in cli.refused(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_the_check_compares_every_byte_of_both(tmp_path, checkpoint, cli):
    pack(checkpoint, tmp_path / "trunk")
    said = cli.ok("pack", checkpoint, tmp_path / "trunk", "--check").out
    assert said == f"{tmp_path / 'trunk'}: every byte is as it was packed\n"
    data = bytearray((tmp_path / "trunk" / "trunk.bin").read_bytes())
    matrix = opened(checkpoint, tmp_path / "trunk").matrices[3]
    data[matrix.panels[-1].offset + matrix.panels[-1].nbytes - 1] ^= 1
    (tmp_path / "trunk" / "trunk.bin").write_bytes(data)
    assert f"{matrix.name} in trunk.bin" in cli.refused("pack", checkpoint, tmp_path / "trunk", "--check")


def test_the_check_finds_a_changed_weight_that_no_sample_shows(tmp_path, checkpoint, cli, monkeypatch):
    monkeypatch.setattr(packed, "sampled_range", lambda nbytes: (nbytes // 2, min(8, nbytes // 2)))
    pack(checkpoint, tmp_path / "trunk")
    entry = next(entries_in_order(bound(checkpoint)))
    flip_bit(entry, 0)
    assert opened(checkpoint, tmp_path / "trunk")
    said = cli.refused("pack", checkpoint, tmp_path / "trunk", "--check")
    assert f"rows from 0 on of {entry.name} in {entry.path.name}" in said


def test_progress_reaches_the_total(tmp_path):
    told = []
    events = packing.PackEvents(on_bytes=lambda *counts: told.append(counts))
    packed = packing.pack_trunk(TINY_C, tmp_path / "trunk", packing.PackOptions(), events)
    assert told[-1] == (packed.manifest.source_bytes, packed.manifest.source_bytes)
    assert told == sorted(told)


def test_a_copy_of_the_checkpoint_may_use_the_trunk(tmp_path, complete):
    copy = copy_checkpoint(TINY_C, tmp_path / "model")
    assert opened(copy, complete)
    moved = Path(shutil.copytree(complete, tmp_path / "moved"))
    assert opened(copy, moved)
