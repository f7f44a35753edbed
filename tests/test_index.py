"""The index over all shards: what it holds, and every contradiction refused."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from conftest import (
    REPOSITORY,
    TINY_A,
    TINY_C,
    edit_json,
    edit_shard,
    read_shard,
    shard_of,
    write_shard,
)
from k3.checkpoint.headers import placements
from k3.checkpoint.index import INDEX_FILE, TensorIndex
from k3.errors import CheckpointError, UsageError

NORM = "language_model.model.layers.0.input_layernorm.weight"


def refusal(model_dir: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        TensorIndex.open(model_dir, **options)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 3000
    return str(caught.value)


def weight_map(model_dir: Path) -> dict[str, str]:
    mapping: dict[str, str] = json.loads((model_dir / INDEX_FILE).read_bytes())["weight_map"]
    return mapping


@pytest.mark.parametrize("source", [TINY_A, TINY_C], ids=["tiny-a", "tiny-c"])
def test_every_tensor_reads_as_the_library_reads_it(source: Path) -> None:
    index = TensorIndex.open(source)
    mapping = weight_map(source)
    assert len(index) == len(mapping)
    assert set(index) == set(mapping)
    for shard in sorted(set(mapping.values())):
        raw = (source / shard).read_bytes()
        header, data = read_shard(source / shard)
        with safe_open(source / shard, "numpy") as file:
            assert sorted(file.keys()) == sorted(name for name, home in mapping.items() if home == shard)
            for name in file.keys():  # noqa: SIM118
                entry = index[name]
                assert name in index
                assert (entry.name, entry.shard_path) == (name, source / shard)
                assert list(entry.shape) == file.get_slice(name).get_shape()
                assert entry.dtype == file.get_slice(name).get_dtype()
                begin, end = header[name]["data_offsets"]
                stored = raw[entry.offset : entry.offset + entry.nbytes]
                assert stored == data[begin:end]
                if entry.dtype != "BF16":  # NumPy has no such type.
                    assert stored == file.get_tensor(name).tobytes()


def test_bf16_reads_as_the_library_reads_it() -> None:
    """The library returns raw bytes of BF16 through its bytes interface."""
    from safetensors import deserialize

    index = TensorIndex.open(TINY_C)
    for path in index.shards:
        raw = path.read_bytes()
        for name, tensor in deserialize(raw):
            entry = index[name]
            assert raw[entry.offset : entry.offset + entry.nbytes] == bytes(tensor["data"])


def test_names_that_are_not_there() -> None:
    index = TensorIndex.open(TINY_C)
    for name in (
        "", "x", "language_model.model.layers.9.input_layernorm.weight", NORM + ".", NORM[:-1], "0", "\0",
        "language_model.model.layers.00.input_layernorm.weight", NORM.replace("0", "10000"),
        NORM.replace("0", "\0"), NORM.replace("0", "-1"), NORM.replace("0", "٠"),
    ):  # fmt: skip
        assert name not in index
        assert index.get(name) is None
    with pytest.raises(CheckpointError, match=r"'nothing' is not in the 12 shards") as caught:
        index["nothing"]
    assert caught.value.exit_code == 2


def test_odd_names_keep_their_places(tmp_path: Path) -> None:
    """Digit runs with leading zeros, long ones, many of them, none, and other scripts' digits."""
    names = [
        "a", "0", "00", "0.0", "1.2.3", "1.2.3.4.5", "x007", "x7", "x70000", "x9999", "x10000", "layer12345.6",
        "12", "1_2", "a12b", "a1b2", "a0b0c0", "a0b0c00", "é١٢", "é12", "{}", "{}1", "x99999999999999999999", "1" * 40,
    ]  # fmt: skip
    random.Random(3).shuffle(names)
    header = {n: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, n in enumerate(names)}
    path = write_shard(tmp_path / "model.safetensors", header, bytes(len(names)))
    index = TensorIndex.open(tmp_path)
    start = path.stat().st_size - len(names)
    assert sorted(index) == sorted(names)
    assert [index[n].offset - start for n in names] == list(range(len(names)))
    for absent in ("x07", "x0070000", "1.2.3.4", "1.2.3.4.6", "a2b1", "a01b2", "013"):
        assert absent not in index


