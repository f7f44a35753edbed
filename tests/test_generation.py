"""Generation and the Python interface: what ends a text, what is streamed, what is reported."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import k3
from conftest import TINY_C
from k3.errors import TokenizerError, UsageError

PROMPT = [84, 104, 101]


@pytest.fixture(scope="module")
def model():
    with k3.load("demo", context=64, threads=2) as loaded:
        yield loaded


def generate(model, prompt=PROMPT, **settings):
    return list(model.generate(prompt, **({"ignore_eos": True} | settings)))


def greedy(model, count=12):
    """Greedy ids and texts by full passes and arg-max."""
    ids = list(PROMPT)
    for _ in range(count):
        ids.append(int(np.argmax(model.logits(ids)[-1])))
    return ids[len(PROMPT) :]


def test_greedy_is_the_arg_max_of_full_passes(model):
    assert [token.id for token in generate(model, max_new_tokens=12)] == greedy(model)


def test_text_is_that_of_the_ids(model):
    tokens = generate(model, max_new_tokens=40)
    assert "".join(token.text for token in tokens) == model.tokenizer.decode([token.id for token in tokens])


def test_log_probabilities_are_of_the_raw_logits(model):
    tokens = generate(model, max_new_tokens=5, temperature=2.0, top_k=3, seed=1)
    logits = model.logits(PROMPT + [token.id for token in tokens])[len(PROMPT) - 1 : -1].astype(np.float64)
    expected = [row[token.id] - np.log(np.exp(row).sum()) for row, token in zip(logits, tokens, strict=True)]
    assert np.abs(np.array([token.logprob for token in tokens]) - expected).max() < 1e-5


def test_a_stop_id_ends_the_text_and_is_not_in_it(model, monkeypatch):
    ids = greedy(model)
    stop = ids[4]
    monkeypatch.setattr(model, "stop_ids", frozenset({stop}))
    place = ids.index(stop)
    tokens = generate(model, max_new_tokens=12, ignore_eos=False)
    assert [token.id for token in tokens] == ids[: place + 1]
    assert model.report().finish_reason == "stop"
    assert model.report().generated_ids[-1] == stop
    assert "".join(token.text for token in tokens) == model.tokenizer.decode(ids[:place])
    assert len(generate(model, max_new_tokens=12)) == 12


def test_stop_ids_come_from_all_places(model):
    control = model.tokenizer.control
    assert model.stop_ids == {control["<|end_of_msg|>"], control["[EOS]"], control["[EOT]"]}


def test_a_stop_string_is_cut_out(model):
    whole = "".join(token.text for token in generate(model, max_new_tokens=20))
    stop = whole[9:13]
    tokens = generate(model, max_new_tokens=20, stop=["never", stop])
    assert "".join(token.text for token in tokens) == whole[: whole.index(stop)]
    assert model.report().finish_reason == "stop"
    assert model.report().text == whole[: whole.index(stop)]


def test_text_held_back_for_a_stop_string_comes_at_the_end(model):
    whole = "".join(token.text for token in generate(model, max_new_tokens=8))
    assert "".join(t.text for t in generate(model, max_new_tokens=8, stop=whole[-2:] + "\0")) == whole


def test_the_context_ends_a_generation(model):
    tokens = generate(model, prompt=[7] * 60, max_new_tokens=10)
    assert len(tokens) == 4
    assert model.report().finish_reason == "length"


@pytest.mark.parametrize("length", [64, 65, 200])
def test_a_prompt_that_fills_the_context_is_refused(model, length):
    with pytest.raises(UsageError, match=f"the prompt has {length} tokens, and the context of 64"):
        model.generate([7] * length)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"max_new_tokens": 0}, "max_new_tokens"), ({"temperature": -1}, "temperature"), ({"stop": [""]}, "Stop string")],
)
def test_bad_parameters_are_refused_at_the_call(model, settings, message):
    with pytest.raises(UsageError, match=message):
        model.generate(PROMPT, **settings)


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(UsageError, match="no tokens"):
        model.generate([])
    with pytest.raises(UsageError, match="at least one token"):
        model.logits([])


def test_sampling_is_repeatable_and_a_drawn_seed_is_reported(model):
    settings = {"max_new_tokens": 10, "temperature": 1.5}
    first = [token.id for token in generate(model, **settings)]
    seed = model.report().seed
    assert [token.id for token in generate(model, **settings, seed=seed)] == first
    assert [token.id for token in generate(model, **settings, seed=seed ^ 1)] != first


def test_the_draw_of_a_token_takes_its_place_in_the_sequence(model):
    """Continuing a sampled text from its middle gives the same rest."""
    settings = {"temperature": 1.5, "seed": 77}
    ids = [token.id for token in generate(model, max_new_tokens=10, **settings)]
    rest = [token.id for token in generate(model, PROMPT + ids[:4], max_new_tokens=6, **settings)]
    assert rest == ids[4:]


def test_report(model):
    tokens = generate(model, max_new_tokens=6)
    report = model.report()
    assert report.prompt_ids == PROMPT
    assert report.generated_ids == [token.id for token in tokens]
    assert [step.token for step in report.steps] == [1, 2, 3, 4, 5, 6]
    row = model.config.hidden_size * 2
    assert [step.bytes_read.embedding for step in report.steps] == [3 * row, *[row] * 5]
    assert all(step.seconds > 0 for step in report.steps)
    moe = len(model.config.moe_layers) * model.config.num_experts_per_token
    assert [step.expert_requests for step in report.steps[1:]] == [moe] * 5
    logits = model.logits(PROMPT + report.generated_ids)[len(PROMPT) - 1 : -1]
    assert report.logits_sha256 == hashlib.sha256(logits.tobytes()).hexdigest()


def test_without_tokenizer_files_there_are_ids_only():
    with k3.load(TINY_C, context=64) as model:
        assert all(token.text == "" for token in model.generate([1, 2], max_new_tokens=3))
        with pytest.raises(TokenizerError, match=r"tiktoken.model"):
            _ = model.tokenizer
        with pytest.raises(UsageError, match="--tok"):
            model.generate([1], stop="x")
        with pytest.raises(UsageError, match="no report"), k3.load("demo", context=8) as fresh:
            fresh.report()


def test_a_tokenizer_of_another_size_is_refused():
    with pytest.raises(TokenizerError, match="1024 ids, and the model's vocab_size is 272"):
        k3.load(TINY_C, tokenizer="demo")


def test_fewer_layers_need_only_their_shards(checkpoint):
    with k3.load(checkpoint, layers=2, context=64) as model:
        expected = model.logits([1, 2, 3])
    for number in range(3, 10):
        (checkpoint / f"model-{number:05}-of-000012.safetensors").unlink()
    with k3.load(checkpoint, layers=2, context=64) as model:
        assert np.array_equal(model.logits([1, 2, 3]), expected)
    with pytest.raises(k3.K3Error, match="model-00003-of-000012"):
        k3.load(checkpoint, layers=3)


@pytest.mark.parametrize(
    "settings", [{"layers": 0}, {"layers": 10}, {"context": 1}, {"context": 1 << 40}, {"chunk": 0}]
)
def test_load_options_out_of_range(settings):
    with pytest.raises(UsageError, match="expected"):
        k3.load(TINY_C, **settings)


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(UsageError, match="expected a checkpoint directory"):
        k3.load(tmp_path / "nothing")
    with pytest.raises(k3.K3Error, match=r"config.json"):
        k3.load(tmp_path)
