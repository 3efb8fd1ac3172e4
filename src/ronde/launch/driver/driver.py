"""Signals as calls in a loop. Used by the driver.

What ronde's own modules log in the driver's process, as lines on the screen: on a terminal they would otherwise be
written into progress bars, or into a debugger's window. Used by the driver.

A job from the start of its ranks to the end of the last one. Hears what agents report, shows what ranks print, and
ends those that others have to be ended for. Used by the driver; everything happens in its loop.

Carries out a job: calls its hosts together, hosts its coordinator, starts its ranks and leaves nothing behind. Used
by `ronde run` and ronde.run.

Everything happens in the thread that calls run(), in one loop. What is decided is decided elsewhere: who sits where
(placement), how hosts reach each other (reach), how a job is ended (ending), who is to blame (verdict).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from ronde.coordinator.server import CoordinatorServer
from ronde.errors import StartFailed
from ronde.launch.driver.failure_report import RankExit, StopRequest, make_failure_report
from ronde.launch.driver.hosts import AgentGroup, StartCancelled
from ronde.launch.driver.monitor import JobStatus, MonitorServer, RankProcessInfo, make_job_status, make_rank_stacks
from ronde.launch.driver.ssh import HostError
from ronde.launch.driver.termination import Termination, TerminationEvent, TerminationStage
from ronde.launch.environment import count_ports, make_endpoints, make_rank_orders
from ronde.launch.job import Job
from ronde.launch.output.printer import OutputSink, prefix_width
from ronde.launch.placement import Placement, hosts_or_localhost, place_ranks
from ronde.launch.protocol import (
    AgentMessage,
    DriverMessage,
    FunctionResult,
    RankExited,
    RankInput,
    RankOutput,
    RankStarted,
    RankStartFailed,
    ResizeTerminal,
    SignalRanks,
    UsageReport,
)
from ronde.launch.tty import RawTerminalInput
from ronde.net.event_loop import EventLoop, Timer
from ronde.net.keys import JobKey, new_job_key
from ronde.observe.stacks import RankStack
from ronde.settings import Settings
from ronde.text import LOST_CODE, format_ranks
from ronde.types import Deadline

__all__ = [
    "Agents",
    "Driver",
    "HUNG_UP",
    "INTERRUPTED",
    "JobResult",
    "RankSupervisor",
    "SIGNAL_REPEAT_S",
    "SignalRepeatFilter",
    "TERMINATED",
    "handle_signals",
    "log_to_output",
]

SIGNAL_REPEAT_S: Mapping[signal.Signals, float] = {signal.SIGTERM: 1.0, signal.SIGHUP: 1.0, signal.SIGINT: 0.1}
"""The same signal again within this time is the same request, not a second one. `timeout` sends SIGTERM to its command
and at once to the command's process group; service managers do the like. For Ctrl-C it is shorter than a person needs
to press the keys twice. Signals that are not listed always count."""


class SignalRepeatFilter:
    """Decides whether a signal is a request of its own or the repeat of one."""

    def __init__(self, intervals_s: Mapping[signal.Signals, float] = SIGNAL_REPEAT_S) -> None:
        self._intervals_s = intervals_s
        self._last_request_s: dict[signal.Signals, float] = {}

    def is_new_request(self, number: signal.Signals, now_s: float) -> bool:
        """Whether a signal that comes at this time (of a monotonic clock) is a request. Repeats do not extend the time
        in which they are taken for repeats: whoever goes on asking is heard."""
        before_s = self._last_request_s.get(number)
        if before_s is not None and now_s - before_s < self._intervals_s.get(number, 0.0):
            return False
        self._last_request_s[number] = now_s
        return True


@contextmanager
def handle_signals(loop: EventLoop, handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """For as long as it lasts, each of these signals becomes a call in the loop, its repeats (REPEAT_S) none. What was
    ignored (nohup) stays so; outside of the main thread nothing changes, as signals are not for others to take."""
    before = {}
    repeats = SignalRepeatFilter()

    def take(number: int, _frame: object) -> None:
        if repeats.is_new_request(signal.Signals(number), time.monotonic()):
            loop.call_soon_threadsafe(handlers[signal.Signals(number)])

    if threading.current_thread() is threading.main_thread():
        for number in handlers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was set by code that is not Python's, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def log_to_output(loop: EventLoop, print_message: Callable[[str], None]) -> Iterator[None]:
    """For as long as it lasts, warnings of all threads become calls in the loop; the last of them, at its end. Programs
    that handle the log themselves go on doing so."""
    logger = logging.getLogger("ronde")
    if logger.hasHandlers():
        yield
        return
    waiting: deque[str] = deque()

    def tell() -> None:
        while waiting:
            print_message(waiting.popleft())

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waiting.append(self.format(record))
            loop.call_soon_threadsafe(tell)

    handler = Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        tell()


SIGPIPE_EXIT_CODE = 141
"""As a shell has it for a program whose output nobody reads any more (SIGPIPE)."""
WRITE_ERROR_EXIT_CODE = 1
"""As programs have it that cannot write their output, to a full disk for example."""


class Agents(Protocol):
    """The part of the crew that is needed here."""

    def send(self, messages: Mapping[int, DriverMessage]) -> None:
        """To the agent of each host its message."""

    def set_reading_paused(self, paused: bool) -> None:
        """Leave what agents say where it is, or go on."""


class RankSupervisor:
    """Which ranks run, how the others have ended, and what is being done about it."""

    def __init__(
        self,
        loop: EventLoop,
        job: Job,
        placements: Sequence[Placement],
        *,
        agents: Agents,
        output_sink: OutputSink,
        on_rank_exit: Callable[[int, str], None],
    ) -> None:
        """`lost` is told of every rank that has ended, and how."""
        self._loop = loop
        self._job = job
        self._agents = agents
        self._output_sink = output_sink
        self._on_rank_exit = on_rank_exit
        self._hosts = hosts_or_localhost(job.hosts, job.num_ranks)
        self._host_indices = {seat.rank: seat.host_index for seat in placements}
        self._running = set(self._host_indices)
        self._termination = Termination(grace_s=job.grace_s, terminate_s=job.terminate_s)
        self._exit_requested = False
        """Whether ranks were told to end."""
        self._stage_timer: Timer | None = None
        self._refresh_timer: Timer | None = None
        self._refresh_scheduled = False
        """Whether the screen was given something in this turn."""
        self._reading_paused = False
        self._terminal_input: RawTerminalInput | None = None
        self.exits: list[RankExit] = []
        """In the order in which they came."""
        self.return_values: dict[int, bytes] = {}
        self.process_infos = [
            RankProcessInfo(host=self._host_name(seat.rank), local_rank=seat.local_rank) for seat in placements
        ]
        """By rank; others may read it in their threads."""
        self.stop_request: StopRequest | None = None
        """Who ended the job from outside, if anybody did."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to wait for."""
        return not self._running or self._termination.stage is TerminationStage.ABANDONED

    # --- from outside ------------------------------------------------------------------------------------------

    def request_stop(self, stop_request: StopRequest, event: TerminationEvent) -> None:
        """Somebody wants the job to end."""
        self.stop_request = self.stop_request or stop_request
        self._advance_termination(event)

    def print_message(self, text: str) -> None:
        """A line of the driver itself."""
        self._output_sink.print_message(text)
        self._schedule_refresh()

    def resize_terminal(self) -> None:
        """The terminal of the driver has another size now; so have those that stand for it."""
        rank = self._job.debug_rank or 0
        if os.isatty(1):
            columns, rows = os.get_terminal_size(1)
            columns -= 0 if rank == self._job.debug_rank else prefix_width(len(self._host_indices))
            if rows > 0 and columns > 0:  # some terminals do not know their size
                self._agents.send({self._host_indices[rank]: ResizeTerminal(rank, rows, columns)})

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        for timer in (self._stage_timer, self._refresh_timer):
            if timer is not None:
                timer.cancel()
        if self._terminal_input is not None:
            self._terminal_input.close()

    # --- from agents -------------------------------------------------------------------------------------------

    def handle_message(self, host_index: int, message: AgentMessage) -> None:
        """What the agent of a host reports."""
        match message:
            case RankOutput(rank, stream, data):
                self._output_sink.write(rank, stream, data)
                self._schedule_refresh()
            case RankExited(rank, code, note):
                self._handle_rank_exit(
                    RankExit(rank, self._host_name(rank), code, detail=note, requested=self._exit_requested)
                )
            case RankStartFailed(rank, why, code) if rank >= 0:
                how = f"could not be started: {why}"
                self._handle_rank_exit(RankExit(rank, self._host_name(rank), code, how, requested=self._exit_requested))
            case RankStartFailed(_, why, _):
                self.print_message(f"host {self._hosts[host_index].name}: {why}")
            case RankStarted(rank, pid):
                self._update_process_info(rank, pid=pid)
                self._handle_rank_started(rank)
            case FunctionResult(rank, data):
                self.return_values[rank] = data
            case UsageReport(ranks, gpus):
                for rank, cpu, memory_bytes in ranks:
                    self._update_process_info(rank, cpu=cpu, memory_bytes=memory_bytes)
                    if gpus:  # as most scripts choose theirs
                        busy, gpu_bytes = gpus[self.process_infos[rank].local_rank % len(gpus)]
                        self._update_process_info(rank, gpu=busy, gpu_bytes=gpu_bytes)
            case _:  # late answers to questions of before
                pass

    def handle_agent_lost(self, host_index: int, error: HostError) -> None:
        """The connection to a host has ended, and so have its ranks: the agent there kills them."""
        how = f"ended when the connection to it was lost ({error.last_line or error.reason})"
        for rank in sorted(self._running):
            if self._host_indices[rank] == host_index:
                self._handle_rank_exit(
                    RankExit(rank, self._host_name(rank), LOST_CODE, how, requested=self._exit_requested)
                )

    def _update_process_info(self, rank: int, **changes: float) -> None:
        self.process_infos[rank] = replace(self.process_infos[rank], **changes)  # type: ignore[arg-type]  # ints are ints

    def _host_name(self, rank: int) -> str:
        return self._hosts[self._host_indices[rank]].name

    def _handle_rank_started(self, rank: int) -> None:
        if rank == self._job.debug_rank:
            place = self._host_indices[rank]
            self._terminal_input = RawTerminalInput(
                self._loop, lambda data: self._agents.send({place: RankInput(rank, data)})
            )
        if rank == (self._job.debug_rank or 0):
            self.resize_terminal()

    def _handle_rank_exit(self, rank_exit: RankExit) -> None:
        if rank_exit.rank not in self._running:
            return
        self._running.discard(rank_exit.rank)
        self.exits.append(rank_exit)
        self._update_process_info(rank_exit.rank, exit_code=rank_exit.exit_code)
        self._on_rank_exit(rank_exit.rank, rank_exit.description)
        self._output_sink.rank_exited(rank_exit.rank)
        self._schedule_refresh()
        if rank_exit.rank == self._job.debug_rank and self._terminal_input is not None:
            self._terminal_input.close()
        if rank_exit.exit_code != 0:
            self._advance_termination(TerminationEvent.RANK_FAILED)

    # --- the end -----------------------------------------------------------------------------------------------

    def _advance_termination(self, event: TerminationEvent) -> None:
        step = self._termination.handle_event(event)
        if step is None:
            return
        if self._stage_timer is not None:
            self._stage_timer.cancel()
        if step.timeout_s is not None:
            self._stage_timer = self._loop.call_later(
                step.timeout_s, lambda: self._advance_termination(TerminationEvent.TIMED_OUT)
            )
        if step.signal is not None:
            self._exit_requested = True
            self._print_stage(step.stage, event)
            self._signal_ranks(step.signal)

    def _signal_ranks(self, number: int) -> None:
        ranks: dict[int, list[int]] = {}
        for rank in sorted(self._running):
            ranks.setdefault(self._host_indices[rank], []).append(rank)
        self._agents.send({index: SignalRanks(tuple(of_host), number) for index, of_host in ranks.items()})

    def _print_stage(self, stage: TerminationStage, event: TerminationEvent) -> None:
        """Whoever waits wants to know for what; whoever has left does not."""
        if not self._running or (self.stop_request is not None and not self.stop_request.reason):
            return
        who = format_ranks(self._running)
        if stage is TerminationStage.INTERRUPT:
            self.print_message(f"Ctrl-C: {who} may end; press it again to kill")
        elif stage is TerminationStage.KILL:
            self.print_message(f"killing {who}")
        elif event is TerminationEvent.TIMED_OUT and self.stop_request is None:
            self.print_message(f"ending {who}, still running {self._job.grace_s:g} s after the first failure")
        else:
            self.print_message(f"ending {who}")

    # --- the screen --------------------------------------------------------------------------------------------

    def _schedule_refresh(self) -> None:
        """At the end of this turn: what came together is shown together."""
        if not self._refresh_scheduled:
            self._refresh_scheduled = True
            self._loop.call_later(0.0, self._refresh_output)

    def _refresh_output(self) -> None:
        self._refresh_scheduled = False
        if self._refresh_timer is not None:
            self._refresh_timer.cancel()
        now_s = time.monotonic()
        due_s = self._output_sink.refresh(now_s)
        self._refresh_timer = None if due_s is None else self._loop.call_later(due_s - now_s, self._refresh_output)
        full = self._output_sink.is_backlogged()
        if full != self._reading_paused:
            self._reading_paused = full
            self._agents.set_reading_paused(full)
        gone = self._output_sink.closed()
        if gone is not None and self.stop_request is None:
            self.request_stop(
                StopRequest(SIGPIPE_EXIT_CODE, "")
                if gone.broken_pipe
                else StopRequest(WRITE_ERROR_EXIT_CODE, gone.reason),
                TerminationEvent.STOP_REQUESTED,
            )


