"""The rounds of an elastic job: every row of the protocol, in memory, at times that the test sets."""

from __future__ import annotations

import itertools

import pytest

from ronde.coordinator.coordinator import (
    CoordinatorCore,
    MessageReceived,
    ProcessExited,
    RankConnected,
    RankDisconnected,
)
from ronde.coordinator.negotiation import Send
from ronde.coordinator.round_planning import JOIN_SETTLE_S, PlanAction, PlanReason
from ronde.coordinator.rounds import MembershipEnd
from ronde.net.handshake import ConnectionRequest
from ronde.net.messages import (
    LIVENESS,
    VERSION,
    AdmissionStatus,
    CoordinatorMessage,
    EndRound,
    FinishConfirmed,
    JoinRefused,
    JoinRound,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    RefusalKind,
    RoundChangeWanted,
    RoundStarted,
    RunOperations,
    StackReply,
    StackRequest,
    TrainingFinished,
    WaitingTooLong,
)
from ronde.observe.stacks import RankStack
from ronde.settings import Settings
from ronde.types import Member
from tests.unit.coordinator.elastic_script import PORT, ElasticScript, S
from tests.unit.coordinator.requests import announce

LONG_S = 600.0


def change_round(script: ElasticScript, *numbers: int) -> None:
    """Members leave for the next round, and come back."""
    script.leave(*numbers)
    script.enter(*numbers)


# --- losses ----------------------------------------------------------------------------------------------------------


def test_when_a_rank_is_lost_the_others_go_on_in_a_round_of_their_own_in_their_order() -> None:
    script = ElasticScript(4)
    first = script.start(0, 1, 2, 3)
    script.die(1)
    script.advance(0.3)
    assert [script.take(number, RankLost) for number in (0, 2, 3)] == [RankLost(1, "killed by SIGKILL")] * 3
    assert script.membership.plan.reason is PlanReason.SURVIVORS
    script.leave(3, 0)
    script.enter(3, 0)
    assert not script.has(0, RoundStarted), "a survivor that is still in the round was not waited for"
    change_round(script, 2)
    second = script.take_start(0, 2, 3)
    assert second.round != first.round
    assert (script.membership.num_rounds, script.membership.num_resets) == (2, 1)
    assert script.membership.plan.action is PlanAction.CONTINUE


def test_when_rank_0_and_another_are_lost_the_others_have_the_low_ranks() -> None:
    script = ElasticScript(4)
    script.start(0, 1, 2, 3)
    script.die(0, 2)
    script.advance(0.3)
    change_round(script, 3, 1)
    script.take_start(1, 3)
    assert script.membership.num_resets == 1, "two that are lost together cost one round"


@pytest.mark.parametrize("comes_back", [False, True], ids=["before it is back", "when it is back"])
def test_a_survivor_that_dies_between_two_rounds_is_not_waited_for(comes_back: bool) -> None:
    script = ElasticScript(3)
    script.start(0, 1, 2)
    script.leave(0, 1, 2)
    script.enter(0, 1)
    if comes_back:
        script.connect(2)
        script.die(2)
    else:
        script.alive.discard(2)
        script.core.handle(ProcessExited(2, "killed by SIGKILL"), script.now_ns)
    script.advance(0.3)
    script.take_start(0, 1)
    assert script.membership.num_resets == 1


def test_a_survivor_that_dies_after_it_has_joined_the_next_round_is_not_in_it() -> None:
    script = ElasticScript(3)
    script.start(0, 1, 2)
    script.leave(0, 1, 2)
    script.enter(2, 1)
    script.disconnect(2)
    script.enter(0)
    assert not script.has(0, RoundStarted), "the round began with a worker whose connection is closed"
    script.advance(0.3)
    script.take_start(0, 1)


def test_a_survivor_whose_process_is_seen_to_be_gone_is_not_waited_for() -> None:
    """As when no launcher reports its end."""
    script = ElasticScript(2)
    script.start(0, 1)
    script.leave(0, 1)
    script.alive.discard(1)
    script.process_states[1] = "gone"
    script.enter(0)
    script.advance(5)
    script.take_start(0)


def test_a_survivor_that_never_comes_back_is_left_behind() -> None:
    script = ElasticScript(2, suspend_s=10)
    script.start(0, 1)
    script.leave(0, 1)
    script.alive.discard(1)
    script.enter(0)
    script.advance(9)
    assert script.membership.plan.workers == (1,) and not script.has(0, RoundStarted)
    script.advance(2)
    script.take_start(0)
    assert (1,) in [told.plan.left_behind for told in script.told]


def test_a_handshake_that_breaks_is_no_loss() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    script.leave(0, 1)
    script.connect(1)
    script.disconnect(1)
    script.advance(1)
    script.enter(0, 1)
    script.take_start(0, 1)
    assert script.membership.num_resets == 0


def test_when_all_are_lost_workers_that_come_then_begin_again_and_that_is_a_reset() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    script.die(0, 1)
    script.advance(1)
    assert script.membership.plan.reason is PlanReason.STATE_LOST
    script.enter(2, ready=False)
    script.take_start(2)
    assert script.membership.num_resets == 1
    candidate = script.ask(3)
    assert candidate.status is AdmissionStatus.CANDIDATE and 0 < candidate.rank < candidate.size


