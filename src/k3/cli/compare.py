"""`k3 compare A B`: two logit dumps, or two `--out` files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3.errors import K3Error, UsageError


class DifferenceError(K3Error):
    """The two results are not equal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="a `.bin` of --dump-logits, or a JSON of --out")
    parser.add_argument("b", metavar="B", type=Path, help="another one of the same kind")
    parser.add_argument(
        "--tolerance", metavar="X", type=float, help="largest difference of logits to accept (default: every bit equal)"
    )


def execute(arguments: argparse.Namespace) -> int:
    a, b, tolerance = arguments.a, arguments.b, arguments.tolerance
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"--tolerance: expected a number from 0 up, found {tolerance}.")
    if (a.suffix == ".json") != (b.suffix == ".json"):
        raise UsageError(f"{a} and {b} are of different kinds. Compare two .bin dumps or two .json results.")
    compare = _compare_runs if a.suffix == ".json" else _compare_logits
    equal = compare(a, b, tolerance)
    if not equal:
        raise DifferenceError(f"{a} and {b} differ: expected {_expectation(tolerance)}. The lines above say where.")
    return 0


def _expectation(tolerance: float | None) -> str:
    return "the same bits" if tolerance is None else f"equality to {tolerance:g}"


def _compare_logits(a: Path, b: Path, tolerance: float | None) -> bool:
    left, right = _read_logits(a), _read_logits(b)
    print(f"values: {left.size} and {right.size}")
    if left.size != right.size:
        return False
    difference = np.abs(left.astype(np.float64) - right.astype(np.float64))
    difference[(left == right) | (np.isnan(left) & np.isnan(right))] = 0.0
    worst = int(np.argmax(difference))
    print(f"largest difference: {difference[worst]:.9g} at {worst} ({left[worst]:.9g} and {right[worst]:.9g})")
    print(f"arg-max: {int(np.argmax(left))} and {int(np.argmax(right))}")
    same_bits = bool((left.view(np.uint32) == right.view(np.uint32)).all())
    print(f"every bit equal: {'yes' if same_bits else 'no'}")
    return same_bits if tolerance is None else bool(difference[worst] <= tolerance)


def _compare_runs(a: Path, b: Path, tolerance: float | None) -> bool:
    left, right = _read_run(a), _read_run(b)
    for field in ("prompt_ids", "generated_ids"):
        print(f"{field}: {_describe_ids(left[field], right[field])}")
    same_ids = all(left[field] == right[field] for field in ("prompt_ids", "generated_ids"))
    same_bits = bool(left["logits_sha256"] == right["logits_sha256"])
    print(f"logits of every position: {'every bit equal' if same_bits else 'different'}")
    return same_ids and (same_bits or tolerance is not None)


def _describe_ids(a: list[int], b: list[int]) -> str:
    if a == b:
        return f"equal ({len(a)})"
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"differ from place {place} on ({len(a)} and {len(b)} ids)"


def _read_logits(path: Path) -> npt.NDArray[np.float32]:
    data = _read(path)
    if not data or len(data) % 4:
        raise UsageError(f"{path}: expected float32 values, found {len(data)} bytes. Name a file of --dump-logits.")
    return np.frombuffer(data, np.dtype("<f4"))


def _read_run(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(_read(path))
        if {"prompt_ids", "generated_ids", "logits_sha256"} <= record.keys():
            return dict(record)
    except (ValueError, AttributeError, RecursionError):
        pass
    raise UsageError(f"{path}: expected the JSON of a run's --out, found something else. Name such a file.")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}. Name a readable file.") from error
