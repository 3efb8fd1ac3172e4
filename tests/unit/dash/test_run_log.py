"""The log of a run: how a rank's time is divided, what is written, and what is read after a run was killed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ronde.dash.run_log import (
    LoggedValues,
    RankTimeBreakdown,
    ResourceSample,
    RunFinished,
    RunLog,
    StepTimer,
    encode_record,
    parse_log,
    process_sampler,
    read_log,
)


class Clock:
    """Time is a number that the test moves; `blocked` is what ronde's operations add up to."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.blocked = (0.0, 0.0)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timer(clock: Clock) -> StepTimer:
    busy = ResourceSample(cpu=90.0, host_cpu=50.0, memory_bytes=1000)
    return StepTimer(3, clock=clock, sample_resources=lambda: busy, read_blocked=lambda: clock.blocked)


def run_step(timer: StepTimer, clock: Clock, seconds: float, wait_s: float = 0.0, move_s: float = 0.0) -> None:
    with timer.step():
        clock.now_s += seconds
        clock.blocked = (clock.blocked[0] + wait_s, clock.blocked[1] + move_s)


@pytest.mark.parametrize(
    ("wait_s", "move_s", "expected"),
    [(0.75, 0.25, (3.0, 0.75, 0.25)), (2.0, 6.0, (0.0, 1.0, 3.0)), (0.0, 0.0, (4.0, 0.0, 0.0))],
    ids=["blocked for a part", "several threads were blocked for longer than the step", "never blocked"],
)
def test_blocked_time_is_taken_off_the_steps(
    timer: StepTimer, clock: Clock, wait_s: float, move_s: float, expected: tuple[float, float, float]
) -> None:
    run_step(timer, clock, 4.0, wait_s=wait_s, move_s=move_s)
    breakdown = timer.take_breakdown(run_started_s=100.0)
    assert (breakdown.rank, breakdown.num_steps, breakdown.step_s, breakdown.mean_step_s) == (3, 1, (4.0,), 4.0)
    assert (breakdown.compute_s, breakdown.wait_s, breakdown.move_s) == expected


def test_time_between_steps_counts_up_to_the_last_one(timer: StepTimer, clock: Clock) -> None:
    run_step(timer, clock, 1.0)
    clock.now_s += 0.25
    run_step(timer, clock, 1.0)
    assert timer.take_breakdown(100.0).between_s == 0.25
    clock.now_s += 60.0  # validation
    clock.blocked = (50.0, 50.0)
    run_step(timer, clock, 1.0, wait_s=0.25)
    breakdown = timer.take_breakdown(100.0)
    assert (breakdown.between_s, breakdown.total_s) == (0.0, 1.0)
    assert (breakdown.compute_s, breakdown.wait_s, breakdown.move_s) == (0.75, 0.25, 0.0)


def test_resources_are_sampled_once_a_second_at_most(timer: StepTimer, clock: Clock) -> None:
    for _ in range(8):
        run_step(timer, clock, 0.25)
    assert [sample.at_s for sample in timer.take_breakdown(run_started_s=100.0).loads] == [0.25, 1.25]


def test_a_step_that_fails_is_not_counted(timer: StepTimer) -> None:
    with pytest.raises(ZeroDivisionError), timer.step():
        raise ZeroDivisionError
    breakdown = timer.take_breakdown(100.0)
    assert (breakdown.num_steps, breakdown.mean_step_s) == (0, 0.0)


def test_many_steps_are_logged_as_means_of_neighbours(timer: StepTimer, clock: Clock) -> None:
    for index in range(65):
        run_step(timer, clock, 1.0 if index % 2 else 4.0)
    breakdown = timer.take_breakdown(100.0)
    assert breakdown.step_s == (3.0, 2.0) * 10 + (3.0, 2.5)
    assert (breakdown.num_steps, breakdown.longest_s) == (65, 4.0)


def test_a_sample_of_this_process_has_its_memory_and_the_gpu_that_it_is_told_of() -> None:
    sample = process_sampler(gpu=lambda: 77)()
    assert sample.memory_bytes > 1_000_000
    assert sample.gpu == 77.0
    assert process_sampler()().gpu is None