def test_workers_that_would_have_joined_those_that_are_all_lost_are_replaced() -> None:
    """They have loaded no checkpoint: they would have got their state from the others."""
    script = ElasticScript(2)
    script.start(0, 1)
    assert script.ask(3).status is AdmissionStatus.CANDIDATE
    script.enter(2)  # it waits for the end of a step
    script.die(0, 1)
    script.advance(1)
    assert script.take(2, JoinRefused).kind is RefusalKind.STATE_LOST
    admission = script.ask(3, ready=True)
    assert (admission.status, admission.refusal_kind) == (AdmissionStatus.REFUSED, RefusalKind.STATE_LOST)
    script.enter(4, ready=False)
    script.take_start(4)


def test_all_that_are_told_to_end_at_once_take_the_state_with_them() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    script.leave(0, 1, reason=LeaveReason.PREEMPTED)
    admission = script.ask(2, ready=True)
    assert admission.refusal_kind is RefusalKind.STATE_LOST
    script.enter(3, ready=False)
    script.take_start(3)


# --- who is lost never comes back ------------------------------------------------------------------------------------


def test_a_worker_behind_a_cut_that_heals_is_refused_and_its_messages_do_nothing() -> None:
    script = ElasticScript(3)
    first = script.start(0, 1, 2)
    former = script.connections[1]
    script.disconnect(1, LeaveReason.UNREACHABLE)
    script.advance()
    assert script.take(0, RankLost).rank == 1, "of a host that cannot be reached no better reason is waited for"
    assert script.membership.unreachable == (1,), "so that its launcher kills it"
    change_round(script, 0, 2)
    second = script.take_start(0, 2)
    for round in (first.round, second.round, 0):
        script.send(1, announce("w"), sender=former, round=round)
    script.send(0, announce("w"), round=second.round)
    script.advance()
    assert not script.has(0, RunOperations), "an operation of two ranks ran without the second one"
    script.send(1, LeaveRound(LeaveReason.REJOINING), sender=former, round=first.round)
    assert script.take(1, LeaveConfirmed), "it would wait in vain"
    admission = script.ask(1, ready=True)
    assert (admission.status, admission.refusal_kind) == (AdmissionStatus.REFUSED, RefusalKind.LEFT_BEHIND)
    assert "the others have gone on without it" in admission.reason
    script.send(1, JoinRound(VERSION, 0, Member(-1, "here", 1, "", worker="worker1")), sender=former)
    assert script.take(1, JoinRefused).kind is RefusalKind.LEFT_BEHIND
    script.advance(LONG_S)
    assert script.membership.members == (0, 2) and script.membership.plan.action is PlanAction.CONTINUE


def test_no_other_process_gets_the_number_of_a_worker() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    assert script.ask(1, ready=True, identity="other").status is AdmissionStatus.REFUSED
    script.leave(1)
    assert script.ask(1, ready=True, identity="other").status is AdmissionStatus.REFUSED
    script.enter(1)
    change_round(script, 0)
    script.take_start(0, 1)


def test_a_worker_that_comes_back_before_its_leave_has_arrived_retries() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    assert script.ask(1, ready=True).status is AdmissionStatus.RETRY
    script.leave(1)
    script.enter(1)
    change_round(script, 0)
    script.take_start(0, 1)


def test_the_end_of_a_former_connection_means_nothing_when_the_worker_has_left_and_come_back() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    former = script.connections[1]
    script.leave(0, 1)
    script.enter(1)
    script.core.handle(RankDisconnected(1, former, MembershipEnd(LeaveReason.PROCESS_GONE)), script.now_ns)
    script.advance(1)
    script.enter(0)
    script.take_start(0, 1)


def test_messages_of_the_round_before_do_nothing_in_the_next_one() -> None:
    script = ElasticScript(2)
    first = script.start(0, 1)
    former = script.connections[1]
    change_round(script, 0, 1)
    second = script.take_start(0, 1)
    script.send(1, announce("w"), round=first.round)
    script.send(1, announce("w"), sender=former, round=second.round)
    script.send(1, LeaveRound(LeaveReason.FINISHED), round=first.round)
    script.send(1, LeaveRound(LeaveReason.FAILED), sender=former)
    script.send(0, announce("w"), round=second.round)
    script.advance(5)
    assert not script.has(0, RunOperations) and not script.has(0, RankLost)
    assert not script.membership.is_finished
    script.send(1, RankHeartbeat(7), round=first.round)
    assert script.take(1, RankHeartbeatReply).sent_ns == 7


# --- newcomers -------------------------------------------------------------------------------------------------------


def test_a_newcomer_builds_its_model_first_and_is_in_the_next_round_when_it_is_ready() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    candidate = script.ask(2)
    assert (candidate.status, candidate.rank, candidate.size) == (AdmissionStatus.CANDIDATE, 2, 3)
    script.advance(LONG_S)
    assert not script.has(0, RoundChangeWanted), "the members were disturbed for a worker that is not ready"
    script.enter(2)
    wanted = [script.take(number, RoundChangeWanted) for number in (0, 1)]
    assert wanted[0] == wanted[1] == RoundChangeWanted("worker 2 will join after the step under way")
    script.advance(10)
    assert not script.has(0, RoundChangeWanted), "once is enough"
    change_round(script, 1, 0)
    script.take_start(0, 1, 2)
    assert script.membership.num_resets == 0
    assert script.membership.plan.action is PlanAction.CONTINUE


