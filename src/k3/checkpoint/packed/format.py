"""A packed trunk: the matrices that every step needs, rewritten in the order in which a step uses them.

    trunk = PackedTrunk.open(trunk_dir, model_dir, layout)
    trunk.path                      # trunk.bin
    for matrix in trunk.matrices:   # of the bound layers, then the head
        matrix.name, matrix.encoding, matrix.table, matrix.panels

The directory holds `trunk.bin`, which is nothing but panels, and `trunk.json`, the manifest below. A panel is a run of
consecutive rows of one matrix, encoded together; it begins on a page. Small tensors and the embedding stay in the
checkpoint's shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, NoReturn

import msgspec

from k3.checkpoint.index import TensorEntry
from k3.checkpoint.layout import Layout
from k3.checkpoint.packed.identity import Identity, listed, trunk_matrices
from k3.errors import CheckpointError

MANIFEST_FILE: Final = "trunk.json"
DATA_FILE: Final = "trunk.bin"
PARTIAL_SUFFIX: Final = ".partial"
"""A trunk is written in a directory with this suffix, which is renamed when it is complete."""

FORMAT: Final = "k3-packed-trunk"
VERSION: Final = 1
PAGE: Final = 4096
"""Panels begin at multiples of this, and the file ends at one."""

PACKED12: Final = "packed12"
ENCODINGS: Final = (PACKED12, "BF16", "F32")
PACKED12_COLS: Final = 32
"""The 12-bit encoding takes BF16 matrices whose columns are a multiple of this: a block."""
PACKED12_BLOCK_BYTES: Final = 48
PACKED12_LISTED_BYTES: Final = 68
"""What a block takes, and what one that doesn't fit the table takes besides (`k3.kernels.packed12`)."""

READ_WHOLE: Final = "self_attn.kv_b_proj.weight"
"""The matrix that a step takes whole: it is one panel."""

_MAX_MANIFEST_BYTES = 1 << 28
_ELEMENT_BYTES = {"BF16": 2, "F32": 4}

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Crc = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Panel(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows `start` to `start + rows`: `nbytes` bytes from byte `offset` of the data file.

    `crc32` is that of these bytes, `source_crc32` that of the same rows in the checkpoint.
    """

    offset: _Size
    nbytes: _Size
    start: _Size
    rows: _Size
    crc32: _Crc
    source_crc32: _Crc


class Source(msgspec.Struct, frozen=True):
    """Where a tensor lies in the checkpoint. `sample` is the CRC-32 of the bytes that `sampled_range` names."""

    shard: str
    offset: _Size
    nbytes: _Size
    dtype: str
    shape: tuple[_Size, _Size]
    sample: _Crc


class PackedTensor(msgspec.Struct, frozen=True):
    """One matrix. `table` is that of the 12-bit encoding: 16 bytes as hexadecimal digits, else empty."""

    name: str
    encoding: str
    table: str
    source: Source
    panels: tuple[Panel, ...]

    @property
    def rows(self) -> int:
        return self.source.shape[0]

    @property
    def cols(self) -> int:
        return self.source.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes as stored, without what aligns the panels."""
        return sum(panel.nbytes for panel in self.panels)


class Manifest(msgspec.Struct, frozen=True):
    """The content of `trunk.json`: the first `layers` layers and the head.

    `file_bytes` is the size of the data file, `stored_bytes` what of it are panels, `source_bytes` what they take in
    the checkpoint. `raw` says that no encoding was wanted.
    """

    format: str
    version: _Size
    complete: bool
    layers: _Size
    raw: bool
    identity: Identity
    source_bytes: _Size
    stored_bytes: _Size
    file_bytes: _Size
    tensors: tuple[PackedTensor, ...]


class _Head(msgspec.Struct, frozen=True):
    """What every version of a manifest has."""

    format: str
    version: _Size


@dataclass(frozen=True)
class PackedTrunk:
    """A checked packed trunk. `matrices` are those of the bound layers in execution order, the head last."""

    directory: Path
    manifest: Manifest
    matrices: tuple[PackedTensor, ...]

    @classmethod
    def open(cls, directory: Path, model_dir: Path, layout: Layout, config: Path | None = None) -> PackedTrunk:
        """The packed trunk in `directory`, for the checkpoint in `model_dir` that was bound to `layout`.

        It may hold more layers than are bound. `config` stands for the checkpoint's own config.json. Weights are not
        read: `k3.storage.packed` compares samples of them.

        Raises:
            CheckpointError: it is damaged, half-written, of another version or of another checkpoint.
        """
        manifest = read_manifest(directory)
        _refuse(directory, manifest.identity.differences(Identity.of(model_dir, layout, config)))
        by_name = {tensor.name: tensor for tensor in manifest.tensors}
        entries = list(trunk_matrices(layout))
        if len(layout.layers) > manifest.layers:
            _fail(
                directory,
                f"expected the first {len(layout.layers)} layers, found a trunk of the first {manifest.layers}",
                "Pack all that you want to run, or ask for fewer --layers.",
            )
        _refuse(directory, _misplaced(by_name, entries))
        _refuse_damage(directory, manifest)
        return cls(directory, manifest, tuple(by_name[entry.name] for entry in entries))

    @property
    def path(self) -> Path:
        """The file that holds the panels."""
        return self.directory / DATA_FILE

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of the bound matrices as stored."""
        return sum(matrix.nbytes for matrix in self.matrices)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a complete packed trunk, its fields checked one by one.

    Raises:
        CheckpointError: there is none, or it is unfinished, malformed or of another version.
    """
    path = directory / MANIFEST_FILE
    raw = _read(directory, path)
    try:
        head = msgspec.json.decode(raw, type=_Head)
        if head.format != FORMAT or head.version != VERSION:
            found = f"{head.format[:40]!r}, version {head.version}"
            _fail(path, f"expected {FORMAT!r}, version {VERSION}, found {found}", _PACK_AGAIN)
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        _fail(path, f"expected the manifest of a packed trunk, found: {error}", _PACK_AGAIN)
    if not manifest.complete:
        _fail(directory, "this packed trunk is half-written: its manifest says that it is not complete", _FINISH)
    return manifest


def sampled_range(nbytes: int) -> tuple[int, int]:
    """First byte and length of the sample of a tensor of `nbytes` bytes: the middle 64 KB, or all of a small one."""
    length = min(nbytes, 1 << 16)
    return (nbytes - length) // 2, length


def can_pack(entry: TensorEntry) -> bool:
    """Whether the 12-bit encoding takes this matrix."""
    return entry.dtype == "BF16" and entry.shape[1] % PACKED12_COLS == 0


_PACK_AGAIN = "Remove this directory and run `k3 pack MODEL TRUNK` again."
_FINISH = "Run `k3 pack MODEL TRUNK` again: it continues where it stopped."


def _read(directory: Path, path: Path) -> bytes:
    try:
        if not path.exists():
            _refuse_absence(directory)
        size = path.stat().st_size
        if not path.is_file() or size > _MAX_MANIFEST_BYTES:
            _fail(path, f"expected a file of at most {_MAX_MANIFEST_BYTES} bytes, found {size}", _PACK_AGAIN)
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}. Check the path and its permissions.") from error


