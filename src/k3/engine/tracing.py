"""A run's routing trace: which experts its steps ask for, in the order of the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3.errors import K3Error
from k3.model.weights import Expert, ExpertSource, UnreadableExpert
from k3.storage.trace import TraceRecorder


class RecordedExperts:
    """An `ExpertSource` that notes what another one is asked for."""

    def __init__(self, experts: ExpertSource, recorder: TraceRecorder) -> None:
        self._experts = experts
        self._recorder = recorder

    def fetch(self, layer: int, ids: npt.NDArray[np.int32]) -> Iterator[Expert | UnreadableExpert]:
        self._recorder.record(layer, ids)
        return self._experts.fetch(layer, ids)


@contextlib.contextmanager
def recording(folder: Path, num_experts: int) -> Iterator[TraceRecorder]:
    """A recorder for `Engine.record_routing`; however the run ends, its whole steps are in `folder` afterwards.

    Raises:
        UsageError: nothing can be written into the folder; raised on entering.
        K3Error: the trace can't be written; an error that is already on its way goes first.
    """
    recorder = TraceRecorder(folder, num_experts)
    try:
        yield recorder
    except BaseException:
        with contextlib.suppress(K3Error):
            recorder.close()
        raise
    recorder.close()
