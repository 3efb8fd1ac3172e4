"""Rounds without sockets and clock: when one starts, and in which order its members are told what."""

from __future__ import annotations

from collections.abc import ItemsView
from typing import TypeVar

import pytest

from ronde.coordinator.negotiation import Send
from ronde.coordinator.rounds import MAX_PROMPT_NOTICES, JoinDecision, MembershipEnd, PendingRound, Round
from ronde.net.messages import (
    VERSION,
    AbortChannel,
    ChangeGroups,
    ChannelAborted,
    GroupsChanged,
    JoinRound,
    LeaveReason,
    MissingRanks,
    MissingRanksQuery,
    OperationRejected,
    RankLost,
    RanksLost,
    RoundStarted,
    RunOperations,
    StackReply,
    StackRequest,
    StallReport,
    WaitingTooLong,
)
from ronde.settings import Settings
from ronde.types import Member
from tests.unit.coordinator.requests import announce

SECOND = 10**9
K = TypeVar("K")
V = TypeVar("V")

# --- the next round --------------------------------------------------------------------------------------------------


def make_join(
    rank: int,
    *,
    size: int = 3,
    version: int = VERSION,
    groups: tuple[tuple[int, ...], ...] = (),
    must_be_equal: dict[str, str] | None = None,
) -> JoinRound:
    equal = {"slot_bytes": "4096", "algorithm": "", **(must_be_equal or {})}
    return JoinRound(version, size, Member(rank, "here", 1000 + rank, f"socket{rank}"), groups, equal)


def pending(*joined: int, size: int = 3) -> PendingRound:
    made = PendingRound(size, start_timeout_s=10.0)
    for rank in joined:
        made.join(rank, make_join(rank, size=size), now_ns=0)
    return made


def decide(
    made: PendingRound, *, at_s: float = 0.0, connected: tuple[int, ...] | None = None, busy: tuple[int, ...] = ()
) -> JoinDecision:
    """With the connections of all ranks, unless a test says otherwise."""
    connected = connected if connected is not None else tuple(range(made.size))
    return made.decide(int(at_s * SECOND), frozenset(connected), frozenset(busy))


def test_a_round_starts_when_every_rank_has_joined() -> None:
    decision = decide(pending(2, 0, 1))
    assert decision.members is not None
    assert [member.rank for member in decision.members] == [0, 1, 2]


@pytest.mark.parametrize(
    ("joined", "connected", "busy", "reason", "refusal"),
    [
        ((1,), (0, 1, 2), (), "waiting for ranks 0, 2 of 3", "ranks 0, 2 of 3 did not join within 10.1 s; look at"),
        (
            (0, 1),
            (0, 1, 2),
            (2,),
            "waiting for rank 2 of 3 (rank 2 still in the round before)",
            "rank 2 of 3 did not join within 10.1 s (rank 2 still in the round before); look at",
        ),
        (
            (0, 1, 2),
            (0, 2),
            (),
            "waiting for the connection of rank 1 of 3",
            "the connection of rank 1 of 3 was not there within 10.1 s; look at",
        ),
    ],
    ids=["missing", "in the round before", "not connected"],
)
def test_it_waits_for_ranks_by_name_but_not_for_ever(
    joined: tuple[int, ...], connected: tuple[int, ...], busy: tuple[int, ...], reason: str, refusal: str
) -> None:
    made = pending(*joined)
    assert decide(made, at_s=9.9, connected=connected, busy=busy) == JoinDecision(reason)
    late = decide(made, at_s=10.1, connected=connected, busy=busy)
    assert late.refused and late.reason.startswith(refusal)


def test_a_rank_that_has_ended_is_not_waited_for_and_its_late_join_is_ignored() -> None:
    made = pending(0, 1)
    made.exited(2, "killed by signal 9")
    made.join(2, make_join(2), 0)
    why = "rank 2 ended before the round began (killed by signal 9)"
    assert decide(made) == JoinDecision(why, refused=True, exited=(2,))
    made.connected(2)
    assert decide(made).reason == "waiting for rank 2 of 3"