def _refuse_absence(directory: Path) -> NoReturn:
    partial = directory.with_name(directory.name + PARTIAL_SUFFIX)
    if directory.name.endswith(PARTIAL_SUFFIX) and directory.is_dir():
        _fail(directory, "this packed trunk is half-written", _FINISH)
    if partial.is_dir():
        _fail(directory, f"expected a packed trunk, found only the half-written {partial.name} beside it", _FINISH)
    found = f"no {MANIFEST_FILE} in it" if directory.exists() else "nothing"
    _fail(directory, f"expected the directory of a packed trunk, found {found}", "`k3 pack MODEL TRUNK` makes one.")


def _misplaced(by_name: dict[str, PackedTensor], entries: list[TensorEntry]) -> Iterator[str]:
    """Tensors that the checkpoint has elsewhere, or in another form, than they were packed from."""
    for entry in entries:
        tensor = by_name.get(entry.name)
        if tensor is None:
            yield f"{entry.name}: not in this trunk"
            continue
        source = tensor.source
        packed = (source.shard, source.offset, source.nbytes, source.dtype, source.shape)
        now = (entry.path.name, entry.offset, entry.nbytes, entry.dtype, entry.shape)
        if packed != now:
            yield f"{entry.name}: expected {_place(*packed)}, found {_place(*now)}"


def _place(shard: str, offset: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype[:8]} {list(shape)}, {nbytes} bytes from byte {offset} of {shard[:80]}"


def _refuse(directory: Path, differences: Iterator[str]) -> None:
    found = listed(differences)
    if found:
        raise CheckpointError(
            f"{directory}: this packed trunk was made from another checkpoint, or from this one before it changed: "
            f"{found}. Use the checkpoint that it was made from, or pack this one: `k3 pack MODEL TRUNK`, to another "
            "directory."
        )


