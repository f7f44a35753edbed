"""Where test data lies, and copies of small checkpoints that a test may damage."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
DATA = Path(__file__).resolve().parent / "data"
TINY_A = DATA / "tiny-a"
TINY_C = DATA / "tiny-c"


def shared_file(name: str) -> Path:
    """A file of the shared material, or a skip with the reason."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} of the shared material beside the repository")
    return path


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared material; the test is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("needs the shared material beside the repository")
    return SHARED


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A writable copy of the smaller tiny checkpoint."""
    return copy_checkpoint(TINY_C, tmp_path / "model")


def copy_checkpoint(source: Path, target: Path) -> Path:
    """Copy config, index and shards, without the expected results."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("expected*"))
    return target


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """A shard's header as parsed JSON, and its data."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_shard(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    """Write a shard from its header (an object, or its exact bytes) and its data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def edit_shard(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a shard's header in place, leaving its data."""
    header, data = read_shard(path)
    change(header)
    write_shard(path, header, data)


def shard_of(model_dir: Path, number: int) -> Path:
    """The shard with this number (from one)."""
    return next(model_dir.glob(f"model-{number:05}-of-*.safetensors"))


def edit_tensor(model_dir: Path, name: str, dtype: str, change: Callable[[Any], object]) -> None:
    """Change a tensor's values (raw bits for bf16: `<u2`) in whatever shard holds it."""
    import numpy as np

    weight_map = json.loads((model_dir / "model.safetensors.index.json").read_bytes())["weight_map"]
    path = model_dir / weight_map[name]
    header, data = read_shard(path)
    begin, end = header[name]["data_offsets"]
    values = np.frombuffer(data[begin:end], dtype).copy()
    change(values)
    write_shard(path, header, data[:begin] + values.tobytes() + data[end:])
