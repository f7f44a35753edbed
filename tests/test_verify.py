"""`k3 verify`: whole checkpoints pass, and what is wrong is named."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil

import numpy as np
import pytest

import k3
from conftest import TINY_A, shard_of
from k3.api import model_path
from k3.checkpoint import verify as verify_module
from k3.checkpoint.config import ModelConfig
from k3.checkpoint.fetch.record import DownloadRecord, RemoteFile
from k3.checkpoint.verify import check_bytes, check_structure
from k3.cli.main import main
from k3.cli.terminal import Terminal
from k3.cli.verify import check_golden
from k3.engine.golden import CONTINUATION, NEAR_TIE, PROMPT, compare, require_released
from k3.errors import CheckpointError, InvalidGenerationError, K3Error, UsageError

RECORD = "k3-checksums.json"


@pytest.fixture
def demo(tmp_path):
    """A writable copy of the embedded model, tokenizer included."""
    shutil.copytree(model_path("demo"), tmp_path / "model")
    return tmp_path / "model"


def verify(capsys, *arguments):
    code = main(["verify", *map(str, arguments)])
    out, said = capsys.readouterr()
    return code, out, said


def flip(path, offset, bit=0):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def record_download(directory, **changes):
    """What `k3 download` leaves beside a checkpoint."""
    files = {
        path.name: RemoteFile(bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        for path in directory.iterdir()
    }
    small = (directory / "config.json").read_bytes()
    files["config.json"] = RemoteFile(
        bytes=len(small), git_sha1=hashlib.sha1(b"blob %d\0" % len(small) + small).hexdigest()
    )
    DownloadRecord(repo="a/b", revision="main", commit="0" * 40, files=files | changes).write(directory)


# --- structure ---


def test_a_whole_checkpoint_is_counted(checkpoint, capsys):
    index = json.loads((checkpoint / "model.safetensors.index.json").read_bytes())["weight_map"]
    shards = list(checkpoint.glob("*.safetensors"))
    code, out, _ = verify(capsys, checkpoint)
    assert code == 0
    assert f"{len(shards)} headers, {sum(path.stat().st_size for path in shards):,} bytes" in out
    assert f"{len(index):,} tensors, each where it should be" in out
    assert "tokenizer  not there" in out


def test_the_embedded_model_has_a_tokenizer_and_stop_ids(capsys):
    code, out, _ = verify(capsys, "demo")
    assert code == 0
    assert "tokenizer  1,024 ids" in out
    assert "stop ids   769, 770, 777" in out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: os.truncate(shard_of(d, 2), shard_of(d, 2).stat().st_size - 1), "truncated"),
        (lambda d: shard_of(d, 2).unlink(), "not in"),
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "weight_map"),
        (lambda d: (d / "generation_config.json").write_text("[]"), "generation_config.json"),
        (lambda d: (d / "tiktoken.model").write_text("nonsense"), "tiktoken.model"),
        (lambda d: (d / "tiktoken.model").unlink(), "tiktoken.model"),
    ],
)
def test_what_is_wrong_is_exit_2(demo, capsys, damage, message):
    damage(demo)
    code, _, said = verify(capsys, demo)
    assert code == 2
    assert message in said


def test_a_hole_is_found_without_reading(demo, capsys):
    path = max(demo.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    content = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.truncate(len(content))
    code, _, said = verify(capsys, demo)
    if code == 0:
        pytest.skip("this file system keeps no holes")
    assert code == 2
    assert "hole" in said
    assert path.name in said


def test_no_directory(tmp_path, capsys):
    assert verify(capsys, tmp_path / "nothing")[0] == 2
    code, _, said = verify(capsys, "demo", "--extra-dir", tmp_path / "nothing")
    assert (code, "nothing" in said) == (2, True)


def test_shards_on_another_drive(demo, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    shard_of(demo, 3).rename(tmp_path / "other" / shard_of(demo, 3).name)
    assert verify(capsys, demo)[0] == 2
    assert verify(capsys, demo, "--extra-dir", tmp_path / "other", "--deep")[0] == 0
    assert "model-00003-of-000009.safetensors" in json.loads((demo / RECORD).read_bytes())["files"]


def test_a_download_that_is_not_complete(demo, capsys):
    record_download(demo)
    assert "as k3-download.json lists them" in verify(capsys, demo)[1]
    record_download(demo, **{"config.json": RemoteFile(bytes=1), "more.safetensors": RemoteFile(bytes=1)})
    code, _, said = verify(capsys, demo)
    assert code == 2
    assert "more.safetensors is not there" in said
    assert f"config.json has {(demo / 'config.json').stat().st_size} bytes, expected 1" in said


# --- every byte ---


def test_checksums_are_compared_with_the_download(demo, capsys):
    record_download(demo)
    code, out, _ = verify(capsys, demo, "--deep")
    assert code == 0
    assert "14 files are what k3-download.json says, byte for byte" in out
    assert not (demo / RECORD).exists()


def zero_block(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(512))


@pytest.mark.parametrize("damage", [flip, zero_block])
@pytest.mark.parametrize("recorded", ["download", "earlier run"])
def test_damage_is_named_with_what_was_expected_and_found(demo, capsys, damage, recorded):
    if recorded == "download":
        record_download(demo)
    else:
        assert verify(capsys, demo, "--deep")[0] == 0
    path = shard_of(demo, 4)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    damage(path, path.stat().st_size - 700)
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    assert verify(capsys, demo)[0] == 0  # Headers don't show it.
    code, _, said = verify(capsys, demo, "--deep")
    assert code == 2
    assert all(word in said for word in (str(path), before, after))
    assert said.count(".safetensors:") == 1


def test_a_small_file_is_compared_by_its_git_id(demo, capsys):
    record_download(demo)
    path = demo / "config.json"
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    code, _, said = verify(capsys, demo, "--deep")
    assert code == 2
    assert "config.json: expected git_sha1" in said


def test_without_a_record_one_is_made_and_that_is_said(demo, capsys):
    code, out, _ = verify(capsys, demo, "--deep")
    assert code == 0
    assert "nothing was compared" in out
    files = json.loads((demo / RECORD).read_bytes())["files"]
    assert len(files) == 14
    path = shard_of(demo, 1)
    assert files[path.name] == {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    code, out, _ = verify(capsys, demo, "--deep")
    assert code == 0
    assert "14 files are what k3-checksums.json says" in out
    assert "nothing" not in out


def test_files_that_the_download_does_not_list_are_recorded(demo, capsys):
    record_download(demo)
    record = json.loads((demo / "k3-download.json").read_bytes())
    del record["files"]["tiktoken.model"]
    (demo / "k3-download.json").write_text(json.dumps(record))
    _, out, _ = verify(capsys, demo, "--deep")
    assert "13 files are what k3-download.json says" in out
    assert list(json.loads((demo / RECORD).read_bytes())["files"]) == ["tiktoken.model"]


def test_nothing_is_recorded_where_something_is_wrong(demo, capsys):
    record_download(demo)
    record = json.loads((demo / "k3-download.json").read_bytes())
    del record["files"]["tiktoken.model"]
    (demo / "k3-download.json").write_text(json.dumps(record))
    flip(shard_of(demo, 1), shard_of(demo, 1).stat().st_size - 1)
    assert verify(capsys, demo, "--deep")[0] == 2
    assert not (demo / RECORD).exists()


@pytest.mark.parametrize("text", ["", "[]", '{"files": {"a": {"bytes": "1"}}}', '{"files": {"a": {}}}'])
def test_a_damaged_record_is_refused(demo, capsys, text):
    (demo / RECORD).write_text(text)
    code, _, said = verify(capsys, demo, "--deep")
    assert (code, RECORD in said) == (2, True)


def test_a_file_that_cannot_be_read_is_named(demo, monkeypatch):
    def compute(path, kind, on_bytes):
        if path.name.startswith("model-00002"):
            raise OSError(5, "Input/output error")
        return real(path, kind, on_bytes)

    real = verify_module.compute
    monkeypatch.setattr(verify_module, "compute", compute)
    with pytest.raises(CheckpointError, match=r"model-00002-of-000009\.safetensors can't be read: Input/output error"):
        check_bytes(check_structure(demo), threads=2)


def test_a_record_that_cannot_be_written_is_a_failure(demo, monkeypatch):
    structure = check_structure(demo)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(K3Error, match=f"{RECORD}: .* No space left") as caught:
        check_bytes(structure, threads=1)
    assert caught.value.exit_code == 1
    assert list(demo.glob(".*")) == []


def test_progress_counts_every_byte(demo):
    steps = []
    check_bytes(check_structure(demo), threads=2, progress=lambda *bytes_: steps.append(bytes_))
    total = sum(path.stat().st_size for path in demo.iterdir() if path.name != RECORD)
    assert steps[-1] == (total, total)


# --- known ids ---


def forced(prompt, published, rows):
    """A model's logits on which the published ids are judged: `rows` maps positions (from 0) to {id: logit}."""

    def logits(ids):
        assert ids == [*prompt, *published[:-1]]
        table = np.zeros((len(ids), 1000), np.float32)
        for place, token in enumerate(published):
            table[len(prompt) - 1 + place, token] = 1.0
        for place, values in rows.items():
            for token, value in values.items():
                table[len(prompt) - 1 + place, token] = value
        return table

    return logits


