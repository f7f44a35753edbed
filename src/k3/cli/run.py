"""`k3 run MODEL`: continue a text or a list of token ids."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from k3 import __version__
from k3.cli import options
from k3.cli.files import require_writable, write_bytes, write_json
from k3.cli.inputs import given_ids, load_model
from k3.cli.terminal import Terminal
from k3.errors import InterruptedRunError, InvalidGenerationError

if TYPE_CHECKING:
    from k3.api import Model
    from k3.cli.progress import Progress
    from k3.engine.generation import Generation, GenerationParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "k3 run MODEL (--prompt TEXT | --prompt-file PATH | --ids 1,2,3) [options]"
    options.add_model(parser)
    options.add_input(parser, "--prompt", "--prompt-file", "continue")
    options.add_sampling(parser)
    options.add_loading(parser)
    options.add_output(parser)


def execute(arguments: argparse.Namespace) -> int:
    from k3.cli.progress import Progress

    require_writable(out=arguments.out, dump_logits=arguments.dump_logits)
    params = _params(arguments)
    with Terminal(quiet=arguments.quiet) as terminal:
        progress = Progress(terminal, verbose=arguments.verbose)
        with load_model(arguments, progress, needs_text=bool(params.stop)) as model:
            generation = _start(arguments, model, params, progress)
            _print(generation, terminal, progress, as_ids=not isinstance(arguments.given, str))
            progress.report(generation.report, model.plan)
            _write(arguments, model, generation)
    return 0


def _params(arguments: argparse.Namespace) -> GenerationParams:
    """What the options ask for; the stop ids are the model's to say."""
    from k3.engine.generation import GenerationParams
    from k3.engine.sampling import SamplingParams

    return GenerationParams(
        max_new_tokens=arguments.gen,
        sampling=SamplingParams(arguments.temperature, arguments.top_p, arguments.top_k, arguments.seed),
        stop=tuple(arguments.stop),
        full_recompute=arguments.full_recompute,
    )


def _start(arguments: argparse.Namespace, model: Model, params: GenerationParams, progress: Progress) -> Generation:
    from dataclasses import replace

    ids = given_ids(arguments, model)
    params = replace(params, chunk=model.plan.chunk)
    if not arguments.ignore_eos:
        params = replace(params, stop_ids=model.stop_ids)
    generation = model.start(ids, params, progress.prompt)
    progress.expect(arguments.gen, room=model.plan.context - len(ids))
    return generation


def _print(generation: Generation, terminal: Terminal, progress: Progress, *, as_ids: bool) -> None:
    """Print text, or ids, as they come.

    Raises:
        InterruptedRunError, InvalidGenerationError: the run ended early; the message names the ids so far.
    """
    report = generation.report
    try:
        for number, token in enumerate(generation, 1):
            separator = "," if number > 1 else ""
            terminal.write(f"{separator}{token.id}" if as_ids else token.text)
            progress.token(report.steps[-1])
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted. Ids generated so far: {report.generated_ids}.") from None
    except InvalidGenerationError as error:
        printed = (
            f"do not use the ids already printed: {report.generated_ids}" if report.generated_ids else "it has no ids"
        )
        raise type(error)(f"{error} The generation is void; {printed}.") from error
    terminal.end_text()


def _write(arguments: argparse.Namespace, model: Model, generation: Generation) -> None:
    if arguments.dump_logits is not None and generation.prompt_logits is not None:
        write_bytes(arguments.dump_logits, generation.prompt_logits.astype("<f4").tobytes())
    if arguments.out is not None:
        write_json(arguments.out, run_record(model, generation))


def run_record(model: Model, generation: Generation) -> dict[str, Any]:
    """The content of `--out`."""
    from k3.engine.report import peak_rss_bytes

    return {
        "k3_version": __version__,
        "model": str(model.path),
        **generation.report.as_dict(),
        "speculation": {"width": 0, "drafted": 0, "accepted": 0, "steps": 0},
        "plan": {"items": model.plan.items, "total_bytes": model.plan.total_bytes},
        "peak_rss_bytes": peak_rss_bytes(),
        "threads": model.engine.ops.threads,
        "chunk": model.plan.chunk,
        "isa": model.engine.ops.isa,
        "direct_io": model.direct_io,
    }
