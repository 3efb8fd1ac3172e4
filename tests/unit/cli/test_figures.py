"""Numbers are written as one would say them, also where rounding makes them a thousand."""

from __future__ import annotations

import pytest

from ronde.text import format_bytes, format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.125, "0.125"),
        (12.34, "12.3"),
        (999.4, "999"),
        (999.5, "1000"),
        (999.6, "1000"),
        (12_345.6, "12346"),
    ],
)
def test_a_number_has_three_digits_or_all_before_its_point(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (999_499, "999 KB"),
        (999_500, "1 MB"),
        (999_600_000, "1 GB"),
        (1_230_000_000, "1.23 GB"),
        (4_999_600_000_000_000, "5000 TB"),
    ],
)
def test_a_size_has_the_unit_that_its_rounded_number_asks_for(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