PUBLISHED = (5, 6, 7, 8)


def judge(rows):
    out = io.StringIO()
    check_golden(Terminal(out, io.StringIO()), forced((1, 2), PUBLISHED, rows), (1, 2), PUBLISHED)
    return out.getvalue()


def test_agreement_is_counted():
    assert judge({}) == "golden     4 of 4 ids agree with the published ones\n"


def test_a_near_tie_is_reported_and_accepted():
    said = judge({2: {9: 1.04}})
    assert "3 of 4 ids agree" in said
    assert "id 3: published 7, found 9, whose logit is larger by 0.0400: a near tie" in said


def test_a_difference_is_void_and_leads_to_the_deep_check():
    with pytest.raises(InvalidGenerationError, match="--deep") as caught:
        judge({1: {9: 1.06}})
    assert caught.value.exit_code == 4


def test_a_tie_between_two_others_is_no_excuse():
    with pytest.raises(InvalidGenerationError):
        judge({1: {9: 3.0, 10: 2.99}})


def test_of_equal_logits_the_lower_id_is_ours():
    found = compare(forced((1, 2), PUBLISHED, {0: {4: 1.0}, 1: {9: 1.0}}), (1, 2), PUBLISHED)
    assert [position.found for position in found.positions] == [4, 6, 7, 8]
    assert found.positions[0].margin == 0


