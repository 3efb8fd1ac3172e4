"""The log of a training run: every rank measures its own steps, rank 0 writes the file, the report reads it back.

The file has one JSON object per line, such as `{"type":"values","step":20,"at_s":3.1,"values":{"train/loss":0.7}}`.
Lines are only ever appended, so a run that was killed leaves a readable log; at most its last line is torn, and is
skipped. A run that goes on writes `begun` again with the step it goes on from: what the log has of later steps never
became part of the training, and is left out.

A step is what stands inside `with log.step()`. The time for which the caller was blocked in operations of ronde is
taken off the steps; the rest is computing. Operations that run while the caller computes are not counted.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO, TypeAlias

import msgspec
import numpy as np
import psutil

import ronde
from ronde.comm.joining import worker_identity
from ronde.comm.world import current_world

MAX_STEP_TIMES = 32
"""Step times in one RankTimeBreakdown; of more, means of neighbours."""
SAMPLE_INTERVAL_S = 1.0
"""A sample takes about a tenth of a millisecond."""


class ResourceSample(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a rank was since the sample before."""

    at_s: float = 0.0
    """Seconds since the run began."""
    cpu: float
    """Percent of one core that the rank's process used; threads can make it more than 100."""
    host_cpu: float
    """Percent of all cores of the host, whoever used them."""
    memory_bytes: int
    """Resident memory of the rank's process."""
    gpu: float | None = None
    """Percent, where there is one."""


class RankTimeBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did between two calls of RunLog.gather()."""

    rank: int
    num_steps: int = 0
    step_s: tuple[float, ...] = ()
    """Seconds of each step in turn, or means of a few neighbours."""
    longest_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    """Blocked because another rank was late."""
    move_s: float = 0.0
    """Blocked while data moved."""
    between_s: float = 0.0
    """Between the end of a step and the begin of the next: mostly loading data."""
    loads: tuple[ResourceSample, ...] = ()
    num_pushes: int = 0
    """To a parameter server."""
    staleness: float = 0.0
    """How many updates of others came between a read and the push that used it, in the mean."""
    max_staleness: int = 0
    """The largest of all pushes since the rank joined."""

    @property
    def mean_step_s(self) -> float:
        """The mean of the steps in seconds, without the time between them."""
        return (self.total_s - self.between_s) / self.num_steps if self.num_steps else 0.0

    @property
    def total_s(self) -> float:
        """Seconds of computing, waiting, moving and between steps together."""
        return self.compute_s + self.wait_s + self.move_s + self.between_s


class StepTimer:
    """Measures the steps of one rank. Only the thread that trains uses it."""

    def __init__(
        self,
        rank: int,
        *,
        clock: Callable[[], float],
        sample_resources: Callable[[], ResourceSample],
        read_blocked: Callable[[], tuple[float, float]],
        read_pushes: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
    ) -> None:
        """`read_blocked` returns the seconds of waiting and of moving data so far, `read_pushes` the pushes to a
        parameter server: how many, the sum of their staleness, and the largest."""
        self._rank = rank
        self._clock = clock
        self._sample_resources = sample_resources
        self._read_blocked = read_blocked
        self._read_pushes = read_pushes
        self._pushes_before = read_pushes()
        self._next_sample_s = 0.0
        # What is measured from one take_breakdown() to the next:
        self._blocked_at_start = (0.0, 0.0)
        self._step_times_s: list[float] = []
        self._samples: list[tuple[float, ResourceSample]] = []
        self._between_s = 0.0
        self._last_end_s: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step of training. A step that raises is not counted."""
        if not self._step_times_s:  # what was done since take_breakdown() is no part of the training
            self._blocked_at_start = self._read_blocked()
        times_s, begin_s = self._step_times_s, self._clock()
        yield
        end_s = self._clock()
        if times_s is not self._step_times_s:  # take_breakdown() was called inside of the step
            return
        times_s.append(end_s - begin_s)
        if self._last_end_s is not None:
            self._between_s += begin_s - self._last_end_s
        self._last_end_s = end_s
        if end_s >= self._next_sample_s:
            self._samples.append((end_s, self._sample_resources()))
            self._next_sample_s = end_s + SAMPLE_INTERVAL_S

    def take_breakdown(self, run_started_s: float) -> RankTimeBreakdown:
        """Return what happened since the last call; times of samples are counted from `run_started_s`."""
        times_s, samples, between_s = self._step_times_s, self._samples, self._between_s
        self._step_times_s, self._samples, self._between_s, self._last_end_s = [], [], 0.0, None
        before, self._pushes_before = self._pushes_before, self._read_pushes()
        (num_pushes, staleness_sum, max_staleness) = self._pushes_before
        num_pushes, staleness_sum = num_pushes - before[0], staleness_sum - before[1]
        if not times_s:
            return RankTimeBreakdown(rank=self._rank)
        total_s = sum(times_s)
        wait_s, move_s = (
            now_s - before_s for now_s, before_s in zip(self._read_blocked(), self._blocked_at_start, strict=True)
        )
        # Several threads can be blocked at once, and some between steps: if that is more than the steps took, both
        # shrink alike.
        factor = min(1.0, total_s / (wait_s + move_s)) if wait_s + move_s > 0.0 else 0.0
        width = -(-len(times_s) // MAX_STEP_TIMES)
        neighbours = [times_s[start : start + width] for start in range(0, len(times_s), width)]
        return RankTimeBreakdown(
            rank=self._rank,
            num_steps=len(times_s),
            step_s=tuple(map(fmean, neighbours)),
            longest_s=max(times_s),
            compute_s=total_s - (wait_s + move_s) * factor,
            wait_s=wait_s * factor,
            move_s=move_s * factor,
            between_s=between_s,
            loads=tuple(msgspec.structs.replace(sample, at_s=at_s - run_started_s) for at_s, sample in samples),
            num_pushes=num_pushes,
            staleness=staleness_sum / num_pushes if num_pushes else 0.0,
            max_staleness=max_staleness,
        )


def process_sampler(gpu: Callable[[], float] | None = None) -> Callable[[], ResourceSample]:
    """Return a function that samples this process and its host. A sample covers the time since the one before."""
    process = psutil.Process()
    process.cpu_percent()
    psutil.cpu_percent()

    def sample() -> ResourceSample:
        return ResourceSample(
            cpu=process.cpu_percent(),
            host_cpu=psutil.cpu_percent(),
            memory_bytes=process.memory_info().rss,
            gpu=None if gpu is None else float(gpu()),
        )

    return sample


def _read_pushes() -> tuple[int, int, int]:
    """Return the pushes of this rank to a parameter server: how many, the sum of their staleness, and the largest."""
    return current_world("RunLog").recorder.pushes if ronde.is_initialized() else (0, 0, 0)


def _read_blocked_times() -> tuple[float, float]:
    """Return the seconds that callers of ronde's operations were blocked: waiting for a member, and moving data."""
    if not ronde.is_initialized():
        return 0.0, 0.0
    sample = current_world("RunLog").recorder.sample_activity(time.monotonic_ns(), None)
    return sample.waiting_ns / 1e9, sample.moving_ns / 1e9


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The run begins, or goes on after `step` steps."""

    step: int = 0
    at_s: float = 0.0
    facts: dict[str, str] = {}
    hosts: tuple[str, ...] = ()
    """By rank."""
    workers: tuple[str, ...] = ()
    """By rank, the identities of the processes: in an elastic job those of survivors stay the same."""


class LoggedValues(msgspec.Struct, frozen=True, kw_only=True, tag="values"):
    """Values after so many steps. None stands for NaN and infinity."""

    step: int
    at_s: float
    values: dict[str, float | None]


class RankTimesLogged(msgspec.Struct, frozen=True, kw_only=True, tag="sampled"):
    """What all ranks did up to this step."""

    step: int
    at_s: float
    ranks: tuple[RankTimeBreakdown, ...]


class RunFinished(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The run came to its end."""

    at_s: float


RunLogRecord: TypeAlias = RunStarted | LoggedValues | RankTimesLogged | RunFinished

_decoder = msgspec.json.Decoder(RunLogRecord)


def encode_record(record: RunLogRecord) -> bytes:
    """Return the record as a line of the file."""
    return msgspec.json.encode(record) + b"\n"


@dataclass
class RunHistory:
    """A whole log, in the order of training."""

    facts: dict[str, str] = field(default_factory=dict)
    """As they were given to RunLog, and those that it has added."""
    hosts: tuple[str, ...] = ()
    """By rank."""
    values: list[LoggedValues] = field(default_factory=list)
    """What was added, each with `step`, `at_s` and `values`."""
    samples: list[RankTimesLogged] = field(default_factory=list)
    """What was gathered, each with `step`, `at_s` and `ranks`, a RankTimeBreakdown for each rank."""
    starts: list[RunStarted] = field(default_factory=list)
    """When the run began and, with other ranks or from a checkpoint, went on, each with `step`, `at_s`, `hosts` and
    `workers`."""
    num_resumes: int = 0
    """How often a run has appended to the log of an earlier one."""
    num_unreadable_lines: int = 0
    """Each time a run is killed while it writes, it leaves one."""
    ended: bool = False
    """Whether the run came to its end."""
    elapsed_s: float = 0.0
    """Duration of the run, without the time between being killed and going on."""

    def series(self, name: str) -> list[tuple[int, float | None]]:
        """Return the values of this name with their steps. Of two for one step, the later one counts."""
        return list({record.step: record.values[name] for record in self.values if name in record.values}.items())

    def value_names(self) -> list[str]:
        """Return the names of values, in the order in which they first came."""
        return list(dict.fromkeys(name for record in self.values for name in record.values))

    def breakdowns(self, rank: int) -> list[tuple[int, RankTimeBreakdown]]:
        """Return what one rank did, each with its last step."""
        return [(record.step, each) for record in self.samples for each in record.ranks if each.rank == rank]

    def ranks(self) -> list[int]:
        """Return the numbers of all ranks."""
        seen = {each.rank for record in self.samples for each in record.ranks}
        return sorted(seen | set(range(len(self.hosts))))


def read_log(path: Path | str) -> RunHistory:
    """Read the whole file of a log. ValueError if it is no log."""
    lines = Path(path).read_bytes().splitlines()
    run = parse_log(lines)
    if lines and run.num_unreadable_lines == len(lines):
        raise ValueError(f"{path} is not a run log: none of its {len(lines)} lines is a record")
    return run


def parse_log(lines: Iterable[bytes]) -> RunHistory:
    run = RunHistory()
    for line in lines:
        try:
            record: RunLogRecord = _decoder.decode(line)
        except msgspec.DecodeError:  # ValidationError is one, too
            run.num_unreadable_lines += 1
            continue
        run.elapsed_s = record.at_s
        run.ended = isinstance(record, RunFinished)
        if isinstance(record, LoggedValues):
            run.values.append(record)
        elif isinstance(record, RankTimesLogged):
            run.samples.append(record)
        elif isinstance(record, RunStarted):
            run.starts.append(record)
            run.num_resumes += record.step > 0
            run.values = [kept for kept in run.values if kept.step <= record.step]
            run.samples = [kept for kept in run.samples if kept.step <= record.step]
            run.facts.update(record.facts)
            run.hosts = record.hosts
    return run


def _allgather_objects(value: Any) -> list[Any]:  # any value
    return ronde.objects.allgather(value) if ronde.is_initialized() else [value]


class RunLog:
    """The log of a running training. Every rank makes one at the same time; rank 0 writes the file.

    `step` is the number of steps done already: above 0, the log of the run so far is continued, otherwise it is
    replaced. `gpu` returns the load of this rank's GPU in percent, for example `torch.cuda.utilization`. add() costs
    one short line in a file, step() two readings of the clock, gather() one small allgather.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        facts: Mapping[str, object] | None = None,
        step: int = 0,
        gpu: Callable[[], float] | None = None,
        allgather: Callable[[Any], list[Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        """The file of the log."""
        self._rank = ronde.rank() if ronde.is_initialized() else 0
        self._allgather = allgather or _allgather_objects
        self._clock = clock
        self._file: BinaryIO | None = None
        before_here_s = self._open(step) if self._rank == 0 else 0.0
        replies = self._allgather((platform.node(), worker_identity(), before_here_s))
        hosts, workers, befores_s = zip(*replies, strict=True)
        before_s: float = befores_s[0]
        self._started_s: float = clock() - before_s
        all_facts = {
            "ranks": len(hosts),
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            **(facts or {}),
            "ronde": ronde.__version__,
            "NumPy": np.__version__,
            "Python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        }
        facts_text = {name: str(value) for name, value in all_facts.items()}
        self._write(RunStarted(step=step, at_s=before_s, facts=facts_text, hosts=hosts, workers=workers))
        self._step_timer = StepTimer(
            self._rank,
            clock=clock,
            sample_resources=process_sampler(gpu),
            read_blocked=_read_blocked_times,
            read_pushes=_read_pushes,
        )

    def step(self) -> AbstractContextManager[None]:
        """Time one step: `with log.step():` stands around the training on a batch, without the loading of its data."""
        return self._step_timer.step()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log rank 0's values after so many steps; on other ranks nothing happens.

        Names are like `train/loss`: the report draws all that end in `/loss` in one plot, one line per beginning.
        """
        finite = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        self._write(LoggedValues(step=step, at_s=self._now_s(), values=finite))

    def gather(self, step: int) -> tuple[RankTimeBreakdown, ...]:
        """Log and return what every rank did since the last call, by rank. Collective: all ranks call it at the same
        step, once per epoch or every so many steps. Call it before validation, which is no part of training."""
        breakdowns = tuple(self._allgather(self._step_timer.take_breakdown(self._started_s)))
        self._write(RankTimesLogged(step=step, at_s=self._now_s(), ranks=breakdowns))
        return breakdowns

    def close(self) -> None:
        """Log that the run came to its end, and close the file. Idempotent."""
        if self._file is not None:
            self._write(RunFinished(at_s=self._now_s()))
            self._file.close()
            self._file = None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file; after an error, without logging that the run came to its end."""
        if kind is not None and self._file is not None:
            self._file.close()
            self._file = None
        self.close()

    def _open(self, step: int) -> float:
        """Open the file. Return how many seconds the run has had so far."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if step == 0 or not self.path.exists():
            self._file = self.path.open("wb")
            return 0.0
        data = self.path.read_bytes()
        run = read_log(self.path)
        self._file = self.path.open("ab")
        if data and not data.endswith(b"\n"):  # a torn line: end it, so that it spoils no other
            self._file.write(b"\n")
        records: list[LoggedValues | RankTimesLogged] = [*run.values, *run.samples]
        return max((record.at_s for record in records if record.step <= step), default=0.0)

    def _write(self, record: RunLogRecord) -> None:
        if self._file is not None:
            self._file.write(encode_record(record))
            self._file.flush()  # a run that is killed leaves what it did

    def _now_s(self) -> float:
        return self._clock() - self._started_s
