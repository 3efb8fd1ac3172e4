"""What stands before each line: whose it is, in colour on a terminal, and when it came. Used by the Printer."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache

from ronde.launch.messages import Stream

__all__ = ["OWN", "asctime", "join_ranks", "label", "label_width", "stamp", "tag"]

_PALETTE = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""Readable on dark and on light; red is left to errors."""

OWN: tuple[int, ...] = ()
"""Stands for the driver itself, where ranks are meant."""


def join_ranks(ranks: Iterable[int]) -> str:
    """Ranks in ascending order as `0,2-3`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


@lru_cache(maxsize=1024)
def label(ranks: tuple[int, ...], *, color: bool) -> bytes:
    """`[0,2-3] `, with a space behind."""
    name = f"[{join_ranks(ranks)}]" if ranks else "[ronde]"
    if color:
        style = str(_PALETTE[ranks[0] % len(_PALETTE)]) if len(ranks) == 1 else "1"
        name = f"\x1b[{style}m{name}\x1b[0m"
    return name.encode() + b" "


@lru_cache(maxsize=1024)
def tag(ranks: tuple[int, ...], stream: Stream) -> bytes:
    """As Horovod writes a label: `[3]<stdout>:`."""
    return f"[{join_ranks(ranks)}]<std{stream}>:".encode() if ranks else label(ranks, color=False)


@lru_cache(maxsize=64)
def stamp(wall_ms: int) -> bytes:
    """A moment in local time, with a space behind."""
    moment = datetime.fromtimestamp(wall_ms / 1000)
    return moment.isoformat(sep=" ", timespec="milliseconds").encode() + b" "


@lru_cache(maxsize=64)
def asctime(wall_s: int) -> bytes:
    """A moment as Horovod writes it: `Mon Jan  5 14:03:22 2026`."""
    return datetime.fromtimestamp(wall_s).ctime().encode()


def label_width(num_ranks: int, *, timestamps: bool = False) -> int:
    """Columns that the label of one rank takes at most: a rank's own terminal is narrower by these."""
    return len(label((num_ranks - 1,), color=False)) + (len(stamp(0)) if timestamps else 0)
