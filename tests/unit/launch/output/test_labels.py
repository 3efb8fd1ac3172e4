"""Whose line it is."""

from __future__ import annotations

from datetime import datetime

import pytest

from ronde.launch.output.printer import (
    DRIVER,
    horovod_prefix,
    horovod_timestamp_prefix,
    line_prefix,
    prefix_width,
    timestamp_prefix,
)
from ronde.text import format_rank_ranges


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "0"), ([0, 1], "0-1"), (range(8), "0-7"), ([0, 2, 3], "0,2-3"), ([1, 3, 5, 6, 7], "1,3,5-7")],
)
def test_ranks_are_written_as_spans(ranks: list[int], text: str) -> None:
    assert format_rank_ranges(ranks) == text


def test_a_label_names_its_ranks_or_the_driver() -> None:
    assert line_prefix((0, 2, 3), color=False) == b"[0,2-3] "
    assert line_prefix(DRIVER, color=False) == b"[ronde] "


def test_every_rank_has_a_colour_of_its_own_and_folded_lines_have_none() -> None:
    labels = {line_prefix((rank,), color=True).split(b"m")[0] for rank in range(10)}
    assert len(labels) == 10
    assert line_prefix((0, 1), color=True) == b"\x1b[1m[0-1]\x1b[0m "


def test_a_stamp_is_local_time_to_the_millisecond() -> None:
    moment = datetime(2026, 1, 5, 14, 3, 22, 123_000)
    assert timestamp_prefix(round(moment.timestamp() * 1000)) == b"2026-01-05 14:03:22.123 "


def test_the_width_is_that_of_the_longest_label() -> None:
    assert prefix_width(8) == len("[7] ")
    assert prefix_width(64, timestamps=True) == len("[63] 2026-01-05 14:03:22.123 ")


def test_labels_and_times_can_be_those_of_horovod() -> None:
    assert horovod_prefix((3,), "out") == b"[3]<stdout>:"
    assert horovod_prefix((12,), "err") == b"[12]<stderr>:"
    assert horovod_prefix(DRIVER, "err") == b"[ronde] "
    assert horovod_timestamp_prefix(int(datetime(2026, 1, 5, 14, 3, 22).timestamp())) == b"Mon Jan  5 14:03:22 2026"
