"""A round without sockets and clock: in which order its members are told what."""

from __future__ import annotations

import pytest

from ronde.coordinator.negotiation import Send
from ronde.coordinator.rounds import MAX_PROMPT_NOTICES, MembershipEnd, Round
from ronde.net.messages import (
    AbortChannel,
    ChangeGroups,
    ChannelAborted,
    GroupsChanged,
    LeaveReason,
    MissingRanks,
    MissingRanksQuery,
    ProposeValue,
    RankLost,
    RanksLost,
    RoundStarted,
    RunOperations,
    StackReply,
    StackRequest,
    StallReport,
    ValueDecided,
    WaitingTooLong,
)
from ronde.settings import Settings
from ronde.types import Member
from tests.unit.coordinator.requests import announce

SECOND = 10**9
START = 1000 * SECOND
KILLED = MembershipEnd(LeaveReason.PROCESS_ENDED, "killed by signal 9")


def make_round(
    size: int, *, groups: tuple[tuple[int, ...], ...] = (), stall_s: float = 10.0, state: str = "stopped"
) -> Round:
    """A round whose members know that it has started."""
    members = tuple(Member(rank, "here", 100 + rank, "") for rank in range(size))
    made = Round(
        3,
        7,
        members,
        groups,
        START,
        settings=Settings(stall_s=stall_s),
        process_state=lambda member: state,
        host_name=lambda member: f"the big one of {member.host}",
    )
    assert made.advance(START) == [Send(tuple(range(size)), RoundStarted(7, members))]
    return made


def kinds(sends: list[Send]) -> list[tuple[tuple[int, ...], str]]:
    return [(send.ranks, type(send.message).__name__) for send in sends]


def test_what_ran_before_a_loss_is_told_before_it_and_the_loss_is_the_answer_to_what_comes_after() -> None:
    made = make_round(2)
    for rank in (0, 1):
        made.handle(rank, announce("done"), START)
    made.member_lost(1, KILLED)
    made.handle(0, announce("late"), START)
    sends = made.advance(START)
    assert [type(send.message) for send in sends] == [RunOperations, RankLost]
    assert all(send.ranks == (0,) for send in sends)


def test_the_first_abort_of_a_channel_is_told_to_all_others_and_later_ones_to_nobody() -> None:
    made = make_round(4)
    made.member_lost(3, KILLED)
    made.advance(START)
    for rank in (1, 0, 2):
        assert made.handle(rank, AbortChannel("0.plan.1", 3, 2, 110, "late"), START)
    made.handle(2, AbortChannel("0.ordered", 5, 1), START)
    assert made.advance(START) == [
        Send((0, 2), ChannelAborted("0.plan.1", 3, 2, 110, "late", reporter=1)),
        Send((0, 1), ChannelAborted("0.ordered", 5, 1, reporter=2)),
    ]


def test_the_first_value_that_is_proposed_for_a_key_is_the_one_that_all_get_also_when_its_proposer_is_lost() -> None:
    made = make_round(3)
    made.handle(2, ProposeValue("a", b"two"), START)
    made.handle(0, ProposeValue("b", b"zero"), START)
    assert made.advance(START) == [Send((2,), ValueDecided("a", b"two")), Send((0,), ValueDecided("b", b"zero"))]
    made.member_lost(2, KILLED)
    made.advance(START)
    for rank in (0, 1):
        made.handle(rank, ProposeValue("a", b"other"), START)
        assert made.advance(START) == [Send((rank,), ValueDecided("a", b"two"))]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (LeaveReason.SHUTDOWN, "it has left the round by shutdown()"),
        (LeaveReason.SCRIPT_ENDED, "exited without shutdown"),
    ],
)
def test_the_others_may_finish_before_they_are_told_that_a_rank_left_and_it_is_told_nothing_more(
    how: LeaveReason, told: str
) -> None:
    made = make_round(2)
    for rank in (0, 1):
        made.handle(rank, announce("w"), START)
    made.member_left(1, MembershipEnd(how), START)
    assert kinds(made.advance(START)) == [((0,), "RunOperations")]
    assert made.advance(START + SECOND - 1) == []
    assert made.next_due_ns(START) <= START + SECOND
    assert made.advance(START + SECOND) == [Send((0,), RankLost(1, told))]
    assert made.advance(START + 2 * SECOND) == []


