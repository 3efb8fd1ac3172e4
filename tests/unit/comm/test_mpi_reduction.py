"""What is sent is reduced by MPI as it stands; here NumPy stands in for MPI, and the reference arithmetic is right."""

from __future__ import annotations

from functools import reduce as fold

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.backends.mpi.reduction import combine_adasum, from_wire, to_wire, wire_op
from ronde.comm.buffers import Array
from ronde.types import DType, Op
from tests.conformance.reference_arithmetic import reduce

MPI_OPS = {Op.SUM: np.add, Op.MIN: np.minimum, Op.MAX: np.maximum, Op.PRODUCT: np.multiply}
PAIRS = [(dtype, op) for dtype in DType for op in MPI_OPS] + [(d, Op.MEAN) for d in DType if d is not DType.BOOL]


def reduced(inputs: list[Array], dtype: DType, op: Op, prescale: float = 1.0, postscale: float = 1.0) -> Array:
    wires = [to_wire(each.copy(), dtype, op, prescale) for each in inputs]
    with np.errstate(all="ignore"):
        result = fold(MPI_OPS[wire_op(dtype, op)], wires)
    return from_wire(result, dtype, op, postscale, len(inputs))


def any_bits(dtype: DType, seed: int) -> Array:
    """Everything a type can hold: extremes, infinities, NaN, subnormal numbers."""
    data = np.random.default_rng(seed).integers(0, 256, 64 * dtype.num_bytes).astype(np.uint8)
    return (data & 1).view(np.bool_) if dtype is DType.BOOL else data.view(dtype.numpy)


def assert_same(got: Array, expected: Array, dtype: DType) -> None:
    assert got.dtype == dtype.numpy
    if dtype is DType.BFLOAT16:
        got, expected = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (got, expected))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda value: value.name.lower())
def test_a_reduction_gives_what_the_reference_gives(dtype: DType, op: Op) -> None:
    inputs = [any_bits(dtype, seed) for seed in range(3)]
    assert_same(reduced(inputs, dtype, op), reduce(inputs, dtype, op, 1.0, 1.0), dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BOOL], ids=lambda d: d.name.lower())
@pytest.mark.parametrize(("prescale", "postscale"), [(0.5, 1.0), (1.0, -0.7), (3.0, 1e30)])
def test_scales_give_what_the_reference_gives(dtype: DType, prescale: float, postscale: float) -> None:
    inputs = [any_bits(dtype, seed) for seed in range(2)]
    expected = reduce(inputs, dtype, Op.MEAN, prescale, postscale)
    assert_same(reduced(inputs, dtype, Op.MEAN, prescale, postscale), expected, dtype)


@pytest.mark.parametrize("op", [Op.MIN, Op.MAX])
@given(numbers=st.lists(st.floats(width=32), min_size=2, max_size=5))
def test_a_nan_always_wins_and_otherwise_the_right_number(op: Op, numbers: list[float]) -> None:
    result = reduced([np.array([number], np.float32) for number in numbers], DType.FLOAT32, op)[0]
    expected = (np.min if op is Op.MIN else np.max)(np.array(numbers, np.float32))
    assert result == expected or (np.isnan(result) and np.isnan(expected))


@given(bits=st.integers(0, 0xFFFFFFFF))
def test_bfloat16_is_rounded_to_nearest_and_ties_to_even(bits: int) -> None:
    exact = np.array([bits], np.uint32).view(np.float32)
    (rounded,) = (from_wire(exact.copy(), DType.BFLOAT16, Op.SUM).astype(np.uint32) << 16).view(np.float32)
    if np.isnan(exact[0]):
        assert np.isnan(rounded)
        return
    below, above = (np.array([(bits & 0xFFFF0000) + step], np.uint64) for step in (0, 0x10000))
    sides = [side.astype(np.uint32).view(np.float32)[0].astype(np.float64) for side in (below, above)]
    if all(np.isfinite(sides)):
        distances = [abs(side - np.float64(exact[0])) for side in sides]
        even = int(bits >> 16) & 1  # the upper one when the lower is odd
        assert rounded == sides[even if distances[0] == distances[1] else int(np.argmin(distances))]


def test_small_integers_do_not_travel_as_such_because_open_mpi_adds_them_with_saturation() -> None:
    for dtype in (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16):
        assert to_wire(np.zeros(1, dtype.numpy), dtype, Op.SUM).dtype == np.uint32
        assert to_wire(np.zeros(1, dtype.numpy), dtype, Op.MAX).dtype == dtype.numpy


def test_data_that_needs_no_change_is_not_copied() -> None:
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.UINT64):
        data = np.ones(4, dtype.numpy)
        wire = to_wire(data, dtype, Op.SUM)
        assert np.shares_memory(wire, data)
        assert np.shares_memory(from_wire(wire, dtype, Op.SUM), data)


def test_the_input_is_left_alone_when_it_is_scaled() -> None:
    data = np.ones(4, np.float32)
    assert not np.shares_memory(to_wire(data, DType.FLOAT32, Op.SUM, 2.0), data)
    assert (data == 1).all()


def test_adasum_of_equal_vectors_is_the_vector_and_of_orthogonal_ones_the_sum() -> None:
    x, y = np.array([3.0, 0.0], np.float32), np.array([0.0, 2.0], np.float32)
    same, sum_, with_zero = x.copy(), x.copy(), x.copy()
    combine_adasum(same, x)
    combine_adasum(sum_, y)
    combine_adasum(with_zero, np.zeros(2, np.float32))
    assert same.tolist() == [3, 0] and sum_.tolist() == [3, 2] and with_zero.tolist() == [3, 0]