START_FAILED_EXIT_CODE = 1
"""The job's, when its hosts cannot be used."""
WEEK_S = 7 * 24 * 3600.0
"""Longer than anybody debugs."""
OUTPUT_FLUSH_TIMEOUT_S = 2.0
"""When somebody has ended the job: so long does it wait for a reader that takes nothing (`| less`, Ctrl-S)."""

INTERRUPTED = StopRequest(128 + signal.SIGINT, "interrupted by Ctrl-C")
TERMINATED = StopRequest(128 + signal.SIGTERM, "ended by SIGTERM")
HUNG_UP = StopRequest(128 + signal.SIGHUP, "ended by SIGHUP: the terminal was closed")


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job has ended."""

    exit_code: int
    """For the shell: 0, or that of the rank that failed first."""
    summary: str
    """What its user should know; empty when all is well."""
    return_values: dict[int, bytes] = field(default_factory=dict)
    """What the function of each rank returned or raised, as launch/function pickled it."""
    exit_codes: dict[int, int] = field(default_factory=dict)
    """Exit code of every rank, a signal below 0; empty when none was started."""
    first_failed_rank: int | None = None
    """The rank that failed first."""
    stop_request: StopRequest | None = None
    """Who ended it from outside, if anybody did."""


class Driver:
    """One job. run() it, once; stop() it from any thread."""

    def __init__(self, job: Job, output_sink: OutputSink) -> None:
        self._job = job if job.debug_rank is None else replace(job, settings=_without_timeouts(job.settings))
        self._output_sink = output_sink
        self._placements = place_ranks(job.hosts, job.num_ranks)
        self._hosts = hosts_or_localhost(job.hosts, job.num_ranks)[: self._placements[0].num_hosts]
        self._stop_requests: deque[tuple[StopRequest, TerminationEvent]] = deque()
        self._loop: EventLoop | None = None
        self._agents: AgentGroup | None = None
        self._supervisor: RankSupervisor | None = None

    def stop(self, reason: str) -> None:
        """End everything. From any thread, also before and after run()."""
        self._stop_requests.append((StopRequest(TERMINATED.exit_code, reason), TerminationEvent.STOP_REQUESTED))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._apply_stop_requests)

    def run(self) -> JobResult:
        """Start it, wait for its end, and leave nothing behind."""
        with ExitStack() as opened:
            loop = self._loop = opened.enter_context(closing(EventLoop()))
            opened.enter_context(handle_signals(loop, self._signal_handlers()))
            opened.enter_context(log_to_output(loop, self._print_message))
            crew = self._agents = AgentGroup(loop, self._job, self._hosts, python=self._job.python or sys.executable)
            opened.callback(crew.close)
            self._apply_stop_requests()
            try:
                crew.start_agents()
                return self._run(loop, crew, opened)
            except StartFailed as error:
                return JobResult(START_FAILED_EXIT_CODE, str(error))
            except StartCancelled:
                stop = self._stop_requests[0][0]
                return JobResult(stop.exit_code, f"{stop.reason}, before any rank was started", stop_request=stop)

    def _run(self, loop: EventLoop, agents: AgentGroup, opened: ExitStack) -> JobResult:
        job, key = self._job, new_job_key()
        ground = agents.probe_network(key, count_ports(job, self._placements))
        if self._stop_requests:
            raise StartCancelled
        coordinator = CoordinatorServer(
            ground.driver_address, 0, job.num_ranks, JobKey(key), settings=job.settings, rounds=None
        )
        opened.callback(coordinator.close)
        coordinator.start([self._hosts[seat.host_index].name for seat in self._placements])
        meeting = make_endpoints(
            self._placements,
            coordinator=coordinator.address,
            key=key,
            addresses=ground.addresses,
            ports=[site.free_ports for site in ground.host_facts],
        )
        terminals = [fd for fd in range(3) if os.isatty(fd)]
        orders = make_rank_orders(
            job, self._placements, meeting, ground.host_facts, environ=os.environ, tty_fds=terminals
        )
        course = self._supervisor = RankSupervisor(
            loop,
            job,
            self._placements,
            agents=agents,
            output_sink=self._output_sink,
            on_rank_exit=coordinator.rank_exited,
        )
        opened.callback(course.close)
        self._open_monitor(course, coordinator, opened)
        agents.set_handlers(course.handle_message, course.handle_agent_lost)
        agents.send(orders)
        loop.run_until(lambda: course.finished)
        return self._make_result(course, coordinator)

    def _make_result(self, supervisor: RankSupervisor, coordinator: CoordinatorServer) -> JobResult:
        verdict = make_failure_report(
            supervisor.exits,
            num_ranks=self._job.num_ranks,
            tail=self._output_sink.tail,
            first_lost=coordinator.first_lost(),
            whereabouts=coordinator.whereabouts(),
            stop_request=supervisor.stop_request,
        )
        codes = {end.rank: end.exit_code for end in supervisor.exits}
        if supervisor.stop_request is not None:
            self._output_sink.close(timeout_s=OUTPUT_FLUSH_TIMEOUT_S)
        summary = "\n".join(verdict.lines)
        return JobResult(
            verdict.exit_code,
            summary,
            supervisor.return_values,
            codes,
            verdict.first_failed_rank,
            supervisor.stop_request,
        )

    def _open_monitor(self, supervisor: RankSupervisor, coordinator: CoordinatorServer, opened: ExitStack) -> None:
        """Where `ronde top` and `ronde stack` ask."""
        job, began_s = self._job, time.monotonic()

        def status(name: str) -> JobStatus:
            return make_job_status(
                name, job.command, coordinator.activity(), supervisor.process_infos, time.monotonic() - began_s
            )

        def stacks(limit_s: float) -> tuple[RankStack, ...]:
            return make_rank_stacks(coordinator.collect_stacks(Deadline(limit_s)), supervisor.process_infos)

        pid = os.getpid()
        names = [job.name] if job.name else [str(pid), *(f"{pid}-{number}" for number in range(2, 100))]
        for name in names:
            try:
                opened.callback(MonitorServer(name, partial(status, name), stacks).close)
                return
            except ValueError:  # another job of this process, or of this name
                if name == names[-1]:
                    raise
            except (StartFailed, OSError) as error:  # the job runs all the same
                return self._output_sink.print_message(f"`ronde top` and `ronde stack` will not find this job: {error}")

    def _print_message(self, text: str) -> None:
        (self._output_sink if self._supervisor is None else self._supervisor).print_message(text)

    # --- what others want --------------------------------------------------------------------------------------

    def _signal_handlers(self) -> dict[signal.Signals, Callable[[], None]]:
        return {
            signal.SIGINT: lambda: self._request_stop(INTERRUPTED, TerminationEvent.INTERRUPTED),
            signal.SIGTERM: lambda: self._request_stop(TERMINATED, TerminationEvent.STOP_REQUESTED),
            signal.SIGHUP: lambda: self._request_stop(HUNG_UP, TerminationEvent.STOP_REQUESTED),
            signal.SIGWINCH: lambda: self._supervisor.resize_terminal() if self._supervisor is not None else None,
            signal.SIGTSTP: self._suspend,
        }

    def _request_stop(self, stop_request: StopRequest, event: TerminationEvent) -> None:
        self._stop_requests.append((stop_request, event))
        self._apply_stop_requests()

    def _apply_stop_requests(self) -> None:
        if self._stop_requests and self._supervisor is None and self._agents is not None:
            self._agents.cancel_start()
        while self._stop_requests and self._supervisor is not None:
            self._supervisor.request_stop(*self._stop_requests.popleft())

    def _suspend(self) -> None:
        """Ctrl-Z: this process is stopped until somebody wakes it; agents must not take that for its death."""
        assert self._agents is not None
        self._agents.suspend_heartbeat(True)
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        self._agents.suspend_heartbeat(False)


def _without_timeouts(settings: Settings) -> Settings:
    """For --debug: whoever waits for a rank in a debugger waits for a person."""
    return settings.replace(start_s=WEEK_S, operation_s=WEEK_S, stall_s=0.0)