def test_a_rank_that_left_and_then_died_is_not_lost_twice() -> None:
    made = make_round(2)
    made.member_left(1, MembershipEnd(LeaveReason.SHUTDOWN), START)
    made.member_lost(1, KILLED)
    assert kinds(made.advance(START + 5 * SECOND)) == [((0,), "RankLost")]


def test_in_a_large_round_the_first_loss_is_told_at_once_and_those_that_follow_are_told_together() -> None:
    size = MAX_PROMPT_NOTICES + 1
    made = make_round(size)
    made.member_lost(1, KILLED)
    made.member_lost(2, KILLED)
    first, second = made.advance(START)
    assert (first.message, second.message) == (RankLost(1, KILLED.detail), RanksLost(((2, KILLED.detail),)))
    for rank in range(3, 100):
        made.member_lost(rank, MembershipEnd(LeaveReason.FAILED, "PeerLost"))
    assert made.advance(START + 1) == []
    due_ns = made.next_due_ns(START + 1)
    assert START < due_ns < START + SECOND
    [send] = made.advance(due_ns)
    assert send == Send((0, *range(100, size)), RanksLost(tuple((rank, "PeerLost") for rank in range(3, 100))))
    assert made.advance(due_ns + SECOND) == []


def test_in_a_large_round_who_announces_something_in_the_group_of_a_lost_rank_is_told_of_the_loss_and_no_more() -> None:
    made = make_round(MAX_PROMPT_NOTICES + 1, groups=((20, 21),))
    for lost in (5, 10):
        made.member_lost(lost, KILLED)
        made.advance(START)
    made.member_lost(20, KILLED)
    made.handle(21, announce("w", group=1), START)
    assert made.advance(START) == [], "not that it has made a mistake"
    [send] = made.advance(made.next_due_ns(START))
    assert 21 in send.ranks and send.message == RanksLost(((20, KILLED.detail),))


def test_who_asks_whom_an_operation_waits_for_is_told() -> None:
    made = make_round(3, stall_s=0.0)
    made.handle(0, announce("w"), START)
    for name in ("w", "x"):
        assert made.handle(0, MissingRanksQuery(0, name), START)
    assert made.advance(START) == [Send((0,), MissingRanks(0, "w", (1, 2))), Send((0,), MissingRanks(0, "x", ()))]


# --- groups ----------------------------------------------------------------------------------------------------------


def change(made: Round, *changes: ChangeGroups) -> list[Send]:
    """Each rank asks for its change; returns what is sent."""
    sends: list[Send] = []
    for rank, wanted in enumerate(changes):
        assert not sends, "told before everybody had asked"
        made.handle(rank, wanted, START)
        sends = made.advance(START)
    return sends


def test_groups_are_made_and_removed_when_every_rank_has_asked_for_it_and_no_id_is_used_again() -> None:
    made = make_round(2, groups=((0, 1),))
    assert change(made, *[ChangeGroups((1,))] * 2) == [Send((0, 1), GroupsChanged((1,), 2))]
    for group in (1, 2):
        made.handle(1, announce("w", group=group), START)
    assert kinds(made.advance(START)) == [((1,), "RunOperations")], "group 1 has another member"
    assert change(made, *[ChangeGroups((1,), 2)] * 2) == [Send((0, 1), GroupsChanged((1,), 2, removed=True))]
    made.handle(1, announce("w", group=2), START)
    assert kinds(made.advance(START)) == [((1,), "OperationRejected")]
    assert change(made, *[ChangeGroups((0,))] * 2) == [Send((0, 1), GroupsChanged((0,), 3))]


