"""`k3 bench disk`: reads that a drive must answer, each region once a round, and warnings where it didn't."""

from __future__ import annotations

import json
import os
import threading

import pytest

from cli_helpers import Cli
from k3.errors import UsageError
from k3.storage import disk_bench
from k3.storage.disk_bench import (
    EXPERT_BYTES,
    SIZES,
    has_holes,
    largest_on_each_drive,
    largest_shards,
    measure_disk,
    measure_drive,
    takes_direct_reads,
)
from k3.storage.reader import DEFAULT_THREADS, PAGE, Reader

MEBI = 1 << 20


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """40 MiB and a bit, all of them written."""
    path = tmp_path_factory.mktemp("disk") / "data"
    path.write_bytes(os.urandom(MEBI) * 40 + b"odd end")
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    return path


class Watch:
    """Notes what a reader is asked for: a list for each round, and the most reads under way at a time."""

    def __init__(self, monkeypatch):
        self.rounds = []
        self.deepest = {}
        self._lock = threading.Lock()
        submit, one_round = Reader.submit, disk_bench._round
        watch = self

        def noted_submit(reader, path, offset, nbytes, buffer, kind, *, demand):
            read = submit(reader, path, offset, nbytes, buffer, kind, demand=demand)
            with watch._lock:
                watch.rounds[-1].append((path, offset, nbytes, buffer.ctypes.data))
                watch.deepest[reader._most_threads] = max(watch.deepest.get(reader._most_threads, 0), reader._in_flight)
            return read

        def noted_round(*arguments):
            watch.rounds.append([])
            return one_round(*arguments)

        monkeypatch.setattr(Reader, "submit", noted_submit)
        monkeypatch.setattr(disk_bench, "_round", noted_round)


def test_no_region_is_read_twice_in_a_round(monkeypatch, file):
    watch = Watch(monkeypatch)
    report = measure_disk([file], sizes=(MEBI, 64 << 10), depths=(1, 4), seconds=0.03, rounds=3)
    assert len(watch.rounds) == 3 * 4
    for requests in watch.rounds:
        places = [(path, offset) for path, offset, _, _ in requests]
        assert len(set(places)) == len(places) > 0
        assert len({nbytes for _, _, nbytes, _ in requests}) == 1
        assert all(offset % PAGE == 0 and offset + nbytes <= 40 * MEBI for _, offset, nbytes, _ in requests)
    assert report.bytes_read == sum(nbytes for requests in watch.rounds for _, _, nbytes, _ in requests)
    assert [(cell.nbytes, cell.depth) for cell in report.cells] == [(MEBI, 1), (MEBI, 4), (65536, 1), (65536, 4)]
    assert all(cell.rate > 0 for cell in report.cells)


def test_the_queue_is_as_deep_as_said(monkeypatch, file):
    watch = Watch(monkeypatch)
    measure_disk([file], sizes=(MEBI,), depths=(1, 2, 8), seconds=0.02, rounds=1)
    assert set(watch.deepest) == {1, 2, 8}  # A thread for each read under way.
    assert all(deepest <= threads for threads, deepest in watch.deepest.items())
    assert watch.deepest[1] == 1
    for requests, depth in zip(watch.rounds, (1, 2, 8), strict=True):
        assert len({address for *_, address in requests}) == depth


def test_rounds_go_on_where_the_last_one_ended(monkeypatch, file):
    watch = Watch(monkeypatch)
    measure_disk([file], sizes=(4 * MEBI,), depths=(1, 2), seconds=1e-6, rounds=1)
    places = [offset for requests in watch.rounds for _, offset, _, _ in requests]
    assert len(places) == len(set(places)) == 3  # 10 regions, of which the rounds take one and two.


def test_what_does_not_fit_has_no_figure(file):
    report = measure_disk([file], sizes=(EXPERT_BYTES, MEBI), depths=(1, 2, 64), seconds=0.005, rounds=1)
    measured = {(cell.nbytes, cell.depth) for cell in report.cells if cell.rate is not None}
    assert measured == {(EXPERT_BYTES, 1), (MEBI, 1), (MEBI, 2)}
    assert report.best.rate == max(cell.rate for cell in report.cells if cell.rate)
    report = measure_disk([file], sizes=(2 * MEBI,), depths=(1, 2), seconds=0.005, rounds=1, room=3 * MEBI)
    assert [cell.rate is None for cell in report.cells] == [False, True]