def test_a_loop_of_one_process_needs_no_job(tmp_path: Path, clock: Clock) -> None:
    with RunLog(tmp_path / "deep/log.jsonl", facts={"model": "MLP", "layers": 3}, clock=clock) as log:
        for step in (1, 2):
            with log.step():
                clock.now_s += 0.5
            log.add(step, {"train/loss": 1.0 / step, "nothing": math.inf})
        breakdowns = log.gather(2)
    log.close()  # a second time does nothing
    run = read_log(log.path)
    assert (breakdowns[0].num_steps, breakdowns[0].wait_s) == (2, 0.0)
    assert (run.series("train/loss"), run.series("nothing")) == ([(1, 1.0), (2, 0.5)], [(1, None), (2, None)])
    assert run.breakdowns(0) == [(2, breakdowns[0])]
    assert (run.facts["model"], run.facts["layers"], run.facts["ranks"]) == ("MLP", "3", "1")
    assert (run.elapsed_s, run.ended, run.num_resumes) == (1.0, True, 0)
    assert log.path.read_bytes().count(b"ended") == 1


def test_rank_0_writes_what_every_rank_did(tmp_path: Path, clock: Clock) -> None:
    def exchange(value: object) -> list[object]:
        return (
            [RankTimeBreakdown(rank=0), RankTimeBreakdown(rank=1, num_steps=7)]
            if isinstance(value, RankTimeBreakdown)
            else [value, value]
        )

    with RunLog(tmp_path / "log.jsonl", allgather=exchange, clock=clock) as log:
        log.gather(7)
    run = read_log(log.path)
    assert run.ranks() == [0, 1]
    assert run.breakdowns(1)[0][1].num_steps == 7


def test_the_log_of_a_run_that_failed_has_no_end(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunLog(tmp_path / "log.jsonl") as log:
        raise ZeroDivisionError
    assert not read_log(log.path).ended


def test_a_run_that_goes_on_forgets_what_came_after_its_checkpoint(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "log.jsonl"
    before = RunLog(path, clock=clock)
    for step in range(1, 6):
        clock.now_s += 1.0
        before.add(step, {"train/loss": float(step)})
    before.gather(5)
    before.close()
    whole = path.read_bytes().removesuffix(encode_record(RunFinished(at_s=5.0)))
    path.write_bytes(whole + b'{"type":"values","st')  # killed in the middle of a line

    clock.now_s += 3600.0
    with RunLog(path, step=3, clock=clock) as log:
        clock.now_s += 1.0
        log.add(4, {"train/loss": 40.0})
    run = read_log(path)
    assert run.series("train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [record.at_s for record in run.values] == [1.0, 2.0, 3.0, 4.0]  # the hour in between is not training
    assert run.samples == []
    assert (run.num_resumes, run.num_unreadable_lines) == (1, 1)


def test_a_fresh_run_replaces_an_older_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with RunLog(path) as log:
        log.add(1, {"train/loss": 1.0})
    RunLog(path).close()
    assert read_log(path).values == []


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\nworld\n")
    with pytest.raises(ValueError, match="is not a run log: none of its 2 lines"):
        read_log(path)


def test_of_two_values_for_a_step_the_later_counts_and_broken_lines_are_counted() -> None:
    points = [(1, 0.5), (2, 0.4), (2, 0.3)]
    records = [encode_record(LoggedValues(step=step, at_s=0.0, values={"loss": loss})) for step, loss in points]
    run = parse_log([*records, b'{"type":"values"}', b"{"])
    assert run.series("loss") == [(1, 0.5), (2, 0.3)]
    assert (len(run.values), run.num_unreadable_lines) == (3, 2)


def test_staleness_is_that_of_the_pushes_since_the_last_call(clock: Clock) -> None:
    pushes = [(4, 8, 3)]
    idle = ResourceSample(cpu=0.0, host_cpu=0.0, memory_bytes=0)
    timer = StepTimer(
        0,
        clock=clock,
        sample_resources=lambda: idle,
        read_blocked=lambda: (0.0, 0.0),
        read_pushes=lambda: pushes[-1],
    )
    pushes.append((8, 28, 9))
    run_step(timer, clock, 1.0)
    breakdown = timer.take_breakdown(100.0)
    assert (breakdown.num_pushes, breakdown.staleness, breakdown.max_staleness) == (4, 5.0, 9)
    run_step(timer, clock, 1.0)
    assert timer.take_breakdown(100.0).num_pushes == 0
