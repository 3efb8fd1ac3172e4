"""`ronde bench train`: how fast networks train with ronde, with what a framework has itself, and without communication.

A round yields the samples per second of all ranks together; a number is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ronde.cli.arguments import whole_number
from ronde.cli.bench.command import make_parser, parse_numbers, run_benchmark
from ronde.cli.bench.models import ALL_FRAMEWORKS, MODELS, MXNET, TORCH, BenchmarkModel, parse_models
from ronde.cli.bench.peers import (
    HOROVOD,
    HOW_TO_GET_HOROVOD,
    KVSTORE,
    LOCKSTEP,
    MESH,
    MWMS,
    RONDE,
    MeasuredLibrary,
    is_installed,
)
from ronde.cli.bench.runner import (
    REPLY_TIMEOUT_S,
    BenchmarkCase,
    BenchmarkFailed,
    BenchmarkRunner,
    MeasurementBudget,
)
from ronde.cli.bench.table import BenchmarkDisplay, describe_conditions, format_ratio
from ronde.errors import RondeError
from ronde.text import format_microseconds
from ronde.types import Deadline

ALONE = "alone"
APART = "apart"
DDP = "ddp"
FIT = "fit"
FIT_ALONE = "fit-alone"
CUSTOM = "custom"
KERAS = "keras"
PEERS = {
    TORCH: (DDP, HOROVOD),
    "tensorflow": (MWMS, HOROVOD),
    KERAS: (MWMS, HOROVOD),
    "jax": (MESH,),
    MXNET: (KVSTORE, HOROVOD),
}
REQUIRED = {
    TORCH: ("torch", "PyTorch"),
    "tensorflow": ("tensorflow", "TensorFlow"),
    KERAS: ("tensorflow", "TensorFlow"),
    "jax": ("jax", "JAX"),
    MXNET: ("mxnet", "MXNet"),
}
"""The package that has to be installed to train with a framework, and its name."""
CODECS = {"none": None, "float16": "float16", "bfloat16": "bfloat16"}

PROCESS_BYTES = 250 << 20
"""Memory of a rank besides its network: the framework, activations, and what the allocator keeps."""
COPIES = 4
"""Parameters, gradients, momentum, buckets."""

DETAILS = """One thread per rank: alone, without communication, with ronde, with Horovod's
interface, and with DDP, MultiWorkerMirroredStrategy, a mesh of JAX or the
kvstore of MXNet. Keras also trains with fit()."""


def train(arguments: Sequence[str]) -> int:
    parser = make_parser("train", details=DETAILS, rounds_flag="--rounds", rounds=7, seconds=14.0, work="model")
    framework_help = f"What trains: {', '.join(ALL_FRAMEWORKS)}. Default: {TORCH}."
    parser.add_flag("--framework", metavar="FRAMEWORK", default=TORCH, help=framework_help)
    parser.add_flag("--models", metavar="MODEL,…", help=f"What to train: {', '.join(MODELS)}. Default: all there are.")
    batch_help = "Samples per rank and step, if not the model's own."
    parser.add_flag("--batch", metavar="N", type=whole_number, help=batch_help)
    parser.add_flag("--codec", metavar="CODEC", default="none", help=f"Gradients on the wire: {', '.join(CODECS)}.")
    parser.add_flag(
        "--peers", metavar="PEER,…", help="Measure these too: ddp, mwms, mesh, kvstore, hvd; or none. Default: all."
    )
    parser.add_flag("--ddp-buckets", metavar="MB,…", default="10,100", help="Sizes of buckets that DDP tries too.")
    parser.add_flag("--steps", metavar="N", type=whole_number, help="Steps per round. Default: as many as fit.")
    return run_benchmark(parser, arguments, _measure)


def _measure(flags: argparse.Namespace, console: Console) -> None:
    if flags.framework not in ALL_FRAMEWORKS:
        raise ValueError(f"framework must be one of {', '.join(ALL_FRAMEWORKS)}, got {flags.framework!r}")
    models = parse_models(flags.models, flags.framework)
    budget = MeasurementBudget(rounds=flags.rounds, seconds=flags.seconds, steps=flags.steps)
    ddp_buckets = parse_numbers(flags.ddp_buckets, "--ddp-buckets")
    if flags.codec not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {flags.codec!r}")
    setups, notes = find_setups(flags.num_ranks, CODECS[flags.codec], flags.peers, ddp_buckets, flags.framework)
    caption = f"{flags.framework}, {describe_conditions(flags.num_ranks)}"
    render = partial(render_training_tables, caption=caption, width=console.width)
    with BenchmarkDisplay(console, render, flags.json) as display:
        for note in notes:
            display.print_note(note)
        for model in models:
            # The ranks of all setups exist at the same time.
            num_ranks = sum(setup.size for setup in setups)
            if display.fits_in_memory(model.name, num_ranks * (PROCESS_BYTES + COPIES * model.num_bytes)):
                with BenchmarkRunner(budget, display) as runner:
                    display.add(measure_training(runner, model, flags.batch or model.batch, setups))


@dataclass(frozen=True)
class TrainingSetup(MeasuredLibrary):
    """One way to train."""

    size: int = 2
    codec: str | None = None
    """What gradients are on the wire; None: as they are."""
    view: bool = False
    """DDP: gradients are views of its buckets, and it sends no buffers (ronde sends none either)."""
    bucket_mb: int | None = None
    """DDP: size of its buckets; None: its default, which is 1 MB for the first and 25 MB for the others."""
    loop: str = CUSTOM
    """Keras: a training loop of one's own, or fit()."""

    def options(self) -> dict[str, Any]:
        """What a rank needs to know."""
        if self.framework:
            return {"codec": self.codec, "loop": self.loop}
        return {"codec": self.codec, "view": self.view, "bucket_mb": self.bucket_mb}


