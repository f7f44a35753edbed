"""A packed trunk is used only with the checkpoint that it was made from, and only if it is whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import time

import msgspec
import pytest

from conftest import TINY_A, TINY_C, copy_checkpoint, edit_json, shard_of
from k3.checkpoint.packed import format as pack_format
from k3.checkpoint.packed.format import Manifest, PackedTrunk, read_manifest
from k3.checkpoint.specs import HEAD
from k3.errors import CheckpointError
from k3.kernels import packed12
from pack_helpers import bound, flip_bit, opened, pack


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A packed trunk of the first three layers."""
    path = tmp_path_factory.mktemp("made") / "trunk"
    pack(TINY_C, path, layers=3)
    return path


@pytest.fixture
def trunk(tmp_path, made):
    """A copy that a test may damage."""
    return shutil.copytree(made, tmp_path / "trunk")


def refusal(model, trunk, layers=3):
    with pytest.raises(CheckpointError) as caught:
        opened(model, trunk, layers)
    return str(caught.value)


def edit_manifest(trunk, change):
    edit_json(trunk / "trunk.json", change)


# --- another checkpoint ---


def test_a_trunk_of_another_checkpoint(made):
    said = refusal(TINY_A, made)
    assert "made from another checkpoint, or from this one before it changed" in said
    assert "config.json: expected SHA-256" in said
    assert "k3 pack MODEL TRUNK" in said


def test_a_changed_config(checkpoint, made):
    path = checkpoint / "config.json"
    path.write_bytes(path.read_bytes() + b"\n")
    assert "config.json: expected SHA-256" in refusal(checkpoint, made)


def test_another_config_is_named_at_packing_and_at_use(checkpoint, tmp_path):
    other = tmp_path / "other.json"
    other.write_bytes((checkpoint / "config.json").read_bytes() + b"\n")
    pack(checkpoint, tmp_path / "trunk", config=other)
    layout = bound(checkpoint)
    assert PackedTrunk.open(tmp_path / "trunk", checkpoint, layout, other)
    with pytest.raises(CheckpointError, match=r"config\.json: expected"):
        PackedTrunk.open(tmp_path / "trunk", checkpoint, layout)


def test_a_changed_index(checkpoint, made):
    path = checkpoint / "model.safetensors.index.json"
    path.write_bytes(path.read_bytes() + b"\n")
    assert "model.safetensors.index.json: expected SHA-256" in refusal(checkpoint, made)


