"""Messages between two members, and Python objects."""

from __future__ import annotations

import numpy as np

from ronde.comm import objects
from ronde.comm.world import World
from ronde.errors import Mismatch
from tests.conformance.cases import on_ranks, raises


@on_ranks(2, 3)
def an_array_goes_around(world: World) -> None:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    token = np.zeros((2, 3), np.int64)
    if world.rank == 0:
        world.group.send(token + 1, after)
        assert (world.group.receive(token, before) == world.size).all()
    else:
        assert world.group.receive(token, before) is token
        world.group.send(token + 1, after)
    world.group.barrier()


@on_ranks(2)
def both_may_send_at_once(world: World) -> None:
    other = 1 - world.rank
    for count in (1, 500_000):
        sending = world.group.send(np.full(count, world.rank), other, wait=False)
        receiving = world.group.receive(np.empty(count, np.int64), other, wait=False)
        assert sending.wait() is None
        assert (receiving.wait() == other).all()


@on_ranks(2)
def messages_between_two_arrive_in_order(world: World) -> None:
    if world.rank == 0:
        works = [world.group.send(np.array([index]), 1, wait=False) for index in range(20)]
        for work in works:
            work.wait()
    else:
        assert [int(world.group.receive(np.empty(1, np.int64), 0)[0]) for _ in range(20)] == list(range(20))


@on_ranks(2)
def a_message_that_does_not_fit_is_not_taken(world: World) -> None:
    if world.rank == 0:
        try:  # a backend may be done with a small message before the other side looks at it
            world.group.send(np.ones(3), 1)
        except Mismatch as error:
            assert "receive float64[4] from rank 0" in str(error)
    else:
        with raises(Mismatch, match=r"rank 0: send float64\[3\] to rank 1; rank 1: receive float64\[4\] from rank 0"):
            world.group.receive(np.ones(4), 0)
    world.group.barrier()


@on_ranks(2)
def a_message_to_oneself_or_to_a_stranger_is_a_mistake(world: World) -> None:
    with raises(ValueError, match="this very rank"):
        world.group.send(np.ones(1), world.rank)
    with raises(ValueError, match="must be a member of group 0"):
        world.group.receive(np.ones(1), 5)


@on_ranks(1, 2, 3)
def objects_reach_everybody(world: World) -> None:
    group = world.group
    for root in range(world.size):
        thing = {"of": world.rank, "long": "x" * 10_000 * world.rank}
        assert objects.broadcast(thing, root, group=group) == {"of": root, "long": "x" * 10_000 * root}
    assert objects.allgather([world.rank] * world.rank, group=group) == [[rank] * rank for rank in range(world.size)]
    gathered = objects.gather(str(world.rank), group=group)
    assert gathered == ([str(rank) for rank in range(world.size)] if world.rank == 0 else None)
    sent = [(world.rank, to) for to in range(world.size)]
    assert objects.alltoall(sent, group=group) == [(rank, world.rank) for rank in range(world.size)]


@on_ranks(2)
def objects_go_from_one_to_another(world: World) -> None:
    if world.rank == 0:
        objects.send(lambda x: x + 1, 1, group=world.group)
    else:
        assert objects.receive(0, group=world.group)(41) == 42
    with raises(ValueError, match="needs 2 objects"):
        objects.alltoall([1], group=world.group)
