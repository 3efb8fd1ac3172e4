"""One round without wire and clock: in which order its members are told what, and who is told nothing."""

from __future__ import annotations

import pytest

from ronde.coordinator.membership import MembershipEnd
from ronde.coordinator.negotiation import Send
from ronde.coordinator.rounds import Round, RoundSettings
from ronde.net.messages import (
    AnnounceOperations,
    ChangeGroups,
    GroupsChanged,
    LeaveReason,
    MissingRanks,
    MissingRanksQuery,
    OperationRejected,
    RankHeartbeat,
    RankLost,
    RunOperations,
    StackReply,
    StackRequest,
    StallReport,
    WaitingTooLong,
)
from ronde.types import Member
from tests.unit.coordinator.scripted_ranks import allreduce

SECOND = 10**9
START = 1000 * SECOND
KILLED = MembershipEnd(LeaveReason.PROCESS_ENDED, "killed by signal 9")


def make_round(size: int, *, stall_s: float = 10.0, state: str = "stopped") -> Round:
    members = tuple(Member(rank, "here", 100 + rank, "") for rank in range(size))
    rules = RoundSettings(
        fusion_bytes=1 << 20,
        stall_s=stall_s,
        leave_grace_s=1.0,
        process_state=lambda member: state,
        host_name=lambda member: f"the big one of {member.host}",
    )
    return Round(members, (), rules, START)


def kinds(sends: list[Send]) -> list[tuple[tuple[int, ...], str]]:
    return [(send.ranks, type(send.message).__name__) for send in sends]


def test_what_ran_before_a_loss_is_told_before_it_and_what_fails_by_it_after() -> None:
    made = make_round(2)
    for rank in (0, 1):
        made.handle(rank, allreduce("done"), START)
    made.member_lost(1, KILLED)
    made.handle(0, allreduce("late"), START)
    sends = made.advance(START)
    assert [type(send.message) for send in sends] == [RunOperations, RankLost, OperationRejected]
    assert all(send.ranks == (0,) for send in sends)


def test_a_rank_that_left_is_told_nothing_more() -> None:
    made = make_round(3)
    for rank in range(3):
        made.handle(rank, allreduce("w"), START)
    made.member_left(2, MembershipEnd(LeaveReason.SHUTDOWN), START)
    assert kinds(made.advance(START)) == [((0, 1), "RunOperations")]
    assert made.present == {0, 1}


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (LeaveReason.SHUTDOWN, "it has left the round by shutdown()"),
        (LeaveReason.SCRIPT_ENDED, "exited without shutdown"),
    ],
)
def test_the_others_may_finish_before_they_are_told_that_a_rank_left(how: LeaveReason, told: str) -> None:
    made = make_round(2)
    made.member_left(1, MembershipEnd(how), START)
    assert made.advance(START + SECOND - 1) == []
    assert made.next_due_ns(START) <= START + SECOND
    assert made.advance(START + SECOND) == [Send((0,), RankLost(1, told))]
    assert made.advance(START + 2 * SECOND) == []


def test_a_rank_that_left_and_then_died_is_not_lost_twice() -> None:
    made = make_round(2)
    made.member_left(1, MembershipEnd(LeaveReason.SHUTDOWN), START)
    made.member_lost(1, KILLED)
    assert kinds(made.advance(START + 5 * SECOND)) == [((0,), "RankLost")]


def test_a_new_group_is_known_before_anything_runs_in_it() -> None:
    made = make_round(2)
    for rank in (0, 1):
        made.handle(rank, ChangeGroups((0,)), START)
    made.handle(0, allreduce("w", group=1), START)
    assert kinds(made.advance(START)) == [((0,), "GroupsChanged"), ((1,), "GroupsChanged"), ((0,), "RunOperations")]


def test_a_change_of_groups_that_waits_for_a_lost_rank_ends() -> None:
    made = make_round(2)
    made.handle(0, ChangeGroups((0,)), START)
    made.member_lost(1, KILLED)
    assert GroupsChanged((0,), 0, reason="rank 1 is gone: killed by signal 9") in [
        send.message for send in made.advance(START)
    ]


def test_what_is_not_said_in_a_round_is_not_taken() -> None:
    assert not make_round(1).handle(0, RankHeartbeat(0), START)
    assert make_round(1).handle(0, AnnounceOperations(), START)


