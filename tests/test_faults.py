"""What goes wrong with bytes while a model runs: the documented exit code, one paragraph, no wrong token."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import k3
from cli_helpers import Cli
from k3.engine import loading
from k3.engine.loading import LoadOptions, bind_checkpoint
from k3.engine.machine import GroupMemory
from k3.errors import ExpertReadError, ReadError

DEMO = Path(k3.__file__).parent / "data" / "demo"
RUN = ("run", "demo", "--ids", "5,6,7", "--gen", "4", "--ignore-eos", "--trunk-gb", "0", "--cache-gb", "0")


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture
def ranges():
    """Byte ranges of the demo's shards: of a trunk matrix, the head, and an expert's tensor."""
    layout = bind_checkpoint(DEMO, LoadOptions()).layout
    return {
        "trunk": layout.layers[3].tensors["self_attn.o_proj.weight"],
        "head": layout.top["lm_head.weight"],
        "expert": layout.expert(4, expert_in_use())["w3.weight_packed"],
    }


def expert_in_use(layer=4):
    """An expert that the ids 5, 6, 7 need at a layer."""
    with k3.load("demo", context=64) as model:
        seen, fetch = {}, model.engine._experts.fetch
        model.engine._experts.fetch = lambda at, ids: (seen.setdefault(at, ids.ravel().tolist()), fetch(at, ids))[1]
        model.engine.step([(model.engine.new_sequence(), [5, 6, 7])])
        return seen[layer][0]


def break_reads(monkeypatch, entry, times, error):
    """Let reads that cover a tensor fail, so many times."""
    left, real = [times], os.preadv

    def broken(descriptor, buffers, offset):
        inside = offset < entry.offset + entry.nbytes and entry.offset < offset + len(buffers[0])
        if left[0] and inside and os.fstat(descriptor).st_ino == entry.path.stat().st_ino:
            left[0] -= 1
            raise error
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    return left


FAILURE = OSError(errno.EIO, "Input/output error")
INTERRUPTED = InterruptedError(errno.EINTR, "Interrupted system call")


@pytest.mark.parametrize("what", ["trunk", "head", "expert"])
@pytest.mark.parametrize("error", [FAILURE, INTERRUPTED], ids=["EIO", "EINTR"])
def test_a_read_that_fails_once_changes_nothing(cli, monkeypatch, ranges, what, error):
    expected = cli.ok(*RUN).out
    left = break_reads(monkeypatch, ranges[what], 1, error)
    assert cli.ok(*RUN).out == expected
    assert left == [0]


@pytest.mark.parametrize("what", ["trunk", "head"])
def test_a_trunk_or_head_that_cannot_be_read_ends_the_run(cli, monkeypatch, ranges, what):
    break_reads(monkeypatch, ranges[what], 1000, FAILURE)
    complaint = cli.refused(*RUN, code=1)
    assert "failed twice" in complaint
    assert ranges[what].path.name in complaint
    assert "Input/output error" in complaint


def test_an_expert_that_cannot_be_read_voids_the_generation(cli, monkeypatch, ranges):
    break_reads(monkeypatch, ranges["expert"], 1000, FAILURE)
    ran = cli(*RUN)
    assert ran.code == 4
    assert "layer 4, expert" in ran.err
    assert "The generation is void" in ran.err


def test_other_sequences_of_the_step_go_on(monkeypatch, ranges):
    with k3.load("demo", context=64, trunk_gb=0, cache_gb=0) as model:
        engine = model.engine
        alone = {token: engine.step([(engine.new_sequence(), [token])])[0] for token in range(100, 140)}
        break_reads(monkeypatch, ranges["expert"], 1000, FAILURE)
        batch = [(engine.new_sequence(), [5, 6, 7])] + [(engine.new_sequence(), [token]) for token in alone]
        failed, *others = engine.step(batch)
        assert isinstance(failed, ExpertReadError)
        fine = {t: r for t, r in zip(alone, others, strict=True) if not isinstance(r, ExpertReadError)}
        assert len(fine) > 2
        assert all(result.tobytes() == alone[token].tobytes() for token, result in fine.items())


def test_after_a_failed_trunk_read_a_new_sequence_has_its_bits(monkeypatch, ranges):
    with k3.load("demo", context=64, trunk_gb=0, cache_gb=0) as model:
        engine = model.engine
        [expected] = engine.step([(engine.new_sequence(), [5, 6, 7])])
        left = break_reads(monkeypatch, ranges["trunk"], 1000, FAILURE)
        engine.step([(engine.new_sequence(), [5])])  # Its blocks had been read ahead.
        with pytest.raises(ReadError):
            engine.step([(engine.new_sequence(), [5, 6, 7])])
        left[0] = 0
        [again] = engine.step([(engine.new_sequence(), [5, 6, 7])])
        assert again.tobytes() == expected.tobytes()


def test_memory_below_the_plan_is_refused_before_anything_is_allocated(cli, monkeypatch):
    monkeypatch.setattr(loading, "Reader", lambda **_: pytest.fail("nothing may be read"))
    complaint = cli.refused("run", "demo", "--ids", "1", "--memory", "30MB", code=2)
    assert "GB are missing" in complaint
    assert "recurrent states" in complaint


def test_a_control_group_below_the_plan_is_refused(cli, monkeypatch):
    monkeypatch.setattr(loading, "group_memory", lambda: GroupMemory(90 << 20, used=1 << 20))
    assert "GB are missing" in cli.refused("run", "demo", "--ids", "1", "--memory", "8GB", code=2)


@pytest.mark.parametrize("fault", ["cut by one byte", "cut in half", "eight bytes more", "gone", "a hole"])
def test_a_damaged_shard_is_refused_before_the_first_token(cli, checkpoint, fault):
    path = checkpoint / "model-00003-of-000012.safetensors"
    size = path.stat().st_size
    if fault == "gone":
        path.unlink()
    elif fault == "a hole":
        data = path.read_bytes()
        with path.open("wb") as file:
            file.write(data[:40960])
            file.truncate(size)
            file.seek(size - 8192)
            file.write(data[-8192:])
    elif fault == "eight bytes more":
        path.write_bytes(path.read_bytes() + bytes(8))
    else:
        os.truncate(path, size - 1 if fault == "cut by one byte" else size // 2)
    complaint = cli.refused("run", checkpoint, "--ids", "1", code=2)
    assert path.name in complaint
