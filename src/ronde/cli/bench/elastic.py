"""`ronde bench elastic`: how long training stops when a rank is killed, what being elastic costs while nothing fails,
and what a slow rank costs with equal shares and with shares by speed."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from ronde.cli.bench.command import make_parser, parse_numbers, run_benchmark
from ronde.cli.bench.runner import BenchmarkFailed
from ronde.cli.bench.table import BenchmarkDisplay, describe_conditions, make_table
from ronde.types import Deadline

STEP_MS = 10.0
NETWORKS = ("linear", "convolutional")
START_TIMEOUT_S = 120.0
RECOVERY_TIMEOUT_S = 60.0
POLL_S = 0.005
NUM_RESAMPLES = 2000
"""Of the pairs of bursts, for the interval of their ratio."""

DETAILS = """recovery: from SIGKILL of a rank to the next finished step of all others, in parts: until they notice it,
until they are members of the next round, until they have the same state, until the step has finished.
cost: steps of elastic training against plain training, in alternating bursts, with a linear and a convolutional
network; and how many Python functions a step calls and how many operations it makes, plain and elastic.
shares: samples per second with one rank of four at half speed, with shares by speed against equal shares."""


class ElasticResult(msgspec.Struct, frozen=True):
    """One line of the results; what does not belong to its `what` is 0."""

    what: str
    ranks: int
    total_ms: float = 0.0
    """recovery: the median over kills, of the slowest rank; its parts follow."""
    notice_ms: float = 0.0
    join_ms: float = 0.0
    sync_ms: float = 0.0
    step_ms: float = 0.0
    """cost: the median of plain training."""
    ratio: float = 0.0
    """cost: the speed of elastic training over that of plain training. shares: samples per second by speed over those
    with equal shares."""
    low: float = 0.0
    """The 95 % interval of the ratio."""
    high: float = 0.0
    network: str = ""
    plain_calls: float = 0.0
    """cost: how many Python functions a step calls, and how many operations of the ranks it makes."""
    elastic_calls: float = 0.0
    plain_operations: float = 0.0
    elastic_operations: float = 0.0


def elastic(arguments: Sequence[str]) -> int:
    parser = make_parser("elastic", details=DETAILS, rounds=5, seconds=20.0, work="number of ranks")
    parser.add_flag("--what", metavar="WHAT,…", default="recovery,cost,shares", help="What to measure.")
    parser.add_flag("--sizes", metavar="N,…", default="2,4,8,16", help="Numbers of ranks for recovery.")
    return run_benchmark(parser, arguments, _measure)


def _measure(flags: argparse.Namespace, console: Console) -> None:
    wanted = [part.strip() for part in flags.what.split(",")]
    unknown = set(wanted) - {"recovery", "cost", "shares"}
    if unknown:
        raise ValueError(f"--what must be recovery, cost or shares; got {', '.join(sorted(unknown))}")
    sizes = parse_numbers(flags.sizes, "--sizes")
    render = partial(render_elastic_table, caption=describe_conditions())
    with BenchmarkDisplay(console, render, flags.json) as display:
        for size in sizes if "recovery" in wanted else ():
            display.show_progress(f"{size} ranks")
            display.add([measure_recovery(size, flags.rounds)])
        if "cost" in wanted:
            for network in NETWORKS:
                display.show_progress(f"plain against elastic training of a {network} network")
                display.add([measure_cost(flags.num_ranks, network, flags.seconds)])
        if "shares" in wanted:
            display.show_progress("one slow rank of four")
            display.add([measure_shares(4, flags.seconds)])


class ElasticJob:
    """`ronde run` with workers of elastic_worker; what they write down is read from their files."""

    def __init__(self, directory: str, num_ranks: int, *work: str) -> None:
        self.directory = Path(directory)
        self._offsets: dict[Path, int] = {}
        self.events: dict[int, list[dict[str, Any]]] = {}
        """By the number of the worker."""
        self._output = (self.directory / "output").open("w+b")
        numbers = ("-np", str(num_ranks), "--min-np", "1", "--max-np", str(num_ranks), "--cooldown", "1000", "1000")
        one_thread = ("--env", "OMP_NUM_THREADS=1")
        worker = (sys.executable, "-m", "ronde.cli.bench.elastic_worker", work[0], directory, *work[1:])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ronde.cli.main", "run", *numbers, *one_thread, *worker],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def read(self) -> None:
        for path in self.directory.glob("worker-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(complete)
            number = int(path.stem.removeprefix("worker-"))
            self.events.setdefault(number, []).extend(json.loads(line) for line in complete.splitlines())

    def wait_until(self, condition: Any, timeout_s: float, what: str) -> None:  # a function without arguments
        deadline = Deadline(timeout_s)
        while True:
            self.read()
            if condition():
                return
            if self.process.poll() is not None or deadline.expired:
                raise BenchmarkFailed(f"waited for {what}; the job printed:\n{self.printed()}")
            time.sleep(POLL_S)

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the job."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        self.read()
        if code != 0:
            raise BenchmarkFailed(f"the job did not end well ({code}); it printed:\n{self.printed()}")

    def printed(self) -> str:
        self._output.seek(0)
        return self._output.read()[-4000:].decode(errors="replace")

    def pids(self) -> dict[int, int]:
        """By the number of the worker, its process."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                environ = process.environ()
                if "ronde.cli.bench.elastic_worker" in process.cmdline() and "RONDE_WORKER" in environ:
                    found[int(environ["RONDE_WORKER"])] = process.pid
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10.0)
            self.process.kill()
            self.process.wait()
        self._output.close()