def find_setups(
    size: int, codec: str | None, peers: str | None, buckets_mb: Sequence[int], framework: str = TORCH
) -> tuple[list[TrainingSetup], list[str]]:
    """What is measured, and notes about what is left out: one process alone, `size` without communication, `size` that
    only wait for each other, ronde, and the peers: `ddp,hvd`, or `none`; None: all. Keras also trains in fit(), alone
    and with ronde."""
    package, title = REQUIRED[framework]
    if not is_installed(package):
        raise RondeError(f"ronde bench train --framework {framework} needs {title}: pip install {package}")
    known = PEERS[framework]
    wanted = set(known) if peers is None else {name.strip() for name in peers.split(",") if name.strip()} - {"none"}
    for name in sorted(wanted):
        if name not in known:
            raise ValueError(f"no such peer of {framework}: {name!r}; there are {', '.join(known)}, none")
    make = partial(TrainingSetup, framework="" if framework == TORCH else framework)
    setups = [
        make(ALONE, APART, size=1),
        make(APART, APART, size=size),
        make(LOCKSTEP, LOCKSTEP, size=size),
        make(RONDE, RONDE, size=size, codec=codec),
    ]
    if framework == KERAS:
        setups += [
            make(FIT_ALONE, APART, size=1, loop=FIT),
            make(FIT, RONDE, size=size, codec=codec, loop=FIT),
        ]
    notes = []
    if codec == "bfloat16" and wanted:
        codec = "float16"
        notes.append("only ronde sends bfloat16 here; the others send float16, which has as many bits")
    if HOROVOD in wanted and is_installed("horovod"):
        setups.append(make(HOROVOD, HOROVOD, size=size, codec=codec))
    elif HOROVOD in wanted:
        reason = f"ronde-horovod is not installed; {HOW_TO_GET_HOROVOD}"
        if peers is not None:
            raise ValueError(reason)
        notes.append(f"{HOROVOD} is left out: {reason}")
    for name in (MWMS, MESH, KVSTORE):
        if name in wanted:  # it sends gradients as they are
            setups.append(make(name, name, size=size))
    if DDP in wanted:
        # As it is, without copies, and with other sizes of buckets: ronde is compared with the best of them.
        setups.append(make(DDP, DDP, size=size, codec=codec))
        for mb in (None, *dict.fromkeys(buckets_mb)):
            name = f"{DDP}-view" if mb is None else f"{DDP}-view-{mb}MB"
            setups.append(make(name, DDP, size=size, codec=codec, view=True, bucket_mb=mb))
    return setups, notes


class TrainingResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file of results. What compares is None when there is nothing to compare with."""

    impl: str
    op: str = "train"
    framework: str = TORCH
    loop: str = CUSTOM
    """A training loop of its own, or Keras' fit()."""
    model: str
    ranks: int
    batch: int
    """Samples per rank and step."""
    codec: str | None
    num_steps: int
    """How many were timed, on each rank."""
    samples_per_s: float
    """Of all ranks together: the median over rounds."""
    step_us: float
    """The median over all steps."""
    backward_us: float | None = None
    """Of backward(), in which gradients are exchanged: the median over all steps. None where it is part of a graph."""
    cpu_us: float | None = None
    """Processor time of a rank per step: the median over rounds and ranks. It says more than the time on a machine that
    is busy with other things."""
    efficiency: float | None = None
    """samples_per_s divided by that of one process alone, in the same kind of loop, times the ranks."""
    overhead_us: float | None = None
    """step_us less that of as many processes that do not communicate."""
    above_lockstep_us: float | None = None
    """step_us less that of as many ranks that only wait for each other in every step."""
    vs_peer: float | None = None
    """samples_per_s divided by that of the best peer: DDP, MultiWorkerMirroredStrategy, a mesh of JAX, or the
    kvstore of MXNet."""
    vs_ronde: float | None = None
    """samples_per_s divided by that of ronde."""
    vs_custom_loop: float | None = None
    """Of fit(): its efficiency divided by that of ronde in a custom loop."""
    memory_mb: float | None = None
    """Most memory during a step, mean over ranks, in MiB; files left out, and what ranks share counted once."""
    rss_mb: float | None = None
    """Peak resident set, mean over ranks, in MiB: libraries included, and shared buckets counted by every rank."""


