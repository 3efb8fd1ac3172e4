"""Tables say who is faster and by how much."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console, RenderableType

from ronde.cli.bench.runner import BenchmarkResult
from ronde.cli.bench.table import allreduce_table, best_peer, negotiation_table, ranks_table
from ronde.text import format_microseconds


def record(
    impl: str, median_us: float, *, num_bytes: int = 1 << 20, ranks: int = 2, op: str = "allreduce"
) -> BenchmarkResult:
    return BenchmarkResult(impl, op, "array", ranks, num_bytes, median_us, median_us / 2, 8.0)


def text_of(table: RenderableType, width: int = 120) -> list[str]:
    console = Console(file=StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def line_with(table: RenderableType, *words: str) -> str:
    (line,) = [line for line in text_of(table) if all(word in line for word in words)]
    return line


def test_ronde_is_compared_with_the_fastest_peer() -> None:
    table = allreduce_table([record("ronde", 100), record("gloo", 400), record("mpich", 150)])
    assert "1.50 ×" in line_with(table, "ronde")
    assert "best peer" in line_with(table, "mpich")
    assert "×" not in line_with(table, "gloo")


def test_a_loss_is_shown_as_one() -> None:
    table = allreduce_table([record("ronde", 200), record("gloo", 100)])
    assert "0.50 ×" in line_with(table, "ronde")


def test_the_compatibility_package_is_no_peer_and_compared_as_ronde_is() -> None:
    table = allreduce_table([record("ronde", 100), record("hvd", 125), record("gloo", 250)])
    assert "2.00 ×" in line_with(table, "hvd")
    assert "2.50 ×" in line_with(table, "ronde")
    assert "best peer" in line_with(table, "gloo")


def test_sizes_are_compared_apart() -> None:
    rows = [record("ronde", 10, num_bytes=4096), record("gloo", 20, num_bytes=4096)]
    rows += [record("ronde", 100), record("gloo", 50)]
    table = allreduce_table(rows)
    assert "2.00 ×" in line_with(table, "4K", "ronde")
    assert "0.50 ×" in line_with(table, "1M", "ronde")


def test_without_a_peer_there_is_nothing_to_compare_with() -> None:
    assert best_peer([record("ronde", 1)]) is None
    assert "×" not in line_with(allreduce_table([record("ronde", 100)]), "ronde")


def test_negotiation_shows_the_rate() -> None:
    assert "200,000" in line_with(negotiation_table([record("ronde", 5.0)], [100]), "100", "5.0 µs")


def test_ranks_shows_start_and_sizes_on_one_line() -> None:
    rows = [record("ronde", 1.5e6, op="start", num_bytes=0, ranks=8), record("ronde", 250.0, ranks=8)]
    line = line_with(ranks_table(rows), "ronde")
    assert all(word in line for word in ("8", "1.50 s", "250.0 µs"))


@pytest.mark.parametrize(("us", "text"), [(0.5, "0.5 µs"), (999.0, "999.0 µs"), (1500.0, "1.50 ms"), (2.5e6, "2.50 s")])
def test_a_time_has_the_unit_one_would_say(us: float, text: str) -> None:
    assert format_microseconds(us) == text
