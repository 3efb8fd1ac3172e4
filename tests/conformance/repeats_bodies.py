"""Operations with names that repeat. On one host their members agree in shared memory, without the coordinator; what a
caller sees is the same everywhere."""

from __future__ import annotations

import threading

import numpy as np

from ronde.comm.work import Work
from ronde.comm.world import World
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RoundEnded
from ronde.net.messages import LeaveReason
from tests.conformance.cases import on_ranks, raises

NUM_RUNS = 3
"""After so many runs alike, an operation is announced in shared memory, if there is one."""


def repeat(world: World, name: str, x: np.ndarray | None = None) -> None:
    for _ in range(NUM_RUNS):
        world.group.allreduce(np.ones(3) if x is None else x, name=name)


def check_shared(world: World, work: Work) -> None:
    """It was announced in shared memory, where there is one."""
    named = world.group._named_operations
    assert named is not None
    assert (work.shared_id >= 0) == (named.announced_channel is not None)


@on_ranks(1, 2, 3)
def repeated_names_may_come_in_any_order(world: World) -> None:
    random = np.random.default_rng(world.rank)
    for step in range(6):
        works = {}
        for i in random.permutation(100):
            x = np.full(1 + 7 * i, i + step, np.float32)
            if i % 10:
                works[i] = world.group.allreduce(x, name=f"gradient.{i}", wait=False)
        for i in random.permutation(100):
            expected = (i + step) * world.size
            if i % 10:
                assert (works[i].wait() == expected).all()
        for i in range(0, 100, 10):
            x = np.full(1 + 7 * i, i + step, np.float32)
            assert (world.group.allreduce(x, name=f"gradient.{i}") == (i + step) * world.size).all()
    check_shared(world, works[1])


@on_ranks(2, 3)
def every_kind_of_operation_may_repeat(world: World) -> None:
    rank, size = world.rank, world.size
    for step in range(5):
        works = [
            world.group.allgather(np.full((rank + 1, 2), step), name="gather", wait=False),
            world.group.alltoall(np.arange(size) + 10 * rank, splits=[1] * size, name="all to all", wait=False),
            world.group.broadcast(np.full(4, rank + step), root=1, name="broadcast", wait=False),
            world.group.reduce_scatter(np.full(2 * size, step), name="scatter", wait=False),
            world.group.allreduce([np.ones(2), np.full(3, float(step))], op="mean", name="list", wait=False),
            world.group.allreduce(np.ones(4, np.float32), op="adasum", name="adasum", wait=False),
            world.group.allgather([np.ones(1), np.ones((2, 2))], name="gather list", wait=False),
            world.group.barrier(name="barrier", wait=False),
        ]
        mine = works[rank:] + works[:rank]
        for work in mine:
            work.wait()
        assert works[0].wait().shape == (sum(range(1, size + 1)), 2) and (works[0].wait() == step).all()
        assert works[1].wait()[0].tolist() == [rank + 10 * other for other in range(size)]
        assert works[2].wait().tolist() == [1 + step] * 4
        assert works[3].wait().tolist() == [step * size] * 2
        assert [array.tolist() for array in works[4].wait()] == [[1, 1], [step] * 3]
        assert np.allclose(works[5].wait(), 1.0)
        assert [array.shape for array in works[6].wait()] == [(size,), (2 * size, 2)]


@on_ranks(2)
def rows_may_change_after_many_runs(world: World) -> None:
    for rows in (1, 1, 1, 1, 2, 2, 2, 2, 0, 3):
        mine = rows if world.rank == 0 else 1
        assert world.group.allgather(np.ones((mine, 2)), name="rows").shape == (rows + 1, 2)


@on_ranks(2, 3)
def a_request_that_all_members_change_runs_as_changed(world: World) -> None:
    for shape in ((3,), (3,), (3,), (4, 5), (4, 5), (4, 5), (4, 5), (), (3,), (3,), (3,)):
        result = world.group.allreduce(np.ones(shape), name="x")
        assert result.shape == shape and (result == world.size).all()


@on_ranks(2, 3)
def a_request_that_one_member_changes_is_a_mismatch_for_all(world: World) -> None:
    for _ in range(2):
        repeat(world, "x")
        waiting = world.group.allreduce(np.ones(4), name="y", wait=False)
        if world.rank == 0:
            world.group.barrier()  # the others have announced what they always have
            work = world.group.allreduce(np.ones(9), name="x", wait=False)
        else:
            work = world.group.allreduce(np.ones(3), name="x", wait=False)
            check_shared(world, work)
            world.group.barrier()
        with raises(Mismatch, match=r"allreduce 'x': ranks disagree on shape: rank 0 .*\(9,\)"):
            work.wait()
        assert waiting.wait().tolist() == [world.size] * 4
        assert world.group.allreduce(np.ones(3), name="x").tolist() == [world.size] * 3


@on_ranks(2)
def a_name_that_repeats_cannot_be_used_while_it_is_under_way(world: World) -> None:
    repeat(world, "w")
    if world.rank == 0:
        work = world.group.allreduce(np.ones(3), name="w", wait=False)
        for wait in (True, False):
            with raises(ValueError, match="'w' of group 0 is still under way"):
                world.group.allreduce(np.ones(3), name="w", wait=wait)
        world.group.barrier()
        assert work.wait().tolist() == [2, 2, 2]
    else:
        world.group.barrier()
        world.group.allreduce(np.ones(3), name="w")
    assert world.group.allreduce(np.ones(3), name="w").tolist() == [2, 2, 2]


