"""The config reader refuses to guess."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import TINY_A, TINY_C, edit_json, shared_file
from k3.checkpoint.config import LinearAttnConfig, ModelConfig, stop_ids
from k3.errors import ConfigError

TINY = json.loads((TINY_A / "config.json").read_bytes())
Place = tuple[str, ...]


def parse(config: object) -> ModelConfig:
    return ModelConfig.from_json(json.dumps(config).encode(), "config.json")


def refusal(config: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(path: Place, value: object) -> dict[str, Any]:
    config = copy.deepcopy(TINY)
    place = config
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return config


def without(path: Place) -> dict[str, Any]:
    config = copy.deepcopy(TINY)
    place = config
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    return config


def flat() -> dict[str, Any]:
    return copy.deepcopy(TINY["text_config"])


COUNTS = [
    "hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "attn_res_block_size",
    "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "intermediate_size", "first_k_dense_replace", "moe_layer_freq",
    "num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size",
    "routed_expert_hidden_size", "num_expert_group", "topk_group",
]  # fmt: skip
NUMBERS = ["rms_norm_eps", "routed_scaling_factor", "activation_situ_beta", "activation_situ_linear_beta"]
FLAGS = ["moe_renormalize", "latent_moe_use_norm"]
ONLY = {
    "hidden_act": ("situ", "silu"),
    "moe_router_activation_func": ("sigmoid", "softmax"),
    "topk_method": ("noaux_tc", "greedy"),
    "mla_use_nope": (True, False),
    "mla_use_output_gate": (True, False),
}
KDA_COUNTS = ["num_heads", "head_dim", "short_conv_kernel_size"]
GROUP = ("text_config", "quantization_config", "config_groups", "group_0")


def test_reads_the_released_config() -> None:
    config = ModelConfig.read(shared_file("data/released-config.json"))
    assert (len(config.kda_layers), len(config.mla_layers), len(config.moe_layers)) == (69, 24, 92)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (7168, 93, 163840)
    assert (config.num_experts, config.num_experts_per_token) == (896, 16)
    assert (config.qk_head_dim, config.mla_cache_width, config.mla_query_size) == (192, 576, 18432)
    assert (config.mla_kv_size, config.mla_output_size, config.kda_projection_size) == (24576, 12288, 12288)
    assert (config.shared_intermediate_size, config.num_snapshots) == (6144, 8)
    assert [i for i in range(93) if config.starts_block(i)] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert not config.is_moe(0)
    assert config.is_kda(0)
    assert config.mla_layers[:2] == (3, 7)
    assert config.mla_layers[-2:] == (91, 92)
    assert config.eos_token_id == (163586,)


def test_reads_values_exactly() -> None:
    config = ModelConfig.read(TINY_A / "config.json")
    text = TINY["text_config"]
    for field in dataclasses.fields(ModelConfig):
        if field.name not in ("linear_attn_config", "eos_token_id"):
            assert getattr(config, field.name) == text[field.name], field.name
    for field in dataclasses.fields(LinearAttnConfig):
        value = getattr(config.linear_attn_config, field.name)
        stored = text["linear_attn_config"][field.name]
        assert value == (tuple(stored) if isinstance(stored, list) else stored), field.name
    assert config.mla_layers == (3, 7, 11, 12)


def test_flat_shape_is_the_same_config() -> None:
    assert parse({**flat(), "tie_word_embeddings": False}) == parse(TINY)


def test_whole_numbers_serve_as_numbers() -> None:
    config = parse(changed(("text_config", "activation_situ_beta"), 4))
    assert isinstance(config.activation_situ_beta, float)


@pytest.mark.parametrize("name", [*COUNTS, *NUMBERS, *FLAGS, *ONLY, "linear_attn_config", "quantization_config"])
def test_missing_field(name: str) -> None:
    message = refusal(without(("text_config", name)))
    assert f"text_config.{name}: expected" in message
    assert "no such field" in message


@pytest.mark.parametrize(
    "name", [*KDA_COUNTS, "kda_layers", "full_attn_layers", "gate_lower_bound", "use_full_rank_gate"]
)
def test_missing_kda_field(name: str) -> None:
    message = refusal(without(("text_config", "linear_attn_config", name)))
    assert f"text_config.linear_attn_config.{name}: expected" in message


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, 128.0, "128", None, [128], {}, -1, 10**9 * 10**9, -(10**30)])
def test_counts_must_be_sane_whole_numbers(name: str, value: object) -> None:
    assert f"text_config.{name}: expected" in refusal(changed(("text_config", name), value))


@pytest.mark.parametrize("name", sorted({*COUNTS} - {"first_k_dense_replace"}))
def test_counts_must_be_positive(name: str) -> None:
    assert f"text_config.{name}: expected" in refusal(changed(("text_config", name), 0))


@pytest.mark.parametrize("name", KDA_COUNTS)
@pytest.mark.parametrize("value", [0, -4, True, 4.0, "4", None, 10**9])
def test_kda_counts(name: str, value: object) -> None:
    message = refusal(changed(("text_config", "linear_attn_config", name), value))
    assert f"text_config.linear_attn_config.{name}: expected" in message


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1.5, True, "1.0", None, 1e300, 1e-300, []])
def test_numbers_must_be_positive_and_finite_in_float32(name: str, value: object) -> None:
    assert f"text_config.{name}: expected a number" in refusal(changed(("text_config", name), value))


@pytest.mark.parametrize("literal", [b"NaN", b"Infinity", b"1e999"])
def test_numbers_that_json_does_not_have(literal: bytes) -> None:
    raw = json.dumps(changed(("text_config", "rms_norm_eps"), "HERE")).encode().replace(b'"HERE"', literal)
    with pytest.raises(ConfigError, match="malformed JSON"):
        ModelConfig.from_json(raw, "config.json")


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_flags_must_be_true_or_false(name: str, value: object) -> None:
    assert f"text_config.{name}: expected true or false" in refusal(changed(("text_config", name), value))


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [True, False])
def test_both_values_of_flags_are_supported(name: str, value: bool) -> None:
    assert getattr(parse(changed(("text_config", name), value)), name) is value


@pytest.mark.parametrize("name", ONLY)
def test_what_is_not_computed(name: str) -> None:
    wanted, other = ONLY[name]
    for value in (other, None, 1, "x" * 100):
        message = refusal(changed(("text_config", name), value))
        assert f"text_config.{name}: expected {json.dumps(wanted)}, found" in message
        assert len(message) < 400


@pytest.mark.parametrize("value", [None, 0, 1.0, True, "-5", -1e9])
def test_gate_lower_bound_must_be_negative(value: object) -> None:
    message = refusal(changed(("text_config", "linear_attn_config", "gate_lower_bound"), value))
    assert "gate_lower_bound: expected a number from -1000" in message


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"num_expert_group": 4, "topk_group": 2}, "num_expert_group", "found 4"),
        ({"num_experts_per_token": 17}, "num_experts_per_token", "at most num_experts (16), found 17"),
        ({"num_key_value_heads": 2}, "num_key_value_heads", "num_attention_heads (4), found 2"),
        ({"moe_intermediate_size": 48}, "moe_intermediate_size", "a multiple of 32"),
        ({"routed_expert_hidden_size": 33}, "routed_expert_hidden_size", "a multiple of 32"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", "expected false, found true"),
        ({"model_type": "kimi_k2"}, "model_type", '"kimi_k3" or "kimi_linear", found "kimi_k2"'),
        ({"num_experts": 10**9}, "num_experts", "found 1000000000"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers", "found 1000000"),
    ],
)
def test_contradictions(changes: dict[str, Any], field: str, said: str) -> None:
    config = copy.deepcopy(TINY)
    config["text_config"].update(changes)
    message = refusal(config)
    assert f"text_config.{field}: " in message
    assert said in message


def test_groups_that_do_not_restrict_are_fine() -> None:
    config = copy.deepcopy(TINY)
    config["text_config"].update(num_expert_group=4, topk_group=4)
    assert parse(config) == parse(TINY)


def test_top_level_must_agree_with_text_config() -> None:
    assert "hidden_size: 64 contradicts text_config.hidden_size, 128" in refusal({**TINY, "hidden_size": 64})
    assert "tie_word_embeddings: expected false, found true" in refusal({**TINY, "tie_word_embeddings": True})
    assert "model_type" in refusal({**TINY, "model_type": "llama"})
    parse({**TINY, "hidden_size": 128})


def test_tying_must_be_stated() -> None:
    config = without(("tie_word_embeddings",))
    parse(config)
    del config["text_config"]["tie_word_embeddings"]
    assert "tie_word_embeddings: expected false, found no such field" in refusal(config)


LAYER_MAP = ("text_config", "linear_attn_config")


@pytest.mark.parametrize(
    ("kda", "full", "said"),
    [
        ([1, 2, 3], [4, 5, 999], "full_attn_layers[2]: expected a layer from 1 to 13, found 999"),
        ([0, 1, 2], [4], "kda_layers[0]: expected a layer from 1 to 13, found 0"),
        ([-(10**25)], [4], "kda_layers[0]: expected a layer from 1 to 13, found -10000000000"),
        ([*range(1, 10)], [9, 10, 11, 12, 13], "expected no layer of full_attn_layers, found 9"),
        ([*range(1, 10), 9], [10, 11, 12, 13], "expected each layer once, found 9 more than once"),
        (
            [*range(1, 10)],
            [10, 12, 13],
            "expected every layer of 1..13 here or in full_attn_layers, 11 in neither",
        ),
        ([], [], "1, 2, 3, 4, 5 and 8 more in neither"),
        ([1, "2"], [4], "kda_layers: expected a list of whole numbers, found a list of 2"),
        ([1, True], [4], "kda_layers: expected a list of whole numbers"),
        ("1,2", [4], 'kda_layers: expected a list of whole numbers, found "1,2"'),
        ([1], {"4": 1}, "full_attn_layers: expected a list of whole numbers, found an object"),
    ],
)
def test_layer_map(kda: object, full: object, said: str) -> None:
    config = copy.deepcopy(TINY)
    config["text_config"]["linear_attn_config"].update(kda_layers=kda, full_attn_layers=full)
    assert said in refusal(config)


def test_more_kda_heads_than_a_log_has_entries() -> None:
    message = refusal(changed((*LAYER_MAP, "num_heads"), 33))
    assert "num_heads: expected at most head_dim (32), the stored length of A_log, found 33" in message


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("text_config", "quantization_config"), None, "expected an object, found null"),
        ((*GROUP[:2], "quant_method"), "awq", 'expected "compressed-tensors", found "awq"'),
        ((*GROUP[:2], "format"), "pack-quantized", 'expected "mxfp4-pack-quantized"'),
        ((*GROUP[:2], "kv_cache_scheme"), {"num_bits": 8}, "expected null or absent, found an object"),
        ((*GROUP[:2], "config_groups"), {}, "expected one group, found 0"),
        ((*GROUP[:2], "config_groups"), [], "expected an object, found a list of 0"),
        (GROUP, 4, "config_groups.group_0: expected an object, found 4"),
        ((*GROUP, "format"), "nvfp4-pack-quantized", 'expected "mxfp4-pack-quantized"'),
        ((*GROUP, "input_activations"), {"num_bits": 8}, "expected null or absent, found an object"),
        ((*GROUP, "weights"), [], "expected an object, found a list of 0"),
        ((*GROUP, "weights", "num_bits"), 8, "expected 4, found 8"),
        ((*GROUP, "weights", "num_bits"), 4.0, "expected 4, found 4.0"),
        ((*GROUP, "weights", "group_size"), 16, "expected 32, found 16"),
        ((*GROUP, "weights", "type"), "int", 'expected "float", found "int"'),
        ((*GROUP, "weights", "symmetric"), False, "expected true, found false"),
        ((*GROUP, "weights", "symmetric"), 1, "expected true, found 1"),
        ((*GROUP, "weights", "strategy"), "channel", 'expected "group", found "channel"'),
        ((*GROUP, "weights", "scale_dtype"), "torch.bfloat16", 'expected "torch.uint8" or null or absent'),
        ((*GROUP, "weights", "actorder"), "group", "expected null or absent"),
    ],
)  # fmt: skip
def test_quantization(path: Place, value: object, said: str) -> None:
    message = refusal(changed(path, value))
    assert said in message
    assert ".".join(path) + ":" in message


def test_two_quantization_groups() -> None:
    config = copy.deepcopy(TINY)
    groups = config["text_config"]["quantization_config"]["config_groups"]
    groups["group_1"] = groups["group_0"]
    assert "config_groups: expected one group, found 2" in refusal(config)


@pytest.mark.parametrize("name", ["num_bits", "group_size", "type", "symmetric", "strategy"])
def test_quantization_field_missing(name: str) -> None:
    assert f"weights.{name}: expected" in refusal(without((*GROUP, "weights", name)))


@pytest.mark.parametrize(
    ("value", "ids"),
    [(506, (506,)), ([507, 506, 507], (506, 507)), (None, ()), ([], ()), (0, (0,)), (511, (511,))],
)
def test_end_ids(value: object, ids: tuple[int, ...]) -> None:
    config = changed(("text_config", "eos_token_id"), value)
    config["eos_token_id"] = value
    assert parse(config).eos_token_id == ids


@pytest.mark.parametrize("value", [-1, 512, True, 506.0, "506", [506, 512], [[506]], {}, [True], [0] * 1001])
def test_end_ids_out_of_place(value: object) -> None:
    assert "text_config.eos_token_id: expected" in refusal(changed(("text_config", "eos_token_id"), value))


def test_end_ids_of_both_levels_and_none() -> None:
    assert parse(changed(("eos_token_id",), 500)).eos_token_id == (500, 506)
    config = without(("eos_token_id",))
    del config["text_config"]["eos_token_id"]
    assert "eos_token_id: expected token ids or null, found no such field" in refusal(config)


def test_stop_ids(tmp_path: Path) -> None:
    config = parse(TINY)
    assert stop_ids(tmp_path, config) == {506}
    path = tmp_path / "generation_config.json"
    for text, ids in [
        ('{"eos_token_id": 505}', {505, 506}),
        ('{"eos_token_id": [1, 2], "temperature": 1.0}', {1, 2, 506}),
        ('{"eos_token_id": null}', {506}),
        ("{}", {506}),
    ]:
        path.write_text(text)
        assert stop_ids(tmp_path, config) == ids


@pytest.mark.parametrize("text", ["", "[]", '{"eos_token_id": 512}', '{"eos_token_id": "x"}', "[" * 9999])
def test_malformed_generation_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match="generation_config") as caught:
        stop_ids(tmp_path, parse(TINY))
    assert caught.value.exit_code == 2


def test_all_problems_in_one_message() -> None:
    config = copy.deepcopy(TINY)
    text = config["text_config"]
    text.update(hidden_size="128", rms_norm_eps=-1, hidden_act="gelu", num_experts_per_token=99)
    del text["vocab_size"]
    text["linear_attn_config"]["head_dim"] = 0
    text["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    message = refusal(config)
    for field in (
        "hidden_size", "rms_norm_eps", "hidden_act", "num_experts_per_token", "vocab_size",
        "linear_attn_config.head_dim", "quantization_config.config_groups.group_0.weights.num_bits",
    ):  # fmt: skip
        assert message.count(f"text_config.{field}: expected") == 1
    assert message.startswith("config.json: ")
    assert message.endswith("Use the config.json that was released with this checkpoint.")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "malformed JSON"),
        (b"[]", "expected a JSON object, found a list of 0"),
        (b"3", "expected a JSON object, found 3"),
        (b"null", "expected a JSON object, found null"),
        (b'{"a": 1', "malformed JSON"),
        (b"\xef\xbb\xbf{}", "malformed JSON"),
        (b'{"a": "\xff"}', "malformed JSON"),
        (b'{"a": "\\ud800"}', "malformed JSON"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"text_config": 5}', "text_config: expected an object, found 5"),
        (b'{"num_experts": ' + b"9" * 10_000 + b"}", "malformed JSON"),
    ],
)
def test_malformed_files(tmp_path: Path, raw: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.read(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 8000


def test_deeply_nested_duplicates_of_a_block() -> None:
    """Comparing two levels must not run into the recursion limit either."""
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    raw = b'{"linear_attn_config": %b, "text_config": {"linear_attn_config": %b}}' % (deep, deep)
    with pytest.raises(ConfigError):
        ModelConfig.from_json(raw, "config.json")


def test_files_that_cannot_be_configs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ModelConfig.read(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        ModelConfig.read(tmp_path)
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=f"found {1 << 40}"):
        ModelConfig.read(huge)


def test_repeated_keys_are_read_as_the_decoder_does(tmp_path: Path) -> None:
    raw = (TINY_C / "config.json").read_bytes().replace(b'"hidden_size": 96', b'"hidden_size": 7, "hidden_size": 96')
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    assert ModelConfig.read(path) == ModelConfig.read(TINY_C / "config.json")
    edit_json(path, lambda config: config["text_config"].update(hidden_size=97))
    assert ModelConfig.read(path).hidden_size == 97


ODD: list[object] = [
    None, True, False, 0, -1, 1, 2, 31, 32, 10**6, 10**9, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308,
    "", "situ", "é" * 99, [], {}, [1], [None], [[1]], {"a": 1}, [10**30], list(range(1, 14)), "\u0000",
]  # fmt: skip


def _places(value: object, path: Place = ()) -> list[Place]:
    if not isinstance(value, dict):
        return [path]
    return [path] * bool(path) + [p for name, v in value.items() for p in _places(v, (*path, name))]


def test_random_damage_is_refused_or_read() -> None:
    """Seeded mutations of fields: a config or a ConfigError, quickly, and never anything else."""
    rng = random.Random(20)
    places = _places(TINY)
    start = time.monotonic()
    for _ in range(3000):
        config = copy.deepcopy(TINY)
        for path in rng.sample(places, rng.randint(1, 4)):
            place: Any = config
            for name in path[:-1]:
                place = place.get(name) if isinstance(place, dict) else None
            if isinstance(place, dict):
                if rng.random() < 0.2:
                    place.pop(path[-1], None)
                else:
                    place[path[-1]] = rng.choice(ODD)
        try:
            parse(config)
        except ConfigError as error:
            assert len(str(error)) < 10_000  # noqa: PT017
    assert time.monotonic() - start < 15


def test_random_bytes_are_refused_or_read() -> None:
    rng = random.Random(21)
    original = (TINY_A / "config.json").read_bytes()
    for _ in range(2000):
        raw = bytearray(original)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.choice((0, 1, 1, 1, 50))] = rng.randbytes(rng.choice((0, 1, 1, 2)))
        try:
            ModelConfig.from_json(bytes(raw), "config.json")
        except ConfigError as error:
            assert error.exit_code == 2  # noqa: PT017


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=1000, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(_places(TINY)), value=JSON)
def test_any_json_in_any_place(path: Place, value: object) -> None:
    try:
        parse(changed(path, value))
    except ConfigError as error:
        assert error.exit_code == 2  # noqa: PT017