def test_find_many() -> None:
    index = TensorIndex.open(TINY_A)
    pattern = "language_model.model.layers.{}.block_sparse_moe.experts.{}.w{}.weight_packed"
    rows = index.find(pattern, np.arange(14)[:, None], np.arange(17), 2)
    assert rows.shape == (14, 17)
    for layer in range(14):
        for expert in range(17):
            name = pattern.format(layer, expert, 2)
            row = rows[layer, expert]
            assert (row >= 0) == (name in index) == (1 <= layer < 13 and expert < 16)
            if row >= 0:
                assert index.entry(row) == index[name]
    assert index.find(pattern, 1, [-1, 0, 9999, 10_000, 16_384, 2**40], 2).tolist() == [-1, rows[1, 0], *[-1] * 4]
    assert index.find("nothing.{}", [1, 2]).tolist() == [-1, -1]
    with pytest.raises(ValueError, match="braces"):
        index.find("x.{}", 1, 2)


def test_without_an_index(checkpoint: Path, tmp_path: Path) -> None:
    whole = TensorIndex.open(checkpoint)
    (checkpoint / INDEX_FILE).unlink()
    (checkpoint / "other.safetensors").write_bytes(b"not read beside model-*")
    found = TensorIndex.open(checkpoint)
    assert sorted(found) == sorted(whole)
    assert all(found[name] == whole[name] for name in whole)
    shard_of(checkpoint, 12).unlink()
    assert len(TensorIndex.open(checkpoint)) < len(whole)
    single = tmp_path / "single"
    single.mkdir()
    (single / "anything.safetensors").write_bytes(shard_of(checkpoint, 3).read_bytes())
    assert len(TensorIndex.open(single).shards) == 1
    (single / "model.safetensors").write_bytes(shard_of(checkpoint, 2).read_bytes())
    assert [path.name for path in TensorIndex.open(single).shards] == ["model.safetensors"]


def test_more_than_one_directory(checkpoint: Path, tmp_path: Path) -> None:
    """Shards may be spread over drives; of copies of the same size the first counts."""
    whole = TensorIndex.open(checkpoint)
    extra = tmp_path / "extra"
    extra.mkdir()
    moved = shard_of(checkpoint, 5)
    moved.rename(extra / moved.name)
    (extra / shard_of(checkpoint, 6).name).write_bytes(bytes(shard_of(checkpoint, 6).stat().st_size))
    index = TensorIndex.open(checkpoint, extra_dirs=[extra])
    assert sorted(index) == sorted(whole)
    assert index["language_model.model.layers.4.self_attn.A_log"].shard_path == extra / moved.name
    assert f"or {extra}: {moved.name}" in refusal(checkpoint, extra_dirs=[tmp_path]).replace(str(tmp_path), str(extra))
    with pytest.raises(UsageError, match="not a directory"):
        TensorIndex.open(checkpoint, extra_dirs=[tmp_path / "none"])


@pytest.mark.parametrize("with_index", [True, False])
def test_copies_of_different_sizes(checkpoint: Path, tmp_path: Path, with_index: bool) -> None:
    """Where a name is in two directories, a size that differs shows that one file is not that shard."""
    places = [tmp_path / "one", tmp_path / "two"]
    for place in places:
        place.mkdir()
    shard = shard_of(checkpoint, 6)
    size = shard.stat().st_size
    (places[0] / shard.name).write_bytes(bytes(size))
    (places[1] / shard.name).write_bytes(bytes(size - 1))
    if not with_index:
        (checkpoint / INDEX_FILE).unlink()
    message = refusal(checkpoint, extra_dirs=places)
    assert f"{shard} and {places[1] / shard.name} have one name and different sizes: {size} and {size - 1}" in message
    assert len(TensorIndex.open(checkpoint, extra_dirs=places[:1])) == len(TensorIndex.open(TINY_C))


