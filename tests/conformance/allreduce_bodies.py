"""allreduce in program order: every dtype and operation, every way to give and take memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ronde.comm.buffers import Bfloat16View, float32_from_bfloat16
from ronde.comm.world import World
from ronde.types import DType, Op, OperationKind, find_reduction_error
from tests.conformance.cases import on_ranks, raises
from tests.conformance.reference_arithmetic import float32_bounds, reduce

Array = np.ndarray[Any, np.dtype[Any]]

FLOAT_OPS = (Op.SUM, Op.MEAN, Op.MIN, Op.MAX, Op.PRODUCT)


def numbers(rank: int, dtype: DType, count: int) -> Array:
    """Small whole numbers that every dtype holds exactly, different on every rank."""
    values = np.random.default_rng(rank).integers(0, 5, count)
    if dtype is DType.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype.numpy)


def give(array: Array, dtype: DType) -> Array | Bfloat16View:
    return Bfloat16View(array) if dtype is DType.BFLOAT16 else array


def take(result: Array | Bfloat16View) -> Array:
    return result.bits if isinstance(result, Bfloat16View) else result


@on_ranks(1, 2, 3, 4)
def every_dtype_and_operation_gives_what_numpy_gives(world: World) -> None:
    for dtype in DType:
        for op in Op:
            if op is Op.ADASUM or find_reduction_error(OperationKind.ALLREDUCE, dtype, op, scaled=False):
                continue
            result = take(world.group.allreduce(give(numbers(world.rank, dtype, 67), dtype), op=op))
            expected = reduce([numbers(rank, dtype, 67) for rank in range(world.size)], dtype, op, 1.0, 1.0)
            assert result.dtype == expected.dtype
            assert np.array_equal(result, expected), f"{dtype.name} {op.name}: {result} is not {expected}"


@on_ranks(2, 3)
def what_repeats_gives_the_same_each_time(world: World) -> None:
    # A repeated allreduce of an array takes a shorter way; other calls come in between.
    group = world.group
    before = world.recorder.metrics().of(0, "allreduce")
    for step in range(4):
        for dtype in DType:
            if dtype is not DType.BFLOAT16:
                given = numbers(world.rank + step, dtype, 67)
                expected = reduce([numbers(rank + step, dtype, 67) for rank in range(world.size)], dtype, Op.SUM, 1, 1)
                assert np.array_equal(group.allreduce(given), expected)
                assert np.array_equal(given, numbers(world.rank + step, dtype, 67))
                assert group.allreduce(given, out=given) is given and np.array_equal(given, expected)
        x = np.full((2, 3), world.rank + step, np.float32)
        ranks = sum(range(world.size)) + step * world.size
        assert (group.allreduce(x, op="mean") == np.float32(ranks / world.size)).all()
        assert (group.allreduce(x, op="mean", prescale=2.0) == np.float32(2 * ranks / world.size)).all()
        assert (group.allreduce(x.T) == ranks).all()
        assert group.allreduce(x.reshape(6)).shape == (6,)
        work = group.allreduce(x, wait=False)
        assert (group.allreduce(x) == ranks).all() and (work.wait() == ranks).all()
    after = world.recorder.metrics().of(0, "allreduce")
    assert after.operations - before.operations == 4 * (2 * (len(DType) - 1) + 6)
    assert after.bytes - before.bytes == 4 * (2 * 67 * sum(d.num_bytes for d in DType if d is not DType.BFLOAT16) + 144)


@on_ranks(2)
def an_array_that_may_not_be_written_is_no_result(world: World) -> None:
    x = np.ones(5)
    for _ in range(3):
        world.group.allreduce(x)
    x.flags.writeable = False
    assert (world.group.allreduce(x) == 2).all()
    with raises(ValueError, match="read-only|writ"):
        world.group.allreduce(x, out=x)


@on_ranks(1, 2, 3, 4)
def adasum_gives_what_numpy_gives(world: World) -> None:
    for dtype in (DType.FLOAT32, DType.FLOAT64):
        result = world.group.allreduce(numbers(world.rank, dtype, 1000), op="adasum")
        inputs = [numbers(rank, dtype, 1000) for rank in range(world.size)]
        np.testing.assert_allclose(result, reduce(inputs, dtype, Op.ADASUM, 1.0, 1.0), rtol=1e-5)


@on_ranks(2, 3)
def adasum_weighs_every_array_of_a_list_by_itself(world: World) -> None:
    given = [[numbers(rank, DType.FLOAT64, count) for count in (5, 1000, 1)] for rank in range(world.size)]
    for array, inputs in zip(
        world.group.allreduce(given[world.rank], op="adasum"), zip(*given, strict=True), strict=True
    ):
        np.testing.assert_allclose(array, reduce(inputs, DType.FLOAT64, Op.ADASUM, 1.0, 1.0), rtol=1e-6)


@on_ranks(2, 3)
def factors_apply_before_and_after(world: World) -> None:
    x = np.full(10, world.rank + 1, np.float64)
    total = sum(range(1, world.size + 1))
    assert np.allclose(world.group.allreduce(x, prescale=0.5), 0.5 * total)
    assert np.allclose(world.group.allreduce(x, postscale=3.0), 3.0 * total)
    assert np.allclose(world.group.allreduce(x, op="mean", prescale=2.0, postscale=0.25), 0.5 * total / world.size)


@on_ranks(2, 3)
def whole_numbers_divide_toward_zero(world: World) -> None:
    result = world.group.allreduce(np.array([-1, 1, 7], np.int32) * (world.rank == 0), op="mean")
    assert result.tolist() == [0, 0, 7 // world.size]


@on_ranks(2, 3, 4)
def a_mean_of_whole_numbers_is_exact_and_never_wraps(world: World) -> None:
    assert world.group.allreduce(np.array([200], np.uint8), op="mean").tolist() == [200]
    for dtype in DType:
        if dtype.is_float or dtype is DType.BOOL:
            continue
        limits = np.iinfo(dtype.name.lower())
        columns = [
            [limits.max] * world.size,
            [limits.min] * world.size,
            [limits.max - (rank == 0) for rank in range(world.size)],
            [limits.min + (rank == 0) for rank in range(world.size)],
            [limits.min if rank % 2 else limits.max for rank in range(world.size)],
        ]
        exact = [abs(sum(column)) // world.size * (1 if sum(column) >= 0 else -1) for column in columns]
        for count in (1, 5000):
            x = np.array([column[world.rank] for column in columns] * count, dtype.numpy)
            assert world.group.allreduce(x, op="mean").tolist() == exact * count, dtype
            for name in (None, "by name"):
                rows = world.group.reduce_scatter(np.tile(x[:5], world.size), op="mean", name=name)
                assert rows.tolist() == exact


def awkward_floats(rank: int, dtype: DType, op: Op, count: int) -> Array:
    """The bits of 16-bit floats: random ones, large ones that cancel or overflow together (40,000 and its like on all
    ranks), and subnormal ones beside them. For products, numbers near one."""
    random = np.random.default_rng((rank, dtype, op))
    one = 0x3C00 if dtype is DType.FLOAT16 else 0x3F80
    bits = one ^ random.integers(0, 0x80, count) ^ random.choice([0, 0x8000], count)
    if op is not Op.PRODUCT:
        large = [0x78E2, 0xF8E2, 0x7BFF, 0xFBFF] if dtype is DType.FLOAT16 else [0x7C00, 0xFC00, 0x7D80, 0xFD80]
        bits[1::4] = large[0]
        bits[2::4] = random.choice([*large, one], bits[2::4].size)
        bits[3::4] = random.choice([large[3], one, 0x0001, 0x8001], bits[3::4].size)
    short: Array = bits.astype(np.uint16)
    return short


@on_ranks(2, 3, 4)
def short_floats_are_float32_results_rounded_once(world: World) -> None:
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        for op in FLOAT_OPS:
            for prescale, postscale in ((1.0, 1.0), (0.25, 3.0)):
                for count in (64, 40_000):
                    given = [awkward_floats(rank, dtype, op, count) for rank in range(world.size)]
                    mine = given[world.rank]
                    x = Bfloat16View(mine) if dtype is DType.BFLOAT16 else mine.view(np.float16)
                    bits = take(world.group.allreduce(x, op=op, prescale=prescale, postscale=postscale)).view(np.uint16)
                    inputs = [each.view(dtype.numpy) for each in given]
                    low, high = float32_bounds(inputs, dtype, op, prescale, postscale)
                    result = reduce([bits.view(dtype.numpy)], dtype, Op.SUM, 1.0, 1.0)
                    numbers = float32_from_bfloat16(result) if dtype is DType.BFLOAT16 else result
                    wrong = np.flatnonzero(~((low <= numbers) & (numbers <= high)))
                    assert not wrong.size, f"{dtype.name} {op.name}: {numbers[wrong[:5]]} at {wrong[:5]}"
                    everybody = world.group.allgather(bits.reshape(1, -1))
                    assert all(np.array_equal(row, bits) for row in everybody)


@on_ranks(1, 2, 3)
def the_result_may_be_new_or_in_place_or_elsewhere(world: World) -> None:
    total = sum(range(1, world.size + 1))
    x = np.full((3, 4), world.rank + 1, np.float32)
    new = world.group.allreduce(x)
    assert (new == total).all() and (x == world.rank + 1).all()
    elsewhere = np.zeros_like(x)
    assert world.group.allreduce(x, out=elsewhere) is elsewhere
    assert (elsewhere == total).all() and (x == world.rank + 1).all()
    assert world.group.allreduce(x, out=x) is x
    assert (x == total).all()


@on_ranks(2)
def memory_with_gaps_is_read_and_written_right(world: World) -> None:
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)
    columns = wide[:, ::2]
    world.group.allreduce(columns, out=columns)
    assert (wide[:, ::2] == 2 * np.arange(24).reshape(4, 6)[:, ::2]).all()
    assert (wide[:, 1::2] == np.arange(24).reshape(4, 6)[:, 1::2]).all()
    assert (world.group.allreduce(np.arange(6.0).reshape(2, 3).T) == 2 * np.arange(6.0).reshape(2, 3).T).all()


@on_ranks(1, 2, 3)
def shapes_of_all_kinds_come_back(world: World) -> None:
    shapes: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 0, 2), (2, 3, 4), (65,))
    for shape in shapes:
        result = world.group.allreduce(np.ones(shape, np.float32))
        assert result.shape == shape
        assert (result == world.size).all()


@on_ranks(2, 3)
def a_list_of_arrays_travels_as_a_unit(world: World) -> None:
    arrays = [np.full(shape, world.rank + index, np.float32) for index, shape in enumerate(((3,), (2, 2), (0,), (5,)))]
    ranks = sum(range(world.size))
    results = world.group.allreduce(arrays)
    for index, (result, array) in enumerate(zip(results, arrays, strict=True)):
        assert result.shape == array.shape
        assert (result == ranks + index * world.size).all()
    assert world.group.allreduce(arrays, out=arrays)[0] is arrays[0]
    assert (arrays[1] == ranks + world.size).all()


@on_ranks(2)
def adasum_looks_at_each_array_of_a_list_by_itself(world: World) -> None:
    a, b = numbers(world.rank, DType.FLOAT64, 40), numbers(world.rank + 7, DType.FLOAT64, 30)
    together = world.group.allreduce([a, b], op="adasum")
    np.testing.assert_allclose(together[0], world.group.allreduce(a, op="adasum"))
    np.testing.assert_allclose(together[1], world.group.allreduce(b, op="adasum"))


@on_ranks(2, 3)
def large_arrays_arrive_whole(world: World) -> None:
    count = 3_000_017
    x = np.arange(count, dtype=np.float32) % 1000 + world.rank
    result = world.group.allreduce(x)
    expected = (np.arange(count, dtype=np.float32) % 1000) * world.size + sum(range(world.size))
    assert np.array_equal(result, expected)


@on_ranks(2, 3)
def works_may_be_waited_for_in_any_order(world: World) -> None:
    works = [world.group.allreduce(np.full(100, index + world.rank), wait=False) for index in range(50)]
    ranks = sum(range(world.size))
    for index in reversed(range(50)):
        assert (works[index].wait() == index * world.size + ranks).all()
        assert works[index].done()
        assert (works[index].result() == works[index].wait()).all()


@on_ranks(2)
def a_work_that_nobody_waits_for_harms_nobody(world: World) -> None:
    for index in range(200):
        world.group.allreduce(np.full(1000, index, np.float64), wait=False)
    assert world.group.allreduce(np.ones(1)).tolist() == [2.0]


@on_ranks(2, 3)
def everybody_gets_the_same_bits(world: World) -> None:
    x = np.random.default_rng(world.rank).standard_normal(10_001).astype(np.float32)
    result = world.group.allreduce(x, op="mean")
    everybody = world.group.allgather(result.reshape(1, -1))
    assert all(np.array_equal(row, result) for row in everybody)
