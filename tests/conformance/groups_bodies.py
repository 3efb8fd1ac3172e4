"""Groups: made, overlapping, removed; who is not in cannot take part."""

from __future__ import annotations

import numpy as np

from ronde.comm.world import World
from ronde.errors import Mismatch
from tests.conformance.cases import on_ranks, raises


@on_ranks(1, 2, 3)
def the_world_is_a_group_of_all(world: World) -> None:
    group = world.group
    assert (group.id, group.ranks, group.rank, group.size) == (0, tuple(range(world.size)), world.rank, world.size)
    assert group.included and world.groups == [group]


@on_ranks(2, 3)
def members_work_among_themselves(world: World) -> None:
    group = world.add_group([0, world.size - 1])
    assert group.ranks == (0, world.size - 1)
    if group.included:
        for name in (None, "x"):
            assert group.allreduce(np.ones(3), name=name).tolist() == [2, 2, 2]
            assert group.allgather(np.array([world.rank]), name=name).tolist() == [0, world.size - 1]
            assert group.broadcast(np.array([world.rank]), root=world.size - 1, name=name).tolist() == [world.size - 1]
    else:
        assert group.rank is None
        with raises(ValueError, match=rf"rank 1 is not a member of group {group.id} \(ranks 0, 2\)"):
            group.allreduce(np.ones(3))
        with raises(ValueError, match="not a member"):
            group.barrier(name="x")
    world.remove_group(group)


@on_ranks(3)
def groups_may_overlap(world: World) -> None:
    first, second = world.add_group([0, 1]), world.add_group([1, 2])
    works = [group.allreduce(np.full(3, world.rank), wait=False) for group in (first, second) if group.included]
    works += [group.allreduce(np.full(3, 10), name="t", wait=False) for group in (second, first) if group.included]
    values = [work.wait().tolist()[0] for work in works]
    assert values == {0: [1, 20], 1: [1, 3, 20, 20], 2: [3, 20]}[world.rank]
    for group in (first, second):
        world.remove_group(group)


@on_ranks(2)
def a_group_of_one_works_alone(world: World) -> None:
    groups = [world.add_group([rank]) for rank in range(world.size)]
    mine = groups[world.rank]
    assert mine.allreduce(np.ones(3), name="x").tolist() == [1, 1, 1]
    assert mine.allgather(np.ones(2)).tolist() == [1, 1]
    for group in groups:
        world.remove_group(group)


@on_ranks(2)
def a_removed_group_is_no_more(world: World) -> None:
    group = world.add_group([0, 1])
    group.allreduce(np.ones(1))
    assert group in world.groups
    world.remove_group(group)
    assert group not in world.groups
    for name in (None, "x"):
        with raises(ValueError, match=f"group {group.id} was removed"):
            group.allreduce(np.ones(1), name=name)
    with raises(ValueError, match="was removed before"):
        world.remove_group(group)
    again = world.add_group([0, 1])
    assert again.id != group.id and again.allreduce(np.ones(1)).tolist() == [2]
    world.remove_group(again)


@on_ranks(2)
def ranks_that_cannot_be_are_named(world: World) -> None:
    with raises(ValueError, match="from 0 to 1, got 2, 7"):
        world.add_group([0, 7, 2])
    with raises(ValueError, match="got 1 more than once"):
        world.add_group([1, 0, 1])
    with raises(ValueError, match="at least one rank"):
        world.add_group([])
    with raises(ValueError, match="the world cannot be removed"):
        world.remove_group(world.group)
    for root in (2, -1):
        with raises(ValueError, match=f"root must be a member .* got {root}"):
            world.group.broadcast(np.ones(1), root=root)


@on_ranks(2)
def ranks_that_disagree_on_a_group_all_hear_it(world: World) -> None:
    with raises(Mismatch, match="rank 0 gave a new group of .*; rank 1 gave"):
        world.add_group([0] if world.rank == 0 else [0, 1])
    assert world.group.allreduce(np.ones(1)).tolist() == [2]
