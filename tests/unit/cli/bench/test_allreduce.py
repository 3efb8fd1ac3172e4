"""`ronde bench allreduce`: what is reduced, in which ways, and what the results and tables say."""

from __future__ import annotations

from math import prod
from typing import cast

import msgspec
import pytest
from rich.console import RenderableType

from ronde.cli.bench.allreduce import (
    BUCKET_BYTES,
    AllreduceCase,
    BenchmarkResult,
    make_cases,
    pack_buckets,
    parse_sizes,
    render_allreduce_table,
    resnet50_shapes,
)
from ronde.cli.bench.command import parse_numbers
from ronde.cli.bench.negotiation import render_negotiation_table
from ronde.cli.bench.peers import MeasuredLibrary
from ronde.cli.bench.runner import RankPool
from tests.unit.cli.commands import drawn


class NamedPool:
    size = 2

    def __init__(self, name: str) -> None:
        self.name = name


def pool(name: str) -> RankPool:
    return cast("RankPool", NamedPool(name))


def test_many_stands_for_the_gradients_of_the_real_resnet50_last_layer_first() -> None:
    shapes = list(resnet50_shapes())
    assert (len(shapes), sum(map(prod, shapes))) == (161, 25_557_032)
    small, many = parse_sizes("4K, many")
    assert (small, len(many), sum(many), many[0]) == ((1024,), 161, 25_557_032, 1000)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4096", 4096), ("4kb", 4096), ("64KiB", 65536), ("16M", 16 << 20), ("1G", 1 << 30)]
)
def test_a_size_may_be_written_in_many_ways(text: str, num_bytes: int) -> None:
    assert list(parse_sizes(text)) == [(num_bytes // 4,)]


@pytest.mark.parametrize("text", ["0", "-4", "5", "4T", "K", "1.5M", "fast", "²K"])
def test_a_size_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size is a multiple of 4 bytes"):
        list(parse_sizes(text))


def test_numbers_must_be_numbers() -> None:
    assert parse_numbers("1, 10,100", "--flight") == (1, 10, 100)
    with pytest.raises(ValueError, match="--flight must be whole numbers from 1, separated by commas; got '0'"):
        parse_numbers("1,0", "--flight")


def test_arrays_are_packed_in_order_and_a_large_one_gets_its_own_bucket() -> None:
    assert pack_buckets([2, 2, 3, 1, 9, 1], max_bytes=16) == (4, 4, 9, 1)


def test_peers_have_one_path_for_one_array_and_ronde_those_asked_for() -> None:
    libraries = [MeasuredLibrary("ronde", "ronde"), MeasuredLibrary("gloo", "gloo"), MeasuredLibrary("mpich-2", "mpi")]
    pools = [pool(library.name) for library in libraries]
    one, many = parse_sizes("1M,many")

    def names(counts: tuple[int, ...], *paths: str) -> list[str]:
        return [case.name for case in make_cases(pools, libraries, counts, paths)]

    assert names(one, "bucket") == ["ronde bucket", "gloo array", "mpich-2 array"]
    assert names(one, "array", "bucket")[:2] == ["ronde array", "ronde bucket"]
    assert names(many, "many") == [
        *("ronde many", "ronde many-25MB", "gloo many", "gloo many-25MB", "mpich-2 many", "mpich-2 many-iallreduce"),
    ]
    (_, packed, *_) = make_cases(pools, libraries, many, ("many",))
    assert (len(packed.counts), sum(packed.counts)) == (5, sum(many))
    assert max(packed.counts) * 4 <= BUCKET_BYTES


def rounds(*took_ns: list[int]) -> list[list[dict[str, list[int]]]]:
    return [[{"took_ns": took}, {"took_ns": [1]}] for took in took_ns]


def test_a_result_has_median_fastest_and_gigabits_per_second_of_rank_0() -> None:
    case = AllreduceCase(pool("ronde"), "array", (1024,), rounds=rounds([4000, 1000, 2000], [9000, 2000]))
    assert msgspec.json.decode(msgspec.json.encode(case.result("allreduce", 4096))) == {
        "impl": "ronde",
        "op": "allreduce",
        "path": "array",
        "ranks": 2,
        "bytes": 4096,
        "median_us": 2.0,
        "min_us": 1.0,
        "gbps": 16.384,
    }


def test_times_of_repeated_operations_are_per_operation() -> None:
    case = AllreduceCase(pool("ronde"), "many", (1,), 100, "flight-100", rounds=rounds([500_000]))
    result = case.result("negotiation", 4)
    assert (result.path, result.median_us) == ("flight-100", 5.0)
    assert "200,000" in line_with(render_negotiation_table([result]), "100", "5.0 µs")


def result_of(impl: str, median_us: float, *, num_bytes: int = 1 << 20) -> BenchmarkResult:
    return BenchmarkResult(impl, "allreduce", "array", 2, num_bytes, median_us, median_us / 2, 8.0)


def line_with(table: RenderableType, *texts: str) -> str:
    (line,) = [line for line in drawn(table, 120).splitlines() if all(text in line for text in texts)]
    return line


def test_ronde_and_the_compatibility_package_are_compared_with_the_fastest_peer() -> None:
    rows = [("ronde", 100), ("hvd", 120), ("gloo", 400), ("mpich", 150)]
    table = render_allreduce_table([result_of(impl, median_us) for impl, median_us in rows])
    assert "1.50 ×" in line_with(table, "ronde")
    assert "1.25 ×" in line_with(table, "hvd")
    assert "best peer" in line_with(table, "mpich")
    assert "×" not in line_with(table, "gloo")


def test_sizes_are_compared_apart() -> None:
    rows = [result_of("ronde", 10, num_bytes=4096), result_of("gloo", 20, num_bytes=4096)]
    rows += [result_of("ronde", 100), result_of("gloo", 50)]
    table = render_allreduce_table(rows)
    assert "2.00 ×" in line_with(table, "4K", "ronde")
    assert "0.50 ×" in line_with(table, "1M", "ronde")


def test_without_a_peer_there_is_nothing_to_compare_with() -> None:
    assert "×" not in line_with(render_allreduce_table([result_of("ronde", 100)]), "ronde")
