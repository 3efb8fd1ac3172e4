"""How the start of a job and allreduce get slower with more ranks.

python benchmarks/ranks.py --counts 2,4,8
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from rich.console import Console
from rich.table import Table

from ronde.cli.bench.allreduce import FLOAT_BYTES, BenchmarkResult, choose_workloads, make_cases, measure_cases
from ronde.cli.bench.command import parse_numbers
from ronde.cli.bench.peers import RONDE, MeasuredLibrary, find_peers
from ronde.cli.bench.runner import BenchmarkRunner, MeasurementBudget
from ronde.cli.bench.table import BenchmarkDisplay, describe_conditions, make_table
from ronde.errors import RondeError
from ronde.text import format_exact_bytes, format_microseconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure start and allreduce with more and more ranks.")
    add = parser.add_argument
    add("--counts", default="2,4,8,16,32,64", help="numbers of ranks")
    add("--sizes", default="4K,1M", help="bytes per rank")
    add("--peers", default="none", help="measure these too: gloo, hvd, mpi, openmpi, mpich")
    add("--mpi-python", action="append", default=[], help="Python of an environment with an MPI library")
    add("--json", help="write the results to this file, one JSON object per line")
    add("--repeats", type=int, default=3, help="rounds per library and size")
    add("--seconds", type=float, default=0.5, help="time per library and size, shared by its rounds")
    return parser.parse_args()


def measure(flags: argparse.Namespace, console: Console) -> None:
    workloads = choose_workloads(flags.sizes, ["array"])
    rank_counts = parse_numbers(flags.counts, "--counts")
    budget = MeasurementBudget(rounds=flags.repeats, seconds=flags.seconds)
    libraries = [MeasuredLibrary(RONDE, RONDE), *find_peers(flags.peers, flags.mpi_python)[0]]
    render = partial(render_table, caption=describe_conditions())
    with BenchmarkDisplay(console, render, flags.json) as display:
        for num_ranks in rank_counts:
            with BenchmarkRunner(budget, display) as runner:
                for library in libraries:
                    display.add(time_start(runner, library, num_ranks))
                for counts in workloads:
                    cases = make_cases(runner.pools, libraries, counts, ["array"])
                    display.add(measure_cases(runner, "allreduce", FLOAT_BYTES * sum(counts), cases))


def time_start(runner: BenchmarkRunner, library: MeasuredLibrary, num_ranks: int) -> list[BenchmarkResult]:
    """Start ranks: how long it took until the last of them was ready; nothing for a peer that did not start."""
    num_before = len(runner.pools)
    start_s = time.perf_counter()
    runner.start(library, num_ranks)
    took_us = round((time.perf_counter() - start_s) * 1e6, 1)
    if len(runner.pools) == num_before:
        return []
    return [BenchmarkResult(library.name, "start", "", num_ranks, 0, took_us, took_us, 0.0)]


def render_table(results: Sequence[BenchmarkResult], caption: str = "") -> Table:
    """A row per number of ranks and library: the time of the start, and the median of each size."""
    sizes = sorted({result.bytes for result in results if result.op != "start"})
    table = make_table("ranks", "", "start", *(f"{format_exact_bytes(size)} array" for size in sizes), caption=caption)
    for num_ranks, same_number in groupby(results, key=lambda result: result.ranks):
        rows = list(same_number)
        names = list(dict.fromkeys(row.impl for row in rows))
        for index, name in enumerate(names):
            times = {(row.op, row.bytes): format_microseconds(row.median_us) for row in rows if row.impl == name}
            cells = [times.get(("start", 0), ""), *(times.get(("allreduce", size), "") for size in sizes)]
            table.add_row("" if index else str(num_ranks), name, *cells, end_section=index == len(names) - 1)
    return table


if __name__ == "__main__":
    try:
        measure(parse_arguments(), Console())
    except (RondeError, ValueError) as error:
        sys.exit(f"error: {error}")
