"""Ranks, and who answered what, in words. Used wherever an error names a disagreement."""

from __future__ import annotations

from ronde.text import format_ranks as ranks_text

__all__ = ["ranks_text"]