def test_an_index_that_is_gone(checkpoint, made):
    (checkpoint / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json: expected SHA-256" in refusal(checkpoint, made)
    assert "found no such file" in refusal(checkpoint, made)


def test_a_checkpoint_without_an_index(checkpoint, tmp_path):
    (checkpoint / "model.safetensors.index.json").unlink()
    pack(checkpoint, tmp_path / "trunk", layers=3)
    assert opened(checkpoint, tmp_path / "trunk", 3)
    assert opened(checkpoint, tmp_path / "trunk", 1)
    shard = shard_of(checkpoint, 2)
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    shard.write_bytes((length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :])
    assert f"{shard.name}: expected {len(raw)} bytes, found" in refusal(checkpoint, tmp_path / "trunk")


def test_a_changed_header_of_the_same_size(checkpoint, made):
    shard = shard_of(checkpoint, 2)
    raw = shard.read_bytes()
    assert raw.count(b'"__metadata__":{"format":"pt"}') == 1
    shard.write_bytes(raw.replace(b'"__metadata__":{"format":"pt"}', b'"__metadata__":{"format":"np"}'))
    assert f"{shard.name}, header: expected SHA-256" in refusal(checkpoint, made)


@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize("layer", [1, None])
def test_a_changed_weight(checkpoint, made, layer, position):
    layout = bound(checkpoint, 3)
    entry = layout.top[HEAD] if layer is None else layout.layers[layer].tensors["self_attn.o_proj.weight"]
    flip_bit(entry, position)
    said = refusal(checkpoint, made)
    assert "made from other weights" in said
    assert f"1 of {len(opened(TINY_C, made, 3).matrices)} tensors differ in a sample: {entry.name}" in said


def test_a_changed_weight_that_is_not_packed(checkpoint, made):
    """Small tensors and the embedding are read from the checkpoint, so they may change."""
    flip_bit(bound(checkpoint, 3).top["model.norm.weight"], 0)
    assert opened(checkpoint, made, 3)


def test_more_layers_than_were_packed(made):
    said = refusal(TINY_C, made, 4)
    assert "3" in said
    assert "4" in said


@pytest.mark.parametrize("field", ["shard", "offset", "nbytes", "dtype", "shape"])
def test_a_tensor_that_lies_elsewhere(trunk, field):
    other = {"shard": "model-9.safetensors", "offset": 7, "nbytes": 2, "dtype": "F32", "shape": [1, 1]}[field]
    edit_manifest(trunk, lambda m: m["tensors"][2]["source"].__setitem__(field, other))
    said = refusal(TINY_C, trunk)
    assert f"{json.loads((trunk / 'trunk.json').read_bytes())['tensors'][2]['name']}: expected" in said


# --- not whole ---


def test_no_such_directory(tmp_path):
    assert "found nothing" in refusal(TINY_C, tmp_path / "trunk")
    (tmp_path / "trunk").mkdir()
    assert "found no trunk.json in it" in refusal(TINY_C, tmp_path / "trunk")


def test_a_half_written_trunk(tmp_path, trunk):
    partial = trunk.rename(tmp_path / "other.partial")
    (partial / "trunk.json").unlink()
    for place in (partial, tmp_path / "other"):
        said = refusal(TINY_C, place)
        assert "half-written" in said
        assert "continues where it stopped" in said


def test_a_manifest_that_says_it_is_not_complete(trunk):
    edit_manifest(trunk, lambda m: m.__setitem__("complete", False))
    assert "half-written" in refusal(TINY_C, trunk)


@pytest.mark.parametrize("change", [-4096, -1, 1])
def test_a_data_file_of_another_size(trunk, change):
    size = (trunk / "trunk.bin").stat().st_size
    os.truncate(trunk / "trunk.bin", size + change)
    said = refusal(TINY_C, trunk)
    assert f"expected {size} bytes, found {size + change}" in said
    assert "k3 pack MODEL TRUNK" in said


def test_no_data_file(trunk):
    (trunk / "trunk.bin").unlink()
    assert "found no such file" in refusal(TINY_C, trunk)


@pytest.mark.parametrize(("field", "value"), [("version", 2), ("format", "another")])
def test_another_version(trunk, field, value):
    edit_manifest(trunk, lambda m: m.__setitem__(field, value))
    said = refusal(TINY_C, trunk)
    assert "expected 'k3-packed-trunk', version 1" in said
    assert str(value) in said


def panel(manifest, tensor, number):
    return manifest["tensors"][tensor]["panels"][number]


OFFSET, NBYTES, START, ROWS = range(4)

CONTRADICTIONS = {
    "unknown encoding": (lambda m: m["tensors"][1].__setitem__("encoding", "packed9"), "found 'packed9'"),
    "encoding of another type": (lambda m: m["tensors"][1].__setitem__("encoding", "F32"), "found encoding F32"),
    "no table": (lambda m: m["tensors"][0].__setitem__("table", ""), "table of 16 bytes"),
    "table that is no number": (lambda m: m["tensors"][0].__setitem__("table", "g" * 32), "table of 16 bytes"),
    "no panels": (lambda m: m["tensors"][0].__setitem__("panels", []), "expected panels of"),
    "rows left out": (lambda m: panel(m, 0, -1).__setitem__(ROWS, 1), "found"),
    "rows twice": (lambda m: m["tensors"][0]["panels"].append(panel(m, 0, 0)), "expected rows from"),
    "first row": (lambda m: panel(m, 0, 0).__setitem__(START, 1), "expected rows from 0 on"),
    "no rows": (lambda m: panel(m, 0, 0).__setitem__(ROWS, 0), "found 0 rows"),
    "no bytes": (lambda m: panel(m, 0, 0).__setitem__(NBYTES, 0), "can't take 0 bytes"),
    "odd offset": (lambda m: panel(m, 0, 0).__setitem__(OFFSET, 5), "multiple of 4096"),
    "overlap": (lambda m: panel(m, 1, 0).__setitem__(OFFSET, panel(m, 0, 0)[OFFSET]), "where another ends"),
    "behind the end": (lambda m: panel(m, -1, -1).__setitem__(OFFSET, 1 << 40), "behind the end of the file"),
    "sum": (lambda m: m.__setitem__("stored_bytes", 1), "add up"),
    "twice": (lambda m: m["tensors"].append(m["tensors"][-1]), "listed twice"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself(trunk, name):
    change, said = CONTRADICTIONS[name]
    edit_manifest(trunk, change)
    found = refusal(TINY_C, trunk)
    assert said in found
    assert "k3 pack MODEL TRUNK" in found


@pytest.mark.parametrize("change", [-68, -1, 1, 68 << 20])
def test_a_panel_of_an_impossible_size(trunk, change):
    """Whole blocks and listed blocks, as the encoding's definition has them."""

    def shrink(manifest):
        first = panel(manifest, 0, 0)
        first[NBYTES] = first[ROWS] * manifest["tensors"][0]["source"]["shape"][1] // 32 * 48 + change

    edit_manifest(trunk, shrink)
    assert "can't take" in refusal(TINY_C, trunk)


def test_the_sizes_of_blocks_are_those_of_the_encoding():
    assert pack_format.PACKED12_COLS == packed12.BLOCK
    assert pack_format.PACKED12_BLOCK_BYTES == packed12.PACKED_BLOCK_BYTES
    assert pack_format.PACKED12_LISTED_BYTES == packed12.LISTED_BLOCK_BYTES


def test_a_matrix_that_is_taken_whole_is_one_panel(tmp_path, monkeypatch):
    from k3.engine.packing import encoding as pack_encoding

    monkeypatch.setattr(pack_encoding, "PANEL_BYTES", 1 << 10)
    monkeypatch.setattr(pack_encoding, "READ_WHOLE", "no such matrix")
    pack(TINY_C, tmp_path / "trunk")
    assert "kv_b_proj.weight: expected one panel, found" in refusal(TINY_C, tmp_path / "trunk", None)


# --- damage at random ---


def scrambled(value, dice):
    """The JSON value with one thing in it changed."""
    odd = [None, -1, 0, 1, 4096, 2**62, 2**63, 10**30, 0.5, "", "x", [], {}, True, "0" * 32]
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(list(value))
        if dice.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: scrambled(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.9:
        place = dice.randrange(len(value))
        if dice.random() < 0.1:
            return value[:place] + value[place + 1 :]
        return [*value[:place], scrambled(value[place], dice), *value[place + 1 :]]
    if type(value) is int and dice.random() < 0.5:
        return value + dice.choice([-4096, -1, 1, 4096])
    return dice.choice(odd)


def outcome(trunk, layout):
    """The opened trunk, or the words in which it was refused."""
    try:
        return PackedTrunk.open(trunk, TINY_C, layout)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(4))
def test_a_scrambled_manifest_is_refused_or_leads_to_every_row(trunk, made, seed):
    dice = random.Random(seed)
    path, layout = trunk / "trunk.json", bound(TINY_C, 3)
    shapes = [matrix.source.shape for matrix in PackedTrunk.open(made, TINY_C, layout).matrices]
    whole = json.loads(path.read_bytes())
    refused = 0
    for _ in range(100):
        path.write_text(json.dumps(scrambled(whole, dice)))
        found = outcome(trunk, layout)
        if isinstance(found, str):
            refused += 1
            assert str(trunk) in found
            assert len(found) < 2000
            continue
        assert [matrix.source.shape for matrix in found.matrices] == shapes
        for matrix in found.matrices:
            rows = [row for panel in matrix.panels for row in range(panel.start, panel.start + panel.rows)]
            assert rows == list(range(matrix.rows))
            assert all(panel.offset + panel.nbytes <= found.manifest.file_bytes for panel in matrix.panels)
    assert refused > 50


@pytest.mark.parametrize("seed", range(4))
def test_a_manifest_with_flipped_bytes(trunk, seed):
    dice = random.Random(seed)
    path, layout = trunk / "trunk.json", bound(TINY_C, 3)
    whole = path.read_bytes()
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(dice.choice([1, 1, 2, 20])):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged[: dice.choice([len(damaged), dice.randrange(len(damaged))])])
        found = outcome(trunk, layout)
        assert not isinstance(found, str) or str(trunk) in found


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"[" * 100_000, b'{"format":' * 50_000, b"\xff\xfe"])
def test_a_manifest_that_is_none(trunk, content):
    (trunk / "trunk.json").write_bytes(content)
    assert "trunk.json" in refusal(TINY_C, trunk)


def test_a_manifest_that_is_a_folder(trunk):
    (trunk / "trunk.json").unlink()
    (trunk / "trunk.json").mkdir()
    assert "expected a file" in refusal(TINY_C, trunk)


def test_ten_thousand_panels_are_read_at_once(trunk, made):
    manifest = read_manifest(made)
    tensor = manifest.tensors[0]
    many = [msgspec.structs.replace(tensor, name=f"{n}", panels=tensor.panels[:1] * 10) for n in range(1200)]
    (trunk / "trunk.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, tensors=tuple(many))))
    assert (trunk / "trunk.json").stat().st_size < 2 << 20
    began = time.process_time()
    assert isinstance(read_manifest(trunk), Manifest)
    assert time.process_time() - began < 1


def test_a_copied_checkpoint_is_the_same(tmp_path, made):
    assert opened(copy_checkpoint(TINY_C, tmp_path / "copy"), made, 3)
