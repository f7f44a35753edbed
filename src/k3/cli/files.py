"""Results on disk: written beside and renamed into place."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from k3.errors import K3Error, UsageError


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all. A device or a pipe is written as it is.

    Raises:
        K3Error: it can't be written; a file that was there before is untouched.
    """
    try:
        if _is_special(path):
            path.write_bytes(data)
            return
        beside = _beside(path)
        try:
            beside.write_bytes(data)
            beside.replace(path.resolve())
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise K3Error(
            f"{path}: the result could not be written: {error.strerror}. Check the folder and the disk's space."
        ) from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON in the way of `write_bytes`."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    # A path that is not UTF-8 is in the text as lone surrogates; JSON can spell them.
    write_bytes(path, text.encode(errors="backslashreplace"))


def require_writable(**results: Path | None) -> None:
    """Refuse results' paths before the work instead of after it; keywords are the names of their options.

    Raises:
        UsageError: a file can't be made there, or two results have one path.
    """
    options: dict[Path, str] = {}
    for name, path in results.items():
        if path is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if path.is_dir():
            raise UsageError(f"{option}: {path} is a folder, expected the path of a file. Name a file in it.")
        if _is_special(path):
            continue
        try:
            beside = _beside(path)
            beside.touch(exist_ok=False)
            beside.unlink()
        except OSError as error:
            raise UsageError(
                f"{option}: {path} can't be written: {error.strerror}. Make the folder, or name another place."
            ) from error
        if (other := options.setdefault(path.resolve(), option)) != option:
            raise UsageError(f"{option} and {other} are both {path}. Give each result its own file.")


def _is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder, like /dev/stdout."""
    with contextlib.suppress(OSError):
        return path.exists() and not path.is_file() and not path.is_dir()
    return False


def _beside(path: Path) -> Path:
    """Where a file is written before it takes its name; a link stays a link."""
    target = path.resolve()
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")
