"""`ronde bench allreduce`: what is reduced, in which ways, and what the results and tables say."""

from __future__ import annotations

from io import StringIO
from math import prod
from typing import cast

import msgspec
import pytest
from rich.console import Console, RenderableType

from ronde.cli.bench.allreduce import (
    BUCKET_BYTES,
    AllreduceCase,
    BenchmarkResult,
    Workload,
    best_peer,
    make_cases,
    pack_buckets,
    parse_workloads,
    render_allreduce_table,
    resnet50_shapes,
)
from ronde.cli.bench.command import parse_numbers
from ronde.cli.bench.negotiation import render_negotiation_table
from ronde.cli.bench.peers import MeasuredLibrary
from ronde.cli.bench.runner import RankPool


class NamedPool:
    size = 2

    def __init__(self, name: str) -> None:
        self.name = name


def pool(name: str) -> RankPool:
    return cast("RankPool", NamedPool(name))


# --- workloads --------------------------------------------------------------------------------------------------------


def test_resnet50_has_as_many_parameters_as_the_real_one() -> None:
    shapes = list(resnet50_shapes())
    assert len(shapes) == 161
    assert sum(map(prod, shapes)) == 25_557_032


@pytest.mark.parametrize(
    ("text", "name", "num_bytes"),
    [
        ("4096", "4K", 4096),
        ("4kb", "4K", 4096),
        ("64KiB", "64K", 65536),
        ("16M", "16M", 16 << 20),
        ("1G", "1G", 1 << 30),
    ],
)
def test_a_size_may_be_written_in_many_ways(text: str, name: str, num_bytes: int) -> None:
    (workload,) = parse_workloads(text)
    assert workload == Workload(name, (num_bytes // 4,))
    assert (workload.num_bytes, workload.is_many) == (num_bytes, False)


def test_many_stands_for_the_gradients_last_layer_first() -> None:
    small, many = parse_workloads("4K, many")
    assert small.num_bytes == 4096
    assert (many.is_many, many.num_bytes, many.counts[0]) == (True, 102_228_128, 1000)


@pytest.mark.parametrize("text", ["0", "-4", "5", "4T", "K", "1.5M", "fast", "²K"])
def test_a_size_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size is a multiple of 4 bytes"):
        parse_workloads(text)


def test_numbers_must_be_numbers() -> None:
    assert parse_numbers("1, 10,100", "--flight") == (1, 10, 100)
    with pytest.raises(ValueError, match="--flight must be whole numbers from 1, separated by commas; got '0'"):
        parse_numbers("1,0", "--flight")


def test_arrays_are_packed_in_order_and_a_large_one_gets_its_own_bucket() -> None:
    assert pack_buckets([2, 2, 3, 1, 9, 1], max_bytes=16) == (4, 4, 9, 1)


def test_peers_have_one_path_for_one_array_and_ronde_those_asked_for() -> None:
    libraries = [MeasuredLibrary("ronde", "ronde"), MeasuredLibrary("gloo", "gloo"), MeasuredLibrary("mpich-2", "mpi")]
    pools = [pool(library.name) for library in libraries]
    one, many = parse_workloads("1M,many")

    def names(workload: Workload, *paths: str) -> list[str]:
        return [case.name for case in make_cases(pools, libraries, workload, paths)]

    assert names(one, "bucket") == ["ronde bucket", "gloo array", "mpich-2 array"]
    assert names(one, "array", "bucket")[:2] == ["ronde array", "ronde bucket"]
    assert names(many, "many") == [
        *("ronde many", "ronde many-25MB", "gloo many", "gloo many-25MB", "mpich-2 many", "mpich-2 many-iallreduce"),
    ]
    (_, packed, *_) = make_cases(pools, libraries, many, ("many",))
    assert len(packed.counts) == 5
    assert sum(packed.counts) == sum(many.counts)
    assert max(packed.counts) * 4 <= BUCKET_BYTES


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_result_has_median_fastest_and_gigabits_per_second() -> None:
    result = AllreduceCase(pool("ronde"), "array", (1024,), took_ns=[4000, 1000, 2000, 9000, 2000]).result(
        "allreduce", 4096
    )
    assert msgspec.json.decode(msgspec.json.encode(result)) == {
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
    case = AllreduceCase(pool("ronde"), "many", (1,), repeat=100, label="flight-100", took_ns=[500_000])
    result = case.result("negotiation", 4)
    assert (result.path, result.median_us) == ("flight-100", 5.0)


# --- tables -----------------------------------------------------------------------------------------------------------


def result_of(impl: str, median_us: float, *, num_bytes: int = 1 << 20) -> BenchmarkResult:
    return BenchmarkResult(impl, "allreduce", "array", 2, num_bytes, median_us, median_us / 2, 8.0)


def lines_of(table: RenderableType, width: int = 120) -> list[str]:
    console = Console(file=StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def line_with(table: RenderableType, *texts: str) -> str:
    (line,) = [line for line in lines_of(table) if all(text in line for text in texts)]
    return line


def test_ronde_is_compared_with_the_fastest_peer() -> None:
    table = render_allreduce_table([result_of("ronde", 100), result_of("gloo", 400), result_of("mpich", 150)])
    assert "1.50 ×" in line_with(table, "ronde")
    assert "best peer" in line_with(table, "mpich")
    assert "×" not in line_with(table, "gloo")


def test_the_compatibility_package_is_no_peer_and_compared_as_ronde_is() -> None:
    table = render_allreduce_table([result_of("ronde", 100), result_of("hvd", 125), result_of("gloo", 250)])
    assert "2.00 ×" in line_with(table, "hvd")
    assert "2.50 ×" in line_with(table, "ronde")
    assert "best peer" in line_with(table, "gloo")


def test_sizes_are_compared_apart() -> None:
    rows = [result_of("ronde", 10, num_bytes=4096), result_of("gloo", 20, num_bytes=4096)]
    rows += [result_of("ronde", 100), result_of("gloo", 50)]
    table = render_allreduce_table(rows)
    assert "2.00 ×" in line_with(table, "4K", "ronde")
    assert "0.50 ×" in line_with(table, "1M", "ronde")


def test_without_a_peer_there_is_nothing_to_compare_with() -> None:
    assert best_peer([result_of("ronde", 1)]) is None
    assert "×" not in line_with(render_allreduce_table([result_of("ronde", 100)]), "ronde")


def test_negotiation_shows_the_rate() -> None:
    assert "200,000" in line_with(render_negotiation_table([result_of("ronde", 5.0)], [100]), "100", "5.0 µs")
