"""The ranks of the measured implementations, and measuring them in turn.

The machine is noisy and the noise drifts, so no implementation is measured alone: for one piece of work each runs a
short *round* of steps, one implementation after the other, and again, beginning with another one each time. While one
runs, the ranks of the others are blocked.

Each rank has two named pipes in a directory that only this user can enter: `to-RANK` for commands and `from-RANK` for
replies, one JSON object per line. Pipes work however ranks are started (by this process, by mpiexec, in another network
namespace), and both sides see at once when the other has ended.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from ronde.cli.quiet_job import QuietJob
from ronde.errors import RondeError
from ronde.launch.job import Job
from ronde.settings import Settings
from ronde.text import describe_exit_code
from ronde.types import Deadline

RONDE = "ronde"
HOROVOD = "hvd"
"""Horovod's interface over ronde: not a peer, and never compared with as one."""

TRIAL_STEPS = 3
MIN_STEPS = 3
MAX_STEPS = 5000

START_TIMEOUT_S = 120.0
REPLY_TIMEOUT_S = 60.0
"""For a reply, on top of twenty times the expected time."""
QUIT_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.5
"""How often processes are polled while replies are waited for: before a rank has opened its pipe, nothing else shows
that it has ended."""
FAILURE_TIMEOUT_S = 2.0
"""After a failure: how long the other processes may take to end and write their last lines."""
TERMINATE_S = 3.0
"""Between SIGTERM and SIGKILL: mpiexec may end its ranks itself."""
GRACE_PERIOD_S = 0.5
"""The same for ranks of ronde; also how long the others may run on after one has failed."""

TAIL_LINES = 20
TAIL_BYTES = 16384
READ_BYTES = 1 << 16


class BenchmarkFailed(RondeError):
    """The ranks of one implementation could not start, crashed, or did not reply in time."""


class BenchmarkProcesses(Protocol):
    """The processes of one implementation."""

    def describe_exit(self) -> str:
        """Which one has ended and how; empty while all run."""

    def output_tail(self) -> str:
        """The last lines of their output, or what the driver says about the end of the job."""

    def wait(self, deadline: Deadline) -> None:
        """Return when all have ended, or at the deadline."""

    def close(self) -> None:
        """End those that still run, and everything they have started."""


class RondeProcesses:
    """Ranks of ronde: a job, started by a driver in this process. Each computes with one thread."""

    def __init__(self, program: Sequence[str], size: int) -> None:
        self._job = QuietJob(
            Job(
                command=tuple(program),
                num_ranks=size,
                env={"OMP_NUM_THREADS": "1"},
                settings=Settings.load(),
                grace_s=GRACE_PERIOD_S,
                terminate_s=GRACE_PERIOD_S,
            )
        )

    def describe_exit(self) -> str:
        return "" if self._job.wait(Deadline(0)) is None else "all ranks ended"

    def output_tail(self) -> str:
        result = self._job.wait(Deadline(0))
        return "" if result is None else result.summary

    def wait(self, deadline: Deadline) -> None:
        self._job.wait(deadline)

    def close(self) -> None:
        self._job.close()