def test_members_of_the_next_round_hear_of_a_newcomer_that_was_too_late_for_it() -> None:
    script = ElasticScript(1)
    script.start(0)
    script.enter(1)
    script.take(0, RoundChangeWanted)
    script.leave(0)
    script.connect(2, ready=True)
    script.enter(0)
    script.take_start(0, 1)
    script.join(2)
    script.advance()
    assert [script.take(number, RoundChangeWanted).reason for number in (0, 1)] == [
        "worker 2 will join after the step under way"
    ] * 2


def test_a_newcomer_that_is_ready_comes_along_when_a_rank_is_lost() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    script.die(0)
    script.enter(2)
    script.advance(0.3)
    change_round(script, 1)
    script.take_start(1, 2)
    assert script.membership.num_resets == 1


def test_a_newcomer_that_dies_before_the_round_changes_is_not_in_it() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    script.enter(2)
    script.die(2)
    script.advance(0.3)
    change_round(script, 0, 1)
    script.take_start(0, 1)
    assert script.membership.num_resets == 0, "nobody was lost who was in a round"


def test_more_newcomers_than_max_ranks_wait_until_there_is_room() -> None:
    script = ElasticScript(2, max_ranks=3)
    script.start(0, 1)
    script.enter(4, 3)
    assert script.take(0, RoundChangeWanted).reason.startswith("worker 3 ")
    change_round(script, 0, 1)
    script.take_start(0, 1, 3)
    script.advance(LONG_S)
    assert script.membership.plan.action is PlanAction.CONTINUE, "worker 4 has no place"
    script.die(0)
    script.advance(0.3)
    change_round(script, 1, 3)
    script.take_start(1, 3, 4)


def test_a_change_waits_a_moment_for_workers_that_are_being_started() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    script.core.set_num_starting(1)
    script.enter(2)
    assert script.membership.plan.reason is PlanReason.SETTLING
    script.advance(JOIN_SETTLE_S / 2)
    script.core.set_num_starting(0)
    script.enter(3)
    assert script.take(0, RoundChangeWanted).reason == "worker 2, worker 3 will join after the step under way"


def test_a_change_does_not_wait_for_ever_for_workers_that_are_being_started() -> None:
    script = ElasticScript(1)
    script.start(0)
    script.core.set_num_starting(1)
    script.enter(1)
    script.advance(JOIN_SETTLE_S + 0.001)
    assert script.has(0, RoundChangeWanted)


def test_a_worker_that_was_in_init_when_the_first_round_began_without_it_becomes_a_candidate() -> None:
    script = ElasticScript(2, max_ranks=2)
    for number in (0, 1, 2, 3):
        script.connect(number)
    for number in (2, 1, 3):
        script.join(number)
    script.advance()
    script.take_start(1, 2)
    script.join(0)
    for number in (3, 0):
        assert script.take(number, JoinRefused).kind is RefusalKind.BEGUN
        assert script.ask(number).status is AdmissionStatus.CANDIDATE
    script.enter(0, 3)
    script.die(1)
    script.advance(0.3)
    change_round(script, 2)
    script.take_start(2, 0)


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_a_preempted_worker_is_gone_and_the_others_go_on_without_a_reset() -> None:
    script = ElasticScript(3)
    script.start(0, 1, 2)
    script.leave(0, reason=LeaveReason.PREEMPTED)
    script.alive.discard(0)
    script.core.handle(ProcessExited(0, "exited with code 0"), script.now_ns)
    change_round(script, 1, 2)
    script.take_start(1, 2)
    assert script.membership.num_resets == 0
    assert script.core.first_lost is None
    assert script.ask(0, ready=True).refusal_kind is RefusalKind.LEFT_BEHIND


def test_who_does_not_leave_with_the_others_learns_that_they_are_gone() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    script.leave(0)
    script.advance(2)
    assert script.take(1, RankLost) == RankLost(0, "it has left for the next round")


def test_a_rank_that_fails_is_lost() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    script.leave(1, reason=LeaveReason.FAILED, detail="ValueError: boom")
    assert script.take(0, RankLost) == RankLost(1, "ValueError: boom")
    assert script.core.first_lost == (1, MembershipEnd(LeaveReason.FAILED, "ValueError: boom"))
    change_round(script, 0)
    script.take_start(0)
    assert script.membership.num_resets == 1
    assert script.ask(1, ready=True).refusal_kind is RefusalKind.LEFT_BEHIND


def test_when_a_member_has_finished_the_job_nobody_has_anything_to_do_any_more() -> None:
    script = ElasticScript(3)
    script.start(0, 1, 2)
    script.enter(3)
    script.leave(0, reason=LeaveReason.FINISHED)
    assert script.membership.is_finished and script.membership.plan.reason is PlanReason.FINISHED
    assert script.take(3, JoinRefused) == JoinRefused("the job is finished", RefusalKind.FINISHED)
    script.die(1)
    script.advance(2)
    assert script.take(2, RankLost).rank == 1
    script.leave(2)
    for number in (2, 3, 4):
        admission = script.ask(number, ready=number != 4)
        assert (admission.status, admission.refusal_kind) == (AdmissionStatus.REFUSED, RefusalKind.FINISHED)
    assert script.membership.num_rounds == 1


