"""What becomes of the others when a member is late, gives up, or leaves. Nobody hangs, and all get the reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from ronde.comm.buffers import Array
from ronde.comm.plan import Bucket, Plan
from ronde.comm.world import World
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RoundEnded
from ronde.net.messages import LeaveReason
from ronde.observe.events import PeerGone
from ronde.types import Deadline
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
        world.close(LeaveReason.FAILED, "out of coffee")
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
        world.close(LeaveReason.FAILED, "gone")
        return
    with raises(PeerLost):
        world.group.barrier(name="x")
    for name in (None, "x"):
        assert group.allreduce(np.ones(2), name=name).tolist() == [2, 2]


def _leave_or_fail(world: World, orderly: bool) -> None:
    world.close() if orderly else world.close(LeaveReason.FAILED, "gone")


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


# --- what arrays hold after an error: the table in docs/concepts/operations.md ---------------------------------------


class Watched:
    """Arrays that hold 0, 1, 2 … and must keep that."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []

    def new(self, count: int = 1000) -> Array:
        self._arrays.append(np.arange(float(count)))
        return self._arrays[-1]

    def check(self) -> None:
        for index, array in enumerate(self._arrays):
            assert np.array_equal(array, np.arange(float(array.size))), f"array {index} has changed"


@on_ranks(2, 3)
def after_a_mistake_every_array_holds_what_it_held(world: World) -> None:
    for name in (None, "x"):
        for count in (6, 300_000):
            _make_mistakes(world, name, count)
        assert world.group.allreduce(np.ones(2), name=name).tolist() == [world.size] * 2


def _make_mistakes(world: World, name: str | None, count: int) -> None:
    """The last rank asks for another size than the others."""
    group, size, is_odd, watched = world.group, world.size, world.rank == world.size - 1, Watched()
    new, x = watched.new, watched.new((count + is_odd) * size)
    rows = watched.new(count * size).reshape(size, -1)[:, : count - is_odd]
    asks: list[Callable[[], object]] = [
        lambda: group.allreduce(x, name=name),
        lambda: group.allreduce(x, out=x, name=name),
        lambda: group.allreduce(x, out=new(x.size), name=name),
        lambda: group.allreduce([x, x], out=[new(x.size), new(x.size)], name=name),
        lambda: group.broadcast(x, out=x, root=0, name=name),
        lambda: group.broadcast(x, out=new(x.size), root=size - 1, name=name),
        lambda: group.reduce(x, out=new(x.size), root=0, name=name),
        lambda: group.reduce(x, out=x, root=size - 1, name=name),
        lambda: group.reduce_scatter(x, name=name),
        lambda: group.allgather(rows, name=name),
        lambda: group.gather(rows, root=0, name=name),
        lambda: group.alltoall(rows, name=name),
        lambda: group.scatter(rows, root=0, name=name),
    ]
    for ask in asks:
        with raises(Mismatch):
            ask()
        watched.check()
    with raises(ValueError, match="out is float64"):
        group.allreduce(x, out=new(x.size + 1), name=name)
    watched.check()


@on_ranks(2)
def after_a_message_of_another_size_both_arrays_hold_what_they_held(world: World) -> None:
    watched = Watched()
    for count in (3, 300_000):
        if world.rank == 0:
            world.group.send(watched.new(count), 1)
        else:
            with raises(Mismatch):
                world.group.receive(watched.new(count + 1), 0)
        watched.check()
        world.group.barrier()


