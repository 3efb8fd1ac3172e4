"""Ranks as child processes of the test, with their coordinator in the test's own process."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import IO

from ronde.coordinator.round_planning import ElasticLimits
from ronde.coordinator.server import CoordinatorServer
from ronde.net.keys import JobKey, new_job_key
from ronde.observe.stacks import RankStack
from ronde.settings import PREFIX, Settings
from ronde.types import Deadline
from tests.limits import PATIENCE_S, SECONDS_S

DEFAULTS = Settings()
SET_BY_JOB = ("rank", "size", "coordinator", "coordinator_hosted", "key")


def collect_stacks(coordinator: CoordinatorServer, deadline: Deadline) -> tuple[RankStack, ...]:
    """Return the stacks of all ranks, as far as they answer before the deadline."""
    done: Future[tuple[RankStack, ...]] = Future()
    coordinator.request_stacks(deadline, done.set_result)
    return done.result(deadline.remaining_s + PATIENCE_S)


class LocalJob:
    """A context; at its end all ranks and what they started are dead, and the coordinator is closed."""

    def __init__(
        self,
        argv: Sequence[str],
        num_ranks: int,
        *,
        outputs: Sequence[IO[bytes]],
        env: Mapping[str, str] | None = None,
        settings: Settings | None = None,
        limits: ElasticLimits | None = None,
    ) -> None:
        """Start `argv` num_ranks times. Settings that differ from their defaults are passed on to the ranks; `outputs`
        takes what each rank prints, errors included. With limits the job is elastic: ranks are workers, and there may
        be further ones."""
        settings, key = settings or Settings(), new_job_key()
        self.coordinator = CoordinatorServer(
            "127.0.0.1", 0, num_ranks, JobKey(key), settings=settings, rounds=None, limits=limits
        )
        self._argv = argv
        self._num_ranks = num_ranks
        self._is_elastic = limits is not None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        # One thread per rank, owned by the job: it waits for the end of the process and tells the coordinator.
        self._watchers: list[threading.Thread] = []
        job = {"SIZE": num_ranks, "COORDINATOR": self.coordinator.address, "COORDINATOR_HOSTED": 1, "KEY": key}
        given = {**changed_settings(settings), **{f"{PREFIX}{name}": str(value) for name, value in job.items()}}
        self._env = {**os.environ, **(env or {}), **given}
        try:
            for output in outputs[:num_ranks]:
                self.start(output)
            self.coordinator.start()
        except BaseException:
            self.close()
            raise

    def start(self, output: IO[bytes]) -> int:
        """Start the next rank, and return its number."""
        number = len(self._processes)
        env = {**self._env, f"{PREFIX}RANK": str(min(number, self._num_ranks - 1))}
        if self._is_elastic:
            env |= {f"{PREFIX}ELASTIC": "1", f"{PREFIX}WORKER": str(number)}
        process = subprocess.Popen(
            self._argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)
        watcher = threading.Thread(target=self._watch, args=(number, process.pid), name=f"watches rank {number}")
        self._watchers.append(watcher)
        watcher.start()
        return number

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait(self, deadline: Deadline) -> list[int]:
        """The exit codes by rank when all have ended; minus the number of the signal that killed it."""
        for rank, watcher in enumerate(self._watchers):
            watcher.join(deadline.remaining_s)
            if watcher.is_alive():
                raise TimeoutError(f"rank {rank} still runs after {deadline.timeout_s:g} s")
        return [self._codes[rank] for rank in range(len(self._processes))]

    def close(self) -> None:
        """Idempotent."""
        processes, self._processes = self._processes, []
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)  # its number is its own until it is reaped
        for watcher in self._watchers:
            watcher.join(SECONDS_S)
        for process in processes:
            process.wait(SECONDS_S)
        self.coordinator.close()

    def __enter__(self) -> LocalJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _watch(self, rank: int, pid: int) -> None:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = self._codes[rank] = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self.coordinator.rank_exited(rank, f"killed by signal {-code}" if code < 0 else f"exited with code {code}")


def changed_settings(settings: Settings) -> dict[str, str]:
    """The settings that differ from their defaults, as environment variables."""
    return {
        f"{PREFIX}{name.upper()}": str(getattr(settings, name))
        for name in Settings.__annotations__
        if name not in SET_BY_JOB and getattr(settings, name) != getattr(DEFAULTS, name)
    }
