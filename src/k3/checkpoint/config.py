"""The checkpoint's `config.json`, read without guessing.

`ModelConfig.read(path)` takes the released nested shape (`text_config` inside) or the flat one (the fields of
`text_config` at top level). A field that the model depends on has no default: where one is missing, has
another type, lies outside sane bounds or asks for something that this engine does not compute, the file is
refused with one `ConfigError` that lists every problem. Field names are the checkpoint's own.

`stop_ids(model_dir, config)` adds the ids of `generation_config.json` to those of the config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Self, get_type_hints

from k3.checkpoint.json_fields import (
    ADVICE,
    MISSING,
    Number,
    OneOf,
    Reader,
    Rule,
    Whole,
    WholeList,
    decode_object,
    read_small_file,
    show,
    some,
)
from k3.errors import ConfigError

MAX_LAYERS: Final = 1_000
MAX_EXPERTS: Final = 8_192
MAX_WIDTH: Final = 1 << 20
MAX_HEADS: Final = 4_096
MAX_HEAD_DIM: Final = 8_192
MAX_VOCAB: Final = 1 << 24
MAX_POSITIONS: Final = 1 << 31
MAX_STOP_IDS: Final = 1_000

_MODEL_TYPES: Final = ("kimi_k3", "kimi_linear")
_GROUP: Final = 32


_FLAG: Final = OneOf((True, False))
_POSITIVE: Final = Number(1e-30, 1e30)
_WIDTH: Final = Whole(1, MAX_WIDTH)
_MXFP4_WIDTH: Final = Whole(_GROUP, MAX_WIDTH, multiple_of=_GROUP)
_HEADS: Final = Whole(1, MAX_HEADS)
_HEAD_DIM: Final = Whole(1, MAX_HEAD_DIM)
_NOTHING: Final = OneOf((None, MISSING))

# What the formulas in this package assume. Anything else is another model.
_TEXT_MUST_HOLD: Final[dict[str, Rule]] = {
    "hidden_act": OneOf(("situ",)),
    "moe_router_activation_func": OneOf(("sigmoid",)),
    "topk_method": OneOf(("noaux_tc",)),
    "mla_use_nope": OneOf((True,)),
    "mla_use_output_gate": OneOf((True,)),
    "num_expert_group": Whole(1, MAX_EXPERTS),
    "topk_group": Whole(1, MAX_EXPERTS),
    "num_key_value_heads": _HEADS,
}
_KDA_MUST_HOLD: Final[dict[str, Rule]] = {"use_full_rank_gate": OneOf((True,))}
_QUANTIZATION_MUST_HOLD: Final[dict[str, Rule]] = {
    "quant_method": OneOf(("compressed-tensors",)),
    "format": OneOf(("mxfp4-pack-quantized",)),
    "kv_cache_scheme": _NOTHING,
}
_GROUP_MUST_HOLD: Final[dict[str, Rule]] = {
    "format": OneOf(("mxfp4-pack-quantized", MISSING)),
    "input_activations": _NOTHING,
    "output_activations": _NOTHING,
}
_WEIGHTS_MUST_HOLD: Final[dict[str, Rule]] = {
    "num_bits": OneOf((4,)),
    "group_size": OneOf((_GROUP,)),
    "type": OneOf(("float",)),
    "symmetric": OneOf((True,)),
    "strategy": OneOf(("group",)),
    "scale_dtype": OneOf(("torch.uint8", None, MISSING)),
    "actorder": _NOTHING,
}


@dataclass(frozen=True)
class LinearAttnConfig:
    """The `linear_attn_config` block: Kimi Delta Attention and which layers have it.

    Layer numbers are 1-based here, as in the file; `ModelConfig.is_kda` takes a 0-based index.
    """

    kda_layers: Annotated[tuple[int, ...], WholeList()]
    full_attn_layers: Annotated[tuple[int, ...], WholeList()]
    num_heads: Annotated[int, _HEADS]
    head_dim: Annotated[int, _HEAD_DIM]
    short_conv_kernel_size: Annotated[int, Whole(1, 64)]
    gate_lower_bound: Annotated[float, Number(-1000.0, -1e-6)]

    @property
    def projection_size(self) -> int:
        """Width of q, k, v, the decay and the output gate: num_heads * head_dim."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class ModelConfig:
    """The language model's dimensions and constants. Layer indices of all methods are 0-based."""

    hidden_size: Annotated[int, _WIDTH]
    num_hidden_layers: Annotated[int, Whole(1, MAX_LAYERS)]
    vocab_size: Annotated[int, Whole(1, MAX_VOCAB)]
    max_position_embeddings: Annotated[int, Whole(1, MAX_POSITIONS)]
    attn_res_block_size: Annotated[int, Whole(1, MAX_LAYERS)]
    rms_norm_eps: Annotated[float, _POSITIVE]

    num_attention_heads: Annotated[int, _HEADS]
    q_lora_rank: Annotated[int, _WIDTH]
    kv_lora_rank: Annotated[int, _WIDTH]
    qk_nope_head_dim: Annotated[int, _HEAD_DIM]
    qk_rope_head_dim: Annotated[int, _HEAD_DIM]
    v_head_dim: Annotated[int, _HEAD_DIM]

    intermediate_size: Annotated[int, _WIDTH]
    first_k_dense_replace: Annotated[int, Whole(0, MAX_LAYERS)]
    moe_layer_freq: Annotated[int, Whole(1, MAX_LAYERS)]
    num_experts: Annotated[int, Whole(1, MAX_EXPERTS)]
    num_experts_per_token: Annotated[int, Whole(1, MAX_EXPERTS)]
    num_shared_experts: Annotated[int, Whole(1, 64)]
    moe_intermediate_size: Annotated[int, _MXFP4_WIDTH]
    routed_expert_hidden_size: Annotated[int, _MXFP4_WIDTH]
    routed_scaling_factor: Annotated[float, _POSITIVE]
    moe_renormalize: Annotated[bool, _FLAG]
    latent_moe_use_norm: Annotated[bool, _FLAG]
    activation_situ_beta: Annotated[float, _POSITIVE]
    activation_situ_linear_beta: Annotated[float, _POSITIVE]

    linear_attn_config: LinearAttnConfig
    eos_token_id: tuple[int, ...]
    """End-of-sequence ids, of the top level and of `text_config` together, ascending; may be empty."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The config in this file. ConfigError lists everything that is wrong with it."""
        return cls.from_json(read_small_file(Path(path)), str(path))

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        """The config in these JSON bytes; `where` names them in messages."""
        problems: list[str] = []
        values = _read_model(decode_object(data, where), problems)
        if problems:
            raise ConfigError(f"{where}: this config can't be used as it stands: {'; '.join(problems)}. {ADVICE}")
        return cls(**values)

    def is_kda(self, layer: int) -> bool:
        """Whether the layer's attention is KDA; it is MLA otherwise."""
        return layer in self._kda_indices

    def is_moe(self, layer: int) -> bool:
        """Whether the layer's feed-forward part is a mixture of experts; it is one dense MLP otherwise."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def starts_block(self, layer: int) -> bool:
        """Whether the layer snapshots the running sum (attention residuals) and starts a new one."""
        return layer % self.attn_res_block_size == 0

    @cached_property
    def _kda_indices(self) -> frozenset[int]:
        return frozenset(n - 1 for n in self.linear_attn_config.kda_layers)

    @cached_property
    def kda_layers(self) -> tuple[int, ...]:
        """Indices of the KDA layers, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_kda(i))

    @cached_property
    def mla_layers(self) -> tuple[int, ...]:
        """Indices of the MLA layers, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_kda(i))

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_moe(i))

    @property
    def num_snapshots(self) -> int:
        """Snapshots of the residual stream that a full pass takes."""
        return -(-self.num_hidden_layers // self.attn_res_block_size)

    @property
    def qk_head_dim(self) -> int:
        """Width of one MLA query or key head: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_query_size(self) -> int:
        """Width of all MLA queries: heads * (nope + rope)."""
        return self.num_attention_heads * self.qk_head_dim

    @property
    def mla_kv_size(self) -> int:
        """Rows of `kv_b_proj`: heads * (nope + v)."""
        return self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def mla_output_size(self) -> int:
        """Width of the MLA context and of its gate: heads * v."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def mla_cache_width(self) -> int:
        """Floats of one position in the latent cache: normed latent + rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kda_projection_size(self) -> int:
        """Width of a KDA layer's q, k, v, decay and gate: heads * head_dim."""
        return self.linear_attn_config.projection_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which are one MLP: moe_intermediate_size * num_shared_experts."""
        return self.moe_intermediate_size * self.num_shared_experts


def stop_ids(model_dir: str | Path, config: ModelConfig) -> frozenset[int]:
    """End-of-sequence ids of the config and of `generation_config.json`, which may be absent.

    Those that a tokenizer names are not known here. ConfigError where the file is malformed.
    """
    path = Path(model_dir) / "generation_config.json"
    if not path.exists():
        return frozenset(config.eos_token_id)
    problems: list[str] = []
    found = _read_token_ids(decode_object(read_small_file(path), str(path)), "", config.vocab_size, problems)
    if problems:
        raise ConfigError(f"{path}: {'; '.join(problems)}. Correct the file or remove it: it is optional.")
    return frozenset(config.eos_token_id) | found


def _read_model(top: dict[str, object], problems: list[str]) -> dict[str, Any]:
    outer = Reader(top, "", problems)
    nested = "text_config" in top
    text = outer.child("text_config") if nested else outer
    if text is None:
        return {}
    places = (outer, text) if nested else (outer,)
    values = text.check(_TEXT_MUST_HOLD | _rules_of(ModelConfig))
    for place in places:
        if "model_type" in place.fields:
            place.take("model_type", OneOf(_MODEL_TYPES))
    _check_untied(places, problems)
    _check_groups(text, values)
    _check_heads(text, values)
    _check_quantization(text)
    values["linear_attn_config"] = _read_linear_attention(text, values)
    values["eos_token_id"] = _read_eos(places, values.get("vocab_size", MAX_VOCAB))
    if nested:
        _check_agreement(outer, text)
    names = {f.name for f in fields(ModelConfig)}
    return _typed(ModelConfig, {name: value for name, value in values.items() if name in names})


@cache
def _rules_of(cls: type) -> dict[str, Rule]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


@cache
def _types_of(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _typed(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Accepted JSON values as the dataclass keeps them: 4 as 4.0 where a float is meant, lists as tuples."""
    hints = _types_of(cls)
    return {
        name: float(v) if hints[name] is float else tuple(v) if isinstance(v, list) else v for name, v in values.items()
    }


