"""Ranks, and who answered what, in words. Used wherever an error names a disagreement."""

from __future__ import annotations

from collections.abc import Mapping

from ronde.observe.events import name_ranks as ranks_text

__all__ = ["answers", "ranks_text"]


def answers(said: Mapping[int, str], verb: str = " gave ") -> str:
    """What each rank said, equal answers together: `ranks 0, 2 gave (3, 4); rank 1 gave (3, 5)`."""
    by_answer: dict[str, list[int]] = {}
    for rank in sorted(said):
        by_answer.setdefault(said[rank], []).append(rank)
    return "; ".join(f"{ranks_text(ranks)}{verb}{answer}" for answer, ranks in by_answer.items())
