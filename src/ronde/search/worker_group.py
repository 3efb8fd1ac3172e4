"""A group of warm workers: a small job of the launcher, with as many ranks as a trial has, that runs one trial after
another. Its driver has a thread of its own; events go to the queue of the search driver.

WorkerGroup runs functions; ScriptGroup (script_group) starts a command for each trial. The search driver knows both as
TrialGroup.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from ronde.launch.driver.driver import Driver
from ronde.launch.driver.failure_report import JobResult
from ronde.launch.job import Job
from ronde.launch.placement import Host, hosts_or_localhost, place_ranks
from ronde.net.event_loop import start_thread
from ronde.search.protocol import (
    DriverToWorker,
    StartTrial,
    StopWorker,
    WorkerToDriver,
    decode_for_driver,
    encode_message,
)
from ronde.search.trial_output import TrialOutput
from ronde.text import shorten
from ronde.types import Deadline

STOP_GRACE_S = 5.0
"""When a search ends, its workers get so long to end by themselves."""
KILL_TIMEOUT_S = 30.0
"""How long a driver may take to end ranks that it was told to kill."""
MAX_LOSS_CHARS = 300
OVER = "the search is over"


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """A message of a worker."""

    group: int
    incarnation: int
    rank: int
    message: WorkerToDriver


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The workers of a group are gone."""

    group: int
    incarnation: int
    reason: str


GroupEvent: TypeAlias = WorkerEvent | GroupLost


class TrialGroup(Protocol):
    """What runs trials, one at a time."""

    def start(self, incarnation: int) -> None:
        """Start, or kill what was started before and start again. Afterwards events have this incarnation."""

    def send(self, message: DriverToWorker) -> None:
        """Send a message to all ranks."""

    def stop(self, *, now: bool) -> None:
        """Let everything end, `now` also what runs a trial. It does not wait, so all groups end at the same time."""

    def close(self) -> None:
        """Wait for the end, and kill what does not end by itself. Idempotent."""


class WorkerGroup:
    """Warm workers. Its methods are called by the search driver."""

    def __init__(self, index: int, job: Job, folder: Path, post: Callable[[GroupEvent], None]) -> None:
        self._index = index
        self._job = job
        self._post = post
        self._output = TrialOutput(folder, f"worker-{index}.txt", num_ranks=job.num_ranks)
        self._driver: Driver | None = None
        self._thread: threading.Thread | None = None
        self._stop_deadline = Deadline(0.0)

    def start(self, incarnation: int) -> None:
        self._output.end_trial()  # before the launcher says that it ends the former ranks
        self._kill("the group is started again")

        def on_message(rank: int, data: bytes) -> None:
            self._post(WorkerEvent(self._index, incarnation, rank, decode_for_driver(data)))

        driver = self._driver = Driver(self._job, self._output, on_message=on_message)

        def run() -> None:
            try:
                result = driver.run()
                reason = describe_loss(result)
                if result.summary:
                    self._output.print_message(result.summary)
            except Exception as error:  # the edge of the thread: the search driver has to know
                reason = f"{type(error).__name__}: {error}"
            self._post(GroupLost(self._index, incarnation, reason))

        self._thread = threading.Thread(target=run, name=f"ronde-search-{self._index}", daemon=True)
        start_thread(self._thread)

    def send(self, message: DriverToWorker) -> None:
        if isinstance(message, StartTrial):
            self._output.begin_trial(message.number)
        assert self._driver is not None
        data = encode_message(message)
        for rank in range(self._job.num_ranks):
            self._driver.send(rank, data)

    def stop(self, *, now: bool) -> None:
        self._stop_deadline = Deadline(STOP_GRACE_S)
        if self._driver is not None and now:
            self._driver.stop(OVER)
        elif self._driver is not None:
            self.send(StopWorker())

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(self._stop_deadline.remaining_s)
        self._kill(OVER)
        self._output.close()

    def _kill(self, reason: str) -> None:
        driver, thread = self._driver, self._thread
        self._driver = self._thread = None
        if driver is not None and thread is not None and thread.is_alive():
            kill_driver(driver, thread, reason)


def kill_driver(driver: Driver, thread: threading.Thread, reason: str) -> None:
    """End a job, and wait for its driver."""
    deadline = Deadline(KILL_TIMEOUT_S)
    while thread.is_alive() and not deadline.expired:
        driver.stop(reason)  # again and again: the second request kills what the first has only asked to end
        thread.join(min(1.0, deadline.remaining_s))


def describe_loss(result: JobResult) -> str:
    """Say in a line why workers are gone."""
    if result.stop_request is not None:
        return result.stop_request.reason
    lines = result.summary.strip().splitlines()
    return shorten(lines[0], MAX_LOSS_CHARS) if lines else "its workers have exited"


class GroupPlacement(NamedTuple):
    """Where the ranks of a group run."""

    hosts: tuple[Host, ...]
    slots: tuple[int, ...]
    """By rank, its number among the ranks of all groups on its host."""
    groups_per_host: int
    """How many groups of this size share the fullest of its hosts."""


def place_groups(hosts: tuple[Host, ...], num_groups: int, ranks_per_trial: int) -> list[GroupPlacement]:
    """Place every group. Hosts are filled in their order, so the ranks of a group are neighbours as far as that works
    out. ValueError says how many slots are missing."""
    num_ranks = num_groups * ranks_per_trial
    placements = place_ranks(hosts_or_localhost(hosts, num_ranks), num_ranks)
    groups = []
    for first in range(0, num_ranks, ranks_per_trial):
        own = placements[first : first + ranks_per_trial]
        counts = Counter(placement.host.name for placement in own)
        groups.append(
            GroupPlacement(
                tuple(Host(name, count) for name, count in counts.items()),
                tuple(placement.local_rank for placement in own),
                max(-(-placement.local_size // counts[placement.host.name]) for placement in own),
            )
        )
    return groups


def make_group_job(job: Job, placement: GroupPlacement) -> Job:
    """Return the job of one group, from one with what all groups have in common. When a rank is lost, the others do not
    wait for it."""
    return replace(
        job,
        hosts=placement.hosts,
        num_ranks=len(placement.slots),
        jobs_per_host=placement.groups_per_host,
        grace_s=0.5,
        terminate_s=2.0,
    )