def _check_untied(places: Iterable[Reader], problems: list[str]) -> None:
    name = "tie_word_embeddings"
    stated = [place for place in places if name in place.fields]
    for place in stated:
        place.take(name, OneOf((False,)))
    if not stated:
        problems.append(f"{name}: expected false, found {show(MISSING)}")


def _check_agreement(outer: Reader, text: Reader) -> None:
    """A field at top level beside `text_config` must say the same."""
    for name in (*_TEXT_MUST_HOLD, *_rules_of(ModelConfig), "linear_attn_config", "quantization_config"):
        other = outer.fields.get(name, MISSING)
        if other is not MISSING and other != text.fields.get(name, MISSING):
            outer.problem(
                name,
                f"{show(other)} contradicts text_config.{name}, {show(text.fields.get(name, MISSING))}",
            )


def _check_groups(text: Reader, values: Mapping[str, Any]) -> None:
    groups, kept = values.get("num_expert_group", 1), values.get("topk_group", 1)
    if groups > 1 and groups > kept:
        text.problem(
            "num_expert_group",
            f"expected 1, or no more than topk_group ({kept}): routing restricted to groups is not computed, "
            f"found {groups}",
        )
    chosen, experts = values.get("num_experts_per_token", 1), values.get("num_experts", MAX_EXPERTS)
    if chosen > experts:
        text.problem("num_experts_per_token", f"expected at most num_experts ({experts}), found {chosen}")