def test_who_has_finished_training_is_told_apart_from_who_was_lost_in_the_last_barrier() -> None:
    script = ElasticScript(3)
    script.start(0, 1, 2)
    script.send(0, TrainingFinished())
    script.advance()
    assert script.take(0, FinishConfirmed), "the rank waits for it before its script goes on"
    told = script.membership
    assert told.finished == (0,) and not told.is_finished
    script.die(1)
    script.advance(1)
    script.leave(0, reason=LeaveReason.FINISHED)
    script.leave(2)
    assert script.ask(2, ready=True).refusal_kind is RefusalKind.FINISHED
    script.advance()
    assert script.membership.is_finished and script.membership.finished == (0, 2), "worker 2 has heard of it"


def test_a_worker_that_is_back_when_another_one_finishes_the_job_is_told_so() -> None:
    script = ElasticScript(3)
    script.start(0, 1, 2)
    script.die(2)
    script.advance(0.3)
    change_round(script, 1)
    script.leave(0, reason=LeaveReason.FINISHED)
    assert script.take(1, JoinRefused).kind is RefusalKind.FINISHED
    script.advance(10)
    assert not script.has(1, JoinRefused), "once is enough"


def test_a_finished_job_leaves_a_suspended_member_behind() -> None:
    script = ElasticScript(2, suspend_s=10)
    script.start(0, 1)
    script.alive.discard(1)
    script.leave(0, reason=LeaveReason.FINISHED)
    script.advance(12)
    assert (1,) in [told.plan.left_behind for told in script.told], "the launcher would wait for it for ever"


def test_all_that_shut_down_may_begin_anew_together() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    script.leave(0, reason=LeaveReason.SHUTDOWN)
    assert script.ask(0).status is AdmissionStatus.RETRY, "the other one has not left yet"
    script.leave(1, reason=LeaveReason.SHUTDOWN)
    script.enter(1, ready=False)
    assert not script.has(1, RoundStarted), "it did not wait for the other one"
    script.enter(0, ready=False)
    script.take_start(0, 1)


# --- workers that hang -----------------------------------------------------------------------------------------------


def time_out(script: ElasticScript, *numbers: int, missing: int) -> None:
    """These members leave the round because the missing one did not come to an operation, and come back."""
    rank = script.membership.members.index(missing)
    for number in numbers:
        script.send(number, LeaveRound(LeaveReason.REJOINING, "allreduce did not finish within 6 s", (rank, 99, -1)))
    script.enter(*numbers, progress=7)


def test_a_member_that_hangs_is_left_behind_when_others_have_waited_for_it_in_an_operation() -> None:
    script = ElasticScript(3, suspend_s=10, timeout_s=100)
    script.start(0, 1, 2)
    time_out(script, 0, 2, missing=1)
    script.advance(9)
    assert script.membership.plan.workers == (1,) and script.take(1, RankLost)
    script.advance(2)
    script.take_start(0, 2)
    assert [told.plan.absent for told in script.told if told.plan.absent] == [(1,)]
    assert "did not come back from a round that was over" in script.take(1, EndRound).reason
    admission = script.ask(1, ready=True)
    assert (admission.status, admission.refusal_kind) == (AdmissionStatus.REFUSED, RefusalKind.LEFT_BEHIND)


def test_members_that_were_waited_for_in_vain_and_come_back_are_in_the_next_round() -> None:
    """Each of them waited for the other one."""
    script = ElasticScript(2, suspend_s=10)
    for progress in range(3):
        if progress == 0:
            script.start(0, 1)
        script.send(0, LeaveRound(LeaveReason.REJOINING, "it waited for rank 1", (1,)))
        script.send(1, LeaveRound(LeaveReason.REJOINING, "it waited for rank 0", (0,)))
        script.enter(0, 1, progress=4)
        if progress < 2:
            script.take_start(0, 1)
    plan = script.membership.plan
    assert (plan.action, plan.reason) == (PlanAction.FAIL, PlanReason.SAME_ERROR), "that would never end"
    assert plan.detail.startswith("it waited for rank")


def test_a_member_that_is_busy_after_a_loss_is_waited_for_and_not_for_ever() -> None:
    script = ElasticScript(3, suspend_s=10, timeout_s=100)
    script.start(0, 1, 2)
    script.die(1)
    script.advance(0.3)
    change_round(script, 2)
    script.advance(95)
    assert (script.membership.plan.reason, script.membership.plan.workers) == (PlanReason.SURVIVORS, (0,))
    assert not script.has(2, JoinRefused)
    script.advance(6)
    script.take_start(2)
    assert (0,) in [told.plan.absent for told in script.told] and script.membership.num_resets == 1


def test_a_busy_member_that_nobody_waits_for_stays() -> None:
    script = ElasticScript(2, suspend_s=10, timeout_s=100)
    script.start(0, 1)
    script.die(1)
    script.advance(1000)
    change_round(script, 0)
    script.take_start(0)


