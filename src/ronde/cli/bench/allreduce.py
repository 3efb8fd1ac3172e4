"""`ronde bench allreduce`: how long the sum of float32 arrays over all ranks takes, in ronde and its peers.

A step's time is what rank 0 sees of it in a back-to-back loop without barriers; a number is the median over the steps
of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import prod

import msgspec
from rich.console import Console
from rich.table import Table

from ronde.cli.bench.command import make_parser, run_benchmark
from ronde.cli.bench.peers import HOROVOD, RONDE, MeasuredLibrary, find_peers
from ronde.cli.bench.runner import (
    REPLY_TIMEOUT_S,
    BenchmarkCase,
    BenchmarkRunner,
    MeasurementBudget,
    RankPool,
)
from ronde.cli.bench.table import BenchmarkDisplay, describe_conditions, format_ratio, make_table
from ronde.text import BINARY_UNITS, format_exact_bytes, format_microseconds
from ronde.types import Deadline

SINGLE_PATHS = ("array", "named", "bucket")
"""The ways of ronde to reduce one array."""
PATHS = (*SINGLE_PATHS, "many")
SIZES = "4K,64K,1M,16M,64M,256M,many"
MANY = "many"
"""Stands for the gradients of ResNet-50 in a list of sizes."""
MANY_PATHS = {
    RONDE: ("many", "many-25MB"),
    HOROVOD: ("many",),
    "gloo": ("many", "many-25MB"),
    "mpi": ("many", "many-iallreduce"),
}
"""The ways of each library to reduce many arrays."""
BUCKET_BYTES = 25 * 1024 * 1024
"""The size of the buckets that PyTorch's DistributedDataParallel makes by default."""
FLOAT_BYTES = 4


def allreduce(arguments: Sequence[str]) -> int:
    parser = make_parser("allreduce", rounds=10, seconds=1.0)
    sizes_help = "Bytes per rank; many: the 161 gradients of ResNet-50."
    parser.add_flag("--sizes", metavar="SIZE,…", default=SIZES, help=sizes_help)
    parser.add_flag(
        "--paths", metavar="PATH,…", default=",".join(PATHS), help=f"Ways through ronde: {', '.join(PATHS)}."
    )
    peers_help = "Measure these too: gloo, hvd, mpi (every MPI found), openmpi, mpich; or none. Default: all there are."
    parser.add_flag("--peers", metavar="PEER,…", help=peers_help)
    mpi_help = "Python of an environment with mpi4py and an MPI library. Repeatable."
    parser.add_argument("--mpi-python", action="append", default=[], metavar="PATH", help=mpi_help)
    return run_benchmark(parser, arguments, _measure)


def _measure(flags: argparse.Namespace, console: Console) -> None:
    paths = flags.paths.split(",")
    workloads = choose_workloads(flags.sizes, paths)
    budget = MeasurementBudget(rounds=flags.rounds, seconds=flags.seconds)
    peers, notes = find_peers(flags.peers, flags.mpi_python)
    libraries = [MeasuredLibrary(RONDE, RONDE), *peers]
    render = partial(render_allreduce_table, caption=describe_conditions(flags.num_ranks))
    with (
        BenchmarkDisplay(console, render, flags.json) as display,
        BenchmarkRunner(budget, display) as runner,
    ):
        for note in notes:
            display.print_note(note)
        for library in libraries:
            runner.start(library, flags.num_ranks)
        for counts in workloads:
            num_bytes = FLOAT_BYTES * sum(counts)
            cases = make_cases(runner.pools, libraries, counts, paths)
            # The array of each rank, and as much again inside the library.
            needed_bytes = 2 * num_bytes * sum(case.pool.size for case in cases)
            if display.fits_in_memory(format_exact_bytes(num_bytes), needed_bytes):
                display.add(measure_cases(runner, "allreduce", num_bytes, cases))


def choose_workloads(sizes: str, paths: Sequence[str]) -> list[tuple[int, ...]]:
    """What is reduced in a step, for those of the sizes that at least one of the paths is for."""
    for path in paths:
        if path not in PATHS:
            raise ValueError(f"no such path: {path!r}; there are {', '.join(PATHS)}")
    has_single = any(path in SINGLE_PATHS for path in paths)
    chosen = [counts for counts in parse_sizes(sizes) if (MANY in paths if len(counts) > 1 else has_single)]
    if not chosen:
        raise ValueError(f"nothing to measure: none of the sizes {sizes!r} goes with the paths {','.join(paths)!r}")
    return chosen


