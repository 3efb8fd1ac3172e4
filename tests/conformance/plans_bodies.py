"""Planned buckets: agreed once, then reduced over and over in place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ronde.comm import objects
from ronde.comm.plan import Bucket, Plan
from ronde.comm.world import World
from ronde.errors import Mismatch
from tests.conformance.cases import on_ranks, raises
from tests.limits import RANK_S


@on_ranks(1, 2, 3)
def buckets_are_reduced_in_place(world: World) -> None:
    buckets = [Bucket(1000), Bucket(3, "int64", "sum"), Bucket(300_000, "float64", "max", name="big")]
    with Plan(buckets, world.group) as plan:
        assert [array.dtype.name for array in plan.arrays] == ["float32", "int64", "float64"]
        assert all((array.ctypes.data - plan.arrays[0].ctypes.data) % 64 == 0 for array in plan.arrays)
        assert not any(array.any() for array in plan.arrays)
        for step in range(5):
            for array in plan.arrays:
                array[:] = world.rank + step
            works = [plan.start(index) for index in range(3)]
            assert works[2].wait() is plan.arrays[2]
            assert np.allclose(works[0].wait(), step + sum(range(world.size)) / world.size)
            assert (works[1].wait() == step * world.size + sum(range(world.size))).all()
            assert (plan.arrays[2] == step + world.size - 1).all()
            plan.arrays[0][:] = 1.0
            assert (plan.run(0) == 1.0).all()


@on_ranks(1, 2, 3)
def a_rank_may_use_its_spare_array_and_the_array_keeps_its_numbers(world: World) -> None:
    with Plan([Bucket(3, "int64", "sum"), Bucket(100_000, op="sum")], world.group) as plan:
        for step in range(4):
            spare = (world.rank + step) % 2 == 0
            used, kept = (plan.spare_arrays, plan.arrays) if spare else (plan.arrays, plan.spare_arrays)
            for index in range(2):
                used[index][:], kept[index][:] = step + world.rank, -1
                result = plan.start(index, spare=spare).wait() if step % 2 else plan.run(index, spare=spare)
                assert result is used[index]
                assert (result == world.size * step + sum(range(world.size))).all()
                assert (kept[index] == -1).all()


@on_ranks(2)
def buckets_know_factors_and_bfloat16(world: World) -> None:
    with Plan([Bucket(10, "bfloat16", "sum", prescale=0.5, postscale=4.0)], world.group) as plan:
        plan.arrays[0][:] = np.float32(1.5).view(np.uint32) >> 16
        assert (plan.run(0).astype(np.uint32) << 16).view(np.float32).tolist() == [6.0] * 10


@on_ranks(2)
def plans_do_not_wait_for_each_other_nor_for_other_operations(world: World) -> None:
    with Plan([Bucket(10)], world.group) as first, Plan([Bucket(20)], world.group) as second:
        steps = [first.start, second.start] if world.rank == 0 else [second.start, first.start]
        works = [start(0) for start in steps]
        named = world.group.allreduce(np.ones(1), name="n", wait=False)
        assert world.group.allreduce(np.ones(1)).tolist() == [2]
        for work in (*works, named):
            work.wait()


@on_ranks(2, 3)
def plans_with_names_are_made_in_any_order_and_exchange_more_than_buckets(world: World) -> None:
    def use(name: str) -> None:
        with Plan([Bucket(10, "int64", "sum")], world.group, name=name) as plan:
            for step in range(3):
                plan.arrays[0][:] = len(name) * step
                work = plan.start(0)
                assert objects.allgather((name, step), group=plan.group) == [(name, step)] * world.size
                rows = np.full((world.rank, 2), len(name))
                assert (plan.group.allgather(rows) == len(name)).all()
                assert (work.wait() == len(name) * step * world.size).all()

    names = ("a", "bb") if world.rank == 0 else ("bb", "a")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(use, names[1])
        use(names[0])
        other.result(RANK_S)


@on_ranks(2, 3)
def the_first_difference_of_two_plans_is_named(world: World) -> None:
    last = world.rank == world.size - 1
    with raises(Mismatch, match=r"differ in bucket 1: .*float32\[20\].*float32\[30\]"):
        Plan([Bucket(10), Bucket(30 if last else 20), Bucket(40 if last else 50)], world.group)
    with raises(Mismatch, match="differ in bucket 1: .*no such bucket"):
        Plan([Bucket(10)] * (2 if last else 1), world.group)
    with Plan([Bucket(10)], world.group) as plan:
        plan.run(0)


@on_ranks(1, 2, 3)
def buckets_may_be_scattered_gathered_and_broadcast_in_place(world: World) -> None:
    size, rank = world.size, world.rank
    for count in (3, 1000, 100_001):
        uneven = (*[0] * (size - 1), count)  # all for the last
        buckets = [
            Bucket(count, "int64", "sum", kind="reduce_scatter"),
            Bucket(count, "int64", "max", kind="reduce_scatter", shares=uneven),
            Bucket(count, "float32", kind="allgather"),
            Bucket(count, "int16", kind="allgather", shares=uneven),
            Bucket(count, "float64", kind="broadcast", root=size - 1),
            Bucket(count, "bfloat16", "mean", kind="reduce_scatter"),
        ]
        even = [count // size + (index < count % size) for index in range(size)]
        begin = sum(even[:rank])
        with Plan(buckets, world.group) as plan:
            assert [share.size for share in plan.shares[:2]] == [even[rank], count if rank == size - 1 else 0]
            for step in range(3):
                for array in plan.arrays[:2]:
                    array[:] = np.arange(count) * (rank + 1) + step
                totals = np.arange(count) * sum(range(1, size + 1)) + step * size
                works = [plan.start(index) for index in range(2)]
                assert works[0].wait() is plan.shares[0]
                assert np.array_equal(plan.shares[0], totals[begin : begin + even[rank]])
                if rank == size - 1:
                    assert np.array_equal(works[1].wait(), np.arange(count) * size + step)

                plan.arrays[2][:] = plan.arrays[3][:] = -1
                plan.shares[2][:] = np.arange(count)[begin : begin + even[rank]] + step
                plan.shares[3][:] = 7
                assert plan.run(2) is plan.arrays[2]
                assert np.array_equal(plan.arrays[2], (np.arange(count) + step).astype(np.float32))
                assert (plan.run(3) == 7).all()

                plan.arrays[4][:] = np.arange(count) + rank * step
                assert np.array_equal(plan.run(4), np.arange(count) + (size - 1) * step)

                plan.arrays[5][:] = np.float32(1.5).view(np.uint32) >> 16
                assert (plan.run(5) == np.float32(1.5).view(np.uint32) >> 16).all()


@on_ranks(2)
def plans_whose_shares_or_kinds_differ_are_named(world: World) -> None:
    odd = world.rank == 1
    with raises(Mismatch, match="differ in bucket 0: .*reduce_scatter.*allgather"):
        Plan([Bucket(10, "int64", "sum", kind="allgather" if odd else "reduce_scatter")], world.group)
    with raises(Mismatch, match="differ in bucket 0: .*in shares of 4, 6"):
        Plan([Bucket(10, kind="allgather", shares=(4, 6) if odd else (5, 5))], world.group)
    with raises(Mismatch, match="differ in bucket 0: .*of 10.*of 11"):
        Plan([Bucket(11 if odd else 10, kind="allgather")], world.group)
    with raises(ValueError, match="has 3 shares for 2 members"):
        Plan([Bucket(3, kind="reduce_scatter", shares=(1, 1, 1))], world.group)
    with raises(ValueError, match=r"root must be a member \(ranks 0, 1\), got 2"):
        Plan([Bucket(3, kind="broadcast", root=2)], world.group)
    Plan([Bucket(10, kind="allgather", shares=(5, 5) if odd else ())], world.group).close()


@on_ranks(2, 3)
def what_zeros_would_change_is_refused_in_plans_while_a_rank_has_joined(world: World) -> None:
    buckets = [
        Bucket(10, op="sum"),
        Bucket(10, op="adasum", parts=(3, 7)),
        Bucket(10, op="min"),
        Bucket(10, op="product"),
        Bucket(10, kind="allgather"),
        Bucket(10, "uint8", "max"),
    ]
    with Plan(buckets, world.group) as plan:
        for _ in range(2 if world.rank else 0):
            for array in plan.arrays:
                array[:] = 2
            for index in range(1, 5):
                with raises(Mismatch, match="join.*zeros do not change"):
                    plan.run(index)
                assert (plan.arrays[index] == 2).all()
            assert (plan.run(0) == 2 * (world.size - 1)).all()
            assert (plan.run(5) == 2).all()
        world.group.join()
        plan.arrays[2][:] = world.rank
        assert (plan.run(2) == 0).all()


@on_ranks(2)
def a_rank_that_joins_gives_zeros_to_plans(world: World) -> None:
    with Plan([Bucket(10, op="sum")], world.group) as plan:
        for _ in range(3 if world.rank == 1 else 1):
            plan.arrays[0][:] = 1.0
            plan.run(0)
        assert world.group.join() == 1
        assert (plan.arrays[0] == (1.0 if world.rank == 1 else 2.0)).all()  # also of the rank that joined first