@dataclass
class TrainingCase(BenchmarkCase):
    """One way to train one network, which is the `work` of its ranks."""

    training_setup: TrainingSetup
    batch: int
    memory_mb: float | None = None
    rss_mb: float | None = None

    def setup(self) -> None:
        """Build the network, train one step, and check that all ranks have equal gradients then."""
        setup = self.training_setup
        replies = self.pool.request(
            f"preparing {self.work}",
            Deadline(2 * REPLY_TIMEOUT_S),
            do="prepare_training",
            work=self.work,
            batch=self.batch,
            options=setup.options(),
        )
        communicates = setup.library not in (APART, LOCKSTEP)
        if communicates and len({reply["checksum"] for reply in replies}) > 1:
            raise BenchmarkFailed(f"{setup.name}: ranks have different gradients of {self.work} after a step")

    def measure_memory(self) -> None:
        replies = self.pool.request(
            f"measuring the memory of {self.work}", Deadline(2 * REPLY_TIMEOUT_S), do="measure_memory"
        )
        self.memory_mb, self.rss_mb = (
            round(statistics.mean(reply[key] for reply in replies) / 1024, 1) or None for key in ("memory_kb", "rss_kb")
        )

    def result(self) -> TrainingResult:
        # Each rank in its own time: without communication one may be faster than another.
        rates = [
            sum(1e9 * self.batch * len(reply["took_ns"]) / max(1, sum(reply["took_ns"])) for reply in replies)
            for replies in self.rounds
        ]
        step_us, backward_us, cpu_us = map(self._find_median_us, ("took_ns", "backward_ns", "cpu_ns"))
        return TrainingResult(
            impl=self.training_setup.name,
            framework=self.training_setup.framework or TORCH,
            loop=self.training_setup.loop,
            model=self.work,
            ranks=self.training_setup.size,
            batch=self.batch,
            codec=self.training_setup.codec,
            num_steps=sum(len(replies[0]["took_ns"]) for replies in self.rounds),
            samples_per_s=round(statistics.median(rates), 3),
            step_us=step_us or 0.0,
            backward_us=backward_us,
            cpu_us=cpu_us,
            memory_mb=self.memory_mb,
            rss_mb=self.rss_mb,
        )

    def _find_median_us(self, key: str) -> float | None:
        """The median over all steps of what ranks measure under this key; None if they do not."""
        took_ns = [took for replies in self.rounds for reply in replies for took in reply.get(key, ())]
        return round(statistics.median(took_ns) / 1e3, 3) if took_ns else None


def measure_training(
    runner: BenchmarkRunner, model: BenchmarkModel, batch: int, setups: Sequence[TrainingSetup]
) -> list[TrainingResult]:
    """Start ranks for every setup, new ones so that memory is of this network alone, and let them train in turn."""
    for setup in setups:
        runner.start(setup, setup.size)
    of = {setup.name: setup for setup in setups}
    cases = [TrainingCase(pool, model.name, of[pool.name], batch) for pool in runner.pools]
    runner.run_interleaved(f"training {model.name}", cases)
    for case in cases:
        runner.attempt(case, case.measure_memory)
    return compare([case.result() for case in cases if case.pool in runner.pools])


def best_peer(results: Sequence[TrainingResult]) -> TrainingResult | None:
    """The fastest of the peers' ways to train one network; None without one."""
    peers = [result for result in results if result.impl.startswith((DDP, MWMS, MESH, KVSTORE))]
    return max(peers, key=lambda result: result.samples_per_s, default=None)


