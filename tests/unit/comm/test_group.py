"""Groups and plans of one rank and of few: what a caller gets wrong, what is recorded, what the stall watch sees.

What collectives compute is in tests/conformance.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.joining import join_round
from ronde.comm.plan import Bucket, Plan
from ronde.comm.world import World
from ronde.errors import Mismatch, RoundEnded
from ronde.observe.events import StallReported
from ronde.settings import Settings
from tests.conformance.ranks import run_threads


def test_one_rank_can_do_everything_alone(alone: World) -> None:
    x = np.arange(6.0).reshape(3, 2)
    for name in (None, "x"):
        assert np.array_equal(alone.group.allreduce(x, name=name), x)
        assert np.array_equal(alone.group.allreduce(x, op="mean", postscale=2.0, name=name), 2 * x)
        assert np.array_equal(alone.group.allgather(x, name=name), x)
        assert np.array_equal(alone.group.broadcast(x, name=name), x)
        assert np.array_equal(alone.group.reduce_scatter(x, name=name), x)
        assert np.array_equal(alone.group.alltoall(x, name=name)[0], x)
        alone.group.barrier(name=name)
    assert alone.group.join() == 0
    group = alone.add_group([0])
    assert group.allreduce(x, name="x", wait=False).wait().shape == x.shape
    alone.remove_group(group)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda g, x: g.allreduce(x, op="plus"), ValueError, "op must be one of"),
        (lambda g, x: g.allreduce([]), ValueError, "the list of arrays is empty"),
        (lambda g, x: g.allreduce([x, x.astype(np.int32)]), TypeError, "one dtype, got float64, int32"),
        (lambda g, x: g.allreduce([x, x], out=[x]), ValueError, "out must be a list of 2 arrays"),
        (lambda g, x: g.allreduce([x, x], out=x), ValueError, "out must be a list of 2 arrays"),
        (lambda g, x: g.allreduce(x, name=""), TypeError, "name must be a text that is not empty"),
        (lambda g, x: g.allreduce(x, name=3), TypeError, "name must be a text"),
        (lambda g, x: g.broadcast(x, root=1), ValueError, r"root must be a member of group 0 \(rank 0\), got 1"),
        (lambda g, x: g.broadcast([x]), TypeError, "broadcast takes one array, got a list"),
        (lambda g, x: g.reduce_scatter(x.sum()), ValueError, "needs an array of at least 1 dimension, got a scalar"),
        (lambda g, x: g.alltoall(x.sum()), ValueError, "got a scalar"),
        (lambda g, x: g.alltoall(x, splits=[1, 2]), ValueError, "splits must be 1 whole numbers from 0"),
        (lambda g, x: g.alltoall(x, splits=[-1]), ValueError, "splits must be 1 whole numbers from 0"),
        (lambda g, x: g.alltoall(x, splits=[1.5]), ValueError, "splits must be 1 whole numbers from 0"),
        (lambda g, x: g.alltoall(x, splits=[9]), ValueError, "ask for 9 rows of an array with 3"),
        (lambda g, x: g.send(x, 0), ValueError, "this very rank"),
        (lambda g, x: g.receive(b"abc", 0), ValueError, "read-only"),
    ],
)
def test_a_callers_mistake_is_told_at_once(
    alone: World, call: Callable[[Group, Array], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(alone.group, np.ones(3))


def test_rows_without_equal_shares_need_splits() -> None:
    def body(world: World) -> None:
        with pytest.raises(ValueError, match="3 rows are no equal shares for 2 members; give splits"):
            world.group.alltoall(np.ones(3))

    run_threads(2, body)


def test_a_read_only_array_can_be_given_but_not_taken(alone: World) -> None:
    x = np.ones(3)
    x.flags.writeable = False
    for _ in range(2):  # the second call takes the quick way
        assert alone.group.allreduce(x).tolist() == [1, 1, 1]
        with pytest.raises(ValueError, match="read-only"):
            alone.group.allreduce(x, out=x)


def test_the_quick_way_gives_the_same_as_the_first(alone: World) -> None:
    for x in (np.ones((2, 3), np.float32), np.ones((2, 3), np.float32), np.ones((3, 2), np.float32).T):
        for name in (None, "n"):
            result = alone.group.allreduce(x, name=name)
            assert result is not x and result.shape == (2, 3) and (result == 1).all()
            assert alone.group.allreduce(x, out=x, name=name) is x
            assert alone.group.allreduce(x, wait=False).wait().shape == (2, 3)


def test_numbers_of_operations_and_bytes_are_recorded(alone: World) -> None:
    x = np.ones(10, np.float32)
    for name in (None, None, "n"):
        alone.group.allreduce(x, name=name)
    sums = alone.recorder.metrics().of(0, "allreduce")
    assert (sums.operations, sums.bytes) == (3, 120)


def test_a_world_that_was_closed_says_so(alone: World) -> None:
    group = alone.group
    group.allreduce(np.ones(3))
    alone.close()
    alone.close()
    for name in (None, "x"):
        with pytest.raises(RoundEnded, match="shutdown"):
            group.allreduce(np.ones(3), name=name)
    with pytest.raises(RoundEnded):
        group.barrier()


def test_groups_of_the_beginning_are_there() -> None:
    def body(world: World) -> None:
        pair, single = world.groups[1:]
        assert (pair.id, pair.ranks, single.id, single.ranks) == (1, (0, 2), 2, (1,))
        if pair.included:
            assert pair.allreduce(np.ones(1), name="x").tolist() == [2]

    run_threads(3, body, groups=((0, 2), (1,)))


def test_a_member_that_waits_too_long_is_reported_with_who_is_missing() -> None:
    def body(world: World) -> None:
        if world.rank == 0:
            work = world.group.allreduce(np.ones(3), wait=False)
            named = world.group.allreduce(np.ones(3), name="n", wait=False)
            for missing in (work, named):
                while not any("for rank 1" in report for report in reports(world)) and not missing.done():
                    world.control_thread.waits.condition.acquire()
                    world.control_thread.waits.condition.wait(0.01)
                    world.control_thread.waits.condition.release()
            world.group.send(np.ones(1), 1)
            work.wait()
            named.wait()
        else:
            world.group.receive(np.ones(1), 0)
            world.group.allreduce(np.ones(3))
            world.group.allreduce(np.ones(3), name="n")

    def reports(world: World) -> list[str]:
        return [event.report for event in world.recorder.events() if isinstance(event, StallReported)]

    run_threads(2, body, settings=Settings(stall_s=0.2, operation_s=20.0))


def test_thousands_of_names_cost_in_proportion() -> None:
    def body(world: World) -> None:
        x = np.ones(1)
        works = [world.group.allreduce(x, name=str(index), wait=False) for index in range(10_000)]
        for work in works:
            work.wait()

    run_threads(1, body)


def test_ranks_that_join_with_different_groups_disagree() -> None:
    def body(world: World) -> None:
        with pytest.raises(Mismatch, match="disagree on the change of groups"):
            world.add_group([world.rank])

    run_threads(2, body)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_buckets_begin_at_cache_lines_of_one_memory(alone: World) -> None:
    with Plan([Bucket(1), Bucket(17), Bucket(3, "float64")], alone.group) as plan:
        starts = [array.ctypes.data for array in plan.arrays]
        assert [start - starts[0] for start in starts] == [0, 64, 192]


def test_starting_a_bucket_makes_nothing_but_a_work(alone: World) -> None:
    with Plan([Bucket(4)], alone.group) as plan:
        plan.arrays[0][:] = 3.0
        assert plan.start(0).wait() is plan.arrays[0]
        assert plan.run(0) is plan.arrays[0]
        assert plan.arrays[0].tolist() == [3.0] * 4
    sums = alone.recorder.metrics().of(0, "bucket")
    assert (sums.operations, sums.bytes) == (2, 32)


@pytest.mark.parametrize(
    ("bucket", "words"),
    [
        (lambda: Bucket(0), "count must be a whole number from 1, got 0"),
        (lambda: Bucket(1.5), "count must be a whole number"),  # type: ignore[arg-type]  # the mistake
        (lambda: Bucket(1, "complex64", name="b"), "bucket 'b': dtype must be one of uint8.*got 'complex64'"),
    ],
)
def test_a_bucket_is_checked_where_it_is_made(bucket: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bucket()  # type: ignore[operator]  # a lambda of the table


def test_a_plan_is_checked_where_it_is_made(alone: World) -> None:
    with pytest.raises(ValueError, match="at least one bucket"):
        Plan([], alone.group)
    with pytest.raises(ValueError, match="op must be one of"):
        Plan([Bucket(3, op="average")], alone.group)
    with pytest.raises(ValueError, match="bool has no mean"):
        Plan([Bucket(3, "bool")], alone.group)


def test_a_closed_plan_starts_nothing(alone: World) -> None:
    plan = Plan([Bucket(4)], alone.group)
    plan.close()
    plan.close()
    with pytest.raises(RoundEnded):
        plan.run(0)
    assert alone.group.allreduce(np.ones(1)).tolist() == [1]


def test_the_end_of_the_world_closes_plans() -> None:
    world = World(join_round(Settings(), (), 0))
    plan = Plan([Bucket(4)], world.group)
    world.close()
    with pytest.raises(RoundEnded):
        plan.start(0)
    plan.close()