def test_what_members_do_behind_training_may_take_long() -> None:
    script = ElasticScript(2, suspend_s=10, timeout_s=100)
    script.start(0, 1)
    script.leave(1, reason=LeaveReason.FINISHED)
    script.advance(1000)
    assert not any(told.plan.left_behind for told in script.told)


# --- suspended workers -----------------------------------------------------------------------------------------------


def suspend(script: ElasticScript, number: int, *, awaited_by: int | None = None) -> None:
    script.alive.discard(number)
    if awaited_by is not None:
        rank = script.membership.members.index(number)
        script.send(awaited_by, WaitingTooLong("allreduce", 0, 0, (rank,), "0.ordered 1"))


def test_a_stopped_member_that_others_wait_for_is_left_behind_after_suspend_s() -> None:
    script = ElasticScript(3, suspend_s=30)
    script.start(0, 1, 2)
    suspend(script, 1, awaited_by=0)
    script.advance(29)
    assert not script.has(0, RankLost)
    script.advance(2)
    assert script.take(0, RankLost) == RankLost(1, "it was silent for too long and was left behind")
    assert "left behind" in script.take(1, EndRound).reason, "it would go on when it wakes"
    assert [told.plan.left_behind for told in script.told if told.plan.left_behind] == [(1,)]
    change_round(script, 0, 2)
    script.take_start(0, 2)
    script.alive.add(1)
    script.advance(5)
    assert script.ask(1, ready=True).refusal_kind is RefusalKind.LEFT_BEHIND
    assert script.membership.members == (0, 2) and script.membership.num_resets == 1


@pytest.mark.parametrize("stall_s", [0.0, 5.0, 500.0])
def test_a_named_operation_that_waits_shows_that_a_silent_rank_is_awaited_whatever_stall_s_is(stall_s: float) -> None:
    script = ElasticScript(2, suspend_s=10, settings={"stall_s": stall_s})
    script.start(0, 1)
    script.send(0, announce("w"))
    suspend(script, 1)
    script.advance(12)
    assert script.take(0, RankLost).rank == 1


def test_a_member_that_is_stopped_for_a_short_time_goes_on() -> None:
    script = ElasticScript(2, suspend_s=30)
    script.start(0, 1)
    suspend(script, 1, awaited_by=0)
    script.advance(25)
    script.alive.add(1)
    script.advance(5)
    script.alive.discard(1)
    script.advance(25)
    assert not script.has(0, RankLost) and script.membership.plan.action is PlanAction.CONTINUE


def test_a_silent_member_that_nobody_waits_for_stays() -> None:
    script = ElasticScript(2, suspend_s=30)
    script.start(0, 1)
    suspend(script, 1)
    script.advance(LONG_S)
    assert not script.has(0, RankLost)


@pytest.mark.parametrize(("state", "is_lost"), [("running", False), ("stopped", True), ("sleeping", True), ("", True)])
def test_a_silent_process_that_is_seen_running_is_not_left_behind(state: str, is_lost: bool) -> None:
    script = ElasticScript(2, suspend_s=10)
    script.start(0, 1)
    script.process_states[1] = state
    suspend(script, 1, awaited_by=0)
    script.advance(30)
    assert script.has(0, RankLost) == is_lost


def test_the_time_in_which_the_coordinator_itself_was_stopped_does_not_count() -> None:
    script = ElasticScript(2, min_ranks=2, suspend_s=10, timeout_s=100)
    script.start(0, 1)
    suspend(script, 1, awaited_by=0)
    script.advance(2)
    script.now_ns += 3600 * S
    script.advance()
    assert not script.has(0, RankLost), "it could not have heard anybody"
    script.die(0)
    script.advance(0.3)
    script.now_ns += 3600 * S
    script.advance()
    assert script.membership.plan.action is PlanAction.WAIT
    script.advance(12)
    assert script.membership.plan.reason is PlanReason.STATE_LOST, "worker 1 was left behind"


def test_a_member_that_is_stopped_while_the_others_leave_is_left_behind() -> None:
    script = ElasticScript(3, suspend_s=10)
    script.start(0, 1, 2)
    script.die(1)
    suspend(script, 2)
    script.advance(0.3)
    change_round(script, 0)
    script.advance(11)
    script.take_start(0)
    assert script.membership.num_resets == 1


def test_a_survivor_that_is_stopped_after_it_has_joined_delays_the_round_and_is_left_behind() -> None:
    script = ElasticScript(3, suspend_s=10)
    script.start(0, 1, 2)
    script.leave(0, 1, 2)
    script.enter(0, 1)
    script.alive.discard(1)
    script.advance(5)
    script.enter(2)
    script.advance(2)
    assert not script.has(0, RoundStarted) and script.membership.plan.workers == (1,)
    script.advance(5)
    script.take_start(0, 2)


def test_a_newcomer_that_is_stopped_disturbs_nobody_and_is_left_behind() -> None:
    script = ElasticScript(2, max_ranks=2, suspend_s=10)
    script.start(0, 1)
    script.enter(2)
    script.alive.discard(2)
    script.die(1)
    script.advance(5)
    change_round(script, 0)
    script.take_start(0)
    assert not script.has(0, RoundChangeWanted)
    script.advance(10)
    assert (2,) in [told.plan.left_behind for told in script.told]
    assert script.membership.plan.action is PlanAction.CONTINUE
    assert script.ask(2, ready=True).refusal_kind is RefusalKind.LEFT_BEHIND


