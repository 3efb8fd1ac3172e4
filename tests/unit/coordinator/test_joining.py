"""The start of a round without sockets and clock: who has joined, and whether it starts, is refused or has to wait."""

from __future__ import annotations

from collections.abc import ItemsView
from typing import TypeVar

import pytest

from ronde.coordinator.joining import JoinDecision, PendingRound
from ronde.net.messages import VERSION, JoinRound
from ronde.types import Member

SECOND = 10**9
K = TypeVar("K")
V = TypeVar("V")


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
