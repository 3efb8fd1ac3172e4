"""How costs grow: time per named operation with more in flight, time per allreduce with more ranks.

    python benchmarks/growth.py

Runs `ronde bench negotiation` and ranks.py, and prints for each step from one line to the next the *exponent* of the
growth: 0 when the cost stays the same, 1 when it grows as fast as the number does, 2 when it grows as its square. More
ranks than cores take turns on the cores, so there the least one can hope for is 1.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ronde.cli.bench.allreduce import BenchmarkResult

NEGOTIATION = ("-m", "ronde.cli.main", "bench", "negotiation")
RANKS = (str(Path(__file__).with_name("ranks.py")),)


def measure(*arguments: str) -> list[BenchmarkResult]:
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory, "results.jsonl")
        subprocess.run((sys.executable, *arguments, "--json", str(results)), check=True)
        lines = results.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=BenchmarkResult) for line in lines]


def show(console: Console, title: str, numbers: Sequence[int], costs: Sequence[float]) -> None:
    table = Table("number", "median µs", "exponent", title=title)
    before: tuple[int, float] | None = None
    for number, cost in zip(numbers, costs, strict=True):
        # The slope on paper with two logarithmic axes, from each point to the next.
        slope = math.log(cost / before[1]) / math.log(number / before[0]) if before else None
        table.add_row(str(number), f"{cost:.1f}", "" if slope is None else f"{slope:.2f}")
        before = number, cost
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how costs grow.")
    parser.add_argument("-np", "--ranks", type=int, default=2, help="ranks that negotiate")
    parser.add_argument("--flight", default="1,10,100,1000,10000", help="operations in flight")
    parser.add_argument("--counts", default="2,4,8,16,32,64", help="numbers of ranks")
    flags = parser.parse_args()
    console = Console()
    named = measure(*NEGOTIATION, "-np", str(flags.ranks), "--flight", flags.flight)
    show(
        console,
        f"one named operation of 4 bytes, {flags.ranks} ranks, by how many are in flight",
        [int(result.path.removeprefix("flight-")) for result in named],
        [result.median_us for result in named],
    )
    by_ranks = measure(*RANKS, "--counts", flags.counts)
    for op, num_bytes in dict.fromkeys((result.op, result.bytes) for result in by_ranks):
        same = [result for result in by_ranks if (result.op, result.bytes) == (op, num_bytes)]
        title = "start of all ranks" if op == "start" else f"allreduce of {num_bytes:,} bytes, by ranks"
        show(console, title, [result.ranks for result in same], [result.median_us for result in same])


if __name__ == "__main__":
    main()