# --- refusals, limits and times --------------------------------------------------------------------------------------


def test_the_first_round_waits_for_start_ranks_whoever_dies_before() -> None:
    script = ElasticScript(3)
    script.enter(0, 1, ready=False)
    script.die(1)
    script.advance(30)
    assert script.membership.plan.describe() == "1 of the 3 ranks that are needed are ready"
    script.enter(3, 4, ready=False)
    script.take_start(0, 3, 4)
    assert script.membership.num_resets == 0


def test_workers_of_the_first_round_that_differ_are_all_refused() -> None:
    script = ElasticScript(2)
    for number, version in enumerate(("1.0", "1.1")):
        script.connect(number)
        script.join(number, equal={"the version of ronde": version})
    script.advance()
    reason = (
        "ranks disagree on the version of ronde: rank 0 gave 1.0; rank 1 gave 1.1; install the same ronde on all hosts"
    )
    assert [script.take(number, JoinRefused) for number in (0, 1)] == [JoinRefused(reason)] * 2
    assert script.membership.plan.action is PlanAction.FAIL and script.membership.plan.describe() == reason
    assert script.ask(2).reason == reason


@pytest.mark.parametrize(
    ("equal", "version", "groups", "why"),
    [
        ({"fusion": "2"}, VERSION, (), "worker 2 differs from the members in fusion: it has 2, they have 1"),
        ({"fusion": "1"}, VERSION - 1, (), f"worker 2 speaks version {VERSION - 1} of the protocol"),
        ({"fusion": "1"}, VERSION, ((0, 1),), "groups cannot be given to init() in an elastic job"),
    ],
    ids=["settings", "protocol", "groups"],
)
def test_a_newcomer_that_does_not_fit_is_refused_alone(
    equal: dict[str, str], version: int, groups: tuple[tuple[int, ...], ...], why: str
) -> None:
    script = ElasticScript(2)
    for number in (0, 1):
        script.connect(number)
        script.join(number, equal={"fusion": "1"})
    script.advance()
    script.take_start(0, 1)
    script.connect(2, ready=True)
    script.join(2, version=version, groups=groups, equal=equal)
    script.advance()
    assert script.take(2, JoinRefused).reason.startswith(why)
    assert not script.has(0, RoundChangeWanted)
    script.connect(3, ready=True)
    script.join(3, equal={"fusion": "1"})
    script.advance()
    assert script.has(0, RoundChangeWanted)


def test_groups_of_init_are_refused_in_the_first_round_too() -> None:
    script = ElasticScript(2)
    script.connect(0)
    script.join(0, groups=((0, 1),))
    assert "groups cannot be given to init()" in script.take(0, JoinRefused).reason


@pytest.mark.parametrize("number", [-1, 0])
def test_who_cannot_be_a_worker_is_refused(number: int) -> None:
    script = ElasticScript(1)
    purpose, identity = ("data", "worker0") if number == 0 else (LIVENESS, "worker0")
    assert script.core.admit(ConnectionRequest(purpose, number, "x", identity), PORT).status is AdmissionStatus.REFUSED


@pytest.mark.parametrize("reset_limit", [0, 2])
def test_the_job_fails_when_ranks_were_lost_more_often_than_the_reset_limit(reset_limit: int) -> None:
    script = ElasticScript(4, reset_limit=reset_limit)
    script.start(0, 1, 2, 3)
    for lost in range(reset_limit):
        script.die(lost)
        script.advance(0.3)
        change_round(script, *range(lost + 1, 4))
        script.take_start(*range(lost + 1, 4))
    script.die(reset_limit)
    script.advance(0.3)
    assert script.membership.plan.reason is PlanReason.SURVIVORS, "the others may just be finishing the job"
    change_round(script, 3)
    if reset_limit == 0:
        change_round(script, 1, 2)
    reason = f"ranks were lost more than {reset_limit} times (the reset limit)"
    assert script.take(3, JoinRefused) == JoinRefused(reason)
    assert script.membership.plan.action is PlanAction.FAIL and script.membership.plan.describe() == reason
    assert script.ask(7, ready=True).reason == reason
    assert script.membership.num_resets == reset_limit


def lose_by_error(script: ElasticScript, *, progress: int) -> None:
    """The member with the lowest number fails by itself, and the others come back from that step of training."""
    failed, *others = sorted(script.membership.members)
    script.leave(failed, reason=LeaveReason.FAILED, detail="ValueError: sample 7 is broken")
    script.die(failed)
    script.leave(*others)
    script.enter(*others, progress=progress)


def test_an_error_of_the_script_that_comes_again_without_progress_ends_the_job() -> None:
    script = ElasticScript(5)
    script.enter(*range(5), ready=False)
    lose_by_error(script, progress=4)
    lose_by_error(script, progress=4)
    assert script.membership.members == (2, 3, 4)
    lose_by_error(script, progress=4)
    plan = script.membership.plan
    assert (plan.action, plan.reason) == (PlanAction.FAIL, PlanReason.SAME_ERROR)
    assert "the script has failed in 3 rounds" in plan.describe() and "sample 7 is broken" in plan.describe()


