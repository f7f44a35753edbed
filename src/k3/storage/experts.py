"""Routed experts in memory or read when they are asked for, behind one face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from k3.checkpoint.index import TensorEntry
from k3.checkpoint.layout import Layout
from k3.checkpoint.specs import EXPERT_TENSORS
from k3.storage.arena import ALIGNMENT, Arena
from k3.storage.reader import ByteClass, Reader
from k3.storage.tensors import Progress, RawArray, ResidentTensors, as_stored


class ExpertStore(Protocol):
    """Where the six tensors of an expert come from, by their name within the expert."""

    def resident(self, layer: int, expert: int) -> bool:
        """Whether the expert is in memory already."""
        ...

    def get(self, layer: int, expert: int) -> Mapping[str, RawArray]:
        """The expert's tensors, valid until the next expert is asked for.

        Raises:
            ReadError: they could not be read.
        """
        ...


class ResidentExperts:
    """All experts of the bound layers, loaded once.

    Raises:
        ReadError: an expert could not be read.
    """

    def __init__(self, reader: Reader, layout: Layout, progress: Progress) -> None:
        self._layout = layout
        entries = (
            entry
            for layer in layout.moe_layers
            for expert in range(layout.num_experts)
            for entry in layout.expert(layer, expert).values()
        )
        self._tensors = ResidentTensors(reader, ((entry, ByteClass.EXPERTS) for entry in entries), progress)

    def resident(self, layer: int, expert: int) -> bool:  # noqa: ARG002
        return True

    def get(self, layer: int, expert: int) -> Mapping[str, RawArray]:
        entries = self._layout.expert(layer, expert)
        return {name: self._tensors.whole(entry, ByteClass.EXPERTS) for name, entry in entries.items()}


class OnDemandExperts:
    """Experts read each time they are asked for, into one buffer that is reused."""

    def __init__(self, reader: Reader, layout: Layout) -> None:
        self._reader = reader
        self._layout = layout
        self._buffer = Arena(layout.largest_expert_bytes + len(EXPERT_TENSORS) * ALIGNMENT)

    def resident(self, layer: int, expert: int) -> bool:  # noqa: ARG002
        return False

    def get(self, layer: int, expert: int) -> Mapping[str, RawArray]:
        self._buffer.reset()
        entries = self._layout.expert(layer, expert)
        record = self._layout.experts[layer].record(expert)
        if record is None:
            return {name: self._read(entry) for name, entry in entries.items()}
        raw = self._buffer.take(record.nbytes)
        self._reader.read(record.path, record.offset, raw, ByteClass.EXPERTS)
        return {
            name: as_stored(entry, raw[start : start + entry.nbytes])
            for (name, entry), start in zip(entries.items(), record.starts, strict=True)
        }

    def _read(self, entry: TensorEntry) -> RawArray:
        raw = self._buffer.take(entry.nbytes)
        self._reader.read(entry.path, entry.offset, raw, ByteClass.EXPERTS)
        return as_stored(entry, raw)
