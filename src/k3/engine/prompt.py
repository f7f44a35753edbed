"""What can be wrong with a prompt, known before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence

from k3.errors import UsageError


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for.

    Raises:
        UsageError: an id is out of range.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UsageError(f"token id {token} is not in the vocabulary: expected 0 to {vocab_size - 1}.")


def check_prompt(ids: Sequence[int], vocab_size: int, context: int, *, more: int = 1) -> None:
    """Refuse a prompt that can't be run with `more` tokens after it.

    Raises:
        UsageError: it is empty, holds an unknown id, or leaves no room in the context.
    """
    if not len(ids):
        raise UsageError("the prompt has no tokens. Give at least one.")
    check_ids(ids, vocab_size)
    if len(ids) + more > context:
        beyond = f" and at least {more} more" if more else ""
        raise UsageError(
            f"the prompt has {len(ids)} tokens, and the context of {context} positions must hold it{beyond}. Ask for a "
            "larger context (--context) or shorten the prompt."
        )
