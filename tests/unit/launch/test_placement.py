"""Which rank sits where."""

from __future__ import annotations

import pytest

from ronde.launch.placement import Host, Placement, hosts_or_localhost, place_ranks

TWO = (Host("a", 2), Host("b", 4))


def test_hosts_are_filled_in_their_order() -> None:
    seats = place_ranks(TWO, 6)
    assert [seat.rank for seat in seats] == list(range(6))
    assert [seat.host_index for seat in seats] == [0, 0, 1, 1, 1, 1]
    assert [seat.local_rank for seat in seats] == [0, 1, 0, 1, 2, 3]
    assert [seat.local_size for seat in seats] == [2, 2, 4, 4, 4, 4]
    assert [seat.cross_rank for seat in seats] == [0, 0, 1, 1, 0, 0]
    assert [seat.cross_size for seat in seats] == [2, 2, 2, 2, 1, 1]
    assert {seat.num_hosts for seat in seats} == {2}


def test_fewer_ranks_than_slots_are_fine_and_the_last_hosts_stay_free() -> None:
    assert [(seat.host_index, seat.local_size) for seat in place_ranks(TWO, 3)] == [(0, 2), (0, 2), (1, 1)]
    assert place_ranks(TWO, 1) == (Placement(0, 0, 0, 1, 0, 1, 1),)


def test_without_hosts_all_ranks_are_here() -> None:
    assert hosts_or_localhost((), 3) == (Host("localhost", 3),)
    assert [(seat.host_index, seat.local_rank, seat.local_size) for seat in place_ranks((), 2)] == [
        (0, 0, 2),
        (0, 1, 2),
    ]


def test_too_many_ranks_are_an_error_that_says_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"8 ranks, but only 6 slots \(a:2,b:4\): 2 slots short; add hosts"):
        place_ranks(TWO, 8)
    with pytest.raises(ValueError, match=r"2 ranks, but only 1 slot \(a:1\): 1 slot short"):
        place_ranks((Host("a"),), 2)


def test_no_ranks_are_no_job() -> None:
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        place_ranks(TWO, 0)
