"""What becomes of trials and groups: events in, actions out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from ronde.search.protocol import AbandonTrial, Outcome, PruneDecision, ReportedValue, StartTrial, TrialEnded
from ronde.search.results import TrialResult
from ronde.search.scheduler import (
    END_GRACE_S,
    LAST_RANKS_S,
    MAX_FIRST_FAILURES,
    MAX_STARTS,
    Action,
    SendToGroup,
    ShowMessage,
    StartGroup,
    TrialScheduler,
    decide_outcome,
)
from ronde.search.study import PlannedTrial


class Made:
    """A scheduler with a study that counts, and what it has recorded."""

    def __init__(self, *, groups: int = 1, ranks: int = 1, trials: int = 3, points: int = 99, **options: Any) -> None:
        self.results: list[TrialResult] = []
        self.num_asked = 0
        self.prune_from = math.inf
        self.scheduler = TrialScheduler(
            num_groups=groups,
            ranks_per_group=ranks,
            num_trials=trials,
            ask=lambda: self.ask(points),
            tell=self.results.append,
            should_prune=lambda number, values: values[max(values)] >= self.prune_from,
            make_start=lambda planned, attempt: StartTrial(planned.number, attempt, planned.params, 0, True),
            has_pruner=True,
            **{"num_ended": 0, "interrupted": (), "retries": 1, **options},
        )
        self.begun = self.scheduler.begin()

    def ask(self, points: int) -> PlannedTrial | None:
        self.num_asked += 1
        return PlannedTrial(100 + self.num_asked, {"x": self.num_asked}) if self.num_asked <= points else None

    def ready(self, group: int = 0, incarnation: int = 1, ranks: Sequence[int] = (0,)) -> list[Action]:
        return [each for rank in ranks for each in self.scheduler.handle_ready(group, incarnation, rank, 0.0)]

    def end(self, number: int, rank: int = 0, group: int = 0, incarnation: int = 1, at: float = 1.0, **how: Any) -> Any:
        ended = TrialEnded(number, how.pop("attempt", 1), **{"outcome": Outcome.COMPLETE, **how})
        return self.scheduler.handle_ended(group, incarnation, rank, ended, at)


def starts(actions: Sequence[Any]) -> list[tuple[int, int, int]]:
    """(group, trial, attempt) of the trials that are started."""
    return [
        (action.group, action.message.number, action.message.attempt)
        for action in actions
        if isinstance(action, SendToGroup) and isinstance(action.message, StartTrial)
    ]


def test_idle_groups_get_trials_until_there_are_as_many_as_were_asked_for() -> None:
    made = Made(groups=2)
    assert made.begun == [StartGroup(0, 1), StartGroup(1, 1)]
    assert starts(made.ready(0)) == [(0, 101, 1)]
    assert starts(made.ready(1)) == [(1, 102, 1)]
    assert starts(made.end(101, value=0.5)) == [(0, 103, 1)]
    assert starts(made.end(102, group=1)) == []
    assert made.scheduler.running(5.0)[0].seconds == 4.0
    made.end(103)
    assert made.scheduler.is_done
    assert [(result.number, result.value) for result in made.results] == [(101, 0.5), (102, 0.0), (103, 0.0)]


def test_no_more_groups_are_started_than_there_are_trials() -> None:
    assert Made(groups=4, trials=3, num_ended=1).begun == [StartGroup(0, 1), StartGroup(1, 1)]


def test_a_space_without_more_points_ends_the_search() -> None:
    made = Made(points=1)
    made.ready()
    made.end(101)
    assert made.scheduler.is_done
    assert made.scheduler.is_exhausted


def test_trials_of_a_former_driver_are_run_first() -> None:
    made = Made(interrupted=[PlannedTrial(7, {"x": 0})], num_ended=1)
    assert starts(made.ready()) == [(0, 7, 1)]
    assert starts(made.end(7)) == [(0, 101, 1)]
    made.end(101)
    assert made.scheduler.is_done  # 1 before, 7 again, and one new


def test_a_lost_trial_goes_to_the_next_free_group_until_its_attempts_are_used_up() -> None:
    made = Made(groups=2)
    made.ready(0)
    made.ready(1)
    lost = made.scheduler.handle_lost(0, 1, "killed by SIGKILL", 1.0)
    assert lost == [ShowMessage("trial 101 is run again (attempt 2): killed by SIGKILL"), StartGroup(0, 2)]
    assert starts(made.end(102, group=1)) == [(1, 101, 2)]
    assert made.scheduler.handle_lost(1, 1, "killed again", 2.0)[-1] == StartGroup(1, 2)
    assert [(result.number, result.outcome, result.reason, result.attempts) for result in made.results[1:]] == [
        (101, Outcome.FAILED, "killed again (attempt 2 of 2)", 2)
    ]
    # What the former workers still say counts for nothing.
    assert made.ready(0, incarnation=1) == made.end(101, group=1, attempt=2) == []


def test_a_decision_is_made_once_and_goes_to_all_ranks() -> None:
    made = Made(ranks=2)
    made.ready(ranks=(0,))
    assert starts(made.ready(ranks=(1,))) == [(0, 101, 1)]
    made.prune_from = 5.0
    for step, value, prune in ((0, 1.0, False), (1, 5.0, True), (2, 1.0, True)):
        report = ReportedValue(101, 1, step, value)
        assert made.scheduler.handle_report(0, 1, report) == [SendToGroup(0, PruneDecision(101, 1, step, prune))]
    made.end(101, rank=1, outcome=Outcome.PRUNED)
    made.end(101, rank=0, outcome=Outcome.PRUNED)
    (result,) = made.results
    assert (result.outcome, result.value, result.reported) == (Outcome.PRUNED, 1.0, {0: 1.0, 1: 5.0, 2: 1.0})


def test_ranks_that_do_not_end_a_failed_trial_are_killed() -> None:
    made = Made(ranks=2)
    made.ready(ranks=(0, 1))
    (abandon,) = made.end(101, rank=1, outcome=Outcome.FAILED, reason="ValueError: no")
    assert abandon == SendToGroup(0, AbandonTrial(101, 1, "rank 1 has ended the trial (ValueError: no)"))
    assert made.scheduler.next_deadline_s() == 1.0 + END_GRACE_S
    assert made.scheduler.handle_time(END_GRACE_S) == []
    assert made.scheduler.handle_time(1.0 + END_GRACE_S) == [StartGroup(0, 2)]
    assert made.results[0].reason == f"rank 0 did not end the trial within {END_GRACE_S:g} s of rank 1"


def test_rank_0_may_go_on_when_others_have_returned_and_they_get_time_when_it_has() -> None:
    made = Made(ranks=2)
    made.ready(ranks=(0, 1))
    assert made.end(101, rank=1) == []
    assert made.scheduler.next_deadline_s() == math.inf
    made.end(101, rank=0, value=3.0)
    assert made.results[0].value == 3.0
    made.end(102, rank=0)
    assert made.scheduler.next_deadline_s() == 1.0 + LAST_RANKS_S


def test_a_trial_that_takes_too_long_has_failed() -> None:
    made = Made(trial_s=10.0)
    made.ready()
    assert made.scheduler.handle_time(10.0) == [StartGroup(0, 2)]
    assert made.results[0].reason == "it took longer than 10 s (trial_s)"


def test_a_group_that_never_starts_is_given_up_and_so_is_the_search_without_groups() -> None:
    made = Made()
    for incarnation in range(1, MAX_STARTS):
        actions = made.scheduler.handle_lost(0, incarnation, "no such host", 0.0)
        assert actions[-1] == StartGroup(0, incarnation + 1)
    made.scheduler.handle_lost(0, MAX_STARTS, "no such host", 0.0)
    assert made.scheduler.is_done
    assert made.scheduler.failure == "no group of workers can be started; the last: no such host"


def test_workers_are_replaced_after_their_trials_and_not_when_no_trial_is_left() -> None:
    made = Made(trials=3, trials_per_worker=2)
    made.ready()
    made.end(101)
    assert made.end(102) == [StartGroup(0, 2)]
    assert starts(made.ready(incarnation=2)) == [(0, 103, 1)]
    assert made.end(103, incarnation=2) == []
    made = Made(trials=2, trials_per_worker=2)
    made.ready()
    made.end(101)
    assert made.end(102) == [] and made.scheduler.is_done and not made.scheduler.failure


def test_a_setup_that_fails_ends_the_search_unless_it_has_worked_in_another_worker() -> None:
    made = Made()
    made.scheduler.handle_worker_failed("no images")
    assert made.scheduler.failure == "the workers cannot begin: no images"
    made = Made(groups=2)
    made.ready(group=0)
    assert made.scheduler.handle_worker_failed("no images") == [ShowMessage("a worker cannot begin: no images")]
    assert made.scheduler.handle_lost(1, 1, "its workers have exited", 0.0)[-1] == StartGroup(1, 2)
    assert not made.scheduler.failure


@pytest.mark.parametrize("has_success", [False, True])
def test_an_objective_that_always_fails_ends_the_search(has_success: bool) -> None:
    made = Made(trials=40, has_success=has_success)
    made.ready()
    for number in range(101, 101 + MAX_FIRST_FAILURES):
        made.end(number, outcome=Outcome.FAILED, reason="NameError: x")
    assert made.scheduler.is_done is not has_success
    assert len(made.results) == MAX_FIRST_FAILURES


COMPLETE, PRUNED = TrialEnded(0, 1, Outcome.COMPLETE, 4.0), TrialEnded(0, 1, Outcome.PRUNED)
ERROR = TrialEnded(0, 1, Outcome.FAILED, reason="ValueError")
CONSEQUENCE = TrialEnded(0, 1, Outcome.FAILED, reason="RoundEnded", is_consequence=True)


@pytest.mark.parametrize(
    ("ended", "outcome"),
    [
        ({0: COMPLETE}, (Outcome.COMPLETE, 4.0, "")),
        ({1: PRUNED, 0: PRUNED}, (Outcome.PRUNED, None, "")),
        ({0: ERROR}, (Outcome.FAILED, None, "ValueError")),
        ({0: CONSEQUENCE, 1: ERROR}, (Outcome.FAILED, None, "rank 1: ValueError")),
        ({0: PRUNED, 1: CONSEQUENCE}, (Outcome.PRUNED, None, "")),
        ({0: PRUNED, 1: ERROR}, (Outcome.FAILED, None, "rank 1: ValueError")),
        ({0: COMPLETE, 1: CONSEQUENCE}, (Outcome.FAILED, None, "rank 1: RoundEnded")),
    ],
)
def test_the_outcome_of_a_trial_follows_from_those_of_its_ranks(ended: Any, outcome: Any) -> None:
    assert decide_outcome(ended) == outcome
