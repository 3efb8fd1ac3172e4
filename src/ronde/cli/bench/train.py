"""Training measured in turn: one lane per way to train, and what their times say together. Used by command.py.

A *burst* is some steps back to back on all ranks of a lane while the ranks of all others are blocked. What a burst
yields is the samples per second of all its ranks together; a number is the median over the bursts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import msgspec
import psutil

from ronde.cli.bench.cases import BenchmarkModel
from ronde.cli.bench.peers import ALONE, APART, DDP, TrainingImplementation
from ronde.cli.bench.runner import (
    ANSWER_S,
    OURS,
    TRIAL_STEPS,
    BenchmarkFailed,
    BenchmarkRunner,
    MeasurementBudget,
    RankPool,
)
from ronde.types import Deadline

__all__ = ["TimedRound", "TrainingCase", "TrainingResult", "best_ddp", "compare", "needed_bytes", "no_room", "train"]

PROCESS_BYTES = 250 << 20
"""PyTorch itself, activations, and what the allocator keeps."""
COPIES = 4
"""Parameters, gradients, momentum, buckets."""


class TrainingResult(msgspec.Struct, frozen=True, kw_only=True):
    """One line of results. What compares is None when there is nothing to compare with."""

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
    """Of all ranks together: the median over bursts."""
    step_us: float
    """The median over all steps."""
    backward_us: float
    """Of backward(), in which gradients travel: the median over all steps."""
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
    """Nanoseconds of some steps, and of backward() in them, by rank."""

    took_ns: tuple[tuple[int, ...], ...]
    backward_ns: tuple[tuple[int, ...], ...]

    def samples_per_s(self, batch: int) -> float:
        """What all ranks did, each in its own time: without communication one may be quicker than another."""
        return sum(1e9 * batch * len(took) / max(1, sum(took)) for took in self.took_ns)


@dataclass
class TrainingCase:
    """One way to train one network, with the times it has run so far."""

    crew: RankPool
    kit: TrainingImplementation
    model: BenchmarkModel
    batch: int
    num_steps: int = TRIAL_STEPS
    bursts: list[TimedRound] = field(default_factory=list)
    memory_mb: float | None = None
    rss_mb: float | None = None
    slowest_s: float = 0.0
    """The longest step of the first try."""

    @property
    def words(self) -> str:
        """For progress and errors."""
        return self.kit.name

    def prepare(self) -> None:
        """Build the network, train one step, and check that all ranks have the same gradients then."""
        told = {"model": self.model.name, "batch": self.batch, "settings": asdict(self.kit.settings)}
        answers = self.crew.ask(f"preparing {self.model.name}", Deadline(2 * ANSWER_S), do="prepare", **told)
        digests = {answer["digest"] for answer in answers}
        # A number that is fast but wrong is worth nothing.
        if self.kit.communicates and len(digests) > 1:
            raise BenchmarkFailed(f"{self.kit.name}: ranks have different gradients of {self.model.name} after a step")

    def burst(self, num_steps: int) -> TimedRound:
        """Run so many steps."""
        deadline = Deadline(ANSWER_S + 20 * self.slowest_s * (1 + num_steps))
        answers = self.crew.ask(f"training {self.model.name}", deadline, do="burst", num=num_steps)
        return TimedRound(
            tuple(tuple(answer["took_ns"]) for answer in answers),
            tuple(tuple(answer["backward_ns"]) for answer in answers),
        )

    def settle(self, pace: MeasurementBudget) -> None:
        """Find out how many steps make a burst."""
        took_ns = [took for rank in self.burst(TRIAL_STEPS).took_ns for took in rank]
        self.slowest_s = max(took_ns) / 1e9
        self.num_steps = pace.num_steps(min(took_ns) / 1e9)

    def run(self, pace: MeasurementBudget) -> None:
        """One burst that counts."""
        self.bursts.append(self.burst(self.num_steps))

    def weigh(self) -> None:
        """How much memory its ranks hold."""
        deadline = Deadline(2 * ANSWER_S)
        answers = self.crew.ask(f"weighing {self.model.name}", deadline, do="weigh")
        self.memory_mb, self.rss_mb = (
            round(statistics.mean(answer[what] for answer in answers) / 1024, 1) or None
            for what in ("memory_kb", "rss_kb")
        )

    def record(self) -> TrainingResult:
        """What the times say."""
        return TrainingResult(
            impl=self.kit.name,
            model=self.model.name,
            ranks=self.kit.size,
            batch=self.batch,
            codec=self.kit.settings.codec,
            num_steps=sum(len(burst.took_ns[0]) for burst in self.bursts),
            samples_per_s=round(statistics.median(burst.samples_per_s(self.batch) for burst in self.bursts), 3),
            step_us=_median_us([burst.took_ns for burst in self.bursts]),
            backward_us=_median_us([burst.backward_ns for burst in self.bursts]),
            memory_mb=self.memory_mb,
            rss_mb=self.rss_mb,
        )


def _median_us(bursts: Sequence[Sequence[Sequence[int]]]) -> float:
    return round(statistics.median(took for ranks in bursts for rank in ranks for took in rank) / 1e3, 3)


def best_ddp(records: Sequence[TrainingResult]) -> TrainingResult | None:
    """The fastest way to train one network with DDP; None without one."""
    ddp = [record for record in records if record.impl.startswith(DDP)]
    return max(ddp, key=lambda record: record.samples_per_s, default=None)


def compare(records: Sequence[TrainingResult]) -> list[TrainingResult]:
    """The records of one network, held against each other."""
    of = {record.impl: record for record in records}
    alone, apart, ours, ddp = of.get(ALONE), of.get(APART), of.get(OURS), best_ddp(records)

    def ratio(record: TrainingResult, other: TrainingResult | None, times: int = 1) -> float | None:
        return round(record.samples_per_s / (times * other.samples_per_s), 4) if other else None

    return [
        msgspec.structs.replace(
            record,
            efficiency=ratio(record, alone, record.ranks),
            # One process has the machine to itself: that is another step than one beside others.
            overhead_us=round(record.step_us - apart.step_us, 3) if apart and record is not alone else None,
            vs_ddp=ratio(record, ddp),
            vs_ronde=ratio(record, ours),
        )
        for record in records
    ]


def needed_bytes(model: BenchmarkModel, kits: Sequence[TrainingImplementation]) -> int:
    """About how much memory everybody needs together: all hold their networks, also while others have their turn."""
    return sum(kit.size for kit in kits) * (PROCESS_BYTES + COPIES * model.num_bytes)


def no_room(model: BenchmarkModel, kits: Sequence[TrainingImplementation]) -> str:
    """Why the machine has no room for it; empty when it has."""
    needed, available = needed_bytes(model, kits), psutil.virtual_memory().available
    if needed <= available:
        return ""
    return f"needs about {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are free"


def train(
    field: BenchmarkRunner, model: BenchmarkModel, batch: int, kits: Sequence[TrainingImplementation]
) -> list[TrainingResult]:
    """Start everybody anew (so that memory is of this network alone), and let them train in turn."""
    for kit in kits:
        field.start(kit, kit.size)
    of = {kit.name: kit for kit in kits}
    lanes = [TrainingCase(crew, of[crew.name], model, batch) for crew in field.crews]
    field.take_turns(f"training {model.name}", lanes)
    for lane in lanes:
        field.attempt(lane, lane.weigh)
    return compare([lane.record() for lane in lanes if lane.crew in field.crews])
