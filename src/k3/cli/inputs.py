"""What a command works on: the loaded checkpoint and the token ids of what was given."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from k3.errors import UsageError

if TYPE_CHECKING:
    from k3.api import Model, PreparedModel
    from k3.cli.progress import Progress
    from k3.engine.loading import LoadOptions


def load_model(
    arguments: argparse.Namespace, progress: Progress, *, needs_text: bool = False, more: int = 1
) -> tuple[Model, list[int]]:
    """Load the checkpoint as the options say; with it come the ids that were given, or those of the text.

    A tokenizer is loaded, and must then be there, where the input is a text, with `needs_text`, or if --tok names it.
    A prompt that can't be run with `more` tokens after it is refused before any weight is read.

    Raises:
        UsageError: nothing was given to work on, or it does not fit.
        K3Error: see `k3.load`.
    """
    from k3.api import prepare
    from k3.engine.prompt import check_prompt

    if not arguments.given:
        raise UsageError("the text is empty. Give at least one character.")
    needs_text = needs_text or isinstance(arguments.given, str)
    tokenizer = arguments.tok or (arguments.model if needs_text else None)
    prepared = prepare(arguments.model, load_options(arguments), tokenizer, with_tokenizer=tokenizer is not None)
    ids = _given_ids(arguments, prepared)
    check_prompt(ids, prepared.config.vocab_size, prepared.plan.context, more=more)
    model = prepared.load(progress.events())
    if arguments.layers is not None and arguments.layers < model.config.num_hidden_layers:
        progress.note(
            f"--layers: {arguments.layers} of {model.config.num_hidden_layers} layers run. This is not the "
            "model's output."
        )
    return model, ids


def load_options(arguments: argparse.Namespace) -> LoadOptions:
    """What the loading options ask for."""
    from k3.api import memory_request
    from k3.engine.loading import LoadOptions

    memory = memory_request(
        arguments.memory,
        arguments.trunk_gb,
        arguments.cache_gb,
        arguments.cache_experts,
        context=arguments.context,
        chunk=arguments.chunk,
    )
    return LoadOptions(
        memory,
        threads=arguments.threads,
        layers=arguments.layers,
        config=arguments.config,
        trunk=arguments.trunk,
        extra_dirs=tuple(arguments.extra_dir),
        direct=not arguments.no_direct,
    )


def _given_ids(arguments: argparse.Namespace, prepared: PreparedModel) -> list[int]:
    if isinstance(arguments.given, str):
        return prepared.tokenizer.encode(arguments.given, allow_special=arguments.special)
    ids: list[int] = arguments.given
    return ids
