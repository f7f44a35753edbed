"""Memory that indexing a checkpoint of the released shape takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conftest import REPOSITORY


@pytest.mark.slow
def test_memory_of_an_index_of_the_released_shape() -> None:
    """60 MB that stay and 120 MB at the peak, in fresh processes."""
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "index.py"), "--json"],
        capture_output=True, text=True, check=True, cwd=REPOSITORY / "src", env={"PYTHONPATH": str(REPOSITORY / "src")},
    )  # fmt: skip
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    print(runs)
    assert len(runs) == 3
    for figures in runs:
        assert figures["tensors"] == 497_220
        assert figures["kept_bytes"] <= 60e6
        assert figures["peak_bytes"] <= 120e6