def fail_newcomer(script: ElasticScript, newcomer: int, *survivors: int) -> None:
    """A newcomer joins the others and fails in its first step, from which they come back while the next one waits."""
    script.enter(newcomer)
    script.leave(*survivors)
    script.enter(*survivors, progress=4)
    script.take_start(*survivors, newcomer)
    script.connect(newcomer + 1, ready=True)
    script.join(newcomer + 1)
    script.leave(newcomer, reason=LeaveReason.FAILED, detail="OSError: /data is not mounted")
    script.die(newcomer)
    script.leave(*survivors)
    script.enter(*survivors, progress=4)


def test_newcomers_that_fail_do_not_end_the_job_and_the_survivors_make_a_step_between_two_of_them() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    for newcomer in (2, 4, 6, 8):
        fail_newcomer(script, newcomer, 0, 1)
        script.take_start(0, 1)
        assert script.membership.plan.workers == (newcomer + 1,), "it is asked in after the step"
        assert script.take(0, RoundChangeWanted) and script.take(1, RoundChangeWanted)
        script.die(newcomer + 1)
        script.advance(1)
    lose_by_error(script, progress=4)
    script.take_start(1)
    assert script.membership.plan.action is not PlanAction.FAIL, "the first error that counts"


def test_newcomers_that_fail_and_that_the_job_cannot_do_without_end_it() -> None:
    script = ElasticScript(2, min_ranks=2)
    script.start(0, 1)
    script.die(1)
    script.advance(1)
    script.leave(0)
    script.enter(0, progress=4)
    for newcomer in (2, 3, 4):
        script.enter(newcomer)
        script.take_start(0, newcomer)
        script.leave(newcomer, reason=LeaveReason.FAILED, detail="OSError: /data is not mounted")
        script.die(newcomer)
        script.leave(0)
        script.enter(0, progress=4)
    plan = script.membership.plan
    assert (plan.action, plan.reason) == (PlanAction.FAIL, PlanReason.SAME_ERROR) and "/data" in plan.detail


@pytest.mark.parametrize("how", ["progress", "kills", "nobody knows"])
def test_errors_between_which_training_goes_on_and_other_losses_do_not_end_the_job(how: str) -> None:
    script = ElasticScript(5)
    script.enter(*range(5), ready=False)
    for step in range(4):
        if how == "kills":
            lost, *others = sorted(script.membership.members)
            script.die(lost)
            script.advance(0.3)
            script.leave(*others)
            script.enter(*others, progress=4)
        else:
            lose_by_error(script, progress=step if how == "progress" else -1)
    assert script.membership.members == (4,)


def test_changes_for_newcomers_do_not_count_for_the_reset_limit() -> None:
    script = ElasticScript(1, reset_limit=0)
    script.start(0)
    for number in range(1, 4):
        script.enter(number)
        change_round(script, *range(number))
        script.take_start(*range(number + 1))


def test_below_min_ranks_the_job_waits_and_goes_on_when_there_are_enough_again() -> None:
    script = ElasticScript(3, min_ranks=2, timeout_s=100)
    script.start(0, 1, 2)
    script.die(0, 1)
    script.advance(0.3)
    change_round(script, 2)
    script.advance(90)
    assert script.membership.plan.describe() == "1 of the 2 ranks that are needed are ready"
    script.enter(3)
    script.take_start(2, 3)


@pytest.mark.parametrize("has_begun", [False, True], ids=["the first round", "a later round"])
def test_a_round_that_does_not_get_enough_ranks_in_time_fails(has_begun: bool) -> None:
    script = ElasticScript(2, min_ranks=2, timeout_s=100)
    if has_begun:
        script.start(0, 1)
        script.advance(LONG_S)
        script.die(1)
        script.advance(0.3)
        change_round(script, 0)
    else:
        script.enter(0, ready=False)
    script.advance(98)
    assert not script.has(0, JoinRefused)
    script.advance(3)
    reason = "only 1 of the 2 ranks that are needed came in time"
    assert script.take(0, JoinRefused) == JoinRefused(reason)
    assert script.ask(0, ready=True).reason == reason


def test_at_the_end_members_and_those_who_wait_get_the_reason() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    script.enter(2)
    sends = script.core.close("enough")
    assert [(set(send[0]), send[1]) for send in sends] == [({0, 1}, EndRound("enough")), ({2}, JoinRefused("enough"))]


# --- ranks and numbers -----------------------------------------------------------------------------------------------


def round_of_2_and_5() -> ElasticScript:
    script = ElasticScript(3)
    script.start(0, 1, 2)
    script.enter(5)
    script.die(0, 1)
    script.advance(0.3)
    change_round(script, 2)
    script.take_start(2, 5)
    script.sent.clear()
    return script


def test_operations_of_ranks_go_to_the_workers_that_have_them() -> None:
    script = round_of_2_and_5()
    for number in (2, 5):
        script.send(number, announce("w"))
    script.advance()
    assert {number for number in script.sent if script.has(number, RunOperations)} == {2, 5}


