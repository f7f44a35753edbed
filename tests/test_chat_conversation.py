"""The normalisation above the encoder: what it changes, what it refuses and where, and `k3 tokenize --messages`."""

from __future__ import annotations

import json

import pytest

import k3
from chat_helpers import GOOD
from cli_helpers import Cli
from k3.api import model_path
from k3.text.chat.conversation import Conversation
from k3.text.chat.errors import ConversationError

USER = {"role": "user", "content": "x"}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
DEMO = k3.load_tokenizer(model_path("demo"))

CHANGED = {name for name in GOOD if "image" in name or name in ("developer_role", "skipped_role_splits_run")}
"""Published conversations with images, which are refused, and with a developer, who is not passed over."""


def spelled(segments):
    return "".join(text for text, _ in segments)


def refused(*arguments, **settings):
    with pytest.raises(ConversationError) as caught:
        Conversation.of(*arguments, **settings)
    assert str(caught.value).startswith(f"{caught.value.field}: ")
    assert isinstance(caught.value, k3.K3Error)
    return caught.value.field


@pytest.mark.parametrize("name", sorted(GOOD.keys() - CHANGED))
def test_published_conversations_are_not_changed(name):
    case = GOOD[name]
    options = dict(case["options"])
    effort = options.pop("thinking_effort", None)
    effort = effort if options.pop("thinking", True) else "none"
    generate = options.pop("add_generation_prompt", True)
    segments = Conversation.of(case["messages"], effort=effort, **options).segments(generate)
    if effort is None:
        # The default effort is a message of its own, behind the tools.
        options["thinking_effort"] = "max"
        expected = k3.render_segments(case["messages"], add_generation_prompt=generate, **options)
        start = next(i for i in range(len(segments)) if segments[i].text == "thinking-effort") - 8
        stop = start + len(k3.render_segments([], thinking_effort="max", add_generation_prompt=False))
        assert [list(segment) for segment in segments[:start] + segments[stop:]] == case["segments"]
    else:
        expected = k3.render_segments(case["messages"], **case["options"])
    assert segments == expected


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (None, "max"),
        ("minimal", "low"),
        ("low", "low"),
        ("medium", "medium"),
        ("high", "high"),
        ("xhigh", "max"),
        ("max", "max"),
    ],
)
def test_efforts(asked, told):
    conversation = Conversation.of([USER], effort=asked)
    assert conversation.thinking
    assert conversation.segments() == k3.render_segments([USER], thinking_effort=told)


def test_effort_none_switches_thinking_off():
    conversation = Conversation.of([USER], effort="none")
    assert not conversation.thinking
    assert conversation.segments() == k3.render_segments([USER], thinking=False)


@pytest.mark.parametrize("effort", ["ultra", "", "MAX", 3, True, ["max"]])
def test_other_efforts_are_refused(effort):
    assert refused([USER], effort=effort) == "reasoning_effort"


def test_a_developer_is_the_system():
    def segments(role):
        return Conversation.of([{"role": role, "content": "D", "name": "n"}, USER]).segments()

    assert segments("developer") == segments("system")
    assert 'role="system" name="n"<|sep|>D<' in spelled(segments("developer"))
    later = {"role": "developer", "tools": [CLOCK]}
    assert "## New Tools Available" in spelled(Conversation.of([USER, later]).segments())


def test_a_typed_image_placeholder_stays_text():
    text = "see <|kimi_image_placeholder|> here"
    assert (text, False) in Conversation.of([{"role": "user", "content": text}]).segments()


def test_content_may_be_null_beside_calls():
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    result = {"role": "tool", "tool_call_id": "a", "content": "12"}
    conversation = Conversation.of([USER, message, result], effort="none")
    assert conversation.segments() == k3.render_segments([USER, message, result], thinking=False)


MANY = [
    ([], "messages"),
    ("hi", "messages"),
    (None, "messages"),
    (["hi"], "messages[0]"),
    ([USER, {"role": "critic", "content": "x"}], "messages[1].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": "x", "audio": {"id": "a"}}], "messages[0].audio"),
    ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text", "text": "x", "speed": 2}]}], "messages[0].content[0].speed"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "video_url"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
    ([{"role": "user", "content": "x", "name": "\udfff"}], "messages[0].name"),
    ([{"role": "assistant", "content": "x", "reasoning_content": 1}], "messages[0].reasoning_content"),
    ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], "messages[0].tool_calls[0].name"),
    ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls[0].type"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
    ([{"role": "system", "content": "x", "tools": [{"type": "web_search"}]}], "messages[0].tools[0].type"),
]


@pytest.mark.parametrize(("messages", "field"), MANY)
def test_messages_that_are_refused(messages, field):
    assert refused(messages) == field


