"""Results on disk: written beside and renamed into place."""

from __future__ import annotations

import errno
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
            beside.replace(_target(path))
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
        try:
            _try_to_write(path)
        except OSError as error:
            raise UsageError(
                f"{option}: {path} can't be written: {error.strerror}. Name a file in a folder that is there."
            ) from error
        if (other := options.setdefault(_target(path), option)) != option:
            raise UsageError(f"{option} and {other} are both {path}. Give each result its own file.")


def _try_to_write(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not _is_special(path):
        beside = _beside(path)
        beside.touch(exist_ok=False)
        beside.unlink()


def _is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder, like /dev/stdout."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _target(path: Path) -> Path:
    """The file that is written: a link stays a link."""
    return Path(os.path.realpath(path))


def _beside(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    target = _target(path)
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")
