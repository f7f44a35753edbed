"""`k3 run --plot`: what the panels show, and what is refused before the work."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from cli_helpers import Cli
from k3.engine.report import Drive, Phases, RunReport, StepReport
from k3.storage.reader import BytesRead

GB = 10**9


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn."""
    figure = pytest.importorskip("matplotlib.figure", reason="needs the optional library matplotlib")
    figures = []
    savefig = figure.Figure.savefig

    def keep(self, *arguments, **named):
        figures.append(self)
        savefig(self, *arguments, **named)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    return figures


def report(first_seconds=3.0):
    steps = [
        StepReport(
            1,
            first_seconds,
            BytesRead(trunk=4 * GB, experts=3 * GB, head=GB),
            20,
            5,
            0,
            Phases(1.0, 0.5, first_seconds - 1.5),
            Drive(8 * GB, 2.0),
            2 * GB,
        ),
        StepReport(
            2, 2.0, BytesRead(trunk=4 * GB, experts=GB, head=GB), 10, 8, 0, Phases(0.5, 0.5, 1.0), Drive(), 3 * GB
        ),
    ]
    return RunReport([1, 2], [3, 4], steps=steps, peak_rss_bytes=int(3.5 * GB))


def tops(axes):
    """Heights of the stacked columns by label: each is where its colour ends."""
    return {patch.get_label(): np.asarray(patch.get_data().values) for patch in axes.patches}


def draw(drawn, of, planned=4 * GB, title="a model"):
    from k3.cli.run_plot import draw_run

    draw_run(of, planned, title, "png")
    return drawn[-1]


def test_bytes_are_stacked_by_class(drawn):
    axes = draw(drawn, report()).axes[0]
    assert {name: values.tolist() for name, values in tops(axes).items()} == {
        "trunk": [4, 4],
        "experts": [7, 5],
        "head": [8, 6],
    }
    assert axes.get_ylabel() == "GB a token"
    assert axes.get_title() == "bytes read: 14 GB"


def test_seconds_are_stacked_by_phase(drawn):
    axes = draw(drawn, report()).axes[1]
    assert {name: values.tolist() for name, values in tops(axes).items()} == {
        "computing": [1.5, 1],
        "waiting for trunk": [2.5, 1.5],
        "waiting for experts": [3, 2],
    }
    assert axes.get_ylabel() == "seconds a token"
    assert axes.get_ylim()[1] > 3


def test_a_long_prompt_does_not_flatten_the_tokens(drawn):
    axes = draw(drawn, report(first_seconds=200.0)).axes[1]
    assert 2 < axes.get_ylim()[1] < 5
    assert axes.get_title() == "time: 202 s (first token, cut off: 200 s)"


def test_hits(drawn):
    axes = draw(drawn, report()).axes[2]
    [patch] = axes.patches
    assert patch.get_data().values.tolist() == [25, 80]
    assert axes.get_ylim() == (0, 100)
    assert axes.get_title() == "experts found in memory: 43.3 %"


def test_memory_over_time_beside_the_plan(drawn):
    axes = draw(drawn, report()).axes[3]
    held, planned, peak = axes.lines
    assert (list(held.get_xdata()), list(held.get_ydata())) == ([3.0, 5.0], [2.0, 3.0])
    assert (set(planned.get_ydata()), set(peak.get_ydata())) == ({4.0}, {3.5})
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("seconds since the run began", "GB")
    assert axes.get_ylim()[1] > 4


def test_a_run_of_one_token_without_experts(drawn):
    step = StepReport(1, 0.5, BytesRead(), 0, 0, 0, Phases(computing=0.5), Drive(), 10**6)
    figure = draw(drawn, RunReport([1], [2], steps=[step]), planned=2 * 10**6)
    assert figure.axes[2].get_title() == "no experts asked for"
    assert figure.axes[3].get_ylabel() == "MB"


@pytest.mark.parametrize("title", ["$x$ and $", "模型", "back\\slash"])
def test_any_name_can_be_a_title(drawn, title):
    assert draw(drawn, report(), title=title)._suptitle.get_text() == title.encode("ascii", "backslashreplace").decode()


@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_picture_is_written(cli, drawn, tmp_path, kind, magic):
    picture = tmp_path / f"run.{kind}"
    cli.ok("run", "demo", "--ids", "1,2", "--gen", 3, "--ignore-eos", "--cache-experts", 20, "--plot", picture)
    assert picture.read_bytes().startswith(magic)
    assert [path.name for path in tmp_path.iterdir()] == [picture.name]
    assert drawn[0]._suptitle.get_text() == "demo: prompt of 2 and 3 generated tokens"


@pytest.mark.parametrize("name", ["run.gif", "run", "run.png.txt", ".png"])
def test_an_unknown_kind_of_picture_is_refused(cli, tmp_path, name):
    complaint = cli.refused("run", "demo", "--ids", "1", "--plot", tmp_path / name)
    assert "argument --plot: expected a file name that ends in .png, .svg, .pdf, found" in complaint


def test_without_the_library_a_picture_is_refused_before_the_work(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = cli("run", "demo", "--ids", "1", "--plot", tmp_path / "run.png")
    assert (ran.code, ran.out) == (2, "")
    assert "memory plan" not in ran.err
    assert "matplotlib" in ran.complaint
    assert "k3[plot]" in ran.complaint
    assert "--out" in ran.complaint
    assert list(tmp_path.iterdir()) == []
    assert cli.ok("run", "demo", "--ids", "1").code == 0


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(cli, drawn, tmp_path):
    ran = cli("run", "demo", "--ids", "1", "--plot", tmp_path / "missing" / "run.png")
    assert ran.code == 2
    assert ran.complaint.startswith("--plot: ")
    assert "memory plan" not in ran.err
    assert drawn == []
    both = cli.refused("run", "demo", "--ids", "1", "--plot", tmp_path / "a.png", "--out", tmp_path / "a.png")
    assert "--plot and --out are both" in both