@contextmanager
def start_job(num_ranks: int, *work: str) -> Iterator[ElasticJob]:
    with tempfile.TemporaryDirectory(prefix="ronde-bench-") as directory:
        job = ElasticJob(directory, num_ranks, *work)
        try:
            yield job
        finally:
            job.close()


def measure_recovery(num_ranks: int, repeats: int) -> ElasticResult:
    """Kill one rank of a new job, so many times."""
    parts: list[tuple[float, ...]] = []
    for repeat in range(repeats):
        with start_job(num_ranks, "recovery", str(STEP_MS)) as job:
            is_training = partial(_all_have_steps, job, num_ranks, 20)
            job.wait_until(is_training, START_TIMEOUT_S, "all ranks to train")
            pids = job.pids()
            victim = random.Random(repeat).choice(sorted(pids))
            killed_ns = time.monotonic_ns()
            os.kill(pids[victim], signal.SIGKILL)
            survivors = sorted(set(pids) - {victim})
            has_recovered = partial(_have_recovered, job, survivors, killed_ns)
            job.wait_until(has_recovered, RECOVERY_TIMEOUT_S, "the next step after a kill")
            parts.append(max(_recovery_times(job.events[number], killed_ns) for number in survivors))
    total, *rest = (statistics.median(column) / 1e6 for column in zip(*parts, strict=True))
    return ElasticResult("recovery", num_ranks, total, *rest)


def _all_have_steps(job: ElasticJob, num_ranks: int, num_steps: int) -> bool:
    return len(job.events) == num_ranks and all(
        sum(each["event"] == "step" for each in events) >= num_steps for events in job.events.values()
    )


def _have_recovered(job: ElasticJob, workers: Sequence[int], killed_ns: int) -> bool:
    return all(_recovery_times(job.events[number], killed_ns) for number in workers)


def _recovery_times(events: Sequence[dict[str, Any]], killed_ns: int) -> tuple[float, ...]:
    """From the kill to the end of the next step, and its four parts; empty if that has not come yet."""
    changed = next((each for each in events if each["event"] == "changed" and each["synced_ns"] > killed_ns), None)
    if changed is None:
        return ()
    synced_ns = changed["synced_ns"]
    step = next((each for each in events if each["event"] == "step" and each["at_ns"] > synced_ns), None)
    if step is None:
        return ()
    moments = [killed_ns, changed["noticed_ns"], changed["joined_ns"], synced_ns, step["at_ns"]]
    return (float(moments[-1] - killed_ns), *(float(b - a) for a, b in pairwise(moments)))


def measure_cost(num_ranks: int, network: str, seconds: float) -> ElasticResult:
    with start_job(num_ranks, "cost", network, str(seconds)) as job:
        job.wait(START_TIMEOUT_S + 3 * seconds)
        events = job.events[0]
    plain, with_elastic = (
        [each["step_ms"] for each in events if each["event"] == "burst" and each["is_elastic"] is is_elastic]
        for is_elastic in (False, True)
    )
    counts = {each["is_elastic"]: each for each in events if each["event"] == "counts"}
    ratios = [one / other for one, other in zip(plain, with_elastic, strict=True)]
    low, high = _interval(ratios)
    return ElasticResult(
        "cost",
        num_ranks,
        step_ms=statistics.median(plain),
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        network=network,
        plain_calls=counts[False]["python_calls"],
        elastic_calls=counts[True]["python_calls"],
        plain_operations=counts[False]["operations"],
        elastic_operations=counts[True]["operations"],
    )


def measure_shares(num_ranks: int, seconds: float) -> ElasticResult:
    rates = {}
    for shares in ("equal", "speed"):
        with start_job(num_ranks, "shares", shares, str(seconds)) as job:
            job.wait(START_TIMEOUT_S + 3 * seconds)
            steps = [each for each in job.events[0] if each["event"] == "step"]
        later = steps[len(steps) // 3 :]  # shares have settled
        rates[shares] = 1e9 * (len(later) - 1) / (later[-1]["at_ns"] - later[0]["at_ns"])
    return ElasticResult("shares", num_ranks, ratio=rates["speed"] / rates["equal"])


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, from values drawn again and again (bootstrap)."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES)]


def render_elastic_table(results: Sequence[ElasticResult], caption: str = "") -> Table:
    headings = ("total", "notice", "join", "sync", "step", "ratio", "95 %", "calls", "operations")
    table = make_table("", "ranks", *headings, caption=caption)
    for row in results:
        parts = (row.total_ms, row.notice_ms, row.join_ms, row.sync_ms, row.step_ms)
        times = [f"{each:,.0f} ms" if row.what == "recovery" else "" for each in parts]
        what, counts = row.what, ["", ""]
        if row.what == "cost":
            what, times[-1] = f"cost, {row.network}", f"{row.step_ms:.2f} ms"
            counts = [
                f"{row.plain_calls:.0f}, {row.elastic_calls:.0f} elastic",
                f"{row.plain_operations:.0f}, {row.elastic_operations:.0f} elastic",
            ]
        ratio = f"{row.ratio:.3f} ×" if row.ratio else ""
        interval = f"{row.low:.3f} to {row.high:.3f}" if row.low else ""
        table.add_row(what, str(row.ranks), *times, ratio, interval, *counts)
    return table