def test_a_rank_that_leaves_after_it_joined_ends_this_start_but_not_the_next() -> None:
    made = pending(0, 1)
    made.withdraw(1, "KeyboardInterrupt")
    decision = decide(made)
    assert decision.reason == "rank 1 ended before the round began (KeyboardInterrupt)"
    assert made.clear(decision) == (0,)
    made.connected(0)
    made.join(0, make_join(0), 0)
    assert decide(made).reason == "waiting for ranks 1, 2 of 3"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (make_join(1, size=4), "ranks disagree on the number of ranks: ranks 0, 2 gave 3; rank 1 gave 4"),
        (
            make_join(1, groups=((0, 1),)),
            "ranks disagree on the groups to begin with: ranks 0, 2 gave none; rank 1 gave [0, 1]",
        ),
        (make_join(1, version=99), f"the version of the protocol: ranks 0, 2 gave {VERSION}; rank 1 gave 99"),
        (make_join(2), "the process that connected as rank 1 says it is rank 2"),
        (
            make_join(1, must_be_equal={"algorithm": "ring"}),
            "ranks disagree on algorithm: ranks 0, 2 gave empty; rank 1 gave ring; give all ranks the same "
            "RONDE_ALGORITHM",
        ),
        (
            make_join(1, must_be_equal={"the version of ronde": "9.9"}),
            "ranks disagree on the version of ronde: ranks 0, 2 gave nothing; rank 1 gave 9.9; install the same ronde",
        ),
    ],
)
def test_a_rank_that_differs_is_named_with_what_each_gave(other: JoinRound, words: str) -> None:
    made = pending(0, 2)
    made.join(1, other, 0)
    assert decide(made).refused and words in decide(made).reason


def test_all_ranks_are_awaited_to_be_told_of_a_difference_but_not_for_ever() -> None:
    made = pending(0)
    made.join(1, make_join(1, must_be_equal={"algorithm": "ring"}), 0)
    assert decide(made, at_s=9.9).reason == "waiting for rank 2 of 3"
    assert decide(made, at_s=10.1).reason.startswith("ranks disagree on algorithm: rank 0 gave empty; rank 1 gave ring")
    made.join(2, make_join(2), 0)
    assert decide(made, connected=()).reason.startswith("ranks disagree on algorithm: ranks 0, 2 gave empty; rank 1")


def test_values_that_differ_after_hundreds_of_characters_differ() -> None:
    made = pending(0, 2)
    made.join(1, make_join(1, must_be_equal={"algorithm": "x" * 999}), 0)
    assert "rank 1 gave xxx" in decide(made).reason
    groups = ((0, 1),) * 99
    made = pending(size=2)
    made.join(0, make_join(0, size=2, groups=groups), 0)
    made.join(1, make_join(1, size=2, groups=(*groups, (0,))), 0)
    assert "ranks disagree on the groups to begin with" in decide(made).reason


def test_a_rank_that_comes_again_with_other_values_is_compared_with_the_others_only() -> None:
    made = pending(0)
    made.join(0, make_join(0, must_be_equal={"algorithm": "ring"}), 0)
    assert decide(made).reason == "waiting for ranks 1, 2 of 3"
    made.join(1, make_join(1, must_be_equal={"algorithm": "ring"}), 0)
    assert decide(made).reason == "waiting for rank 2 of 3"
    made.join(2, make_join(2, must_be_equal={"algorithm": "ring"}), 0)
    made.join(0, make_join(0), 0)
    assert "ranks disagree on algorithm: rank 0 gave empty; ranks 1, 2 gave ring" in decide(made).reason


@pytest.mark.parametrize(
    ("join", "words"),
    [
        (make_join(0, size=4), "rank 0 has a job of 4 ranks, the coordinator one of 3; check RONDE_SIZE"),
        (make_join(0, version=99), "rank 0 speaks version 99 of the protocol"),
        (make_join(0, groups=((0, 1), ())), "at least one rank"),
        (make_join(0, groups=((1, 0),)), "must be sorted, got [1, 0]"),
        (make_join(0, groups=((1, 1),)), "each rank once, got 1 more than once"),
        (make_join(0, groups=((0, 3),)), "from 0 to 2, got 3"),
        (make_join(0, groups=((-1, 0),)), "from 0 to 2, got -1"),
    ],
)
def test_all_ranks_may_be_wrong_together(join: JoinRound, words: str) -> None:
    made = pending()
    made.join(0, join, 0)
    assert decide(made).refused and words in decide(made).reason