def test_a_run_reads_experts_and_blocks(monkeypatch, tmp_path):
    path = tmp_path / "large"
    path.write_bytes(os.urandom(MEBI) * 160)
    monkeypatch.setattr(disk_bench, "DEFAULT_THREADS", 8)
    watch = Watch(monkeypatch)
    report = measure_drive([path], 5 * PAGE - 100, seconds=0.01)
    assert {nbytes for requests in watch.rounds for _, _, nbytes, _ in requests} == {5 * PAGE, 8 * MEBI}
    assert {cell.depth for cell in report.cells} == {8}
    rates = [cell.rate for cell in report.cells]
    assert report.rate == pytest.approx(sum(rates) / 2)


def test_holes(tmp_path, file):
    path = tmp_path / "sparse"
    with path.open("wb") as stream:
        stream.write(bytes(MEBI))
        stream.truncate(64 * MEBI)
    if not has_holes(path):
        pytest.skip("this file system writes holes out")
    assert not has_holes(file)
    with pytest.raises(UsageError, match="this file has holes"):
        measure_disk([path])


def test_direct_reads_are_tried(file, tmp_path):
    refusing = tmp_path / "file"
    refusing.write_bytes(b"x")
    assert takes_direct_reads(file) in (True, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_bench, "Reader", lambda **options: Reader(**options | {"direct": False}))
        assert takes_direct_reads(refusing) is False


def test_the_largest_shard_of_a_directory(tmp_path):
    for name, size in (("a", 10), ("b", 30), ("c", 20)):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(size))
    (tmp_path / "larger.bin").write_bytes(bytes(99))
    assert largest_shards(tmp_path) == (tmp_path / "b.safetensors",)
    assert largest_on_each_drive(sorted(tmp_path.iterdir())) == (tmp_path / "larger.bin",)


# --- the command ---


def test_the_table(cli, file):
    ran = cli.ok("bench", "disk", file, "--seconds", 0.003)
    title, direct, header, *rows, best = ran.out.splitlines()
    assert title.startswith(f"{file}: 41.9 MB, ")
    assert direct.startswith("direct I/O: ")
    assert header.split() == ["GB/s", "17.5", "MB", "expert", "8", "MiB", "1", "MiB", "128", "KiB"]
    assert [int(row.split()[0]) for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    assert sum(row.count("*") for row in rows) == 1
    [mark] = [row for row in rows if "as the engine reads" in row]
    assert int(mark.split()[0]) == DEFAULT_THREADS
    assert best.startswith("* the best: ")
    assert "measuring for about" in ran.err
    assert "never twice in one round" in ran.err


def test_json(cli, file):
    ran = cli.ok("bench", "disk", file, "--seconds", 0.003, "--json", "--quiet")
    record = json.loads(ran.out)
    assert ran.err == ""
    assert record["files"] == [str(file)]
    assert record["file_bytes"] == 40 * MEBI + 7
    assert len(record["cells"]) == 7 * len(SIZES)
    assert record["best"]["gbps"] == max(cell["gbps"] for cell in record["cells"] if cell["gbps"] is not None)
    assert {"direct_io", "share_from_drive", "bytes_read"} <= record.keys()


def test_reads_through_the_page_cache_are_said_loudly(cli, file):
    ran = cli.ok("bench", "disk", file, "--seconds", 0.003, "--no-direct")
    assert "direct I/O: NO" in ran.out
    assert "WARNING: these reads went through the page cache" in ran.err


def test_direct_reads_that_memory_answered_are_said_loudly(cli, file, monkeypatch):
    if not takes_direct_reads(file):
        pytest.skip("this file system takes no direct reads")
    monkeypatch.setattr(disk_bench, "_bytes_from_drive", lambda: 0)
    ran = cli.ok("bench", "disk", file, "--seconds", 0.003)
    assert "fetched 0 % of the bytes from a drive" in ran.out
    assert "WARNING: only 0 % of the bytes came from a drive" in ran.err
    monkeypatch.setattr(disk_bench, "_bytes_from_drive", lambda: None)
    ran = cli.ok("bench", "disk", file, "--seconds", 0.003)
    assert "WARNING" not in ran.err
    assert "bytes from a drive" not in ran.out


def test_what_is_refused(cli, tmp_path):
    assert "found nothing" in cli.refused("bench", "disk", tmp_path / "nowhere")
    assert "files, found none of them" in cli.refused("bench", "disk", tmp_path)
    assert "a device or a pipe" in cli.refused("bench", "disk", "/dev/null")
    small = tmp_path / "small"
    small.write_bytes(bytes(1000))
    assert "expected 262144 bytes or more to read from, found 1000" in cli.refused("bench", "disk", small)
    for value in ("0", "-1", "nan", "inf", "x", "1e9"):
        assert "--seconds: expected seconds" in cli.refused("bench", "disk", small, f"--seconds={value}")
