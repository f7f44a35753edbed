"""The bare encoder against the published conversations, and how its segments become ids."""

from __future__ import annotations

import json

import pytest

import k3
from conftest import DATA

CASES = json.loads((DATA / "chat_goldens.json").read_bytes())["cases"]
GOOD = {name: case for name, case in CASES.items() if "segments" in case}

FAULTS = {
    "bad_effort": ("thinking_effort", "'ultra'"),
    "tool_orphan_no_name": ("messages[1]", "can't be told"),
    "args_array": ("messages[1].tool_calls[0].function.arguments", "must be a JSON object"),
    "image_prompt_not_consumed": ("image_prompts", "1 image prompts are given and the messages hold 0"),
    "unknown_part": ("messages[0].content[0]", "`text`"),
    "image_prompt_missing": ("messages[0].content[1]", "more image placeholders than image prompts"),
}
"""Where each faulty conversation is faulty, and what the complaint says."""


def render(case):
    return k3.render_segments(case["messages"], **case["options"])


@pytest.mark.parametrize("name", GOOD)
def test_segments_equal_the_published_ones(name):
    assert [list(segment) for segment in render(GOOD[name])] == GOOD[name]["segments"]


@pytest.mark.parametrize("name", sorted(CASES.keys() - GOOD.keys()))
def test_faults_are_found(name):
    field, words = FAULTS[name]
    with pytest.raises(k3.K3Error) as caught:
        render(CASES[name])
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert words in str(caught.value)
