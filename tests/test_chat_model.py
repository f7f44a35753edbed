"""`model.render` and `model.chat` on the embedded model."""

from __future__ import annotations

import pytest

import k3
from chat_helpers import CASES
from k3.api import Answer
from k3.engine.generation import GenerationParams
from k3.text.chat.reader import ReplyReader
from k3.text.chat.segments import encode_segments

ASK = [{"role": "user", "content": "Count to three."}]


@pytest.fixture(scope="module")
def model():
    with k3.load("demo", threads=1) as loaded:
        yield loaded


def test_render_has_the_published_segments_and_the_default_effort(model):
    case = CASES["plain_effort_max"]
    ids = [i for text, control in case["segments"] for i in model.tokenizer.encode(text, allow_special=control)]
    assert model.render(case["messages"]) == ids
    assert model.render(ASK, effort="none") == encode_segments(
        model.tokenizer, [(text, control) for text, control in CASES["nonthinking"]["segments"]]
    )
    case = CASES["tool_choice_and_response_format"]
    options = {name: case["options"][name] for name in ("tools", "tool_choice", "response_format")}
    segments = [(text, control) for text, control in case["segments"]]
    assert model.render(case["messages"], effort="low", **options) == encode_segments(model.tokenizer, segments)
    history = model.render(ASK, effort="none", add_generation_prompt=False)
    assert model.render(ASK, effort="none")[: len(history)] == history
    assert history[-1] == model.tokenizer.control["<|end_of_msg|>"]


def test_chat_is_generate_read_as_a_reply(model):
    answer = model.chat(ASK, effort="low", max_new_tokens=12, seed=7)
    deltas = list(answer)
    assert model.report() is answer.generation.report
    # The defaults of chat, spelled out.
    ids = [
        token.id for token in model.generate(model.render(ASK, effort="low"), 12, temperature=1.0, top_p=0.95, seed=7)
    ]
    assert answer.generation.report.generated_ids == ids
    reader = ReplyReader(model.tokenizer)
    expected = [delta for token in ids if token not in model.stop_ids for delta in reader.push(token)]
    expected += reader.finish("stop" if ids[-1] in model.stop_ids else "length")
    assert deltas == expected
    assert answer.reply == reader.reply


def test_chat_begins_in_the_channel_that_the_prompt_opened(model):
    [first, *_] = model.chat(ASK, effort="high", max_new_tokens=4, seed=1)
    assert first.kind == "reasoning"
    [first, *_] = model.chat(ASK, effort="none", max_new_tokens=4, seed=1)
    assert first.kind == "content"


def test_the_limit_ends_a_reply(model):
    answer = model.chat(ASK, effort="none", max_new_tokens=5, temperature=0.0)
    text = "".join(delta.text for delta in answer)
    assert len(answer.generation.report.generated_ids) == 5
    assert (answer.reply.content, answer.reply.finish_reason) == (text, "length")


def test_a_stop_id_ends_a_reply_and_is_not_shown(model):
    prompt = model.render(ASK, effort="none")
    ids = [token.id for token in model.generate(prompt, 6)]
    stop = frozenset({next(i for i in ids if ids.index(i) >= 2)})
    reader = ReplyReader(model.tokenizer, thinking=False)
    answer = Answer(model.start(prompt, GenerationParams(6, stop_ids=stop)), reader, stop)
    kept = ids[: next(place for place, i in enumerate(ids) if i in stop)]
    assert "".join(delta.text for delta in answer) == model.tokenizer.decode(kept)
    assert answer.reply.finish_reason == "stop"


def test_a_stop_string_ends_the_generation(model):
    whole = model.chat(ASK, effort="none", max_new_tokens=24, seed=3)
    text = "".join(delta.text for delta in whole)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = model.chat(ASK, effort="none", max_new_tokens=24, seed=3, stop=stop)
    assert "".join(delta.text for delta in answer) == text[: text.index(stop)]
    report = answer.generation.report
    assert (answer.reply.finish_reason, report.finish_reason) == ("stop", "stop")
    assert report.peak_rss_bytes
    assert len(report.generated_ids) < len(whole.generation.report.generated_ids)


def test_a_stop_string_is_not_looked_for_in_the_thought(model):
    whole = model.chat(ASK, effort="low", max_new_tokens=12, seed=3)
    thought = "".join(delta.text for delta in whole)
    answer = model.chat(ASK, effort="low", max_new_tokens=12, seed=3, stop=thought[2:4])
    assert "".join(delta.text for delta in answer) == thought
    assert answer.reply.reasoning == thought


def test_an_answer_that_is_left_early_has_what_came(model):
    answer = model.chat(ASK, effort="none", max_new_tokens=24, seed=3)
    text = next(answer).text + next(answer).text
    assert answer.reply.content == text
    assert answer.reply.finish_reason is None
    follow_up = [*ASK, answer.reply.message(), {"role": "user", "content": "Go on."}]
    assert text in model.tokenizer.decode(model.render(follow_up))


def test_a_seed_is_drawn_without_one(model):
    assert model.chat(ASK, max_new_tokens=1).generation.report.seed is not None
    assert model.chat(ASK, max_new_tokens=1, temperature=0.0).generation.report.seed is None


def test_as_many_tokens_as_the_context_has_room_for():
    with k3.load("demo", threads=1, context=96) as model:
        answer = model.chat(ASK, effort="none", temperature=0.0)
        rows = len(answer.generation.report.prompt_ids)
        list(answer)
        made = answer.generation.report.generated_ids
        assert rows + len(made) == 96 or made[-1] in model.stop_ids


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"effort": "ultra"},
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"stop": ""},
        {"tool_choice": "required"},
    ],
)
def test_what_is_wrong_is_refused_at_the_call(model, wrong):
    with pytest.raises(k3.K3Error):
        model.chat(**{"messages": ASK, **wrong})


def test_chat_needs_the_tokenizer():
    with k3.load("demo", threads=1, with_tokenizer=False) as model:
        for call in (model.render, model.chat):
            with pytest.raises(k3.K3Error, match=r"tiktoken\.model"):
                call(ASK)
