"""ronde.text"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping

__all__ = [
    "BINARY_UNITS",
    "LOST_CODE",
    "MAX_TEXT_CHARS",
    "NOT_EXECUTABLE_CODE",
    "NOT_STARTED_CODE",
    "THOUSAND",
    "describe_exit_code",
    "escape_surrogates",
    "format_bytes",
    "format_compact_number",
    "format_count",
    "format_duration",
    "format_elapsed",
    "format_exact_bytes",
    "format_microseconds",
    "format_number",
    "format_rank_answers",
    "format_rank_ranges",
    "format_ranks",
    "shell_exit_code",
    "shorten",
    "split_proc_stat",
]

MAX_TEXT_CHARS = 200

# From here on, three digits would round to 1000, which `g` writes as 1e+03.
THOUSAND = 999.5

BINARY_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}

NOT_EXECUTABLE_CODE = 126
"""As shells say of a file that is no program."""

NOT_STARTED_CODE = 127
"""As they say of a command that is not there; here, of all else that keeps a rank from starting."""

LOST_CODE = 255
"""As ssh says of a connection that has ended: how the rank itself ended, nobody knows."""


def shorten(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """One line of at most `limit` printable characters: a user's name must not break a log or a file."""
    # Cut first: a name may be a megabyte long.
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    if shown.isprintable():
        return shown
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def escape_surrogates(text: str) -> str:
    """The text with what UTF-8 cannot hold (bytes of a file name, half a pair) as escapes; lines stay."""
    return text.encode("utf-8", "backslashreplace").decode()


def format_ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, or `ranks 0, 1, 4-7`: three or more in a row as a range, so that a thousand stay readable."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    if not runs:
        return "no ranks"
    one = len(runs) == 1 and len(runs[0]) == 1
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if one else 'ranks'} {', '.join(words)}"


def format_rank_ranges(ranks: Iterable[int]) -> str:
    """Ranks in ascending order as `0,2-3`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def format_rank_answers(answers: Mapping[int, str], verb: str = " gave ") -> str:
    """What each rank said, equal answers together: `ranks 0, 2 gave (3, 4); rank 1 gave (3, 5)`."""
    by_answer: dict[str, list[int]] = {}
    for rank in sorted(answers):
        by_answer.setdefault(answers[rank], []).append(rank)
    return "; ".join(f"{format_ranks(ranks)}{verb}{answer}" for answer, ranks in by_answer.items())


def format_number(value: float) -> str:
    """Three digits, and more only in front of the point: 0.125, 12.5, 1250."""
    return f"{value:.3g}" if value < THOUSAND else f"{value:.0f}"


def format_bytes(num_bytes: float) -> str:
    """In the unit one would say it in: 1.25 GB."""
    size, unit = num_bytes, "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < THOUSAND or unit == "TB":
            break
        size /= 1000
    return f"{format_number(size)} {unit}"


def format_exact_bytes(num_bytes: int) -> str:
    """A size as one would type it."""
    for unit, value in reversed(BINARY_UNITS.items()):
        if num_bytes >= value and num_bytes % value == 0:
            return f"{num_bytes // value}{unit}"
    return str(num_bytes)


def format_compact_number(value: float | None) -> str:
    """A number for people: three or four digits that count, thousands as k, M, G; a dash for none."""
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


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def format_elapsed(value: float) -> str:
    if value < 100:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def format_microseconds(us: float) -> str:
    """Microseconds in the unit one would say them in."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.2f} {unit}"
    return f"{us:.1f} µs"


def shell_exit_code(code: int) -> int:
    """The job's, for a rank's."""
    return 128 - code if code < 0 else code


def describe_exit_code(code: int) -> str:
    """In words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


def split_proc_stat(data: bytes) -> list[str]:
    """Return the fields of /proc/PID/stat from the third one (the state) on. The second is the name in brackets, which
    may itself contain brackets and spaces."""
    return data.decode(errors="replace").rpartition(")")[2].split()
