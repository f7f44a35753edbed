"""`k3` runs Kimi K3 exactly, on one ordinary machine."""

from __future__ import annotations

__version__ = "0.1.0"
