"""Sizes as people write them, and the gradients of ResNet-50."""

from __future__ import annotations

from math import prod

import pytest

from ronde.cli.bench.cases import BUCKET_BYTES, Workload, buckets, parse_numbers, parse_works, resnet50
from ronde.text import format_exact_bytes


def test_resnet50_has_as_many_parameters_as_the_real_one() -> None:
    shapes = list(resnet50())
    assert len(shapes) == 161
    assert sum(map(prod, shapes)) == 25_557_032


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("4K", 4096), ("4kb", 4096), ("64KiB", 65536), ("16M", 16 << 20), ("1G", 1 << 30)],
)
def test_a_size_may_be_written_in_many_ways(text: str, num_bytes: int) -> None:
    (work,) = parse_works(text)
    assert work == Workload(format_exact_bytes(num_bytes), (num_bytes // 4,))
    assert work.num_bytes == num_bytes
    assert not work.is_many


def test_many_stands_for_the_gradients_last_layer_first() -> None:
    small, many = parse_works("4K, many")
    assert small.num_bytes == 4096
    assert many.is_many
    assert many.num_bytes == 102_228_128
    assert many.counts[0] == 1000


@pytest.mark.parametrize("text", ["0", "-4", "5", "4T", "K", "1.5M", "fast", "²K"])
def test_a_size_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size is a multiple of 4 bytes"):
        parse_works(text)


def test_numbers_must_be_numbers() -> None:
    assert parse_numbers("1, 10,100", "--flight") == (1, 10, 100)
    with pytest.raises(ValueError, match="--flight must be whole numbers from 1, separated by commas; got '0'"):
        parse_numbers("1,0", "--flight")


def test_arrays_are_packed_in_order_and_a_large_one_gets_its_own_bucket() -> None:
    assert buckets([2, 2, 3, 1, 9, 1], limit_bytes=16) == (4, 4, 9, 1)


def test_no_bucket_of_resnet50_is_over_the_limit_and_nothing_is_lost() -> None:
    (many,) = parse_works("many")
    packed = buckets(many.counts)
    assert sum(packed) == sum(many.counts)
    assert max(packed) * 4 <= BUCKET_BYTES


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(4096, "4K"), (4100, "4100"), (1 << 20, "1M"), (3 << 30, "3G"), (0, "0")]
)
def test_a_size_is_shown_as_one_would_type_it(num_bytes: int, text: str) -> None:
    assert format_exact_bytes(num_bytes) == text
