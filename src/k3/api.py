"""The Python interface: load a checkpoint, run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from k3.checkpoint.config import ModelConfig, stop_ids
from k3.engine.engine import Engine
from k3.engine.generation import Generation, GenerationParams, RowsDone, Token
from k3.engine.loading import (
    LoadedEngine,
    LoadEvents,
    LoadOptions,
    PreparedEngine,
    load_engine,
    prepare_engine,
    read_config,
)
from k3.engine.plan import MemoryPlan, MemoryRequest
from k3.engine.report import RunReport, peak_rss_bytes
from k3.engine.sampling import SamplingParams
from k3.engine.sizes import GB, parse_size
from k3.errors import K3Error, TokenizerError, UsageError
from k3.kernels import F32Array
from k3.text.chat.conversation import Conversation
from k3.text.chat.reader import ReplyReader
from k3.text.chat.reply import Delta, Reply
from k3.text.chat.segments import encode_segments
from k3.text.tokenizer import CONFIG_FILE, VOCABULARY_FILE, Tokenizer, load_tokenizer

DEMO = "demo"
"""The name of the embedded model wherever a checkpoint directory is expected."""


def model_path(model: str | Path) -> Path:
    """The directory of a checkpoint; the word `demo` means the one inside this package."""
    return Path(__file__).parent / "data" / "demo" if str(model) == DEMO else Path(model)


Messages = SequenceOf[Mapping[str, object]]
"""A conversation, and in the same form its tools: JSON objects as chat interfaces have them."""


class Answer(Iterator[Delta]):
    """A reply that is being generated. Iterate over it once; left early, `reply` has what came until then.

    Attributes:
        reply: all of the reply that has come.
        generation: what gives the tokens, with its report.
    """

    def __init__(self, generation: Generation, reader: ReplyReader, stop_ids: frozenset[int]) -> None:
        self.generation = generation
        self.reply: Reply = reader.reply
        self._deltas = self._read(reader, stop_ids)

    def __next__(self) -> Delta:
        return next(self._deltas)

    def _read(self, reader: ReplyReader, stop_ids: frozenset[int]) -> Iterator[Delta]:
        for token in self.generation:
            if token.id not in stop_ids:
                yield from reader.push(token.id)
            if reader.ended:
                break
        report = self.generation.report
        if report.finish_reason is None:
            # The reply was over before the generation was.
            report.finish_reason, report.peak_rss_bytes = "stop", peak_rss_bytes()
        yield from reader.finish("length" if report.finish_reason == "length" else "stop")


class PreparedModel:
    """A checkpoint that was found right and planned; its weights are not read yet."""

    def __init__(
        self, path: Path, engine: PreparedEngine, tokenizer: Tokenizer | None, stop_ids: frozenset[int]
    ) -> None:
        self.path = path
        self.config: ModelConfig = engine.bound.config
        self.plan: MemoryPlan = engine.plan
        self.synthetic: bool = engine.bound.synthetic
        """Whether the checkpoint's index says that its weights are made up."""
        self.stop_ids = stop_ids
        """The ids that end a generation: those of the configs, and those that the tokenizer names."""
        self._engine = engine
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            TokenizerError: the tokenizer's files are not there.
        """
        if self._tokenizer is None:
            raise TokenizerError(
                f"{self.path}: the tokenizer's files, {VOCABULARY_FILE} and {CONFIG_FILE}, are not there. "
                "Put them beside the shards, or name their directory with --tok (`tokenizer=` in Python)."
            )
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def load(self, events: LoadEvents | None = None) -> Model:
        """Read the weights that the plan keeps; `events` is told of the plan and of the progress.

        Raises:
            ReadError: a tensor could not be read.
        """
        return Model(self, load_engine(self._engine, events or LoadEvents()))


class Model:
    """A loaded checkpoint. Use it as a context manager, or close it."""

    def __init__(self, prepared: PreparedModel, loaded: LoadedEngine) -> None:
        self.path = prepared.path
        self.config = prepared.config
        self.plan = prepared.plan
        self.synthetic = prepared.synthetic
        self.stop_ids = prepared.stop_ids
        self.engine: Engine = loaded.engine
        self._prepared = prepared
        self._reader = loaded.reader
        self._report: RunReport | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the checkpoint's files. The model can't be used afterwards."""
        self._reader.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            TokenizerError: the tokenizer's files were not there when the model was loaded.
        """
        return self._prepared.tokenizer

    @property
    def direct_io(self) -> bool:
        """Whether every large read so far went past the page cache."""
        return self._reader.direct

    def logits(self, ids: SequenceOf[int]) -> F32Array:
        """The logits at every position: float32 [len(ids), vocab_size].

        Raises:
            UsageError: no ids, an unknown id, or more than the context holds.
            InvalidGenerationError: a value was not finite, or an expert could not be read.
        """
        sequence = self.engine.new_sequence()
        rows = self.plan.scored_chunk
        chunks = [ids[start : start + rows] for start in range(0, len(ids), rows)]
        results = []
        for chunk in chunks or [ids]:
            [result] = self.engine.step([(sequence, chunk)], logits="all")
            if isinstance(result, K3Error):
                raise result
            results.append(result)
        return np.concatenate(results)

    def generate(
        self,
        prompt: SequenceOf[int] | str,
        max_new_tokens: int = 8,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | SequenceOf[str] | None = None,
        ignore_eos: bool = False,
    ) -> Iterator[Token]:
        """Continue a prompt (ids, or text in which control tokens are text); tokens come as they are made.

        Raises:
            UsageError: a parameter is out of its range, or the prompt doesn't fit; raised at the call.
            InvalidGenerationError: the ids so far must not be used.
        """
        params = GenerationParams(
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(temperature, top_p, top_k, seed),
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            stop_ids=frozenset() if ignore_eos else self.stop_ids,
            chunk=self.plan.chunk,
        )
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return iter(self.start(ids, params))

    def render(
        self,
        messages: Messages,
        tools: Messages | None = None,
        *,
        effort: str | None = None,
        tool_choice: object = None,
        response_format: object = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The token ids of a conversation, up to the begin of the reply; see `Conversation.of` for the settings.

        Raises:
            ConversationError: the conversation can't be rendered; a `UsageError` whose `field` says where.
            TokenizerError: the checkpoint has no tokenizer.
        """
        conversation = Conversation.of(messages, tools, effort, tool_choice, response_format)
        return encode_segments(self.tokenizer, conversation.segments(add_generation_prompt))

    def chat(
        self,
        messages: Messages,
        tools: Messages | None = None,
        *,
        effort: str | None = None,
        tool_choice: object = None,
        response_format: object = None,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 0.95,
        top_k: int = 0,
        seed: int | None = None,
        stop: str | SequenceOf[str] | None = None,
    ) -> Answer:
        """Answer a conversation; reasoning, content and tool calls come as they are made.

        `tool_choice` and `response_format` are told to the model, which is not held to them. `stop` strings end the
        content and are not looked for elsewhere. `max_new_tokens` counts all tokens of the reply; None is as many as
        the context has room for.

        Raises:
            UsageError: the conversation can't be rendered (a `ConversationError`), a parameter is out of its range,
                or the prompt doesn't fit; raised at the call.
            TokenizerError: the checkpoint has no tokenizer.
            InvalidGenerationError: while iterating; the ids so far must not be used.
        """
        conversation = Conversation.of(messages, tools, effort, tool_choice, response_format)
        reader = ReplyReader(self.tokenizer, conversation.thinking, () if stop is None else stop)
        params = GenerationParams(
            max_new_tokens=self.engine.context if max_new_tokens is None else max_new_tokens,
            sampling=SamplingParams(temperature, top_p, top_k, seed),
            stop_ids=self.stop_ids,
            chunk=self.plan.chunk,
        )
        ids = encode_segments(self.tokenizer, conversation.segments())
        return Answer(self.start(ids, params), reader, self.stop_ids)

    def start(
        self, ids: SequenceOf[int], params: GenerationParams, on_prompt: RowsDone = lambda *_: None
    ) -> Generation:
        """A generation to iterate over; its `report` is also this model's `report()`."""
        tokenizer = self.tokenizer if self._prepared.has_tokenizer else None
        generation = Generation(self.engine, tokenizer, ids, params, on_prompt)
        self._report = generation.report
        return generation

    def report(self) -> RunReport:
        """What the last generation gave and cost.

        Raises:
            UsageError: nothing was generated yet.
        """
        if self._report is None:
            raise UsageError("there is no report before the first generation.")
        return self._report


