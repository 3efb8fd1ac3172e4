"""Whose state all members take at the start of a round: a pure function of how far each of them has come.

| what survivors hold                                             | who gives                                          |
|-----------------------------------------------------------------|----------------------------------------------------|
| some have finished step k+1                                     | they; k+1 counts                                   |
| none has; some are at the end of step k                         | they; k+1 is done again                            |
| all have stepped an optimizer in k+1 and are not at its end     | those with the newest commit; all return to it     |
| nobody holds state: all survivors were lost, or there were none | the first rank, with what its script has loaded    |

Ranks are never more than one step apart, because a rank can only finish a step when all have given their gradients for
it. docs/internals/elastic.md describes the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Position(NamedTuple):
    """How far training has come. All members count alike, so a larger position is a later state, and members with equal
    positions hold equal state."""

    steps: int = 0
    """Finished steps."""
    commits: int = 0
    """Calls of State.commit(). Between two of them values may change that belong to no step, such as the epoch."""


class Progress(NamedTuple):
    """What one member of a round holds when the round starts."""

    position: Position
    is_at_step_end: bool
    """Whether its state is that of `position`. If not, an optimizer has stepped since, which cannot be undone."""
    committed: Position
    """The position of its last commit."""
    is_survivor: bool
    """Whether it holds state of the job. What a newcomer holds is what its script has made or loaded."""


class Givers(NamedTuple):
    """Whose state all members take."""

    ranks: tuple[int, ...]
    """They hold the same state. Never empty."""
    position: Position
    from_commit: bool
    """Whether the givers return to their last commit first."""


def choose_givers(progress: Sequence[Progress]) -> Givers:
    """Choose the members whose state is the newest; the state of a step end is preferred to an equally old commit.
    `progress` is that of every member, by rank."""
    survivors = [rank for rank, each in enumerate(progress) if each.is_survivor]
    if not survivors:
        return Givers((0,), progress[0].position, from_commit=False)
    at_step_end = [rank for rank in survivors if progress[rank].is_at_step_end]
    newest_commit = max(progress[rank].committed for rank in survivors)
    newest = max((progress[rank].position for rank in at_step_end), default=None)
    if newest is not None and newest >= newest_commit:
        ranks = tuple(rank for rank in at_step_end if progress[rank].position == newest)
        return Givers(ranks, newest, from_commit=False)
    ranks = tuple(rank for rank in survivors if progress[rank].committed == newest_commit)
    return Givers(ranks, newest_commit, from_commit=True)
