"""plan_round() as a function: what holds for whatever is known about the workers."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.coordinator.round_planning import (
    JOIN_SETTLE_S,
    QUIET_S,
    ElasticLimits,
    PlanAction,
    PlanReason,
    RoundHistory,
    RoundPlan,
    WorkerStage,
    WorkerView,
    next_change_s,
    plan_round,
)

SUSPEND_S = 30.0
TIMEOUT_S = 60.0
TIMES_S = st.sampled_from([0.0, JOIN_SETTLE_S, QUIET_S - 0.5, QUIET_S, 29.0, SUSPEND_S, 31.0])


@dataclasses.dataclass(frozen=True)
class Case:
    workers: tuple[WorkerView, ...]
    limits: ElasticLimits
    history: RoundHistory
    num_starting: int
    waited_s: float

    def plan(self) -> RoundPlan:
        return plan_round(
            self.workers, self.limits, self.history, num_starting=self.num_starting, waited_s=self.waited_s
        )

    def later(self, seconds: float) -> Case:
        is_over = sum(each.stage is WorkerStage.MEMBER for each in self.workers) < self.history.num_members
        workers = tuple(
            dataclasses.replace(
                each,
                away_s=each.away_s + seconds if is_over and each.stage is not WorkerStage.READY else 0.0,
                silent_s=each.silent_s + seconds,
                ready_s=each.ready_s + seconds if each.stage is WorkerStage.READY else 0.0,
            )
            for each in self.workers
        )
        return dataclasses.replace(self, workers=workers, waited_s=self.waited_s + seconds)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Workers of the round before, some of which are gone, and newcomers."""
    num_members = draw(st.integers(0, 5))
    workers = []
    for rank, number in enumerate(draw(st.permutations(range(num_members)))):
        stage = draw(st.sampled_from([None, *WorkerStage]))
        if stage is not None:
            silent_s, ready_s, is_awaited = draw(TIMES_S), draw(TIMES_S), draw(st.booleans())
            is_member = stage is WorkerStage.MEMBER
            ready_s = ready_s if stage is WorkerStage.READY else 0.0
            workers.append(WorkerView(number, stage, rank, silent_s, is_awaited and is_member, ready_s))
    for number in range(num_members, num_members + draw(st.integers(0, 4))):
        workers.append(WorkerView(number, WorkerStage.READY, None, draw(TIMES_S), False, draw(TIMES_S)))
    if sum(each.stage is WorkerStage.MEMBER for each in workers) < num_members:
        away_s = draw(st.sampled_from([0.0, 29.0, SUSPEND_S, 59.0, TIMEOUT_S]))
        workers = [
            dataclasses.replace(each, away_s=away_s, is_missed=each.rank is not None and draw(st.booleans()))
            if each.stage is not WorkerStage.READY
            else each
            for each in workers
        ]
    start = draw(st.integers(1, 5))
    limits = ElasticLimits(
        start_ranks=start,
        min_ranks=draw(st.integers(1, start)),
        max_ranks=draw(st.one_of(st.none(), st.integers(max(start, num_members), 8))),
        reset_limit=draw(st.one_of(st.none(), st.integers(0, 2))),
        timeout_s=TIMEOUT_S,
        suspend_s=SUSPEND_S,
    )
    history = RoundHistory(
        is_first=num_members == 0,
        num_members=num_members,
        has_loss=num_members > 0 and draw(st.booleans()),
        num_resets=draw(st.integers(0, 3)),
        is_finished=num_members > 0 and draw(st.sampled_from([False, False, True])),
        has_lost_newcomer=num_members > 0 and draw(st.booleans()),
    )
    waited_s = draw(st.sampled_from([0.0, 59.0, 60.0]))
    return Case(tuple(draw(st.permutations(workers))), limits, history, draw(st.integers(0, 2)), waited_s)


@given(cases())
def test_a_round_starts_with_survivors_in_their_order_then_newcomers_within_the_limits(case: Case) -> None:
    plan = case.plan()
    if plan.action is not PlanAction.START:
        assert plan.members == ()
        return
    by_number = {worker.number: worker for worker in case.workers}
    chosen = [by_number[number] for number in plan.members]
    ranks = [worker.rank for worker in chosen if worker.rank is not None]
    assert ranks == sorted(ranks) and [worker.rank for worker in chosen[: len(ranks)]] == ranks
    newcomers = [worker.number for worker in chosen[len(ranks) :]]
    assert newcomers == sorted(newcomers)
    assert all(worker.stage is WorkerStage.READY and worker.silent_s < QUIET_S for worker in chosen)
    assert len(set(plan.members)) == len(plan.members)
    least = case.limits.start_ranks if case.history.is_first else case.limits.min_ranks
    assert least <= len(chosen) <= (case.limits.max_ranks or math.inf)
    remaining = {w.number for w in case.workers if w.rank is not None} - set(plan.members) - set(plan.left_behind)
    assert not remaining, "a survivor that lives was not taken along"
    assert not (newcomers and ranks and case.history.has_lost_newcomer) or len(ranks) < least
    num_resets = case.history.num_resets + case.history.has_loss
    assert case.limits.reset_limit is None or num_resets <= case.limits.reset_limit
    assert not case.history.is_finished


