"""How costs grow: time per named operation with more in flight, time per allreduce with more ranks.

    python benchmarks/growth.py

Runs `ronde bench negotiation` and `ronde bench ranks`, and prints for each step from one line to the next the
*exponent* of the growth: 0 when the cost stays the same, 1 when it grows as fast as the number does, 2 when it grows
as its square. More ranks than cores take turns on the cores, so there the least one can hope for is 1.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from ronde.cli.bench.runner import BenchmarkResult


def bench(*arguments: str) -> list[BenchmarkResult]:
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory, "results.jsonl")
        command = (sys.executable, "-m", "ronde.cli.main", "bench", *arguments, "--json", str(results))
        subprocess.run(command, check=True)
        return msgspec.json.decode(
            b"[" + b",".join(results.read_bytes().splitlines()) + b"]", type=list[BenchmarkResult]
        )


def exponents(numbers: Sequence[int], costs: Sequence[float]) -> list[float]:
    """Slope on paper with two logarithmic axes, from each point to the next."""
    points = list(zip(numbers, costs, strict=True))
    return [math.log(c1 / c0) / math.log(n1 / n0) for (n0, c0), (n1, c1) in itertools.pairwise(points)]


def show(console: Console, title: str, numbers: Sequence[int], costs: Sequence[float]) -> None:
    table = Table("number", "median µs", "exponent", title=title)
    for number, cost, exponent in zip(numbers, costs, ("", *exponents(numbers, costs)), strict=True):
        table.add_row(str(number), f"{cost:.1f}", exponent if isinstance(exponent, str) else f"{exponent:.2f}")
    console.print(table)


def main(
    ranks: Annotated[int, typer.Option("-np", "--ranks", min=2, help="Ranks that negotiate.")] = 2,
    flight: Annotated[str, typer.Option(help="Operations in flight.")] = "1,10,100,1000,10000",
    counts: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4,8,16,32,64",
) -> None:
    """Print how costs grow."""
    console = Console()
    named = bench("negotiation", "-np", str(ranks), "--flight", flight)
    show(
        console,
        f"one named operation of 4 bytes, {ranks} ranks, by how many are in flight",
        [int(record.path.removeprefix("flight-")) for record in named],
        [record.median_us for record in named],
    )
    by_ranks = bench("ranks", "--counts", counts)
    for op, num_bytes in dict.fromkeys((record.op, record.bytes) for record in by_ranks):
        same = [record for record in by_ranks if (record.op, record.bytes) == (op, num_bytes)]
        title = "start of all ranks" if op == "start" else f"allreduce of {num_bytes:,} bytes, by ranks"
        show(console, title, [record.ranks for record in same], [record.median_us for record in same])


if __name__ == "__main__":
    typer.run(main)
