"""Collectives that move rows: allgather, broadcast, reduce_scatter, alltoall, barrier; in program order and named."""

from __future__ import annotations

import numpy as np

from ronde.comm.world import World
from ronde.types import DType
from tests.conformance.cases import on_ranks

NAMES = (None, "by name")


@on_ranks(1, 2, 3)
def allgather_puts_everybodys_rows_in_order(world: World) -> None:
    for name in NAMES:
        mine = np.full((2, 3), world.rank, np.int32)
        result = world.group.allgather(mine, name=name)
        assert result.tolist() == [[rank] * 3 for rank in range(world.size) for _ in range(2)]


@on_ranks(2, 3, 4)
def allgather_takes_different_numbers_of_rows(world: World) -> None:
    for name in NAMES:
        for least in (0, 1, 1000):
            mine = np.full((world.rank + least, 2), world.rank, np.float32)
            result = world.group.allgather(mine, name=name)
            expected = [rank for rank in range(world.size) for _ in range(rank + least)]
            assert result.shape == (len(expected), 2)
            assert result[:, 1].tolist() == expected


@on_ranks(2, 3)
def allgather_of_scalars_gives_a_row_each(world: World) -> None:
    for name in NAMES:
        assert world.group.allgather(np.float32(world.rank), name=name).tolist() == list(range(world.size))


@on_ranks(2)
def allgather_of_a_list_gives_a_list(world: World) -> None:
    for name in NAMES:
        given = [np.full((world.rank + 1, 2), 1.0), np.full((3 - world.rank,), 2.0)]
        first, second = world.group.allgather(given, name=name)
        assert first.shape == (3, 2) and (first == 1.0).all()
        assert second.shape == (5,) and (second == 2.0).all()


@on_ranks(2)
def allgather_works_in_the_background(world: World) -> None:
    works = [world.group.allgather(np.full(world.rank + 1, i), name=name, wait=False) for i, name in enumerate("abc")]
    works += [world.group.allgather(np.full(world.rank + 1, i), wait=False) for i in (3, 4)]
    for index, work in enumerate(works):
        assert work.wait().tolist() == [index] * 3


@on_ranks(1, 2, 3)
def broadcast_gives_the_roots_array_to_everybody(world: World) -> None:
    for name in NAMES:
        for root in range(world.size):
            mine = np.full((4, 2), world.rank, np.float64)
            result = world.group.broadcast(mine, root=root, name=name)
            assert (result == root).all()
            assert (mine == world.rank).all() and result is not mine
            assert world.group.broadcast(mine, root=root, out=mine, name=name) is mine
            assert (mine == root).all()


@on_ranks(2, 3)
def broadcast_carries_every_dtype_and_large_arrays(world: World) -> None:
    for dtype in DType:
        if dtype is not DType.BFLOAT16:
            result = world.group.broadcast((np.arange(300) % 2 * (world.rank == 1)).astype(dtype.numpy), root=1)
            assert np.array_equal(result, (np.arange(300) % 2).astype(dtype.numpy))
    large = np.arange(2_000_003) * (world.rank == 0)
    assert np.array_equal(world.group.broadcast(large), np.arange(2_000_003))


@on_ranks(1, 2, 3, 4)
def reduce_scatter_shares_out_the_sum(world: World) -> None:
    for name in NAMES:
        for num_rows in (0, 1, world.size, 3 * world.size + 2):
            x = np.arange(num_rows * 2, dtype=np.float32).reshape(num_rows, 2) + world.rank
            total = np.arange(num_rows * 2).reshape(num_rows, 2) * world.size + sum(range(world.size))
            shares = [num_rows // world.size + (rank < num_rows % world.size) for rank in range(world.size)]
            start = sum(shares[: world.rank])
            result = world.group.reduce_scatter(x, name=name)
            assert np.array_equal(result, total[start : start + shares[world.rank]])


@on_ranks(2, 3)
def reduce_scatter_knows_operations_and_factors(world: World) -> None:
    x = np.full(2 * world.size, world.rank + 1.0)
    total = sum(range(1, world.size + 1))
    assert np.allclose(world.group.reduce_scatter(x, op="mean", prescale=2.0, postscale=3.0), 6.0 * total / world.size)
    assert (world.group.reduce_scatter(x, op="max") == world.size).all()


@on_ranks(1, 2, 3)
def alltoall_gives_equal_shares(world: World) -> None:
    for name in NAMES:
        x = np.array([[100 * world.rank + to, -to] for to in range(world.size) for _ in range(2)])
        rows, counts = world.group.alltoall(x, name=name)
        assert rows[:, 0].tolist() == [100 * rank + world.rank for rank in range(world.size) for _ in range(2)]
        assert counts.tolist() == [2] * world.size


@on_ranks(2, 3)
def alltoall_gives_what_splits_say(world: World) -> None:
    for name in NAMES:
        splits = [(world.rank + to) % 3 for to in range(world.size)]
        x = np.concatenate([np.full(count, 10 * world.rank + to) for to, count in enumerate(splits)])
        rows, counts = world.group.alltoall(x, splits=np.array(splits), name=name)
        assert counts.tolist() == [(rank + world.rank) % 3 for rank in range(world.size)]
        assert rows.tolist() == [10 * rank + world.rank for rank in range(world.size) for _ in range(counts[rank])]


@on_ranks(2)
def alltoall_may_give_nothing(world: World) -> None:
    rows, counts = world.group.alltoall(np.ones((4, 3)), splits=[0, 4] if world.rank == 0 else [0, 0])
    assert rows.shape == ((0, 3) if world.rank == 0 else (4, 3))
    assert counts.tolist() == ([0, 0] if world.rank == 0 else [4, 0])


@on_ranks(1, 2, 3)
def a_barrier_lets_go_when_all_have_come(world: World) -> None:
    for name in NAMES:
        assert world.group.barrier(name=name) is None
        assert world.group.barrier(name=name, wait=False).wait() is None