@on_ranks(2, 3)
def threads_wait_for_different_names(world: World) -> None:
    wrong: list[object] = []

    def work(name: str, value: int) -> None:
        for step in range(20):
            result = world.group.allreduce(np.full(5, value + step), name=name)
            if (result != (value + step) * world.size).any():
                wrong.append((name, step, result))

    threads = [threading.Thread(target=work, args=(f"thread {i}", i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@on_ranks(2)
def a_wait_for_a_name_that_repeats_says_who_is_missing_and_goes_on(world: World) -> None:
    repeat(world, "late")
    if world.rank == 0:
        work = world.group.allreduce(np.ones(3), name="late", wait=False)
        check_shared(world, work)
        for _ in range(5):  # on a busy machine the coordinator's answer to who is missing may come too late
            with raises(OperationTimeout, match="allreduce 'late' of group 0 did not start within 1 s") as words:
                work.wait(1.0)
            if words[0].endswith("; it waits for rank 1"):
                break
        else:
            raise AssertionError(f"nobody was named: {words}")
        assert not work.done()
        world.group.barrier()
        assert work.wait().tolist() == [2, 2, 2]
        assert work.done()
    else:
        world.group.barrier()
        world.group.allreduce(np.ones(3), name="late")


@on_ranks(2)
def what_nobody_waits_for_runs_nevertheless(world: World) -> None:
    repeat(world, "forgotten", np.ones(3, int))
    for step in range(1, 4):
        out = np.zeros(3, int)
        work = world.group.allreduce(np.full(3, step), name="forgotten", out=out, wait=False)
        while not world.group.allreduce(np.array([(out == 2 * step).all()]), op="min")[0]:
            pass
        work.wait()  # the result is there a moment before the name is free again


@on_ranks(2, 3)
def a_rank_that_joins_gives_zeros_to_names_that_repeat(world: World) -> None:
    last = world.size - 1
    for _ in range(2):
        for name in ("a", "b"):
            repeat(world, name)
        pending = world.group.allreduce(np.ones(3), name="b", wait=False)
        if world.rank == last:
            for _ in range(4):
                assert world.group.allreduce(np.ones(3), name="a").tolist() == [1, 1, 1]
        assert pending.wait().tolist() == [world.size] * 3
        assert world.group.join() == last
        assert world.group.allreduce(np.ones(3), name="a").tolist() == [world.size] * 3


@on_ranks(3)
def names_of_different_groups_are_different_when_they_repeat(world: World) -> None:
    groups = [world.add_group(ranks) for ranks in ([0, 1], [1, 2], [0, 1, 2])]
    mine = [group for group in (groups if world.rank % 2 else reversed(groups)) if group.included]
    for _ in range(5):
        works = [group.allreduce(np.ones(2), name="w", wait=False) for group in mine]
        assert [work.wait().tolist() for work in works] == [[group.size] * 2 for group in mine]
    for group in groups:
        world.remove_group(group)


@on_ranks(2)
def a_name_under_way_ends_when_its_group_is_removed(world: World) -> None:
    group = world.add_group([0, 1])
    for _ in range(NUM_RUNS):
        group.allreduce(np.ones(3), name="w")
    if world.rank == 0:
        work = group.allreduce(np.ones(3), name="w", wait=False)
    world.remove_group(group)
    if world.rank == 0:
        with raises((RoundEnded, Mismatch), match="group .* was removed"):
            work.wait()


@on_ranks(3, spoils=True)
def a_lost_member_is_named_to_those_who_wait_for_a_name_that_repeats(world: World) -> None:
    for name in ("a", "b"):
        repeat(world, name)
    if world.rank == 2:
        for rank in (0, 1):
            world.group.receive(np.ones(1), rank)
        world.close(LeaveReason.FAILED, "out of coffee")
        return
    work = world.group.allreduce(np.ones(3), name="a", wait=False)
    world.group.send(np.ones(1), 2)
    with raises(PeerLost, match=f"rank {world.rank} lost rank 2.*out of coffee"):
        world.group.allreduce(np.ones(3), name="b")
    with raises(PeerLost, match=f"rank {world.rank} lost rank 2.*out of coffee"):
        work.wait()
    with raises(PeerLost, match="lost rank 2"):
        world.group.allreduce(np.ones(3), name="a")


@on_ranks(2, spoils=True)
def what_repeats_and_waits_for_a_member_that_has_left_ends(world: World) -> None:
    repeat(world, "x")
    if world.rank == 0:
        world.close()
        return
    for wait in (True, False):
        with raises(RoundEnded):
            world.group.allreduce(np.ones(3), name="x", wait=wait).wait()


@on_ranks(2, spoils=True)
def closing_ends_the_waits_of_other_threads_for_names_that_repeat(world: World) -> None:
    for name in ("x", "y"):
        repeat(world, name)
    if world.rank == 1:
        with raises(RoundEnded):
            world.group.barrier(name="until the other has left")
        return
    ended: list[str] = []
    started = threading.Barrier(3)

    def wait(name: str) -> None:
        work = world.group.allreduce(np.ones(3), name=name, wait=False)
        started.wait()
        try:
            work.wait()
        except RoundEnded as error:
            ended.append(str(error))

    threads = [threading.Thread(target=wait, args=(name,)) for name in ("x", "y")]
    for thread in threads:
        thread.start()
    started.wait()
    world.close()
    for thread in threads:
        thread.join(10)
    assert len(ended) == 2, ended
