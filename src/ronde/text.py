"""Values as text for people: names of users, ranks, numbers, sizes and durations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

MAX_TEXT_CHARS = 200

# From here on, three digits would round to 1000, which `g` writes as 1e+03.
THOUSAND = 999.5

BINARY_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}


def shorten(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return one line of at most `limit` printable characters: a name that a user chose must not break a log or a
    file."""
    # Cut first: a name may be a megabyte long.
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    if shown.isprintable():
        return shown
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def escape_surrogates(text: str) -> str:
    """Return the text with what UTF-8 cannot hold (bytes of a file name, half a surrogate pair) as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def format_ranks(ranks: Iterable[int], noun: str = "rank") -> str:
    """Return `rank 2` or `ranks 0, 1, 4-7`: three or more in a row are a range, so that a thousand stay readable."""
    parts: list[str] = []
    for first, last in _consecutive_runs(sorted(set(ranks))):
        parts += [f"{first}-{last}"] if last - first > 1 else map(str, range(first, last + 1))
    if not parts:
        return f"no {noun}s"
    return f"{noun} {parts[0]}" if parts[0].isdecimal() and len(parts) == 1 else f"{noun}s {', '.join(parts)}"


def format_rank_ranges(ranks: Iterable[int]) -> str:
    """Return ranks, which are in ascending order, as `0,2-3`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in _consecutive_runs(ranks))


def _consecutive_runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of consecutive ranks."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def format_rank_answers(answers: Mapping[int, str], verb: str = " gave ") -> str:
    """Return what each rank answered, equal answers together: `ranks 0, 2 gave (3, 4); rank 1 gave (3, 5)`."""
    by_answer: dict[str, list[int]] = {}
    for rank in sorted(answers):
        by_answer.setdefault(answers[rank], []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}{verb}{answer}" for answer, ranks in by_answer.items())


def format_number(value: float) -> str:
    """Return three digits, and more only before the point: 0.125, 12.5, 1250."""
    return f"{value:.3g}" if value < THOUSAND else f"{value:.0f}"


def format_compact_number(value: float | None) -> str:
    """Return three or four digits, thousands as k, M, G: 0.125, 1250, 12.5k; a dash for None and NaN."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    if size >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.1e}"


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def format_bytes(num_bytes: float) -> str:
    """Return a size with a decimal unit: 1.25 GB."""
    size, unit = num_bytes, "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < THOUSAND or unit == "TB":
            break
        size /= 1000
    return f"{format_number(size)} {unit}"


def format_exact_bytes(num_bytes: int) -> str:
    """Return a size as one types it, with a binary unit: 4M, 1536."""
    for unit, value in reversed(BINARY_UNITS.items()):
        if num_bytes >= value and num_bytes % value == 0:
            return f"{num_bytes // value}{unit}"
    return str(num_bytes)


def format_duration(seconds: float) -> str:
    """Return `42.1 s`, `3 min 5 s` or `2 h 7 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def format_microseconds(us: float) -> str:
    """Return a measured time: `4.2 µs`, `1.25 ms` or `3.50 s`."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.2f} {unit}"
    return f"{us:.1f} µs"