def test_missing_shards_name_all_places(checkpoint: Path, tmp_path: Path) -> None:
    extras = [tmp_path / name for name in ("a", "b")]
    for extra in extras:
        extra.mkdir()
    absent = shard_of(checkpoint, 4)
    absent.unlink()
    places = f"{checkpoint} or {extras[0]} or {extras[1]}"
    assert f"names 1 files that are not in {places}: {absent.name}." in refusal(checkpoint, extra_dirs=extras)


def test_wanted_shards_only(checkpoint: Path) -> None:
    wanted = {NORM, "language_model.lm_head.weight", "not there"}
    for number in (*range(2, 10), 11, 12):
        shard_of(checkpoint, number).unlink()
    for rule in (wanted, sorted(wanted), wanted.__contains__):
        index = TensorIndex.open(checkpoint, rule)
        assert sorted(p.name[:11] for p in index.shards) == ["model-00001", "model-00010"]
        assert NORM in index
        assert "language_model.lm_head.weight" in index
    assert "names 10 files that are not in" in refusal(checkpoint)


def test_absent_shards(checkpoint: Path) -> None:
    absent = shard_of(checkpoint, 4)
    absent.unlink()
    message = refusal(checkpoint)
    assert f"{checkpoint / INDEX_FILE} names 1 files that are not in {checkpoint}: {absent.name}." in message
    assert "Complete the download" in message


def test_tensor_absent_from_its_shard(checkpoint: Path) -> None:
    path = shard_of(checkpoint, 1)
    edit_json(checkpoint / INDEX_FILE, lambda i: i["weight_map"].update({"ghost.weight": path.name}))
    message = refusal(checkpoint)
    assert f"{path} and {INDEX_FILE} disagree" in message
    assert "'ghost.weight' is placed in this shard by the index but absent from it" in message


def test_tensor_renamed_in_its_shard(checkpoint: Path) -> None:
    path = shard_of(checkpoint, 1)
    edit_shard(path, lambda header: header.update({"other": header.pop(NORM)}))
    message = refusal(checkpoint)
    assert f"'{NORM}' is placed in this shard by the index but absent from it" in message
    assert "'other' is in this shard, but the index doesn't place it here" in message


@pytest.mark.parametrize("home", [2, 12])
def test_tensor_placed_in_another_shard(checkpoint: Path, home: int) -> None:
    """Whether that other shard is read earlier or later, or not at all."""
    path = shard_of(checkpoint, home)
    edit_json(checkpoint / INDEX_FILE, lambda i: i["weight_map"].update({NORM: path.name}))
    said = f"'{NORM}' is in this shard, but the index places it in {path.name}"
    assert said in refusal(checkpoint)
    path.unlink()
    assert said in refusal(checkpoint, wanted=["language_model.model.layers.0.self_attn.A_log"])


def test_tensor_that_the_index_does_not_name(checkpoint: Path) -> None:
    edit_json(checkpoint / INDEX_FILE, lambda i: i["weight_map"].pop(NORM))
    message = refusal(checkpoint)
    assert str(shard_of(checkpoint, 1)) in message
    assert f"'{NORM}' is in this shard, but the index doesn't place it here" in message


def test_many_disagreements_are_counted(checkpoint: Path) -> None:
    name = shard_of(checkpoint, 1).name
    edit_json(checkpoint / INDEX_FILE, lambda i: i["weight_map"].update({f"ghost{n}": name for n in range(1000)}))
    assert "; and 995 more." in refusal(checkpoint)