def test_what_is_asked_about_a_job_is_about_the_ranks_of_its_newest_round() -> None:
    script = round_of_2_and_5()
    script.core.host_names.update({2: "a", 5: "b"})
    activity = script.core.queries.activity(script.now_ns)
    assert activity.size == 2
    assert [(rank.rank, rank.state, rank.worker) for rank in activity.ranks] == [
        (0, "running", "worker2"),
        (1, "running", "worker5"),
    ]
    found: list[tuple[RankStack, ...]] = []
    script._deliver(script.core.start_stack_query(script.now_ns + S, found.append))
    query_id = script.take(5, StackRequest).query_id
    script.send(5, StackReply(query_id, "train.py:1", ""))
    script.send(2, StackReply(query_id, "train.py:2", ""))
    assert [(stack.rank, stack.line) for stack in found[0]] == [(0, "train.py:2"), (1, "train.py:1")]
    script.die(2)
    script.advance(0.3)
    assert script.core.first_lost == (0, MembershipEnd(LeaveReason.PROCESS_ENDED, "killed by SIGKILL"))
    change_round(script, 5)
    states = [(rank.rank, rank.state) for rank in script.core.queries.activity(script.now_ns).ranks]
    assert states == [(0, "running")]
    assert script.core.first_lost is None, "the report of the job is not about a loss that it has got over"


def test_a_worker_that_waits_for_the_next_round_is_shown_with_the_reason() -> None:
    script = ElasticScript(2)
    script.start(0, 1)
    change_round(script, 0)
    first, second = script.core.queries.activity(script.now_ns).ranks
    assert (first.state, second.state) == ("starting", "running")
    assert first.why == "is in init(): waiting for worker 1 to come back from the round before"


# --- jobs whose rank 0 hosts the coordinator -------------------------------------------------------------------------


class FixedScript:
    """A job of fixed ranks with one round, which its members may leave for another one."""

    def __init__(self, size: int) -> None:
        self.now_ns = 1000 * S
        self.core = CoordinatorCore(
            size, Settings.load({}, environ={}), rounds=1, new_round_id=itertools.count(500).__next__
        )
        self.sent: dict[int, list[CoordinatorMessage]] = {rank: [] for rank in range(size)}
        self.attempts = itertools.count()
        for rank in range(size):
            self.enter(rank, size=size, number=rank)
        self.advance()
        assert all(isinstance(messages.pop(), RoundStarted) for messages in self.sent.values())

    def enter(self, rank: int, *, size: int = 0, number: int = -1, ready: bool = False) -> None:
        attempt = str(next(self.attempts))
        admission = self.core.admit(ConnectionRequest(LIVENESS, rank, attempt, f"worker{rank}", ready=ready), PORT)
        assert admission.status is AdmissionStatus.ADMITTED, admission
        self.core.handle(RankConnected(rank, admission.sender, attempt), self.now_ns)
        self.send(rank, JoinRound(VERSION, size, Member(number, "here", rank, "", worker=f"worker{rank}")))

    def send(self, rank: int, message: JoinRound | LeaveRound) -> None:
        self.deliver(self.core.handle(MessageReceived(self.core.senders[rank], 0, message), self.now_ns))

    def advance(self, seconds: float = 0.0) -> None:
        self.now_ns += int(seconds * S)
        self.deliver(self.core.advance(self.now_ns))

    def deliver(self, sends: list[Send]) -> None:
        for ranks, message in sends:
            for rank in ranks:
                self.sent[rank].append(message)


def test_a_job_whose_rank_0_hosts_the_coordinator_goes_on_when_a_rank_is_lost() -> None:
    script = FixedScript(3)
    gone = MembershipEnd(LeaveReason.PROCESS_GONE)
    script.core.handle(RankDisconnected(1, script.core.senders[1], gone), script.now_ns)
    script.advance(1)
    for rank in (0, 2):
        assert script.sent[rank].pop() == RankLost(1, "its process is gone")
        script.send(rank, LeaveRound(LeaveReason.REJOINING))
        script.advance()
        assert not script.core.is_finished
        script.enter(rank, ready=True)
    script.advance()
    started = script.sent[0].pop()
    assert isinstance(started, RoundStarted) and script.sent[2].pop() == started
    assert [(member.rank, member.worker) for member in started.members] == [(0, "worker0"), (1, "worker2")]
    refused = script.core.admit(ConnectionRequest(LIVENESS, 1, "again", "worker1", ready=True), PORT)
    assert refused.refusal_kind is RefusalKind.LEFT_BEHIND
    for rank in (0, 2):
        script.send(rank, LeaveRound(LeaveReason.FINISHED))
    script.advance()
    assert script.core.is_finished, "rank 0 can end the coordinator"


def test_a_job_whose_rank_0_hosts_the_coordinator_waits_for_the_last_to_hear_that_it_is_finished() -> None:
    script = FixedScript(2)
    script.send(1, LeaveRound(LeaveReason.REJOINING))
    script.send(0, LeaveRound(LeaveReason.FINISHED))
    script.advance()
    assert not script.core.is_finished
    request = ConnectionRequest(LIVENESS, 1, "again", "worker1", ready=True)
    assert script.core.admit(request, PORT).refusal_kind is RefusalKind.FINISHED
    script.advance()
    assert script.core.is_finished
