"""`k3 compare A B`: two logit dumps, or two `--out` files."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3.errors import K3Error, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]


class DifferenceError(K3Error):
    """The two results are not equal."""


@dataclass(frozen=True, slots=True)
class Run:
    """What is compared of an `--out` file."""

    prompt_ids: list[int]
    generated_ids: list[int]
    logits_sha256: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", type=Path, help="a file of --dump-logits or of --out")
    parser.add_argument("b", metavar="B", type=Path, help="another one of the same kind")
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="largest difference of logits to accept, of --out files any if the ids agree (default: every bit equal)",
    )


def execute(arguments: argparse.Namespace) -> int:
    tolerance: float | None = arguments.tolerance
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"--tolerance: expected a number from 0 up, found {tolerance}.")
    a, b = _read(arguments.a), _read(arguments.b)
    if isinstance(a, Run) and isinstance(b, Run):
        equal = _compare_runs(a, b, tolerance)
    elif isinstance(a, Run) or isinstance(b, Run):
        raise UsageError(
            f"{arguments.a} and {arguments.b} are of different kinds. Compare two files of --dump-logits or two of "
            "--out."
        )
    else:
        equal = _compare_logits(a, b, tolerance)
    if not equal:
        expected = "every bit equal" if tolerance is None else f"equality to {tolerance:g}"
        raise DifferenceError(
            f"{arguments.a} and {arguments.b} differ: expected {expected}. What was found is on standard output."
        )
    return 0


def _compare_logits(a: Logits, b: Logits, tolerance: float | None) -> bool:
    import numpy as np

    print(f"values: {a.size} and {b.size}")
    if a.size != b.size:
        return False
    with np.errstate(invalid="ignore"):
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    difference[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    worst = int(np.argmax(difference))
    print(f"largest difference: {difference[worst]:.9g} at {worst} ({a[worst]:.9g} and {b[worst]:.9g})")
    print(f"arg-max: {_arg_max(a)} and {_arg_max(b)}")
    same_bits = a.tobytes() == b.tobytes()
    print(f"every bit equal: {'yes' if same_bits else 'no'}")
    return same_bits if tolerance is None else bool(difference[worst] <= tolerance)


def _arg_max(logits: Logits) -> str:
    return "none, a NaN" if (logits != logits).any() else str(int(logits.argmax()))


def _compare_runs(a: Run, b: Run, tolerance: float | None) -> bool:
    print(f"prompt_ids: {_describe_ids(a.prompt_ids, b.prompt_ids)}")
    print(f"generated_ids: {_describe_ids(a.generated_ids, b.generated_ids)}")
    same_bits = a.logits_sha256 == b.logits_sha256
    print(f"logits of every generated position: {'every bit equal' if same_bits else 'different'}")
    same_ids = (a.prompt_ids, a.generated_ids) == (b.prompt_ids, b.generated_ids)
    return same_ids and (same_bits or tolerance is not None)


def _describe_ids(a: list[int], b: list[int]) -> str:
    if a == b:
        return f"equal ({len(a)})"
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"differ from place {place} on ({len(a)} and {len(b)} ids)"


def _read(path: Path) -> Run | Logits:
    import numpy as np

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}. Name a readable file.") from error
    if run := _run(data):
        return run
    if path.suffix == ".json":
        raise UsageError(f"{path}: expected the JSON of a run's --out, found something else. Name such a file.")
    if not data or len(data) % 4:
        raise UsageError(
            f"{path}: expected the float32 values of --dump-logits or the JSON of --out, found {len(data)} bytes of "
            "something else. Name such a file."
        )
    return np.frombuffer(data, "<f4")


def _run(data: bytes) -> Run | None:
    """The run that an `--out` file describes, None if it is none."""
    try:
        record: Any = json.loads(data)
        run = Run(record["prompt_ids"], record["generated_ids"], record["logits_sha256"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    ids = (run.prompt_ids, run.generated_ids)
    well_formed = all(isinstance(part, list) for part in ids) and isinstance(run.logits_sha256, str)
    return run if well_formed else None
