"""`k3 run` and `k3 demo`: prompts, options, results."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import k3
from cli_helpers import Cli
from conftest import TINY_A, copy_checkpoint, edit_tensor, shard_of
from k3.api import model_path

IDS = [84, 104, 101]
NAMES = {"k3_version", "model", "prompt_ids", "generated_ids", "text", "finish_reason", "seed", "steps", "speculation"}
NAMES |= {"plan", "peak_rss_bytes", "threads", "chunk", "isa", "direct_io", "logits_sha256"}


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture
def record(cli, tmp_path):
    """Runs `k3 run` quietly and gives the content of its `--out`."""

    def run(*arguments: object, model: object = "demo") -> dict:
        out = tmp_path / "record.json"
        cli.ok("run", model, *arguments, "--quiet", "--out", out)
        return json.loads(out.read_bytes())

    return run


@pytest.fixture(scope="module")
def model():
    with k3.load("demo", threads=2) as loaded:
        yield loaded


def greedy(model, ids, count):
    """Greedy ids by full passes and arg-max."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(np.argmax(model.logits(ids)[-1])))
    return ids[-count:]


def joined(ids):
    return ",".join(map(str, ids))


# --- prompts ---


def test_ids_in_and_ids_out(cli, model):
    assert cli.ok("run", "demo", "--ids", joined(IDS)).out == joined(greedy(model, IDS, 8)) + "\n"


def test_text_in_and_text_out(cli, model):
    ids = greedy(model, model.tokenizer.encode("The river"), 12)
    expected = model.tokenizer.decode(ids)
    ran = cli.ok("run", "demo", "--prompt", "The river", "--gen", 12, "--ignore-eos", "--quiet")
    assert (ran.out, ran.err) == (expected + "\n", "")


@pytest.mark.parametrize("spelled", ["84,104,101", " 84 , 104,101 ", "084,104,101", "84,\t104,\n101"])
def test_forms_of_ids(record, spelled):
    assert record("--ids", spelled)["prompt_ids"] == IDS


@pytest.mark.parametrize(
    ("spelled", "place"),
    [
        ("", "'' at place 1 of 1"),
        ("1,2,", "'' at place 3 of 3"),
        (",1", "'' at place 1"),
        ("1,-2", "'-2' at place 2"),
        ("1 2", "'1 2'"),
        ("1.0", "'1.0'"),
        ("1_0", "'1_0'"),
        ("٣", r"'\u0663'"),
        ("0x10", "'0x10'"),
        ("[1]", "'[1]'"),
        ("9" * 400, "99…'".encode("ascii", "backslashreplace").decode()),
    ],
)
def test_malformed_ids(cli, spelled, place):
    complaint = cli.refused("run", "demo", f"--ids={spelled}")
    assert "--ids: expected token ids separated by commas, found " in complaint
    assert place in complaint
    assert len(complaint) < 250


@pytest.mark.parametrize("token", [1024, 10**17])
def test_ids_out_of_the_vocabulary(cli, token):
    complaint = cli.refused("run", "demo", "--ids", f"1,{token}")
    assert f"token id {token} is not in the vocabulary: expected 0 to 1023" in complaint


@pytest.mark.parametrize("data", [b"a\r\nb\r\n", b"tail\n", b"\xef\xbb\xbfBOM", b" \x00\x1b[31m", "é日\n\n".encode()])
def test_a_prompt_file_is_taken_byte_for_byte(record, model, tmp_path, data):
    path = tmp_path / "prompt"
    path.write_bytes(data)
    ids = record("--prompt-file", path, "--gen", 1)["prompt_ids"]
    assert b"".join(map(model.tokenizer.token_bytes, ids)) == data


def test_a_prompt_file_that_is_not_utf8(cli, tmp_path):
    path = tmp_path / "prompt"
    path.write_bytes(b"0123\xff5")
    complaint = cli.refused("run", "demo", "--prompt-file", path)
    assert f"{path}: the file is not UTF-8: byte 0xff at offset 4" in complaint


def test_a_prompt_file_that_is_not_there(cli, tmp_path):
    assert "No such file" in cli.refused("run", "demo", "--prompt-file", tmp_path / "no")
    assert "Is a directory" in cli.refused("run", "demo", "--prompt-file", tmp_path)


