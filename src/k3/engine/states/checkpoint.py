"""Checkpoints: where a sequence stood, kept aside so that one can go back to it.

A recurrent state can't be truncated, so it is copied. Latent rows are only ever added, so while a checkpoint is used
with its own sequence a length is enough; `detached` copies them for the time after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from k3.errors import UsageError
from k3.kernels import F32Array
from k3.model.state import KdaState, LayerState, MlaCache


@dataclass(frozen=True, slots=True, eq=False)
class LatentRows:
    """The latent rows of positions from `start` on: one float32 array [positions, row] for each MLA layer."""

    start: int
    layers: tuple[F32Array, ...]

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The states after `tokens`: one `KdaState` for each KDA layer, and the latent rows in runs of positions.

    `owner` is the latent memory that the rows lie in, None for a detached checkpoint; `holds` tells whether they are
    still there.
    """

    tokens: tuple[int, ...]
    recurrent: tuple[KdaState, ...]
    latents: tuple[LatentRows, ...]
    owner: object = None
    holds: Callable[[], bool] = field(default=lambda: True)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of the recurrent states and tails."""
        return sum(array.nbytes for state in self.recurrent for array in state.arrays)

    def detached(self, base: Checkpoint | None = None) -> Checkpoint:
        """The same checkpoint with latent rows of its own; those of a detached `base`, a prefix of it, are shared.

        Raises:
            UsageError: the checkpoint has been overwritten.
        """
        self.check()
        shared = base.latents if base is not None else ()
        start = len(base) if base is not None else 0
        [rows] = self.latents
        own = LatentRows(start, tuple(layer[start:].copy() for layer in rows.layers))
        return Checkpoint(self.tokens, self.recurrent, (*shared, own))

    def check(self) -> None:
        """Raise a UsageError if the sequence went back behind this checkpoint and on in another way."""
        if not self.holds():
            raise UsageError(
                f"the checkpoint at {len(self)} tokens no longer holds: its sequence went back to an earlier one. Take "
                "a detached checkpoint to keep it."
            )


def arrays_of(states: Iterable[LayerState]) -> Iterator[F32Array]:
    """All that the states are, layer by layer."""
    for state in states:
        if isinstance(state, KdaState):
            yield from state.arrays
        else:
            yield state.rows


def set_length(states: Iterable[LayerState], length: int) -> None:
    """Give the latent caches so many rows."""
    for state in states:
        if isinstance(state, MlaCache):
            state.resize(length)


def take(states: list[LayerState], tokens: Iterable[int], holds: Callable[[], bool]) -> Checkpoint:
    """A checkpoint of the states; its latent rows are views."""
    return Checkpoint(
        tuple(tokens),
        tuple(state.copy() for state in states if isinstance(state, KdaState)),
        (LatentRows(0, tuple(state.rows for state in states if isinstance(state, MlaCache))),),
        owner=states,
        holds=holds,
    )


def put_back(states: list[LayerState], checkpoint: Checkpoint) -> None:
    """Set the states to those of a checkpoint.

    Raises:
        UsageError: the checkpoint has been overwritten.
    """
    checkpoint.check()
    kda = [state for state in states if isinstance(state, KdaState)]
    for state, kept in zip(kda, checkpoint.recurrent, strict=True):
        state.assign(kept)
    set_length(states, len(checkpoint))
    if checkpoint.owner is states:
        return
    caches = [state for state in states if isinstance(state, MlaCache)]
    for run in checkpoint.latents:
        for cache, rows in zip(caches, run.layers, strict=True):
            cache.rows[run.start : run.start + len(rows)] = rows
