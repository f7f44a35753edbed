"""Tokenizer files that are missing, damaged or of another kind are refused by name (exit code 2)."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3.errors import TokenizerError
from k3.text.tokenizer import load_tokenizer
from k3.text.vocabulary import ordinary_tokens, write_vocabulary

RELEASED = Path(__file__).resolve().parents[1].parent / "shared" / "data"
MODEL, CONFIG = "tiktoken.model", "tokenizer_config.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_vocabulary(tmp_path, 1024)
    return tmp_path


def refused(directory: Path, file: str, *parts: str) -> None:
    with pytest.raises(TokenizerError) as error:
        load_tokenizer(directory)
    message = str(error.value)
    assert error.value.exit_code == 2
    assert message.startswith(str(directory / file))
    assert "k3 download" in message
    assert "\n" not in message
    for part in parts:
        assert part in message


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = directory / CONFIG
    config = json.loads(path.read_text("utf-8"))
    edit(config)
    path.write_text(json.dumps(config), "utf-8")


def edit_lines(directory: Path, edit: Callable[[list[bytes]], object]) -> None:
    path = directory / MODEL
    lines = path.read_bytes().splitlines()
    edit(lines)
    path.write_bytes(b"".join(line + b"\n" for line in lines))


@pytest.mark.parametrize("file", [MODEL, CONFIG])
class TestEitherFile:
    def test_missing(self, directory: Path, file: str) -> None:
        (directory / file).unlink()
        refused(directory, file, "missing")

    def test_a_directory(self, directory: Path, file: str) -> None:
        (directory / file).unlink()
        (directory / file).mkdir()
        refused(directory, file, "can't be read")

    def test_empty(self, directory: Path, file: str) -> None:
        (directory / file).write_bytes(b"")
        refused(directory, file)

    def test_noise(self, directory: Path, file: str) -> None:
        (directory / file).write_bytes(bytes(range(256)) * 40)
        refused(directory, file)

    def test_huge(self, directory: Path, file: str) -> None:
        with (directory / file).open("wb") as sparse:
            sparse.truncate(1 << 40)
        refused(directory, file, str(1 << 40))

    def test_a_web_page_instead(self, directory: Path, file: str) -> None:
        (directory / file).write_bytes(b"<!doctype html>\n<title>404</title>\n")
        refused(directory, file)

    def test_a_large_file_pointer_instead(self, directory: Path, file: str) -> None:
        (directory / file).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        refused(directory, file)


def test_no_such_directory(tmp_path: Path) -> None:
    refused(tmp_path / "absent", MODEL, "missing")


def test_a_file_instead_of_a_directory(directory: Path) -> None:
    refused(directory / CONFIG, MODEL, "can't be read")


class TestVocabularyFile:
    def test_lines_may_end_in_carriage_returns(self, directory: Path) -> None:
        path = directory / MODEL
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        assert load_tokenizer(directory).n_ordinary == 768

    def test_rank_missing(self, directory: Path) -> None:
        edit_lines(directory, lambda lines: lines.pop(300))
        refused(directory, MODEL, "line 301", "rank 300")

    def test_ranks_out_of_order(self, directory: Path) -> None:
        edit_lines(directory, lambda lines: lines.reverse())
        refused(directory, MODEL, "line 1 ", "rank 0")

    @pytest.mark.parametrize("line", [b"QUFB", b"QUFB x", b"QUFB 500 1", b"QUFB -500", b"", b"QUFB  500"])
    def test_bad_rank(self, directory: Path, line: bytes) -> None:
        edit_lines(directory, lambda lines: lines.__setitem__(500, line))
        refused(directory, MODEL, "line 501", "rank 500")

    @pytest.mark.parametrize("encoded", [b"", b"QUF", b"QU!C", b"QUFB=", b"\xff\xfe"])
    def test_bad_base64(self, directory: Path, encoded: bytes) -> None:
        edit_lines(directory, lambda lines: lines.__setitem__(500, encoded + b" 500"))
        refused(directory, MODEL, "line 501", "base64")

    def test_duplicate_token(self, directory: Path) -> None:
        edit_lines(directory, lambda lines: lines.__setitem__(500, b64encode(b" the") + b" 500"))
        first = ordinary_tokens(768).index(b" the") + 1
        refused(directory, MODEL, f"lines {first} and 501", "' the'")

    def test_single_byte_missing(self, directory: Path) -> None:
        edit_lines(directory, lambda lines: lines.__setitem__(0xE9, b64encode(b"qqqq") + b" 233"))
        refused(directory, MODEL, "1 of the 256 single bytes", "0xe9")

    def test_cut_at_the_end_of_a_line(self, directory: Path) -> None:
        edit_lines(directory, lambda lines: lines.pop())
        refused(directory, CONFIG, MODEL, "767 ordinary tokens", "id 1023")

    def test_cut_inside_a_line(self, directory: Path) -> None:
        path = directory / MODEL
        path.write_bytes(path.read_bytes()[:-3])
        refused(directory, MODEL, "line 768")

    def test_the_released_number_of_lines_needs_the_released_checksum(self, tmp_path: Path) -> None:
        tokens = ordinary_tokens(163_584)
        lines = (b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens))
        (tmp_path / MODEL).write_bytes(b"".join(lines))
        checksum = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
        refused(tmp_path, MODEL, "163584 lines", checksum)

    def test_one_wrong_byte_of_the_released_vocabulary(self, tmp_path: Path) -> None:
        if not (RELEASED / MODEL).exists():
            pytest.skip("the released vocabulary is not on this machine")
        data = bytearray((RELEASED / MODEL).read_bytes())
        middle = data.index(b"\n", len(data) // 2) + 1
        data[middle] = ord("B") if data[middle] == ord("A") else ord("A")
        (tmp_path / MODEL).write_bytes(data)
        refused(tmp_path, MODEL, "released vocabulary", "sha256")


class TestConfigFile:
    @pytest.mark.parametrize("text", ["[]", "1", "null", '"x"'])
    def test_not_an_object(self, directory: Path, text: str) -> None:
        (directory / CONFIG).write_text(text)
        refused(directory, CONFIG, "expected a JSON object")

    @pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": \xff}'])
    def test_not_json(self, directory: Path, text: str) -> None:
        (directory / CONFIG).write_bytes(text.encode("latin-1"))
        refused(directory, CONFIG, "not JSON")

    @pytest.mark.parametrize("value", [None, [], "x"])
    def test_no_map(self, directory: Path, value: object) -> None:
        edit_config(directory, lambda config: config.update(added_tokens_decoder=value))
        refused(directory, CONFIG, "added_tokens_decoder")

    @pytest.mark.parametrize("name", ["<|sep|>", "[EOT]", "[PAD]", "<osagent_mode>", "<|media_pad|>"])
    def test_name_missing(self, directory: Path, name: str) -> None:
        def drop(config: dict[str, Any]) -> None:
            slots = config["added_tokens_decoder"]
            config["added_tokens_decoder"] = {k: v for k, v in slots.items() if v["content"] != name}

        edit_config(directory, drop)
        refused(directory, CONFIG, f"{name} at nowhere")

    def test_name_at_another_offset(self, directory: Path) -> None:
        def swap(config: dict[str, Any]) -> None:
            slots = config["added_tokens_decoder"]
            slots["771"], slots["772"] = slots["772"], slots["771"]

        edit_config(directory, swap)
        refused(directory, CONFIG, "<|open|> at 772", "expected at id 771")

    def test_name_at_two_slots(self, directory: Path) -> None:
        edit_config(directory, lambda config: config["added_tokens_decoder"]["900"].update(content="<|sep|>"))
        refused(directory, CONFIG, "<|sep|> at 773 and 900")

    def test_other_spelling_at_two_slots(self, directory: Path) -> None:
        def repeat(config: dict[str, Any]) -> None:
            config["added_tokens_decoder"]["900"]["content"] = "<|new|>"
            config["added_tokens_decoder"]["901"]["content"] = "<|new|>"

        edit_config(directory, repeat)
        refused(directory, CONFIG, "<|new|>")

    @pytest.mark.parametrize("key", ["x", "-1", "0x300", "00768", "1e3", " 768", "9" * 5000])
    def test_bad_id(self, directory: Path, key: str) -> None:
        edit_config(directory, lambda config: config["added_tokens_decoder"].update({key: {"content": "z"}}))
        refused(directory, CONFIG, "token id")

    @pytest.mark.parametrize("token", [0, 767, 1024, 163_589])
    def test_id_outside_the_slots(self, directory: Path, token: int) -> None:
        edit_config(directory, lambda config: config["added_tokens_decoder"].update({str(token): {"content": "z"}}))
        refused(directory, CONFIG, f"id {token} (z)", "768 to 1023")

    @pytest.mark.parametrize("entry", [None, "x", {}, {"content": None}, {"content": ""}, {"content": 7}])
    def test_bad_entry(self, directory: Path, entry: object) -> None:
        edit_config(directory, lambda config: config["added_tokens_decoder"].update({"900": entry}))
        refused(directory, CONFIG, "id 900")

    def test_lone_surrogate_in_a_spelling(self, directory: Path) -> None:
        edit_config(directory, lambda config: config["added_tokens_decoder"]["900"].update(content="\ud800"))
        refused(directory, CONFIG, "id 900", "surrogate")

    def test_slots_that_are_not_listed_get_reserved_spellings(self, directory: Path) -> None:
        def drop(config: dict[str, Any]) -> None:
            slots = config["added_tokens_decoder"]
            config["added_tokens_decoder"] = {k: v for k, v in slots.items() if "reserved" not in v["content"]}

        full = load_tokenizer(directory)
        edit_config(directory, drop)
        assert load_tokenizer(directory).control == full.control
        assert full.control["<|reserved_token_776|>"] == 776

    def test_a_slot_may_have_a_spelling_of_its_own(self, directory: Path) -> None:
        edit_config(directory, lambda config: config["added_tokens_decoder"]["776"].update(content="<|new|>"))
        tokenizer = load_tokenizer(directory)
        assert tokenizer.encode("a<|new|>", allow_special=True)[-1] == 776
        assert "<|reserved_token_776|>" not in tokenizer.control

    @pytest.mark.parametrize(
        ("eos", "expected"),
        [
            (None, {769, 770, 777}),
            ("[EOS]", {769, 770, 777}),
            ({"content": "[EOT]"}, {769, 770, 777}),
            ("[PAD]", {769, 770, 777, 1023}),
            ("<|reserved_token_900|>", {769, 770, 777, 900}),
        ],
    )
    def test_stop_ids(self, directory: Path, eos: object, expected: set[int]) -> None:
        edit_config(directory, lambda config: config.update(eos_token=eos))
        assert load_tokenizer(directory).stop_ids == expected

    def test_no_eos_token(self, directory: Path) -> None:
        edit_config(directory, lambda config: config.pop("eos_token"))
        assert load_tokenizer(directory).stop_ids == {769, 770, 777}

    @pytest.mark.parametrize("eos", ["</s>", "the", "", 770, [], {"content": "x"}])
    def test_unknown_eos_token(self, directory: Path, eos: object) -> None:
        edit_config(directory, lambda config: config.update(eos_token=eos))
        refused(directory, CONFIG, "eos_token")