def test_the_same_tensor_in_two_shards(checkpoint: Path) -> None:
    (checkpoint / INDEX_FILE).unlink()
    twin = checkpoint / "model-00099-of-000012.safetensors"
    twin.write_bytes(shard_of(checkpoint, 1).read_bytes())
    message = refusal(checkpoint)
    assert "is in two shards" in message
    assert str(twin) in message
    assert str(shard_of(checkpoint, 1)) in message


@pytest.mark.parametrize(
    "shard",
    [
        "../model-00001-of-000012.safetensors", "/etc/passwd", "/tmp/x.safetensors", "..", ".", "", "a/b.safetensors",
        "a\\b.safetensors", "x\0.safetensors", "model-00001-of-000012.bin", "./x.safetensors", "x.safetensors/",
    ],
)  # fmt: skip
def test_shards_outside_the_directory(checkpoint: Path, shard: str) -> None:
    edit_json(checkpoint / INDEX_FILE, lambda i: i["weight_map"].update({NORM: shard}))
    assert f"plain names of .safetensors files, found {shard!r}" in refusal(checkpoint)


def test_a_name_too_long_for_a_file(checkpoint: Path) -> None:
    edit_json(checkpoint / INDEX_FILE, lambda i: i["weight_map"].update({NORM: "x" * 5000 + ".safetensors"}))
    with pytest.raises(CheckpointError, match="names 1 files that are not in"):
        TensorIndex.open(checkpoint)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "found: Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `weight_map`"),
        (b'{"weight_map": []}', "Expected `object`, got `array`"),
        (b'{"weight_map": {"a": 1}}', "Expected `str`, got `int`"),
        (b'{"weight_map": {}}', "an empty one"),
        (b'{"weight_map": {"a": "x.safetensors"}', "found: Input data was truncated"),
        (b'{"weight_map": {"\xff": "x.safetensors"}}', "UTF-8"),
        (b'{"metadata": 4, "weight_map": {"a": "x.safetensors"}}', "Expected `object | null`, got `int`"),
        (b'{"x":' * 9999, "recursion"),
    ],
)
def test_malformed_index(checkpoint: Path, raw: bytes, said: str) -> None:
    (checkpoint / INDEX_FILE).write_bytes(raw)
    message = refusal(checkpoint)
    assert str(checkpoint / INDEX_FILE) in message
    assert said in message


def with_escapes(text: str) -> str:
    return text.replace("language_model", r"l\u0061nguage_model")


@pytest.mark.parametrize(
    "write",
    [
        lambda index: json.dumps(index, separators=(",", ":")),
        lambda index: json.dumps(index, indent="\t").replace("\n", "\r\n"),
        lambda index: json.dumps(dict(reversed(index.items())), indent=2),
        lambda index: json.dumps({"other": [{"x": "}}"}], **index}),
        lambda index: json.dumps({"weight_map": index["weight_map"]}),
        lambda index: json.dumps(index).replace('": "model', '" :  "model', 40),
        lambda index: with_escapes(json.dumps(index, indent=2)),
        lambda index: "\n" * 5000 + json.dumps(index, indent=2) + " " * 5000,
    ],
    ids=["compact", "tabs", "map first", "other fields", "no metadata", "uneven", "escapes", "space"],
)
@pytest.mark.parametrize("piece", [1 << 20, 1000])
def test_index_written_in_other_ways(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[dict[str, Any]], str], piece: int
) -> None:
    monkeypatch.setattr(placements, "_PIECE", piece)
    path = checkpoint / INDEX_FILE
    mapping = weight_map(checkpoint)
    path.write_text(write(json.loads(path.read_bytes())), newline="")
    assert weight_map(checkpoint) == mapping
    index = TensorIndex.open(checkpoint)
    assert {name: index[name].shard_path.name for name in index} == mapping


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n  ", ": ")])
@pytest.mark.parametrize("form", ["plain", "escaped", "apart"])
def test_a_name_that_occurs_twice_in_the_index(checkpoint: Path, separators: tuple[str, str], form: str) -> None:
    """Even in the same shard, where nothing would be lost."""
    path = checkpoint / INDEX_FILE
    index = json.loads(path.read_bytes())
    text = json.dumps(index, separators=separators)
    again = NORM if form != "escaped" else NORM.replace("n", "\\u006e")
    member = f'"{again}"{separators[1]}"{index["weight_map"][NORM]}"'
    if form == "apart":
        text = text.removesuffix("}}") + separators[0] + member + "}}"
    else:
        place = text.index(f'"{NORM}"')
        text = text[:place] + member + separators[0] + text[place:]
    path.write_text(text)
    assert f"expected every tensor once in weight_map, {NORM!r} occurs more than once" in refusal(checkpoint)