def test_one_pass_judges_as_decoding_does():
    prompt = [3, 14, 15]
    with k3.load("demo") as model:
        greedy = tuple(token.id for token in model.generate(prompt, 6, ignore_eos=True))
        assert compare(model.logits, prompt, greedy).agreeing == 6
        wrong = (*greedy[:3], (greedy[3] + 1) % 769, *greedy[4:])
        first, _ = compare(model.logits, prompt, wrong).differences[0]
    assert first == 4


def test_the_published_ids():
    assert PROMPT == (1008, 10484, 318, 15383, 387)
    assert CONTINUATION == (17374, 20829, 10, 427, 414, 1008, 606, 142957)
    assert NEAR_TIE == 0.05


def test_other_models_have_no_published_ids(capsys):
    code, out, said = verify(capsys, "demo", "--golden")
    assert code == 2
    assert "tensors, each where it should be" in out
    assert "published for the released checkpoint only" in said


def test_the_released_shape_is_known(shared):
    config = ModelConfig.read(shared / "data" / "released-config.json")
    require_released(config, {}, "here")
    with pytest.raises(UsageError, match="synthetic"):
        require_released(config, {"synthetic": True}, "here")
    with pytest.raises(UsageError, match="is another"):
        require_released(ModelConfig.read(TINY_A / "config.json"), {}, "here")
