"""How long callers were blocked in a part of an operation."""

from __future__ import annotations

from ronde.observe.stragglers import MAX_BLOCKED_INTERVALS, MIN_BLOCKED_NS, BlockedIntervals

MS = 1_000_000


def test_only_the_time_inside_counts() -> None:
    blocks = BlockedIntervals()
    blocks.add(10 * MS, 30 * MS)
    assert blocks.blocked_ns_between(0, 5 * MS) == 0
    assert blocks.blocked_ns_between(0, 20 * MS) == 10 * MS
    assert blocks.blocked_ns_between(20 * MS, 25 * MS) == 5 * MS
    assert blocks.blocked_ns_between(20 * MS, 90 * MS) == 10 * MS


def test_two_callers_at_once_count_as_one() -> None:
    blocks = BlockedIntervals()
    for begin, end in ((20, 40), (0, 30), (5, 10)):
        blocks.add(begin * MS, end * MS)
    assert blocks.blocked_ns_between(0, 100 * MS) == 40 * MS


def test_asking_for_what_is_over_is_no_wait() -> None:
    blocks = BlockedIntervals()
    blocks.add(0, MIN_BLOCKED_NS - 1)
    blocks.add(5 * MS, 4 * MS)
    assert blocks.blocked_ns_between(0, 10 * MS) == 0


def test_old_times_are_forgotten() -> None:
    blocks = BlockedIntervals()
    for index in range(MAX_BLOCKED_INTERVALS + 1):
        blocks.add(2 * index * MS, (2 * index + 1) * MS)
    assert blocks.blocked_ns_between(0, 1 * MS) == 0
    assert blocks.blocked_ns_between(0, 1000 * MS) == MAX_BLOCKED_INTERVALS * MS