@pytest.mark.parametrize("option", ["--prompt", "--stop"])
def test_a_text_that_is_not_utf8(cli, option):
    arguments = [] if option == "--prompt" else ["--prompt", "a"]
    complaint = cli.refused("run", "demo", *arguments, option, os.fsdecode(b"ab\xff"))
    assert "is not UTF-8: invalid start byte at byte 2" in complaint
    assert "is not UTF-8" in cli.refused("run", "demo", *arguments, option, "ab\ud800")


def test_a_text_that_the_locale_could_not_decode_is_read_as_utf8(record, model):
    surrogates = "é日".encode().decode("ascii", "surrogateescape")
    assert record("--prompt", surrogates)["prompt_ids"] == model.tokenizer.encode("é日")


@pytest.mark.parametrize("arguments", [("run", "demo", "--prompt", ""), ("run", "demo", "--prompt-file", "/dev/null")])
def test_an_empty_prompt(cli, arguments):
    assert "the text is empty" in cli.refused(*arguments)


def test_special_makes_control_tokens_of_their_spellings(record, model):
    [control] = [token for token in sorted(model.stop_ids) if model.tokenizer.decode([token]).startswith("<|")][:1]
    spelled = model.tokenizer.decode([control])
    assert record("--prompt", spelled, "--special")["prompt_ids"] == [control]
    plain = record("--prompt", spelled)["prompt_ids"]
    assert len(plain) > 1
    assert max(plain) < model.tokenizer.n_ordinary


def test_the_model_without_tokenizer_files_takes_ids_only(cli):
    assert cli.ok("run", TINY_A, "--ids", "1,2", "--gen", 3).out.count(",") == 2
    for needs_text in (("--prompt", "a"), ("--ids", "1", "--stop", "a")):
        ran = cli("run", TINY_A, *needs_text)
        assert ran.code == 2
        assert f"{TINY_A / 'tiktoken.model'}: this tokenizer file is missing." in ran.complaint
        assert "memory plan" not in ran.err


@pytest.mark.parametrize("name", ["nowhere", "/dev/null", ""])
def test_no_such_model(cli, name):
    assert "checkpoint directory" in cli.refused("run", name or "/proc/none", "--ids", "1")


# --- options, each with what it does ---


def test_gen(record):
    assert len(record("--ids", "1", "--ignore-eos", "--gen", 3)["generated_ids"]) == 3
    assert len(record("--ids", "1", "--ignore-eos")["generated_ids"]) == 8


def test_generation_ends_where_the_context_ends(cli, tmp_path):
    out = tmp_path / "o.json"
    ran = cli.ok("run", "demo", "--ids", "1,2", "--context", 5, "--gen", 9, "--ignore-eos", "--out", out)
    written = json.loads(out.read_bytes())
    assert (len(written["generated_ids"]), written["finish_reason"]) == (3, "length")
    assert "the context has room for 3 of the 9 tokens asked for." in ran.err
    assert "token 3 of 3" in ran.err


def test_a_prompt_that_fills_the_context_is_refused(cli):
    complaint = cli.refused("run", "demo", "--ids", "1,2,3", "--context", 3)
    assert "the prompt has 3 tokens" in complaint
    assert "--context" in complaint