def test_who_joins_a_refused_round_late_or_again_gets_the_same_reason_until_a_refused_rank_connects_again() -> None:
    made = pending(0)
    made.join(1, make_join(1, size=9), 0)
    decision = decide(made)
    for rank in (0, 2):
        assert made.clear(decision) == ((0, 1) if rank == 0 else (0,))
        made.join(rank, make_join(rank), 0)
        assert decide(made) == decision
    made.clear(decision)
    for rank in range(3):
        made.connected(rank)
        made.join(rank, make_join(rank), 0)
    assert decide(made).members is not None


def test_while_thousands_are_missing_each_of_them_is_looked_at_only_when_the_time_is_over() -> None:
    size = 5000
    made = PendingRound(size, start_timeout_s=10.0)
    joins = CountedDict[int, JoinRound]()
    made.joins = joins
    for rank in range(1000):
        made.join(rank, make_join(rank, size=size), 0)
        assert decide(made).reason == f"waiting for {size - rank - 1} of {size} ranks"
    assert joins.num_looks < 10 * 1000
    late = decide(made, at_s=10.1)
    assert late.refused and late.reason.startswith(f"ranks 1000-{size - 1} of {size} did not join within 10.1 s")
    made.join(1001, make_join(1002, size=size), 0)
    assert decide(made).reason == "the process that connected as rank 1001 says it is rank 1002"


class CountedDict(dict[K, V]):
    """Counts how often a key was looked for, and how many items were looked at."""

    num_looks = 0

    def __contains__(self, key: object) -> bool:
        self.num_looks += 1
        return super().__contains__(key)

    def items(self) -> ItemsView[K, V]:  # type: ignore[override]
        self.num_looks += len(self)
        return super().items()


# --- a round ---------------------------------------------------------------------------------------------------------

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


def test_what_ran_before_a_loss_is_told_before_it_and_what_fails_by_it_after() -> None:
    made = make_round(2)
    for rank in (0, 1):
        made.handle(rank, announce("done"), START)
    made.member_lost(1, KILLED)
    made.handle(0, announce("late"), START)
    sends = made.advance(START)
    assert [type(send.message) for send in sends] == [RunOperations, RankLost, OperationRejected]
    assert all(send.ranks == (0,) for send in sends)


def test_the_first_abort_of_a_channel_is_told_to_all_others_and_later_ones_to_nobody() -> None:
    made = make_round(4)
    made.member_lost(3, KILLED)
    made.advance(START)
    for rank in (1, 0, 2):
        assert made.handle(rank, AbortChannel("0.plan.1", 3, 2, 110, "late"), START)
    made.handle(2, AbortChannel("0.ordered", 5, 1), START)
    assert made.advance(START) == [
        Send((0, 2), ChannelAborted("0.plan.1", 3, 2, 110, "late")),
        Send((0, 1), ChannelAborted("0.ordered", 5, 1)),
    ]


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


def test_a_disagreement_shows_the_line_of_every_rank_also_of_one_that_lost_the_other() -> None:
    made = make_round(3)
    made.member_lost(1, MembershipEnd(LeaveReason.MISMATCHED, "Mismatch: …", line="a.py:4"))
    made.member_lost(0, MembershipEnd(LeaveReason.FAILED, "PeerLost: …", line="a.py:6", lost_peer=1))
    made.member_lost(2, MembershipEnd(LeaveReason.FAILED, "ValueError: …", line="b.py:1"))
    where = made.whereabouts()
    assert where is not None
    assert [(each.rank, each.line) for each in where.disagreeing] == [(0, "a.py:6"), (1, "a.py:4")]
