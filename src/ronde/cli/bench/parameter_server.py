"""`ronde bench ps`: what waiting for a slow worker costs in each mode of a parameter server, and how long a step of it
takes beside an allreduce and beside parameter servers of torch.distributed.rpc (rpc_parameter_server)."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

import ronde
from ronde.cli.bench.command import make_parser, parse_numbers, run_benchmark
from ronde.cli.bench.peers import is_installed
from ronde.cli.bench.rpc_parameter_server import FLAT, WAYS, time_parameter_servers
from ronde.cli.bench.sparse_rows import DENSE, RPC_ROWS, time_rows
from ronde.cli.bench.table import BenchmarkDisplay, describe_conditions, format_ratio, make_table
from ronde.ps import SGD, ParameterServer
from ronde.text import format_microseconds

STEP_S = 0.02
"""What a step of a worker takes that is not slow. It sleeps: what is measured is waiting, on any number of cores."""
SLOWNESS = 3
"""A slow worker takes so many times as long."""
TURN_STEPS = 2
"""Workers that are slow in turn are so for this many steps."""
STALENESS = 4
MODES = ("sync", "bounded", "dynamic", "async")
WHAT = ("slow", "turns", "step", "rpc", "sparse")
SIZES = "400000,4000000,40000000"

DETAILS = """slow: steps per second of all workers when the last one takes three times as long as the others, in each
mode, against sync mode. turns: the same when the workers are slow in turn, each for two steps. A step of a worker that
is not slow sleeps for 20 ms. step: how long a step with SGD takes, with and without a backup of each part, beside an
allreduce of as many bytes and the same update on each rank. All ranks are servers and workers. rpc: the time of a step
in async mode with one server and -np workers, beside one of torch.distributed.rpc, with one call per step (flat) and
with calls for each of 60 parameters, as in PyTorch's tutorial. sparse: the same with 1,000 random rows of a table of
--rows rows of 64 numbers, with the whole table in every step, and with two calls of torch.distributed.rpc for the rows;
MB is what a worker sends and gets in a step. Between hosts: benchmarks/netns_parameter_server.py."""


class ParameterServerResult(msgspec.Struct, frozen=True):
    """One line of the results; what does not belong to its `what` is 0."""

    what: str
    mode: str
    ranks: int
    steps_per_s: float = 0.0
    """slow, turns: of all workers together."""
    ratio: float = 0.0
    """slow, turns: against sync mode. step: how many times as fast as an allreduce. rpc: as one call of torch's per
    step. sparse: as torch's RPC for rows, or without PyTorch as the whole table."""
    staleness: int = 0
    """slow, turns: the largest of all pushes."""
    num_bytes: int = 0
    """step, rpc: of all parameters. sparse: sent and received by a worker in a step, if ronde counts it."""
    median_us: float = 0.0
    """step, rpc, sparse: of a step."""


def ps(arguments: Sequence[str]) -> int:
    parser = make_parser("ps", details=DETAILS, rounds=20, seconds=4.0, work="mode")
    parser.add_flag("--what", metavar="WHAT,…", default=",".join(WHAT), help="What to measure.")
    parser.add_flag("--bytes", metavar="N,…", default=SIZES, help="Bytes of parameters for step and rpc.")
    parser.add_flag("--rows", metavar="N", type=int, default=1_000_000, help="Rows of the table for sparse.")
    return run_benchmark(parser, arguments, _measure)


def _measure(flags: argparse.Namespace, console: Console) -> None:
    wanted = [part.strip() for part in flags.what.split(",")]
    unknown = set(wanted) - set(WHAT)
    if unknown:
        raise ValueError(f"--what must be some of {', '.join(WHAT)}; got {', '.join(sorted(unknown))}")
    sizes = parse_numbers(flags.bytes, "--bytes")
    render = partial(render_table, caption=describe_conditions(flags.num_ranks))
    with BenchmarkDisplay(console, render, flags.json) as display:
        for what in ("slow", "turns"):
            if what in wanted:
                display.show_progress(f"workers that are slow ({what})")
                display.add(measure_waits(what, flags.num_ranks, flags.seconds))
        for num_bytes in sizes if "step" in wanted else ():
            display.show_progress(f"a step of {num_bytes} bytes")
            display.add(measure_steps(num_bytes, flags.num_ranks, flags.rounds))
        if "sparse" in wanted:
            display.show_progress(f"some of {flags.rows} rows")
            display.add(measure_sparse(flags.rows, flags.num_ranks, flags.rounds))
        if "rpc" in wanted and not is_installed("torch"):
            console.print("rpc: PyTorch is not installed", style="dim")
            return
        for num_bytes in sizes if "rpc" in wanted else ():
            display.show_progress(f"a step of {num_bytes} bytes beside torch.distributed.rpc")
            display.add(measure_rpc(num_bytes, flags.num_ranks, flags.rounds))


