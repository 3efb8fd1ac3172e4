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
