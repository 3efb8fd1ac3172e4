"""The processes of one measured implementation: started, watched, and surely ended. Used by peers.py and ours.py.

The ranks of one measured implementation, and how they are told what to do. Used by measure.py.

Each rank has two named pipes in a directory only we can enter: `to-RANK` for commands and `from-RANK` for answers, one
JSON object per line. Pipes work the same however the ranks were started (by us, by mpiexec, in another network
namespace), and both sides see at once when the other is gone: rank.py reads the end of its pipe, we get a hang-up.

Measuring implementations in turn, and what comes out of it. Used by command.py, and by train.py for its own lanes.

The machine is noisy and the noise drifts, so nobody is measured alone: for one piece of work all implementations run a
short *burst* of steps, one implementation after the other, and again, each round beginning with another one. While one
runs, the ranks of the others are blocked. A step's time is what rank 0 sees of it in a back-to-back loop without
barriers; a number is the median over the steps of all bursts.
"""

from __future__ import annotations

import json
import os
import selectors
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import psutil

from ronde.cli.bench.cases import Workload, buckets
from ronde.errors import RondeError
from ronde.text import describe_exit_code
from ronde.types import Deadline

__all__ = [
    "AllreduceCase",
    "AllreduceImplementation",
    "BenchmarkCase",
    "BenchmarkFailed",
    "BenchmarkProcesses",
    "BenchmarkResult",
    "BenchmarkRunner",
    "COMPATIBLE",
    "Implementation",
    "MeasurementBudget",
    "OURS",
    "OutputFiles",
    "PeerProcesses",
    "RANK_PROGRAM",
    "RankPool",
    "gigabits",
    "lanes_of",
]

TAIL_LINES = 20
TAIL_BYTES = 16384
TERMINATE_S = 3.0
"""mpiexec gets this long to end its ranks itself."""


class BenchmarkProcesses(Protocol):
    """Processes under way, whoever started them."""

    def ended(self) -> str:
        """Which one has ended too early and how, in words; empty when all run."""

    def tail(self) -> str:
        """The last lines that they wrote."""

    def wait(self, deadline: Deadline) -> None:
        """Until all have ended by themselves, or the deadline."""

    def close(self) -> None:
        """End those still running, and everything they started."""


class OutputFiles:
    """Files that take what processes write; they have no name, so nothing is left of them."""

    def __init__(self, num: int) -> None:
        self.files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(num)]

    def tail(self) -> str:
        """The last lines of each, those with nothing left out."""
        texts = []
        for index, file in enumerate(self.files):
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
            if lines:
                texts.append("\n".join((f"output of process {index}:", *lines[-TAIL_LINES:])))
        return "\n".join(texts)

    def close(self) -> None:
        """Forget what was written."""
        for file in self.files:
            file.close()


class PeerProcesses:
    """Commands run side by side, each in a session of its own: Ctrl-C reaches us alone, and we end them in order."""

    def __init__(self, commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> None:
        self._outputs = OutputFiles(len(commands))
        self._running: list[subprocess.Popen[bytes]] = []
        try:
            for command, output in zip(commands, self._outputs.files, strict=True):
                self._running.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.close()
            raise

    def ended(self) -> str:
        """Which one has ended and how; empty when all run."""
        for index, process in enumerate(self._running):
            code = process.poll()
            if code is not None:
                which = f"process {index}" if len(self._running) > 1 else "the process"
                return f"{which} ended ({describe_exit_code(code)})"
        return ""

    def tail(self) -> str:
        """The last lines that they wrote."""
        return self._outputs.tail()

    def wait(self, deadline: Deadline) -> None:
        """Until all have ended, or the deadline."""
        for process in self._running:
            try:
                process.wait(deadline.remaining_s)
            except subprocess.TimeoutExpired:
                return

    def close(self) -> None:
        """First ask (mpiexec then ends its ranks), then kill them and all their descendants."""
        family = [child for process in self._running for child in _descendants(process)]
        for process in self._running:
            process.terminate()  # does nothing when it has ended
        self.wait(Deadline(TERMINATE_S))
        for process in self._running:
            process.kill()
            process.wait()
        for child in family:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=TERMINATE_S)
        self._outputs.close()


def _descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    except psutil.NoSuchProcess:
        return []


RANK_PROGRAM = str(Path(__file__).with_name("allreduce_rank.py"))
LEAVE_S = 10.0
READ_BYTES = 1 << 16
LOOK_S = 0.5
"""How often to look whether a process ended before its rank opened its pipes."""


class BenchmarkFailed(RondeError):
    """The ranks of one implementation could not start, crashed, or did not answer in time."""


