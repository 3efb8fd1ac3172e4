"""What becomes of the others when a member is late, gives up, or leaves. Nobody hangs, and all get the reason."""

from __future__ import annotations

import threading

import numpy as np

from ronde.comm.world import World
from ronde.errors import OperationTimeout, PeerLost, RoundEnded
from ronde.observe.events import PeerGone
from tests.conformance.cases import on_ranks, raises


@on_ranks(2)
def a_wait_may_end_before_the_work(world: World) -> None:
    for name in (None, "late"):
        if world.rank == 0:
            work = world.group.allreduce(np.ones(3), name=name, wait=False)
            with raises(OperationTimeout):
                work.wait(0.05)
            assert not work.done()
            with raises(ValueError, match="under way"):
                work.result()
            world.group.send(np.ones(1), 1)
            assert work.wait().tolist() == [2, 2, 2]
        else:
            world.group.receive(np.ones(1), 0)
            world.group.allreduce(np.ones(3), name=name)


@on_ranks(2)
def a_wait_for_a_name_says_who_is_missing(world: World) -> None:
    if world.rank == 0:
        work = world.group.allreduce(np.ones(3), name="late", wait=False)
        for _ in range(5):  # on a busy machine the answer to who is missing may come too late
            with raises(OperationTimeout, match="allreduce 'late' .* within 1 s") as words:
                work.wait(1.0)
            if words[0].endswith("; it waits for rank 1"):
                break
        else:
            raise AssertionError(f"nobody was named: {words}")
        world.group.barrier()
        work.wait()
    else:
        world.group.barrier()
        world.group.allreduce(np.ones(3), name="late")


@on_ranks(3, spoils=True)
def a_member_that_gives_up_is_named_to_all_who_wait(world: World) -> None:
    if world.rank == 2:
        for rank in (0, 1):
            world.group.receive(np.ones(1), rank)
        world.close(orderly=False, why="out of coffee")
        return
    named = world.group.allreduce(np.ones(3), name="named", wait=False)
    unnamed = world.group.allreduce(np.ones(3), wait=False)
    world.group.send(np.ones(1), 2)
    for work in (unnamed, named, unnamed):
        with raises(PeerLost, match=f"rank {world.rank} lost rank 2.*out of coffee"):
            work.wait()
    for name in (None, "later"):
        with raises(PeerLost, match="lost rank 2"):
            world.group.allreduce(np.ones(3), name=name)
    with raises(PeerLost, match="lost rank 2"):
        world.add_group([0, 1])
    assert any(isinstance(event, PeerGone) and event.peer == 2 for event in world.recorder.events())


@on_ranks(3, spoils=True)
def groups_without_the_lost_member_go_on(world: World) -> None:
    group = world.add_group([0, 1])
    if world.rank == 2:
        world.close(orderly=False, why="gone")
        return
    with raises(PeerLost):
        world.group.barrier(name="x")
    for name in (None, "x"):
        assert group.allreduce(np.ones(2), name=name).tolist() == [2, 2]


def _leave_or_fail(world: World, orderly: bool) -> None:
    world.close() if orderly else world.close(orderly=False, why="gone")


def _rest_goes_on(world: World, orderly: bool) -> None:
    """Rank 2 is gone; what does not involve it goes on, what does involve it ends, and the error names it."""
    pair = world.add_group([0, 1])
    other = 1 - world.rank
    if world.rank == 2:
        world.group.send(np.full(2, 7.0), 0, tag=5)
        _leave_or_fail(world, orderly)
        return
    received = world.group.receive(np.zeros(3), other, wait=False)
    received_from_any = world.group.receive(np.zeros(3), tag=1, wait=False)
    waits_for_lost = world.group.receive(np.zeros(3), 2, wait=False)
    with raises(PeerLost, match="lost rank 2"):
        world.group.allreduce(np.ones(2))
    with raises(PeerLost, match="lost rank 2"):
        world.group.barrier(name="x")
    with raises(PeerLost, match="lost rank 2"):
        waits_for_lost.wait()
    with raises(PeerLost, match="lost rank 2"):
        world.group.send(np.ones(3), 2)
    if world.rank == 0:  # what it had sent before can still be received
        assert world.group.receive(np.zeros(2), 2, tag=5).tolist() == [7, 7]
    with raises(PeerLost, match="lost rank 2"):
        world.group.receive(np.zeros(2), 2, tag=5)
    for tag in (0, 1):
        world.group.send(np.full(3, float(world.rank)), other, tag=tag)
    assert received.wait().tolist() == [other] * 3
    assert received_from_any.wait()[1] == other
    for count in (1, 500_000):  # between the two as before, small and large
        sent = np.full(count, world.rank)
        world.group.send(sent, other)
        assert (world.group.receive(np.empty_like(sent), other) == other).all()
    for name in (None, "x"):
        assert pair.allreduce(np.ones(2), name=name).tolist() == [2, 2]
    pair.send(np.ones(1), other)
    pair.receive(np.ones(1), other)


