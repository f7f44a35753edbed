"""`k3 score MODEL`: the log-probability of each token, and the perplexity."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from k3.api import load
from k3.cli import options
from k3.cli.progress import Progress
from k3.cli.terminal import Terminal
from k3.engine.sampling import log_probabilities


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="TEXT", help="the text to score")
    source.add_argument("--file", metavar="PATH", type=Path, help="a file with the text, taken byte for byte")
    source.add_argument("--ids", metavar="1,2,3", help="token ids instead of a text; needs no tokenizer")
    parser.add_argument("--special", action="store_true", help="spelled control tokens are control tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="nothing but errors on stderr")
    options.add_loading(parser)


def execute(arguments: argparse.Namespace) -> int:
    progress = Progress(Terminal(quiet=arguments.quiet), verbose=False)
    ids = None if arguments.ids is None else options.parse_ids(arguments.ids)
    text = arguments.text if arguments.file is None else options.read_text(arguments.file, "--file")
    with load(
        arguments.model,
        threads=arguments.threads,
        context=arguments.context,
        chunk=arguments.chunk,
        layers=arguments.layers,
        config=arguments.config,
        tokenizer=arguments.tok,
        with_tokenizer=ids is None,
        events=progress.events(),
    ) as model:
        tokens = None
        if ids is None:
            ids = model.tokenizer.encode(text, allow_special=arguments.special)
            tokens = [model.tokenizer.decode([token]) for token in ids]
        logits = model.logits(ids)
        scored = log_probabilities(model.engine.ops, logits[:-1], np.array(ids[1:], np.int64)).tolist()
    perplexity = math.exp(-sum(scored) / len(scored)) if scored else None
    if arguments.json:
        record = {"ids": ids, "tokens": tokens, "logprobs": [None, *scored], "perplexity": perplexity}
        print(json.dumps(record, ensure_ascii=False))
    else:
        for position, token in enumerate(ids):
            logprob = "" if position == 0 else f"{scored[position - 1]:.6f}"
            print(f"{position:>6}  {token:>7}  {logprob:>12}  {'' if tokens is None else ascii(tokens[position])}")
        print(f"perplexity {perplexity if perplexity is None else format(perplexity, '.6g')} over {len(scored)} tokens")
    return 0
