from __future__ import annotations

from ronde.training.adapter import ParameterInfo
from ronde.training.buckets import (
    MEGABYTE,
    BucketSizeLimits,
    GradientBucket,
    assign_buckets,
    choose_size_limits,
    should_overlap,
)


def parameters(*counts: int, dtype: str = "float32") -> list[ParameterInfo]:
    return [ParameterInfo(f"p{index}", (count,), dtype, count) for index, count in enumerate(counts)]


def indices(buckets: tuple[GradientBucket, ...]) -> list[tuple[int, ...]]:
    return [bucket.indices for bucket in buckets]


def test_neighbours_of_the_order_in_which_gradients_come_share_a_bucket() -> None:
    buckets = assign_buckets(parameters(10, 10, 10, 10), [3, 1, 2, 0], BucketSizeLimits(80, 80))
    assert indices(buckets) == [(3, 1), (2, 0)]
    assert [(span.start, span.count) for span in buckets[0].locations] == [(0, 10), (10, 10)]
    assert [bucket.count for bucket in buckets] == [20, 20]


def test_what_never_came_travels_last_and_backwards() -> None:
    assert indices(assign_buckets(parameters(10, 10, 10, 10), [2], BucketSizeLimits(40, 40))) == [
        (2,),
        (3,),
        (1,),
        (0,),
    ]


def test_a_gradient_larger_than_allowed_has_a_bucket_of_its_own() -> None:
    assert indices(assign_buckets(parameters(5, 1000, 5, 5), [3, 2, 1, 0], BucketSizeLimits(40, 40))) == [
        (3, 2),
        (1,),
        (0,),
    ]


def test_buckets_double_until_they_are_as_large_as_allowed() -> None:
    buckets = assign_buckets(parameters(*[10] * 40), range(40), BucketSizeLimits(40, 200))
    assert [bucket.count for bucket in buckets] == [10, 20, 40, 50, 50, 50, 50, 50, 50, 30]


def test_a_bucket_has_one_dtype_and_its_turn_comes_when_its_last_gradient_does() -> None:
    mixed = [*parameters(10, 10), *parameters(10, 10, dtype="bfloat16")]
    mixed = [ParameterInfo(f"p{index}", each.shape, each.dtype, each.count) for index, each in enumerate(mixed)]
    buckets = assign_buckets(mixed, [0, 2, 3, 1], BucketSizeLimits(1000, 1000))
    assert indices(buckets) == [(2, 3), (0, 1)]
    assert [bucket.dtype for bucket in buckets] == ["bfloat16", "float32"]


def test_sparse_and_empty_ones_are_in_no_bucket() -> None:
    given = [
        ParameterInfo("a", (3,), "float32", 3, sparse=True),
        ParameterInfo("b", (0,), "float32", 0),
        *parameters(4),
    ]
    assert indices(assign_buckets(given, [], BucketSizeLimits(1, 1))) == [(2,)]


def test_those_that_belong_together_share_a_bucket_whatever_its_size() -> None:
    buckets = assign_buckets(
        parameters(10, 10, 10, 10), [3, 2, 1, 0], BucketSizeLimits(40, 40), together=[("p3", "p0")]
    )
    assert indices(buckets) == [(2,), (1,), (3, 0)]


def test_a_bucket_is_named_after_its_first_parameter() -> None:
    assert [each.name for each in assign_buckets(parameters(9, 9, 9), [2, 1, 0], BucketSizeLimits(72, 72))] == [
        "p2 and 1 more",
        "p0",
    ]


def test_first_buckets_are_small_so_that_traffic_starts_early() -> None:
    assert choose_size_limits(244 * MEGABYTE, None, overlap=True) == BucketSizeLimits(MEGABYTE, 25 * MEGABYTE)
    assert choose_size_limits(8 * MEGABYTE, None, overlap=True) == BucketSizeLimits(MEGABYTE, 2 * MEGABYTE)
    assert choose_size_limits(100, None, overlap=True) == BucketSizeLimits(MEGABYTE, MEGABYTE)


def test_the_caller_may_choose_the_size() -> None:
    assert choose_size_limits(244 * MEGABYTE, 5, overlap=True) == BucketSizeLimits(5 * MEGABYTE, 5 * MEGABYTE)


def test_what_does_not_overlap_is_one_bucket() -> None:
    limits = choose_size_limits(244 * MEGABYTE, None, overlap=False)
    assert len(assign_buckets(parameters(60_000_000, 1_000_000), [1, 0], limits)) == 1


def test_overlap_pays_between_hosts_or_with_a_core_to_spare() -> None:
    assert should_overlap(num_hosts=2, num_busy_threads=2, num_cores=2)
    assert should_overlap(num_hosts=1, num_busy_threads=2, num_cores=3)
    assert not should_overlap(num_hosts=1, num_busy_threads=2, num_cores=2)
