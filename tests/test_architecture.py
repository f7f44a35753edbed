"""The house: imports run downwards, and what needs no arithmetic works without the native extension."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import k3
from conftest import TINY_A

SOURCE = Path(k3.__file__).parent

MAY_USE = {
    "errors": set(),
    "kernels": {"errors"},
    "text": {"errors"},
    "checkpoint": {"errors", "text"},
    "storage": {"errors", "checkpoint"},
    "model": {"errors", "checkpoint", "kernels"},
    "reference": {"errors", "checkpoint"},
    "engine": {"errors", "checkpoint", "kernels", "text", "storage", "model"},
    "api": {"errors", "checkpoint", "kernels", "text", "engine"},
    "cli": {"errors", "checkpoint", "kernels", "text", "storage", "engine", "api", "__init__"},
}
"""What each part of the package may import, besides itself."""


def imported_parts(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "k3":
            names = [node.module] if node.module != "k3" else [f"k3.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "k3"]
        for name in names:
            part = [*name.split("."), "__init__"][1]
            yield part if part in MAY_USE else "__init__"


@pytest.mark.parametrize("part", sorted(MAY_USE))
def test_imports_run_downwards(part):
    home = SOURCE / part
    files = sorted(home.rglob("*.py")) if home.is_dir() else [SOURCE / f"{part}.py"]
    assert files
    used = {used for file in files for used in imported_parts(file)} - {part}
    assert used <= MAY_USE[part]


WITHOUT_EXTENSION = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("k3.kernels"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import k3
from k3.checkpoint.config import ModelConfig
from k3.checkpoint.index import TensorIndex
from k3.checkpoint.layout import bind
tokenizer = k3.load_tokenizer({str(SOURCE / "data" / "demo")!r})
assert tokenizer.decode(tokenizer.encode("a river")) == "a river"
config = ModelConfig.read({str(TINY_A / "config.json")!r})
print(bind(TensorIndex.open({str(TINY_A)!r}), config).tensor_count)
"""


def test_tokenizer_and_checkpoint_readers_need_no_extension():
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTENSION], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000
