"""`ronde bench train`: how fast networks train with ronde, with DDP, and without communication.

A round yields the samples per second of all ranks together; a number is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ronde.cli.arguments import whole_number
from ronde.cli.bench.command import make_parser, parse_numbers, run_benchmark
from ronde.cli.bench.models import MODELS, BenchmarkModel, parse_models
from ronde.cli.bench.peers import LOCKSTEP, MeasuredLibrary, is_installed
from ronde.cli.bench.runner import (
    HOROVOD,
    REPLY_TIMEOUT_S,
    RONDE,
    TRIAL_STEPS,
    BenchmarkFailed,
    BenchmarkRunner,
    MeasurementBudget,
    RankPool,
    describe_lack_of_memory,
)
from ronde.cli.bench.table import BenchmarkDisplay, describe_conditions, format_ratio
from ronde.errors import RondeError
from ronde.text import format_microseconds
from ronde.types import Deadline

ALONE = "alone"
APART = "apart"
DDP = "ddp"
PEERS = (DDP, HOROVOD)
CODECS = ("none", "float16", "bfloat16")

PROCESS_BYTES = 250 << 20
"""Memory of a rank besides its network: PyTorch, activations, and what the allocator keeps."""
COPIES = 4
"""Parameters, gradients, momentum, buckets."""

DETAILS = """One thread per rank: alone, without communication, with ronde, with Horovod's
interface, with DDP."""


def train(arguments: Sequence[str]) -> int:
    parser = make_parser("train", details=DETAILS, rounds_flag="--rounds", rounds=7, seconds=14.0, work="model")
    parser.add_flag("--models", metavar="MODEL,…", default=",".join(MODELS), help="What to train.")
    batch_help = "Samples per rank and step, if not the model's own."
    parser.add_flag("--batch", metavar="N", type=whole_number(1), help=batch_help)
    parser.add_flag("--codec", metavar="CODEC", default="none", help=f"Gradients on the wire: {', '.join(CODECS)}.")
    parser.add_flag("--peers", metavar="PEER,…", help="Measure these too: ddp, hvd; or none. Default: all.")
    parser.add_flag("--ddp-buckets", metavar="MB,…", default="10,100", help="Sizes of buckets that DDP tries too.")
    parser.add_flag("--steps", metavar="N", type=whole_number(1), help="Steps per round. Default: as many as fit.")
    return run_benchmark(parser, arguments, _measure)


def _measure(flags: argparse.Namespace, console: Console) -> None:
    models = parse_models(flags.models)
    budget = MeasurementBudget(rounds=flags.rounds, seconds=flags.seconds, steps=flags.steps)
    ddp_buckets = parse_numbers(flags.ddp_buckets, "--ddp-buckets")
    setups, notes = find_setups(flags.num_ranks, parse_codec(flags.codec), flags.peers, ddp_buckets)
    caption = describe_conditions(flags.num_ranks)

    def render(results: list[TrainingResult]) -> RenderableType:
        return render_training_tables(results, caption, width=console.width)

    with BenchmarkDisplay(console, render, flags.json) as display:
        for note in notes:
            display.print_note(note)
        for model in models:
            reason = describe_lack_of_memory(needed_bytes(model, setups))
            if reason:
                display.print_note(f"{model.name} is left out: it {reason}")
                continue
            with BenchmarkRunner(budget, display.print_note, display.show_progress) as runner:
                display.add(measure_training(runner, model, flags.batch or model.batch, setups))


# --- who trains -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSetup:
    """One way to train."""

    library: MeasuredLibrary
    size: int
    codec: str | None = None
    """What gradients are on the wire; None: as they are."""
    view: bool = False
    """DDP: gradients are views of its buckets, and it sends no buffers (ronde sends none either)."""
    bucket_mb: int | None = None
    """DDP: size of its buckets; None: its default, which is 1 MB for the first and 25 MB for the others."""

    @property
    def name(self) -> str:
        return self.library.name

    @property
    def communicates(self) -> bool:
        """Whether its ranks have equal gradients after a step."""
        return self.library.library not in (APART, LOCKSTEP)


def find_setups(
    size: int, codec: str | None, peers: str | None, buckets_mb: Sequence[int]
) -> tuple[list[TrainingSetup], list[str]]:
    """What is measured, and notes about what is left out: one process alone, `size` without communication, `size` that
    only wait for each other, ronde, and the peers: `ddp,hvd`, or `none`; None: all."""
    if not is_installed("torch"):
        raise RondeError("ronde bench train needs PyTorch: pip install 'ronde[torch]'")
    wanted = set(PEERS) if peers is None else {name.strip() for name in peers.split(",") if name.strip()} - {"none"}
    for name in sorted(wanted):
        if name not in PEERS:
            raise ValueError(f"no such peer: {name!r}; there are {', '.join(PEERS)}, none")
    setups = [
        TrainingSetup(MeasuredLibrary(ALONE, APART), 1),
        TrainingSetup(MeasuredLibrary(APART, APART), size),
        TrainingSetup(MeasuredLibrary(LOCKSTEP, LOCKSTEP), size),
        TrainingSetup(MeasuredLibrary(RONDE, RONDE), size, codec),
    ]
    notes = []
    if codec == "bfloat16" and wanted:
        codec = "float16"
        notes.append("only ronde sends bfloat16 here; the others send float16, which has as many bits")
    if HOROVOD in wanted and is_installed("horovod"):
        setups.append(TrainingSetup(MeasuredLibrary(HOROVOD, HOROVOD), size, codec))
    elif HOROVOD in wanted:
        reason = "ronde-horovod is not installed; pip install ronde-horovod"
        if peers is not None:
            raise ValueError(reason)
        notes.append(f"{HOROVOD} is left out: {reason}")
    if DDP in wanted:
        # As it is, without copies, and with other sizes of buckets: ronde is compared with the best of them.
        setups.append(TrainingSetup(MeasuredLibrary(DDP, DDP), size, codec))
        for bucket_mb in (None, *dict.fromkeys(buckets_mb)):
            name = f"{DDP}-view" if bucket_mb is None else f"{DDP}-view-{bucket_mb}MB"
            setups.append(TrainingSetup(MeasuredLibrary(name, DDP), size, codec, view=True, bucket_mb=bucket_mb))
    return setups, notes


def parse_codec(text: str) -> str | None:
    if text not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {text!r}")
    return None if text == "none" else text


def needed_bytes(model: BenchmarkModel, setups: Sequence[TrainingSetup]) -> int:
    """About how much memory the ranks of all setups need; they exist at the same time."""
    return sum(setup.size for setup in setups) * (PROCESS_BYTES + COPIES * model.num_bytes)


# --- measuring --------------------------------------------------------------------------------------------------------


class TrainingResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file of results. What compares is None when there is nothing to compare with."""

    impl: str
    op: str = "train"
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
    backward_us: float
    """Of backward(), in which gradients are exchanged: the median over all steps."""
    efficiency: float | None = None
    """samples_per_s divided by that of one process alone times the ranks."""
    overhead_us: float | None = None
    """step_us less that of as many processes that do not communicate."""
    vs_ddp: float | None = None
    """samples_per_s divided by that of the best DDP."""
    vs_ronde: float | None = None
    """samples_per_s divided by that of ronde."""
    memory_mb: float | None = None
    """Most memory during a step, mean over ranks, in MiB; files left out, and what ranks share counted once."""
    rss_mb: float | None = None
    """Peak resident set, mean over ranks, in MiB: libraries included, and shared buckets counted by every rank."""


