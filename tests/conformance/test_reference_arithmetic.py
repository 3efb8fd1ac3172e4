"""The reference arithmetic, against plain definitions."""

from __future__ import annotations

import numpy as np
import pytest

from ronde.types import DType, Op
from tests.conformance.reference_arithmetic import adasum, float32_bounds, reduce


def test_whole_numbers_wrap_and_truncate() -> None:
    most = np.array([127, -128, -7], np.int8)
    assert reduce([most, np.array([1, -1, 0], np.int8)], DType.INT8, Op.SUM, 1.0, 1.0).tolist() == [-128, 127, -7]
    assert reduce([most, np.zeros(3, np.int8)], DType.INT8, Op.MEAN, 1.0, 1.0).tolist() == [63, -64, -3]
    assert reduce([np.array([9], np.uint64)] * 2, DType.UINT64, Op.MEAN, 1.0, 1.0).tolist() == [9]


def test_a_mean_of_whole_numbers_does_not_wrap() -> None:
    assert reduce([np.array([200], np.uint8)] * 2, DType.UINT8, Op.MEAN, 1.0, 1.0).tolist() == [200]
    most, least = np.array([2**64 - 1, 2**64 - 1], np.uint64), np.array([-(2**63), 2**63 - 1])
    assert reduce([most, most, most], DType.UINT64, Op.MEAN, 1.0, 1.0).tolist() == most.tolist()
    assert reduce([least, least, least], DType.INT64, Op.MEAN, 1.0, 1.0).tolist() == least.tolist()
    assert reduce([least, np.array([0, 2])], DType.INT64, Op.MEAN, 1.0, 1.0).tolist() == [-(2**62), 2**62]


def test_a_result_within_float32_bounds_is_rounded_once() -> None:
    forty_thousand, one = np.array([40_000], np.float16), np.array([2049], np.float16)  # is 2048
    low, high = float32_bounds([forty_thousand, forty_thousand], DType.FLOAT16, Op.MEAN)
    assert low.tolist() == high.tolist() == [40_000]
    # 2048 + 1 is exactly between two numbers: an error of float32 decides, and one of float16 is too large.
    low, high = float32_bounds([one, np.array([1], np.float16)], DType.FLOAT16, Op.SUM)
    assert (low.tolist(), high.tolist()) == ([2048], [2050])
    ones = np.array([0x3F80], np.uint16)
    assert [bound.tolist() for bound in float32_bounds([ones, ones], DType.BFLOAT16, Op.SUM)] == [[2.0], [2.0]]
    assert all(
        bound.tolist() == [256.0]
        for bound in float32_bounds(
            [np.array([0x4380], np.uint16), np.array([0x3F00], np.uint16)], DType.BFLOAT16, Op.SUM
        )
    )


@pytest.mark.parametrize(
    ("factor", "result"), [(0.5, [1, -1]), (1e30, [2**63 - 1, -(2**63)]), (-1e30, [-(2**63), 2**63 - 1])]
)
def test_scaled_whole_numbers_stay_within_their_limits(factor: float, result: list[int]) -> None:
    assert reduce([np.array([3, -3])], DType.INT64, Op.SUM, factor, 1.0).tolist() == result


def test_bool_is_or_and_and() -> None:
    a, b = np.array([True, True, False]), np.array([True, False, False])
    assert reduce([a, b], DType.BOOL, Op.SUM, 1.0, 1.0).tolist() == [True, True, False]
    assert reduce([a, b], DType.BOOL, Op.MIN, 1.0, 1.0).tolist() == [True, False, False]
    assert reduce([a, b], DType.BOOL, Op.BIT_XOR, 1.0, 1.0).tolist() == [False, True, False]


def test_bfloat16_rounds_to_even_and_keeps_nan() -> None:
    def bits(*values: float) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)

    result = reduce([bits(256.0, 1.0, np.nan, 258.0), bits(1.0, 2.0, 1.0, 1.0)], DType.BFLOAT16, Op.SUM, 1.0, 1.0)
    values = (result.astype(np.uint32) << 16).view(np.float32)
    assert values[[0, 1, 3]].tolist() == [256.0, 3.0, 260.0]
    assert np.isnan(values[2])


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_equal() -> None:
    x, y = np.array([1.0, 0.0]), np.array([0.0, 2.0])
    assert adasum([x, y]).tolist() == [1.0, 2.0]
    assert adasum([x, x]).tolist() == [1.0, 0.0]
    assert adasum([x, np.zeros(2)]).tolist() == [1.0, 0.0]
    assert adasum([x, x, x]).tolist() == [1.0, 0.0]
    assert adasum([y]).tolist() == [0.0, 2.0]