class PeerProcesses:
    """Commands that run side by side, each in a session of its own, so that Ctrl-C reaches only this process. Their
    output goes to files without names."""

    def __init__(self, commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> None:
        self._outputs: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                self._outputs.append(tempfile.TemporaryFile())
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=self._outputs[-1],
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.close()
            raise

    def describe_exit(self) -> str:
        for index, process in enumerate(self._processes):
            code = process.poll()
            if code is not None:
                which = f"process {index}" if len(self._processes) > 1 else "the process"
                return f"{which} ended ({describe_exit_code(code)})"
        return ""

    def output_tail(self) -> str:
        texts = []
        for index, file in enumerate(self._outputs):
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
            if lines:
                texts.append("\n".join((f"output of process {index}:", *lines[-TAIL_LINES:])))
        return "\n".join(texts)

    def wait(self, deadline: Deadline) -> None:
        for process in self._processes:
            try:
                process.wait(deadline.remaining_s)
            except subprocess.TimeoutExpired:
                return

    def close(self) -> None:
        descendants = [child for process in self._processes for child in _find_descendants(process)]
        for process in self._processes:
            process.terminate()  # does nothing when it has ended
        self.wait(Deadline(TERMINATE_S))
        for process in self._processes:
            process.kill()
            process.wait()
        for child in descendants:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(descendants, timeout=TERMINATE_S)
        for file in self._outputs:
            file.close()


def _find_descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    except psutil.NoSuchProcess:
        return []


class _RankPipes:
    """This process's ends of the two pipes of a rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank = rank
        self._unread = b""
        commands, replies = directory / f"to-{rank}", directory / f"from-{rank}"
        os.mkfifo(commands, 0o600)
        os.mkfifo(replies, 0o600)
        # Opened for both directions, this does not wait for the rank; the rank still reads the end when we close it.
        self._commands = os.open(commands, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.replies = os.open(replies, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except BaseException:
            os.close(self._commands)
            raise

    def write(self, command: Mapping[str, Any]) -> None:
        """Send a command. It fits into the pipe, so this does not block."""
        os.write(self._commands, json.dumps(command).encode() + b"\n")

    def read(self) -> dict[str, Any] | None:
        """The reply; None while it has not come, or only in part. EOFError when the rank has ended."""
        try:
            data = os.read(self.replies, READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        self._unread += data
        if not self._unread.endswith(b"\n"):
            return None
        reply: dict[str, Any] = json.loads(self._unread)
        self._unread = b""
        return reply

    def close(self) -> None:
        os.close(self._commands)
        os.close(self.replies)


class RankPool:
    """All ranks of one implementation. `start` gets the directory of the pipes and starts the processes."""

    def __init__(self, name: str, size: int, start: Callable[[Path], BenchmarkProcesses], deadline: Deadline) -> None:
        self.name = name
        self.size = size
        self._pipes: list[_RankPipes] = []
        self._processes: BenchmarkProcesses | None = None
        self._all_idle = False
        """Whether every rank has replied to the last command, and so will read the next."""
        self._directory = tempfile.TemporaryDirectory(prefix="ronde-bench-")
        try:
            for rank in range(size):
                self._pipes.append(_RankPipes(Path(self._directory.name), rank))
            self._processes = start(Path(self._directory.name))
            for reply in self._collect_replies("starting", deadline):
                if reply["size"] != size:
                    raise BenchmarkFailed(f"{name} started {reply['size']} ranks instead of {size}")
        except BaseException:
            self.close()
            raise

    def request(self, action: str, deadline: Deadline, **command: Any) -> list[dict[str, Any]]:
        """Send a command to all ranks: their replies, by rank. `action` is for error messages."""
        for pipes in self._pipes:
            pipes.write(command)
        return self._collect_replies(action, deadline)

    def _collect_replies(self, action: str, deadline: Deadline) -> list[dict[str, Any]]:
        replies: dict[int, dict[str, Any]] = {}
        self._all_idle = False
        with selectors.DefaultSelector() as selector:
            for pipes in self._pipes:
                selector.register(pipes.replies, selectors.EVENT_READ, pipes)
            while len(replies) < self.size:
                for key, _ in selector.select(min(POLL_INTERVAL_S, deadline.remaining_s)):
                    reply = self._read_reply(key.data, action)
                    if reply is not None:
                        replies[key.data.rank] = reply
                        selector.unregister(key.fd)
                assert self._processes is not None
                exit_description = self._processes.describe_exit()
                if exit_description:
                    raise self._make_failure(f"{exit_description} while {action}")
                if deadline.expired:
                    silent = sorted(set(range(self.size)) - set(replies))
                    took = f"{action} took over {deadline.timeout_s:.0f} s"
                    raise self._make_failure(f"{took}; no answer from ranks {silent}")
        self._all_idle = True
        return [replies[rank] for rank in range(self.size)]

    def _read_reply(self, pipes: _RankPipes, action: str) -> dict[str, Any] | None:
        try:
            reply = pipes.read()
        except EOFError:
            raise self._make_failure(f"rank {pipes.rank} ended while {action}") from None
        if reply is not None and "error" in reply:
            raise self._make_failure(f"rank {pipes.rank} failed while {action}:\n{reply['error'].strip()}")
        return reply

    def _make_failure(self, description: str) -> BenchmarkFailed:
        assert self._processes is not None
        # The pipe of a rank closes a moment before its process has ended and written its last line.
        self._processes.wait(Deadline(FAILURE_TIMEOUT_S))
        exit_description = self._processes.describe_exit()
        more = f" ({exit_description})" if exit_description and exit_description not in description else ""
        return BenchmarkFailed(
            "\n".join(filter(None, (f"{self.name}: {description}{more}", self._processes.output_tail())))
        )

    def close(self) -> None:
        """Let idle ranks quit by themselves, and end the others. Idempotent."""
        try:
            if self._all_idle and self._processes is not None:
                for pipes in self._pipes:
                    pipes.write({"do": "quit"})
                self._processes.wait(Deadline(QUIT_TIMEOUT_S))
        finally:
            # The end of its pipe also ends a rank that no signal reaches.
            while self._pipes:
                self._pipes.pop().close()
            if self._processes is not None:
                self._processes.close()
                self._processes = None
            self._directory.cleanup()


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementBudget:
    """How long and how often to measure one implementation on one piece of work."""

    rounds: int = 10
    seconds: float = 1.0
    """The time of all rounds together."""
    steps: int | None = None
    """Steps per round, however long they take; None: as many as fit."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds must be above 0, got {self.seconds}")

    def steps_per_round(self, step_s: float) -> int:
        if self.steps is not None:
            return self.steps
        return max(MIN_STEPS, min(MAX_STEPS, round(self.seconds / self.rounds / max(step_s, 1e-9))))