@on_ranks(2, spoils=True)
def inputs_keep_their_values_after_a_failure(world: World) -> None:
    if world.rank == 1:
        world.group.receive(np.ones(1), 0)
        world.close(LeaveReason.FAILED, "gone")
        return
    group, watched, out = world.group, Watched(), np.empty(1000)
    new = watched.new
    in_place = new()
    works = [
        group.allreduce(new(), wait=False),
        group.allreduce(new(), out=out, wait=False),
        group.broadcast(new(), root=0, out=out, wait=False),
        group.broadcast(in_place, root=0, out=in_place, wait=False),  # on the root it is only read
        group.reduce(new(), root=0, out=out, wait=False),
        group.reduce(new(), root=1, out=new(), wait=False),  # on others than the root, out is not used
        group.reduce_scatter(new(), wait=False),
        group.allreduce([new(), new()], wait=False),
        group.allreduce(new(), name="x", wait=False),
        group.reduce(new(), root=1, out=new(), name="y", wait=False),
        group.allgather(new(), name="z", wait=False),
        group.alltoall(new(), name="u", wait=False),
        group.gather(new(), root=1, name="v", wait=False),
    ]
    group.send(np.ones(1), 1)
    for work in works:
        with raises(PeerLost):
            work.wait()
    for ask in (group.allgather, group.alltoall, group.gather, group.scatter, group.reduce_scatter):
        with raises(PeerLost):
            ask(new())
    with raises(PeerLost):
        group.send(new(), 1)
    watched.check()


@on_ranks(2, 3, spoils=True)
def after_a_failure_arrays_are_not_used_any_more(world: World) -> None:
    group, rank, last = world.group, world.rank, world.size - 1
    group.ordered_channel._operation_timeout_s = 0.2
    if rank == last:
        group.barrier(name="time is over")
        with raises((RoundEnded, OperationTimeout)):
            group.allreduce(np.full(300_000, 7.0))  # the late member has come, and brings its numbers
        group.barrier(name="all have failed")
        return
    watched = Watched()
    x, out = watched.new(300_000), np.zeros(300_000)
    with raises((RoundEnded, OperationTimeout)):
        group.allreduce(x, out=out)
    kept = out.copy()
    group.barrier(name="time is over")
    group.barrier(name="all have failed")
    watched.check()
    if world.joined_round.backend.name != "mpi":  # MPI may still write there
        assert np.array_equal(out, kept)


@on_ranks(2)
def an_operation_with_a_name_that_is_late_is_still_under_way(world: World) -> None:
    """Its arrays are in use until it has ended."""
    group = world.group
    operation_s = group.operation_timeout_s
    for step in range(6):  # from the third time on in shared memory, where that is possible
        if world.rank == 0:
            x, out = np.ones(3), np.zeros(3)
            group.operation_timeout_s = 0.05
            deadline = Deadline(operation_s)
            while True:
                try:
                    work = group.allreduce(x, out=out, name="late", wait=bool(step % 2))
                    work.wait()
                except OperationTimeout:
                    break
                except ValueError:  # a result is there a moment before its name is free again
                    assert not deadline.expired
            group.operation_timeout_s = operation_s
            with raises(ValueError, match="still under way on this rank"):
                group.allreduce(x, out=out, name="late")
            group.barrier()
            while out.tolist() != [2] * 3:
                assert not deadline.expired, "it has never run"
                time.sleep(0.001)
        else:
            group.barrier()
            group.allreduce(np.ones(3), name="late")


@on_ranks(2, spoils=True)
def a_receive_that_ran_out_of_time_takes_nothing_later_either(world: World) -> None:
    group = world.group
    for count in (3, 300_000):
        if world.rank == 0:
            watched = Watched()
            group.message_channel._operation_timeout_s = 0.1
            for source in (1, None):
                with raises(OperationTimeout):
                    group.receive(watched.new(count), source)
            group.message_channel._operation_timeout_s = group.operation_timeout_s
            group.barrier()
            assert (group.receive(np.zeros(count), 1) == 7).all()
            watched.check()
        else:
            group.barrier()
            group.send(np.full(count, 7.0), 0)
        group.barrier()


@on_ranks(2, spoils=True)
def a_bucket_that_failed_holds_anything_but_others_and_what_was_read_stay(world: World) -> None:
    buckets = [Bucket(1000, "float64", "sum"), Bucket(1000, "float64", "sum")]
    plan = Plan(buckets, world.group)
    plan.arrays[0][:] = 1
    plan.arrays[1][:] = world.rank + 5
    assert (plan.run(0) == 2).all()
    world.group.barrier()
    if world.rank == 1:
        world.close(LeaveReason.FAILED, "gone")
        return
    with raises(PeerLost):
        plan.run(0)
    assert (plan.arrays[1] == 5).all(), "a bucket that was not started keeps its numbers"
    assert (plan.spare_arrays[0] == 0).all()


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
