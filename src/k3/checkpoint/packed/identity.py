"""Which checkpoint a packed trunk was made from: hashes of the files that say what it holds, and its size.

Covered are `config.json`, the index file, and size and header of every shard that holds a packed tensor. Weights are
covered by what the manifest says of each tensor, see `k3.checkpoint.packed.format`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from k3.checkpoint.headers.weight_map import INDEX_FILE
from k3.checkpoint.index import TensorEntry
from k3.checkpoint.json_fields import read_small_file
from k3.checkpoint.layout import Layout
from k3.checkpoint.specs import HEAD
from k3.errors import CheckpointError

_LENGTH_BYTES = 8
_SHOWN_DIGITS = 12


class ShardIdentity(msgspec.Struct, frozen=True):
    """A shard's size in bytes, and the SHA-256 of its header with the length field."""

    nbytes: int
    header: str


class Identity(msgspec.Struct, frozen=True):
    """SHA-256 of the config and of the index (None where there is none), and the shards by name."""

    config: str
    index: str | None
    shards: dict[str, ShardIdentity]

    @classmethod
    def of(cls, model_dir: Path, layout: Layout, config: Path | None = None) -> Identity:
        """The identity of the bound checkpoint in `model_dir`; `config` stands for its own config.json.

        Raises:
            ConfigError, CheckpointError: one of the files can't be read.
        """
        index = model_dir / INDEX_FILE
        shards = {entry.path.name: entry.path for entry in trunk_matrices(layout)}
        try:
            return cls(
                hashlib.sha256(read_small_file(config or model_dir / "config.json")).hexdigest(),
                _sha256(index) if index.exists() else None,
                {name: _shard(shards[name]) for name in sorted(shards)},
            )
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or model_dir}: {error.strerror}. Check the checkpoint's files."
            ) from error

    def differences(self, other: Identity) -> Iterator[str]:
        """What `other` has in another way, in words; shards that are not in `other` don't count."""
        yield from _difference("config.json", self.config, other.config)
        yield from _difference(INDEX_FILE, self.index, other.index)
        for name, shard in other.shards.items():
            mine = self.shards.get(name)
            if mine is None:
                yield f"{name}: nothing was packed from a shard of this name"
            elif mine.nbytes != shard.nbytes:
                yield f"{name}: expected {mine.nbytes} bytes, found {shard.nbytes}"
            else:
                yield from _difference(f"{name}, header", mine.header, shard.header)


def trunk_matrices(layout: Layout) -> Iterator[TensorEntry]:
    """What a packed trunk holds, in execution order: the matrices of every bound layer, then the head."""
    for layer in layout.layers:
        for spec in layer.specs:
            if spec.role == "matrix":
                yield layer.tensors[spec.local]
    yield layout.top[HEAD]


def listed(findings: Iterable[str], most: int = 3) -> str:
    """The first few of many findings, and how many more there are."""
    every = list(findings)
    more = f"; and {len(every) - most} more" if len(every) > most else ""
    return "; ".join(every[:most]) + more


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shard(path: Path) -> ShardIdentity:
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        header = prefix + file.read(int.from_bytes(prefix, "little"))
        return ShardIdentity(path.stat().st_size, hashlib.sha256(header).hexdigest())


def _difference(what: str, expected: str | None, found: str | None) -> Iterator[str]:
    if expected != found:
        yield f"{what}: expected {_digest(expected)}, found {_digest(found)}"


def _digest(value: str | None) -> str:
    return "no such file" if value is None else f"SHA-256 {value[:_SHOWN_DIGITS]}..."
