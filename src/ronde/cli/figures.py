"""Numbers as people read them. Used by the tables of `ronde top` and `ronde doctor`."""

from __future__ import annotations

__all__ = ["format_number", "format_size"]

# From here on, three digits would round to 1000, which `g` writes as 1e+03.
THOUSAND = 999.5


def format_number(value: float) -> str:
    """Three digits, and more only in front of the point: 0.125, 12.5, 1250."""
    return f"{value:.3g}" if value < THOUSAND else f"{value:.0f}"


def format_size(num_bytes: float) -> str:
    """In the unit one would say it in: 1.25 GB."""
    size, unit = num_bytes, "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < THOUSAND or unit == "TB":
            break
        size /= 1000
    return f"{format_number(size)} {unit}"
