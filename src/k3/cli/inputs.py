"""What a command works on: the loaded checkpoint and the token ids of what was given."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from k3.errors import UsageError

if TYPE_CHECKING:
    from k3.api import Model
    from k3.cli.progress import Progress


def load_model(arguments: argparse.Namespace, progress: Progress, *, needs_text: bool = False) -> Model:
    """Load the checkpoint as the options say.

    A tokenizer is loaded, and must then be there, where the input is a text, with `needs_text`, or if --tok names it.

    Raises:
        UsageError: nothing was given to work on.
        K3Error: see `k3.load`.
    """
    from k3.api import load

    if not arguments.given:
        raise UsageError("the text is empty. Give at least one character.")
    needs_text = needs_text or isinstance(arguments.given, str)
    tokenizer = arguments.tok or (arguments.model if needs_text else None)
    model = load(
        arguments.model,
        memory=arguments.memory,
        trunk_gb=arguments.trunk_gb,
        cache_gb=arguments.cache_gb,
        cache_experts=arguments.cache_experts,
        trunk=arguments.trunk,
        extra_dirs=arguments.extra_dir,
        direct=not arguments.no_direct,
        threads=arguments.threads,
        context=arguments.context,
        chunk=arguments.chunk,
        layers=arguments.layers,
        config=arguments.config,
        tokenizer=tokenizer,
        with_tokenizer=tokenizer is not None,
        events=progress.events(),
    )
    if arguments.layers is not None and arguments.layers < model.config.num_hidden_layers:
        progress.note(
            f"--layers: {arguments.layers} of {model.config.num_hidden_layers} layers run. This is not the "
            "model's output."
        )
    return model


def given_ids(arguments: argparse.Namespace, model: Model) -> list[int]:
    """The ids that were given, or those of the text that was given."""
    if isinstance(arguments.given, str):
        return model.tokenizer.encode(arguments.given, allow_special=arguments.special)
    ids: list[int] = arguments.given
    return ids