def load(
    path: str | Path,
    *,
    memory: int | str = "auto",
    trunk_gb: float | None = None,
    cache_gb: float | None = None,
    cache_experts: int | None = None,
    trunk: str | Path | None = None,
    extra_dirs: SequenceOf[str | Path] = (),
    threads: int | None = None,
    context: int | None = None,
    chunk: int | None = None,
    layers: int | None = None,
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
    with_tokenizer: bool = True,
    isa: str | None = None,
    direct: bool = True,
    events: LoadEvents | None = None,
) -> Model:
    """Load a checkpoint directory, or the embedded model under the name `demo`.

    No choice here changes a result's bits, `layers` and `config` excepted.

    Args:
        path: the directory with `config.json` and the shards.
        memory: the peak of resident memory: bytes, a size such as "8GB", or "auto" for what the machine has.
        trunk_gb: GB of trunk and head kept between tokens, as stored; None leaves it to the plan.
        cache_gb: GB of experts kept between tokens, whole ones; None leaves it to the plan.
        cache_experts: the same as a number of experts.
        trunk: a packed trunk (`k3 pack`); None reads the checkpoint's own shards.
        extra_dirs: more directories that hold shards.
        threads: threads that compute; None takes the physical cores, or K3_THREADS.
        context: positions that a sequence has room for; None takes what memory allows, up to the model's limit.
        chunk: prompt rows that share one step; None lets the plan choose.
        layers: binds the first layers only; the output is then not the model's.
        config: a config file instead of the checkpoint's own.
        tokenizer: another directory with the tokenizer's files. A checkpoint without them works on ids.
        with_tokenizer: False looks for no tokenizer at all.
        isa: the instruction set of the kernels; None takes the best, or K3_ISA.
        direct: read past the page cache where the file system lets it.
        events: is told of the plan and of the progress of loading.

    Raises:
        K3Error: see `prepare` and `PreparedModel.load`.
    """
    options = LoadOptions(
        memory_request(memory, trunk_gb, cache_gb, cache_experts, context=context, chunk=chunk),
        threads=threads,
        isa=isa,
        layers=layers,
        config=Path(config) if config else None,
        trunk=Path(trunk) if trunk else None,
        extra_dirs=tuple(Path(d) for d in extra_dirs),
        direct=direct,
    )
    return prepare(path, options, tokenizer, with_tokenizer=with_tokenizer).load(events)


