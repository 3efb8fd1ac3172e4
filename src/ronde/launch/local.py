"""Ranks as processes of this machine, with their coordinator in this one. Used by tests and `ronde bench`."""

from __future__ import annotations

import dataclasses
import functools
import os
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TypeAlias

from ronde.comm.coordination.coordinator import Coordinator
from ronde.net.keys import JobKey, new_key
from ronde.observe.events import name_ranks
from ronde.settings import PREFIX, Settings
from ronde.types import Deadline

__all__ = ["LocalJob", "Output", "start_local"]

TERMINATE_S = 2.0
"""Between asking a rank to end and killing it."""
KILL_S = 10.0
"""A killed process ends at once, unless the kernel is busy for it."""
OF_THE_JOB = ("rank", "size", "coordinator", "coordinator_hosted", "key")
"""Settings that the job decides, whatever the caller's say."""

Output: TypeAlias = "int | IO[bytes] | IO[str] | None"


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
    To be called from a thread that lives as long as the job: where the system can, ranks die with it.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if not argv or shutil.which(argv[0]) is None:
        raise ValueError(f"there is no command {argv[0] if argv else ''!r}; give its full path, or check PATH")
    outputs = [*stdout] if isinstance(stdout, Sequence) else [stdout] * num_ranks
    if len(outputs) != num_ranks:
        raise ValueError(f"stdout must be one, or one per rank: got {len(outputs)} for {num_ranks} ranks")
    settings = settings or Settings()
    key = new_key()
    coordinator = Coordinator("127.0.0.1", 0, num_ranks, JobKey(key), settings=settings, rounds=None)
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
    """The processes of a job. Its end, as a context, is the end of all of them and of what they started."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._processes: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        self._changed = threading.Condition()
        self._closing = False
        # Owned by the job. Waits for the processes and reaps them; nobody else does. Ends with the last of them.
        self._thread = threading.Thread(target=self._watch, name="ronde-launch", daemon=True)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(process.pid for process in self._processes)

    def add(self, argv: Sequence[str], env: Mapping[str, str], output: Output) -> None:
        """Start the next rank."""
        self._processes.append(
            subprocess.Popen(
                [*_dying_with_me(), *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,  # so that what a rank starts can be ended with it
            )
        )

    def begin(self) -> None:
        """All ranks are started: bring them together, and watch them."""
        self._thread.start()
        self.coordinator.start()

    def wait(self, deadline: Deadline) -> list[int]:
        """Exit codes by rank, when all have ended; a signal counts below 0. TimeoutError names those still running."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._codes) == len(self._processes), deadline.left_s)
            running = [rank for rank in range(len(self._processes)) if rank not in self._codes]
            if running:
                raise TimeoutError(f"{name_ranks(running)} of the job still running after {deadline.seconds:g} s")
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
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> LocalJob:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        """To the process groups of all ranks that still run. A rank that was not reaped keeps its number."""
        with self._changed:
            for rank, process in enumerate(self._processes):
                if rank not in self._codes:
                    _signal_group(process.pid, number)

    def _watch(self) -> None:
        poll = select.poll()
        ranks = {os.pidfd_open(process.pid): rank for rank, process in enumerate(self._processes)}
        try:
            for fd in ranks:
                poll.register(fd, select.POLLIN)
            while len(self._codes) < len(self._processes):
                for fd, _ in poll.poll():
                    poll.unregister(fd)
                    self._reap(ranks[fd])
        finally:
            for fd in ranks:
                os.close(fd)

    def _reap(self, rank: int) -> None:
        process = self._processes[rank]
        with self._changed:
            # As long as it is not reaped, its number is its own: so now is the time to end what it left behind.
            _signal_group(process.pid, signal.SIGKILL)
            code = self._codes[rank] = process.wait()
            self._changed.notify_all()
        self.coordinator.lost(rank, f"killed by signal {-code}" if code < 0 else f"exited with code {code}")


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # ended in between; or all that is left runs as another user
        pass


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
        f"{PREFIX}{field.name.upper()}": str(getattr(settings, field.name))
        for field in dataclasses.fields(settings)
        if field.name not in OF_THE_JOB and getattr(settings, field.name) != field.default
    }


@functools.cache
def _dying_with_me() -> tuple[str, ...]:
    """What to put before a command so that the kernel kills it when we die; nothing where that is not to be had.
    Without it, a rank learns of our death when its lifeline ends."""
    found = shutil.which("setpriv")
    if found is None:
        return ()
    helped = subprocess.run([found, "--help"], capture_output=True, check=False, timeout=10)
    return (found, "--pdeathsig", "KILL", "--") if b"--pdeathsig" in helped.stdout else ()
