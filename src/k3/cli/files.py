"""Results on disk: written beside and renamed into place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from k3.errors import K3Error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        K3Error: it can't be written; what was there before is untouched.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise K3Error(
            f"{path}: the result could not be written: {error.strerror}. Check the folder and the disk's space."
        ) from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON in the way of `write_bytes`."""
    write_bytes(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def require_folder(path: Path | None, option: str) -> None:
    """Refuse a result's path before the work instead of after it.

    Raises:
        UsageError: the folder isn't there.
    """
    from k3.errors import UsageError

    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{option}: the folder {path.parent} does not exist. Make it, or name another.")
