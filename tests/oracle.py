"""The recorded results of the official model, and the reference's own answers to the same questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3 import reference

DATA = Path(__file__).parent / "data"
SETS = ("tiny-a", "tiny-c")

Arrays = dict[str, "npt.NDArray[Any]"]

_DTYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4", "U8": "u1", "BF16": "<u2"}


def read_tensors(path: Path) -> Arrays:
    """All tensors of a safetensors file, bfloat16 widened to float64. Uses none of the package's readers."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    arrays = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            array = np.frombuffer(raw[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
            arrays[name] = reference.bf16(array) if entry["dtype"] == "BF16" else array
    return arrays


@cache
def expected(name: str) -> Arrays:
    """What the official model gave on the checkpoint `name`; keys in the oracle's README."""
    return read_tensors(DATA / name / "expected.safetensors")


@cache
def prompts(name: str) -> list[int]:
    """Numbers of the prompts of a set."""
    meta = json.loads((DATA / name / "expected.meta.json").read_text())
    return [prompt["p"] for prompt in meta["prompts"]]


@cache
def ops() -> Arrays:
    """The official model's components, one by one."""
    return read_tensors(DATA / "ops.safetensors")


def wide_floats(name: str) -> npt.NDArray[np.float64]:
    """A float32 input of `ops()`, exactly widened."""
    return ops()[name].astype(np.float64)


def weights(group: str) -> reference.Weights:
    """The weights of one layer in `ops()`."""

    def read(name: str) -> npt.NDArray[Any]:
        array = ops()[f"{group}.w.{name}"]
        return array if array.dtype == np.uint8 else array.astype(np.float64)

    return reference.Weights(read)


def _rmsnorm() -> Arrays:
    x, weight = wide_floats("rmsnorm.x"), wide_floats("rmsnorm.weight")
    return {f"y_eps1e-{n}": reference.rms_norm(x, weight, 10.0**-n) for n in (5, 6)}


def _situ() -> Arrays:
    gate, up = np.split(wide_floats("situ_glu.x"), 2, axis=1)
    return {f"y_b{b}_{lb}": reference.situ(gate, up, b, lb) for b, lb in ((4, 25), (3, 17))}


def _shortconv() -> Arrays:
    pieces = [wide_floats(f"shortconv.x{i}") for i in range(4)]
    ends = np.cumsum([len(piece) for piece in pieces])
    u = np.concatenate(pieces)
    y = np.split(reference.conv_silu(u, wide_floats("shortconv.weight")), ends[:-1])
    states = {f"state{i}": reference.conv_state(u[:end], 4) for i, end in enumerate(ends)}
    return {f"y{i}": piece for i, piece in enumerate(y)} | states


def _kda_gate() -> Arrays:
    z, a_log, bias = (wide_floats(f"kda_gate.{name}") for name in ("z", "A_log", "dt_bias"))
    g = {n: reference.kda_gate(z, a_log, bias, 5, -float(n)) for n in (4, 5)}
    return {f"g_lb{n}": x for n, x in g.items()} | {f"decay_lb{n}": np.exp(x) for n, x in g.items()}


def _kda_recurrence(group: str) -> Arrays:
    q, k, v, g, logit, state = (wide_floats(f"{group}.{n}") for n in ("q", "k", "v", "g", "beta_logit", "S0"))
    o, state = reference.kda_recurrence(q, k, v, g, reference.sigmoid(logit), state)
    return {"o": o, "S": state}


def _kda_output() -> Arrays:
    o, weight, gate = (wide_floats(f"kda_onorm.{name}") for name in ("o", "weight", "gate"))
    return {"y": reference.kda_output(o, weight, gate, 1e-5)}


def _kda_layer() -> Arrays:
    x, w = wide_floats("kda_layer.x"), weights("kda_layer")
    y, end = reference.kda_layer(x, w, -5.0, 1e-5)
    _, early = reference.kda_layer(x[:66], w, -5.0, 1e-5)
    return {"y": y, "S66": early.recurrent, "S69": end.recurrent}


def _mla_layer() -> Arrays:
    x, w = wide_floats("mla_layer.x"), weights("mla_layer")
    k, v = reference.mla_keys_values(x, w, 6, 24)
    return {"y": reference.mla_layer(x, w, 6, 24), "k": k.swapaxes(0, 1), "v": v.swapaxes(0, 1)}


def moe_settings(top_k: int, scaling: float = 1.0) -> reference.MoeSettings:
    return reference.MoeSettings(top_k, True, scaling, True, 4.0, 25.0, 1e-5)


def _router() -> Arrays:
    x, weight, bias = (wide_floats(f"router.{name}") for name in ("x", "weight", "bias"))
    plain, scaled = (reference.router(x, weight, bias, moe_settings(6, scaling)) for scaling in (1.0, 2.5))
    return {"ids": plain[0], "w_s1": plain[1], "w_s2.5": scaled[1]}


def _residual() -> Arrays:
    sources, norm, proj = (wide_floats(f"attn_res.{name}") for name in ("sources", "norm", "proj"))
    return {f"y{n}": reference.residual_mix(list(sources[:n]), norm, proj, 1e-5) for n in range(1, 10)}


def _mxfp4() -> Arrays:
    file = ops()
    ones = np.full((255, 16), 0x22, np.uint8)
    unit = np.full((256, 1), 127, np.uint8)
    return {
        "grid": reference.mxfp4(file["mxfp4.grid_packed"], file["mxfp4.grid_scale"]),
        "scale": reference.mxfp4(ones, file["mxfp4.scale_byte"][:, None])[:, 0],
        "byte_values": reference.mxfp4(np.repeat(file["mxfp4.byte"][:, None], 16, axis=1), unit)[:, :2],
    }


def _matvec() -> Arrays:
    w = reference.mxfp4(ops()["mxfp4_matvec.packed"], ops()["mxfp4_matvec.scale"])
    return {"w": w, "y": wide_floats("mxfp4_matvec.x") @ w.T}


def _moe_layer() -> Arrays:
    return {"y": reference.latent_moe(wide_floats("moe_layer.x"), weights("moe_layer"), moe_settings(5))[0]}


OPS: dict[str, Callable[[], Arrays]] = {
    "rmsnorm": _rmsnorm,
    "situ_glu": _situ,
    "shortconv": _shortconv,
    "kda_gate": _kda_gate,
    "kda_recur1": lambda: _kda_recurrence("kda_recur1"),
    "kda_recur80": lambda: _kda_recurrence("kda_recur80"),
    "kda_onorm": _kda_output,
    "kda_layer": _kda_layer,
    "mla_layer": _mla_layer,
    "router": _router,
    "attn_res": _residual,
    "mxfp4": _mxfp4,
    "mxfp4_matvec": _matvec,
    "moe_layer": _moe_layer,
}
"""The reference's results of every group of `ops()`, by the oracle's names without the group and `_f64`."""
