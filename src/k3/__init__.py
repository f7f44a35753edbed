"""`k3` runs Kimi K3 exactly, on one ordinary machine.

    with k3.load("path/to/checkpoint") as model:
        for token in model.generate("The capital of France is"):
            print(token.text, end="")

Names are imported when they are first used, so that `import k3` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3.api import Model, load
    from k3.engine.engine import Engine
    from k3.engine.generation import Token
    from k3.engine.sequence import Sequence
    from k3.errors import K3Error
    from k3.text.chat.render import render_segments
    from k3.text.tokenizer import Tokenizer, load_tokenizer

__version__ = "0.1.0"

_HOMES = {
    "Engine": "k3.engine.engine",
    "K3Error": "k3.errors",
    "Model": "k3.api",
    "Sequence": "k3.engine.sequence",
    "Token": "k3.engine.generation",
    "Tokenizer": "k3.text.tokenizer",
    "load": "k3.api",
    "load_tokenizer": "k3.text.tokenizer",
    "render_segments": "k3.text.chat.render",
}

__all__ = [
    "Engine",
    "K3Error",
    "Model",
    "Sequence",
    "Token",
    "Tokenizer",
    "__version__",
    "load",
    "load_tokenizer",
    "render_segments",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'k3' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
