"""Checkpoints and state files: whatever way a sequence came to its tokens, it goes on with the same bits."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc

import numpy as np
import pytest

import k3
from conftest import TINY_A, TINY_C, edit_json
from k3.engine.states.file import StateFile, StateHeader, write_state
from k3.errors import K3Error, StateFileError, UsageError, VoidSequenceError

SHARED_PART = [7, 31, 200, 4, 4, 90, 18, 250, 61, 12, 133]
ONE = [*SHARED_PART, 5, 77, 140, 9, 26]
OTHER = [*SHARED_PART, 6, 111, 3]
CHUNKS = (1, 3, 64)


@pytest.fixture(scope="module")
def model():
    with k3.load(TINY_C, context=64, threads=2) as loaded:
        yield loaded


@pytest.fixture
def engine(model):
    return model.engine


def run(engine, sequence, ids, chunk=64):
    """The logits of every position of `ids`."""
    rows = []
    for start in range(0, len(ids), chunk):
        [result] = engine.step([(sequence, ids[start : start + chunk])], logits="all")
        assert not isinstance(result, K3Error), result
        rows.append(result)
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def fresh(model):
    """The logits of both prompts in a sequence that has seen nothing else."""
    return {tuple(ids): run(model.engine, model.engine.new_sequence(), ids) for ids in (ONE, OTHER)}


def same(found, expected):
    return found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("length", range(1, len(OTHER)))
def test_every_split_of_two_prompts_gives_the_bits_of_a_fresh_run(engine, fresh, tmp_path, length):
    shared = min(length, len(SHARED_PART))
    first = engine.new_sequence()
    run(engine, first, ONE[:shared], chunk=2)
    kept = first.checkpoint()
    apart = kept.detached()
    first.save(tmp_path / "state")
    run(engine, first, ONE[shared:])
    rest, expected = OTHER[shared:], fresh[tuple(OTHER)][shared:]
    used = engine.new_sequence()
    run(engine, used, ONE)
    for chunk in CHUNKS:
        first.restore(kept)
        assert first.tokens == tuple(OTHER[:shared])
        assert same(run(engine, first, rest, chunk), expected)
        used.restore(apart)
        assert same(run(engine, used, rest, chunk), expected)
        assert same(run(engine, engine.load_sequence(tmp_path / "state"), rest, chunk), expected)
    first.restore(kept)
    assert same(run(engine, first, ONE[shared:]), fresh[tuple(ONE)][shared:])


@pytest.mark.parametrize("length", range(len(ONE) + 1))
def test_a_saved_prefix_goes_on_and_can_be_saved_again(engine, fresh, tmp_path, length):
    path = tmp_path / "state"
    sequence = engine.new_sequence()
    for token in ONE[:length]:
        run(engine, sequence, [token])
        sequence.save(path)
        sequence = engine.load_sequence(path)
    if length == len(ONE):
        return
    assert same(run(engine, sequence, ONE[length:], 1), fresh[tuple(ONE)][length:])


def test_a_checkpoint_at_the_begin_empties_a_used_sequence(engine, fresh):
    sequence = engine.new_sequence()
    nothing = sequence.checkpoint()
    run(engine, sequence, ONE)
    sequence.restore(nothing)
    assert len(sequence) == 0
    assert same(run(engine, sequence, OTHER, 1), fresh[tuple(OTHER)])


def test_a_checkpoint_leads_a_void_sequence_back(engine, fresh, monkeypatch):
    sequence = engine.new_sequence()
    run(engine, sequence, ONE[:6])
    kept = sequence.checkpoint()
    monkeypatch.setattr(engine._transformer, "logits", lambda *_: np.full((1, 272), np.nan, np.float32))
    [result] = engine.step([(sequence, ONE[6:])])
    assert isinstance(result, K3Error)
    monkeypatch.undo()
    for use in (sequence.checkpoint, lambda: sequence.save("never-written"), lambda: run(engine, sequence, [1])):
        with pytest.raises(VoidSequenceError, match="checkpoint"):
            use()
    sequence.restore(kept)
    assert same(run(engine, sequence, ONE[6:]), fresh[tuple(ONE)][6:])


def test_a_checkpoint_behind_which_its_sequence_went_back_is_refused(engine, fresh):
    sequence = engine.new_sequence()
    run(engine, sequence, ONE[:4])
    early = sequence.checkpoint()
    run(engine, sequence, ONE[4:9])
    late = sequence.checkpoint()
    apart = late.detached(early.detached())
    sequence.restore(late)
    sequence.restore(early)
    run(engine, sequence, [1, 2, 3, 4, 5])
    for use in (lambda: sequence.restore(late), lambda: engine.new_sequence().restore(late), late.detached):
        with pytest.raises(UsageError, match="no longer holds"):
            use()
    assert sequence.tokens == (*ONE[:4], 1, 2, 3, 4, 5)
    sequence.restore(apart)
    assert same(run(engine, sequence, ONE[9:]), fresh[tuple(ONE)][9:])


def test_a_detached_checkpoint_shares_the_rows_of_a_prefix(engine):
    sequence = engine.new_sequence()
    run(engine, sequence, ONE[:4])
    base = sequence.checkpoint().detached()
    run(engine, sequence, ONE[4:])
    whole, shared = sequence.checkpoint().detached(), sequence.checkpoint().detached(base)
    assert shared.latents[0] is base.latents[0]
    assert sum(rows.nbytes for rows in shared.latents) == sum(rows.nbytes for rows in whole.latents) > 0
    kda = [state for state in sequence._states if not hasattr(state, "rows")]
    assert shared.recurrent_bytes == sum(array.nbytes for state in kda for array in state.arrays) > 0


def test_a_state_needs_room_in_the_context(model, tmp_path):
    sequence = model.engine.new_sequence()
    run(model.engine, sequence, ONE)
    sequence.save(tmp_path / "state")
    kept = sequence.checkpoint().detached()
    with k3.load(TINY_C, context=8, threads=1) as small:
        for use in (
            lambda: small.engine.load_sequence(tmp_path / "state"),
            lambda: small.engine.new_sequence().restore(kept),
        ):
            with pytest.raises(UsageError, match=r"16 tokens.*context of 8 positions.*--context"):
                use()
    with k3.load(TINY_C, context=16, threads=1, trunk_gb=0, cache_gb=0, chunk=1) as other:
        assert other.engine.load_sequence(tmp_path / "state").tokens == tuple(ONE)


@pytest.fixture
def saved(engine, tmp_path):
    sequence = engine.new_sequence()
    run(engine, sequence, ONE)
    path = tmp_path / "a.state"
    sequence.save(path)
    return path


def split(path):
    """The header of a state file as JSON, and what stands behind it."""
    raw = path.read_bytes()
    assert raw[:8] == b"k3state\n"
    [length] = struct.unpack("<Q", raw[8:16])
    return json.loads(raw[16 : 16 + length]), raw[16 + length :]


def with_header(path, change):
    header, rest = split(path)
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(b"k3state\n" + struct.pack("<Q", len(raw)) + raw + rest)


def test_a_state_file_is_the_arrays_and_their_checksum(engine, saved):
    header, rest = split(saved)
    assert (header["version"], header["dtype"], header["tokens"]) == (1, "<f4", ONE)
    config = engine.config
    kda = config.linear_attn_config
    state = kda.num_heads * kda.head_dim * (kda.head_dim + 3 * (kda.short_conv_kernel_size - 1))
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    kinds = [config.is_kda(index) for index in range(config.num_hidden_layers)]
    floats = sum(state if is_kda else len(ONE) * latent for is_kda in kinds)
    assert header["nbytes"] == 4 * floats == len(rest) - 32
    assert list(saved.parent.iterdir()) == [saved]


CUTS = (0, 7, 8, 15, 16, 100, -1, -32, -33, -4096)


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_state_file_is_refused(engine, saved, cut):
    raw = saved.read_bytes()
    saved.write_bytes(raw[:cut])
    with pytest.raises(StateFileError, match=r"a\.state: this (state file is damaged or cut off|is no state file)"):
        engine.load_sequence(saved)
    saved.write_bytes(raw + b"\0" * 8)
    with pytest.raises(StateFileError, match=f"expected {len(raw)} bytes, found {len(raw) + 8}"):
        engine.load_sequence(saved)


def test_every_kind_of_damaged_byte_is_found(engine, saved):
    raw = saved.read_bytes()
    start = len(raw) - split(saved)[0]["nbytes"] - 32
    for place in (0, 9, 17, start - 2, start, start + 1000, len(raw) - 33, len(raw) - 1):
        saved.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        with pytest.raises(StateFileError, match=r"a\.state"), StateFile(saved, engine.identity()) as file:
            file.verify()
        with pytest.raises(StateFileError, match=r"a\.state"):
            engine.load_sequence(saved)


def test_a_newer_form_is_refused_by_its_number(engine, saved):
    with_header(saved, lambda header: header.update(version=2, tokens="in another way"))
    with pytest.raises(StateFileError, match=r"a\.state.*another version of k3: expected form 1, found 2"):
        engine.load_sequence(saved)


def test_another_precision_is_refused(engine, saved):
    with_header(saved, lambda header: header.update(dtype="<f8"))
    with pytest.raises(StateFileError, match=r"expected numbers of the kind '<f4', found '<f8'"):
        engine.load_sequence(saved)


def test_a_state_of_another_checkpoint_is_refused_with_the_difference(saved, checkpoint):
    message = r"a\.state.*another checkpoint.*config\.json: expected SHA-256"
    with k3.load(TINY_A, context=64, threads=1) as other, pytest.raises(StateFileError, match=message):
        other.engine.load_sequence(saved)
    message = "layers: expected 2, found 9"
    with k3.load(TINY_C, context=64, threads=1, layers=2) as fewer, pytest.raises(StateFileError, match=message):
        fewer.engine.load_sequence(saved)
    edit_json(checkpoint / "config.json", lambda config: config.update(note="edited"))
    with k3.load(checkpoint, context=64, threads=1) as edited, pytest.raises(StateFileError, match=r"config\.json"):
        edited.engine.load_sequence(saved)
    with k3.load(checkpoint, context=64, threads=1, config=TINY_C / "config.json") as copy:
        assert copy.engine.load_sequence(saved).tokens == tuple(ONE)


def test_a_missing_file_and_a_folder_are_refused_by_name(engine, tmp_path):
    with pytest.raises(StateFileError, match=r"nothing\.state.*No such file"):
        engine.load_sequence(tmp_path / "nothing.state")
    with pytest.raises(StateFileError, match="Is a directory"):
        engine.load_sequence(tmp_path)


def test_a_failed_save_leaves_the_old_file(engine, saved, monkeypatch):
    before = saved.read_bytes()
    sequence = engine.new_sequence()
    run(engine, sequence, OTHER)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(K3Error, match=r"a\.state: the state could not be written: No space left"):
        sequence.save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_saving_and_loading_make_no_second_copy(engine, tmp_path):
    size = 64 << 20
    path = tmp_path / "state"
    arrays = [np.arange(size // 8, dtype=np.float32).reshape(1024, -1), np.ones(size // 8, np.float32)]
    expected = [array.copy() for array in arrays]
    header = StateHeader(model=engine.identity(), tokens=[1] * 9, nbytes=size)
    tracemalloc.start()
    write_state(path, header, arrays)
    for array in arrays:
        array[...] = 0
    with StateFile(path, engine.identity()) as file:
        file.verify().read_into(arrays)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(same(*pair) for pair in zip(arrays, expected, strict=True))
    assert peak < size / 8
