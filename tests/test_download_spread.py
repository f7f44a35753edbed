"""Which drive gets which file, and what is refused before the first byte."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_hub import REPO, running
from k3.checkpoint.fetch import spread as spread_module
from k3.checkpoint.fetch.download import RELEASED_REPO, DownloadEvents, DownloadOptions, download
from k3.checkpoint.fetch.hub import Hub
from k3.checkpoint.fetch.spread import Present, look, spread
from k3.checkpoint.released import RELEASED_FILES
from k3.errors import CheckpointError, MachineError, UsageError
from test_download import SHARDS, WANTED, alone, assert_exact, fetch, record, repository  # noqa: F401

SIZES = {f"model-{n}.safetensors": size for n, size in enumerate([100, 100, 90, 90, 40])}


@pytest.fixture
def drives(monkeypatch, tmp_path):
    """Three directories, each as if on a drive of its own: free bytes by name, to be set."""
    free = {"a": 1000, "b": 1000, "c": 1000}
    for name in free:
        (tmp_path / name).mkdir()
    real = Path.stat

    def stat(path, **options):
        found = real(path, **options)
        if path.parent == tmp_path and path.name in free:
            return SimpleNamespace(st_dev=devices.get(path.name, path.name), st_mode=found.st_mode)
        return found

    devices = {}
    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(spread_module, "free_bytes", lambda place: free[place.name])
    return SimpleNamespace(free=free, devices=devices, a=tmp_path / "a", b=tmp_path / "b", c=tmp_path / "c")


def names(choice):
    return [choice[name].name for name in SIZES]


def test_files_follow_the_free_space(drives):
    drives.free.update(a=300, b=200)
    assert names(spread(SIZES, {}, {}, [drives.a, drives.b])) == ["a", "a", "b", "b", "a"]


def test_the_choice_depends_on_nothing_else(drives):
    places = [drives.a, drives.b, drives.c]
    shuffled = dict(reversed(SIZES.items()))
    assert spread(SIZES, {}, {}, places) == spread(shuffled, {}, {}, places)


def test_small_files_stay_in_the_first_directory(drives):
    drives.free.update(a=10, b=1000)
    assert spread({"config.json": 5, "x.safetensors": 100}, {}, {}, [drives.a, drives.b]) == {
        "config.json": drives.a,
        "x.safetensors": drives.b,
    }


def test_the_earlier_choice_is_kept_while_it_fits(drives):
    places = [drives.a, drives.b]
    earlier = dict.fromkeys(SIZES, drives.b)
    drives.free.update(a=1000, b=420)
    assert names(spread(SIZES, {}, earlier, places)) == ["b"] * 5
    drives.free.update(a=300, b=419)
    assert set(names(spread(SIZES, {}, earlier, places))) == {"a", "b"}


def test_what_is_there_stays_and_needs_only_the_rest(drives):
    first = next(iter(SIZES))
    present = {first: Present(drives.b, 95, finished=False)}
    drives.free.update(a=320, b=5)
    assert names(spread(SIZES, present, {}, [drives.a, drives.b])) == ["b", "a", "a", "a", "a"]


def test_one_drive_under_two_names_is_counted_once(drives):
    drives.free.update(a=400, b=400)
    drives.devices["b"] = "a"
    with pytest.raises(MachineError, match=r"still needs 420 bytes; 400 bytes are free at .*a; 20 bytes of files"):
        spread(SIZES, {}, {}, [drives.a, drives.b])
    drives.free.update(a=420, b=420)
    assert names(spread(SIZES, {}, {}, [drives.a, drives.b])) == ["a"] * 5


def test_parts_leave_a_full_drive_the_shortest_first(drives):
    parts = {name: Present(drives.b, nbytes, finished=False) for name, nbytes in zip(SIZES, (50, 60, 70), strict=False)}
    drives.free.update(a=1000, b=20)
    assert names(spread(SIZES, parts, {}, [drives.a, drives.b])) == ["a", "b", "b", "a", "a"]
    with pytest.raises(MachineError, match=r"still needs 240 bytes; 20 bytes are free at .*b; 220 bytes of files"):
        spread(SIZES, parts, {}, [drives.b])


def test_a_finished_copy_counts_before_a_part(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "x.part").write_bytes(bytes(7))
    assert look("x", 10, [tmp_path, tmp_path / "b"]) == Present(tmp_path, 7, finished=False)
    (tmp_path / "b" / "x").write_bytes(bytes(10))
    assert look("x", 10, [tmp_path, tmp_path / "b"]) == Present(tmp_path / "b", 10, finished=True)
    with pytest.raises(CheckpointError, match="expected a file of 9 bytes, found one of 10"):
        look("x", 9, [tmp_path, tmp_path / "b"])
    (tmp_path / "y").mkdir()
    with pytest.raises(CheckpointError, match="found something else"):
        look("y", 9, [tmp_path])


# --- whole downloads ---


@pytest.fixture
def hub():
    with running(repository()) as hub:
        yield hub


def test_shards_are_spread_and_found_again(hub, drives):
    drives.free.update(a=700_000, b=400_000)
    fetch(hub, drives.a, drives.b)
    assert {p.name for p in drives.b.iterdir()} == {SHARDS[1]}
    assert {p.name for p in drives.a.iterdir()} == WANTED - {SHARDS[1]} | {"k3-download.json"}
    assert record(drives.a)["files"][SHARDS[1]]["directory"] == str(drives.b)
    assert "directory" not in record(drives.a)["files"][SHARDS[0]]
    hub.requests.clear()
    drives.free.update(a=0, b=0)
    fetch(hub, drives.a)  # The record knows the other drive.
    fetch(hub, drives.a, drives.b)
    assert hub.requests == []


def test_a_drive_mounted_elsewhere(hub, drives):
    drives.free.update(a=700_000, b=400_000)
    fetch(hub, drives.a, drives.b)
    drives.b.rename(drives.a.parent / "moved")
    with pytest.raises(UsageError, match=r"files were put in .*b, and they are not there\. Mount that drive"):
        fetch(hub, drives.a)
    hub.requests.clear()
    drives.c.rmdir()
    (drives.a.parent / "moved").rename(drives.c)
    fetch(hub, drives.a, drives.c)
    assert hub.requests == []
    assert record(drives.a)["files"][SHARDS[1]]["directory"] == str(drives.c)


def test_an_empty_mount_point_is_not_filled_anew(hub, drives):
    drives.free.update(a=700_000, b=400_000)
    fetch(hub, drives.a, drives.b)
    (drives.b / SHARDS[1]).rename(drives.a.parent / "unmounted")
    hub.requests.clear()
    drives.free.update(a=10**9, b=10**9)
    with pytest.raises(UsageError, match=r"files were put in .*b, and they are not there"):
        fetch(hub, drives.a, drives.b)
    assert hub.requests == []
    (drives.a / "k3-download.json").unlink()
    fetch(hub, drives.a, drives.b)
    assert [hub.of(name) == [] for name in SHARDS] == [True, False, True]


def test_a_wrong_file_may_be_removed_even_where_it_was_alone(hub, drives):
    drives.free.update(a=700_000, b=400_000)
    fetch(hub, drives.a, drives.b)
    (drives.b / SHARDS[1]).write_bytes(bytes(len(hub.files[SHARDS[1]])))
    with pytest.raises(CheckpointError, match=SHARDS[1]):
        fetch(hub, drives.a)
    (drives.b / SHARDS[1]).unlink()
    fetch(hub, drives.a)
    assert_exact(hub, drives.a, drives.b)


def test_a_drive_added_later_takes_what_no_longer_fits(hub, drives):
    drives.free.update(a=1_000_000)
    fetch(hub, drives.a)
    for name in SHARDS[1:]:
        (drives.a / name).unlink()
    drives.free.update(a=0, b=700_000)
    with pytest.raises(MachineError, match="--extra-dir"):
        fetch(hub, drives.a)
    hub.requests.clear()
    fetch(hub, drives.a, drives.b)
    assert hub.of(SHARDS[0]) == []
    assert_exact(hub, drives.a, drives.b)


def test_parts_move_to_a_drive_with_room(hub, drives):
    part = drives.a / f"{SHARDS[0]}.part"
    part.write_bytes(hub.files[SHARDS[0]][:100_000])
    drives.free.update(a=100_000, b=1_000_000)
    fetch(hub, drives.a, drives.b)
    assert [request.first_byte for request in hub.of(SHARDS[0])] == [100_000]
    assert not part.exists()
    assert_exact(hub, drives.a, drives.b)


def test_an_extra_directory_must_be_there(hub, drives):
    with pytest.raises(UsageError, match=r"--extra-dir: .*nowhere is not a directory"):
        fetch(hub, drives.a, drives.a.parent / "nowhere")


def test_the_released_checkpoint_needs_its_space_before_anything_is_asked(drives):
    needed = sum(RELEASED_FILES.values())
    assert needed == 1_560_936_091_448
    drives.free.update(a=needed // 2, b=needed // 3)
    nowhere = Hub("http://127.0.0.1:9", ())
    with pytest.raises(MachineError, match="still needs 1,560,936,091,448 bytes") as caught:
        download(drives.a, DownloadOptions(extra_dirs=(drives.b,)), nowhere)
    assert caught.value.exit_code == 2
    assert list(drives.a.iterdir()) == []


def test_other_shards_than_the_released_ones_are_mentioned(hub, drives):
    hub.repo = RELEASED_REPO
    drives.free.update(a=2 * 10**12)
    notes = []
    download(drives.a, DownloadOptions(), Hub(hub.endpoint), DownloadEvents(note=notes.append))
    assert any("other names or sizes" in note for note in notes)
    assert json.loads((drives.a / "k3-download.json").read_text())["repo"] == RELEASED_REPO != REPO


@pytest.mark.parametrize(
    "change",
    [
        {"repo": None},
        {"commit": "main"},
        {"files": {"../x": {"bytes": 1}}},
        {"files": {"x": {"bytes": -1}}},
        {"files": {"x": {"bytes": 1, "sha256": "1"}}},
        [],
    ],
)
def test_a_damaged_record_is_refused(hub, tmp_path, change):
    whole = {"repo": REPO, "revision": "main", "commit": "0" * 40, "files": {}}
    (tmp_path / "k3-download.json").write_text(json.dumps(whole | change if change else change))
    with pytest.raises(CheckpointError, match=r"k3-download\.json: this record of checksums can't be read"):
        fetch(hub, tmp_path)