def test_families(checkpoint: Path) -> None:
    """Names that differ in their second number only, of one kind."""

    def family(name: str) -> str:
        return re.sub(r"^(\D*\d+\D+)\d+", r"\1*", name)

    index = TensorIndex.open(checkpoint)
    expected: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for name in index:
        entry = index[name]
        expected[family(name), entry.dtype, entry.shape] += 1
    found = {(family(f.name), f.kind.dtype, f.kind.shape): f.count for f in index.families()}
    assert found == dict(expected)
    assert sum(f.count for f in index.families()) == len(index)


def test_an_index_that_is_not_a_file(checkpoint: Path) -> None:
    (checkpoint / INDEX_FILE).unlink()
    (checkpoint / INDEX_FILE).mkdir()
    assert INDEX_FILE in refusal(checkpoint)
    (checkpoint / INDEX_FILE).rmdir()
    with (checkpoint / INDEX_FILE).open("wb") as file:
        file.truncate(1 << 41)
    assert f"found {1 << 41}" in refusal(checkpoint)


def test_metadata_is_optional(checkpoint: Path) -> None:
    assert TensorIndex.open(checkpoint).metadata["total_size"] > 0
    edit_json(checkpoint / INDEX_FILE, lambda i: i.pop("metadata"))
    assert TensorIndex.open(checkpoint).metadata == {}


def test_damaged_shards_are_named(checkpoint: Path) -> None:
    path = shard_of(checkpoint, 7)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    assert f"{path}: the file is truncated: expected {size} bytes, found {size - 1}" in refusal(checkpoint)


def test_directories_without_a_checkpoint(tmp_path: Path) -> None:
    assert f"expected {INDEX_FILE} or *.safetensors files, found neither" in refusal(tmp_path)
    with pytest.raises(UsageError, match="is not a directory") as caught:
        TensorIndex.open(tmp_path / "absent")
    assert caught.value.exit_code == 2


def test_holes_only_where_the_index_announces_them(checkpoint: Path) -> None:
    path = shard_of(checkpoint, 10)
    raw = path.read_bytes()
    with path.open("wb") as file:
        file.write(raw[:8192])
        file.truncate(len(raw))
    if path.stat().st_blocks * 512 >= len(raw):
        pytest.skip("the file system of the temporary directory keeps no holes")
    assert f"{path}: a hole: bytes from" in refusal(checkpoint)
    edit_json(checkpoint / INDEX_FILE, lambda i: i["metadata"].update(synthetic=1))
    assert "a hole" in refusal(checkpoint)
    edit_json(checkpoint / INDEX_FILE, lambda i: i["metadata"].update(synthetic=True))
    TensorIndex.open(checkpoint)


def test_columns_are_compact() -> None:
    index = TensorIndex.open(TINY_A)
    assert index.nbytes <= 22 * len(index)


def test_needs_no_native_extension() -> None:
    """Reading a checkpoint's headers must work where the extension was not built."""
    code = (
        "import sys; import k3.checkpoint.layout, k3.checkpoint.config; "
        "print([m for m in sys.modules if m.startswith('k3.') and not m.startswith(('k3.checkpoint', 'k3.errors'))])"
    )
    path = os.pathsep.join([str(REPOSITORY / "src"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": path}
    )
    assert done.stdout.strip() == "[]"
