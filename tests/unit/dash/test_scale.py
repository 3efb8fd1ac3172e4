"""Axes and numbers for people."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.dash.scale import fit_axis
from ronde.text import format_compact_number


def test_ticks_are_round_numbers_around_the_values() -> None:
    assert fit_axis(0.07, 2.31, 0, 100).ticks == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
    assert fit_axis(97, 1003, 0, 100).ticks == (0, 200, 400, 600, 800, 1000, 1200)


def test_a_value_lies_between_the_ends_of_its_axis() -> None:
    axis = fit_axis(0, 10, 200, 100)
    assert [axis.at(value) for value in (0, 5, 10)] == [200, 150, 100]


def test_one_single_value_still_has_an_axis() -> None:
    axis = fit_axis(3.0, 3.0, 0, 100)
    assert axis.low < 3.0 < axis.high
    assert fit_axis(0.0, 0.0, 0, 1).low < 0.0


def test_ticks_have_the_decimals_that_tell_them_apart() -> None:
    axis = fit_axis(0.0, 0.0003, 0, 100)
    assert [axis.words(tick) for tick in axis.ticks] == ["0.0000", "0.0001", "0.0002", "0.0003"]
    axis = fit_axis(0, 100_000, 0, 100)
    assert axis.words(axis.ticks[-1]) == "100k"


def test_an_axis_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="finite limits, got 0 and inf"):
        fit_axis(0, math.inf, 0, 100)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e3))
def test_every_axis_holds_its_values_with_few_ticks(low: float, part: float) -> None:
    width = part * (abs(low) or 1.0)
    axis = fit_axis(low, low + width, 0.0, 1.0)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low <= low + slack
    assert axis.high >= low + width - slack
    assert len(axis.ticks) <= 8


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (0.98765, "0.988"),
        (12.345, "12.3"),
        (1234.5, "1234"),
        (20_637_000, "20.6M"),
        (45_000, "45k"),
        (2.5e-5, "2.5e-05"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_numbers_are_short(value: float | None, words: str) -> None:
    assert format_compact_number(value) == words
