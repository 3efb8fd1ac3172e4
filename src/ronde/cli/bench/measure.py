"""Measuring implementations in turn, and what comes out of it. Used by command.py, and by train.py for its own lanes.

The machine is noisy and the noise drifts, so nobody is measured alone: for one piece of work all implementations run a
short *burst* of steps, one implementation after the other, and again, each round beginning with another one. While one
runs, the ranks of the others are blocked. A step's time is what rank 0 sees of it in a back-to-back loop without
barriers; a number is the median over the steps of all bursts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from ronde.cli.bench.crew import Crew, CrewFailed
from ronde.cli.bench.processes import Started
from ronde.cli.bench.shapes import Work, buckets
from ronde.types import Deadline

__all__ = ["COMPATIBLE", "OURS", "Field", "Kit", "Lane", "Pace", "Record", "Runner", "Starter", "gigabits", "lanes_of"]

OURS = "ronde"
COMPATIBLE = "hvd"
"""Horovod's interface over ronde: not a peer, and not to be compared with as one."""
START_S = 120.0
ANSWER_S = 60.0
"""An answer may take this long on top of twenty times what is expected."""
TRIAL_STEPS = 3
MOST_STEPS = 5000
FEWEST_STEPS = 3


class Starter(Protocol):
    """An implementation that can be measured: its name, and how its ranks start."""

    @property
    def name(self) -> str:
        """As tables show it."""

    def start(self, directory: Path, size: int) -> Started:
        """Start `size` ranks that use the pipes in the directory."""


class Kit(Starter, Protocol):
    """One that reduces arrays."""

    @property
    def many_paths(self) -> tuple[str, ...]:
        """The ways to reduce many arrays."""


class Record(msgspec.Struct, frozen=True):
    """One line of results."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long and how often to measure."""

    repeats: int = 10
    """Bursts per implementation and piece of work."""

    seconds: float = 1.0
    """Time per implementation and piece of work, shared by its bursts."""

    steps: int | None = None
    """Steps per burst, whatever their time; None: as many as fit."""

    def __post_init__(self) -> None:
        """Check."""
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def num_steps(self, step_s: float) -> int:
        """How many steps fill one burst."""
        if self.steps is not None:
            return self.steps
        return max(FEWEST_STEPS, min(MOST_STEPS, round(self.seconds / self.repeats / max(step_s, 1e-9))))


class Runner(Protocol):
    """What takes turns: one implementation doing one thing, which keeps its own times."""

    @property
    def crew(self) -> Crew:
        """Its ranks."""

    @property
    def words(self) -> str:
        """For progress and errors."""

    def prepare(self) -> None:
        """Get ready, and check that what is measured is right."""

    def settle(self, pace: Pace) -> None:
        """Find out how many steps make a burst."""

    def run(self, pace: Pace) -> None:
        """One burst that counts."""


@dataclass
class Lane:
    """One implementation on one path, with the times it has run so far."""

    crew: Crew
    path: str
    counts: tuple[int, ...]
    repeat: int = 1
    """The counts are issued so many times over in one step; times are then per count."""
    label: str = ""
    """What results call the path, when it is not the path itself."""
    num_steps: int = TRIAL_STEPS
    took_ns: list[int] = field(default_factory=list)

    @property
    def words(self) -> str:
        """For progress and errors."""
        return f"{self.crew.name} {self.path}"

    def prepare(self) -> None:
        """Allocate, and check that the first sum is right."""
        self.crew.ask(
            f"preparing {self.path}",
            Deadline(ANSWER_S),
            do="prepare",
            path=self.path,
            counts=self.counts,
            repeat=self.repeat,
        )

    def burst(self, num_steps: int, expected_s: float = 0.0) -> list[int]:
        """Nanoseconds of each step."""
        deadline = Deadline(ANSWER_S + 20 * expected_s)
        answers = self.crew.ask(f"running {self.path}", deadline, do="burst", path=self.path, num=num_steps)
        took: list[int] = answers[0]["took_ns"]
        return took

    def settle(self, pace: Pace) -> None:
        """Find out how many steps make a burst."""
        self.num_steps = pace.num_steps(min(self.burst(TRIAL_STEPS)) / 1e9)

    def run(self, pace: Pace) -> None:
        """One burst that counts."""
        self.took_ns += self.burst(self.num_steps, pace.seconds / pace.repeats)

    def record(self, op: str, num_bytes: int) -> Record:
        """What the times say, per operation."""
        median_ns = statistics.median(self.took_ns) / self.repeat
        return Record(
            impl=self.crew.name,
            op=op,
            path=self.label or self.path,
            ranks=self.crew.size,
            bytes=num_bytes,
            median_us=round(median_ns / 1e3, 3),
            min_us=round(min(self.took_ns) / self.repeat / 1e3, 3),
            gbps=round(gigabits(num_bytes, median_ns), 3),
        )


