"""How a rank's time is divided."""

from __future__ import annotations

import pytest

from ronde.dash.run_log import (
    ResourceSample,
    StepTimer,
    downsample,
    limit_to_steps,
    process_sampler,
    read_blocked_times,
)


class Clock:
    """Time is a number that the test moves; `blocked` is what ronde's operations add up to."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.blocked = (0.0, 0.0)

    def __call__(self) -> float:
        return self.now_s


def busy() -> ResourceSample:
    return ResourceSample(cpu=90.0, host_cpu=50.0, memory_bytes=1000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> StepTimer:
    return StepTimer(3, clock=clock, sample_resources=busy, read_blocked=lambda: clock.blocked)


def run_step(meter: StepTimer, clock: Clock, seconds: float, wait_s: float = 0.0, move_s: float = 0.0) -> None:
    with meter.step():
        clock.now_s += seconds
        clock.blocked = (clock.blocked[0] + wait_s, clock.blocked[1] + move_s)


def test_what_operations_blocked_is_taken_off_the_steps(meter: StepTimer, clock: Clock) -> None:
    run_step(meter, clock, 4.0, wait_s=0.75, move_s=0.25)
    share = meter.take_breakdown(run_started_s=100.0)
    assert (share.rank, share.num_steps, share.step_s) == (3, 1, (4.0,))
    assert (share.compute_s, share.wait_s, share.move_s) == (3.0, 0.75, 0.25)
    assert share.mean_step_s == 4.0


def test_time_between_steps_counts_up_to_the_gathering(meter: StepTimer, clock: Clock) -> None:
    run_step(meter, clock, 1.0)
    clock.now_s += 0.25
    run_step(meter, clock, 1.0)
    assert meter.take_breakdown(100.0).between_s == 0.25
    clock.now_s += 60.0  # validation
    run_step(meter, clock, 1.0)
    share = meter.take_breakdown(100.0)
    assert (share.between_s, share.total_s) == (0.0, 1.0)


def test_what_blocks_between_gathering_and_the_next_step_is_no_training(meter: StepTimer, clock: Clock) -> None:
    run_step(meter, clock, 1.0)
    meter.take_breakdown(100.0)
    clock.blocked = (50.0, 50.0)
    run_step(meter, clock, 1.0, wait_s=0.25)
    share = meter.take_breakdown(100.0)
    assert (share.compute_s, share.wait_s, share.move_s) == (0.75, 0.25, 0.0)


def test_load_is_looked_at_once_a_second_at_most(meter: StepTimer, clock: Clock) -> None:
    for _ in range(8):
        run_step(meter, clock, 0.25)
    assert [load.at_s for load in meter.take_breakdown(run_started_s=100.0).loads] == [0.25, 1.25]


def test_a_step_that_fails_is_not_counted(meter: StepTimer, clock: Clock) -> None:
    with pytest.raises(ZeroDivisionError), meter.step():
        raise ZeroDivisionError
    share = meter.take_breakdown(100.0)
    assert (share.num_steps, share.mean_step_s) == (0, 0.0)


def test_many_steps_are_told_as_means_of_neighbours(meter: StepTimer, clock: Clock) -> None:
    for index in range(64):
        run_step(meter, clock, 1.0 if index % 2 else 3.0)
    share = meter.take_breakdown(100.0)
    assert share.step_s == (2.0,) * 32
    assert (share.num_steps, share.longest_s) == (64, 3.0)


@pytest.mark.parametrize(
    ("wait_s", "move_s", "expected"),
    [(1.0, 2.0, (1.0, 2.0)), (5.0, 15.0, (2.5, 7.5)), (0.0, 0.0, (0.0, 0.0))],
)
def test_ten_seconds_hold_no_more_than_ten(wait_s: float, move_s: float, expected: tuple[float, float]) -> None:
    assert limit_to_steps(10.0, wait_s, move_s) == expected


def test_without_a_job_nothing_blocks() -> None:
    assert read_blocked_times() == (0.0, 0.0)


def test_thinning_keeps_short_lists_and_the_mean_of_long_ones() -> None:
    assert downsample([], 4) == []
    assert downsample([1.0, 2.0], 4) == [1.0, 2.0]
    assert downsample([1.0, 3.0, 5.0, 7.0, 9.0], 3) == [2.0, 6.0, 9.0]


def test_this_process_has_memory_and_the_gpu_it_is_told_of() -> None:
    load = process_sampler(gpu=lambda: 77)()
    assert load.memory_bytes > 1_000_000
    assert load.gpu == 77.0
    assert process_sampler()().gpu is None
