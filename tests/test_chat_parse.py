"""Replies read token by token: the published ones, broken ones, and whatever else a model may write."""

from __future__ import annotations

import json
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import k3
from chat_helpers import golden_replies
from conftest import shared_file
from k3.api import model_path
from k3.text.chat.arguments import ArgumentsWriter
from k3.text.chat.reader import ReplyReader

REPLIES = golden_replies()

OPEN, CLOSE, SEP, EOM = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
THINK_CLOSE = f"{CLOSE}think{SEP}"
RESPONSE, RESPONSE_CLOSE = f"{OPEN}response{SEP}", f"{CLOSE}response{SEP}"
TOOLS, TOOLS_CLOSE, CALL_CLOSE = f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}", f"{CLOSE}call{SEP}"
END = f"{CLOSE}message{SEP}{EOM}"
DEMO = k3.load_tokenizer(model_path("demo"))


def call(name="f", number=1):
    return f'{OPEN}call tool="{name}" index="{number}"{SEP}'


def argument(key, kind, value):
    return f'{OPEN}argument key="{key}" type="{kind}"{SEP}{value}{CLOSE}argument{SEP}'


@pytest.fixture(scope="module", params=["embedded", "released"])
def tokenizer(request):
    if request.param == "embedded":
        return DEMO
    shared_file("data/tiktoken.model")
    return k3.load_tokenizer(shared_file("data/tokenizer_config.json").parent)


