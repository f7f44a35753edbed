"""Sizes as people write them, and the presets that stand for two of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from k3.errors import UsageError

GB = 10**9

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": GB, "TB": 10**12} | {
    f"{letter}IB": 1 << (10 * power) for power, letter in enumerate("KMGT", 1)
}


@dataclass(frozen=True, slots=True)
class Preset:
    """GB of trunk and head kept between tokens, and of experts kept."""

    trunk_gb: float
    cache_gb: float


PRESETS = {
    "laptop": Preset(3, 1),
    "desktop": Preset(16, 10),
    "workstation": Preset(60, 30),
    "server": Preset(110, 13),
    "max": Preset(110, 109),
}


def parse_size(text: str) -> int | None:
    """Bytes of `8GB`, `12GiB`, `1.5 TB` or a plain number of bytes; None for `auto`.

    Raises:
        UsageError: it is none of these.
    """
    if text.strip().lower() == "auto":
        return None
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{0,9})?)\s*([A-Za-z]{0,3})\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise UsageError(f"expected a size such as 8GB, 12GiB or auto, found {text!r}.")
    return int(float(match[1]) * unit)
