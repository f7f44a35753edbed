"""What a generating command says while it works and when it is done."""

from __future__ import annotations

import time

from k3.cli.terminal import Terminal
from k3.engine.loading import LoadEvents
from k3.engine.plan import MemoryPlan
from k3.engine.report import RunReport, StepReport, peak_rss_bytes


class Progress:
    """Plan, loading, prompt, tokens, report: on the status line of a terminal, else in plain lines."""

    def __init__(self, terminal: Terminal, *, verbose: bool) -> None:
        self._terminal = terminal
        self._line_a_token = verbose or not terminal.interactive
        self._began = time.perf_counter()
        self._told = self._began

    def events(self) -> LoadEvents:
        """What a loader calls."""
        return LoadEvents(self.plan, self.loading)

    def plan(self, plan: MemoryPlan) -> None:
        """The itemised memory plan."""
        self._terminal.line(f"memory plan: {plan.total_bytes / 1e9:.2f} GB")
        for name, nbytes in plan.items.items():
            self._terminal.line(f"  {name:<32}{nbytes / 1e9:9.3f} GB")
        self._terminal.line(f"context {plan.context} positions, {plan.chunk} prompt rows a step, {_residency(plan)}")
        self._began = time.perf_counter()

    def loading(self, done: int, total: int) -> None:
        """Bytes of weights loaded and in all."""
        self._work("loading", done, total, 1e9, "GB")

    def writing(self, done: int, total: int) -> None:
        """Bytes of a result written and in all."""
        self._work("writing", done, total, 1e9, "GB")

    def prompt(self, done: int, total: int) -> None:
        """Prompt rows processed and in all."""
        if done == total or total == 1:
            return
        self._work("prompt", done, total, 1, "rows")

    def token(self, number: int, total: int, step: StepReport) -> None:
        """Token `number` of `total` is there."""
        rate = step.bytes_read.total / step.seconds / 1e9
        left = _clock((total - number) * step.seconds)
        hits = 100 * step.expert_resident_hits / step.expert_requests if step.expert_requests else 0.0
        text = (
            f"token {number} of {total} · {step.seconds:.3f} s · {rate:.2f} GB/s · {hits:.0f} % of experts resident"
            f" · {left} left"
        )
        if self._line_a_token:
            self._terminal.line(text)
        else:
            self._terminal.status(text)

    def report(self, report: RunReport) -> None:
        """The figures of a finished run."""
        self._terminal.clear()
        read = sum(step.bytes_read.total for step in report.steps)
        count = len(report.generated_ids)
        seed = "" if report.seed is None else f" · seed {report.seed}"
        self._terminal.line(
            f"{count} tokens · {report.seconds_per_token:.3f} s a token after {report.steps[0].seconds:.3f} s for the "
            f"prompt · {read / 1e9:.3f} GB read · peak {peak_rss_bytes() / 1e9:.2f} GB · ended by "
            f"{report.finish_reason}{seed}"
        )

    def _work(self, what: str, done: int, total: int, unit: float, name: str) -> None:
        now = time.perf_counter()
        seconds = max(now - self._began, 1e-9)
        left = _clock((total - done) * seconds / max(done, 1))
        rate = done / unit / seconds
        text = f"{what}: {done / unit:.4g} of {total / unit:.4g} {name} · {rate:.4g} {name}/s · {left} left"
        if self._terminal.interactive:
            self._terminal.status(text)
        elif now - self._told > 10:
            self._told = now
            self._terminal.line(text)


def _residency(plan: MemoryPlan) -> str:
    if plan.trunk_resident and plan.experts_resident:
        return "all weights resident"
    return "trunk resident, experts read on demand" if plan.trunk_resident else "all weights read on demand"


def _clock(seconds: float) -> str:
    """Seconds, or minutes and hours, as people read them."""
    whole = round(seconds)
    if whole < 100:
        return f"{seconds:.1f} s" if whole < 10 else f"{whole} s"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