def describe_lack_of_memory(needed_bytes: int) -> str:
    """Why the machine has no memory for a benchmark; empty when it has."""
    available_bytes = psutil.virtual_memory().available
    if needed_bytes <= available_bytes:
        return ""
    return f"needs about {needed_bytes / 2**30:.1f} GiB of memory, {available_bytes / 2**30:.1f} GiB are free"


class BenchmarkCase(Protocol):
    """One implementation on one piece of work. It keeps the times that it has measured."""

    @property
    def pool(self) -> RankPool: ...

    @property
    def name(self) -> str:
        """For progress and errors."""

    def setup(self) -> None:
        """Get ready, and check that what is measured computes the right result."""

    def calibrate(self, budget: MeasurementBudget) -> None:
        """Find out how many steps make a round."""

    def run_round(self, budget: MeasurementBudget) -> None:
        """Measure one round."""


class BenchmarkRunner:
    """Starts the ranks of the implementations, measures them in turn, and ends them with the block."""

    def __init__(
        self, budget: MeasurementBudget, print_note: Callable[[str], None], show_progress: Callable[[str], None]
    ) -> None:
        self.pools: list[RankPool] = []
        """Those that can be measured; one that fails is closed and removed."""
        self._budget = budget
        self._print_note = print_note
        self._show_progress = show_progress

    def start(self, name: str, size: int, start: Callable[[Path], BenchmarkProcesses]) -> None:
        """Start ranks (see RankPool). A peer that does not start is left out, with a note."""
        self._show_progress(f"starting {size} ranks of {name}")
        try:
            self.pools.append(RankPool(name, size, start, Deadline(START_TIMEOUT_S)))
        except BenchmarkFailed as error:
            if name == RONDE:
                raise
            self._print_note(f"{name} is left out: {error}")

    def run_interleaved(self, work: str, cases: Sequence[BenchmarkCase]) -> None:
        """Measure the cases in turn, `rounds` times. `work` is for progress."""
        budget = self._budget
        for case in cases:
            self._show_progress(f"{work}: preparing {case.name}")
            self.attempt(case, case.setup)
        for case in cases:
            self._show_progress(f"{work}: a first try of {case.name}")
            self.attempt(case, partial(case.calibrate, budget))
        for index in range(budget.rounds):
            first = index % len(cases)
            for case in (*cases[first:], *cases[:first]):
                self._show_progress(f"{work}, round {index + 1} of {budget.rounds}: {case.name}")
                self.attempt(case, partial(case.run_round, budget))

    def attempt(self, case: BenchmarkCase, action: Callable[[], object]) -> None:
        """Do it, unless the ranks of the case have failed before. A failure of a peer removes its ranks, with a note; a
        failure of ronde is raised."""
        if case.pool not in self.pools:
            return
        try:
            action()
        except BenchmarkFailed as error:
            if case.pool.name == RONDE:
                raise
            self._print_note(f"{case.pool.name} is left out from here on: {error}")
            self.pools.remove(case.pool)
            case.pool.close()

    def __enter__(self) -> BenchmarkRunner:
        return self

    def __exit__(self, *_: object) -> None:
        while self.pools:
            self.pools.pop().close()