def measure_waits(what: str, num_ranks: int, seconds: float) -> list[ParameterServerResult]:
    """Steps per second in each mode, one after the other in one job."""
    by_rank = ronde.run(train_with_waits, (what, seconds), np=num_ranks)
    results: list[ParameterServerResult] = []
    for index, mode in enumerate(MODES):
        rate = sum(each[index][0] for each in by_rank)
        staleness = max(each[index][1] for each in by_rank)
        ratio = rate / results[0].steps_per_s if results else 1.0
        results.append(ParameterServerResult(what, mode, num_ranks, rate, ratio, staleness))
    return results


def train_with_waits(what: str, seconds: float) -> list[tuple[float, int]]:
    """Runs on each rank: by mode, its steps per second and its largest staleness."""
    ronde.init()
    rank, size = ronde.rank(), ronde.size()
    results = []
    for mode in MODES:
        parameters = [np.zeros(1000, np.float32)]
        server = ParameterServer(parameters, SGD(lr=0.1), mode=mode, staleness=STALENESS)
        gradient = np.ones(1000, np.float32)
        num_steps = staleness = 0
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < seconds:
            is_slow = rank == size - 1 if what == "slow" else num_steps // TURN_STEPS % size == rank
            time.sleep(STEP_S * (SLOWNESS if is_slow else 1))
            server.step([gradient])
            num_steps += 1
            staleness = max(staleness, server.staleness)
        results.append((num_steps / (time.monotonic() - begun_s), staleness))
        server.close()
        ronde.barrier()
    ronde.shutdown()
    return results


def measure_steps(num_bytes: int, num_ranks: int, rounds: int) -> list[ParameterServerResult]:
    """The time of a step, in turn with an allreduce and with the other ways, so that all see the same load."""
    by_rank = ronde.run(time_steps, (num_bytes, rounds), np=num_ranks)
    medians = {way: max(statistics.median(each[way]) for each in by_rank) for way in by_rank[0]}
    allreduce_s = medians["allreduce"]
    return [
        ParameterServerResult(
            "step", way, num_ranks, num_bytes=num_bytes, median_us=seconds * 1e6, ratio=allreduce_s / seconds
        )
        for way, seconds in medians.items()
    ]


def time_steps(num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Runs on each rank: by way, how long each step took."""
    ronde.init()
    count = max(1, num_bytes // 4)
    values, gradient = np.zeros(count, np.float32), np.ones(count, np.float32)
    servers = {
        "replicated": ParameterServer([values.copy()], SGD(lr=0.1)),
        "one copy": ParameterServer([values.copy()], SGD(lr=0.1), replicate=False),
    }
    times: dict[str, list[float]] = {"allreduce": [], **{way: [] for way in servers}}

    def reduce_and_update(_: Any) -> None:
        mean = ronde.allreduce(gradient, op="mean")
        np.subtract(values, np.float32(0.1) * mean, out=values)

    ways: dict[str, Any] = {"allreduce": reduce_and_update, **{way: each.step for way, each in servers.items()}}
    for _ in range(rounds):
        for way, do in ways.items():
            ronde.barrier()
            begun_s = time.monotonic()
            do([gradient])
            times[way].append(time.monotonic() - begun_s)
    for server in servers.values():
        server.close()
    ronde.shutdown()
    return times


def measure_rpc(num_bytes: int, num_workers: int, rounds: int) -> list[ParameterServerResult]:
    """The time of a step of a worker, in turn with parameter servers of torch.distributed.rpc."""
    *workers, _ = ronde.run(time_parameter_servers, (num_bytes, rounds), np=num_workers + 1)
    medians = {way: max(statistics.median(each[way]) for each in workers) for way in WAYS}
    flat_s = medians[FLAT]
    return [
        ParameterServerResult(
            "rpc", way, num_workers + 1, num_bytes=num_bytes, median_us=seconds * 1e6, ratio=flat_s / seconds
        )
        for way, seconds in medians.items()
    ]


def measure_sparse(num_rows: int, num_workers: int, rounds: int) -> list[ParameterServerResult]:
    """The time and the traffic of a step of a worker that uses some rows of a table."""
    by_rank = ronde.run(time_rows, (num_rows, rounds, is_installed("torch")), np=num_workers + 1)
    workers = by_rank[:-1]
    medians = {way: max(statistics.median(each[way][0]) for each in workers) for way in workers[0]}
    reference_s = medians.get(RPC_ROWS, medians[DENSE])
    return [
        ParameterServerResult(
            "sparse",
            way,
            num_workers + 1,
            num_bytes=0 if way == RPC_ROWS else round(sum(each[way][1] for each in by_rank) / num_workers),
            median_us=seconds * 1e6,
            ratio=reference_s / seconds,
        )
        for way, seconds in medians.items()
    ]


def render_table(results: Sequence[ParameterServerResult], caption: str = "") -> Table:
    table = make_table("", "way", "MB", "per step", "steps/s", "ratio", "staleness", caption=caption)
    for row in results:
        is_step = row.what in ("step", "rpc", "sparse")
        table.add_row(
            row.what,
            row.mode,
            f"{row.num_bytes / 1e6:.3g}" if row.num_bytes else "",
            format_microseconds(row.median_us) if is_step else "",
            "" if is_step else f"{row.steps_per_s:.1f}",
            format_ratio(row.ratio),
            "" if is_step else str(row.staleness),
        )
    return table
