"""Which weights a state belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from k3.checkpoint.headers.weight_map import INDEX_FILE
from k3.checkpoint.layout import Layout
from k3.checkpoint.packed.identity import Identity

_SHOWN_DIGITS = 12


class ModelIdentity(msgspec.Struct, frozen=True):
    """SHA-256 of config, index (None where there is none) and the shards' sizes and headers; how many layers are bound.

    It doesn't depend on how the weights are loaded: a packed trunk has the identity of its checkpoint.
    """

    config: str
    index: str | None
    shards: str
    layers: int

    @classmethod
    def of(cls, model_dir: Path, layout: Layout, config: Path | None = None) -> ModelIdentity:
        """The identity of the bound checkpoint in `model_dir`; `config` stands for its own config.json.

        Raises:
            ConfigError, CheckpointError: one of the files can't be read.
        """
        files = Identity.of(model_dir, layout, config)
        shards = hashlib.sha256(msgspec.json.encode(files.shards)).hexdigest()
        return cls(files.config, files.index, shards, len(layout.layers))

    def differences(self, other: ModelIdentity) -> Iterator[str]:
        """What `other` has in another way, in words."""
        if self.layers != other.layers:
            yield f"layers: expected {other.layers}, found {self.layers}"
        for what, mine, theirs in (
            ("config.json", self.config, other.config),
            (INDEX_FILE, self.index, other.index),
            ("the shards' headers", self.shards, other.shards),
        ):
            if mine != theirs:
                yield f"{what}: expected {_digest(theirs)}, found {_digest(mine)}"


def _digest(value: str | None) -> str:
    return "none" if value is None else f"SHA-256 {value[:_SHOWN_DIGITS]}..."
