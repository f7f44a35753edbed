"""What the bytes of a checkpoint are: every tensor in one class, counted.

    census = take_census(TensorIndex.open(model_dir))
    census.lines        # class by class, part by part
    census.total()

Names alone decide: no config is needed, and a tensor of unknown name is among the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from k3.checkpoint.headers.kinds import DTYPE_BITS
from k3.checkpoint.index import Family, TensorIndex
from k3.checkpoint.specs import EMBEDDING, EXPERTS, HEAD, LAYERS, PREFIXES

ROUTED: Final = "routed experts"
SHARED: Final = "shared experts"
LATENT: Final = "latent projections"
ROUTERS: Final = "routers"
KDA: Final = "KDA attention"
MLA: Final = "MLA attention"
DENSE: Final = "dense MLP"
SMALL: Final = "norms and small"
HEAD_CLASS: Final = "head"
EMBEDDING_CLASS: Final = "embedding"
OTHERS: Final = "vision and others"

CLASSES: Final = (ROUTED, SHARED, LATENT, ROUTERS, KDA, MLA, DENSE, SMALL, HEAD_CLASS, EMBEDDING_CLASS, OTHERS)
TRUNK: Final = (SHARED, LATENT, ROUTERS, KDA, MLA, DENSE, SMALL)
"""The classes that make the trunk: all that a token needs whatever is routed, but for the head."""

_EXPERT: Final = re.compile(rf"{re.escape(EXPERTS)}[0-9]+\.(w[123])\.weight_(packed|scale)")
_MLA_ONLY: Final = "self_attn.kv_b_proj.weight"
_CODES_A_BYTE: Final = 2
_MOE: Final = "block_sparse_moe."
_LATENT_NAMES: Final = ("routed_expert_down_proj", "routed_expert_up_proj")
_SMALL: Final = (
    (re.compile(r"norm\.weight"), "norms"),
    (re.compile(r"_res_proj\.weight"), "residual mixes"),
    (re.compile(r"_conv1d\.weight"), "convolution taps"),
    (re.compile(r"self_attn\.(A_log|dt_bias)"), "decay"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """Tensors of one part of a class. Scales of MXFP4 are no parameters; its codes are two to a byte."""

    group: str
    part: str
    tensors: int
    nbytes: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Census:
    """All tensors, in the order of CLASSES. `expert_bytes` is one routed expert's, where all are alike."""

    lines: tuple[Line, ...]
    expert_bytes: int | None
    experts: int

    def total(self, groups: Iterable[str] = CLASSES, name: str = "total") -> Line:
        """The sum of these classes."""
        wanted = set(groups)
        chosen = [line for line in self.lines if line.group in wanted]
        return Line(name, "", *(sum(getattr(line, field) for line in chosen) for field in _COUNTS))

    def groups(self) -> list[str]:
        """The classes that have tensors."""
        return [group for group in CLASSES if any(line.group == group for line in self.lines)]


_COUNTS: Final = ("tensors", "nbytes", "parameters")


def take_census(index: TensorIndex) -> Census:
    """Count the tensors of an index."""
    families = index.families()
    locals_ = [family.name.removeprefix(PREFIXES[0]) for family in families]
    mla = {layer for layer, rest in map(_split, locals_) if rest == _MLA_ONLY}
    found: dict[tuple[str, str], Line] = {}
    experts: dict[tuple[str, int], int] = {}
    for family, local in zip(families, locals_, strict=True):
        layer, rest = _split(local)
        group, part = _classify(layer, rest, layer in mla)
        old = found.get((group, part), Line(group, part, 0, 0, 0))
        parameters = family.count * _parameters(family, group, part)
        nbytes = family.count * family.kind.nbytes
        found[group, part] = Line(
            group, part, old.tensors + family.count, old.nbytes + nbytes, old.parameters + parameters
        )
        if group == ROUTED:
            experts[part, family.kind.nbytes] = experts.get((part, family.kind.nbytes), 0) + family.count
    ordered = sorted(found.values(), key=lambda line: (CLASSES.index(line.group), line.part))
    alike = len(set(experts.values())) == 1 and len(experts) == len({part for part, _ in experts}) == 6
    count = max(experts.values(), default=0)
    return Census(tuple(ordered), sum(nbytes for _, nbytes in experts) if alike else None, count)


def _split(local: str) -> tuple[str, str]:
    """The layer's number, as text, and the rest of the name; no number and the whole name outside the layers."""
    if not local.startswith(LAYERS):
        return "", local
    layer, _, rest = local[len(LAYERS) :].partition(".")
    return layer, rest


def _classify(layer: str, rest: str, is_mla: bool) -> tuple[str, str]:
    """Class and part of the tensor `rest` of a layer, or of the top level for an empty `layer`."""
    if not layer and rest in (HEAD, EMBEDDING):
        return (HEAD_CLASS if rest == HEAD else EMBEDDING_CLASS), ""
    if not layer and not rest.startswith("model."):
        return OTHERS, rest.partition(".")[0]
    if expert := _EXPERT.fullmatch(rest):
        return ROUTED, f"{expert[1]} {'packed' if expert[2] == 'packed' else 'scales'}"
    if rest.startswith(f"{_MOE}gate."):
        return ROUTERS, "matrix" if rest.endswith(".weight") else "selection bias"
    for pattern, part in _SMALL:
        if pattern.search(rest):
            return SMALL, part
    scope, _, matrix = rest.removesuffix(".weight").rpartition(".")
    if scope == "self_attn":
        return (MLA if is_mla else KDA), matrix
    if scope == "mlp":
        return DENSE, matrix
    if scope == f"{_MOE}shared_experts":
        return SHARED, matrix
    if matrix in _LATENT_NAMES:
        return LATENT, matrix.removeprefix("routed_expert_")
    return OTHERS, "of the text model"


def _parameters(family: Family, group: str, part: str) -> int:
    """Parameters of one tensor."""
    if group == ROUTED:
        return family.kind.nbytes * _CODES_A_BYTE if part.endswith("packed") else 0
    return family.kind.nbytes * 8 // DTYPE_BITS[family.kind.dtype]
