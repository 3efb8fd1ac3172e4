"""What ranks do with their time, from their samples."""

from __future__ import annotations

import pytest

from ronde.observe.activity import (
    MIN_CURRENT_WAIT_NS,
    ActivitySample,
    ActivityTracker,
    CurrentOperation,
    find_slowest,
)
from ronde.observe.stragglers import ArrivalSample

S = 1_000_000_000
MS = 1_000_000
ALL = (0, 1, 2)


@pytest.fixture
def tracker() -> ActivityTracker:
    return ActivityTracker(len(ALL), 0)


def report(tracker: ActivityTracker, rank: int, at_s: float, **sums: object) -> None:
    at_ns = int(at_s * S)
    tracker.add_sample(rank, ActivitySample(at_ns, **sums))  # type: ignore[arg-type]  # each by its name
    tracker.rank_reported(rank, at_ns)


def hold_up(tracker: ActivityTracker, late: int, seconds: float, sequence: int, now_s: float) -> None:
    """One operation in which all wait so long for one."""
    late_ns = int(seconds * S)
    for rank in ALL:
        waited = 0 if rank == late else late_ns
        tracker.stragglers.add(
            rank, "0.ordered", ALL, [ArrivalSample(sequence, 0, late_ns - waited, waited, waited)], int(now_s * S)
        )


def test_shares_of_time_add_up_to_all_of_it(tracker: ActivityTracker) -> None:
    report(tracker, 0, 1.0)
    report(tracker, 0, 3.0, waiting_ns=S, moving_ns=S // 2)
    known = tracker.snapshot(3 * S)[0]
    assert (known.computing, known.waiting, known.moving) == pytest.approx((0.25, 0.5, 0.25))
    assert known.steps_per_s is None, "no step was marked"
    report(tracker, 1, 1.0)
    report(tracker, 1, 2.0, waiting_ns=3 * S, moving_ns=S)  # several threads wait
    known = tracker.snapshot(2 * S)[1]
    assert (known.computing, known.waiting, known.moving) == (0.0, 1.0, 0.0)


def test_rates_are_those_of_the_last_seconds(tracker: ActivityTracker) -> None:
    for second in range(1, 21):  # ten steps per second, then two
        steps = 10 * min(second, 10) + 2 * max(0, second - 10)
        report(tracker, 0, second, steps=steps, operations=5 * steps, bytes=100 * steps)
    known = tracker.snapshot(20 * S)[0]
    assert known.steps == 120
    assert (known.steps_per_s, known.operations_per_s, known.bytes_per_s) == pytest.approx((2.0, 10.0, 200.0))


def test_a_clock_that_was_set_back_does_no_harm(tracker: ActivityTracker) -> None:
    for at_s in (2.0, 1.0, 2.0, 3.0):
        report(tracker, 0, at_s, operations=int(at_s))
    assert tracker.snapshot(3 * S)[0].operations_per_s == 1.0


def test_held_up_time_comes_from_arrivals_and_from_what_ranks_know_themselves(tracker: ActivityTracker) -> None:
    hold_up(tracker, late=2, seconds=0.5, sequence=0, now_s=1.0)
    report(tracker, 0, 1.0, waited_for=((1, S // 4),))
    report(tracker, 0, 2.0, waited_for=((1, S // 2), (2, S // 4), (77, S)))
    assert [known.held_up_s for known in tracker.snapshot(2 * S)] == pytest.approx([0.0, 0.5, 1.25])


def test_the_slowest_is_the_one_that_others_waited_for_lately(tracker: ActivityTracker) -> None:
    hold_up(tracker, late=1, seconds=5.0, sequence=0, now_s=0.5)
    for second in range(1, 31):
        hold_up(tracker, late=2, seconds=0.1, sequence=second, now_s=second)
        report(tracker, 0, second)
    shares = tracker.holding_up(30 * S)
    assert shares == {1: 0.0, 2: pytest.approx(0.1, rel=0.2)}
    assert find_slowest(shares) == 2
    assert [known.held_up_s for known in tracker.snapshot(30 * S)] == pytest.approx([0.0, 10.0, 6.0])


def test_nobody_is_slow_for_a_little() -> None:
    assert find_slowest({}) is None
    assert find_slowest({0: 0.004, 1: 0.009}) is None
    assert find_slowest({0: 0.02, 1: 0.05, 2: 0.05}) == 1


@pytest.mark.parametrize(
    ("by_rank", "held_up_s", "doing"),
    [
        (
            {0: CurrentOperation("barrier", S, (2,)), 1: CurrentOperation("barrier", S, (2,))},
            6.0,
            "waits 4.0 s for rank 2 in barrier",
        ),
        # A rank knows only of its neighbour; who waits in the same operation is not missing.
        (
            {0: CurrentOperation("barrier", S, (1,)), 1: CurrentOperation("barrier", S, (2,))},
            6.0,
            "waits 4.0 s for rank 2 in barrier",
        ),
        ({0: CurrentOperation("barrier", 4 * S - MIN_CURRENT_WAIT_NS + MS, (2,))}, 0.0, ""),  # that is normal
        ({0: CurrentOperation("broadcast", S, (), is_waiting=False)}, 0.0, "moves data for 4.0 s in broadcast"),
    ],
    ids=["two wait for one", "a chain", "a short wait", "data moves"],
)
def test_a_wait_under_way_is_counted_and_described_until_it_is_over(
    by_rank: dict[int, CurrentOperation], held_up_s: float, doing: str, tracker: ActivityTracker
) -> None:
    for rank, current in by_rank.items():
        report(tracker, rank, 4.0, current_operation=current)
    known = tracker.snapshot(5 * S)
    assert [each.held_up_s for each in known] == pytest.approx([0.0, 0.0, held_up_s])
    assert known[0].doing == doing
    assert (known[2].state, known[2].computing, known[2].silent_s) == ("starting", None, None), "it has sent nothing"
    for rank in by_rank:
        report(tracker, rank, 5.0)
    assert [each.doing for each in tracker.snapshot(5 * S)] == ["", "", ""]


def test_staleness_is_that_of_the_last_pushes(tracker: ActivityTracker) -> None:
    report(tracker, 0, 1.0)
    assert tracker.snapshot(1 * S)[0].staleness is None, "nothing was pushed"
    report(tracker, 0, 2.0, pushes=(10, 50, 9))
    report(tracker, 0, 20.0, pushes=(10, 50, 9))
    known = tracker.snapshot(20 * S)[0]
    assert (known.staleness, known.max_staleness) == (5.0, 9)
    report(tracker, 0, 21.0, pushes=(14, 58, 9))
    assert tracker.snapshot(21 * S)[0].staleness == 2.0