def prepare(
    path: str | Path, options: LoadOptions, tokenizer: str | Path | None = None, *, with_tokenizer: bool = True
) -> PreparedModel:
    """Everything about a checkpoint that can be wrong, found before its weights are read; see `load`.

    Raises:
        K3Error: see `k3.engine.loading.prepare_engine` and `k3.text.tokenizer.load_tokenizer`.
    """
    directory = model_path(path)
    settings = read_config(directory, options.config)
    found = _find_tokenizer(directory, tokenizer, settings.vocab_size) if with_tokenizer else None
    ends = stop_ids(directory, settings) | (found.stop_ids if found else frozenset())
    return PreparedModel(directory, prepare_engine(directory, options), found, ends)


def memory_request(
    memory: int | str,
    trunk_gb: float | None = None,
    cache_gb: float | None = None,
    cache_experts: int | None = None,
    *,
    context: int | None = None,
    chunk: int | None = None,
) -> MemoryRequest:
    """What a plan is asked for; see `load`.

    Raises:
        UsageError: a size means nothing, or is negative.
    """
    for name, value in (("trunk_gb", trunk_gb), ("cache_gb", cache_gb), ("cache_experts", cache_experts)):
        if value is not None and not 0 <= value < 1e9:
            raise UsageError(f"--{name.replace('_', '-')}: expected a number from 0 up, found {value}.")
    return MemoryRequest(
        total=parse_size(memory) if isinstance(memory, str) else memory,
        trunk_bytes=None if trunk_gb is None else int(trunk_gb * GB),
        cache_bytes=None if cache_gb is None else int(cache_gb * GB),
        cache_experts=cache_experts,
        context=context,
        chunk=chunk,
    )


def _find_tokenizer(directory: Path, given: str | Path | None, vocab_size: int) -> Tokenizer | None:
    """The tokenizer that was asked for, or the checkpoint's own if it has one."""
    if given is None and not any((directory / name).exists() for name in (VOCABULARY_FILE, CONFIG_FILE)):
        return None
    where = directory if given is None else model_path(given)
    tokenizer = load_tokenizer(where)
    if tokenizer.n_vocab != vocab_size:
        raise TokenizerError(
            f"{where}: this tokenizer has {tokenizer.n_vocab} ids, and the model's vocab_size is {vocab_size}. "
            "Use the tokenizer's files that came with the checkpoint."
        )
    return tokenizer
