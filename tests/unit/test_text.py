"""Values as text: ranks, numbers, sizes, durations, exit codes, and names that users chose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.exit_codes import describe_exit_code, shell_exit_code
from ronde.text import (
    format_bytes,
    format_compact_number,
    format_count,
    format_duration,
    format_exact_bytes,
    format_microseconds,
    format_number,
    format_rank_answers,
    format_rank_ranges,
    format_ranks,
    shorten,
)


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.text(st.characters()), st.integers(1, 50))
def test_a_shortened_text_is_one_printable_line_within_the_limit(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert len(short) <= limit
    assert short.isprintable()
    assert short == text or not text.isprintable() or len(text) > limit


@pytest.mark.parametrize(
    ("ranks", "text", "ranges"),
    [
        ([], "no ranks", ""),
        ([7], "rank 7", "7"),
        ([4, 0, 1, 3], "ranks 0, 1, 3, 4", "0-1,3-4"),
        ([7, 8], "ranks 7, 8", "7-8"),
        ([0, 1, 2], "ranks 0-2", "0-2"),
        ([0, 1, 2, 5, 8, 9, 10, 11], "ranks 0-2, 5, 8-11", "0-2,5,8-11"),
        (range(1000), "ranks 0-999", "0-999"),
    ],
)
def test_consecutive_ranks_are_ranges(ranks: Iterable[int], text: str, ranges: str) -> None:
    assert format_ranks(ranks) == text
    assert format_rank_ranges(sorted(ranks)) == ranges


def test_ranks_with_equal_answers_are_together() -> None:
    assert format_rank_answers({2: "a", 0: "a", 1: "b"}) == "ranks 0, 2 gave a; rank 1 gave b"


@pytest.mark.parametrize(
    ("format_value", "value", "text"),
    [
        (format_number, 0, "0"),
        (format_number, 0.125, "0.125"),
        (format_number, 999.4, "999"),
        (format_number, 999.5, "1000"),
        (format_number, 12_345.6, "12346"),
        (format_compact_number, 0, "0"),
        (format_compact_number, 0.98765, "0.988"),
        (format_compact_number, 1234.5, "1234"),
        (format_compact_number, 45_000, "45k"),
        (format_compact_number, 20_637_000, "20.6M"),
        (format_compact_number, 2.5e-5, "2.5e-05"),
        (format_compact_number, None, "–"),
        (format_compact_number, math.nan, "–"),
        (format_bytes, 999, "999 B"),
        (format_bytes, 1000, "1 KB"),
        (format_bytes, 999_499, "999 KB"),
        (format_bytes, 999_500, "1 MB"),
        (format_bytes, 1_230_000_000, "1.23 GB"),
        (format_bytes, 4_999_600_000_000_000, "5000 TB"),
        (format_exact_bytes, 1536, "1536"),
        (format_exact_bytes, 4 * 1024 * 1024, "4M"),
        (format_duration, 59.44, "59.4 s"),
        (format_duration, 75, "1 min 15 s"),
        (format_duration, 3 * 3600 + 7 * 60 + 20, "3 h 7 min"),
        (format_microseconds, 4.25, "4.2 µs"),
        (format_microseconds, 1250, "1.25 ms"),
        (format_microseconds, 3_500_000, "3.50 s"),
        (shell_exit_code, 3, 3),
        (shell_exit_code, -9, 137),
        (describe_exit_code, 3, "exited with code 3"),
        (describe_exit_code, -9, "killed by signal 9 (SIGKILL)"),
        (describe_exit_code, -200, "killed by signal 200"),
    ],
)
def test_a_value_is_short_and_has_its_unit(format_value: Callable[[Any], object], value: object, text: object) -> None:
    assert format_value(value) == text


def test_a_count_has_its_plural() -> None:
    assert [format_count(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
