"""`k3 run MODEL`: continue a text or a list of token ids."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from k3 import __version__
from k3.cli import options
from k3.cli.files import require_writable, write_bytes, write_json
from k3.cli.inputs import load_model
from k3.cli.plot import require_matplotlib
from k3.cli.terminal import Terminal
from k3.errors import InterruptedRunError, InvalidGenerationError

if TYPE_CHECKING:
    from k3.api import Model
    from k3.cli.progress import Progress
    from k3.engine.generation import Generation, GenerationParams
    from k3.storage.trace import TraceRecorder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "k3 run MODEL (--prompt TEXT | --prompt-file PATH | --ids 1,2,3) [options]"
    options.add_model(parser)
    options.add_input(parser, "--prompt", "--prompt-file", "continue")
    options.add_sampling(parser)
    options.add_loading(parser)
    options.add_output(parser)


def execute(arguments: argparse.Namespace) -> int:
    from k3.cli.progress import Progress

    if arguments.plot is not None:
        require_matplotlib("--out")
    require_writable(out=arguments.out, dump_logits=arguments.dump_logits, plot=arguments.plot)
    params = _params(arguments)
    with _recording(arguments) as recorder, Terminal(quiet=arguments.quiet) as terminal:
        progress = Progress(terminal, verbose=arguments.verbose)
        model, ids = load_model(arguments, progress, needs_text=bool(params.stop))
        with model:
            if recorder is not None:
                model.engine.record_routing(recorder)
            generation = _start(arguments, model, ids, params, progress)
            _print(generation, terminal, progress, as_ids=not isinstance(arguments.given, str))
            progress.report(generation.report, model.plan, direct=model.direct_io, synthetic=model.synthetic)
            _write(arguments, model, generation)
    return 0


def _recording(arguments: argparse.Namespace) -> AbstractContextManager[TraceRecorder | None]:
    """The recorder of the routing trace, where one is asked for; opened before the model is loaded."""
    if arguments.dump_cache_trace is None:
        return nullcontext()

    from k3.api import model_path
    from k3.engine.loading import read_config
    from k3.engine.tracing import recording

    config = read_config(model_path(arguments.model), arguments.config)
    return recording(arguments.dump_cache_trace, config.num_experts)


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


def _start(
    arguments: argparse.Namespace, model: Model, ids: list[int], params: GenerationParams, progress: Progress
) -> Generation:
    from dataclasses import replace

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
    if arguments.plot is not None:
        from k3.cli.run_plot import draw_run

        report = generation.report
        made_up = " (synthetic checkpoint)" if model.synthetic else ""
        lengths = f"prompt of {len(report.prompt_ids)} and {len(report.generated_ids)} generated tokens"
        title = f"{model.path.resolve().name}{made_up}: {lengths}"
        write_bytes(arguments.plot, draw_run(report, model.plan.total_bytes, title, arguments.plot.suffix[1:]))


def run_record(model: Model, generation: Generation) -> dict[str, Any]:
    """The content of `--out`."""
    return {
        "k3_version": __version__,
        "model": _name(model),
        "synthetic": model.synthetic,
        **generation.report.as_dict(),
        "speculation": {"width": 0, "drafted": 0, "accepted": 0, "steps": 0},
        "plan": {"items": model.plan.items, "total_bytes": model.plan.total_bytes},
        "threads": model.engine.ops.threads,
        "chunk": model.plan.chunk,
        "isa": model.engine.ops.isa,
        "direct_io": model.direct_io,
    }


def _name(model: Model) -> str:
    """The checkpoint's directory; the embedded model has its word."""
    from k3.api import DEMO, model_path

    return DEMO if model.path == model_path(DEMO) else str(model.path)
