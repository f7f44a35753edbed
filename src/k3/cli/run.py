"""`k3 run MODEL`: continue a text or a list of token ids."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from k3 import __version__
from k3.api import Model, load
from k3.cli import options
from k3.cli.files import require_folder, write_bytes, write_json
from k3.cli.progress import Progress
from k3.cli.terminal import Terminal
from k3.engine.generation import Generation, GenerationParams
from k3.engine.report import peak_rss_bytes
from k3.engine.sampling import SamplingParams
from k3.errors import InterruptedRunError, InvalidGenerationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", metavar="PATH", type=Path, help="a file with the text, taken byte for byte")
    prompt.add_argument("--ids", metavar="1,2,3", help="token ids instead of a text; prints ids, needs no tokenizer")
    parser.add_argument(
        "--special", action="store_true", help="spelled control tokens in the prompt are control tokens"
    )
    options.add_sampling(parser)
    options.add_loading(parser)
    options.add_output(parser)


def execute(arguments: argparse.Namespace) -> int:
    terminal = Terminal(quiet=arguments.quiet)
    progress = Progress(terminal, verbose=arguments.verbose)
    require_folder(arguments.out, "--out")
    require_folder(arguments.dump_logits, "--dump-logits")
    ids = None if arguments.ids is None else options.parse_ids(arguments.ids)
    text = _prompt_text(arguments)
    sampling = SamplingParams(arguments.temperature, arguments.top_p, arguments.top_k, arguments.seed)
    with _load(arguments, progress, with_tokenizer=ids is None or bool(arguments.stop)) as model:
        if arguments.layers is not None and arguments.layers < model.config.num_hidden_layers:
            terminal.line(f"only the first {arguments.layers} layers run: this is not the model's output.")
        if ids is None:
            ids = model.tokenizer.encode(text, allow_special=arguments.special)
        params = GenerationParams(
            max_new_tokens=arguments.gen,
            sampling=sampling,
            stop=tuple(arguments.stop),
            stop_ids=frozenset() if arguments.ignore_eos else model.stop_ids,
            full_recompute=arguments.full_recompute,
            chunk=arguments.chunk,
        )
        generation = model.start(ids, params, progress.prompt)
        _print(generation, terminal, progress, arguments.gen, as_ids=arguments.ids is not None)
        progress.report(generation.report)
        _write(arguments, model, generation)
    return 0


def _load(arguments: argparse.Namespace, progress: Progress, *, with_tokenizer: bool) -> Model:
    return load(
        arguments.model,
        threads=arguments.threads,
        context=arguments.context,
        chunk=arguments.chunk,
        layers=arguments.layers,
        config=arguments.config,
        tokenizer=arguments.tok,
        with_tokenizer=with_tokenizer,
        events=progress.events(),
    )


def _prompt_text(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is not None:
        return options.read_text(arguments.prompt_file, "--prompt-file")
    return arguments.prompt or ""


def _print(generation: Generation, terminal: Terminal, progress: Progress, count: int, *, as_ids: bool) -> None:
    """Print text, or ids, as they come.

    Raises:
        InterruptedRunError, InvalidGenerationError: the run ended early; the message names the ids already printed.
    """
    report = generation.report
    try:
        for number, token in enumerate(generation, 1):
            separator = "," if number > 1 else ""
            terminal.write(f"{separator}{token.id}" if as_ids else token.text)
            progress.token(number, count, report.steps[-1])
    except KeyboardInterrupt:
        terminal.end_text()
        raise InterruptedRunError(f"interrupted. Ids generated so far: {report.generated_ids}.") from None
    except InvalidGenerationError as error:
        terminal.end_text()
        message = f"{error} The generation is void; do not use the ids already printed: {report.generated_ids}."
        raise type(error)(message) from error
    terminal.end_text()


def _write(arguments: argparse.Namespace, model: Model, generation: Generation) -> None:
    if arguments.dump_logits is not None and generation.prompt_logits is not None:
        write_bytes(arguments.dump_logits, generation.prompt_logits.astype(np.dtype("<f4")).tobytes())
    if arguments.out is not None:
        write_json(arguments.out, run_record(model, generation))


def run_record(model: Model, generation: Generation) -> dict[str, Any]:
    """The content of `--out`."""
    return {
        "k3_version": __version__,
        "model": str(model.path),
        **generation.report.as_dict(),
        "plan": {"items": model.plan.items, "total_bytes": model.plan.total_bytes},
        "peak_rss_bytes": peak_rss_bytes(),
        "threads": model.engine.ops.threads,
        "chunk": model.plan.chunk,
        "isa": model.engine.ops.isa,
        "direct_io": False,
    }
