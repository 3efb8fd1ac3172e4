"""Who is in the round: decided from who has come, with reasons that name ranks."""

from __future__ import annotations

import pytest

from ronde.coordinator.membership import GroupRegistry
from ronde.coordinator.round_start import JoinDecision, PendingRound
from ronde.net.messages import VERSION, ChangeGroups, GroupsChanged, JoinRound
from ronde.types import Member

SECOND = 10**9


def make_join(
    rank: int, *, size: int = 3, version: int = VERSION, groups: tuple[tuple[int, ...], ...] = ()
) -> JoinRound:
    return JoinRound(version, 0, size, Member(rank, "here", 1000 + rank, f"socket{rank}"), groups)


def gathering(*joined: int, size: int = 3) -> PendingRound:
    made = PendingRound(size, start_timeout_s=10.0)
    for rank in joined:
        made.join(rank, make_join(rank, size=size), now_ns=0)
    return made


def decide(
    made: PendingRound,
    *,
    at_s: float = 0.0,
    connected: tuple[int, ...] | None = None,
    busy: frozenset[int] = frozenset(),
) -> JoinDecision:
    """With the connections of all ranks connected, unless a test says otherwise."""
    decision = made.decide(int(at_s * SECOND), frozenset(range(made.size) if connected is None else connected), busy)
    assert decision is not None
    return decision


def refusal(made: PendingRound, *, at_s: float = 0.0, connected: tuple[int, ...] | None = None) -> str:
    decision = decide(made, at_s=at_s, connected=connected)
    assert decision.refused and decision.members is None
    return decision.reason


def test_a_round_begins_when_everybody_has_joined() -> None:
    decision = decide(gathering(2, 0, 1))
    assert decision.members is not None
    assert [member.rank for member in decision.members] == [0, 1, 2]


def test_a_round_waits_until_the_connection_of_every_member_is_connected() -> None:
    decision = decide(gathering(0, 1, 2), connected=(0, 2))
    assert (decision.members, decision.refused) == (None, False)
    assert decision.reason == "waiting for the connection of rank 1 of 3"


def test_it_does_not_wait_for_a_connection_for_ever() -> None:
    reason = refusal(gathering(0, 1, 2), at_s=10.1, connected=(0,))
    assert reason.startswith("the connection of ranks 1, 2 of 3 was not there within 10.1 s; ")


def test_the_late_join_of_a_process_that_has_ended_is_not_believed() -> None:
    made = gathering(0, 1)
    made.exited(2, "killed by signal 9")
    made.join(2, make_join(2), 0)
    assert refusal(made) == "rank 2 ended before the round began (killed by signal 9)"


def test_until_then_the_missing_are_named() -> None:
    decision = decide(gathering(1, size=4))
    assert (decision.members, decision.refused) == (None, False)
    assert decision.reason == "waiting for ranks 0, 2, 3 of 4"


def test_nothing_is_decided_when_nobody_has_joined() -> None:
    assert gathering().decide(0, frozenset()) is None


def test_after_the_limit_the_missing_are_named_to_those_who_wait() -> None:
    made = gathering(0, 1)
    assert not decide(made, at_s=9.9).refused
    assert refusal(made, at_s=10.1).startswith("rank 2 of 3 did not join within 10.1 s; look at their output")


def test_ranks_of_the_round_before_are_waited_for() -> None:
    decision = decide(gathering(0, 1), busy=frozenset({2}))
    assert decision.reason == "waiting for rank 2 of 3 (rank 2 still in the round before)"


def test_a_rank_that_died_is_not_waited_for() -> None:
    made = gathering(0)
    made.exited(2, "killed by signal 9")
    assert refusal(made) == "rank 2 ended before the round began (killed by signal 9)"


def test_a_rank_that_comes_again_after_it_died_is_waited_for() -> None:
    made = gathering(0)
    made.exited(2, "killed by signal 9")
    made.connected(2)
    assert decide(made).reason == "waiting for ranks 1, 2 of 3"


def test_a_rank_that_goes_away_after_it_joined_fails_this_gathering_but_not_the_next() -> None:
    made = gathering(0, 1)
    made.withdraw(1, "KeyboardInterrupt")
    decision = decide(made)
    assert decision.reason == "rank 1 ended before the round began (KeyboardInterrupt)"
    assert made.clear(decision) == (0,)
    made.connected(0)
    made.join(0, make_join(0), 0)
    assert decide(made).reason == "waiting for ranks 1, 2 of 3"


def test_two_processes_with_one_rank_are_refused() -> None:
    made = gathering(0, 1)
    made.duplicates.add(1)
    assert refusal(made) == "two processes say that they are rank 1; give each its own RONDE_RANK"


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
    ],
)
def test_a_rank_that_differs_is_named_with_what_each_gave(other: JoinRound, words: str) -> None:
    made = gathering(0, 2)
    made.join(1, other, 0)
    assert words in refusal(made)