@pytest.mark.parametrize(
    ("command", "given", "complaint"),
    [
        ("run", ("--ids", "1,1024"), "token id 1024"),
        ("run", ("--ids", "1,2,3,4"), "the prompt has 4 tokens"),
        ("run", ("--prompt", "one two three four five six"), "the prompt has"),
        ("score", ("--ids", "1,99999"), "token id 99999"),
        ("score", ("--ids", "1,2,3,4,5"), "the prompt has 5 tokens"),
        ("demo", ("one two three four five six",), "the prompt has"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_before_weights_are_read(cli, monkeypatch, command, given, complaint):
    def read_weights(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr("k3.api.load_engine", read_weights)
    model = () if command == "demo" else ("demo",)
    assert complaint in cli.refused(command, *model, *given, "--context", 4)


def test_a_score_fills_the_context(cli):
    cli.ok("score", "demo", "--ids", "1,2,3,4", "--context", 4)


@pytest.mark.parametrize("context", [1, 4097])
def test_context_out_of_range(cli, context):
    assert "--context: expected 2 to" in cli.refused("run", "demo", "--ids", "1", "--context", context)


def test_context_is_in_the_plan(record):
    caches = [record("--ids", "1", "--context", n)["plan"]["items"]["latent cache"] for n in (100, 200)]
    assert caches[1] == 2 * caches[0] > 0


def test_temperature_and_seed(record):
    first, again, other = (
        record("--ids", "1", "--temperature", 5, "--seed", seed, "--ignore-eos", "--gen", 12) for seed in (7, 7, 8)
    )
    assert first["generated_ids"] == again["generated_ids"] != other["generated_ids"]
    assert (first["seed"], other["seed"]) == (7, 8)


def test_a_seed_is_drawn_and_reported(cli, record, tmp_path):
    out = tmp_path / "o.json"
    ran = cli.ok("run", "demo", "--ids", "1", "--temperature", 5, "--gen", 12, "--ignore-eos", "--out", out)
    drawn = json.loads(out.read_bytes())
    assert f"seed {drawn['seed']}" in ran.err
    again = record("--ids", "1", "--temperature", 5, "--gen", 12, "--ignore-eos", "--seed", drawn["seed"])
    assert again["generated_ids"] == drawn["generated_ids"]
    assert record("--ids", "1", "--seed", 3)["seed"] is None


@pytest.mark.parametrize("narrow", [("--top-k", 1), ("--top-p", 1e-9)])
def test_top_k_and_top_p_of_one_token_are_greedy(record, model, narrow):
    sampled = ("--temperature", 5, "--seed", 1, "--ignore-eos")
    assert record("--ids", "1", *sampled, *narrow)["generated_ids"] == greedy(model, [1], 8)
    assert record("--ids", "1", *sampled)["generated_ids"] != greedy(model, [1], 8)


def test_stop_is_found_across_tokens_and_not_printed(cli, record, model):
    ids = greedy(model, model.tokenizer.encode("The river"), 24)
    pieces = [model.tokenizer.decode([token]) for token in ids]
    place = next(
        i for i in range(2, 23) if (pieces[i] + pieces[i + 1]).isascii() and len(pieces[i]) > 1 < len(pieces[i + 1])
    )
    stop = pieces[place][-1] + pieces[place + 1][:1]
    text = "".join(pieces)
    arguments = ("--prompt", "The river", "--gen", 24, "--ignore-eos", "--stop", "never there", "--stop", stop)
    written = record(*arguments)
    assert written["finish_reason"] == "stop"
    assert written["text"] == model.tokenizer.decode(ids).partition(stop)[0]
    assert len(written["generated_ids"]) <= place + 2
    assert cli.ok("run", "demo", *arguments, "--quiet").out.rstrip("\n") == written["text"].rstrip("\n")
    assert stop in text


def test_an_empty_stop_is_refused(cli):
    assert "--stop: expected one character or more" in cli.refused("run", "demo", "--ids", "1", "--stop", "")


def test_ignore_eos(record, model, tmp_path):
    """With the first greedy id declared a stop id, the run ends at it unless it is ignored."""
    first = greedy(model, [1], 1)[0]
    checkpoint = tmp_path / "model"
    shutil.copytree(model_path("demo"), checkpoint)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    ended = record("--ids", "1", model=checkpoint)
    assert (ended["generated_ids"], ended["finish_reason"]) == ([first], "stop")
    assert len(record("--ids", "1", "--ignore-eos", model=checkpoint)["generated_ids"]) == 8


def test_the_validation_path_and_every_way_to_compute_agree_in_every_bit(record, monkeypatch):
    prompt = ("--ids", joined(range(1, 40)), "--ignore-eos")
    expected = record(*prompt)
    ways = [
        ("--full-recompute",),
        ("--incremental",),
        ("--chunk", 1),
        ("--chunk", 7),
        ("--threads", 1),
        ("--context", 50),
    ]
    for way in ways:
        assert record(*prompt, *way)["logits_sha256"] == expected["logits_sha256"], way
    monkeypatch.setenv("K3_ISA", "scalar")
    scalar = record(*prompt)
    assert (scalar["logits_sha256"], scalar["isa"]) == (expected["logits_sha256"], "scalar")


def test_full_recompute_runs_the_prefix_again(record):
    steps = [record("--ids", "1,2,3,4", "--ignore-eos", *how)["steps"] for how in ((), ("--full-recompute",))]
    row = steps[0][1]["bytes_read"]["embedding"]
    assert [step["bytes_read"]["embedding"] for step in steps[0]] == [4 * row, *[row] * 7]
    assert [step["bytes_read"]["embedding"] for step in steps[1]] == [(4 + n) * row for n in range(8)]


def test_threads_and_chunk_are_recorded(record, monkeypatch):
    written = record("--ids", "1", "--threads", 2, "--chunk", 5)
    assert (written["threads"], written["chunk"]) == (2, 5)
    monkeypatch.setenv("K3_THREADS", "2")
    assert record("--ids", "1")["threads"] == 2
    assert record("--ids", "1", "--threads", 1)["threads"] == 1


@pytest.mark.parametrize(
    ("name", "value"), [("K3_THREADS", "0"), ("K3_THREADS", "x"), ("K3_THREADS", "9999"), ("K3_ISA", "mmx")]
)
def test_a_wrong_environment_is_refused(cli, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    complaint = cli.refused("run", "demo", "--ids", "1")
    assert name in complaint
    assert repr(value) in complaint


def test_an_instruction_set_that_the_machine_lacks_is_refused(cli, monkeypatch):
    monkeypatch.setenv("K3_ISA", "neon")
    assert "neon" in cli.refused("run", "demo", "--ids", "1")


def test_too_many_threads(cli):
    assert "5000" in cli.refused("run", "demo", "--ids", "1", "--threads", 5000)


def test_layers_binds_what_is_there_and_says_so(cli, tmp_path):
    checkpoint = copy_checkpoint(TINY_A, tmp_path / "model")
    whole = cli.ok("run", checkpoint, "--ids", "1,2", "--layers", 2)
    assert "--layers: 2 of " in whole.err
    assert "not the model's output" in whole.err
    shard_of(checkpoint, 4).unlink()
    assert cli.ok("run", checkpoint, "--ids", "1,2", "--layers", 2).out == whole.out
    assert shard_of(TINY_A, 4).name in cli.refused("run", checkpoint, "--ids", "1,2")
    assert "expected a number from 1 to " in cli.refused("run", checkpoint, "--ids", "1", "--layers", 99)


def test_all_layers_need_no_note(cli):
    assert "--layers" not in cli.ok("run", "demo", "--ids", "1", "--layers", 8).err


def test_tok_and_config_are_looked_for_elsewhere(cli, record, model, tmp_path):
    checkpoint, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    shutil.copytree(model_path("demo"), checkpoint)
    elsewhere.mkdir()
    for name in ("tiktoken.model", "tokenizer_config.json", "config.json"):
        (checkpoint / name).rename(elsewhere / name)
    (checkpoint / "config.json").write_text("{}")
    found = ("--tok", elsewhere, "--config", elsewhere / "config.json")
    expected = greedy(model, model.tokenizer.encode("The river"), 8)
    assert record("--prompt", "The river", "--ignore-eos", *found, model=checkpoint)["generated_ids"] == expected
    assert "tiktoken.model" in cli.refused("run", checkpoint, "--prompt", "a", *found[2:])
    assert cli.refused("run", checkpoint, "--prompt", "a", *found[:2])


def test_tok_gives_text_to_a_run_on_ids(cli, record, model):
    written = record("--ids", "1", "--tok", "demo", "--ignore-eos")
    assert written["text"] == model.tokenizer.decode(written["generated_ids"])
    assert record("--ids", "1")["text"] == ""
    assert "nowhere" in cli.refused("run", "demo", "--ids", "1", "--tok", "nowhere")


def test_what_is_wrong_with_small_files_is_said_before_the_weights_are_loaded(cli):
    ran = cli("run", "demo", "--prompt", "a", "--tok", "nowhere")
    assert ran.code == 2
    assert "memory plan" not in ran.err


def test_verbose_and_quiet(cli):
    assert cli.ok("run", "demo", "--ids", "1", "--gen", 2, "--quiet").err == ""
    for how in ((), ("--verbose",)):  # What is not a terminal gets a line a token anyway.
        err = cli.ok("run", "demo", "--ids", "1", "--gen", 2, "--ignore-eos", *how).err
        lines = err.splitlines()
        assert lines[0].startswith("memory plan: ")
        assert len([line for line in lines if line.startswith(("token 1 of 2, ", "token 2 of 2, "))]) == 2
        assert lines[-1].startswith("2 tokens, ")
        assert "ended by length" in lines[-1]
        assert "\x1b" not in err
        assert "\r" not in err


# --- results ---


@pytest.mark.parametrize("checkpoint", ["demo", TINY_A])
def test_every_field_of_the_record(record, checkpoint):
    with k3.load(checkpoint, threads=2) as loaded:
        logits = loaded.logits([*IDS, *greedy(loaded, IDS, 3)])[len(IDS) - 1 : -1]
    written = record("--ids", joined(IDS), "--gen", 3, "--ignore-eos", "--threads", 2, "--chunk", 2, model=checkpoint)
    assert written.keys() >= NAMES
    assert written["k3_version"] == k3.__version__
    assert written["prompt_ids"] == IDS
    assert written["generated_ids"] == logits.argmax(axis=1).tolist()
    assert written["logits_sha256"] == hashlib.sha256(logits.astype("<f4").tobytes()).hexdigest()
    assert (written["finish_reason"], written["seed"], written["text"]) == ("length", None, "")
    assert (written["threads"], written["chunk"], written["direct_io"]) == (2, 2, True)
    assert written["speculation"] == {"width": 0, "drafted": 0, "accepted": 0, "steps": 0}
    assert written["plan"]["total_bytes"] == sum(written["plan"]["items"].values())
    assert written["peak_rss_bytes"] > 0
    assert [step["token"] for step in written["steps"]] == [1, 2, 3]
    for step, rows in zip(written["steps"], (3, 1, 1), strict=True):
        hidden = loaded.config.hidden_size
        assert step["bytes_read"] == {"trunk": 0, "experts": 0, "head": 0, "embedding": 2 * hidden * rows}
        assert step["expert_requests"] == step["expert_resident_hits"] > 0
        assert step["seconds"] > 0
        assert step["padding_bytes"] == 0


def test_bytes_read_on_demand_are_those_of_the_tensors(record):
    """With memory for neither trunk nor experts every step reads the trunk, the head and the experts asked for."""
    prompt = ("--ids", joined(IDS), "--gen", 2, "--ignore-eos", "--context", 64)
    expected = record(*prompt)
    written = record(*prompt, "--trunk-gb", 0, "--cache-gb", 0)
    assert written["logits_sha256"] == expected["logits_sha256"]
    first, second = (step["bytes_read"] for step in written["steps"])
    config = json.loads((model_path("demo") / "config.json").read_bytes())["text_config"]
    assert second["head"] == 2 * config["hidden_size"] * config["vocab_size"] == first["head"]
    assert second["embedding"] == 2 * config["hidden_size"]
    assert first["embedding"] == 3 * second["embedding"]
    packed = 3 * config["routed_expert_hidden_size"] * config["moe_intermediate_size"]
    assert second["experts"] == written["steps"][1]["expert_requests"] * (packed // 2 + packed // 32)
    assert written["steps"][1]["expert_requests"] == 7 * config["num_experts_per_token"]
    assert [step["expert_resident_hits"] for step in written["steps"]] == [0, 0]
    assert first["trunk"] == second["trunk"] > 0
    assert written["peak_rss_bytes"] > 0


def test_dumped_logits_are_those_of_the_last_prompt_position(cli, model, tmp_path):
    path = tmp_path / "logits.bin"
    cli.ok("run", "demo", "--ids", joined(IDS), "--dump-logits", path, "--gen", 3)
    assert path.read_bytes() == model.logits(IDS)[-1].astype("<f4").tobytes()


@pytest.mark.parametrize("option", ["--out", "--dump-logits"])
@pytest.mark.parametrize("place", ["missing/file", "folder", "/proc/file", "x" * 256])
def test_a_result_that_cannot_be_written_is_refused_before_any_work(cli, tmp_path, option, place):
    (tmp_path / "folder").mkdir()
    ran = cli("run", "demo", "--ids", "1", option, tmp_path / place)
    assert (ran.code, ran.out) == (2, "")
    assert ran.complaint.startswith(f"{option}: ")
    assert "memory plan" not in ran.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder"]


def test_two_results_in_one_file_are_refused(cli, tmp_path):
    complaint = cli.refused("run", "demo", "--ids", "1", "--out", tmp_path / "a", "--dump-logits", tmp_path / "." / "a")
    assert "--dump-logits and --out are both" in complaint


def test_a_failed_run_leaves_old_results_and_nothing_else(cli, tmp_path):
    old = tmp_path / "old.json"
    old.write_text("old")
    cli.refused("run", "demo", "--ids", "9999", "--out", old)
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


def test_a_write_that_fails_leaves_old_results_and_nothing_else(cli, tmp_path, monkeypatch):
    old = tmp_path / "old.json"
    old.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    ran = cli("run", "demo", "--ids", "1", "--out", old)
    assert ran.code == 1
    assert f"{old}: the result could not be written: No space left on device" in ran.complaint
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


def test_a_result_replaces_an_old_one_and_follows_a_link(cli, tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    cli.ok("run", "demo", "--ids", "1", "--out", link)
    assert link.is_symlink()
    assert json.loads(real.read_bytes())["prompt_ids"] == [1]


def test_a_device_is_written_to_and_stays_one(cli):
    cli.ok("run", "demo", "--ids", "1", "--out", "/dev/null")
    assert Path("/dev/null").is_char_device()
    assert "No space left" in cli("run", "demo", "--ids", "1", "--out", "/dev/full").complaint


def test_a_void_generation_names_the_ids_that_must_not_be_used(cli, monkeypatch, tmp_path):
    from k3.engine import generation
    from k3.errors import NonFiniteError

    calls = []
    prefill = generation.prefill

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise NonFiniteError("a logit at position 4 is not finite.")
        return prefill(*arguments)

    monkeypatch.setattr(generation, "prefill", failing)
    ran = cli("run", "demo", "--ids", "1,2", "--out", tmp_path / "o.json")
    printed = ran.out.strip().split(",")
    assert ran.code == 4
    assert len(printed) == 2
    assert f"do not use the ids already printed: [{', '.join(printed)}]" in ran.complaint
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights_end_with_exit_code_4(cli, tmp_path):
    def spoil(values):
        values[-1] = 0x7FC0  # A NaN.

    checkpoint = tmp_path / "model"
    shutil.copytree(model_path("demo"), checkpoint)
    edit_tensor(checkpoint, "language_model.lm_head.weight", "<u2", spoil)
    for command in ("run", "score"):
        complaint = cli.refused(command, checkpoint, "--ids", "1,2", code=4)
        assert "not finite" in complaint


def test_an_interrupted_run_names_the_ids_so_far(cli, monkeypatch):
    from k3.cli import progress

    def interrupt(_, step):
        if step.token == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.Progress, "token", interrupt)
    ran = cli("run", "demo", "--ids", "1,2")
    assert ran.code == 3
    assert ran.complaint == f"interrupted. Ids generated so far: [{ran.out.strip().replace(',', ', ')}]."


# --- demo ---


def test_demo_is_run_with_a_default_prompt(cli, model):
    expected = model.tokenizer.decode(greedy(model, model.tokenizer.encode("The river"), 24))
    ran = cli.ok("demo", "--ignore-eos")
    assert ran.out == expected + "\n"
    assert "random weights" in ran.err
    assert cli.ok("run", "demo", "--prompt", "The river", "--gen", 24, "--ignore-eos").out == ran.out


def test_demo_takes_a_prompt_and_the_options_of_run(cli, tmp_path):
    out = tmp_path / "o.json"
    assert cli.ok("demo", "Hello", "--gen", 2, "--quiet", "--out", out).err == ""
    written = json.loads(out.read_bytes())
    assert (bytes(written["prompt_ids"]), len(written["generated_ids"])) == (b"Hello", 2)
    assert "the text is empty" in cli("demo", "").complaint
