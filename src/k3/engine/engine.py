"""The step: the one way to run the model."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from k3.engine.costs import Costs
from k3.engine.sequence import Sequence
from k3.engine.states.file import IdentityOf, StateFile
from k3.engine.tracing import RecordedExperts
from k3.errors import K3Error, NonFiniteError, UsageError
from k3.kernels import F32Array, Kernels
from k3.model.batch import Batch, Part
from k3.model.transformer import Transformer
from k3.model.weights import ExpertSource
from k3.storage.trace import TraceRecorder

StepInput: TypeAlias = tuple[Sequence, SequenceOf[int]]
StepResult: TypeAlias = F32Array | K3Error
LogitRows: TypeAlias = Literal["all", "last", "none"]


class Engine:
    """Runs steps over sequences. All ids of a step are final: the states move in place."""

    def __init__(
        self,
        ops: Kernels,
        transformer: Transformer,
        experts: ExpertSource,
        context: int,
        costs: Callable[[], Costs],
        identity: IdentityOf,
    ) -> None:
        self.ops = ops
        self.config = transformer.config
        self.context = context
        self.costs = costs
        """Totals of what the steps cost since the engine was loaded."""
        self.identity = identity
        """Gives what state files name as their model."""
        self._transformer = transformer
        self._experts = experts
        self._recorder: TraceRecorder | None = None

    def new_sequence(self) -> Sequence:
        """A sequence that has seen nothing."""
        return Sequence(self.config, len(self._transformer), self.context, self.identity)

    def load_sequence(self, path: str | Path) -> Sequence:
        """The sequence that `Sequence.save` wrote to a file.

        Raises:
            StateFileError: the file is foreign, damaged, cut off or from a newer version.
            UsageError: it has more tokens than the context has room for.
        """
        sequence = self.new_sequence()
        with StateFile(Path(path), self.identity()) as file:
            sequence.fill(file)
        return sequence

    def record_routing(self, recorder: TraceRecorder) -> None:
        """Note the experts of every step from now on; one in which a sequence failed is left out."""
        self._recorder = recorder
        self._experts = RecordedExperts(self._experts, recorder)

    def step(self, batch: SequenceOf[StepInput], logits: LogitRows = "last") -> list[StepResult]:
        """Run the given ids of each sequence, together, through all layers.

        Returns one result a sequence, in the order given: float32 [rows, 1 or 0, vocab_size] for "all", "last" and
        "none", or the `K3Error` that made this sequence void; the others have the bits that they would have had
        alone. The head is read only where it is needed.

        Raises:
            UsageError, VoidSequenceError: the step can't be run as asked; nothing has changed.
            ReadError: the trunk or the head could not be read; every sequence of the step is void.
        """
        parts = _admit(batch)
        ids = np.array([token for _, tokens in batch for token in tokens], np.int64)
        try:
            results = self._run(parts, ids, logits)
            if self._recorder is not None and not any(isinstance(result, K3Error) for result in results):
                self._recorder.end_step()
        except BaseException as error:
            for sequence, _ in batch:
                sequence.fail(error)
            raise
        for (sequence, tokens), result in zip(batch, results, strict=True):
            if isinstance(result, K3Error):
                sequence.fail(result)
            else:
                sequence.advance(tokens)
        return results

    def _run(self, parts: list[Part], ids: np.ndarray, logits: LogitRows) -> list[StepResult]:
        batch = Batch(list(parts))
        hidden = self._transformer.hidden(self.ops, self._experts, ids, batch, head=logits != "none")
        alive = list(batch)
        results: dict[int, StepResult] = {id(part): part.error for part in parts if part.error is not None}
        if logits == "none":
            results |= {id(part): np.empty((0, self.config.vocab_size), np.float32) for part in alive}
        elif alive:
            rows = [np.arange(p.start, p.stop) if logits == "all" else np.array([p.stop - 1]) for p in alive]
            scores = self._transformer.logits(self.ops, hidden[np.concatenate(rows)])
            finite = self.ops.all_finite(scores)
            stops = np.cumsum([len(own) for own in rows])
            for part, stop, own in zip(alive, stops, rows, strict=True):
                rows_of_part = slice(stop - len(own), stop)
                results[id(part)] = scores[rows_of_part] if finite[rows_of_part].all() else _not_finite(part)
        return [results[id(part)] for part in parts]


def _admit(batch: SequenceOf[StepInput]) -> list[Part]:
    """The parts of a step, or the reason why it can't be run, before anything has moved."""
    if not batch:
        raise UsageError("a step needs at least one sequence, found none.")
    if len({id(sequence) for sequence, _ in batch}) < len(batch):
        raise UsageError("a sequence stands twice in one step. Give all its tokens in one place.")
    parts: list[Part] = []
    for sequence, tokens in batch:
        parts.append(sequence.begin(tokens, parts[-1].stop if parts else 0))
    return parts


def _not_finite(part: Part) -> NonFiniteError:
    return NonFiniteError(
        f"a logit at positions {part.position} to {part.position + part.stop - part.start - 1} is not finite. "
        "The weights are damaged or overflow; check the checkpoint's files against their published checksums."
    )