@given(cases())
def test_only_workers_that_are_silent_or_away_while_somebody_waits_are_left_behind(case: Case) -> None:
    plan = case.plan()
    by_number = {worker.number: worker for worker in case.workers}
    members = [worker for worker in case.workers if worker.stage is WorkerStage.MEMBER]
    is_whole = len(members) == case.history.num_members and not case.history.is_finished
    assert set(plan.absent) <= set(plan.left_behind)
    for number in plan.absent:
        worker = by_number[number]
        assert worker.stage is not WorkerStage.READY and not is_whole and not case.history.is_finished
        assert worker.away_s >= (SUSPEND_S if worker.is_missed else TIMEOUT_S)
        assert any(each.stage is WorkerStage.READY for each in case.workers), "nobody waits for it"
    for number in set(plan.left_behind) - set(plan.absent):
        worker = by_number[number]
        assert worker.silent_s >= SUSPEND_S
        is_awaited = any(each.is_awaited and each.silent_s >= SUSPEND_S for each in members)
        assert is_awaited or worker.stage is not WorkerStage.MEMBER or not is_whole
    assert not set(plan.left_behind) & {*plan.members, *plan.workers}


def test_members_that_are_silent_are_left_behind_together_with_the_one_that_is_waited_for() -> None:
    """Without that one the round is over, and nobody would wait for the others any less."""
    silent = WorkerView(0, WorkerStage.MEMBER, 0, silent_s=SUSPEND_S)
    awaited = WorkerView(1, WorkerStage.MEMBER, 1, silent_s=SUSPEND_S, is_awaited=True)
    heard = WorkerView(2, WorkerStage.MEMBER, 2)
    limits = ElasticLimits(start_ranks=3, suspend_s=SUSPEND_S)
    history = RoundHistory(is_first=False, num_members=3)
    assert plan_round([silent, awaited, heard], limits, history).left_behind == (0, 1)
    assert (
        plan_round([silent, dataclasses.replace(awaited, is_awaited=False), heard], limits, history).left_behind == ()
    )


@given(cases())
def test_a_whole_round_changes_only_for_newcomers_that_have_room(case: Case) -> None:
    plan = case.plan()
    members = [worker for worker in case.workers if worker.stage is WorkerStage.MEMBER]
    if plan.action is PlanAction.CHANGE:
        assert len(members) == case.history.num_members > 0
        assert 0 < len(plan.workers) <= (case.limits.max_ranks or math.inf) - len(members)
    if plan.action is PlanAction.CONTINUE and plan.reason is not PlanReason.FINISHED:
        assert len(members) == case.history.num_members > 0, "a round that has lost a member does not go on"


@given(cases())
def test_who_waits_knows_for_whom_and_not_for_ever(case: Case) -> None:
    plan = case.plan()
    assert plan.describe()
    if plan.action is PlanAction.WAIT:
        assert plan.workers or plan.num_ready < plan.num_needed
    if plan.action is PlanAction.FAIL and plan.reason is PlanReason.TOO_FEW:
        assert case.waited_s >= case.limits.timeout_s and plan.num_ready < plan.num_needed
    for number in plan.workers if plan.reason is PlanReason.SURVIVORS else ():
        [worker] = (each for each in case.workers if each.number == number)
        assert worker.silent_s < SUSPEND_S
        somebody_waits = any(each.stage is WorkerStage.READY and each.silent_s < QUIET_S for each in case.workers)
        assert worker.away_s < TIMEOUT_S or not somebody_waits


@given(cases(), st.randoms())
def test_the_order_in_which_workers_are_known_does_not_matter(case: Case, random: Random) -> None:
    shuffled = list(case.workers)
    random.shuffle(shuffled)
    assert dataclasses.replace(case, workers=tuple(shuffled)).plan() == case.plan()


@given(cases(), st.floats(0, 0.999))
def test_nothing_changes_by_itself_before_the_time_that_is_told(case: Case, part: float) -> None:
    change_s = next_change_s(case.workers, case.limits, waited_s=case.waited_s)
    assert case.later(min(change_s, 1e6) * part).plan() == case.plan()


@pytest.mark.parametrize(
    ("given_limits", "problem"),
    [
        ({"start_ranks": 2, "min_ranks": 3}, "min_np must be from 1 to np, which is 2; got 3"),
        ({"start_ranks": 2, "min_ranks": 0}, "min_np must be from 1 to np"),
        ({"start_ranks": 2, "max_ranks": 1}, "max_np must be at least np, which is 2; got 1"),
        ({"start_ranks": 2, "reset_limit": -1}, "reset_limit must be 0 or more, got -1"),
    ],
)
def test_limits_that_cannot_be_are_refused(given_limits: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ElasticLimits(**given_limits)
