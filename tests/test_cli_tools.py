"""`k3 score`, `k3 tokenize`, `k3 compare` and `k3 synth`."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest

import k3
from cli_helpers import Cli
from conftest import TINY_A
from k3.api import model_path
from k3.checkpoint.synthetic.synth import KINDS
from k3.cli import synth

IDS = [84, 104, 101, 32, 114]


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture(scope="module")
def model():
    with k3.load("demo", threads=2) as loaded:
        yield loaded


def surprise(model, ids):
    """Log-probabilities of all ids but the first, in float64 from the logits."""
    logits = model.logits(ids)[:-1].astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    totals = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    return logits[np.arange(len(ids) - 1), ids[1:]] - totals


# --- score ---


def test_score_in_json(cli, model):
    text = "The river runs."
    record = json.loads(cli.ok("score", "demo", "--text", text, "--json", "--quiet").out)
    ids = model.tokenizer.encode(text)
    expected = surprise(model, ids)
    assert record.keys() == {"ids", "tokens", "logprobs", "perplexity"}
    assert record["ids"] == ids
    assert "".join(record["tokens"]) == text
    assert record["logprobs"][0] is None
    assert np.abs(np.array(record["logprobs"][1:]) - expected).max() < 1e-5
    assert record["perplexity"] == pytest.approx(np.exp(-expected.mean()), rel=1e-5)


def test_score_as_a_table(cli, model):
    ran = cli.ok("score", "demo", "--ids", ",".join(map(str, IDS)), "--quiet")
    *rows, last = [line.split() for line in ran.out.splitlines()]
    assert [int(row[1]) for row in rows] == IDS
    assert [len(row) for row in rows] == [2, 3, 3, 3, 3]
    expected = surprise(model, IDS)
    assert np.abs(np.array([float(row[2]) for row in rows[1:]]) - expected).max() < 1e-5
    assert last[:2] == ["perplexity", f"{np.exp(-expected.mean()):.6g},"]
    assert ran.err == ""


def test_score_of_one_token_predicts_nothing(cli):
    expected = {"ids": [5], "tokens": None, "logprobs": [None], "perplexity": None}
    assert json.loads(cli.ok("score", "demo", "--ids", "5", "--json").out) == expected
    assert cli.ok("score", "demo", "--ids", "5").out.splitlines()[-1] == "perplexity -, of 0 tokens"


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6])
def test_score_does_not_depend_on_chunks(cli, chunk):
    arguments = ("score", "demo", "--ids", ",".join(map(str, IDS)), "--json")
    assert cli.ok(*arguments, "--chunk", chunk).out == cli.ok(*arguments).out


def test_score_of_a_file_and_special(cli, model, tmp_path):
    spelled = model.tokenizer.decode([model.tokenizer.n_ordinary + 2])
    path = tmp_path / "text"
    path.write_bytes(f"a\r\n{spelled}".encode())

    def ids(*arguments: str) -> list[int]:
        return json.loads(cli.ok("score", "demo", "--file", path, "--json", *arguments).out)["ids"]

    assert ids() == model.tokenizer.encode(f"a\r\n{spelled}")
    assert ids("--special") == [*model.tokenizer.encode("a\r\n"), model.tokenizer.n_ordinary + 2]


def test_score_takes_the_options_of_loading(cli, monkeypatch):
    assert "--layers: 2 of " in cli.ok("score", TINY_A, "--ids", "1,2", "--layers", 2).err
    assert "tiktoken.model" in cli.refused("score", TINY_A, "--text", "a")
    assert "nowhere" in cli.refused("score", "demo", "--text", "a", "--config", "nowhere")
    assert "nowhere" in cli.refused("score", "demo", "--text", "a", "--tok", "nowhere")
    assert "context of 3 positions" in cli.refused("score", "demo", "--ids", "1,2,3,4", "--context", 3)
    assert cli.ok("score", "demo", "--ids", "1,2,3", "--context", 3).out
    monkeypatch.setenv("K3_THREADS", "x")
    assert "K3_THREADS" in cli.refused("score", "demo", "--ids", "1")
    assert cli.ok("score", "demo", "--ids", "1", "--threads", 1).out


def test_score_refuses(cli):
    assert "token id 1024 is not in the vocabulary" in cli.refused("score", "demo", "--ids", "1,1024")
    assert "the text is empty" in cli.refused("score", "demo", "--text", "")


def test_perplexity_beyond_a_double_is_null(cli, monkeypatch):
    from k3.cli import score

    monkeypatch.setattr(score, "_log_probabilities", lambda *_: [-1e5])
    assert json.loads(cli.ok("score", "demo", "--ids", "1,2", "--json").out)["perplexity"] is None


# --- tokenize ---


@pytest.mark.parametrize("text", ["The river", "", "é日本語 🚀\n\ttabs", "<|end_of_msg|>", "a\r\nb\ufeff"])
def test_tokenize_gives_ids_and_the_text_back(cli, model, text):
    record = json.loads(cli.ok("tokenize", "demo", text, "--json").out)
    ids = model.tokenizer.encode(text)
    assert record == {"ids": ids, "tokens": [model.tokenizer.decode([token]) for token in ids], "text": text}


def test_tokenize_in_three_lines(cli, model):
    ids = model.tokenizer.encode("The river")
    listed, tokens, text = cli.ok("tokenize", "demo", "The river").out.splitlines()
    assert listed == ",".join(map(str, ids))
    assert tokens == " ".join(repr(model.tokenizer.decode([token])) for token in ids)
    assert text == "The river"


def test_tokenize_takes_its_arguments_in_any_order(cli):
    orders = [("demo", "x", "--json"), ("demo", "--json", "x"), ("--json", "demo", "x")]
    assert len({cli.ok("tokenize", *order).out for order in orders}) == 1


def test_tokenize_of_a_file_and_special(cli, model, tmp_path):
    control = model.tokenizer.n_ordinary + 2
    path = tmp_path / "text"
    path.write_bytes(model.tokenizer.decode([control]).encode())
    assert cli.ok("tokenize", "demo", "--file", path, "--special").out.startswith(f"{control}\n")
    assert not cli.ok("tokenize", "demo", "--file", path).out.startswith(f"{control}\n")
    path.write_bytes(b"\x80")
    assert "byte 0x80 at offset 0" in cli.refused("tokenize", "demo", "--file", path)


def test_tokenize_needs_only_the_two_files(cli, tmp_path):
    for name in ("tiktoken.model", "tokenizer_config.json"):
        assert name in cli.refused("tokenize", tmp_path, "a")
        shutil.copy(model_path("demo") / name, tmp_path)
    assert cli.ok("tokenize", tmp_path, "a").out == cli.ok("tokenize", "demo", "a").out


def test_json_is_ascii_where_stdout_is_not_utf8(capsys, monkeypatch):
    monkeypatch.setattr(type(sys.stdout), "encoding", "latin-1", raising=False)
    line = Cli(capsys).ok("tokenize", "demo", "日", "--json").out
    assert line.isascii()
    assert json.loads(line)["text"] == "日"


# --- compare ---


@pytest.fixture
def dump(tmp_path):
    """Writes float32 values as --dump-logits does."""

    def write(name: str, values: list[float]):
        path = tmp_path / name
        path.write_bytes(np.array(values, "<f4").tobytes())
        return path

    return write


def test_equal_logits(cli, dump):
    out = cli.ok("compare", dump("a.bin", [1, 3, 2]), dump("b.bin", [1, 3, 2])).out
    assert "largest difference: 0 at" in out
    assert "arg-max: 1 and 1" in out
    assert "every bit equal: yes" in out


def test_different_logits(cli, dump):
    ran = cli("compare", dump("a.bin", [1, 3, 2]), dump("b.bin", [1, 3, 4.5]))
    assert ran.code == 1
    assert "largest difference: 2.5 at 2 (2 and 4.5)" in ran.out
    assert "arg-max: 1 and 2" in ran.out
    assert "every bit equal: no" in ran.out
    assert "every bit equal" in ran.complaint


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "code"),
    [
        ([1.0], [1.5], "0.5", 0),
        ([1.0], [1.5], "0.49", 1),
        ([0.0], [-0.0], None, 1),
        ([0.0], [-0.0], "0", 0),
        ([np.nan], [np.nan], None, 0),
        ([np.nan], [np.nan], "0", 0),
        ([np.nan], [1.0], "inf", 1),
        ([1.0, np.nan], [1.0, 2.0], "1", 1),
        ([np.inf], [np.inf], None, 0),
        ([np.inf], [np.inf], "0", 0),
        ([np.inf], [-np.inf], "1e9", 1),
        ([np.inf], [1.0], "1e9", 1),
        ([1.0], [1.0, 2.0], "inf", 1),
        ([1.0], [np.nextafter(np.float32(1), np.float32(2))], None, 1),
    ],
)
def test_tolerance(cli, dump, a, b, tolerance, code):
    given = () if tolerance is None else ("--tolerance", tolerance)
    assert cli("compare", dump("a.bin", a), dump("b.bin", b), *given).code == code


def test_arg_max_of_a_nan_is_none(cli, dump):
    assert "arg-max: none, a NaN and 0" in cli("compare", dump("a.bin", [1, np.nan]), dump("b.bin", [2, 1])).out


@pytest.mark.parametrize("tolerance", ["-1", "nan", "x"])
def test_a_wrong_tolerance(cli, dump, tolerance):
    assert "--tolerance" in cli.refused("compare", dump("a", [1]), dump("b", [1]), f"--tolerance={tolerance}")


def test_runs(cli, tmp_path):
    a, b, c = (tmp_path / name for name in ("a.json", "b.json", "c.out"))
    for path, prompt in ((a, "1,2"), (b, "1,2"), (c, "1,3")):
        cli.ok("run", "demo", "--ids", prompt, "--out", path, "--threads", 1 + (path == b))
    out = cli.ok("compare", a, b).out
    assert "prompt_ids: equal (2)" in out
    assert "logits of every generated position: every bit equal" in out
    ran = cli("compare", a, c)
    assert ran.code == 1
    assert "prompt_ids: differ from place 1 on (2 and 2 ids)" in ran.out


def test_runs_with_equal_ids_and_other_logits(cli, tmp_path):
    for name, ids, digest in (("a", [1, 2], "x"), ("b", [1, 2], "y"), ("c", [1], "x")):
        record = {"prompt_ids": [0], "generated_ids": ids, "logits_sha256": digest}
        (tmp_path / name).write_text(json.dumps(record))
    a, b, c = (tmp_path / name for name in "abc")
    assert cli("compare", a, b).code == 1
    assert cli("compare", a, b, "--tolerance", 1).code == 0
    assert cli("compare", a, c, "--tolerance", 1).code == 1
    assert "differ from place 1 on (2 and 1 ids)" in cli("compare", a, c).out


def test_files_that_can_not_be_compared(cli, dump, tmp_path):
    logits, run = dump("a.bin", [1]), tmp_path / "r.json"
    run.write_text(json.dumps({"prompt_ids": [], "generated_ids": [], "logits_sha256": ""}))
    assert "different kinds" in cli.refused("compare", logits, run)
    assert "No such file" in cli.refused("compare", logits, tmp_path / "no")
    assert "Is a directory" in cli.refused("compare", tmp_path, logits)
    for name, content in (
        ("empty", ""),
        ("odd.bin", "12345"),
        ("x.json", "{}"),
        ("y.json", "1234"),
        ("z.json", '{"prompt_ids": 1, "generated_ids": [], "logits_sha256": ""}'),
        ("deep.json", "[" * 100_000),
    ):
        (tmp_path / name).write_text(content)
        assert name in cli.refused("compare", logits, tmp_path / name)


# --- synth ---


def test_synth_knows_every_kind():
    assert synth.KINDS.keys() == KINDS.keys()


def test_synth_writes_a_checkpoint_that_runs(cli, tmp_path):
    target = tmp_path / "model"
    assert cli.ok("synth", "tiny", target).out == f"{target}\n"
    assert cli.ok("run", target, "--prompt", "The river", "--gen", 2, "--quiet").out
    (tmp_path / "empty").mkdir()
    assert cli.ok("synth", "tiny", tmp_path / "empty", "--quiet").err == ""


def test_synth_seed_gives_other_weights(cli, tmp_path):
    outs = {}
    for seed in (0, 1, 0):
        target = tmp_path / f"{seed}-{len(outs)}"
        cli.ok("synth", "tiny", target, "--seed", seed)
        outs[target] = cli.ok("run", target, "--ids", "1,2", "--gen", 4).out
    first, second, third = outs.values()
    assert first == third != second


def test_synth_refuses(cli, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file"):
        assert "something is there already" in cli.refused("synth", "tiny", place)
    for place in (".", "..", "/"):
        assert "DIR: expected a directory that can be made anew" in cli.refused("synth", "tiny", place)
    assert "seed" in cli.refused("synth", "tiny", tmp_path / "new", "--seed", 1 << 64)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
