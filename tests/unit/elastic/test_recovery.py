"""Who gives state at the start of a round: the table of docs/internals/elastic.md, and what holds for any progress."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.elastic.recovery import Givers, Position, Progress, choose_givers


def survivor(steps: int, *, at_end: bool = True, commits: int = 0, committed: tuple[int, int] = (0, 0)) -> Progress:
    return Progress(Position(steps, commits), at_end, Position(*committed), is_survivor=True)


def newcomer(steps: int = 0) -> Progress:
    return Progress(Position(steps), True, Position(steps), is_survivor=False)


@pytest.mark.parametrize(
    ("progress", "ranks", "position", "from_commit"),
    [
        pytest.param([survivor(4), survivor(5), survivor(5)], (1, 2), (5, 0), False, id="finished-the-step"),
        pytest.param(
            [survivor(4, at_end=False), survivor(5)], (1,), (5, 0), False, id="one-stepped-and-one-finished-the-step"
        ),
        pytest.param([survivor(4, at_end=False), survivor(4)], (1,), (4, 0), False, id="one-has-not-stepped"),
        pytest.param(
            [
                survivor(4, at_end=False, committed=(2, 1)),
                survivor(4, at_end=False, committed=(3, 2)),
                survivor(4, at_end=False, committed=(3, 2)),
            ],
            (1, 2),
            (3, 2),
            True,
            id="all-have-stepped",
        ),
        pytest.param([survivor(4), survivor(4, commits=1)], (1,), (4, 1), False, id="committed-since"),
        pytest.param([newcomer(9), survivor(4), newcomer()], (1,), (4, 0), False, id="newcomers-give-nothing"),
        pytest.param([newcomer(3), newcomer(9)], (0,), (3, 0), False, id="nobody-holds-state"),
        pytest.param([survivor(0), newcomer()], (0,), (0, 0), False, id="lost-in-the-first-synchronization"),
    ],
)
def test_who_gives(
    progress: list[Progress], ranks: tuple[int, ...], position: tuple[int, int], from_commit: bool
) -> None:
    assert choose_givers(progress) == Givers(ranks, Position(*position), from_commit)


positions = st.builds(Position, st.integers(0, 3), st.integers(0, 3))
progresses = st.lists(st.builds(Progress, positions, st.booleans(), positions, st.booleans()), min_size=1, max_size=6)


@given(progresses)
def test_givers_hold_the_same_state_and_nobody_holds_a_newer_one(progress: list[Progress]) -> None:
    givers = choose_givers(progress)
    held = {progress[rank].committed if givers.from_commit else progress[rank].position for rank in givers.ranks}
    assert held == {givers.position}
    survivors = [each for each in progress if each.is_survivor]
    if survivors:
        assert all(progress[rank].is_survivor for rank in givers.ranks)
        whole = [each.position for each in survivors if each.is_at_step_end]
        assert givers.position == max([*whole, *(each.committed for each in survivors)])
    if not givers.from_commit and survivors:
        assert all(progress[rank].is_at_step_end for rank in givers.ranks)