def _check_heads(text: Reader, values: Mapping[str, Any]) -> None:
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if None not in (heads, kv_heads) and heads != kv_heads:
        text.problem("num_key_value_heads", f"expected num_attention_heads ({heads}), found {kv_heads}")


def _check_quantization(text: Reader) -> None:
    block = text.child("quantization_config")
    if block is None:
        return
    block.check(_QUANTIZATION_MUST_HOLD)
    groups = block.child("config_groups")
    if groups is None:
        return
    if len(groups.fields) != 1:
        block.problem("config_groups", f"expected one group, found {len(groups.fields)}")
        return
    group = groups.child(next(iter(groups.fields)))
    if group is None:
        return
    group.check(_GROUP_MUST_HOLD)
    weights = group.child("weights")
    if weights is not None:
        weights.check(_WEIGHTS_MUST_HOLD)


def _read_linear_attention(text: Reader, values: Mapping[str, Any]) -> LinearAttnConfig | None:
    block = text.child("linear_attn_config")
    if block is None:
        return None
    before = len(block.problems)
    found = block.check(_KDA_MUST_HOLD | _rules_of(LinearAttnConfig))
    _check_layer_map(block, found, values.get("num_hidden_layers"))
    heads, dim = found.get("num_heads"), found.get("head_dim")
    if heads is not None and dim is not None and heads > dim:
        block.problem("num_heads", f"expected at most head_dim ({dim}), the stored length of A_log, found {heads}")
    if len(block.problems) > before:
        return None
    names = {f.name for f in fields(LinearAttnConfig)}
    return LinearAttnConfig(**_typed(LinearAttnConfig, {name: v for name, v in found.items() if name in names}))


