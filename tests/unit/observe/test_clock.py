"""The clock offset: its error bound holds, and the quickest sample wins."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.observe.clock import ClockOffset

MS = 1_000_000
WAY = st.integers(0, 50 * MS)


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.integers(-(10**18), 10**18), st.lists(st.tuples(WAY, WAY), min_size=1, max_size=20))
def test_the_error_bound_holds_however_unequal_the_ways(offset: int, ways: list[tuple[int, int]]) -> None:
    clock = ClockOffset()
    for index, (there, back) in enumerate(ways):
        sent = 1000 * MS * index
        clock.add(sent, sent + there + offset, sent + there + back)
    assert abs(clock.offset_ns - offset) <= clock.error_ns(1000 * MS * len(ways)) + 1


def test_the_quickest_sample_wins_over_slow_lopsided_ones() -> None:
    clock, random, offset = ClockOffset(), Random(7), 5_000 * MS
    for index in range(100):
        sent = index * 100 * MS
        there, back = (10_000, 12_000) if index == 40 else (random.randrange(5 * MS, 20 * MS), 100_000)
        clock.add(sent, sent + there + offset, sent + there + back)
    assert abs(clock.offset_ns - offset) <= 1_000


def test_an_old_sample_gives_way_when_the_clocks_have_drifted() -> None:
    clock, drift = ClockOffset(), 10e-6
    for second in range(3600):
        sent = second * 1000 * MS
        way = 1_000 if second == 0 else 100_000
        clock.add(sent, sent + way + int(sent * drift), sent + 2 * way)
    true_offset = int(3599 * 1000 * MS * drift)
    assert abs(clock.offset_ns - true_offset) <= clock.error_ns(3600 * 1000 * MS) < 1 * MS


def test_a_reply_from_before_its_request_is_no_sample() -> None:
    clock = ClockOffset()
    assert not clock.add(sent_ns=2000, coordinator_ns=0, received_ns=1999)
    assert clock.error_ns(0) == math.inf
