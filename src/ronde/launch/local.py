"""Ranks as processes of this machine, with their coordinator in this one. Used by tests and `ronde bench`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from ronde.coordinator.server import CoordinatorServer
from ronde.launch.agent.orphans import OrphanKiller
from ronde.launch.agent.process import ChildProcess, ProcessSpec, spawn
from ronde.launch.agent.process import StdioTarget as Output
from ronde.net.event_loop import EventLoop
from ronde.net.keys import JobKey, new_job_key
from ronde.settings import PREFIX, Settings, describe_settings
from ronde.text import format_ranks
from ronde.types import Deadline

__all__ = ["LocalJob", "Output", "start_local"]

TERMINATE_S = 2.0
"""Between asking a rank to end and killing it."""
KILL_S = 10.0
"""A killed process ends at once, unless the kernel is busy for it."""
OF_THE_JOB = ("rank", "size", "coordinator", "coordinator_hosted", "key")
"""Settings that the job decides, whatever the caller's say."""


def start_local(
    argv: Sequence[str],
    num_ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    settings: Settings | None = None,
    stdout: Output | Sequence[Output] = None,
) -> LocalJob:
    """Start `argv` num_ranks times, as a job. What differs in `settings` from the defaults reaches the ranks, too.

    `stdout` takes what a rank prints, errors included: one for all ranks or one for each; None leaves both as they are.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if not argv or shutil.which(argv[0]) is None:
        raise ValueError(f"there is no command {argv[0] if argv else ''!r}; give its full path, or check PATH")
    outputs = [*stdout] if isinstance(stdout, Sequence) else [stdout] * num_ranks
    if len(outputs) != num_ranks:
        raise ValueError(f"stdout must be one, or one per rank: got {len(outputs)} for {num_ranks} ranks")
    settings = settings or Settings()
    key = new_job_key()
    coordinator = CoordinatorServer("127.0.0.1", 0, num_ranks, JobKey(key), settings=settings, rounds=None)
    shared = {**os.environ, **(env or {}), **_exported(settings), **_place(coordinator.address, num_ranks, key)}
    job = LocalJob(coordinator)
    try:
        for rank, output in enumerate(outputs):
            job.add(argv, {**shared, f"{PREFIX}RANK": str(rank)}, output)
        job.begin()
    except BaseException:
        job.close()
        raise
    return job


class LocalJob:
    """The processes of a job. Its end, as a context, is the end of all of them and of what they started; so is the end
    of this process, however it comes."""

    def __init__(self, coordinator: CoordinatorServer) -> None:
        self.coordinator = coordinator
        self._guard = OrphanKiller()
        self._processes: list[ChildProcess] = []
        self._codes: dict[int, int] = {}
        self._changed = threading.Condition()
        """Held by whoever touches a process: after it is reaped, its number may be a stranger's."""
        self._closing = False
        # Owned by the job. Waits for the processes and reaps them; nobody else does. Ends with the last of them.
        self._thread = threading.Thread(target=self._watch, name="ronde-launch", daemon=True)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(process.pid for process in self._processes)

    def add(self, argv: Sequence[str], env: Mapping[str, str], output: Output) -> None:
        """Start the next rank."""
        stderr = None if output is None else subprocess.STDOUT
        command = ProcessSpec(argv=argv, env=env)
        self._processes.append(spawn(command, self._guard, stdin=subprocess.DEVNULL, stdout=output, stderr=stderr))

    def begin(self) -> None:
        """All ranks are started: bring them together, and watch them."""
        self._thread.start()
        self.coordinator.start()

    def wait(self, deadline: Deadline) -> list[int]:
        """Exit codes by rank, when all have ended; a signal counts below 0. TimeoutError names those still running."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._codes) == len(self._processes), deadline.remaining_s)
            running = [rank for rank in range(len(self._processes)) if rank not in self._codes]
            if running:
                raise TimeoutError(f"{format_ranks(running)} of the job still running after {deadline.timeout_s:g} s")
            return [self._codes[rank] for rank in range(len(self._processes))]

    def terminate(self) -> None:
        """Ask all that still run to end; who does not is killed."""
        self._signal(signal.SIGTERM)
        try:
            self.wait(Deadline(TERMINATE_S))
        except TimeoutError:
            self.kill()

    def kill(self) -> None:
        """End all that still run, without asking."""
        self._signal(signal.SIGKILL)
        self.wait(Deadline(KILL_S))

    def close(self) -> None:
        """Kill what is left, and end the coordinator. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if not self._thread.is_alive() and len(self._codes) < len(self._processes):  # the start failed half-way
            self._thread.start()
        try:
            self.kill()
        finally:
            self.coordinator.close()
            self._guard.close()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> LocalJob:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the process groups of all ranks that still run."""
        with self._changed:
            for process in self._processes:
                process.signal(number)

    def _watch(self) -> None:
        loop = EventLoop()
        try:
            for rank, process in enumerate(self._processes):
                loop.add_reader(process.pidfd, partial(self._reap, loop, rank))
            loop.run_until(condition=lambda: len(self._codes) == len(self._processes))
        finally:
            loop.close()

    def _reap(self, loop: EventLoop, rank: int) -> None:
        process = self._processes[rank]
        loop.remove_reader(process.pidfd)
        with self._changed:
            code = self._codes[rank] = process.reap()
            self._changed.notify_all()
        self.coordinator.rank_exited(rank, f"killed by signal {-code}" if code < 0 else f"exited with code {code}")


def _place(address: str, num_ranks: int, key: str) -> dict[str, str]:
    """What tells a process its place in the job. The key travels only here: an environment is private to its user."""
    return {
        f"{PREFIX}SIZE": str(num_ranks),
        f"{PREFIX}COORDINATOR": address,
        f"{PREFIX}COORDINATOR_HOSTED": "1",
        f"{PREFIX}KEY": key,
    }


def _exported(settings: Settings) -> dict[str, str]:
    """The settings that differ from their defaults, as variables."""
    return {
        setting.env: str(getattr(settings, setting.name))
        for setting in describe_settings()
        if setting.name not in OF_THE_JOB and getattr(settings, setting.name) != setting.default
    }