def _refuse_damage(directory: Path, manifest: Manifest) -> None:
    """Refuse a data file of another size, and panels that could not be what the manifest says."""
    path = directory / DATA_FILE
    try:
        size = path.stat().st_size if path.is_file() else -1
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}. Check the path and its permissions.") from error
    if size < 0:
        _fail(path, "expected the packed matrices, found no such file", _PACK_AGAIN)
    if size != manifest.file_bytes:
        what = "is truncated" if size < manifest.file_bytes else "has grown"
        _fail(path, f"the file {what}: expected {manifest.file_bytes} bytes, found {size}", _PACK_AGAIN)
    problems = listed(problem for tensor in manifest.tensors for problem in _problems(tensor))
    if not problems:
        problems = listed(_disorder(manifest))
    if problems:
        _fail(directory / MANIFEST_FILE, f"the manifest contradicts itself: {problems}", _PACK_AGAIN)


def _problems(tensor: PackedTensor) -> Iterator[str]:
    """What is impossible about one tensor."""
    name, source = tensor.name[:120], tensor.source
    element = _ELEMENT_BYTES.get(source.dtype)
    if element is None or math.prod(source.shape) * element != source.nbytes or not source.nbytes:
        yield f"{name}: {source.dtype[:8]} {list(source.shape)} can't take {source.nbytes} bytes"
        return
    if tensor.encoding not in ENCODINGS:
        yield f"{name}: expected an encoding of {', '.join(ENCODINGS)}, found {tensor.encoding[:40]!r}"
        return
    packed = tensor.encoding == PACKED12
    if packed and (source.dtype != "BF16" or tensor.cols % PACKED12_COLS):
        yield f"{name}: {PACKED12} can't encode {source.dtype[:8]} {list(source.shape)}"
    if not packed and tensor.encoding != source.dtype:
        yield f"{name}: expected its own type {source.dtype}, found encoding {tensor.encoding}"
    if not _is_table(tensor.table, 16 if packed else 0):
        yield f"{name}: expected a table of {16 if packed else 0} bytes, found {tensor.table[:40]!r}"
    yield from _panel_problems(tensor)


def _is_table(text: str, nbytes: int) -> bool:
    return len(text) == 2 * nbytes and all(digit in "0123456789abcdef" for digit in text)


def _panel_problems(tensor: PackedTensor) -> Iterator[str]:
    """Panels that don't cover the rows one after another, or have an impossible size."""
    row = 0
    for number, panel in enumerate(tensor.panels):
        what = f"{tensor.name[:120]}, panel {number}"
        if panel.start != row or not panel.rows:
            yield f"{what}: expected rows from {row} on, found {panel.rows} rows from {panel.start} on"
            return
        if not _is_possible(tensor, panel):
            yield f"{what}: {panel.rows} rows can't take {panel.nbytes} bytes"
        row += panel.rows
    if row != tensor.rows:
        yield f"{tensor.name[:120]}: expected panels of {tensor.rows} rows, found {row}"
    if tensor.name.endswith(READ_WHOLE) and len(tensor.panels) != 1:
        yield f"{tensor.name[:120]}: expected one panel, found {len(tensor.panels)}"


def _is_possible(tensor: PackedTensor, panel: Panel) -> bool:
    """Whether the panel's rows can take so many bytes."""
    if tensor.encoding != PACKED12:
        return panel.nbytes == panel.rows * tensor.cols * _ELEMENT_BYTES[tensor.encoding]
    blocks = panel.rows * tensor.cols // PACKED12_COLS
    listed_blocks, rest = divmod(panel.nbytes - blocks * PACKED12_BLOCK_BYTES, PACKED12_LISTED_BYTES)
    return not rest and 0 <= listed_blocks <= blocks


def _disorder(manifest: Manifest) -> Iterator[str]:
    """Panels that don't lie one after another in the file, or names and sizes that don't add up."""
    names = [tensor.name for tensor in manifest.tensors]
    if len(set(names)) != len(names):
        yield "a tensor is listed twice"
    panels = [panel for tensor in manifest.tensors for panel in tensor.panels]
    if any(panel.offset % PAGE for panel in panels):
        yield f"a panel does not begin at a multiple of {PAGE} bytes"
    for before, panel in pairwise(panels):
        if panel.offset < before.offset + before.nbytes:
            yield f"the panel at byte {panel.offset} begins before {before.offset + before.nbytes}, where another ends"
            return
    if panels and panels[-1].offset + panels[-1].nbytes > manifest.file_bytes:
        yield f"the last panel ends behind the end of the file, at {panels[-1].offset + panels[-1].nbytes}"
    if sum(panel.nbytes for panel in panels) != manifest.stored_bytes:
        yield f"the panels don't add up to the {manifest.stored_bytes} bytes that the manifest names"


def _fail(where: Path, what: str, advice: str) -> NoReturn:
    raise CheckpointError(f"{where}: {what}. {advice}")
