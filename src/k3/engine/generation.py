"""One prompt's continuation, token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from k3.engine.engine import Engine
from k3.engine.prompt import check_prompt
from k3.engine.report import RunReport, StepReport, peak_rss_bytes, rss_bytes
from k3.engine.sampling import Sampler, SamplingParams, log_probabilities
from k3.engine.sequence import Sequence
from k3.errors import K3Error, UsageError
from k3.kernels import F32Array
from k3.text.stop import StopMatcher
from k3.text.stream import TextStream
from k3.text.tokenizer import Tokenizer

DEFAULT_CHUNK = 64
"""Prompt rows that share one step."""

RowsDone = Callable[[int, int], None]
"""Called while a prompt is processed, with rows done and rows in all."""


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """What to generate. `stop_ids` end the text and are not part of it; `stop` are strings that end it.

    `full_recompute` runs the whole prefix again for every token: the validation path.

    Raises:
        UsageError: a value is out of its range.
    """

    max_new_tokens: int = 8
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    full_recompute: bool = False
    chunk: int = DEFAULT_CHUNK

    def __post_init__(self) -> None:
        for name, value in (("max_new_tokens (--gen)", self.max_new_tokens), ("chunk", self.chunk)):
            if value < 1:
                raise UsageError(f"{name}: expected a whole number from 1 up, found {value}.")


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token: `text` is what has become printable with it, `logprob` that of the raw logits."""

    id: int
    text: str
    logprob: float


class _Text:
    """The printable text of generated tokens: whole characters, cut before a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]) -> None:
        if stop and tokenizer is None:
            raise UsageError("a stop string needs the tokenizer's files. Name their directory with --tok.")
        self._stream = TextStream(tokenizer) if tokenizer else None
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        return self._matcher.matched is not None

    def push(self, token: int) -> str:
        return self._matcher.push(self._stream.push(token)) if self._stream else ""

    def flush(self) -> str:
        if self._stream is None:
            return ""
        return self._matcher.push(self._stream.flush()) + self._matcher.flush()


class Generation:
    """A run over one prompt. Iterate over it once; `report` fills as it goes.

    Raises:
        UsageError: the prompt is empty, holds an unknown id, or leaves no room in the context.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        prompt_ids: SequenceOf[int],
        params: GenerationParams,
        on_prompt: RowsDone = lambda *_: None,
    ) -> None:
        check_prompt(prompt_ids, engine.config.vocab_size, engine.context)
        room = engine.context - len(prompt_ids)
        self._engine = engine
        self._params = params
        self._text = _Text(tokenizer, params.stop)
        self._limit = min(params.max_new_tokens, room)
        self._sampler = Sampler(engine.ops, params.sampling)
        self._on_prompt = on_prompt
        self.report = RunReport(list(prompt_ids), seed=self._sampler.seed)
        self.prompt_logits: F32Array | None = None
        """The logits of the last prompt position, float32 [vocab_size], once there is a token."""

    def __iter__(self) -> Iterator[Token]:
        ids = list(self.report.prompt_ids)
        sequence = self._engine.new_sequence()
        pending = ids
        while self.report.finish_reason is None:
            began, before = time.perf_counter(), self._engine.costs()
            if self._params.full_recompute and self.report.steps:
                del sequence  # The plan has room for the states of one.
                sequence, pending = self._engine.new_sequence(), ids
            token = self._advance(sequence, pending, position=len(ids))
            spent, seconds = self._engine.costs() - before, time.perf_counter() - began
            number = len(self.report.generated_ids)
            self.report.steps.append(StepReport.of(number, seconds, spent, rss_bytes()))
            if self.report.finish_reason is not None:
                self.report.peak_rss_bytes = peak_rss_bytes()
            ids = [*ids, token.id]
            pending = [token.id]
            yield token

    def _advance(self, sequence: Sequence, pending: list[int], position: int) -> Token:
        """Run the pending ids and choose the token at `position`."""
        logits = prefill(self._engine, sequence, pending, self._params.chunk, self._on_prompt)
        if self.prompt_logits is None:
            self.prompt_logits = logits
        chosen = self._sampler.choose(logits, position)
        self.report.add_logits(logits)
        self.report.generated_ids.append(chosen)
        logprob = log_probabilities(self._engine.ops, logits[None], np.array([chosen]))[0]
        return Token(chosen, self._emit(chosen), float(logprob))

    def _emit(self, chosen: int) -> str:
        """The text that `chosen` makes printable; notes why the run ends, if it does."""
        if chosen in self._params.stop_ids:
            self.report.finish_reason = "stop"
            text = self._text.flush()
        else:
            text = self._text.push(chosen)
            if self._text.stopped:
                self.report.finish_reason = "stop"
            elif len(self.report.generated_ids) == self._limit:
                self.report.finish_reason = "length"
                text += self._text.flush()
        self.report.text += text
        return text


def prefill(
    engine: Engine, sequence: Sequence, ids: SequenceOf[int], chunk: int, on_rows: RowsDone = lambda *_: None
) -> F32Array:
    """Run `ids` in chunks; the logits of the last one, float32 [vocab_size].

    Raises:
        K3Error: the sequence failed.
    """
    logits: F32Array | None = None
    for start in range(0, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        [result] = engine.step([(sequence, ids[start:stop])], logits="last" if stop == len(ids) else "none")
        if isinstance(result, K3Error):
            raise result
        logits = result
        on_rows(stop, len(ids))
    assert logits is not None
    return cast("F32Array", logits[0])