def gigabits(num_bytes: int, took_ns: float) -> float:
    """Gigabits per second."""
    return 8 * num_bytes / took_ns if took_ns else 0.0


def lanes_of(crews: Iterable[Crew], kits: Sequence[Kit], work: Work, paths: Sequence[str]) -> list[Lane]:
    """Who runs this work, and how. Peers have one way for one array; ronde has those of its paths that were asked."""
    many_paths = {kit.name: kit.many_paths for kit in kits}
    lanes = []
    for crew in crews:
        if work.is_many:
            chosen = list(many_paths[crew.name])
        elif crew.name == OURS:
            chosen = [path for path in ("array", "bucket") if path in paths]
        else:
            chosen = ["array"]
        for path in chosen:
            lanes.append(Lane(crew, path, buckets(work.counts) if path == "many-25MB" else work.counts))
    return lanes


class Field:
    """All crews that take part, started together and closed together."""

    def __init__(self, pace: Pace, note: Callable[[str], None], say: Callable[[str], None]) -> None:
        self.crews: list[Crew] = []
        self._pace = pace
        self._note = note
        self._say = say

    def start(self, kit: Starter, size: int) -> None:
        """Start the ranks of an implementation. A peer that does not start is noted and left out."""
        self._say(f"starting {size} ranks of {kit.name}")
        try:
            self.crews.append(Crew(kit.name, size, lambda directory: kit.start(directory, size), Deadline(START_S)))
        except CrewFailed as error:
            if kit.name == OURS:
                raise
            self._note(f"{kit.name} is left out: {error}")

    def race(self, op: str, num_bytes: int, lanes: Sequence[Lane]) -> list[Record]:
        """Measure the lanes in turn."""
        self.take_turns(f"{op} of {num_bytes:,} bytes", lanes)
        for lane in {lane.crew.name: lane for lane in lanes}.values():
            self.attempt(lane, partial(lane.crew.ask, "releasing", Deadline(ANSWER_S), do="release"))
        return [lane.record(op, num_bytes) for lane in lanes if lane.crew in self.crews]

    def take_turns(self, what: str, lanes: Sequence[Runner]) -> None:
        """Let the lanes run their bursts, one after the other."""
        pace = self._pace
        for lane in lanes:
            self._say(f"{what}: preparing {lane.words}")
            self.attempt(lane, lane.prepare)
        for lane in lanes:
            self._say(f"{what}: a first try of {lane.words}")
            self.attempt(lane, partial(lane.settle, pace))
        for turn in range(pace.repeats):
            first = turn % len(lanes)
            for lane in (*lanes[first:], *lanes[:first]):
                self._say(f"{what}, burst {turn + 1} of {pace.repeats}: {lane.words}")
                self.attempt(lane, partial(lane.run, pace))

    def attempt(self, lane: Runner, act: Callable[[], object]) -> None:
        """Do it unless the crew has left. A peer that fails leaves with a note; when ronde fails, all is over."""
        if lane.crew not in self.crews:
            return
        try:
            act()
        except CrewFailed as error:
            if lane.crew.name == OURS:
                raise
            self._note(f"{lane.crew.name} is left out from here on: {error}")
            self.crews.remove(lane.crew)
            lane.crew.close()

    def __enter__(self) -> Field:
        """For `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End all ranks."""
        while self.crews:
            self.crews.pop().close()
