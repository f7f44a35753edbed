"""`k3 score MODEL`: the log-probability of each token, and the perplexity."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from k3.cli import options
from k3.cli.inputs import load_model
from k3.cli.terminal import Terminal, json_text
from k3.errors import K3Error

if TYPE_CHECKING:
    from k3.api import Model
    from k3.cli.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "k3 score MODEL (--text TEXT | --file PATH | --ids 1,2,3) [options]"
    options.add_model(parser)
    options.add_input(parser, "--text", "--file", "score")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_quiet(parser)
    options.add_loading(parser)


def execute(arguments: argparse.Namespace) -> int:
    from k3.cli.progress import Progress

    with Terminal(quiet=arguments.quiet) as terminal:
        progress = Progress(terminal, verbose=False)
        model, ids = load_model(arguments, progress, more=0)
        with model:
            tokens = [model.tokenizer.decode([token]) for token in ids] if isinstance(arguments.given, str) else None
            logprobs = _log_probabilities(model, ids, progress)
        if arguments.json:
            terminal.write(json_text(_record(ids, tokens, logprobs)))
        else:
            terminal.write("\n".join(_table(ids, tokens, logprobs)))
        terminal.end_text()
    return 0


def _log_probabilities(model: Model, ids: list[int], progress: Progress) -> list[float]:
    """Those of all tokens but the first. Logits are held for one chunk at a time."""
    import numpy as np

    from k3.engine.sampling import log_probabilities

    sequence = model.engine.new_sequence()
    logprobs: list[float] = []
    rows = model.plan.scored_chunk
    for start in range(0, len(ids), rows):
        chunk = ids[start : start + rows]
        [logits] = model.engine.step([(sequence, chunk)], logits="all")
        if isinstance(logits, K3Error):
            raise logits
        following = np.array(ids[start + 1 : start + 1 + len(chunk)], np.int64)
        logprobs += log_probabilities(model.engine.ops, logits[: len(following)], following).tolist()
        progress.prompt(start + len(chunk), len(ids))
    return logprobs


def _perplexity(logprobs: list[float]) -> float | None:
    """The exponential of the mean surprise; None where nothing was predicted or it is beyond a double."""
    try:
        return math.exp(-math.fsum(logprobs) / len(logprobs)) if logprobs else None
    except OverflowError:
        return None


def _record(ids: list[int], tokens: list[str] | None, logprobs: list[float]) -> dict[str, object]:
    return {"ids": ids, "tokens": tokens, "logprobs": [None, *logprobs], "perplexity": _perplexity(logprobs)}


def _table(ids: list[int], tokens: list[str] | None, logprobs: list[float]) -> Iterator[str]:
    for position, token in enumerate(ids):
        logprob = f"{logprobs[position - 1]:.6f}" if position else ""
        spelled = ascii(tokens[position]) if tokens else ""
        yield f"{position:>6}  {token:>7}  {logprob:>12}  {spelled}".rstrip()
    perplexity = _perplexity(logprobs)
    yield f"perplexity {'-' if perplexity is None else format(perplexity, '.6g')}, of {len(logprobs)} tokens"
