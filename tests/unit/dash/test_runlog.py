"""The log of a run: what is written, and what is read after a run was killed and went on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ronde.dash.run_log import (
    LoggedValues,
    RankTimeBreakdown,
    RankTimesLogged,
    RunFinished,
    RunLog,
    RunStarted,
    decode_record,
    encode_record,
    parse_log,
    read_log,
)


class Clock:
    """Time is a number that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def values(step: int, loss: float | None, at_s: float = 0.0) -> LoggedValues:
    return LoggedValues(step=step, at_s=at_s, values={"train/loss": loss})


@pytest.mark.parametrize(
    "record",
    [
        RunStarted(step=3, at_s=1.5, facts={"model": "MLP"}, hosts=("a", "b")),
        values(2, 0.5),
        RankTimesLogged(step=4, at_s=2.0, ranks=(RankTimeBreakdown(rank=0, num_steps=1, step_s=(0.25,)),)),
        RunFinished(at_s=9.0),
    ],
)
def test_a_record_survives_the_file(record: RunStarted | LoggedValues | RankTimesLogged | RunFinished) -> None:
    assert encode_record(record).count(b"\n") == 1
    assert decode_record(encode_record(record)) == record


def test_a_loop_of_one_process_needs_no_job(tmp_path: Path, clock: Clock) -> None:
    with RunLog(tmp_path / "deep/log.jsonl", facts={"model": "MLP", "layers": 3}, clock=clock) as log:
        for step in (1, 2):
            with log.step():
                clock.now_s += 0.5
            log.add(step, {"train/loss": 1.0 / step})
        shares = log.gather(2)
    run = read_log(log.path)
    assert shares[0].num_steps == 2
    assert run.series("train/loss") == [(1, 1.0), (2, 0.5)]
    assert run.breakdowns(0) == [(2, shares[0])]
    assert (run.facts["model"], run.facts["layers"], run.facts["ranks"]) == ("MLP", "3", "1")
    assert (run.elapsed_s, run.ended, run.num_resumes) == (1.0, True, 0)


def test_every_rank_is_written_down(tmp_path: Path, clock: Clock) -> None:
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


def test_a_number_that_is_none_is_a_gap(tmp_path: Path) -> None:
    with RunLog(tmp_path / "log.jsonl") as log:
        log.add(1, {"train/loss": math.nan})
        log.add(2, {"train/loss": math.inf})
    assert read_log(log.path).series("train/loss") == [(1, None), (2, None)]


def test_a_run_that_failed_does_not_say_that_it_ended(tmp_path: Path) -> None:
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


def test_a_second_close_does_nothing(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log.close()
    log.close()
    assert log.path.read_bytes().count(b"ended") == 1


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\nworld\n")
    with pytest.raises(ValueError, match="is not a run log: none of its 2 lines"):
        read_log(path)


def test_what_is_told_twice_of_a_step_counts_as_told_last() -> None:
    run = parse_log([encode_record(values(1, 0.5)), encode_record(values(2, 0.4)), encode_record(values(2, 0.3))])
    assert run.series("train/loss") == [(1, 0.5), (2, 0.3)]


def test_lines_that_are_not_records_are_counted() -> None:
    run = parse_log([encode_record(values(1, 0.5)), b'{"type":"values"}', b"{"])
    assert (len(run.values), run.num_unreadable_lines) == (1, 2)