def _check_layer_map(block: Reader, found: Mapping[str, Any], layers: int | None) -> None:
    """The two lists are 1-based and together hold every layer once."""
    names = ("kda_layers", "full_attn_layers")
    if layers is None or not all(name in found for name in names):
        return
    for name in names:
        for position, number in enumerate(found[name]):
            if not 1 <= number <= layers:
                block.problem(f"{name}[{position}]", f"expected a layer from 1 to {layers}, found {show(number)}")
                break
        repeated = sorted(n for n, times in Counter(found[name]).items() if times > 1)
        if repeated:
            block.problem(name, f"expected each layer once, found {some(repeated)} more than once")
    kda, full = (set(found[name]) for name in names)
    if kda & full:
        block.problem("kda_layers", f"expected no layer of full_attn_layers, found {some(sorted(kda & full))}")
    absent = sorted(set(range(1, layers + 1)) - kda - full)
    if absent:
        block.problem(
            "kda_layers",
            f"expected every layer of 1..{layers} here or in full_attn_layers, {some(absent)} in neither",
        )


def _read_eos(places: Iterable[Reader], vocab_size: int) -> tuple[int, ...]:
    stated = [place for place in places if "eos_token_id" in place.fields]
    if not stated:
        next(iter(places)).problem("eos_token_id", f"expected token ids or null, found {show(MISSING)}")
    ids: set[int] = set()
    for place in stated:
        ids |= _read_token_ids(place.fields, place.path, vocab_size, place.problems)
    return tuple(sorted(ids))


def _read_token_ids(block: Mapping[str, object], path: str, vocab_size: int, problems: list[str]) -> frozenset[int]:
    value = block.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    rule = Whole(0, vocab_size - 1)
    if len(ids) <= MAX_STOP_IDS and all(rule.accepts(i) for i in ids):
        return frozenset(ids)
    wrong = next((i for i in ids if not rule.accepts(i)), value)
    problems.append(f"{path}eos_token_id: expected null, {rule}, or a list of such, found {show(wrong)}")
    return frozenset()
