"""The server processes of a job: started with the ranks, replaced when one is lost, and ended behind the last rank.

A lost server does not end the job: its parts have replicas on the others, and the process that is started in its place
gets copies of them. If they have none, the workers learn that from the parameter server itself.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ronde.launch.driver.failure_report import describe_exit
from ronde.launch.driver.slots import Cooldown, ScalingLimits
from ronde.launch.driver.ssh import HostError
from ronde.launch.driver.supervisor import JobPolicy, RankLocation, RankSupervisor
from ronde.launch.driver.termination import TerminationEvent
from ronde.launch.job import Job
from ronde.launch.protocol import RankExit, RankOrder, StartRanks
from ronde.net.event_loop import EventLoop, Timer
from ronde.settings import FIRST_SERVER

MIN_LIFE_S = 10.0
"""A server that ends by itself earlier than this has not been of any use."""
MAX_EARLY_ENDS = 3
"""So many in a row end the job: the next one would end as early."""


class ServerMembers(Protocol):
    """What the pool tells the coordinator of server processes and workers (CoordinatorServer)."""

    def rank_exited(self, rank: int, how: str) -> None: ...

    def set_host_name(self, number: int, name: str) -> None: ...


@dataclass(slots=True)
class _Server:
    place: int
    """Its index among the servers that the job has at a time."""
    host_index: int
    started_s: float


class ServerPool:
    """The policy of a job with server processes, around that of its ranks. All methods are called in the driver's
    loop."""

    def __init__(
        self,
        loop: EventLoop,
        job: Job,
        supervisor: RankSupervisor,
        coordinator: ServerMembers,
        *,
        ranks: JobPolicy,
        choose_host: Callable[[int], int | None],
        host_name: Callable[[int], str],
        make_order: Callable[[int, int], RankOrder],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ranks` is the policy of the ranks. `choose_host` gives the index of the host for the server of a place, None
        if there is none now; `make_order` gets the number of a server and the index of its host."""
        self._loop = loop
        self._job = job
        self._supervisor = supervisor
        self._coordinator = coordinator
        self._ranks = ranks
        self._choose_host = choose_host
        self._host_name = host_name
        self._make_order = make_order
        self._clock = clock
        self._limits = ScalingLimits(
            start_workers=1, max_workers=1, min_cooldown_s=job.cooldown_s[0], max_cooldown_s=job.cooldown_s[1]
        )
        self._servers: dict[int, _Server] = {}
        """By number, those that run."""
        self._cooldowns: dict[int, Cooldown] = {}
        """By place."""
        self._num_started = 0
        self._num_early_ends = 0
        self._is_ending = False
        self._timers: list[Timer] = []
        self.failed_exits: list[RankExit] = []
        """Of servers, because of which the job has failed."""

    def start(self) -> None:
        """Start the servers that the job begins with."""
        self._start(range(self._job.num_servers))

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()

    @property
    def goes_on(self) -> bool:
        return self._ranks.goes_on

    def handle_exit(self, rank_exit: RankExit) -> TerminationEvent | None:
        self._coordinator.rank_exited(rank_exit.rank, describe_exit(rank_exit))
        server = self._servers.pop(rank_exit.rank, None)
        if server is not None:
            return self._handle_server_exit(server, rank_exit)
        event = self._ranks.handle_exit(rank_exit)
        self.end_if_done()
        return event

    def handle_agent_lost(self, host_index: int, error: HostError) -> None:
        self._ranks.handle_agent_lost(host_index, error)

    def handle_agent_stopping(self, host_index: int) -> None:
        self._ranks.handle_agent_stopping(host_index)

    def end_if_done(self) -> None:
        """Ask the servers to end, if the last rank has ended and there will be no other."""
        has_ranks = any(number not in self._servers for number in self._supervisor.running)
        goes_on = self._ranks.goes_on and not self._supervisor.is_ending
        if has_ranks or goes_on or self._is_ending:
            return
        self._is_ending = True
        self._supervisor.ask_to_end(sorted(self._servers), signal.SIGTERM)
        kill = partial(self._supervisor.ask_to_end, sorted(self._servers), signal.SIGKILL)
        self._timers.append(self._loop.call_later(self._job.terminate_s, kill))

    def _handle_server_exit(self, server: _Server, rank_exit: RankExit) -> TerminationEvent | None:
        if self._is_ending or self._supervisor.is_ending:
            return None
        now_s = self._clock()
        life_s = now_s - server.started_s
        is_early = life_s < MIN_LIFE_S and rank_exit.exit_code > 0
        self._num_early_ends = self._num_early_ends + 1 if is_early else 0
        if self._num_early_ends >= MAX_EARLY_ENDS:
            self.failed_exits.append(rank_exit)
            return TerminationEvent.RANK_FAILED
        before = self._cooldowns.get(server.place, Cooldown())
        cooldown = self._cooldowns[server.place] = before.after_failure(now_s, well_s=life_s, limits=self._limits)
        delay_s = cooldown.until_s - now_s
        self._supervisor.print_message(
            f"{rank_exit.name} on host {rank_exit.host} {describe_exit(rank_exit)}; another one is started after "
            f"{delay_s:g} s"
        )
        self._timers.append(self._loop.call_later(delay_s, partial(self._start, (server.place,))))
        return None

    def _start(self, places: Sequence[int]) -> None:
        if self._is_ending or self._supervisor.is_ending:
            return
        locations: list[RankLocation] = []
        orders: dict[int, list[RankOrder]] = {}
        for place in places:
            host_index = self._choose_host(place)
            if host_index is None:
                again = partial(self._start, (place,))
                self._timers.append(self._loop.call_later(self._job.cooldown_s[0], again))
                continue
            number = FIRST_SERVER + self._num_started
            self._num_started += 1
            host = self._host_name(host_index)
            self._servers[number] = _Server(place, host_index, self._clock())
            self._coordinator.set_host_name(number, host)
            orders.setdefault(host_index, []).append(self._make_order(number, host_index))
            locations.append(RankLocation(number, host_index, host, 0))
        if locations:
            of_hosts = {index: StartRanks(tuple(each), b"", self._job.terminate_s) for index, each in orders.items()}
            self._supervisor.start_ranks(locations, of_hosts)
