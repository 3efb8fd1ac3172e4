"""`ronde bench negotiation`: how long a named operation takes, against how many are in flight at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from ronde.cli.bench.allreduce import FLOAT_BYTES, AllreduceCase, BenchmarkResult, measure_cases
from ronde.cli.bench.command import make_parser, parse_numbers, run_benchmark
from ronde.cli.bench.peers import RONDE, MeasuredLibrary
from ronde.cli.bench.runner import BenchmarkRunner, MeasurementBudget
from ronde.cli.bench.table import BenchmarkDisplay, describe_conditions, make_table
from ronde.text import format_microseconds


def negotiation(arguments: Sequence[str]) -> int:
    parser = make_parser("negotiation", details="Each operation reduces 4 bytes.", rounds=10, seconds=1.0)
    flight_help = "How many operations are in flight at once."
    parser.add_flag("--flight", metavar="N,…", default="1,10,100,1000,10000", help=flight_help)
    return run_benchmark(parser, arguments, _measure)


def _measure(flags: argparse.Namespace, console: Console) -> None:
    in_flight = parse_numbers(flags.flight, "--flight")
    budget = MeasurementBudget(rounds=flags.rounds, seconds=flags.seconds)
    render = partial(render_negotiation_table, caption=describe_conditions(flags.num_ranks))
    with (
        BenchmarkDisplay(console, render, flags.json) as display,
        BenchmarkRunner(budget, display) as runner,
    ):
        runner.start(MeasuredLibrary(RONDE, RONDE), flags.num_ranks)
        for num in in_flight:
            case = AllreduceCase(runner.pools[0], "many", (1,), repeat=num, label=f"flight-{num}")
            display.add(measure_cases(runner, "negotiation", FLOAT_BYTES, [case]))


def render_negotiation_table(results: Sequence[BenchmarkResult], caption: str = "") -> Table:
    table = make_table("in flight", "per operation", "fastest", "operations/s", caption=caption)
    for row in results:
        rate = 1e6 / row.median_us if row.median_us else 0.0
        times = format_microseconds(row.median_us), format_microseconds(row.min_us)
        table.add_row(row.path.removeprefix("flight-"), *times, f"{rate:,.0f}")
    return table
