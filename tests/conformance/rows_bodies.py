"""Collectives that move rows or have a root: allgather, broadcast, reduce_scatter, alltoall, reduce, gather, scatter,
barrier; in program order and named."""

from __future__ import annotations

import numpy as np

from ronde.comm.buffers import Array, Bfloat16View
from ronde.comm.world import World
from ronde.types import DType, Op, OperationKind, find_reduction_error
from tests.conformance.cases import on_ranks, raises
from tests.conformance.reference_arithmetic import reduce as reduce_reference

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
def lists_are_scattered_and_exchanged_as_a_unit(world: World) -> None:
    size, rank = world.size, world.rank
    for name in NAMES:
        wide = np.arange(4 * size, dtype=np.float32).reshape(2 * size, 2) + rank
        long = np.arange(size + 1, dtype=np.float32) * (rank + 1)
        for wait in (True, False):
            outcome = world.group.reduce_scatter([wide, long], name=name, wait=wait)
            first, second = outcome if wait else outcome.wait()
            total = np.arange(4 * size).reshape(2 * size, 2) * size + sum(range(size))
            assert np.array_equal(first, total[2 * rank : 2 * rank + 2])
            start = rank + min(rank, 1)  # the first has one more
            sums = np.arange(size + 1) * sum(range(1, size + 1))
            assert np.array_equal(second, sums[start : start + (2 if rank == 0 else 1)])
            rows = [np.full((size, 3), rank), np.full(size, 10 * rank)]
            outcome = world.group.alltoall(rows, name=name, wait=wait)
            (first, second), counts = outcome if wait else outcome.wait()
            assert first.tolist() == [[other] * 3 for other in range(size)]
            assert second.tolist() == [10 * other for other in range(size)]
            assert counts.tolist() == [1] * size
    with raises(ValueError, match="alltoall: the arrays of a list must have equally many rows, got 2, 3"):
        world.group.alltoall([np.ones(2), np.ones(3)])


@on_ranks(1, 2, 3, 4)
def reduce_gives_the_result_to_the_root_only(world: World) -> None:
    total = sum(range(1, world.size + 1))
    for name in NAMES:
        for root in range(world.size):
            for count in (0, 5, 300_000):
                x = np.full(count, world.rank + 1.0, np.float32)
                result = world.group.reduce(x, root=root, name=name)
                assert (x == world.rank + 1).all()
                assert (result == total).all() if world.rank == root else result is None
            out = np.zeros(3)
            x = np.full(3, world.rank + 1.0)
            result = world.group.reduce(x, root=root, op="mean", out=out, name=name, wait=False)
            assert result.wait() is (out if world.rank == root else None)
            assert np.allclose(out, total / world.size if world.rank == root else 0)
            arrays = [np.full((2, 2), world.rank), np.full(7, 2 * world.rank)]
            results = world.group.reduce(arrays, root=root, op="max", name=name)
            if world.rank == root:
                assert (results[0] == world.size - 1).all() and (results[1] == 2 * world.size - 2).all()
            else:
                assert results is None


@on_ranks(2, 3)
def reduce_knows_every_dtype_operation_and_factor(world: World) -> None:
    for dtype in DType:
        for op in Op:
            if op is Op.ADASUM or find_reduction_error(OperationKind.REDUCE, dtype, op, scaled=False):
                continue
            given = [np.arange(33).astype(np.uint8) % (rank + 3) % 5 for rank in range(world.size)]
            inputs = [as_dtype(each, dtype) for each in given]
            mine = inputs[world.rank]
            result = world.group.reduce(Bfloat16View(mine) if dtype is DType.BFLOAT16 else mine, op=op, root=1)
            if world.rank == 1:
                bits = result.bits if isinstance(result, Bfloat16View) else result
                assert np.array_equal(bits, reduce_reference(inputs, dtype, op, 1.0, 1.0)), f"{dtype} {op}"
    result = world.group.reduce(np.ones(3, np.float16), prescale=0.5, postscale=8.0)
    assert world.rank or result.tolist() == [4 * world.size] * 3
    with raises(ValueError, match="adasum is for allreduce"):
        world.group.reduce(np.ones(3), op="adasum")


def as_dtype(numbers: Array, dtype: DType) -> Array:
    if dtype is DType.BFLOAT16:
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(dtype.numpy)


@on_ranks(1, 2, 3, 4)
def gather_gives_everybodys_rows_to_the_root(world: World) -> None:
    for name in NAMES:
        for root in range(world.size):
            for least in (0, 1, 100_000):
                mine = np.full((world.rank + least, 2), world.rank, np.float32)
                result = world.group.gather(mine, root=root, name=name)
                if world.rank == root:
                    expected = [rank for rank in range(world.size) for _ in range(rank + least)]
                    assert result.shape == (len(expected), 2) and result[:, 1].tolist() == expected
                else:
                    assert result is None
            arrays = [np.float16(world.rank), np.ones((2, 3), np.float16)]
            results = world.group.gather(arrays, root=root, name=name, wait=False).wait()
            if world.rank == root:
                assert results[0].tolist() == list(range(world.size))
                assert results[1].shape == (2 * world.size, 3)
            else:
                assert results is None


@on_ranks(1, 2, 3, 4)
def scatter_shares_out_the_rows_of_the_root(world: World) -> None:
    size, rank = world.size, world.rank
    for name in NAMES:
        for root in range(size):
            for num_rows in (0, 1, size, 3 * size + 2, 100_000):
                everything = np.arange(2 * num_rows, dtype=np.int32).reshape(num_rows, 2)
                result = world.group.scatter(everything if rank == root else everything[:0], root=root, name=name)
                shares = [num_rows // size + (index < num_rows % size) for index in range(size)]
                start = sum(shares[:rank])
                assert np.array_equal(result, everything[start : start + shares[rank]])
            splits = [2 * index for index in range(size)]
            arrays = [np.arange(size * size, dtype=np.float64), np.ones((size * size, 3))]
            given = splits if rank == root else None
            first, second = world.group.scatter(arrays, root=root, splits=given, name=name, wait=False).wait()
            assert first.tolist() == list(range(rank * (rank - 1), rank * (rank + 1)))
            assert second.shape == (2 * rank, 3)
    with raises(ValueError, match="scatter: root must be a member of group 0"):
        world.group.scatter(np.ones(3), root=size)


@on_ranks(1, 2, 3)
def a_barrier_lets_go_when_all_have_come(world: World) -> None:
    for name in NAMES:
        assert world.group.barrier(name=name) is None
        assert world.group.barrier(name=name, wait=False).wait() is None