class _Pipes:
    """Our ends of the two pipes of one rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank = rank
        self._unread = b""
        to, answers = directory / f"to-{rank}", directory / f"from-{rank}"
        os.mkfifo(to, 0o600)
        os.mkfifo(answers, 0o600)
        # Opened for both directions it does not wait for the rank to come; the rank still reads the end when we go.
        self._to = os.open(to, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.answers = os.open(answers, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except BaseException:
            os.close(self._to)
            raise

    def write(self, line: bytes) -> None:
        """Send one command. It fits into the pipe, so this does not block."""
        os.write(self._to, line)

    def read(self) -> bytes | None:
        """The next whole line, nothing when it has not come yet; EOFError when the rank is gone."""
        try:
            got = os.read(self.answers, READ_BYTES)
        except BlockingIOError:
            return None
        if not got:
            raise EOFError
        line, newline, rest = (self._unread + got).partition(b"\n")
        if not newline:
            self._unread = line
            return None
        assert not rest, "a rank answers once per command"
        self._unread = b""
        return line

    def close(self) -> None:
        """Close both."""
        os.close(self._to)
        os.close(self.answers)


class RankPool:
    """All ranks of one implementation. `start` gets the directory of the pipes and starts the processes."""

    def __init__(self, name: str, size: int, start: Callable[[Path], BenchmarkProcesses], deadline: Deadline) -> None:
        self.name = name
        self.size = size
        self._pipes: list[_Pipes] = []
        self._selector = selectors.DefaultSelector()
        self._started: BenchmarkProcesses | None = None
        self._healthy = False
        self._directory = tempfile.TemporaryDirectory(prefix="ronde-bench-")
        try:
            directory = Path(self._directory.name)
            for rank in range(size):
                self._pipes.append(_Pipes(directory, rank))
            self._started = start(directory)
            # Before a rank opens its pipe there is nothing to read and no hang-up: look at the processes meanwhile.
            for hello in self._answers("starting", deadline):
                if hello["size"] != size:
                    raise BenchmarkFailed(f"{name} started {hello['size']} ranks instead of {size}")
        except BaseException:
            self.close()
            raise

    def ask(self, doing: str, deadline: Deadline, **command: Any) -> list[dict[str, Any]]:  # JSON
        """Give all ranks one command and wait for all answers, in the order of the ranks."""
        line = json.dumps(command).encode() + b"\n"
        for pipes in self._pipes:
            pipes.write(line)
        return self._answers(doing, deadline)

    def _answers(self, doing: str, deadline: Deadline) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        self._healthy = False
        for pipes in self._pipes:
            self._selector.register(pipes.answers, selectors.EVENT_READ, pipes)
        try:
            while len(answers) < self.size:
                for key, _ in self._selector.select(min(LOOK_S, deadline.remaining_s)):
                    line = self._read(key.data, doing)
                    if line is not None:
                        answers[key.data.rank] = self._checked(key.data.rank, json.loads(line), doing)
                        self._selector.unregister(key.fd)
                self._check_alive(doing)
                if deadline.expired:
                    silent = sorted(set(range(self.size)) - set(answers))
                    raise self._failure(f"{doing} took over {deadline.timeout_s:.0f} s; no answer from ranks {silent}")
        finally:
            for fd in list(self._selector.get_map()):
                self._selector.unregister(fd)
        self._healthy = True
        return [answers[rank] for rank in range(self.size)]

    def _read(self, pipes: _Pipes, doing: str) -> bytes | None:
        try:
            return pipes.read()
        except EOFError:
            raise self._failure(f"rank {pipes.rank} ended while {doing}") from None

    def _checked(self, rank: int, answer: dict[str, Any], doing: str) -> dict[str, Any]:
        if "error" in answer:
            raise self._failure(f"rank {rank} failed while {doing}:\n{answer['error'].strip()}")
        return answer

    def _check_alive(self, doing: str) -> None:
        assert self._started is not None
        how = self._started.ended()
        if how:
            raise self._failure(f"{how} while {doing}")

    def _failure(self, words: str) -> BenchmarkFailed:
        assert self._started is not None
        # A rank's pipe closes a moment before its process has ended and written its last line.
        self._started.wait(Deadline(4 * LOOK_S))
        ended = self._started.ended()
        how = f" ({ended})" if ended and ended not in words else ""
        return BenchmarkFailed("\n".join(filter(None, (f"{self.name}: {words}{how}", self._started.tail()))))

    def close(self) -> None:
        """Tell the ranks to leave when all of them listen, and end what is left."""
        try:
            if self._healthy and self._started is not None:
                for pipes in self._pipes:
                    pipes.write(b'{"do": "quit"}\n')
                self._started.wait(Deadline(LEAVE_S))
        finally:
            # The end of their pipes lets ranks leave that no signal of ours would reach.
            while self._pipes:
                self._pipes.pop().close()
            if self._started is not None:
                self._started.close()
                self._started = None
            self._selector.close()
            self._directory.cleanup()


OURS = "ronde"
COMPATIBLE = "hvd"
"""Horovod's interface over ronde: not a peer, and not to be compared with as one."""
START_S = 120.0
ANSWER_S = 60.0
"""An answer may take this long on top of twenty times what is expected."""
TRIAL_STEPS = 3
MOST_STEPS = 5000
FEWEST_STEPS = 3