@dataclass(frozen=True)
class TimedRound:
    """Nanoseconds of the steps of a round, and of backward() in them, by rank."""

    took_ns: tuple[tuple[int, ...], ...]
    backward_ns: tuple[tuple[int, ...], ...]

    def samples_per_s(self, batch: int) -> float:
        """Of all ranks, each in its own time: without communication one may be faster than another."""
        return sum(1e9 * batch * len(took) / max(1, sum(took)) for took in self.took_ns)


@dataclass
class TrainingCase:
    """One way to train one network."""

    pool: RankPool
    training_setup: TrainingSetup
    model: BenchmarkModel
    batch: int
    num_steps: int = TRIAL_STEPS
    rounds: list[TimedRound] = field(default_factory=list)
    memory_mb: float | None = None
    rss_mb: float | None = None
    slowest_s: float = 0.0
    """The longest step of the calibration."""

    @property
    def name(self) -> str:
        return self.training_setup.name

    def setup(self) -> None:
        """Build the network, train one step, and check that all ranks have equal gradients then."""
        setup = self.training_setup
        replies = self.pool.request(
            f"preparing {self.model.name}",
            Deadline(2 * REPLY_TIMEOUT_S),
            do="prepare_training",
            model=self.model.name,
            batch=self.batch,
            options={"codec": setup.codec, "view": setup.view, "bucket_mb": setup.bucket_mb},
        )
        if setup.communicates and len({reply["checksum"] for reply in replies}) > 1:
            raise BenchmarkFailed(f"{self.name}: ranks have different gradients of {self.model.name} after a step")

    def calibrate(self, budget: MeasurementBudget) -> None:
        took_ns = [took for rank in self._time_steps(TRIAL_STEPS).took_ns for took in rank]
        self.slowest_s = max(took_ns) / 1e9
        self.num_steps = budget.steps_per_round(min(took_ns) / 1e9)

    def run_round(self, budget: MeasurementBudget) -> None:
        self.rounds.append(self._time_steps(self.num_steps))

    def _time_steps(self, num_steps: int) -> TimedRound:
        deadline = Deadline(REPLY_TIMEOUT_S + 20 * self.slowest_s * (1 + num_steps))
        replies = self.pool.request(f"training {self.model.name}", deadline, do="time_training", num_steps=num_steps)
        return TimedRound(
            tuple(tuple(reply["took_ns"]) for reply in replies),
            tuple(tuple(reply["backward_ns"]) for reply in replies),
        )

    def measure_memory(self) -> None:
        deadline = Deadline(2 * REPLY_TIMEOUT_S)
        replies = self.pool.request(f"measuring the memory of {self.model.name}", deadline, do="measure_memory")
        self.memory_mb, self.rss_mb = (
            round(statistics.mean(reply[field] for reply in replies) / 1024, 1) or None
            for field in ("memory_kb", "rss_kb")
        )

    def result(self) -> TrainingResult:
        return TrainingResult(
            impl=self.name,
            model=self.model.name,
            ranks=self.training_setup.size,
            batch=self.batch,
            codec=self.training_setup.codec,
            num_steps=sum(len(each.took_ns[0]) for each in self.rounds),
            samples_per_s=round(statistics.median(each.samples_per_s(self.batch) for each in self.rounds), 3),
            step_us=_median_us([each.took_ns for each in self.rounds]),
            backward_us=_median_us([each.backward_ns for each in self.rounds]),
            memory_mb=self.memory_mb,
            rss_mb=self.rss_mb,
        )


