"""The driver carries out one job: it starts the agents of all hosts, hosts the coordinator, has the ranks started and
ended, shows their output, and leaves nothing behind. Used by `ronde run` and ronde.run.

Everything happens in the thread that calls Driver.run(), in one event loop. RankSupervisor keeps track of the ranks
between their start and the last exit; in an elastic job WorkerPool starts them, whenever there are slots for them.
Decisions are made elsewhere: which rank runs where (placement, slots), how hosts reach each other (network), how a job
is ended (termination), which rank failed first (failure_report).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

from ronde.coordinator.queries import OnStacks
from ronde.coordinator.round_planning import ElasticLimits, Membership
from ronde.coordinator.server import CoordinatorServer
from ronde.errors import StartFailed
from ronde.exit_codes import NOT_EXECUTABLE_CODE, NOT_STARTED_CODE
from ronde.launch.driver.agents import AgentGroup, StartCancelled
from ronde.launch.driver.failure_report import JobResult, StopRequest, make_job_result
from ronde.launch.driver.host_source import FixedHosts, HostPoller, HostSource
from ronde.launch.driver.monitor import (
    JobStatus,
    MonitorServer,
    RankStatus,
    make_elastic_status,
    make_job_status,
    make_rank_stacks,
)
from ronde.launch.driver.server_pool import ServerPool
from ronde.launch.driver.slots import ScalingLimits, SlotTable
from ronde.launch.driver.supervisor import OutputSink, RankLocation, RankSupervisor, RanksWithHelpers
from ronde.launch.driver.worker_pool import WorkerPool
from ronde.launch.environment import (
    count_ports,
    make_rank_orders,
    make_server_order,
    make_worker_order,
    makes_tf_config,
)
from ronde.launch.job import Job
from ronde.launch.network import HostFacts
from ronde.launch.placement import Host, Placement, hosts_or_localhost
from ronde.launch.protocol import PortCounts, RankOrder
from ronde.launch.server_processes import make_helpers, place_servers, process_names
from ronde.launch.timeouts import OUTPUT_FLUSH_TIMEOUT_S, UNLIMITED_S
from ronde.net.event_loop import EventLoop
from ronde.net.keys import JobKey, new_job_key
from ronde.types import Deadline

START_FAILED_EXIT_CODE = 1
"""The hosts of the job cannot be used."""

INTERRUPTED = StopRequest(128 + signal.SIGINT, "interrupted by Ctrl-C")
TERMINATED = StopRequest(128 + signal.SIGTERM, "ended by SIGTERM")
HUNG_UP = StopRequest(128 + signal.SIGHUP, "ended by SIGHUP: the terminal was closed")
SIGNAL_REQUESTS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED, signal.SIGHUP: HUNG_UP}

SIGNAL_REPEAT_S: Mapping[signal.Signals, float] = {signal.SIGTERM: 1.0, signal.SIGHUP: 1.0, signal.SIGINT: 0.1}
"""The same signal again within this time is the same request, not a second one. `timeout` sends SIGTERM to its command
and at once to the command's process group, as service managers do. For Ctrl-C it is shorter than a person needs to
press the keys twice. Other signals always count."""


@contextmanager
def handle_signals(loop: EventLoop, handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Within this context each of these signals becomes a call in the loop; its repeats (SIGNAL_REPEAT_S) do not. A
    signal that was ignored (nohup) stays so. Outside of the main thread nothing changes: only that one gets signals."""
    before = {}
    last_s: dict[int, float] = {}

    def handle(number: int, _frame: object) -> None:
        now_s = time.monotonic()
        # Repeats do not extend the interval: one of several that keep coming is a new request again.
        if now_s - last_s.get(number, -math.inf) >= SIGNAL_REPEAT_S.get(signal.Signals(number), 0.0):
            last_s[number] = now_s
            loop.call_soon_threadsafe(handlers[signal.Signals(number)])

    if threading.current_thread() is threading.main_thread():
        for number in handlers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was not set by Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def log_to_output(loop: EventLoop, print_message: Callable[[str], None]) -> Iterator[None]:
    """Within this context the warnings that ronde logs, in any thread, are printed in the loop, the last of them at its
    end: written directly, they would end up inside progress bars. A program with log handlers of its own keeps them."""
    logger = logging.getLogger("ronde")
    if logger.hasHandlers():
        yield
        return
    pending: deque[str] = deque()

    def print_pending() -> None:
        while pending:
            print_message(pending.popleft())

    class PendingLogHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            pending.append(self.format(record))
            loop.call_soon_threadsafe(print_pending)

    handler = PendingLogHandler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        print_pending()


