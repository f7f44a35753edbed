"""What a command says while it works and when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict

from k3.cli.terminal import Terminal
from k3.engine.loading import LoadEvents
from k3.engine.plan import MemoryPlan
from k3.engine.report import RunReport, StepReport, Totals

_SECONDS_BETWEEN_LINES = 10
_SECONDS_BETWEEN_STATUSES = 0.1


class Progress:
    """Plan, loading, prompt, tokens, report: on the status line of a terminal, else in plain lines."""

    def __init__(self, terminal: Terminal, *, verbose: bool) -> None:
        self._terminal = terminal
        self._verbose = verbose
        self._text_begun = False
        self._tokens = 0
        self._work = _Work("")

    def events(self) -> LoadEvents:
        """What a loader calls."""
        return LoadEvents(self.plan, self.loading)

    def note(self, text: str) -> None:
        """A line that the user should see."""
        self._terminal.line(text)

    def plan(self, plan: MemoryPlan) -> None:
        """The itemised memory plan."""
        self.note(f"memory plan: {size(plan.total_bytes)}")
        for name, nbytes in plan.items.items():
            self.note(f"  {name:<30}{size(nbytes):>10}")
        self.note(
            f"context {plan.context} positions, {plan.chunk} prompt rows a step; between tokens "
            f"{size(plan.trunk_budget)} of the trunk and {plan.expert_slots} experts are kept"
        )

    def loading(self, done: int, total: int) -> None:
        """Bytes of weights loaded and in all."""
        self._advance("loading", done, total, size)

    def writing(self, done: int, total: int) -> None:
        """Bytes of a result written and in all."""
        self._advance("writing", done, total, size)

    def downloading(self, done: int, total: int) -> None:
        """Bytes fetched by this run and bytes that it has to fetch."""
        self._advance("downloading", done, total, size)

    def checking(self, done: int, total: int) -> None:
        """Bytes compared with their checksums and in all."""
        self._advance("checking", done, total, size)

    def packing(self, done: int, total: int) -> None:
        """Bytes of the checkpoint packed and in all."""
        self._advance("packing", done, total, size)

    def prompt(self, done: int, total: int) -> None:
        """Prompt rows processed and in all."""
        if done < total and not self._would_break_text:
            self._advance("prompt", done, total, lambda rows: f"{rows:.4g} rows")

    def expect(self, tokens: int, room: int) -> None:
        """So many tokens are asked for, and the context has room for so many."""
        self._tokens = min(tokens, room)
        if room < tokens:
            self.note(f"the context has room for {room} of the {tokens} tokens asked for.")

    def token(self, step: StepReport) -> None:
        """One more token is there."""
        self._text_begun = True
        if self._would_break_text:
            return
        seconds = max(step.seconds, 1e-9)
        parts = [
            f"token {step.token} of {self._tokens}",
            f"{seconds:.3f} s",
            f"{clock((self._tokens - step.token) * seconds)} left",
            f"{size(step.bytes_read.total / seconds)}/s",
        ]
        if step.expert_requests:
            parts.append(f"{100 * step.expert_resident_hits / step.expert_requests:.0f} % of experts resident")
        text = ", ".join(parts)
        if self._terminal.interactive and not self._verbose:
            self._terminal.status(text)
        else:
            self._terminal.line(text)

    @property
    def _would_break_text(self) -> bool:
        return self._text_begun and self._terminal.mixed and not self._verbose

    def report(self, report: RunReport, plan: MemoryPlan, *, direct: bool, synthetic: bool) -> None:
        """The figures of a finished run; `direct` where all large reads went past the page cache."""
        if synthetic:
            self.note("synthetic checkpoint: its weights are made up, and so are the text and which experts it takes")
        totals = report.totals
        self.note(_bytes_line(totals))
        if totals.resident_hit_rate is not None:
            share = f"{100 * totals.resident_hit_rate:.1f} % of {totals.expert_requests} requests"
            self.note(f"experts: {share} found theirs in memory")
        self.note(_time_line(totals))
        if totals.drive.gb_per_second is not None and totals.drive_busy_share is not None:
            through = "" if direct else ", some or all of it from the page cache"
            busy = f"busy {100 * totals.drive_busy_share:.0f} % of the time"
            self.note(f"drive: {busy}, {totals.drive.gb_per_second:.3g} GB/s while busy{through}")
        self.note(_memory_line(report, plan))
        self.note(_summary(report))

    def _advance(self, what: str, done: int, total: int, unit: Callable[[float], str]) -> None:
        if self._work.what != what:
            self._work = _Work(what)
        pause = _SECONDS_BETWEEN_STATUSES if self._terminal.interactive else _SECONDS_BETWEEN_LINES
        seconds = self._work.seconds(pause)
        if seconds is None:
            return
        left = clock((total - done) * seconds / max(done, 1))
        text = f"{what}: {unit(done)} of {unit(total)}, {left} left, {unit(done / seconds)}/s"
        if self._terminal.interactive:
            self._terminal.status(text)
        else:
            self._terminal.line(text)


def _bytes_line(totals: Totals) -> str:
    classes = [f"{name} {size(nbytes)}" for name, nbytes in asdict(totals.bytes_read).items() if nbytes]
    padding = f", and {size(totals.padding_bytes)} more by alignment" if totals.padding_bytes else ""
    return f"read: {size(totals.bytes_read.total)} ({', '.join(classes)}){padding}"


def _time_line(totals: Totals) -> str:
    phases = totals.phases
    return (
        f"time: {totals.seconds:.3f} s ({phases.waiting_for_trunk:.3f} s waiting for the trunk, "
        f"{phases.waiting_for_experts:.3f} s waiting for experts, {phases.computing:.3f} s computing)"
    )


def _memory_line(report: RunReport, plan: MemoryPlan) -> str:
    peak = report.peak_rss_bytes or 0
    above = ". More than planned is a bug, please report it" if peak > plan.total_bytes else ""
    return f"memory: peak {size(peak)} of {size(plan.total_bytes)} planned{above}"


def _summary(report: RunReport) -> str:
    count = len(report.generated_ids)
    parts = [
        f"{count} token{'' if count == 1 else 's'}",
        f"{report.steps[0].seconds:.3f} s for the prompt and the first token",
        f"ended by {report.finish_reason}",
    ]
    if count > 1:
        parts.insert(2, f"{report.seconds_per_token:.3f} s for each further one")
    if report.seed is not None:
        parts.append(f"seed {report.seed}")
    return ", ".join(parts)


class _Work:
    """One kind of work: when it began and when something was last said about it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._began = self._told = time.perf_counter()

    def seconds(self, pause: float) -> float | None:
        """Seconds since the work began, or None while the pause since they were last asked for isn't over."""
        now = time.perf_counter()
        if now - self._told < pause:
            return None
        self._told = now
        return now - self._began


def size(nbytes: float) -> str:
    """Bytes as people read them: three figures and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def clock(seconds: float) -> str:
    """Seconds, or hours, minutes and seconds, as people read them."""
    whole = round(seconds)
    if whole < 100:
        return f"{seconds:.1f} s" if whole < 10 else f"{whole} s"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
