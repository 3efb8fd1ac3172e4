"""The ranks of the measured implementations, and measuring them in turn.

The machine is noisy and the noise drifts, so no implementation is measured alone: for one piece of work each runs a
short *round* of steps, one implementation after the other, and again, beginning with another one each time. While one
runs, the ranks of the others are blocked.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from ronde.cli.bench.peers import RONDE, MeasuredLibrary
from ronde.cli.bench.table import BenchmarkDisplay
from ronde.errors import RondeError
from ronde.exit_codes import describe_exit_code
from ronde.types import Deadline

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

TAIL_LINES = 40
TAIL_BYTES = 16384


class BenchmarkFailed(RondeError):
    """The ranks of one implementation could not start, crashed, or did not reply in time."""


class RankPool:
    """All ranks of one implementation, started by these commands.

    Each rank has two named pipes in a directory that only this user can enter, `to-RANK` for commands and `from-RANK`
    for replies, one JSON object per line; the directory is the last argument of each command. Pipes work however ranks
    are started (by `ronde run`, by mpiexec, in another network namespace), and both sides see at once when the other
    has ended.
    """

    def __init__(
        self,
        name: str,
        size: int,
        commands: Sequence[Sequence[str]],
        deadline: Deadline,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.size = size
        self._all_idle = False
        """Whether every rank has replied to the last command, and so will read the next."""
        self._writers: list[int] = []
        self._readers: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output = tempfile.TemporaryFile()
        self._directory = tempfile.TemporaryDirectory(prefix="ronde-bench-")
        try:
            for rank in range(size):
                to_rank, from_rank = (Path(self._directory.name, f"{way}-{rank}") for way in ("to", "from"))
                os.mkfifo(to_rank, 0o600)
                os.mkfifo(from_rank, 0o600)
                # For both directions, as this does not wait for the rank; the rank still sees when we close it.
                self._writers.append(os.open(to_rank, os.O_RDWR))
                self._readers.append(os.open(from_rank, os.O_RDONLY | os.O_NONBLOCK))
            for command in commands:
                self._processes.append(
                    subprocess.Popen(
                        (*command, self._directory.name),
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=self._output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C reaches only this process
                    )
                )
            for reply in self._collect_replies("starting", deadline):
                if reply["size"] != size:
                    raise BenchmarkFailed(f"{name} started {reply['size']} ranks instead of {size}")
        except BaseException:
            self.close()
            raise

    def request(self, action: str, deadline: Deadline, **command: Any) -> list[dict[str, Any]]:
        """Send a command to all ranks: their replies, by rank. `action` is for error messages."""
        for writer in self._writers:
            os.write(writer, json.dumps(command).encode() + b"\n")  # it fits into the pipe, so this does not block
        return self._collect_replies(action, deadline)

    def _collect_replies(self, action: str, deadline: Deadline) -> list[dict[str, Any]]:
        replies: dict[int, dict[str, Any]] = {}
        unread = dict.fromkeys(self._readers, b"")
        self._all_idle = False
        while unread:
            for reader in wait(list(unread), min(POLL_INTERVAL_S, deadline.remaining_s)):
                assert isinstance(reader, int)
                rank, data = self._readers.index(reader), os.read(reader, 1 << 16)
                if not data:
                    raise self._make_failure(f"rank {rank} ended while {action}")
                unread[reader] += data
                if unread[reader].endswith(b"\n"):
                    reply = replies[rank] = json.loads(unread.pop(reader))
                    if "error" in reply:
                        raise self._make_failure(f"rank {rank} failed while {action}:\n{reply['error'].strip()}")
            exit_description = self._describe_exit()
            if exit_description:
                raise self._make_failure(f"{exit_description} while {action}")
            if deadline.expired:
                silent = sorted(set(range(self.size)) - set(replies))
                took = f"{action} took over {deadline.timeout_s:.0f} s"
                raise self._make_failure(f"{took}; no answer from ranks {silent}")
        self._all_idle = True
        return [replies[rank] for rank in range(self.size)]

    def _make_failure(self, description: str) -> BenchmarkFailed:
        # The pipe of a rank closes a moment before its process has ended and written its last line.
        self._wait(Deadline(FAILURE_TIMEOUT_S))
        exit_description = self._describe_exit()
        more = f" ({exit_description})" if exit_description and exit_description not in description else ""
        size = self._output.seek(0, os.SEEK_END)
        output = os.pread(self._output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
        tail = output.strip().splitlines()[-TAIL_LINES:]
        return BenchmarkFailed("\n".join((f"{self.name}: {description}{more}", *(["output:"] if tail else []), *tail)))

    def _describe_exit(self) -> str:
        """Which process has ended and how; empty while all run."""
        for index, process in enumerate(self._processes):
            code = process.poll()
            if code is not None:
                which = f"process {index}" if len(self._processes) > 1 else "the process"
                return f"{which} ended ({describe_exit_code(code)})"
        return ""

    def _wait(self, deadline: Deadline) -> None:
        with suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(deadline.remaining_s)

    def close(self) -> None:
        """Let idle ranks quit by themselves, and end the others, with everything that they have started. Idempotent."""
        try:
            if self._all_idle:
                self._all_idle = False
                for writer in self._writers:
                    os.write(writer, b'{"do": "quit"}\n')
                self._wait(Deadline(QUIT_TIMEOUT_S))
        finally:
            # The end of its pipe also ends a rank that no signal reaches.
            for pipes in (self._writers, self._readers):
                while pipes:
                    os.close(pipes.pop())
            self._kill_processes()
            self._output.close()
            self._directory.cleanup()

    def _kill_processes(self) -> None:
        running = [process for process in self._processes if process.poll() is None]
        descendants = []
        for process in running:
            with suppress(psutil.NoSuchProcess):
                descendants += psutil.Process(process.pid).children(recursive=True)
            process.terminate()
        self._wait(Deadline(TERMINATE_S))
        for process in running:
            process.kill()
            process.wait()
        for child in descendants:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(descendants, timeout=TERMINATE_S)


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


@dataclass
class BenchmarkCase:
    """One implementation on one piece of work. A benchmark says how ranks prepare it; see measured_rank.py."""

    pool: RankPool
    work: str
    """What ranks call it, and error messages."""
    rounds: list[list[dict[str, Any]]] = field(default_factory=list, kw_only=True)
    """The replies of all ranks to each round: `took_ns` of each step, and what else they measure."""
    num_steps: int = field(default=TRIAL_STEPS, init=False)
    slowest_s: float = field(default=0.0, init=False)
    """The longest step of the calibration."""

    @property
    def name(self) -> str:
        """For progress."""
        return f"{self.pool.name} {self.work}"

    def setup(self) -> None:
        """Get ready, and check that what is measured computes the right result."""
        raise NotImplementedError

    def calibrate(self, budget: MeasurementBudget) -> None:
        """Find out how many steps make a round."""
        took_ns = self._time_steps(TRIAL_STEPS)[0]["took_ns"]
        self.slowest_s = max(took_ns) / 1e9
        self.num_steps = budget.steps_per_round(min(took_ns) / 1e9)

    def run_round(self) -> None:
        self.rounds.append(self._time_steps(self.num_steps))

    def _time_steps(self, num_steps: int) -> list[dict[str, Any]]:
        deadline = Deadline(REPLY_TIMEOUT_S + 20 * self.slowest_s * (1 + num_steps))
        return self.pool.request(f"running {self.work}", deadline, do="time", work=self.work, num_steps=num_steps)


class BenchmarkRunner:
    """Starts the ranks of the implementations, measures them in turn, and ends them with the block."""

    def __init__(self, budget: MeasurementBudget, display: BenchmarkDisplay[Any]) -> None:
        self.pools: list[RankPool] = []
        """Those that can be measured; one that fails is closed and removed."""
        self._budget = budget
        self._display = display

    def start(self, library: MeasuredLibrary, size: int) -> None:
        """Start ranks. A peer that does not start is left out, with a note."""
        self._display.show_progress(f"starting {size} ranks of {library.name}")
        try:
            self.pools.append(RankPool(library.name, size, library.commands(size), Deadline(START_TIMEOUT_S)))
        except BenchmarkFailed as error:
            if library.name == RONDE:
                raise
            self._display.print_note(f"{library.name} is left out: {error}")

    def run_interleaved(self, work: str, cases: Sequence[BenchmarkCase]) -> None:
        """Measure the cases in turn, `rounds` times. `work` is for progress."""
        budget = self._budget
        for case in cases:
            self._display.show_progress(f"{work}: preparing {case.name}")
            self.attempt(case, case.setup)
        for case in cases:
            self._display.show_progress(f"{work}: a first try of {case.name}")
            self.attempt(case, case.calibrate, budget)
        for index in range(budget.rounds):
            first = index % len(cases)
            for case in (*cases[first:], *cases[:first]):
                self._display.show_progress(f"{work}, round {index + 1} of {budget.rounds}: {case.name}")
                self.attempt(case, case.run_round)

    def attempt(self, case: BenchmarkCase, action: Callable[..., object], *arguments: object) -> None:
        """Do it, unless the ranks of the case have failed before. A failure of a peer removes its ranks, with a note; a
        failure of ronde is raised."""
        if case.pool not in self.pools:
            return
        try:
            action(*arguments)
        except BenchmarkFailed as error:
            if case.pool.name == RONDE:
                raise
            self._display.print_note(f"{case.pool.name} is left out from here on: {error}")
            self.pools.remove(case.pool)
            case.pool.close()

    def __enter__(self) -> BenchmarkRunner:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self.pools:
            pool.close()
