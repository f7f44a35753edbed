"""`k3 download` against a hub on this machine: what arrives, what is fetched again, what is said when it fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from fake_hub import COMMIT, REPO, FakeHub, git_sha1, running
from k3.checkpoint.fetch import hub as hub_module
from k3.checkpoint.fetch.download import DownloadEvents, DownloadOptions, download
from k3.checkpoint.fetch.hub import Hub
from k3.errors import CheckpointError, K3Error, UsageError

SHARDS = [f"model-0000{n}-of-000003.safetensors" for n in (1, 2, 3)]
OTHER = "fedcba9876543210fedcba9876543210fedcba98"


def content(seed, nbytes):
    return random.Random(seed).randbytes(nbytes)


def repository(shard_bytes=300_000):
    shards = {name: content(name, shard_bytes + 7 * n) for n, name in enumerate(SHARDS)}
    return FakeHub(
        {
            "config.json": b'{"a": 1}',
            "model.safetensors.index.json": b"{}",
            "tiktoken.model": content("vocabulary", 5_000),
            "tokenizer_config.json": b'{"b": 2}',
            "README.md": b"not wanted",
            "modeling.py": b"not wanted",
            "figures/model.safetensors": b"not wanted",
            **shards,
        }
    )


WANTED = {"config.json", "model.safetensors.index.json", "tiktoken.model", "tokenizer_config.json", *SHARDS}


@pytest.fixture
def hub():
    with running(repository()) as hub:
        yield hub


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No token and no settings of this machine; the library hands on what it received at once."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 15)


def fetch(hub, directory, *extra, events=None, waits=(), **options):
    wanted = DownloadOptions(repo=REPO, extra_dirs=extra, **options)
    return download(directory, wanted, Hub(hub.endpoint, waits), events)


def record(directory):
    return json.loads((directory / "k3-download.json").read_bytes())


def assert_exact(hub, *places):
    there = {p.name: p.read_bytes() for place in places for p in place.iterdir() if p.is_file()}
    there.pop("k3-download.json", None)
    assert there == {name: hub.files[name] for name in WANTED}


def test_what_the_engine_needs_arrives_and_nothing_else(hub, tmp_path):
    made = fetch(hub, tmp_path / "model")
    assert_exact(hub, tmp_path / "model")
    assert set(made.files) == WANTED
    assert all(len(hub.of(name)) == 1 for name in WANTED)


def test_the_record_names_the_commit_and_the_listed_checksums(hub, tmp_path):
    fetch(hub, tmp_path)
    found = record(tmp_path)
    assert (found["repo"], found["revision"], found["commit"]) == (REPO, "main", COMMIT)
    shard, config = hub.files[SHARDS[0]], hub.files["config.json"]
    assert found["files"][SHARDS[0]]["sha256"] == hashlib.sha256(shard).hexdigest()
    assert found["files"][SHARDS[0]]["bytes"] == len(shard)
    assert found["files"]["config.json"]["git_sha1"] == git_sha1(config)
    assert "sha256" not in found["files"]["config.json"]


def test_git_agrees_with_the_id_of_small_files(tmp_path):
    (tmp_path / "file").write_bytes(b"what is up, doc?")
    assert git_sha1(b"what is up, doc?") == "bd9dbf5aae1a3862dd1526723246b20206e5fc37"  # From the book "Pro Git".


def test_a_complete_download_asks_for_nothing(hub, tmp_path):
    fetch(hub, tmp_path)
    hub.requests.clear()
    hub.down = True
    checked = []
    fetch(hub, tmp_path, events=DownloadEvents(checked=lambda *bytes_: checked.append(bytes_)))
    assert hub.requests == []
    assert checked == []


def test_the_revision_stays_what_it_was_at_first(hub, tmp_path):
    fetch(hub, tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    hub.revisions = {"main": OTHER, "old": COMMIT}
    fetch(hub, tmp_path)
    assert record(tmp_path)["commit"] == COMMIT
    assert_exact(hub, tmp_path)
    fetch(hub, tmp_path, revision=COMMIT)
    with pytest.raises(UsageError, match=f"--revision: .*{COMMIT}"):
        fetch(hub, tmp_path, revision="old")


def test_what_was_begun_need_not_be_named_again(hub, tmp_path):
    fetch(hub, tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    download(tmp_path, DownloadOptions(), Hub(hub.endpoint))
    assert_exact(hub, tmp_path)


def test_another_repository_is_not_mixed_in(hub, tmp_path):
    fetch(hub, tmp_path)
    with pytest.raises(UsageError, match=r"--repo: .* holds a download of someone/model"):
        download(tmp_path, DownloadOptions(repo="someone/else"), Hub(hub.endpoint))


@pytest.mark.parametrize("how", ["close", "reset"])
def test_broken_connections_go_on_where_they_broke(hub, tmp_path, how):
    name = SHARDS[0]
    hub.drops[name] = [(120_000, how), (90_000, how)]
    fetch(hub, tmp_path, waits=(0.01,))
    assert_exact(hub, tmp_path)
    first, second, third = (request.first_byte for request in hub.of(name))
    assert first == 0
    assert 0 < second < third
    assert hub.sent(name) < 1.3 * len(hub.files[name])


def test_a_server_without_ranges_still_gives_the_right_bytes(hub, tmp_path):
    hub.ignores_ranges = True
    hub.drops[SHARDS[0]] = [(120_000, "reset")]
    fetch(hub, tmp_path, waits=(0.01,))
    assert_exact(hub, tmp_path)


def test_a_dead_network_says_how_to_resume_and_keeps_what_is_there(hub, tmp_path):
    hub.drops[SHARDS[0]] = [(200_000, "reset"), *[(0, "reset")] * 3]
    with pytest.raises(K3Error, match="the same command goes on") as caught:
        fetch(hub, tmp_path, waits=(0.01, 0.01))
    assert caught.value.exit_code == 1
    assert "Signature" not in str(caught.value)
    part = tmp_path / f"{SHARDS[0]}.part"
    assert 100_000 < part.stat().st_size < len(hub.files[SHARDS[0]])
    there = part.stat().st_size
    hub.drops.clear()
    hub.requests.clear()
    fetch(hub, tmp_path)
    assert [request.first_byte for request in hub.of(SHARDS[0])] == [there]
    assert_exact(hub, tmp_path)


def test_a_full_drive_is_named_and_the_rest_is_fetched_later(hub, tmp_path, monkeypatch):
    total = sum(len(hub.files[name]) for name in WANTED)
    left = total // 2
    real = hub_module.write_at

    def filling(descriptor, data, offset):
        nonlocal left
        if len(data) > left:
            real(descriptor, bytes(data)[:left], offset)
            left = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= len(data)
        real(descriptor, data, offset)

    monkeypatch.setattr(hub_module, "write_at", filling)
    with pytest.raises(K3Error, match=r"drive is full .* are there\. .*--extra-dir.* same command goes on") as caught:
        fetch(hub, tmp_path, connections=1)
    assert caught.value.exit_code == 1
    finished = {p.name for p in tmp_path.iterdir()} & set(SHARDS)
    assert finished
    assert len(list(tmp_path.glob("*.part"))) == 1
    monkeypatch.setattr(hub_module, "write_at", real)
    fetch(hub, tmp_path)
    assert_exact(hub, tmp_path)
    assert all(len(hub.of(name)) == 1 for name in finished)
    assert sum(hub.sent(name) for name in WANTED) < 1.2 * total


def test_a_wrong_byte_from_the_network_is_found_and_fetched_once_more(hub, tmp_path):
    damaged = bytearray(hub.files[SHARDS[2]])
    damaged[123_456] ^= 1
    hub.served[SHARDS[2]] = bytes(damaged)
    right, wrong = (hashlib.sha256(b).hexdigest() for b in (hub.files[SHARDS[2]], damaged))
    with pytest.raises(CheckpointError, match=f"{SHARDS[2]}: .*{right}, found sha256 {wrong}.*again") as caught:
        fetch(hub, tmp_path)
    assert caught.value.exit_code == 2
    assert len(hub.of(SHARDS[2])) == 2
    assert not (tmp_path / SHARDS[2]).exists()
    assert {p.name for p in tmp_path.iterdir()} == WANTED - {SHARDS[2]} | {"k3-download.json"}
    hub.served.clear()
    fetch(hub, tmp_path)
    assert_exact(hub, tmp_path)


def test_a_damaged_part_is_replaced_without_a_word(hub, tmp_path):
    name = SHARDS[1]
    (tmp_path / f"{name}.part").write_bytes(bytes(100_000))
    fetch(hub, tmp_path)
    assert [request.first_byte for request in hub.of(name)] == [100_000, 0]
    assert_exact(hub, tmp_path)


@pytest.mark.parametrize("nbytes", [300_000, 300_007, 900_000])
def test_a_part_as_long_as_the_file_or_longer(hub, tmp_path, nbytes):
    (tmp_path / f"{SHARDS[1]}.part").write_bytes(bytes(nbytes))
    fetch(hub, tmp_path)
    assert_exact(hub, tmp_path)


def test_a_file_of_the_right_size_with_a_wrong_byte_is_found_at_the_end(hub, tmp_path):
    damaged = bytearray(hub.files[SHARDS[0]])
    damaged[-1] ^= 0x80
    (tmp_path / SHARDS[0]).write_bytes(damaged)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[0]}: .*, found sha256 .*Remove it, then run the same"):
        fetch(hub, tmp_path)
    assert (tmp_path / SHARDS[0]).read_bytes() == damaged  # Not ours to remove.
    assert all((tmp_path / name).exists() for name in WANTED)
    (tmp_path / SHARDS[0]).unlink()
    fetch(hub, tmp_path)
    assert_exact(hub, tmp_path)


def test_a_file_that_changed_after_its_check_is_checked_again(hub, tmp_path):
    fetch(hub, tmp_path)
    path = tmp_path / SHARDS[0]
    damaged = bytearray(path.read_bytes())
    damaged[0] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(0, 0))
    with pytest.raises(CheckpointError, match=SHARDS[0]):
        fetch(hub, tmp_path)


def test_files_that_another_tool_fetched_are_used(hub, tmp_path):
    for name in WANTED:
        (tmp_path / name).write_bytes(hub.files[name])
    checked = []
    fetch(hub, tmp_path, events=DownloadEvents(checked=lambda *bytes_: checked.append(bytes_)))
    total = sum(len(hub.files[name]) for name in WANTED)
    assert checked[-1] == (total, total)
    assert all(hub.of(name) == [] for name in WANTED)


def test_a_file_of_another_size_is_not_overwritten(hub, tmp_path):
    (tmp_path / SHARDS[0]).write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=rf"{SHARDS[0]}: expected a file of 300000 bytes, found one of 4\."):
        fetch(hub, tmp_path)
    assert (tmp_path / SHARDS[0]).read_bytes() == b"mine"
    assert hub.of(SHARDS[1]) == []


def test_missing_checksums_are_admitted(hub, tmp_path, monkeypatch):
    listing = hub.listing
    monkeypatch.setattr(hub, "listing", lambda: [entry | {"blobId": None} for entry in listing()])
    notes = []
    fetch(hub, tmp_path, events=DownloadEvents(note=notes.append))
    assert any("no checksum of config.json" in note for note in notes)


def test_progress_counts_what_this_run_fetches(hub, tmp_path):
    steps = []
    fetch(hub, tmp_path, events=DownloadEvents(fetched=lambda *bytes_: steps.append(bytes_)))
    total = sum(len(hub.files[name]) for name in WANTED)
    assert steps[-1] == (total, total)
    (tmp_path / SHARDS[0]).rename(tmp_path / f"{SHARDS[0]}.part")
    os.truncate(tmp_path / f"{SHARDS[0]}.part", 100_000)
    fetch(hub, tmp_path, events=DownloadEvents(fetched=lambda *bytes_: steps.append(bytes_)))
    assert steps[-1] == (200_000, 200_000)


def test_two_downloads_into_one_directory_are_refused(hub, tmp_path):
    def nested(_):
        with pytest.raises(UsageError, match="another download is at work"):
            fetch(hub, tmp_path)
        seen.append(True)

    seen = []
    fetch(hub, tmp_path, events=DownloadEvents(note=nested))
    assert seen


# --- access ---


def test_the_token_goes_to_the_hub_and_nowhere_else(hub, tmp_path, monkeypatch):
    hub.token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    fetch(hub, tmp_path)
    assert {r.authorization for r in hub.requests if r.server == "hub"} == {"Bearer hf_right"}
    assert {r.authorization for r in hub.requests if r.server == "cdn"} == {None}
    assert b"hf_right" not in (tmp_path / "k3-download.json").read_bytes()


@pytest.mark.parametrize(
    ("set_up", "message"),
    [
        ({"token": "hf_right"}, "HF_TOKEN"),
        ({"repo": "someone/other"}, "no such repository"),
        ({"revisions": {"else": COMMIT}}, "no such revision"),
    ],
)
def test_no_access_is_explained(hub, tmp_path, monkeypatch, set_up, message):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for name, value in set_up.items():
        setattr(hub, name, value)
    with pytest.raises(UsageError, match=message) as caught:
        fetch(hub, tmp_path)
    assert "hf_wrong" not in str(caught.value)


@pytest.mark.parametrize("token", ["hf_s\xe9same", "hf open", "hf_\udce9"])
def test_a_token_that_cannot_be_sent_is_not_shown(hub, tmp_path, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError, match="HF_TOKEN") as caught:
        fetch(hub, tmp_path)
    assert "hf" not in str(caught.value)


def test_a_private_repository_without_a_token(hub, tmp_path):
    hub.token = "hf_right"
    with pytest.raises(UsageError, match="for a private repository set HF_TOKEN"):
        fetch(hub, tmp_path)


def test_an_impossible_repository_name(hub, tmp_path):
    with pytest.raises(UsageError, match="--repo"):
        download(tmp_path, DownloadOptions(repo="a/b/c"), Hub(hub.endpoint))


def test_no_hub_at_all(tmp_path):
    with pytest.raises(K3Error, match="Check the network") as caught:
        download(tmp_path, DownloadOptions(repo=REPO), Hub("http://127.0.0.1:9", ()))
    assert caught.value.exit_code == 1


def test_a_repository_that_is_no_checkpoint(hub, tmp_path):
    hub.files = {"README.md": b"hello"}
    with pytest.raises(UsageError, match=r"no config\.json"):
        fetch(hub, tmp_path)


# --- the command, killed ---


def command(hub, *arguments):
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-m", "k3", "download", *map(str, arguments), "--repo", REPO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_and_started_again(tmp_path, how):
    target = tmp_path / "model"
    with running(repository(15_000_000)) as hub:
        hub.bytes_per_second = 40e6
        first = command(hub, target, "--connections", "1")
        part = target / f"{SHARDS[1]}.part"
        wait_for(lambda: part.exists() and part.stat().st_size > 0)
        first.send_signal(how)
        _, said = first.communicate(timeout=20)
        assert first.returncode == (3 if how == signal.SIGINT else -how), said
        if how == signal.SIGINT:
            assert "same command goes on" in said
        finished = {p.name for p in target.iterdir()} & WANTED
        assert SHARDS[0] in finished
        there = part.stat().st_size
        assert there > 0
        hub.bytes_per_second = 0
        second = command(hub, target)
        out, said = second.communicate(timeout=30)
        assert second.returncode == 0, said
        assert f"at commit {COMMIT}" in out
        assert_exact(hub, target)
        assert all(len(hub.of(name)) == 1 for name in finished)
        assert [request.first_byte for request in hub.of(SHARDS[1])] == [0, there]


def test_the_command_explains_itself(hub, tmp_path):
    (tmp_path / SHARDS[0]).write_bytes(bytes(len(hub.files[SHARDS[0]])))
    process = command(hub, tmp_path)
    out, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert out == ""
    assert f"fetching {len(WANTED) - 1} of {len(WANTED)} files" in said
    assert said.splitlines()[-1].startswith("k3: a file is not what the hub lists: ")
    assert not any(word in said for word in ("Traceback", "it/s", "http"))


def test_a_directory_that_cannot_be_made(hub, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't be made"):
        fetch(hub, Path(tmp_path / "file"))