class Driver:
    """One job. run() it, once; stop() it from any thread."""

    def __init__(
        self,
        job: Job,
        output_sink: OutputSink,
        *,
        host_source: HostSource | None = None,
        prepare: Callable[[Job, str], Job] | None = None,
        on_message: Callable[[int, bytes], None] | None = None,
    ) -> None:
        """`host_source` says which hosts an elastic job may use; by default those of the job, for ever. `prepare` is
        called in the thread of run(), before the first worker of an elastic job is started, with the job and the
        address at which workers reach this machine; the job that it returns is run. `on_message` gets the
        messages of ranks (Job.has_messages), in the thread of run()."""
        if job.debug_rank is not None:  # the other ranks wait for a person
            settings = job.settings.replace(start_s=UNLIMITED_S, operation_s=UNLIMITED_S, stall_s=0.0)
            job = replace(job, settings=settings)
        self._job = job
        self._output_sink = output_sink
        self._host_source = host_source
        self._on_message = on_message
        self._prepare = prepare
        self._stop_requests: deque[StopRequest] = deque()
        self._loop: EventLoop | None = None
        self._agents: AgentGroup | None = None
        self._supervisor: RankSupervisor | None = None
        self._server_coordinator: CoordinatorServer | None = None
        """That of server processes and workers, if the job has one."""

    def stop(self, reason: str) -> None:
        """End everything. From any thread, also before and after run()."""
        self._request_stop(StopRequest(TERMINATED.exit_code, reason))

    def send(self, rank: int, data: bytes) -> None:
        """Send a message to a rank of a job with Job.has_messages. From any thread; one for a rank that does not run is
        dropped."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(
                lambda: self._supervisor.send_message(rank, data) if self._supervisor is not None else None
            )

    def kill_worker(self, number: int) -> None:
        """Kill a worker of an elastic job. From any thread; has no effect if it does not run."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(
                lambda: self._supervisor.ask_to_end([number], signal.SIGKILL) if self._supervisor is not None else None
            )

    def run(self) -> JobResult:
        """Start the job, wait for its end, and leave nothing behind."""
        with ExitStack() as opened:
            loop = self._loop = opened.enter_context(closing(EventLoop()))
            handlers: dict[signal.Signals, Callable[[], None]] = {
                **{number: partial(self._request_stop, request) for number, request in SIGNAL_REQUESTS.items()},
                signal.SIGWINCH: lambda: self._supervisor.resize_terminal() if self._supervisor is not None else None,
                signal.SIGTSTP: self._suspend,
            }
            opened.enter_context(handle_signals(loop, handlers))
            opened.enter_context(log_to_output(loop, self._print_message))
            try:
                run_ranks = self._run_fixed if self._job.limits is None else self._run_elastic
                result = run_ranks(loop, opened)
            except StartFailed as error:
                return JobResult(START_FAILED_EXIT_CODE, str(error))
            except StartCancelled:
                stop = self._stop_requests[0]
                return JobResult(stop.exit_code, f"{stop.reason}, before any rank was started", stop_request=stop)
            if result.stop_request is not None:
                self._output_sink.close(timeout_s=OUTPUT_FLUSH_TIMEOUT_S)
            return result

    # --- a fixed number of ranks ---------------------------------------------------------------------------------

    def _run_fixed(self, loop: EventLoop, opened: ExitStack) -> JobResult:
        job, key = self._job, new_job_key()
        agents = self._open_agents(loop, job.used_hosts, opened)
        network = agents.probe_network(key, count_ports(job, os.environ))
        if self._stop_requests:
            raise StartCancelled
        coordinator = CoordinatorServer(
            network.driver_address, 0, job.num_ranks, JobKey(key), settings=job.settings, rounds=None
        )
        opened.callback(coordinator.close)
        coordinator.start([placement.host.name for placement in job.placements])
        server_coordinator = (
            self._open_server_coordinator(network.driver_address, key, opened) if job.num_servers else None
        )
        orders = make_rank_orders(
            job,
            network,
            coordinator=coordinator.address,
            key=key,
            environ=os.environ,
            tty_fds=_terminal_fds(),
            server_coordinator=server_coordinator.address if server_coordinator is not None else "",
        )
        supervisor = self._open_supervisor(loop, agents, coordinator, opened)

        def status(name: str, elapsed_s: float) -> JobStatus:
            return make_job_status(name, job.command, coordinator.activity(), {**supervisor.rank_statuses}, elapsed_s)

        self._open_monitor(coordinator, status, lambda: supervisor.rank_statuses, opened)
        agents.set_handlers(supervisor.handle_message, supervisor.handle_agent_lost)
        locations = [
            RankLocation(each.rank, each.host_index, each.host.name, each.local_rank) for each in job.placements
        ]
        helpers = make_helpers(job)
        if helpers:
            hosts = [agents.host_name(each.host_index) for each in helpers]
            locations += [
                RankLocation(each.number, each.host_index, host, 0) for each, host in zip(helpers, hosts, strict=True)
            ]
            supervisor.policy = RanksWithHelpers(loop, supervisor, [each.number for each in helpers], job)
        servers: ServerPool | None = None
        if server_coordinator is not None:
            hosts_of_servers = place_servers(job)
            servers = self._open_server_pool(
                loop, agents, server_coordinator, key, opened, choose_host=lambda place: hosts_of_servers[place]
            )
        supervisor.start_ranks(locations, orders)
        if servers is not None:
            servers.start()
        loop.run_until(lambda: supervisor.finished)
        supervisor.finish_output()
        exits = supervisor.exits
        if servers is not None and not servers.failed_exits:  # others have taken their places
            exits = [each for each in exits if not each.name]
        return make_job_result(
            exits,
            still_running=sorted(supervisor.running),
            tail=self._output_sink.tail,
            first_lost=coordinator.first_lost(),
            lost_peers=coordinator.lost_peers(),
            failure_stacks=coordinator.failure_stacks(),
            return_values=supervisor.return_values,
            stop_request=supervisor.stop_request,
            has_tf_config=makes_tf_config(job, os.environ),
        )

    # --- an elastic job ------------------------------------------------------------------------------------------

    def _run_elastic(self, loop: EventLoop, opened: ExitStack) -> JobResult:
        job, limits, key = self._job, self._job.limits, new_job_key()
        assert limits is not None
        max_workers = limits.max_ranks or limits.start_ranks
        source = self._host_source or FixedHosts(hosts_or_localhost(job.hosts, max_workers))
        poller, slots = self._open_slots(loop, source, max_workers, opened)
        first_hosts = slots.plan(time.monotonic(), has_begun=False).connect
        agents = self._open_agents(loop, first_hosts, opened)
        may_grow = source.poll_interval_s is not None or len(slots.hosts) > 1
        network = agents.probe_network(key, (PortCounts(),) * len(first_hosts), may_grow=may_grow)
        if self._stop_requests:
            raise StartCancelled

        if self._prepare is not None:
            job = self._job = self._prepare(job, network.driver_address)

        def on_membership(membership: Membership) -> None:  # in the coordinator's thread
            loop.call_soon_threadsafe(lambda: follow(membership))

        def follow(membership: Membership) -> None:
            pool.handle_membership(membership)
            if servers is not None:
                servers.end_if_done()

        coordinator = CoordinatorServer(
            network.driver_address,
            0,
            job.num_ranks,
            JobKey(key),
            settings=job.settings,
            rounds=None,
            limits=limits,
            on_membership=on_membership,
        )
        opened.callback(coordinator.close)
        coordinator.start({})
        server_coordinator = self._open_server_coordinator(network.driver_address, key, opened)

        def make_order(number: int, placement: Placement, size: int, facts: HostFacts) -> RankOrder:
            return make_worker_order(
                job,
                number,
                placement,
                size,
                facts,
                coordinator=coordinator.address,
                key=key,
                environ=os.environ,
                tty_fds=_terminal_fds(),
                server_coordinator=server_coordinator.address,
            )

        supervisor = self._open_supervisor(loop, agents, coordinator, opened)
        pool = WorkerPool(
            loop, job, slots, agents=agents, supervisor=supervisor, coordinator=coordinator, make_order=make_order
        )
        opened.callback(pool.close)
        supervisor.policy = pool

        def choose_host(place: int) -> int | None:
            indices = sorted(agents.host_facts)
            return indices[place % len(indices)] if indices else None

        servers: ServerPool | None = None
        if job.num_servers:
            servers = self._open_server_pool(loop, agents, server_coordinator, key, opened, choose_host=choose_host)

        def status(name: str, elapsed_s: float) -> JobStatus:
            return make_elastic_status(
                name,
                job.command,
                coordinator.activity(),
                {**supervisor.rank_statuses},
                elapsed_s,
                rounds=[*pool.rounds],
                plan=pool.plan.describe(),
            )

        self._open_monitor(coordinator, status, pool.member_statuses, opened)
        for index in agents.host_facts:
            pool.handle_host_connected(index)
        agents.set_handlers(supervisor.handle_message, supervisor.handle_agent_lost, pool.handle_host_connected)
        poller.on_hosts, poller.on_error = pool.handle_hosts, pool.handle_source_error
        if servers is not None:
            servers.start()
        loop.run_until(lambda: supervisor.finished)
        supervisor.finish_output()
        return pool.make_result(
            tail=self._output_sink.tail, first_lost=coordinator.first_lost(), lost_peers=coordinator.lost_peers()
        )

    def _open_slots(
        self, loop: EventLoop, source: HostSource, max_workers: int, opened: ExitStack
    ) -> tuple[HostPoller, SlotTable]:
        """Wait for the first answer of the source. StartFailed if that is an error."""
        job, limits = self._job, self._job.limits
        assert limits is not None
        shortest_s, longest_s = job.cooldown_s
        slots = SlotTable(
            ScalingLimits(
                start_workers=limits.start_ranks,
                max_workers=max_workers,
                min_cooldown_s=shortest_s,
                max_cooldown_s=longest_s,
                leave_s=limits.timeout_s,
            )
        )
        answers: list[tuple[Host, ...] | StartFailed] = []
        poller = HostPoller(loop, source, on_hosts=answers.append, on_error=answers.append)
        opened.callback(poller.close)
        poller.start()
        loop.run_until(lambda: bool(answers or self._stop_requests))
        if self._stop_requests:
            raise StartCancelled

        def set_hosts(hosts: tuple[Host, ...]) -> None:
            slots.hosts = hosts

        poller.on_hosts, poller.on_error = set_hosts, lambda error: None
        for answer in answers:
            if isinstance(answer, StartFailed):
                raise answer
            set_hosts(answer)
        return poller, slots

    # --- both ----------------------------------------------------------------------------------------------------

    def _open_agents(self, loop: EventLoop, hosts: Sequence[Host], opened: ExitStack) -> AgentGroup:
        agents = self._agents = AgentGroup(loop, self._job, hosts)
        opened.callback(agents.close)
        self._apply_stop_requests()
        agents.start_agents()
        return agents

    def _open_server_coordinator(self, address: str, key: str, opened: ExitStack) -> CoordinatorServer:
        """The coordinator of server processes and workers. Their rounds have nothing to do with those of training."""
        job = self._job
        num_members = job.num_ranks + job.num_servers
        settings = job.settings.replace(timeline="", stall_s=0.0)
        limits = ElasticLimits(start_ranks=num_members, timeout_s=UNLIMITED_S, suspend_s=settings.suspend_s)
        coordinator = CoordinatorServer(
            address, 0, num_members, JobKey(key), settings=settings, rounds=None, limits=limits, reports_losses=False
        )
        opened.callback(coordinator.close)
        coordinator.start({})
        self._server_coordinator = coordinator
        return coordinator

    def _open_server_pool(
        self,
        loop: EventLoop,
        agents: AgentGroup,
        coordinator: CoordinatorServer,
        key: str,
        opened: ExitStack,
        *,
        choose_host: Callable[[int], int | None],
    ) -> ServerPool:
        """Let the server processes of the job, if it has any, be a part of its policy."""
        job, supervisor = self._job, self._supervisor
        assert supervisor is not None

        def make_order(number: int, host_index: int) -> RankOrder:
            facts = agents.host_facts[host_index]
            return make_server_order(job, number, facts, coordinator=coordinator.address, key=key, environ=os.environ)

        servers = ServerPool(
            loop,
            job,
            supervisor,
            coordinator,
            ranks=supervisor.policy,
            choose_host=choose_host,
            host_name=agents.host_name,
            make_order=make_order,
        )
        opened.callback(servers.close)
        supervisor.policy = servers
        return servers

    def _open_supervisor(
        self, loop: EventLoop, agents: AgentGroup, coordinator: CoordinatorServer, opened: ExitStack
    ) -> RankSupervisor:
        def report_exit(number: int, how: str) -> None:
            coordinator.rank_exited(number, how)
            if self._server_coordinator is not None:
                self._server_coordinator.rank_exited(number, how)

        supervisor = self._supervisor = RankSupervisor(
            loop,
            self._job,
            send=agents.send,
            output_sink=self._output_sink,
            on_rank_exit=report_exit,
            host_name=agents.host_name,
            names=process_names(self._job),
            on_message=self._on_message,
        )
        opened.callback(supervisor.close)
        return supervisor

    def _open_monitor(
        self,
        coordinator: CoordinatorServer,
        status: Callable[[str, float], JobStatus],
        rank_statuses: Callable[[], Mapping[int, RankStatus]],
        opened: ExitStack,
    ) -> None:
        """Serve `ronde top` and `ronde stack`. `status` gets the name of the job and for how long it has run."""
        job, began_s = self._job, time.monotonic()

        def stacks(timeout_s: float, on_done: OnStacks) -> None:
            coordinator.request_stacks(
                Deadline(timeout_s), lambda found: on_done(make_rank_stacks(found, rank_statuses()))
            )

        pid = os.getpid()
        names = [job.name] if job.name else [str(pid), *(f"{pid}-{number}" for number in range(2, 100))]
        for name in names:

            def named_status(name: str = name) -> JobStatus:
                return status(name, time.monotonic() - began_s)

            try:
                opened.enter_context(MonitorServer(name, named_status, stacks, thread=coordinator.thread))
                return
            except ValueError:  # the name of another job, perhaps of this process
                if name == names[-1]:
                    raise
            except (StartFailed, OSError) as error:  # the job runs all the same
                return self._output_sink.print_message(f"`ronde top` and `ronde stack` will not find this job: {error}")

    def _print_message(self, text: str) -> None:
        (self._output_sink if self._supervisor is None else self._supervisor).print_message(text)

    # --- signals and stop requests -----------------------------------------------------------------------------

    def _request_stop(self, stop_request: StopRequest) -> None:
        self._stop_requests.append(stop_request)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._apply_stop_requests)

    def _apply_stop_requests(self) -> None:
        if self._stop_requests and self._supervisor is None and self._agents is not None:
            self._agents.cancel_start()
        while self._stop_requests and self._supervisor is not None:
            self._supervisor.request_stop(self._stop_requests.popleft())

    def _suspend(self) -> None:
        """Ctrl-Z: this process stops until its user continues it; agents must not take that for its death."""
        if self._agents is not None:
            self._agents.suspend_heartbeat(True)
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        if self._agents is not None:
            self._agents.suspend_heartbeat(False)


def _terminal_fds() -> list[int]:
    return [fd for fd in range(3) if os.isatty(fd)]


def run_job(job: Job, output_sink: OutputSink, *, host_source: HostSource | None = None) -> JobResult:
    """Run a job, and after a failure again, as often as it may be restarted (Job.restarts). A job that could not be
    started, or that somebody has ended, is not started again."""
    for number in range(1, job.restarts + 1):
        result = Driver(job, output_sink).run()
        was_started = result.exit_codes and result.exit_code not in (NOT_STARTED_CODE, NOT_EXECUTABLE_CODE)
        if result.exit_code == 0 or result.stop_request is not None or not was_started:
            return result
        output_sink.print_message(f"{result.summary}\nstarting the job again (restart {number} of {job.restarts})")
    return Driver(job, output_sink, host_source=host_source).run()