def test_a_new_group_is_known_before_anything_runs_in_it() -> None:
    made = make_round(2)
    for rank in (0, 1):
        made.handle(rank, ChangeGroups((0,)), START)
    made.handle(0, announce("w", group=1), START)
    assert kinds(made.advance(START)) == [((0, 1), "GroupsChanged"), ((0,), "RunOperations")]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            ChangeGroups((0,)),
            ChangeGroups((0, 1), 7),
            "ranks disagree on the change of groups: rank 0 gave a new group of [0]; rank 1 gave removal of group 7",
        ),
        (ChangeGroups((2, 5)), ChangeGroups((2, 5)), "from 0 to 1, got 2, 5"),
        (ChangeGroups((), 3), ChangeGroups((), 3), "group 3 does not exist, or was removed"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_to_all(first: ChangeGroups, second: ChangeGroups, words: str) -> None:
    sends = change(make_round(2), first, second)
    assert [send.ranks for send in sends] == [(0,), (1,)]
    for wanted, send in zip((first, second), sends, strict=True):
        assert isinstance(send.message, GroupsChanged) and words in send.message.reason
        assert (send.message.ranks, send.message.id) == (wanted.ranks, wanted.id)


def test_changes_are_matched_in_the_order_in_which_each_rank_asks_for_them() -> None:
    made = make_round(2)
    for rank in (0, 1):
        for ranks in [(0,), (1,)]:
            made.handle(rank, ChangeGroups(ranks), START)
    assert [send.message for send in made.advance(START)] == [GroupsChanged((0,), 1), GroupsChanged((1,), 2)]


def test_a_lost_rank_ends_the_wait_for_a_change() -> None:
    made = make_round(2)
    made.handle(0, ChangeGroups((0,)), START)
    made.member_lost(1, KILLED)
    made.handle(0, ChangeGroups((0, 1)), START)
    why = "rank 1 is gone: killed by signal 9"
    assert [send.message for send in made.advance(START)] == [
        RankLost(1, "killed by signal 9"),
        GroupsChanged((0,), 0, reason=why),
        GroupsChanged((0, 1), 0, reason=why),
    ]


# --- stalls, and where ranks were ------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["", "train.py:42 in step"], ids=["no reply", "a reply"])
def test_a_late_operation_is_asked_for_then_reported_once(line: str) -> None:
    made = make_round(2, stall_s=10.0)
    made.handle(0, announce("w"), START)
    assert made.advance(START + 9 * SECOND) == []
    [query] = made.advance(START + 11 * SECOND)
    assert query.ranks == (1,) and isinstance(query.message, StackRequest)
    assert made.advance(START + 11 * SECOND + SECOND // 2) == []
    if line:
        made.handle(1, StackReply(query.message.query_id, line, ""), START + 12 * SECOND)
    [send] = made.advance(START + 12 * SECOND)
    assert send.ranks == (0, 1) and isinstance(send.message, StallReport)
    assert send.message.missing == (1,)
    first, second = send.message.report.splitlines()
    assert first == "allreduce 'w' sum float32[4] (group 0) has waited 12.0 s for rank 1 (rank 0 is there)"
    assert second.startswith("  rank 1 on host the big one of here, pid 101, ")
    assert second.endswith(line or "does not answer; its process is stopped")
    assert made.advance(START + 30 * SECOND) == []


def test_a_members_clock_is_believed_as_far_as_it_can_be_true() -> None:
    made = make_round(2, stall_s=10.0)
    later = START + 100 * SECOND
    made.handle(0, WaitingTooLong("barrier", 0, -5, (1, 77)), later)  # from before the round began
    made.advance(later)
    [send] = made.advance(later + 2 * SECOND)
    assert isinstance(send.message, StallReport)
    assert (send.message.missing, round(send.message.waited_s)) == ((1,), 102)


def test_without_stall_s_nobody_is_asked() -> None:
    made = make_round(2, stall_s=0.0)
    made.handle(0, announce("w"), START)
    made.handle(0, WaitingTooLong("barrier", 0, START, (1,)), START)
    assert made.advance(START + 10**6 * SECOND) == []


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
    stacks = made.failure_stacks()
    assert stacks is not None and stacks.first == 0
    assert [(each.rank, each.host, each.pid, each.line, each.why) for each in stacks.missing] == [
        (1, "the big one of here", 101, "train.py:88 in load", ""),
        (2, "the big one of here", 102, "", "does not answer; its process is stopped"),
    ]


def test_a_later_timeout_does_not_change_who_is_to_blame() -> None:
    made = make_round(3)
    made.member_lost(2, KILLED)
    made.member_lost(0, MembershipEnd(LeaveReason.TIMED_OUT, missing=(1,)))
    assert made.first_lost is not None and made.first_lost[1].description == "killed by signal 9"
    assert made.failure_stacks() is None


def test_a_disagreement_shows_the_line_of_every_rank_also_of_one_that_lost_the_other() -> None:
    made = make_round(3)
    made.member_lost(1, MembershipEnd(LeaveReason.MISMATCHED, "Mismatch: …", line="a.py:4"))
    made.member_lost(0, MembershipEnd(LeaveReason.FAILED, "PeerLost: …", line="a.py:6", lost_peer=1))
    made.member_lost(2, MembershipEnd(LeaveReason.FAILED, "ValueError: …", line="b.py:1"))
    stacks = made.failure_stacks()
    assert stacks is not None
    assert [(each.rank, each.line) for each in stacks.disagreeing] == [(0, "a.py:6"), (1, "a.py:4")]