class Implementation(Protocol):
    """An implementation that can be measured: its name, and how its ranks start."""

    @property
    def name(self) -> str:
        """As tables show it."""

    def start(self, directory: Path, size: int) -> BenchmarkProcesses:
        """Start `size` ranks that use the pipes in the directory."""


class AllreduceImplementation(Implementation, Protocol):
    """One that reduces arrays."""

    @property
    def many_paths(self) -> tuple[str, ...]:
        """The ways to reduce many arrays."""


class BenchmarkResult(msgspec.Struct, frozen=True):
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
class MeasurementBudget:
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


class BenchmarkCase(Protocol):
    """What takes turns: one implementation doing one thing, which keeps its own times."""

    @property
    def crew(self) -> RankPool:
        """Its ranks."""

    @property
    def words(self) -> str:
        """For progress and errors."""

    def prepare(self) -> None:
        """Get ready, and check that what is measured is right."""

    def settle(self, pace: MeasurementBudget) -> None:
        """Find out how many steps make a burst."""

    def run(self, pace: MeasurementBudget) -> None:
        """One burst that counts."""


@dataclass
class AllreduceCase:
    """One implementation on one path, with the times it has run so far."""

    crew: RankPool
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

    def settle(self, pace: MeasurementBudget) -> None:
        """Find out how many steps make a burst."""
        self.num_steps = pace.num_steps(min(self.burst(TRIAL_STEPS)) / 1e9)

    def run(self, pace: MeasurementBudget) -> None:
        """One burst that counts."""
        self.took_ns += self.burst(self.num_steps, pace.seconds / pace.repeats)

    def record(self, op: str, num_bytes: int) -> BenchmarkResult:
        """What the times say, per operation."""
        median_ns = statistics.median(self.took_ns) / self.repeat
        return BenchmarkResult(
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


def lanes_of(
    crews: Iterable[RankPool], kits: Sequence[AllreduceImplementation], work: Workload, paths: Sequence[str]
) -> list[AllreduceCase]:
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
            lanes.append(AllreduceCase(crew, path, buckets(work.counts) if path == "many-25MB" else work.counts))
    return lanes


class BenchmarkRunner:
    """All crews that take part, started together and closed together."""

    def __init__(self, pace: MeasurementBudget, note: Callable[[str], None], say: Callable[[str], None]) -> None:
        self.crews: list[RankPool] = []
        self._pace = pace
        self._note = note
        self._say = say

    def start(self, kit: Implementation, size: int) -> None:
        """Start the ranks of an implementation. A peer that does not start is noted and left out."""
        self._say(f"starting {size} ranks of {kit.name}")
        try:
            self.crews.append(RankPool(kit.name, size, lambda directory: kit.start(directory, size), Deadline(START_S)))
        except BenchmarkFailed as error:
            if kit.name == OURS:
                raise
            self._note(f"{kit.name} is left out: {error}")

    def race(self, op: str, num_bytes: int, lanes: Sequence[AllreduceCase]) -> list[BenchmarkResult]:
        """Measure the lanes in turn."""
        self.take_turns(f"{op} of {num_bytes:,} bytes", lanes)
        for lane in {lane.crew.name: lane for lane in lanes}.values():
            self.attempt(lane, partial(lane.crew.ask, "releasing", Deadline(ANSWER_S), do="release"))
        return [lane.record(op, num_bytes) for lane in lanes if lane.crew in self.crews]

    def take_turns(self, what: str, lanes: Sequence[BenchmarkCase]) -> None:
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

    def attempt(self, lane: BenchmarkCase, act: Callable[[], object]) -> None:
        """Do it unless the crew has left. A peer that fails leaves with a note; when ronde fails, all is over."""
        if lane.crew not in self.crews:
            return
        try:
            act()
        except BenchmarkFailed as error:
            if lane.crew.name == OURS:
                raise
            self._note(f"{lane.crew.name} is left out from here on: {error}")
            self.crews.remove(lane.crew)
            lane.crew.close()

    def __enter__(self) -> BenchmarkRunner:
        """For `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End all ranks."""
        while self.crews:
            self.crews.pop().close()