def _median_us(rounds: Sequence[Sequence[Sequence[int]]]) -> float:
    return round(statistics.median(took for ranks in rounds for rank in ranks for took in rank) / 1e3, 3)


def measure_training(
    runner: BenchmarkRunner, model: BenchmarkModel, batch: int, setups: Sequence[TrainingSetup]
) -> list[TrainingResult]:
    """Start ranks for every setup, new ones so that memory is of this network alone, and let them train in turn."""
    for setup in setups:
        setup.library.start_ranks(runner, setup.size)
    of = {setup.name: setup for setup in setups}
    cases = [TrainingCase(pool, of[pool.name], model, batch) for pool in runner.pools]
    runner.run_interleaved(f"training {model.name}", cases)
    for case in cases:
        runner.attempt(case, case.measure_memory)
    return compare([case.result() for case in cases if case.pool in runner.pools])


def best_ddp(results: Sequence[TrainingResult]) -> TrainingResult | None:
    """The fastest of the ways to train one network with DDP; None without one."""
    ddp = [result for result in results if result.impl.startswith(DDP)]
    return max(ddp, key=lambda result: result.samples_per_s, default=None)


def compare(results: Sequence[TrainingResult]) -> list[TrainingResult]:
    """The results of one network, with the fields that compare them filled in."""
    of = {result.impl: result for result in results}
    alone, apart, ronde, ddp = of.get(ALONE), of.get(APART), of.get(RONDE), best_ddp(results)

    def ratio(result: TrainingResult, other: TrainingResult | None, times: int = 1) -> float | None:
        return round(result.samples_per_s / (times * other.samples_per_s), 4) if other else None

    return [
        msgspec.structs.replace(
            result,
            efficiency=ratio(result, alone, result.ranks),
            # The one alone has the machine to itself: its step is not comparable with one beside others.
            overhead_us=round(result.step_us - apart.step_us, 3) if apart and result is not alone else None,
            vs_ddp=ratio(result, ddp),
            vs_ronde=ratio(result, ronde),
        )
        for result in results
    ]


