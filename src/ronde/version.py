"""The version of ronde, where even what must start quickly can read it."""

from __future__ import annotations

__version__ = "0.1.0"
