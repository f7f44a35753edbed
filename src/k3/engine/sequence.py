"""A sequence: the tokens that the model has seen and the states they left behind."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds

from k3.checkpoint.config import ModelConfig
from k3.engine.prompt import check_ids
from k3.errors import K3Error, UsageError, VoidSequenceError
from k3.model.batch import Part
from k3.model.state import empty_states


class Sequence:
    """One sequence of tokens in an engine; made by `Engine.new_sequence`.

    It is void after a step that did not carry all its rows through: its states are then a mixture, and every later
    use raises `VoidSequenceError`.
    """

    def __init__(self, config: ModelConfig, layers: int, context: int) -> None:
        self._vocab_size = config.vocab_size
        self._context = context
        self._states = empty_states(config, layers, context)
        self._tokens: list[int] = []
        self._error: BaseException | None = None

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
        if self._error is not None:
            raise VoidSequenceError(
                f"this sequence is void since an earlier step failed ({self._error}). Begin a new sequence."
            )
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