def bytewise(tokenizer, ids):
    """The same reply with every ordinary token taken apart into its bytes."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.n_ordinary) if len(tokenizer.token_bytes(i)) == 1}
    for token in ids:
        if token < tokenizer.n_ordinary:
            yield from (single[bytes([byte])] for byte in tokenizer.token_bytes(token))
        else:
            yield token


def joined(deltas):
    """The deltas with neighbours of one kind, or of one call, put together."""
    runs = groupby(deltas, key=lambda delta: (delta.kind, delta.index, delta.id, delta.name))
    return [(*key, "".join(delta.text for delta in run)) for key, run in runs]


def read(ids, tokenizer=DEMO, reason="stop", **options):
    """All deltas of a reply, and the reply."""
    reader = ReplyReader(tokenizer, call_prefix="call-", **options)
    deltas = [delta for token in ids for delta in reader.push(token)]
    deltas += reader.finish(reason)
    assert all(delta.text for delta in deltas if delta.kind != "tool_call")
    for kind, text in (("reasoning", reader.reply.reasoning), ("content", reader.reply.content)):
        assert "".join(delta.text for delta in deltas if delta.kind == kind) == text
    for index, one in enumerate(reader.reply.calls):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert (first.kind, first.text, first.id, first.name) == ("tool_call", "", one.id, one.name)
        assert "".join(delta.text for delta in rest) == one.arguments
        assert all(delta.text for delta in rest)
    return deltas, reader.reply


def said(text, reason="stop", **options):
    """What a reply, given with control tokens spelled, comes to: reasoning, content, calls, finish reason."""
    _, reply = read(DEMO.encode(text, allow_special=True), reason=reason, **options)
    return reply.reasoning, reply.content, [(one.name, one.arguments) for one in reply.calls], reply.finish_reason


# --- the published replies ---


@pytest.mark.parametrize("name", REPLIES)
def test_published_replies(tokenizer, name):
    message = REPLIES[name].message
    _, reply = read(REPLIES[name].ids(tokenizer), tokenizer)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    assert reply.reasoning == reasoning
    assert reply.content == (message["content"] or "")
    calls = message.get("tool_calls") or []
    assert [one.name for one in reply.calls] == [one["function"]["name"] for one in calls]
    for one, golden in zip(reply.calls, calls, strict=True):
        given = golden["function"]["arguments"]
        expected = json.loads(given.strip() or "{}") if isinstance(given, str) else given
        # By their spelling, which tells 1 from 1.0 and true, and keeps the keys' order.
        assert json.dumps(json.loads(one.arguments)) == json.dumps(expected)
        assert one.complete
    assert reply.finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize("name", REPLIES)
def test_published_replies_in_every_split(tokenizer, name):
    ids = REPLIES[name].ids(tokenizer)
    whole, reply = read(ids, tokenizer)
    for cut in range(len(ids) + 1):
        _, before = read(ids[:cut], tokenizer, reason="length")
        assert reply.reasoning.startswith(before.reasoning)
        assert reply.content.startswith(before.content)
        assert [one.name for one in before.calls] == [one.name for one in reply.calls[: len(before.calls)]]
        for one, full in zip(before.calls, reply.calls, strict=False):
            given, all_given = json.loads(one.arguments), json.loads(full.arguments)
            assert list(given) == list(all_given)[: len(given)]
            assert one.arguments == full.arguments or not one.complete
        reader = ReplyReader(tokenizer, call_prefix="call-")
        first = [delta for token in ids[:cut] for delta in reader.push(token)]
        second = [delta for token in ids[cut:] for delta in reader.push(token)]
        assert joined(first + second + reader.finish("stop")) == joined(whole)


@pytest.mark.parametrize("name", REPLIES)
def test_how_the_text_is_cut_into_tokens_makes_no_difference(tokenizer, name):
    ids = REPLIES[name].ids(tokenizer)
    assert joined(read(bytewise(tokenizer, ids), tokenizer)[0]) == joined(read(ids, tokenizer)[0])


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_renders_to_the_tokens_that_it_came_in(tokenizer, name):
    _, reply = read(REPLIES[name].ids(tokenizer), tokenizer)
    history = k3.render_segments([reply.message()], add_generation_prompt=False)
    assert [tuple(segment) for segment in history][-len(REPLIES[name].segments) :] == REPLIES[name].segments


# --- replies that break the format ---

ONE_CALL = [("f", '{"x": "y"}')]
A_CALL = f"{call()}{argument('x', 'string', 'y')}{CALL_CLOSE}"

BROKEN = {
    "think not closed": (f"a{RESPONSE}b{RESPONSE_CLOSE}{END}", ("a", "b", [], "stop")),
    "response not closed": (f"a{THINK_CLOSE}{RESPONSE}b{END}", ("a", "b", [], "stop")),
    "nothing closed": (f"a{RESPONSE}b{EOM}", ("a", "b", [], "stop")),
    "end at once": (EOM, ("", "", [], "stop")),
    "end of text at once": ("[EOS]", ("", "", [], "stop")),
    "message closed at once": (END, ("", "", [], "stop")),
    "thought only": (f"a{EOM}", ("a", "", [], "stop")),
    "empty thought": (f"{THINK_CLOSE}{RESPONSE}b{RESPONSE_CLOSE}{END}", ("", "b", [], "stop")),
    "response not opened": (f"a{THINK_CLOSE}b{RESPONSE_CLOSE}{END}", ("a", "b", [], "stop")),
    "blanks between channels": (f"a{THINK_CLOSE}\n{RESPONSE}b{RESPONSE_CLOSE}\n{END}", ("a", "b", [], "stop")),
    "text behind the response": (f"{RESPONSE}b{RESPONSE_CLOSE}c{END}", ("", "bc", [], "stop")),
    "response closed twice": (f"{RESPONSE}b{RESPONSE_CLOSE}{RESPONSE_CLOSE}{END}", ("", "b", [], "stop")),
    "response opened twice": (f"a{RESPONSE}{RESPONSE}b{END}", ("a", "b", [], "stop")),
    "think opened again": (f"{OPEN}think{SEP}a{THINK_CLOSE}{RESPONSE}b{END}", ("a", "b", [], "stop")),
    "whole message begun again": (
        f'{OPEN}message role="assistant"{SEP}{OPEN}think{SEP}a{THINK_CLOSE}{RESPONSE}b{END}',
        ("a", "b", [], "stop"),
    ),
    "tools out of a thought": (f"a{TOOLS}{A_CALL}{TOOLS_CLOSE}{END}", ("a", "", ONE_CALL, "tool_calls")),
    "tools out of a response": (f"a{RESPONSE}b{TOOLS}{A_CALL}{END}", ("a", "b", ONE_CALL, "tool_calls")),
    "call without tools": (f"a{RESPONSE}b{A_CALL}{END}", ("a", "b", ONE_CALL, "tool_calls")),
    "nothing of a call closed": (
        f'{TOOLS}{call()}{OPEN}argument key="x" type="string"{SEP}y{EOM}',
        ("", "", ONE_CALL, "tool_calls"),
    ),
    "call not closed before the next": (
        f"{TOOLS}{call()}{argument('x', 'string', 'y')}{call('g', 2)}{CALL_CLOSE}{TOOLS_CLOSE}{END}",
        ("", "", [*ONE_CALL, ("g", "{}")], "tool_calls"),
    ),
    "argument not closed before the next": (
        f'{TOOLS}{call()}{OPEN}argument key="x" type="number"{SEP}1{argument("z", "string", "2")}{CALL_CLOSE}{END}',
        ("", "", [("f", '{"x": 1, "z": "2"}')], "tool_calls"),
    ),
    "response behind tools": (f"{TOOLS}{A_CALL}{RESPONSE}b{END}", ("", "b", ONE_CALL, "tool_calls")),
    "text among calls": (f"{TOOLS}a{A_CALL}b{TOOLS_CLOSE}{END}", ("", "", ONE_CALL, "tool_calls")),
    "JSON without its element": (
        f'{TOOLS}{call()}\n{{"x": "y"}}{CALL_CLOSE}{END}',
        ("", "", [("f", '{"x": "y"}')], "tool_calls"),
    ),
    "no attributes": (
        f"{OPEN}call{SEP}{OPEN}argument{SEP}y{CALL_CLOSE}{END}",
        ("", "", [("", '{"": "y"}')], "tool_calls"),
    ),
    "no type": (
        f'{call()}{OPEN}argument key="x"{SEP}[1]{CLOSE}argument{SEP}{CALL_CLOSE}{END}',
        ("", "", [("f", '{"x": [1]}')], "tool_calls"),
    ),
    "argument without a call": (f"{RESPONSE}b{argument('x', 'string', 'y')}{END}", ("", "by", [], "stop")),
    "unknown tag": (
        f'a{OPEN}mood kind="x"{SEP}b{CLOSE}mood{SEP}{RESPONSE}c{OPEN}i{SEP}d{CLOSE}i{SEP}e{END}',
        ("ab", "cde", [], "stop"),
    ),
    "separator missing": (f"a{CLOSE}think{OPEN}response{SEP}b{END}", ("a", "b", [], "stop")),
    "separators alone": (f"a{SEP}b{SEP}{SEP}{RESPONSE}c{SEP}d{END}", ("ab", "cd", [], "stop")),
    "marks alone": (f"a{OPEN}{OPEN}{CLOSE}{CLOSE}{SEP}{RESPONSE}b{OPEN}{SEP}c{END}", ("a", "bc", [], "stop")),
    "other control tokens": (f"a[BOS]b<|media_pad|>{RESPONSE}c<|media_begin|>d{END}", ("ab", "cd", [], "stop")),
    "another's turn": (f'{RESPONSE}b{OPEN}message role="user"{SEP}hi{EOM}', ("", "b", [], "stop")),
    "text behind the message": (
        f"{RESPONSE}b{RESPONSE_CLOSE}{CLOSE}message{SEP}c{RESPONSE}d{EOM}",
        ("", "b", [], "stop"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_replies(name):
    text, expected = BROKEN[name]
    assert said(text) == expected


@pytest.mark.parametrize("name", BROKEN)
def test_broken_replies_cut_anywhere_show_no_marks(name):
    ids = DEMO.encode(BROKEN[name][0], allow_special=True)
    for cut in range(len(ids)):
        _, reply = read(ids[:cut], reason="length")
        shown = [reply.reasoning, reply.content, *(one.arguments for one in reply.calls)]
        assert not any("<|" in text or "[BOS]" in text for text in shown)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'{TOOLS}{call()}{OPEN}argument key="x"', [("f", "{}", False)]),
        (f'{TOOLS}{call()}{argument("a", "number", "1")}{OPEN}argument key="x"', [("f", '{"a": 1}', False)]),
        (f'{TOOLS}{call()}{OPEN}argument key="x" type="string"{SEP}ab', [("f", '{"x": "ab"}', False)]),
        # The rest of a number might change it.
        (f'{TOOLS}{call()}{OPEN}argument key="x" type="number"{SEP}12', [("f", "{}", False)]),
        (f"{TOOLS}{call()}{argument('a', 'number', '1')}{CLOSE}cal", [("f", '{"a": 1}', False)]),
        (f"{TOOLS}{A_CALL}{OPEN}call to", [("f", '{"x": "y"}', True)]),
        (f"{TOOLS}{A_CALL}{TOOLS_CLOSE}{CLOSE}message{SEP}", [("f", '{"x": "y"}', True)]),
        (f'{TOOLS}{call()}{OPEN}json type="object"{SEP}{{"a', [("f", '{"a', False)]),
    ],
)
def test_calls_that_are_cut_off(text, expected):
    _, reply = read(DEMO.encode(text, allow_special=True), reason="length")
    assert [(one.name, one.arguments, one.complete) for one in reply.calls] == expected
    whole = text.endswith(f"{CLOSE}message{SEP}")
    assert reply.finish_reason == ("tool_calls" if whole else "length")
    kept = reply.message().get("tool_calls", [])
    assert [one["function"]["name"] for one in kept] == [name for name, _, complete in expected if complete]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("string", "", '""'),
        ("string", 'a "b"\n\\ & &amp; é <c>', json.dumps('a "b"\n\\ & &amp; é <c>', ensure_ascii=False)),
        ("string", "7", '"7"'),
        ("number", "7", "7"),
        ("number", "1000.0", "1000.0"),
        ("number", "12345678901234567890", "12345678901234567890"),
        ("number", "0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
        ("boolean", "true", "true"),
        ("null", " null\n", "null"),
        ("object", '{"b": 1, "a": [1.0, "é"]}', '{"b": 1, "a": [1.0, "é"]}'),
        ("array", "[]", "[]"),
        # What is no JSON, or nothing that JSON should hold, is kept as text.
        ("number", "seven", '"seven"'),
        ("number", "NaN", '"NaN"'),
        ("number", "1e999", '"1e999"'),
        ("array", "[-Infinity]", '"[-Infinity]"'),
        ("object", '{"a": ', json.dumps('{"a": ')),
        ("object", '"\\ud800"', json.dumps('"\\ud800"')),
        ("number", "", '""'),
        ("colour", "[1, 2]", "[1, 2]"),
    ],
)
def test_values_by_their_type(kind, value, expected):
    calls = said(f"{TOOLS}{call()}{argument('k', kind, value)}{CALL_CLOSE}{TOOLS_CLOSE}{END}")[2]
    assert calls == [("f", f'{{"k": {expected}}}')]


def test_deeply_nested_values_are_text():
    value = "[" * 100_000
    [(_, given)] = said(f"{TOOLS}{call()}{argument('k', 'array', value)}{CALL_CLOSE}{END}")[2]
    assert json.loads(given) == {"k": value}


def test_attributes_are_unescaped():
    [(name, given)] = said(
        f"{call('a&amp;quot;&quot;b')}{argument('&quot;&amp;amp;', 'string', 'v')}{CALL_CLOSE}{END}"
    )[2]
    assert name == 'a&quot;"b'
    assert json.loads(given) == {'"&amp;': "v"}


@pytest.mark.parametrize("key", ["_id", "$ref", "-x", "日本", "(bot)", "a.b", 'q"', "a b=c"])
def test_odd_names_and_keys_survive(tokenizer, key):
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": key, "arguments": {key: 1}}}],
    }
    segments = k3.render_segments([message], thinking=False, add_generation_prompt=False)
    ids = [token for text, control in segments for token in tokenizer.encode_segment(text, control)]
    _, reply = read(ids, tokenizer, thinking=False)
    assert [(one.name, json.loads(one.arguments)) for one in reply.calls] == [(key, {key: 1})]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([("a", "1"), ("a", "2")], '{"a": "1"}'),
        ([("a", "1"), (None, "{}"), ("b", "2")], '{"a": "1", "b": "2"}'),
        ([(None, '{"a": 1}'), ("b", "2"), (None, "{}")], '{"a": 1}'),
        ([], "{}"),
        ([(None, "")], "{}"),
    ],
)
def test_arguments_stay_one_object(pieces, expected):
    writer = ArgumentsWriter()
    text = ""
    for key, value in pieces:
        text += (writer.begin(key, "string") if key else writer.begin_block()) or ""
        text += writer.text(value) + writer.end()
    assert text + writer.finish() == expected


def test_a_string_argument_streams():
    ids = DEMO.encode(f'{TOOLS}{call()}{OPEN}argument key="x" type="string"{SEP}', allow_special=True)
    reader = ReplyReader(DEMO)
    for token in ids:
        reader.push(token)
    assert reader.reply.calls[0].arguments == '{"x": "'
    assert [delta.text for token in DEMO.encode('1"\n') for delta in reader.push(token)] == ["1", '\\"', "\\n"]


def test_thinking_off_begins_in_the_response():
    assert said(f"b{RESPONSE_CLOSE}{END}", thinking=False) == ("", "b", [], "stop")
    assert said(f"{OPEN}think{SEP}a{THINK_CLOSE}{RESPONSE}b{END}", thinking=False) == ("a", "b", [], "stop")


def test_spelled_marks_are_text():
    text = f"{CLOSE}think{SEP}{EOM} and {OPEN}"
    ids = [*DEMO.encode(text), *DEMO.encode(RESPONSE, allow_special=True), *DEMO.encode(text)]
    _, reply = read(ids)
    assert (reply.reasoning, reply.content) == (text, text)


@pytest.mark.parametrize("token", [-1, DEMO.n_vocab])
def test_an_unknown_id_is_an_error(token):
    with pytest.raises(k3.K3Error, match="not in the vocabulary"):
        ReplyReader(DEMO).push(token)


def test_ids_of_calls_are_drawn_anew():
    ids = DEMO.encode(f"{TOOLS}{A_CALL}{A_CALL}", allow_special=True)
    drawn = set()
    for _ in range(2):
        reader = ReplyReader(DEMO)
        for token in ids:
            reader.push(token)
        drawn |= {one.id for one in reader.reply.calls}
    assert len(drawn) == 4


# --- characters and stop strings ---


@pytest.mark.parametrize("text", ["🚀🔥", "👨‍👩‍👧", "한국어 텍스트", "naïve é"])
def test_characters_over_several_tokens(tokenizer, text):
    marked = [tokenizer.encode(part, allow_special=True) for part in (RESPONSE, f"{TOOLS}{call()}", END)]
    body = list(bytewise(tokenizer, tokenizer.encode(text)))
    value = tokenizer.encode(f'{OPEN}argument key="k" type="string"{SEP}', allow_special=True)
    deltas, reply = read([*body, *marked[0], *body, *marked[1], *value, *body, *marked[2]], tokenizer)
    assert (reply.reasoning, reply.content) == (text, text)
    assert json.loads(reply.calls[0].arguments) == {"k": text}
    assert not any("�" in delta.text for delta in deltas)
    for cut in range(1, len(body)):
        _, reply = read(body[:cut], tokenizer, reason="length")
        assert reply.reasoning == tokenizer.decode(body[:cut])


def test_bytes_that_are_no_character():
    # A byte that can't begin a character comes at once; one that may is waited for up to the next mark.
    assert [delta.text for delta in ReplyReader(DEMO).push(0x80)] == ["�"]
    assert read([0xF0, *DEMO.encode(f"{RESPONSE}b", allow_special=True)])[1].reasoning == "�"
    assert read([0xF0, 0x9F])[1].reasoning == "�"


def test_published_emoji_ids():
    shared_file("data/tiktoken.model")
    released = k3.load_tokenizer(shared_file("data/tokenizer_config.json").parent)
    deltas, _ = read([5885, 40101, 66957, 98], released, thinking=False)
    assert "".join(delta.text for delta in deltas) == "🚀🔥"
    assert "�" not in "".join(delta.text for delta in deltas)


@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("one END two", "END", "one "),
        ("one ENDING", "END", "one "),
        ("one EN", "END", "one EN"),
        ("one ENEND two", ["two", "END"], "one EN"),
        ("abcd", ["bcd", "abc"], ""),
        ("abcd", ["1", "2", "3", "4", "d"], "abc"),
    ],
)
def test_stop_strings_end_the_content(text, stop, content):
    for ids in (DEMO.encode(text), list(bytewise(DEMO, DEMO.encode(text)))):
        reader = ReplyReader(DEMO, thinking=False, stop=stop)
        deltas = [delta for token in ids for delta in reader.push(token)]
        assert reader.ended == (content != text)
        # What comes behind a stop string is not looked at.
        assert not reader.ended or reader.push(ids[0]) == []
        deltas += reader.finish("stop")
        assert "".join(delta.text for delta in deltas) == content
        assert reader.reply.finish_reason == "stop"


def test_stop_strings_hold_back_no_more_than_they_must():
    reader = ReplyReader(DEMO, thinking=False, stop="END")
    assert [[delta.text for delta in reader.push(ord(character))] for character in "aENx"] == [["a"], [], [], ["ENx"]]


def test_stop_strings_are_looked_for_in_the_content_only():
    text = f"END{RESPONSE}EN{RESPONSE_CLOSE}{TOOLS}{call('END')}{argument('END', 'string', 'END')}{CALL_CLOSE}{END}"
    assert said(text, stop="END") == ("END", "EN", [("END", '{"END": "END"}')], "tool_calls")
    assert said(f"think END{RESPONSE}one END two{END}", stop="END") == ("think END", "one ", [], "stop")


def test_a_stop_string_at_the_last_token_is_a_stop():
    assert said("one END", reason="length", thinking=False, stop="END") == ("", "one ", [], "stop")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(k3.K3Error):
        ReplyReader(DEMO, stop="")


# --- anything at all ---

PIECES = st.one_of(
    st.sampled_from(
        [OPEN, CLOSE, SEP, EOM, "[BOS]", "<|media_pad|>", RESPONSE, RESPONSE_CLOSE, THINK_CLOSE, TOOLS, TOOLS_CLOSE]
    ),
    st.sampled_from(
        [call(), call("g"), CALL_CLOSE, f"{CLOSE}argument{SEP}", f'{OPEN}json type="object"{SEP}', f"{CLOSE}json{SEP}"]
    ),
    st.builds(argument, st.sampled_from(["a", "b", ""]), st.sampled_from(["string", "number"]), st.sampled_from("12x")),
    st.sampled_from(["alpha", " βeta", "😀", "\n", 'key="v"', "think", "{}"]),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=14), st.sampled_from(["stop", "length"]), st.booleans())
def test_anything_is_read_without_marks(pieces, reason, thinking):
    ids = DEMO.encode("".join(pieces), allow_special=True)
    deltas, reply = read(ids, reason=reason, thinking=thinking)
    assert not any("<|" in delta.text or "[BOS]" in delta.text for delta in deltas)
    assert reply.finish_reason in ("stop", "length", "tool_calls")
    if reason == "stop":
        assert reply.finish_reason == ("tool_calls" if reply.calls else "stop")
        assert all(one.complete for one in reply.calls)
    assert joined(read(bytewise(DEMO, ids), reason=reason, thinking=thinking)[0]) == joined(deltas)
    k3.render_segments([reply.message()])