def parse_sizes(text: str) -> Iterator[tuple[int, ...]]:
    """For each of a list such as `4K,1M,many`: how many float32 its arrays have."""
    for size in filter(None, map(str.strip, text.split(","))):
        if size.lower() == MANY:
            # backward() makes the gradient of the last layer first.
            yield tuple(prod(shape) for shape in resnet50_shapes())[::-1]
            continue
        upper = size.upper().removesuffix("IB").removesuffix("B")
        unit = BINARY_UNITS.get(upper[-1:], 1)
        digits = upper[:-1] if unit > 1 else upper
        num_bytes = int(digits) * unit if digits.isascii() and digits.isdigit() else 0
        if num_bytes <= 0 or num_bytes % FLOAT_BYTES:
            raise ValueError(f"a size is a multiple of 4 bytes such as 4096, 4K, 16M or 1G, or {MANY!r}; got {size!r}")
        yield (num_bytes // FLOAT_BYTES,)


def resnet50_shapes() -> Iterator[tuple[int, ...]]:
    """The shapes of the 161 parameters of ResNet-50 (25,557,032 numbers), first layer first."""
    yield (64, 3, 7, 7)
    yield from ((64,), (64,))
    num_in = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            num_out = 4 * width
            for shape in ((width, num_in, 1, 1), (width, width, 3, 3), (num_out, width, 1, 1)):
                yield from (shape, shape[:1], shape[:1])  # a convolution, then scale and shift of its normalization
            if block == 0:  # the shortcut changes the width
                yield from ((num_out, num_in, 1, 1), (num_out,), (num_out,))
            num_in = num_out
    yield from ((1000, 2048), (1000,))


def pack_buckets(counts: Sequence[int], max_bytes: int = BUCKET_BYTES) -> tuple[int, ...]:
    """Elements per bucket when arrays are packed in their order; an array larger than max_bytes has its own."""
    packed: list[int] = []
    for count in counts:
        if packed and (packed[-1] + count) * FLOAT_BYTES <= max_bytes:
            packed[-1] += count
        else:
            packed.append(count)
    return tuple(packed)


class BenchmarkResult(msgspec.Struct, frozen=True):
    """A line of the file of results."""

    impl: str
    op: str
    path: str
    ranks: int
    bytes: int
    """What each rank puts in."""
    median_us: float
    min_us: float
    gbps: float
    """Gigabits per second: 8 · bytes / nanoseconds of the median step."""


@dataclass
class AllreduceCase(BenchmarkCase):
    """One library on one path, which is the `work` of its ranks."""

    counts: tuple[int, ...]
    repeat: int = 1
    """How many times the arrays are reduced in one step; times are then per reduction."""
    label: str = ""
    """What results call the path, if not by its name."""

    def setup(self) -> None:
        deadline = Deadline(REPLY_TIMEOUT_S)
        counts = {"counts": self.counts, "repeat": self.repeat}
        self.pool.request(f"preparing {self.work}", deadline, do="prepare_allreduce", work=self.work, **counts)

    def result(self, op: str, num_bytes: int) -> BenchmarkResult:
        took_ns = [took for replies in self.rounds for took in replies[0]["took_ns"]]
        median_ns = statistics.median(took_ns) / self.repeat
        return BenchmarkResult(
            impl=self.pool.name,
            op=op,
            path=self.label or self.work,
            ranks=self.pool.size,
            bytes=num_bytes,
            median_us=round(median_ns / 1e3, 3),
            min_us=round(min(took_ns) / self.repeat / 1e3, 3),
            gbps=round(8 * num_bytes / median_ns, 3) if median_ns else 0.0,
        )


def make_cases(
    pools: Iterable[RankPool], libraries: Sequence[MeasuredLibrary], counts: tuple[int, ...], paths: Sequence[str]
) -> list[AllreduceCase]:
    """The cases of a workload. Peers have one path for one array; ronde has those of `paths`."""
    of = {each.name: each.library for each in libraries}
    cases = []
    for pool in pools:
        if len(counts) > 1:
            chosen: Sequence[str] = MANY_PATHS[of[pool.name]]
        elif pool.name == RONDE:
            chosen = [path for path in SINGLE_PATHS if path in paths]
        else:
            chosen = ["array"]
        cases += [AllreduceCase(pool, path, pack_buckets(counts) if path == "many-25MB" else counts) for path in chosen]
    return cases


def measure_cases(
    runner: BenchmarkRunner, op: str, num_bytes: int, cases: Sequence[AllreduceCase]
) -> list[BenchmarkResult]:
    """Measure the cases in turn, and free their arrays."""
    runner.run_interleaved(f"{op} of {num_bytes:,} bytes", cases)
    for case in {case.pool.name: case for case in cases}.values():
        runner.attempt(case, partial(case.pool.request, "releasing", Deadline(REPLY_TIMEOUT_S), do="release"))
    return [case.result(op, num_bytes) for case in cases if case.pool in runner.pools]


def render_allreduce_table(results: Sequence[BenchmarkResult], caption: str = "") -> Table:
    """All libraries, size by size; ronde with how many times as fast as the best peer it is."""
    table = make_table("bytes", "", "path", "median", "fastest", "Gbit/s", "against\nbest peer", caption=caption)
    for _, same_size in groupby(results, key=lambda result: result.bytes):
        rows = list(same_size)
        peers = [row for row in rows if row.impl not in (RONDE, HOROVOD)]
        best = min(peers, key=lambda row: row.median_us, default=None)
        for index, row in enumerate(rows):
            comparison = "best peer" if row is best else ""
            if best is not None and row not in peers and row.median_us:
                comparison = format_ratio(best.median_us / row.median_us)
            size = MANY if row.path.startswith(MANY) else format_exact_bytes(row.bytes)
            table.add_row(
                size if index == 0 else "",
                row.impl,
                row.path,
                format_microseconds(row.median_us),
                format_microseconds(row.min_us),
                f"{row.gbps:.2f}",
                comparison,
                style="bold" if row.impl == RONDE else None,
                end_section=index == len(rows) - 1,
            )
    return table
