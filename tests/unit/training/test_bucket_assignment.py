from __future__ import annotations

from typing import Any

import pytest

from ronde.training.gradients.adapter import ParameterInfo
from ronde.training.gradients.bucket_assignment import MEGABYTE, assign_buckets, choose_size_limits


def parameters(*counts: int, dtypes: str = "") -> list[ParameterInfo]:
    return [
        ParameterInfo(f"p{index}", (count,), "bfloat16" if dtypes[index:].startswith("b") else "float32", count)
        for index, count in enumerate(counts)
    ]


SPARSE_AND_EMPTY = [
    ParameterInfo("a", (3,), "float32", 3, sparse=True),
    ParameterInfo("b", (0,), "float32", 0),
    *parameters(4),
]


@pytest.mark.parametrize(
    ("given", "order", "limits", "together", "expected"),
    [
        pytest.param(parameters(10, 10, 10, 10), [3, 1, 2, 0], (80, 80), (), [(3, 1), (2, 0)], id="neighbours"),
        pytest.param(parameters(*[10] * 4), [2], (40, 40), (), [(2,), (3,), (1,), (0,)], id="missing ones are last"),
        pytest.param(parameters(5, 1000, 5, 5), [3, 2, 1, 0], (40, 40), (), [(3, 2), (1,), (0,)], id="a large one"),
        pytest.param(parameters(*[10] * 4, dtypes="ffbb"), [0, 2, 3, 1], (999, 999), (), [(2, 3), (0, 1)], id="dtypes"),
        pytest.param(SPARSE_AND_EMPTY, [], (1, 1), (), [(2,)], id="sparse and empty ones are in none"),
        pytest.param(
            parameters(*[10] * 4), [3, 2, 1, 0], (40, 40), [("p3", "p0")], [(2,), (1,), (3, 0)], id="together"
        ),
    ],
)
def test_gradients_that_are_ready_one_after_the_other_share_a_bucket(
    given: list[ParameterInfo], order: list[int], limits: tuple[int, int], together: Any, expected: list[Any]
) -> None:
    buckets = assign_buckets(given, order, limits, together)
    assert [bucket.indices for bucket in buckets] == expected
    assert all(len({given[index].dtype for index in bucket.indices}) == 1 for bucket in buckets)


def test_a_bucket_is_named_after_its_first_parameter_and_says_where_each_gradient_lies() -> None:
    first, second = assign_buckets(parameters(9, 9, 9), [2, 1, 0], (72, 72))
    assert (first.name, second.name) == ("p2 and 1 more", "p0")
    assert [(location.start, location.count) for location in first.locations] == [(0, 9), (9, 9)]


def test_buckets_double_until_they_are_as_large_as_allowed() -> None:
    buckets = assign_buckets(parameters(*[10] * 40), range(40), (40, 200))
    assert [bucket.count for bucket in buckets] == [10, 20, 40, 50, 50, 50, 50, 50, 50, 30]


@pytest.mark.parametrize(
    ("total_bytes", "bucket_mb", "overlap", "limits"),
    [
        (244 * MEGABYTE, None, True, (MEGABYTE, 25 * MEGABYTE)),  # the first are small, so that traffic starts early
        (8 * MEGABYTE, None, True, (MEGABYTE, 2 * MEGABYTE)),
        (100, None, True, (MEGABYTE, MEGABYTE)),
        (244 * MEGABYTE, 5, True, (5 * MEGABYTE, 5 * MEGABYTE)),
        (244 * MEGABYTE, None, False, (244 * MEGABYTE, 244 * MEGABYTE)),  # one bucket
    ],
)
def test_how_large_buckets_may_become(
    total_bytes: int, bucket_mb: float | None, overlap: bool, limits: tuple[int, int]
) -> None:
    assert choose_size_limits(total_bytes, bucket_mb, overlap) == limits
