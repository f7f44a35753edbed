"""A sequence: the tokens that the model has seen and the states they left behind."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from pathlib import Path
from typing import Any

from k3.checkpoint.config import ModelConfig
from k3.engine.prompt import check_ids
from k3.engine.states.checkpoint import Checkpoint, arrays_of, put_back, set_length, take
from k3.engine.states.file import IdentityOf, StateFile, StateHeader, write_state
from k3.errors import K3Error, UsageError, VoidSequenceError
from k3.model.batch import Part
from k3.model.state import empty_states


class Sequence:
    """One sequence of tokens in an engine; made by `Engine.new_sequence`.

    It is void after a step that did not carry all its rows through: its states are then a mixture, and every later
    use raises `VoidSequenceError`, `restore` excepted: a checkpoint leads back.
    """

    def __init__(self, config: ModelConfig, layers: int, context: int, identity: IdentityOf) -> None:
        self._vocab_size = config.vocab_size
        self._context = context
        self._states = empty_states(config, layers, context)
        self._tokens: list[int] = []
        self._error: BaseException | None = None
        self._identity = identity
        self._went_back_to: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens whose effect is in the states."""
        return tuple(self._tokens)

    @property
    def context(self) -> int:
        """Positions that the sequence has room for."""
        return self._context

    def begin(self, ids: TokenIds[int], start: int) -> Part:
        """The part of a step that runs `ids` from row `start` of the step.

        Raises:
            VoidSequenceError: the sequence failed earlier.
            UsageError: there is nothing to run, an id is out of range, or the context is full.
        """
        self._refuse_void()
        if not len(ids):
            raise UsageError("a step needs at least one token for each of its sequences, found none.")
        check_ids(ids, self._vocab_size)
        if len(self) + len(ids) > self._context:
            raise UsageError(
                f"{len(self)} tokens and {len(ids)} more exceed the context of {self._context} positions. "
                "Ask for a larger context (--context) or a shorter text."
            )
        return Part(self._states, len(self), start, start + len(ids))

    def advance(self, ids: TokenIds[int]) -> None:
        """Count `ids` as seen: every layer's state has moved past them."""
        self._tokens.extend(ids)

    def fail(self, error: BaseException) -> None:
        """Make the sequence void."""
        self._error = error

    def check(self) -> None:
        """Raise the K3Error that made this sequence void, if any."""
        if isinstance(self._error, K3Error):
            raise self._error

    def checkpoint(self) -> Checkpoint:
        """Keep the states as they are now, to go back to them with `restore`.

        The recurrent states are copied. Latent rows are not: the checkpoint holds until the sequence goes back to an
        earlier one. `Checkpoint.detached` copies them too.

        Raises:
            VoidSequenceError: the sequence failed earlier.
        """
        self._refuse_void()
        length, past = len(self), len(self._went_back_to)

        def holds() -> bool:
            return all(kept >= length for kept in self._went_back_to[past:])

        return take(self._states, self._tokens, holds)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go to a checkpoint of this sequence, or of another one of the same engine; void or not, this one is whole.

        Raises:
            UsageError: the checkpoint no longer holds, or has more tokens than the context has room for.
        """
        if len(checkpoint) > self._context:
            raise UsageError(
                f"the checkpoint has {len(checkpoint)} tokens, more than the context of {self._context} positions. Ask "
                "for a larger context (--context)."
            )
        put_back(self._states, checkpoint)
        own = checkpoint.owner is self._states
        self._went_back_to.append(len(checkpoint) if own else 0)
        self._tokens = list(checkpoint.tokens)
        self._error = None

    def save(self, path: str | Path) -> None:
        """Write the tokens and the states to a file, for `Engine.load_sequence`.

        Raises:
            VoidSequenceError: the sequence failed earlier.
            K3Error: the file can't be written; one that was there before is untouched.
        """
        self.save_with(path)

    def save_with(
        self, path: str | Path, request: dict[str, Any] | None = None, mark: dict[str, Any] | None = None
    ) -> None:
        """The same, with notes for the header's fields of these names."""
        self._refuse_void()
        arrays = list(arrays_of(self._states))
        nbytes = sum(array.nbytes for array in arrays)
        header = StateHeader(model=self._identity(), tokens=self._tokens, nbytes=nbytes, request=request, mark=mark)
        write_state(Path(path), header, arrays)

    def fill(self, file: StateFile) -> None:
        """Take over the tokens and the states of a file.

        Raises:
            StateFileError: the file is damaged; the sequence is then void.
            UsageError: it has more tokens than the context has room for.
        """
        tokens = file.header.tokens
        if len(tokens) > self._context:
            raise UsageError(
                f"{file.path}: the state has {len(tokens)} tokens, more than the context of {self._context} positions. "
                "Ask for a larger context (--context)."
            )
        check_ids(tokens, self._vocab_size)
        self._went_back_to.append(0)
        set_length(self._states, len(tokens))
        try:
            file.read_into(arrays_of(self._states))
        except BaseException as error:
            self.fail(error)
            raise
        self._tokens = list(tokens)
        self._error = None

    def _refuse_void(self) -> None:
        if self._error is not None:
            raise VoidSequenceError(
                f"this sequence is void since an earlier step failed ({self._error}). Begin a new sequence, or "
                "go back to a checkpoint."
            )
