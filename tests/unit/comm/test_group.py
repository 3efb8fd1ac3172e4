"""Groups and plans of one rank and of few: what a caller gets wrong, and what is recorded.

What collectives compute is in tests/conformance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest

from ronde.comm.buffers import Array
from ronde.comm.call import Call, Signature
from ronde.comm.group import Group
from ronde.comm.plan import Bucket, Plan
from ronde.comm.world import World
from ronde.errors import PeerLost, RoundEnded
from ronde.observe.events import StallReported
from ronde.settings import Settings
from tests.conformance.ranks import run_threads
from tests.unit.comm.thread_ranks import run_ranks


def test_one_rank_can_do_everything_alone(alone: World) -> None:
    x = np.arange(6.0).reshape(3, 2)
    for name in (None, "x"):
        assert np.array_equal(alone.group.allreduce(x, name=name), x)
        assert np.array_equal(alone.group.allreduce(x, op="mean", postscale=2.0, name=name), 2 * x)
        assert np.array_equal(alone.group.allgather(x, name=name), x)
        assert np.array_equal(alone.group.broadcast(x, name=name), x)
        assert np.array_equal(alone.group.reduce_scatter(x, name=name), x)
        assert np.array_equal(alone.group.alltoall(x, name=name)[0], x)
        assert np.array_equal(alone.group.reduce(x, prescale=2.0, name=name), 2 * x)
        assert np.array_equal(alone.group.gather(x, name=name), x)
        assert np.array_equal(alone.group.scatter(x, name=name), x)
        assert np.array_equal(alone.group.scatter(x, splits=[2], name=name), x[:2])
        assert [each.tolist() for each in alone.group.reduce_scatter([x, x[0]], name=name)] == [x.tolist(), [0, 1]]
        mean = alone.group.allreduce(np.array([2**64 - 1], np.uint64), op="mean", name=name)
        assert mean.tolist() == [2**64 - 1]
        assert alone.group.reduce(np.array([6]), op="bit_xor", name=name).tolist() == [6]
        alone.group.barrier(name=name)
    assert alone.group.join() == 0
    sums = alone.recorder.metrics().of(0, "allreduce")
    assert (sums.operations, sums.bytes) == (6, 4 * x.nbytes + 16)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda g, x: g.allreduce([]), ValueError, "the list of arrays is empty"),
        (lambda g, x: g.allreduce([x, x.astype(np.int32)]), TypeError, "one dtype, got float64, int32"),
        (lambda g, x: g.allreduce([x, x], out=[x]), ValueError, "out must be a list of 2 arrays"),
        (lambda g, x: g.allreduce([x, x], out=x), ValueError, "out must be a list of 2 arrays"),
        (lambda g, x: g.allreduce(x, name=""), TypeError, "name must be a text that is not empty"),
        (lambda g, x: g.allreduce(x, name=3), TypeError, "name must be a text"),
        (lambda g, x: g.allreduce(x, name="w\udc80"), ValueError, r"got half of a surrogate pair in 'w\\udc80'"),
        (lambda g, x: g.broadcast(x, root=1), ValueError, r"root must be a member of group 0 \(rank 0\), got 1"),
        (lambda g, x: g.broadcast(x, root=0.0), ValueError, r"root must be a member of group 0 \(rank 0\), got 0.0"),
        (lambda g, x: g.broadcast(x, root=None), ValueError, r"root must be a member of group 0 \(rank 0\), got None"),
        (lambda g, x: g.broadcast([x]), TypeError, "broadcast takes one array, got a list"),
        (lambda g, x: g.reduce_scatter(x.sum()), ValueError, "needs an array of at least 1 dimension, got a scalar"),
        (lambda g, x: g.alltoall(x.sum()), ValueError, "got a scalar"),
        (lambda g, x: g.alltoall(x, splits=[1, 2]), ValueError, "splits must be 1 whole numbers from 0"),
        (lambda g, x: g.alltoall(x, splits=[-1]), ValueError, "splits must be 1 whole numbers from 0"),
        (lambda g, x: g.alltoall(x, splits=[1.5]), ValueError, "splits must be 1 whole numbers from 0"),
        (lambda g, x: g.alltoall(x, splits=[9]), ValueError, "ask for 9 rows of an array with 3"),
        (lambda g, x: g.alltoall([x, x[:2]]), ValueError, "a list must have equally many rows, got 3, 2"),
        (lambda g, x: g.reduce_scatter([x, x.sum()]), ValueError, "reduce_scatter shares out rows.* got a scalar"),
        (lambda g, x: g.reduce(x, root=1), ValueError, r"reduce: root must be a member of group 0 \(rank 0\), got 1"),
        (
            lambda g, x: g.reduce(x, out=x[:2]),
            ValueError,
            r"reduce: out is float64\[2\], but the result is float64\[3\]",
        ),
        (
            lambda g, x: g.reduce(x, op="bit_or"),
            ValueError,
            "reduce: bit_or is for whole numbers and bool, got float64",
        ),
        (lambda g, x: g.allreduce(x.astype(int), op="bit_or", prescale=2), ValueError, "bit_or cannot be scaled"),
        (lambda g, x: g.gather(x, root=-1), ValueError, "gather: root must be a member"),
        (lambda g, x: g.scatter(x.sum()), ValueError, "scatter shares out rows.* got a scalar"),
        (lambda g, x: g.scatter(x, splits=[4]), ValueError, "scatter: splits ask for 4 rows of an array with 3"),
        (lambda g, x: g.send(x, 0), ValueError, "this very rank"),
        (lambda g, x: g.receive(x, 0), ValueError, "this very rank"),
        (lambda g, x: g.receive(b"abc", 0), ValueError, "read-only"),
        (lambda g, x: Plan([], g), ValueError, "at least one bucket"),
        (lambda g, x: Plan([Bucket(3, op="average")], g), ValueError, "op must be one of"),
        (lambda g, x: Plan([Bucket(3, "bool")], g), ValueError, "bool has no mean"),
        (lambda g, x: Plan([Bucket(3, kind="broadcast", root=1)], g), ValueError, r"a member \(rank 0\), got 1"),
        (lambda g, x: Plan([Bucket(3, kind="allgather", shares=(1, 2))], g), ValueError, "2 shares for 1 members"),
        (lambda g, x: Plan([Bucket(3, kind="allgather", prescale=2)], g), ValueError, "prescale .*not for allgather"),
        (
            lambda g, x: Bucket(3, kind="alltoall"),
            ValueError,
            "kind must be one of allreduce, reduce_scatter, allgather",
        ),
        (lambda g, x: Bucket(3, shares=(1, 2)), ValueError, "shares are for reduce_scatter and allgather, not for"),
        (lambda g, x: Bucket(3, kind="allgather", shares=(1, 1)), ValueError, "shares must .*have 3 elements together"),
        (lambda g, x: Bucket(3, kind="allgather", shares=(4, -1)), ValueError, "shares must be from 0"),
        (lambda g, x: Bucket(3, kind="reduce_scatter", parts=(1, 2)), ValueError, "parts are for allreduce"),
        (lambda g, x: Bucket(0), ValueError, "count must be a whole number from 1, got 0"),
        (lambda g, x: Bucket(1.5), ValueError, "count must be a whole number"),  # type: ignore[arg-type]  # the mistake
        (lambda g, x: Bucket(1, "complex64", name="b"), ValueError, "bucket 'b': dtype must be one of uint8.*'complex"),
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


def test_the_quick_way_gives_the_same_as_the_first(alone: World) -> None:
    for x in (np.ones((2, 3), np.float32), np.ones((2, 3), np.float32), np.ones((3, 2), np.float32).T):
        for name in (None, "n"):
            result = alone.group.allreduce(x, name=name)
            assert result is not x and result.shape == (2, 3) and (result == 1).all()
            assert alone.group.allreduce(x, out=x, name=name) is x
            assert alone.group.allreduce(x, wait=False).wait().shape == (2, 3)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        alone.group.allreduce(x, out=x)


def test_the_quick_way_keeps_the_memory_of_its_call(alone: World, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = alone.group.ordered_channel
    calls: list[Call] = []
    run = channel.run

    def run_and_keep(call: Call, signature: Signature) -> None:
        calls.append(call)
        run(call, signature)

    monkeypatch.setattr(channel, "run", run_and_keep)
    for _ in range(3):
        x = np.ones(5)
        kept = [weakref.ref(x), weakref.ref(alone.group.allreduce(x))]
        del x
        assert calls[-1].spans and all(each() is not None for each in kept)


def test_a_world_that_was_closed_says_so_and_closes_its_plans(alone: World) -> None:
    group = alone.group
    group.allreduce(np.ones(3))
    plan = Plan([Bucket(4)], group)
    alone.close()
    alone.close()
    for name in (None, "x"):
        with pytest.raises(RoundEnded, match="shutdown"):
            group.allreduce(np.ones(3), name=name)
    with pytest.raises(RoundEnded):
        plan.start(0)
    plan.close()


def test_a_member_that_waits_too_long_is_reported_with_who_is_missing() -> None:
    def body(world: World) -> None:
        if world.rank == 0:
            work = world.group.allreduce(np.ones(3), wait=False)
            named = world.group.allreduce(np.ones(3), name="n", wait=False)
            for missing in (work, named):
                while not any("for rank 1" in report for report in reports(world)) and not missing.done():
                    with world.control_thread.waits.condition:
                        world.control_thread.waits.condition.wait(0.01)
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


def test_a_rank_that_aborts_a_plans_channel_is_lost_there_and_nowhere_else() -> None:
    def body(world: World) -> str:
        plan = Plan([Bucket(4)], world.group, name="steps")
        try:
            if world.rank == 0:
                plan.run(0)
            else:
                world.group.abort_plan_channel(plan.group.ordered_channel, "a step was abandoned")
        except PeerLost as error:
            assert error.peer == 1
            return error.why
        finally:
            assert world.group.allreduce(np.ones(1)).tolist() == [2.0]
        return ""

    assert run_ranks(2, body) == ["a step was abandoned", ""]


def test_buckets_begin_at_cache_lines_and_are_recorded(alone: World) -> None:
    with Plan([Bucket(1), Bucket(17), Bucket(3, "float64")], alone.group) as plan:
        starts = [array.ctypes.data for array in plan.arrays]
        assert [start - starts[0] for start in starts] == [0, 64, 192]
        plan.arrays[1][:] = 3.0
        assert plan.start(1).wait() is plan.arrays[1]
        assert plan.run(1) is plan.arrays[1]
        assert plan.arrays[1].tolist() == [3.0] * 17
    sums = alone.recorder.metrics().of(0, "bucket")
    assert (sums.operations, sums.bytes) == (2, 136)
    plan.close()
    with pytest.raises(RoundEnded):
        plan.run(0)
    assert alone.group.allreduce(np.ones(1)).tolist() == [1]
