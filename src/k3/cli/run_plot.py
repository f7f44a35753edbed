"""The picture of a run: bytes, seconds, expert hits and memory, token by token."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from k3.cli.progress import size
from k3.engine.report import RunReport
from k3.engine.sizes import GB

_CLASSES = {"trunk": "#4477aa", "experts": "#ee6677", "head": "#ccbb44", "embedding": "#66ccee"}
_PHASES = {"computing": "#228833", "waiting_for_trunk": "#4477aa", "waiting_for_experts": "#ee6677"}
_HITS, _MEMORY, _PLAN = "#aa3377", "#4477aa", "#cc3311"

_TOWERING = 2.0
"""The prompt's column is cut off where it is so many times as high as every other: the others would be flat."""

_UNITS = ((GB, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))


def draw_run(report: RunReport, planned: int, title: str, kind: str) -> bytes:
    """A picture of four panels as a file of the given kind ("png", "svg", "pdf"); `planned` bytes were to be held.

    The report has one step or more.
    """
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title.encode("ascii", "backslashreplace").decode(), parse_math=False)
    panels = figure.subplots(2, 2)
    _draw_bytes(panels[0, 0], report)
    _draw_seconds(panels[0, 1], report)
    _draw_hits(panels[1, 0], report)
    _draw_memory(panels[1, 1], report, planned)
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    image = io.BytesIO()
    figure.savefig(image, format=kind, dpi=120)
    return image.getvalue()


def _draw_bytes(axes: Axes, report: RunReport) -> None:
    columns = {name: [getattr(step.bytes_read, name) for step in report.steps] for name in _CLASSES}
    unit, unit_name = _unit(max(step.bytes_read.total for step in report.steps))
    scaled = {name: [value / unit for value in values] for name, values in columns.items()}
    note = _stack(axes, scaled, _CLASSES, unit_name)
    axes.set(title=f"bytes read: {size(report.totals.bytes_read.total)}{note}", ylabel=f"{unit_name} a token")


def _draw_seconds(axes: Axes, report: RunReport) -> None:
    columns = {name: [getattr(step.phases, name) for step in report.steps] for name in _PHASES}
    note = _stack(axes, columns, _PHASES, "s")
    axes.set(title=f"time: {report.totals.seconds:.3g} s{note}", ylabel="seconds a token")


def _draw_hits(axes: Axes, report: RunReport) -> None:
    rate = report.totals.resident_hit_rate
    shares = [100 * step.expert_resident_hits / max(1, step.expert_requests) for step in report.steps]
    axes.stairs(shares, _edges(shares), fill=True, color=_HITS)
    found = "no experts asked for" if rate is None else f"experts found in memory: {100 * rate:.1f} %"
    axes.set(title=found, xlabel="token", ylabel="% of the experts asked for", ylim=(0, 100))
    _whole_tokens(axes, len(shares))


def _draw_memory(axes: Axes, report: RunReport, planned: int) -> None:
    unit, unit_name = _unit(planned)
    seconds = list(accumulate(step.seconds for step in report.steps))
    axes.plot(seconds, [step.rss_bytes / unit for step in report.steps], ".-", color=_MEMORY, label="held")
    axes.axhline(planned / unit, color=_PLAN, linestyle="--", label=f"planned: {size(planned)}")
    title = "memory"
    if report.peak_rss_bytes is not None:
        axes.axhline(report.peak_rss_bytes / unit, color=_MEMORY, linestyle=":", label="peak")
        title = f"memory: peak {size(report.peak_rss_bytes)}"
    axes.set(title=title, xlabel="seconds since the run began", ylabel=unit_name, xlim=(0, None))
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    axes.legend(loc="upper center", ncols=3, fontsize="small")


def _stack(axes: Axes, columns: Mapping[str, Sequence[float]], colors: Mapping[str, str], unit: str) -> str:
    """Columns a token, on top of each other; what is zero throughout is left out.

    Returns what the title must add about a first column that is cut off.
    """
    base = [0.0] * max(len(values) for values in columns.values())
    edges = _edges(base)
    for name, values in columns.items():
        if any(values):
            top = [low + value for low, value in zip(base, values, strict=True)]
            label = name.replace("_", " ")
            axes.stairs(top, edges, baseline=base, fill=True, color=colors[name], label=label)
            base = top
    height, note = max(base), ""
    rest = max(base[1:], default=0.0)
    if rest and base[0] > _TOWERING * rest:
        height, note = 1.3 * rest, f" (first token, cut off: {base[0]:.3g} {unit})"
    axes.set(xlabel="token", ylim=(0, 1.25 * height or 1))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", ncols=2, fontsize="small")
    _whole_tokens(axes, len(base))
    return note


def _edges(values: Sequence[float]) -> list[float]:
    """The borders of the columns of tokens 1, 2, …"""
    return [number + 0.5 for number in range(len(values) + 1)]


def _whole_tokens(axes: Axes, count: int) -> None:
    axes.set_xlim(0.5, count + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _unit(largest: float) -> tuple[int, str]:
    """The unit in which a number of bytes has few digits, and its name."""
    return next((unit for unit in _UNITS if largest >= unit[0]), _UNITS[-1])