@on_ranks(3, spoils=True)
def what_does_not_involve_a_rank_that_leaves_goes_on(world: World) -> None:
    _rest_goes_on(world, orderly=True)


@on_ranks(3, spoils=True)
def what_does_not_involve_a_lost_rank_goes_on(world: World) -> None:
    _rest_goes_on(world, orderly=False)


@on_ranks(3, spoils=True)
def a_receive_from_any_ends_when_nobody_is_left(world: World) -> None:
    if world.rank:
        world.group.send(np.full(1, world.rank), 0)
        world.close()
        return
    sources = [world.group.receive(np.zeros(1, np.int64))[1] for _ in range(2)]
    assert sorted(sources) == [1, 2]
    with raises(PeerLost, match="rank 0 lost rank [12]"):
        world.group.receive(np.zeros(1, np.int64))


@on_ranks(2, spoils=True)
def a_rank_that_leaves_has_delivered_what_it_sent(world: World) -> None:
    if world.rank == 0:
        for index in range(3):
            world.group.send(np.full(3_000_000, index), 1, wait=False)
        world.close()
        return
    with raises(RoundEnded):
        world.group.barrier(name="until the other has left")
    for index in range(3):
        assert (world.group.receive(np.empty(3_000_000, np.int64), 0) == index).all()


@on_ranks(2, spoils=True)
def a_message_that_is_late_ends_alone(world: World) -> None:
    other = 1 - world.rank
    world.group.message_channel._operation_timeout_s = 0.1
    if world.rank == 0:
        with raises(OperationTimeout, match=r"receive float64\[3\] from rank 1.*rank 1"):
            world.group.receive(np.ones(3), 1)
        with raises(OperationTimeout, match="from any rank"):
            world.group.receive(np.ones(3))
        work = world.group.receive(np.ones(3), 1, wait=False)
        with raises(OperationTimeout):
            work.wait(60.0)
    world.group.message_channel._operation_timeout_s = world.group.operation_timeout_s
    world.group.barrier()
    world.group.send(np.full(3, world.rank), other)
    assert (world.group.receive(np.empty(3, np.int64), other) == other).all()
    world.group.barrier()


@on_ranks(2, spoils=True)
def inputs_keep_their_values_after_a_failure(world: World) -> None:
    if world.rank == 1:
        world.group.receive(np.ones(1), 0)
        world.close(orderly=False, why="gone")
        return
    inputs = [np.arange(1000.0) for _ in range(6)]
    group, out = world.group, np.empty(1000)
    works = [
        group.allreduce(inputs[0], wait=False),
        group.allreduce(inputs[1], out=out, wait=False),
        group.broadcast(inputs[2], root=0, out=out, wait=False),
        group.reduce_scatter(inputs[3], wait=False),
        group.allreduce(inputs[4], name="x", wait=False),
        group.allreduce([inputs[5]], wait=False),
    ]
    group.send(np.ones(1), 1)
    for work in works:
        with raises(PeerLost):
            work.wait()
    for x in inputs:
        assert np.array_equal(x, np.arange(1000.0))


@on_ranks(2, spoils=True)
def what_waits_for_a_member_that_has_left_ends(world: World) -> None:
    if world.rank == 0:
        world.close()
        return
    with raises(RoundEnded):
        world.group.allreduce(np.ones(2), name="x")
    with raises(RoundEnded):
        world.group.allreduce(np.ones(2))


@on_ranks(2, spoils=True)
def closing_ends_the_waits_of_other_threads(world: World) -> None:
    if world.rank == 1:
        with raises(RoundEnded):
            world.group.barrier(name="until the other has left")
        return
    ended: list[type[BaseException]] = []

    def wait(name: str | None) -> None:
        try:
            world.group.allreduce(np.ones(2), name=name)
        except RoundEnded as error:
            ended.append(type(error))

    threads = [threading.Thread(target=wait, args=(name,)) for name in (None, "x")]
    for thread in threads:
        thread.start()
    world.close()
    for thread in threads:
        thread.join(10)
    assert len(ended) == 2
    with raises(RoundEnded):
        world.group.barrier()
    world.close()


@on_ranks(2, spoils=True)
def a_late_member_is_named_when_time_is_over(world: World) -> None:
    world.group.ordered_channel._operation_timeout_s = 0.2
    if world.rank == 0:
        with raises(OperationTimeout, match=r"allreduce sum float64\[3\].*rank 1"):
            world.group.allreduce(np.ones(3))
    world.group.barrier(name="time is over")
    with raises((RoundEnded, OperationTimeout)):  # the channel is over for all, in whatever words
        world.group.allreduce(np.ones(3))
