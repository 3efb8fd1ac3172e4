"""How one rank spends its time: its steps, what it waits for, and how busy its processor is. Used by the run log.

A *step* is what stands inside `with meter.step()`. ronde knows for how long a caller was blocked in its operations:
until a late member came, and while data moved. That is taken off the steps; the rest is computing. Operations that run
hidden behind the computation cost nothing, and are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import psutil

import ronde
from ronde.comm.current import current

__all__ = ["Load", "Meter", "RankShare", "blocked_so_far", "thin", "this_process", "within"]

MOST_STEP_TIMES = 32
"""So many step times per share; of more, means of neighbours."""
LOAD_EVERY_S = 1.0
"""Looking at the load costs about a tenth of a millisecond."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a rank was since the last look."""

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


class RankShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did between two gatherings."""

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
    loads: tuple[Load, ...] = ()

    @property
    def mean_step_s(self) -> float:
        """Mean duration of a step; 0 without any."""
        return (self.total_s - self.between_s) / self.num_steps if self.num_steps else 0.0

    @property
    def total_s(self) -> float:
        """All of it: steps, and the time between them."""
        return self.compute_s + self.wait_s + self.move_s + self.between_s


@dataclass
class Interval:
    """What is measured from one gathering to the next."""

    blocked_before: tuple[float, float]
    """Seconds of waiting and moving up to the first step."""
    steps: list[float] = field(default_factory=list)
    loads: list[tuple[float, Load]] = field(default_factory=list)
    between_s: float = 0.0
    last_end_s: float | None = None


class Meter:
    """Measures one rank. For the thread that trains."""

    def __init__(
        self,
        rank: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], Load] | None = None,
        blocked: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._load = load or this_process()
        self._load_due_s = 0.0
        self._blocked = blocked or blocked_so_far
        self._interval: Interval | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of training. What raises inside is not counted."""
        if self._interval is None:  # what was done since the last take() is no part of the training
            self._interval = Interval(self._blocked())
        interval = self._interval
        begin_s = self._clock()
        yield
        end_s = self._clock()
        interval.steps.append(end_s - begin_s)
        if interval.last_end_s is not None:
            interval.between_s += begin_s - interval.last_end_s
        interval.last_end_s = end_s
        if end_s >= self._load_due_s:
            interval.loads.append((end_s, self._load()))
            self._load_due_s = end_s + LOAD_EVERY_S

    def take(self, began_s: float) -> RankShare:
        """What happened since the last take(); times of loads are counted from `began_s`."""
        interval, self._interval = self._interval, None
        if interval is None:
            return RankShare(rank=self._rank)
        total_s = sum(interval.steps)
        waited_s, moved_s = (
            now_s - before_s for now_s, before_s in zip(self._blocked(), interval.blocked_before, strict=True)
        )
        wait_s, move_s = within(total_s, waited_s, moved_s)
        return RankShare(
            rank=self._rank,
            num_steps=len(interval.steps),
            step_s=tuple(thin(interval.steps, MOST_STEP_TIMES)),
            longest_s=max(interval.steps, default=0.0),
            compute_s=total_s - wait_s - move_s,
            wait_s=wait_s,
            move_s=move_s,
            between_s=interval.between_s,
            loads=tuple(msgspec.structs.replace(load, at_s=at_s - began_s) for at_s, load in interval.loads),
        )


def within(total_s: float, wait_s: float, move_s: float) -> tuple[float, float]:
    """Waiting and moving as parts of the steps. Several threads can be blocked at once, and some between steps: if that
    is more than the steps took, both shrink alike."""
    blocked_s = wait_s + move_s
    factor = min(1.0, total_s / blocked_s) if blocked_s > 0.0 else 0.0
    return wait_s * factor, move_s * factor


def thin(values: Sequence[float], most: int) -> list[float]:
    """At most so many values: means of equally many neighbours each (the last of what is left)."""
    width = -(-len(values) // most)
    return [sum(part) / len(part) for part in (values[i : i + width] for i in range(0, len(values), max(width, 1)))]


def this_process(gpu: Callable[[], float] | None = None) -> Callable[[], Load]:
    """A look at the present process and its host, each since the look before."""
    process = psutil.Process()
    process.cpu_percent()
    psutil.cpu_percent()

    def look() -> Load:
        return Load(
            cpu=process.cpu_percent(),
            host_cpu=psutil.cpu_percent(),
            memory_bytes=process.memory_info().rss,
            gpu=None if gpu is None else float(gpu()),
        )

    return look


def blocked_so_far() -> tuple[float, float]:
    """Seconds that callers of ronde's operations were blocked: waiting for a member, and moving data."""
    if not ronde.is_initialized():
        return 0.0, 0.0
    reading = current("RunLog").recorder.reading(time.monotonic_ns(), None)
    return reading.waiting_ns / 1e9, reading.moving_ns / 1e9