@pytest.mark.parametrize(
    "arguments", ['{"a": NaN}', '{"a": [1, -Infinity]}', '{"a": 1e999}', '{"a": "\\ud800"}', {"a": float("inf")}, "[1]"]
)
def test_arguments_that_no_json_can_hold(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    assert refused([{"role": "assistant", "tool_calls": [call]}]).startswith(
        "messages[0].tool_calls[0].function.arguments"
    )


def test_arguments_that_are_no_json_stay():
    call = {"function": {"name": "f", "arguments": '{"a": oops'}}
    assert '{"a": oops' in spelled(Conversation.of([{"role": "assistant", "tool_calls": [call]}]).segments())


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ({}, "tools"),
        (["clock"], "tools[0]"),
        ([CLOCK, {"type": "web_search"}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "x": float("nan")}}], "tools[0].function.x"),
        ([{"type": "function", "function": {"name": "f", "x": ["\ud800"]}}], "tools[0].function.x[0]"),
        ([{"type": "function", "function": {"name": "f", "x": {"\ud800": 1}}}], "tools[0].function.x"),
        ([{"type": "function", "function": {"name": "f", "x": {1}}}], "tools[0].function.x"),
    ],
)
def test_tools_that_are_refused(tools, field):
    assert refused([USER], tools) == field


def test_tool_choices():
    named = {"type": "function", "function": {"name": "clock"}}
    for choice in (None, "auto", "none", "required", named):
        segments = Conversation.of([USER], [CLOCK], "low", choice).segments()
        assert segments == k3.render_segments([USER], [CLOCK], thinking_effort="low", tool_choice=choice)
    later = [USER, {"role": "system", "tools": [CLOCK]}]
    assert Conversation.of(later, tool_choice=named).tool_choice == named
    assert refused([USER], tool_choice="required") == "tool_choice"
    assert refused([USER], tool_choice=named) == "tool_choice.function.name"
    assert refused([USER], [CLOCK], tool_choice="any") == "tool_choice"
    assert refused([USER], [CLOCK], tool_choice={"type": "function"}) == "tool_choice"


@pytest.mark.parametrize(
    ("response_format", "field"),
    [
        ("json", "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": None}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"maximum": float("inf")}}},
            "response_format.json_schema.schema.maximum",
        ),
    ],
)
def test_response_formats_that_are_refused(response_format, field):
    assert refused([USER], response_format=response_format) == field


def test_deep_nesting_is_refused():
    schema = {}
    for _ in range(100_000):
        schema = {"items": schema}
    assert refused([USER], response_format={"type": "json_schema", "json_schema": {"schema": schema}}) == "messages"
    call = {"function": {"name": "f", "arguments": '{"a":' * 100_000}}
    assert refused([{"role": "assistant", "tool_calls": [call]}]) == "messages"


def test_a_result_of_no_tool_is_refused_when_it_is_rendered():
    conversation = Conversation.of([USER, {"role": "tool", "tool_call_id": "a", "content": "1"}])
    with pytest.raises(ConversationError, match=r"messages\[1\]: the tool of this result can't be told"):
        conversation.segments()


# --- k3 tokenize --messages ---


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture
def given(tmp_path):
    def write(value):
        path = tmp_path / "F.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return write


WHOLE = {
    "messages": [{"role": "user", "content": "<|open|> é"}],
    "tools": [CLOCK],
    "reasoning_effort": "none",
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
}


def test_tokenize_of_messages_in_json(cli, given):
    record = json.loads(cli.ok("tokenize", "demo", "--messages", given(WHOLE), "--json").out)
    rest = {name: value for name, value in WHOLE.items() if name not in ("messages", "reasoning_effort")}
    segments = k3.render_segments(WHOLE["messages"], thinking=False, **rest)
    assert record["segments"] == [list(segment) for segment in segments]
    assert record["text"] == spelled(segments)
    assert record["ids"] == [i for text, control in segments for i in DEMO.encode(text, allow_special=control)]
    assert "".join(DEMO.decode([i]) if i >= DEMO.n_ordinary else "" for i in record["ids"]) == "".join(
        text for text, control in segments if control
    )


def test_tokenize_of_messages_in_lines(cli, given):
    *lines, last = cli.ok("tokenize", "demo", "--messages", given([USER])).out.splitlines()
    segments = Conversation.of([USER]).segments()
    assert [line.split()[0] for line in lines] == ["control" if control else "text" for _, control in segments]
    assert all(repr(segment.text) in line for segment, line in zip(segments, lines, strict=True))
    assert ",".join(line.split()[-1] for line in lines) == last


def test_tokenize_refuses_messages(cli, given, tmp_path):
    assert "the file is not JSON" in cli.refused("tokenize", "demo", "--messages", given("{"))
    assert "messages[0].role" in cli.refused("tokenize", "demo", "--messages", given([{"role": "x"}]))
    assert "stream: this field is not known" in cli.refused("tokenize", "demo", "--messages", given({"stream": True}))
    assert "No such file" in cli.refused("tokenize", "demo", "--messages", tmp_path / "none")
    assert "expected TEXT, --file PATH or --messages" in cli.refused(
        "tokenize", "demo", "x", "--messages", given([USER])
    )
    assert "--special" in cli.refused("tokenize", "demo", "--messages", given([USER]), "--special")