def test_all_ranks_may_be_wrong_together() -> None:
    made = PendingRound(2, start_timeout_s=10.0)
    made.join(0, make_join(0, size=3), 0)
    assert refusal(made) == "rank 0 has a job of 3 ranks, the coordinator one of 2; check RONDE_SIZE"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((), "at least one rank"),
        ((1, 0), "must be sorted, got [1, 0]"),
        ((1, 1), "each rank once, got 1 more than once"),
        ((0, 3), "from 0 to 2, got 3"),
        ((-1, 0), "from 0 to 2, got -1"),
    ],
)
def test_a_group_that_cannot_be_is_refused(ranks: tuple[int, ...], words: str) -> None:
    made = PendingRound(3, start_timeout_s=10.0)
    made.join(0, make_join(0, groups=((0, 1), ranks)), 0)
    assert words in refusal(made)


def test_who_comes_late_to_a_refused_round_hears_the_same_reason() -> None:
    made = gathering(0)
    made.join(1, make_join(1, size=9), 0)
    decision = decide(made)
    assert made.clear(decision) == (0, 1)
    made.join(2, make_join(2), 0)
    assert refusal(made) == decision.reason


def test_after_a_refusal_the_same_ranks_may_try_again() -> None:
    made = gathering(0)
    made.join(1, make_join(1, size=9), 0)
    made.clear(decide(made))
    for rank in range(3):
        made.connected(rank)
        made.join(rank, make_join(rank), 0)
    assert decide(made).members is not None


def test_a_refused_rank_that_asks_once_more_before_it_hears_so_is_refused_again() -> None:
    made = gathering(0)
    made.join(1, make_join(1, size=9), 0)
    decision = decide(made)
    made.clear(decision)
    made.join(0, make_join(0), 0)
    assert refusal(made) == decision.reason


# --- groups ----------------------------------------------------------------------------------------------------------


def ask_all(book: GroupRegistry, size: int, wanted: ChangeGroups) -> list[tuple[int, GroupsChanged]]:
    told: list[tuple[int, GroupsChanged]] = []
    for rank in range(size):
        assert not told, "told before everybody had asked"
        told = list(book.request_change(rank, wanted))
    return told


def test_a_group_is_made_when_every_rank_has_asked_for_it() -> None:
    book = GroupRegistry(3, ((0, 1),))
    assert ask_all(book, 3, ChangeGroups((1, 2))) == [(rank, GroupsChanged((1, 2), 2)) for rank in range(3)]
    assert book.items() == [(0, (0, 1, 2)), (1, (0, 1)), (2, (1, 2))]


def test_a_group_is_removed_when_every_rank_has_asked_for_it_and_its_id_is_not_used_again() -> None:
    book = GroupRegistry(2)
    ask_all(book, 2, ChangeGroups((1,)))
    assert ask_all(book, 2, ChangeGroups((1,), 1)) == [(r, GroupsChanged((1,), 1, removed=True)) for r in range(2)]
    assert ask_all(book, 2, ChangeGroups((0,)))[0] == (0, GroupsChanged((0,), 2))


def test_ranks_that_ask_for_different_changes_are_told_what_each_asked_for() -> None:
    book = GroupRegistry(2)
    assert list(book.request_change(0, ChangeGroups((0,)))) == []
    told = dict(book.request_change(1, ChangeGroups((0, 1), 7)))
    why = "ranks disagree on the change of groups: rank 0 gave a new group of [0]; rank 1 gave removal of group 7"
    assert told == {0: GroupsChanged((0,), 0, reason=why), 1: GroupsChanged((0, 1), 7, reason=why)}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (ChangeGroups((2, 5)), "from 0 to 1, got 2, 5"),
        (ChangeGroups((), 3), "group 3 does not exist, or was removed"),
        (ChangeGroups((0, 1), 0), ""),
    ],
)
def test_a_change_that_cannot_be_is_refused_to_all(wanted: ChangeGroups, words: str) -> None:
    told = ask_all(GroupRegistry(2), 2, wanted)
    assert [words in changed.reason and bool(changed.reason) == bool(words) for _, changed in told] == [True, True]


def test_changes_are_matched_in_the_order_each_rank_asks_for_them() -> None:
    book = GroupRegistry(2)
    for ranks in [(0,), (1,)]:
        assert list(book.request_change(0, ChangeGroups(ranks))) == []
    assert dict(book.request_change(1, ChangeGroups((0,))))[0] == GroupsChanged((0,), 1)
    assert dict(book.request_change(1, ChangeGroups((1,))))[0] == GroupsChanged((1,), 2)


def test_a_lost_rank_ends_the_wait_for_a_change() -> None:
    book = GroupRegistry(2)
    list(book.request_change(0, ChangeGroups((0,))))
    why = "rank 1 is gone: killed by signal 9"
    assert list(book.rank_lost(1, "killed by signal 9")) == [(0, GroupsChanged((0,), 0, reason=why))]
    assert list(book.request_change(0, ChangeGroups((0,)))) == [(0, GroupsChanged((0,), 0, reason=why))]
