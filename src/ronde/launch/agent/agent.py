"""The agent: starts the ranks of one host, watches them, and reports. Agent runs in the driver's process for the
driver's own machine; AgentServer is an agent at the other end of an ssh connection (`python -m ronde.launch.agent`).
There messages come as frames on standard input and leave as frames on standard output, and the end of either is the
end of the agent and of all its ranks.

The driver waits for that program to start, so it imports little.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ronde.errors import ProtocolError, StartFailed
from ronde.exit_codes import NOT_EXECUTABLE_CODE, NOT_STARTED_CODE
from ronde.launch.agent.cgroup_limits import OomKillCounter, effective_cpu_count
from ronde.launch.agent.orphans import OrphanKiller
from ronde.launch.agent.rank import CommandNotExecutable, RankProcess
from ronde.launch.agent.resource_usage import GpuMonitor, UsageSampler, read_session_usage, sort_by_topology
from ronde.launch.environment import login_variables
from ronde.launch.protocol import (
    PREAMBLE,
    SERVER_COMMAND,
    AgentError,
    AgentHello,
    AgentMessage,
    AgentStopping,
    DriverHeartbeat,
    DriverMessage,
    ExitReason,
    PauseOutput,
    ProbeRequest,
    RankExit,
    RankInput,
    RankMessage,
    RankOrder,
    RankStarted,
    ResizeTerminal,
    SignalRanks,
    StartRanks,
    StopAgent,
    UsageReport,
    encode_frame,
    make_driver_message_reader,
)
from ronde.launch.timeouts import LAST_REPORT_DELAY_S, PROBER_IDLE_TIMEOUT_S, RANK_KILL_TIMEOUT_S
from ronde.net.addresses import PortReservation, host_identity
from ronde.net.event_loop import EventLoop, PipeReader, PipeWriter, Timer
from ronde.types import Deadline
from ronde.version import __version__

if TYPE_CHECKING:
    from ronde.launch.network import NetworkProber

USAGE_INTERVAL_S = 1.0
MAX_SAMPLING_SHARE = 0.02
"""On a host with very many processes, sampling them takes at most this share of the time."""


class Agent:
    """The ranks of this host. Everything happens in the loop's thread."""

    def __init__(
        self,
        loop: EventLoop,
        on_report: Callable[[AgentMessage], None],
        *,
        host_variables: Mapping[str, str] | None = None,
    ) -> None:
        """`host_variables` are added to the environment of ranks where their orders do not set them."""
        self.on_report = on_report
        """Gets every message for the driver, AgentHello first. May be replaced before ranks are started."""
        self._loop = loop
        self._host_variables = dict(host_variables or {})
        self._ranks: dict[int, RankProcess] = {}
        self._pause_requested = False
        """Whether the driver has asked for a pause, because the reader of its own output is behind."""
        self._backlogged = False
        self._terminate_s = 0.0
        self._stopping = False
        """Whether no rank is started any more, because the agent was told to end."""
        self._closed = False
        self._orphan_killer: OrphanKiller | None = None
        self._prober: NetworkProber | None = None
        self._prober_timer: Timer | None = None
        self._reservation = PortReservation()
        self._usage_sampler = UsageSampler()
        self._gpu_monitor: GpuMonitor | None = None
        self._oom_kill_counter = OomKillCounter()
        self._sampling_timer: Timer | None = None
        loop.call_soon_threadsafe(lambda: self._report(make_hello()))

    def handle(self, message: DriverMessage) -> None:
        if self._closed:
            return
        match message:
            case StartRanks(orders, pickled_call, terminate_s):
                self._terminate_s = terminate_s
                for order in orders:
                    self._start_rank(order, pickled_call)
            case SignalRanks(ranks, number):
                for rank in ranks:
                    if rank in self._ranks:
                        self._ranks[rank].signal(number)
            case RankInput(rank, data) if rank in self._ranks:
                self._ranks[rank].write_input(data)
            case RankMessage(rank, data) if rank in self._ranks:
                self._ranks[rank].write_message(data)
            case ResizeTerminal(rank, rows, columns) if rank in self._ranks:
                self._ranks[rank].resize_terminal(rows, columns)
            case PauseOutput(paused):
                self._pause_requested = paused
                self._update_reading()
            case ProbeRequest():
                self._probe(message)
            case StopAgent():
                self.close()
            case _:  # for a rank that has ended; or a DriverHeartbeat, which AgentServer handles
                pass

    def set_backlogged(self, backlogged: bool) -> None:
        """Stop reading the output of ranks while the connection to the driver takes no more. Idempotent."""
        if backlogged != self._backlogged:
            self._backlogged = backlogged
            self._update_reading()

    def terminate_ranks(self, reason: str) -> float:
        """Send SIGTERM to all ranks, and start none any more. Return how long they may take to end."""
        self._stopping = True
        self._report(AgentStopping(reason))
        for rank in self._ranks.values():
            rank.signal(signal.SIGTERM)
        return self._terminate_s

    @property
    def has_ranks(self) -> bool:
        return bool(self._ranks)

    def _update_reading(self) -> None:
        for rank in self._ranks.values():
            rank.set_reading_paused(self._pause_requested or self._backlogged)

    def close(self) -> None:
        """Kill all ranks and what they started, and free everything. Nothing is reported any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for timer in (self._sampling_timer, self._prober_timer):
            if timer is not None:
                timer.cancel()
        for rank in self._ranks.values():  # all of them, before waiting for each
            rank.signal(signal.SIGKILL)
        deadline = Deadline(RANK_KILL_TIMEOUT_S)
        for rank in self._ranks.values():
            rank.close(deadline)
        self._ranks.clear()
        for part in (self._orphan_killer, self._prober, self._reservation, self._gpu_monitor):
            if part is not None:
                part.close()

    def _report(self, message: AgentMessage) -> None:
        if not self._closed:
            self.on_report(message)

    def _start_rank(self, order: RankOrder, pickled_call: bytes) -> None:
        if self._closed:  # by whoever got the report about the rank before this one
            return
        if self._stopping or order.rank in self._ranks:
            detail = "it still runs; wait for its end before it is started again"
            if self._stopping:
                detail = f"the agent of host {os.uname().nodename} is about to end"
            return self._report(RankExit(order.rank, NOT_STARTED_CODE, ExitReason.NOT_STARTED, detail))
        is_own = pickled_call or order.argv == SERVER_COMMAND  # a user's command may begin with "" by mistake
        argv = (sys.executable, *order.argv[1:]) if is_own and order.argv[:1] == ("",) else order.argv
        order = msgspec.structs.replace(order, argv=argv, env={**self._host_variables, **order.env})
        try:
            self._orphan_killer = self._orphan_killer or OrphanKiller()
            rank = RankProcess(
                order,
                pickled_call,
                loop=self._loop,
                orphan_killer=self._orphan_killer,
                on_report=self.on_report,  # a closed rank reports nothing
                on_exit=partial(self._handle_rank_exit, order.rank),
            )
        except (StartFailed, OSError) as error:
            code = NOT_EXECUTABLE_CODE if isinstance(error, CommandNotExecutable) else NOT_STARTED_CODE
            return self._report(RankExit(order.rank, code, ExitReason.NOT_STARTED, str(error)))
        self._ranks[order.rank] = rank
        rank.set_reading_paused(self._pause_requested or self._backlogged)
        self._report(RankStarted(order.rank, rank.pid))
        if self._sampling_timer is None:
            self._sampling_timer = self._loop.call_later(0.0, self._sample_usage)

    def _handle_rank_exit(self, number: int, exit_code: int) -> None:
        rank = self._ranks.pop(number)
        oom_killed = self._oom_kill_counter.has_increased()
        reason = choose_exit_reason(exit_code, killed_by_agent=rank.killed_by_agent, oom_killed=oom_killed)
        self._report(RankExit(number, exit_code, reason))

    def _sample_usage(self) -> None:
        if not self._ranks:
            self._sampling_timer = None
            return
        before_s = time.monotonic()
        self._oom_kill_counter.has_increased()  # so that an exit is explained by what happened in about the last second
        pids = {number: rank.pid for number, rank in self._ranks.items()}
        rows = self._usage_sampler.sample(before_s, pids, read_session_usage())
        self._gpu_monitor = self._gpu_monitor or GpuMonitor()
        if rows and not self._backlogged:
            self._report(UsageReport(rows, self._gpu_monitor.sample()))
        delay_s = max(USAGE_INTERVAL_S, (time.monotonic() - before_s) / MAX_SAMPLING_SHARE)
        self._sampling_timer = self._loop.call_later(delay_s, self._sample_usage)

    def _probe(self, request: ProbeRequest) -> None:
        if self._prober is None:
            # Imported here, because it imports ZeroMQ, and the agent of an only host never needs it.
            from ronde.launch.network import NetworkProber

            self._prober = NetworkProber(
                lambda reply: self._loop.call_soon_threadsafe(lambda: self._report(reply)), self._reservation
            )
        self._prober.probe(request)
        if self._prober_timer is not None:
            self._prober_timer.cancel()
        self._prober_timer = self._loop.call_later(PROBER_IDLE_TIMEOUT_S, self._close_prober)

    def _close_prober(self) -> None:
        if self._prober is not None:
            self._prober.close()
            self._prober = None


def make_hello() -> AgentHello:
    cpus = sort_by_topology(os.sched_getaffinity(0))
    return AgentHello(
        version=__version__,
        python=".".join(map(str, sys.version_info[:3])),
        host_identity=host_identity(),
        cpus=cpus,
        effective_cpu_count=effective_cpu_count(len(cpus)),
    )


def choose_exit_reason(exit_code: int, *, killed_by_agent: bool, oom_killed: bool) -> ExitReason:
    """`oom_killed`: the kernel has just killed some process because memory ran out."""
    if not oom_killed or killed_by_agent or exit_code == 0:
        return ExitReason.EXITED
    return ExitReason.OOM_KILLED if exit_code == -signal.SIGKILL else ExitReason.OOM_SUSPECTED


HIGH_WATER_BYTES = 1024 * 1024
"""When so much waits to be sent, the agent stops reading the output of ranks."""
LOW_WATER_BYTES = 256 * 1024
"""When so little waits, the agent reads again."""


class AgentServer:
    """An agent between two descriptors, which it owns."""

    def __init__(self, loop: EventLoop, input_fd: int, output_fd: int) -> None:
        self.stop_reason = ""
        """Why the agent stops; empty as long as it does not."""
        self._loop = loop
        self._frame_reader = make_driver_message_reader()
        self._last_received_s = time.monotonic()
        self._heartbeat_timeout_s = 0.0
        self._stop_timer: Timer | None = None
        """Runs from when the agent was told to end."""
        self._agent = Agent(loop, self._report, host_variables=login_variables(os.environ))
        self._report_writer = PipeWriter(
            loop,
            output_fd,
            on_written=self._handle_written,
            on_broken_pipe=lambda: self.stop("the driver does not read"),
        )
        self._order_reader = PipeReader(loop, input_fd, self._handle_data, lambda: self.stop("the driver has gone"))
        self._report_writer.write(PREAMBLE)

    def stop(self, reason: str) -> None:
        """Safe in a signal handler."""
        self.stop_reason = self.stop_reason or reason

    def terminate(self, reason: str) -> None:
        """Let the ranks end in good order, and then stop. The second time, stop at once."""
        if self._stop_timer is not None:
            return self.stop(reason)
        timeout_s = self._agent.terminate_ranks(reason)
        self._stop_timer = self._loop.call_later(timeout_s, lambda: self.stop(f"{reason}, and its ranks did not end"))

    @property
    def is_done(self) -> bool:
        """Whether the agent is to be closed."""
        has_ended = self._stop_timer is not None and not self._agent.has_ranks
        return bool(self.stop_reason) or (has_ended and not self._report_writer.pending_bytes)

    def close(self) -> None:
        self._agent.close()
        self._order_reader.close()
        self._report_writer.close()

    def _handle_data(self, data: bytes) -> None:
        self._last_received_s = time.monotonic()
        try:
            messages = self._frame_reader.feed(data)
        except ProtocolError as error:
            self._order_reader.close()
            self._report(AgentError(f"the agent did not understand its orders: {error}"))
            self._loop.call_later(LAST_REPORT_DELAY_S, lambda: self.stop("it could not read its orders"))
            return
        for message in messages:
            if isinstance(message, DriverHeartbeat):
                if not self._heartbeat_timeout_s:
                    self._loop.call_later(message.timeout_s, self._check_heartbeat)
                self._heartbeat_timeout_s = message.timeout_s
            elif isinstance(message, StopAgent):
                return self.stop("the driver stopped it")
            else:
                self._agent.handle(message)

    def _check_heartbeat(self) -> None:
        silent_s = time.monotonic() - self._last_received_s
        if silent_s >= self._heartbeat_timeout_s:
            self.stop(f"the driver was silent for {silent_s:.0f} s")
        else:
            self._loop.call_later(self._heartbeat_timeout_s - silent_s, self._check_heartbeat)

    def _report(self, message: AgentMessage) -> None:
        self._report_writer.write(encode_frame(message))
        if self._report_writer.pending_bytes > HIGH_WATER_BYTES:
            self._agent.set_backlogged(True)

    def _handle_written(self) -> None:
        if self._report_writer.pending_bytes < LOW_WATER_BYTES:
            self._agent.set_backlogged(False)


def main() -> None:
    """Serve the driver at the other end of standard input and output until it stops the agent."""
    # What else this process or its libraries print must not get between the frames.
    input_fd, output_fd = os.dup(0), os.dup(1)
    null_fd = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_fd, 0)
    os.dup2(2, 1)
    os.close(null_fd)
    loop = EventLoop()
    server = AgentServer(loop, input_fd, output_fd)

    def stop(number: int, _: object) -> None:
        server.stop(f"it got signal {number}")
        loop.call_soon_threadsafe(lambda: None)  # wakes the loop

    def terminate(_number: int, _frame: object) -> None:  # of a host that is about to be taken away, for example
        loop.call_soon_threadsafe(lambda: server.terminate("it got SIGTERM"))

    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGTERM, terminate)
    try:
        loop.run_until(condition=lambda: server.is_done)
    finally:
        server.close()
        loop.close()