# --- the table --------------------------------------------------------------------------------------------------------

COLUMN_DROP_ORDER = ("peak\nRSS", "MiB", "against\nronde", "over-\nhead", "effi-\nciency", "step")
"""The order in which columns are dropped on a narrow terminal; the file of results has them all."""


@dataclass(frozen=True, slots=True)
class ResultColumn:
    heading: str
    text: Callable[[TrainingResult, TrainingResult | None], str]
    """Of a result, beside the best DDP."""


COLUMNS = (
    ResultColumn("", lambda row, best: row.impl),
    ResultColumn("samples/s", lambda row, best: f"{row.samples_per_s:,.1f}"),
    ResultColumn("step", lambda row, best: format_microseconds(row.step_us)),
    ResultColumn("over-\nhead", lambda row, best: "" if row.overhead_us is None else _signed(row.overhead_us)),
    ResultColumn("effi-\nciency", lambda row, best: "" if row.efficiency is None else f"{row.efficiency:.0%}"),
    ResultColumn("against\nbest DDP", lambda row, best: _compare_with_best_ddp(row, best)),
    ResultColumn("against\nronde", lambda row, best: _compare_with_ronde(row)),
    ResultColumn("MiB", lambda row, best: "" if row.memory_mb is None else f"{row.memory_mb:,.0f}"),
    ResultColumn("peak\nRSS", lambda row, best: "" if row.rss_mb is None else f"{row.rss_mb:,.0f}"),
)


def render_training_tables(results: Sequence[TrainingResult], caption: str = "", *, width: int = 80) -> Group:
    """A table per network. The caption names the number of ranks, which `alone` has not."""
    parts: list[RenderableType] = []
    for _, same_model in groupby(results, key=lambda result: result.model):
        parts += [_render_table(list(same_model), width), ""]
    return Group(*parts, Text(caption, style="italic dim"))


def _render_table(rows: list[TrainingResult], width: int) -> Table:
    """The columns that have something to show and fit."""
    model, best = MODELS[rows[0].model], best_ddp(rows)
    cells = {each.heading: [Text.from_markup(each.text(row, best)) for row in rows] for each in COLUMNS}
    cells = {heading: texts for heading, texts in cells.items() if any(texts)}
    for heading in COLUMN_DROP_ORDER:
        if _table_width(cells) > width:
            cells.pop(heading, None)
    title = Text(f"{model.name}: {model.description}, batch {rows[0].batch}", style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in cells:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row, *texts in zip(rows, *cells.values(), strict=True):
        table.add_row(*texts, style="bold" if row.impl == RONDE else None)
    return table


def _table_width(cells: dict[str, list[Text]]) -> int:
    """Of these columns, with a blank between them."""
    columns = [[*heading.split("\n"), *map(str, texts)] for heading, texts in cells.items()]
    return sum(1 + max(map(len, column)) for column in columns) - 1


def _signed(us: float) -> str:
    return f"-{format_microseconds(-us)}" if us < 0 else format_microseconds(us)


def _compare_with_best_ddp(row: TrainingResult, best: TrainingResult | None) -> str:
    if row.impl in (RONDE, HOROVOD):
        return "" if row.vs_ddp is None else format_ratio(row.vs_ddp)
    return "best DDP" if row is best else ""


def _compare_with_ronde(row: TrainingResult) -> str:
    return "" if row.vs_ronde is None or row.impl != HOROVOD else f"{row.vs_ronde:.2f} ×"