def test_who_asks_whom_an_operation_waits_for_is_told() -> None:
    made = make_round(3, stall_s=0.0)
    made.handle(0, allreduce("w"), START)
    for name in ("w", "x"):
        assert made.handle(0, MissingRanksQuery(0, name), START)
    assert made.advance(START) == [Send((0,), MissingRanks(0, "w", (1, 2))), Send((0,), MissingRanks(0, "x", ()))]


def test_a_late_operation_is_asked_for_then_reported_even_if_nobody_answers() -> None:
    made = make_round(2, stall_s=10.0)
    made.handle(0, allreduce("w"), START)
    assert made.advance(START + 9 * SECOND) == []
    assert kinds(made.advance(START + 11 * SECOND)) == [((1,), "StackRequest")]
    assert made.advance(START + 11 * SECOND + SECOND // 2) == []
    [send] = made.advance(START + 12 * SECOND)
    assert isinstance(send.message, StallReport)
    assert send.message.missing == (1,)
    assert send.message.report == (
        "allreduce 'w' sum float32[4] (group 0) has waited 12.0 s for rank 1 (rank 0 is there)\n"
        "  rank 1 on host the big one of here, pid 101, does not answer; its process is stopped"
    )
    assert made.advance(START + 30 * SECOND) == []


@pytest.mark.parametrize("state", ["gone", "stopped", ""])
def test_a_late_member_whose_process_is_gone_is_to_be_declared_lost(state: str) -> None:
    made = make_round(2, stall_s=10.0, state=state)
    made.handle(0, allreduce("w"), START)
    made.advance(START + 9 * SECOND)
    assert made.vanished == set(), "nobody has waited for it too long"
    made.advance(START + 11 * SECOND)
    assert made.vanished == ({1} if state == "gone" else set())


def test_when_an_operation_ran_out_of_time_the_missing_are_asked_where_they_are() -> None:
    made = make_round(3)
    made.member_lost(0, MembershipEnd(LeaveReason.TIMED_OUT, "OperationTimeout: w", missing=(1, 2)))
    [query, lost] = made.advance(START)
    assert (query.ranks, lost.message) == ((1, 2), RankLost(0, "OperationTimeout: w")), (
        "asked before they hear of the loss"
    )
    assert isinstance(query.message, StackRequest)
    made.handle(1, StackReply(query.message.query_id, "train.py:88 in load", ""), START)
    made.member_lost(1, KILLED)  # by a launcher that ends the job; what it said is kept
    where = made.whereabouts()
    assert where is not None and where.first == 0
    assert [(each.rank, each.host, each.pid, each.line, each.why) for each in where.missing] == [
        (1, "the big one of here", 101, "train.py:88 in load", ""),
        (2, "the big one of here", 102, "", "does not answer; its process is stopped"),
    ]


def test_a_later_timeout_does_not_change_who_is_to_blame() -> None:
    made = make_round(3)
    made.member_lost(2, KILLED)
    made.member_lost(0, MembershipEnd(LeaveReason.TIMED_OUT, missing=(1,)))
    assert made.first_lost is not None and made.first_lost[1].description == "killed by signal 9"
    assert made.whereabouts() is None


def test_a_members_clock_is_believed_as_far_as_it_can_be_true() -> None:
    made = make_round(2, stall_s=10.0)
    later = START + 100 * SECOND
    made.handle(0, WaitingTooLong("barrier", 0, -5, (1, 77)), later)  # from before the round began
    made.advance(later)
    [send] = made.advance(later + 2 * SECOND)
    assert isinstance(send.message, StallReport)
    assert (send.message.missing, round(send.message.waited_s)) == ((1,), 102)


def test_a_watch_that_is_off_asks_nobody() -> None:
    made = make_round(2, stall_s=0.0)
    made.handle(0, allreduce("w"), START)
    made.handle(0, WaitingTooLong("barrier", 0, START, (1,)), START)
    assert not any(isinstance(send.message, StackRequest) for send in made.advance(START + 10**6 * SECOND))


def test_a_disagreement_shows_the_line_of_every_rank_also_of_one_that_lost_the_other() -> None:
    made = make_round(3)
    made.member_lost(1, MembershipEnd(LeaveReason.MISMATCHED, "Mismatch: …", line="a.py:4"))
    made.member_lost(0, MembershipEnd(LeaveReason.FAILED, "PeerLost: …", line="a.py:6", lost_peer=1))
    made.member_lost(2, MembershipEnd(LeaveReason.FAILED, "ValueError: …", line="b.py:1"))
    where = made.whereabouts()
    assert where is not None
    assert [(each.rank, each.line) for each in where.disagreeing] == [(0, "a.py:6"), (1, "a.py:4")]