def compare(results: Sequence[TrainingResult]) -> list[TrainingResult]:
    """The results of one network, with the fields that compare them filled in."""
    of = {result.impl: result for result in results}
    apart, lockstep = of.get(APART), of.get(LOCKSTEP)
    ronde, peer = of.get(RONDE), best_peer(results)

    def ratio(result: TrainingResult, other: TrainingResult | None, times: int = 1) -> float | None:
        return round(result.samples_per_s / (times * other.samples_per_s), 4) if other else None

    def efficiency(result: TrainingResult) -> float | None:
        return ratio(result, of.get(FIT_ALONE if result.loop == FIT else ALONE), result.ranks)

    def difference_us(result: TrainingResult, other: TrainingResult | None) -> float | None:
        # One that is alone has the machine to itself: its step is not comparable with one beside others. And fit()
        # does other things in a step than the loops without communication.
        is_comparable = result.impl not in (ALONE, FIT_ALONE) and result.loop == CUSTOM
        return round(result.step_us - other.step_us, 3) if other and is_comparable else None

    compared = []
    for result in results:
        own, custom = efficiency(result), efficiency(ronde) if ronde else None
        compared.append(
            msgspec.structs.replace(
                result,
                efficiency=own,
                overhead_us=difference_us(result, apart),
                above_lockstep_us=difference_us(result, lockstep) if result is not apart else None,
                vs_peer=ratio(result, peer),
                vs_ronde=ratio(result, ronde),
                vs_custom_loop=round(own / custom, 4) if result.impl == FIT and own and custom else None,
            )
        )
    return compared


HEADINGS = (
    "",
    "samples/s",
    "step",
    "CPU",
    "over-\nhead",
    "above\nlockstep",
    "effi-\nciency",
    "against\nbest peer",
    "against\nronde",
    "scaling against\ncustom loop",
    "MiB",
    "peak\nRSS",
)
COLUMN_DROP_ORDER = (
    "CPU",
    "peak\nRSS",
    "MiB",
    "against\nronde",
    "over-\nhead",
    "above\nlockstep",
    "effi-\nciency",
    "step",
)
"""Which columns a narrow terminal does without, the first one first."""


def render_training_tables(results: Sequence[TrainingResult], caption: str = "", *, width: int = 80) -> Group:
    """A table per network, without the columns for which there is no room. The caption names the number of ranks, which
    `alone` has not."""
    parts: list[RenderableType] = []
    for _, same_model in groupby(results, key=lambda result: result.model):
        parts += [_render_table(list(same_model), width), ""]
    return Group(*parts, Text(caption, style="italic dim"))


def _render_table(rows: list[TrainingResult], width: int) -> Table:
    """The columns that have something to show, as far as they fit."""
    model, best = MODELS[rows[0].model], best_peer(rows)
    cells = [_make_cells(row, row is best) for row in rows]
    title = Text(f"{model.name}: {model.description}, batch {rows[0].batch}", style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    shown = [heading for heading in HEADINGS if any(heading in each for each in cells)]
    texts = {heading: [*heading.split("\n"), *(each.get(heading, "") for each in cells)] for heading in shown}
    widths = {heading: 1 + max(map(len, texts[heading])) for heading in shown}
    for heading in COLUMN_DROP_ORDER:
        if sum(widths.values()) - 1 > width:
            widths.pop(heading, None)
    headings = list(widths)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row, each in zip(rows, cells, strict=True):
        table.add_row(*(each.get(heading, "") for heading in headings), style="bold" if row.impl == RONDE else None)
    return table


def _make_cells(row: TrainingResult, is_best_peer: bool) -> dict[str, str]:
    """The texts of a row by heading, without those that there is nothing to say about."""
    cells = {"": row.impl, "samples/s": f"{row.samples_per_s:,.1f}", "step": format_microseconds(row.step_us)}
    if row.cpu_us is not None:
        cells["CPU"] = format_microseconds(row.cpu_us)
    if row.overhead_us is not None:
        cells["over-\nhead"] = _format_difference(row.overhead_us)
    if row.above_lockstep_us is not None and row.impl != LOCKSTEP:
        cells["above\nlockstep"] = _format_difference(row.above_lockstep_us)
    if row.efficiency is not None:
        cells["effi-\nciency"] = f"{row.efficiency:.0%}"
    if is_best_peer:
        cells["against\nbest peer"] = "best peer"
    if row.vs_peer is not None and row.impl in (RONDE, HOROVOD, FIT):
        cells["against\nbest peer"] = format_ratio(row.vs_peer)
    if row.vs_ronde is not None and row.impl in (HOROVOD, FIT):
        cells["against\nronde"] = f"{row.vs_ronde:.2f} ×"
    if row.vs_custom_loop is not None:
        cells["scaling against\ncustom loop"] = f"{row.vs_custom_loop:.2f} ×"
    for heading, mb in (("MiB", row.memory_mb), ("peak\nRSS", row.rss_mb)):
        if mb is not None:
            cells[heading] = f"{mb:,.0f}"
    return cells


def _format_difference(microseconds: float) -> str:
    return "-" * (microseconds < 0) + format_microseconds(abs(microseconds))
