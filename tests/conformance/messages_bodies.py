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
    with raises(ValueError, match="must be a member of group 0"):
        world.group.send(np.ones(1), None)  # type: ignore[arg-type]
    for tag in (-1, 2**31, 1.5, "1"):
        with raises(ValueError, match="tag must be a whole number from 0 to 2147483647"):
            world.group.send(np.ones(1), 1 - world.rank, tag=tag)  # type: ignore[arg-type]


@on_ranks(1)
def nobody_sends_to_a_group_of_one(world: World) -> None:
    with raises(ValueError, match="nobody to receive from"):
        world.group.receive(np.ones(1))


@on_ranks(2, 3)
def all_may_send_first_whatever_the_size(world: World) -> None:
    others = [rank for rank in range(world.size) if rank != world.rank]
    for count in (1, 1000, 100_000, 4_000_000):
        for other in others:
            world.group.send(np.full(count, world.rank), other)
        world.group.barrier()  # nobody has asked for any of them
        for other in others:
            assert (world.group.receive(np.empty(count, np.int64), other) == other).all()


@on_ranks(2)
def a_sent_array_may_be_changed_at_once(world: World) -> None:
    if world.rank == 0:
        x = np.zeros(100_000)
        for step in range(5):
            x[:] = step
            world.group.send(x, 1)
    world.group.barrier()
    if world.rank == 1:
        for step in range(5):
            assert (world.group.receive(np.empty(100_000), 0) == step).all()


@on_ranks(2)
def messages_meet_by_their_tag(world: World) -> None:
    if world.rank == 0:
        for tag in (3, 2**31 - 1, 0, 3):
            world.group.send(np.full(10, tag), 1, tag=tag)
        large = world.group.send(np.full(1_000_000, 9), 1, tag=9, wait=False)
        world.group.send(np.full(10, 8), 1, tag=8)
        large.wait()
    else:
        for tag in (0, 8, 3, 2**31 - 1, 3):  # a large one that nobody asked for holds up no other
            assert (world.group.receive(np.empty(10, np.int64), 0, tag=tag) == tag).all()
        assert (world.group.receive(np.empty(1_000_000, np.int64), 0, tag=9) == 9).all()
    if world.rank == 0:
        world.group.send(np.ones(3), 1, tag=4)
        return
    with raises(
        Mismatch, match=r"send float64\[3\] to rank 1 with tag 4; rank 1: receive int64\[3\] from rank 0 with tag"
    ):
        world.group.receive(np.ones(3, np.int64), 0, tag=4)


@on_ranks(3)
def a_receive_from_any_rank_says_who_sent_it(world: World) -> None:
    if world.rank:
        for index in range(10):
            world.group.send(np.array([world.rank, index]), 0, tag=world.rank)
            world.group.send(np.array([world.rank, index]), 0)
        return
    following = [0, 0, 0]
    works = [world.group.receive(np.empty(2, np.int64), wait=False) for _ in range(10)]
    for work in works:
        out, source = work.wait()
        assert out.tolist() == [source, following[source]]
        following[source] += 1
    for _ in range(10):
        out, source = world.group.receive(np.empty(2, np.int64), None)
        assert out.tolist() == [source, following[source]]
        following[source] += 1
    assert following == [0, 10, 10]
    for rank in (2, 1):
        for index in range(10):
            assert world.group.receive(np.empty(2, np.int64), tag=rank)[0].tolist() == [rank, index]


@on_ranks(2, 3)
def groups_do_not_get_each_others_messages(world: World) -> None:
    pair = world.add_group([0, 1])
    if world.rank == 0:
        world.group.send(np.full(1, 1.0), 1)
        pair.send(np.full(1, 2.0), 1)
    elif world.rank == 1:
        assert pair.receive(np.empty(1), 0).tolist() == [2]
        assert world.group.receive(np.empty(1))[0].tolist() == [1]
    world.remove_group(pair)


@on_ranks(2)
def what_is_not_contiguous_is_sent_and_received(world: World) -> None:
    if world.rank == 0:
        world.group.send(np.arange(12).reshape(3, 4).T, 1)
    else:
        out = np.zeros((4, 6), np.int64)
        assert world.group.receive(out[:, ::2])[1] == 0
        assert (out[:, ::2] == np.arange(12).reshape(3, 4).T).all() and not out[:, 1::2].any()


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
