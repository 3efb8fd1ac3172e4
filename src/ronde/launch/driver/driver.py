"""The driver carries out one job: it starts the agents of all hosts, hosts the coordinator, has the ranks started and
ended, shows their output, and leaves nothing behind. Used by `ronde run` and ronde.run.

Everything happens in the thread that calls Driver.run(), in one event loop. RankSupervisor keeps track of the ranks
between their start and the last exit. Decisions are made elsewhere: which rank runs where (placement), how hosts reach
each other (network), how a job is ended (termination), which rank failed first (failure_report).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

import msgspec

from ronde.coordinator.queries import OnStacks
from ronde.coordinator.server import CoordinatorServer
from ronde.errors import StartFailed
from ronde.launch.driver.agents import AgentGroup, StartCancelled
from ronde.launch.driver.failure_report import JobResult, StopRequest, describe_exit, make_job_result
from ronde.launch.driver.monitor import JobStatus, MonitorServer, RankStatus, make_job_status, make_rank_stacks
from ronde.launch.driver.ssh import HostError
from ronde.launch.driver.termination import Termination, TerminationEvent, TerminationStage
from ronde.launch.environment import count_ports, make_rank_orders
from ronde.launch.job import Job
from ronde.launch.output.printer import Printer, prefix_width
from ronde.launch.protocol import (
    AgentError,
    AgentMessage,
    DriverMessage,
    ExitReason,
    FunctionResult,
    PauseOutput,
    RankExit,
    RankInput,
    RankOutput,
    RankStarted,
    ResizeTerminal,
    SignalRanks,
    UsageReport,
)
from ronde.launch.timeouts import OUTPUT_FLUSH_TIMEOUT_S, UNLIMITED_S
from ronde.launch.tty import RawTerminalInput
from ronde.net.event_loop import EventLoop, Timer
from ronde.net.keys import JobKey, new_job_key
from ronde.text import LOST_CODE, format_ranks
from ronde.types import Deadline

SIGPIPE_EXIT_CODE = 141
"""A shell's exit code for a program whose output nobody reads any more (SIGPIPE)."""
WRITE_ERROR_EXIT_CODE = 1
"""Output cannot be written, to a full disk for example."""
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

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            pending.append(self.format(record))
            loop.call_soon_threadsafe(print_pending)

    handler = Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        print_pending()


class RankSupervisor:
    """Which ranks run, how the others have ended, and what is done about it. Its methods are called in the loop."""

    def __init__(
        self,
        loop: EventLoop,
        job: Job,
        *,
        send: Callable[[Mapping[int, DriverMessage]], None],
        output_sink: Printer,
        on_rank_exit: Callable[[int, str], None],
    ) -> None:
        """`send` sends messages to agents by host index. `on_rank_exit` is called with every rank that has ended, and a
        description of how."""
        self._loop = loop
        self._job = job
        self._send = send
        self._output_sink = output_sink
        self._on_rank_exit = on_rank_exit
        self._running = set(range(job.num_ranks))
        self._termination = Termination(grace_s=job.grace_s, terminate_s=job.terminate_s)
        self._exit_requested = False
        """Whether the driver has sent the ranks a signal to end."""
        self._stage_timer: Timer | None = None
        self._refresh_timer: Timer | None = None
        self._refresh_scheduled = False
        self._output_paused = False
        self._held_output: deque[RankOutput | RankExit] = deque()
        """What came after output was paused, for the sink when that is not backlogged any more."""
        self._terminal_input: RawTerminalInput | None = None
        self.exits: list[RankExit] = []
        """In the order in which they came."""
        self.return_values: dict[int, bytes] = {}
        self.rank_statuses = [
            RankStatus(rank=each.rank, state="starting", host=each.host.name, local_rank=each.local_rank)
            for each in job.placements
        ]
        """By rank; other threads may read it."""
        self.stop_request: StopRequest | None = None
        """The first request to end the job from outside, if there was one."""

    @property
    def finished(self) -> bool:
        return not self._running or self._termination.stage is TerminationStage.ABANDONED

    # --- called by the driver ----------------------------------------------------------------------------------

    def request_stop(self, stop_request: StopRequest) -> None:
        self.stop_request = self.stop_request or stop_request
        interrupted = stop_request == INTERRUPTED
        self._advance_termination(TerminationEvent.INTERRUPTED if interrupted else TerminationEvent.STOP_REQUESTED)

    def print_message(self, text: str) -> None:
        self._output_sink.print_message(text)
        self._schedule_refresh()

    def resize_terminal(self) -> None:
        """Give the ptys of ranks the size of the driver's terminal."""
        rank = self._job.debug_rank or 0
        if os.isatty(1):
            columns, rows = os.get_terminal_size(1)
            columns -= 0 if rank == self._job.debug_rank else prefix_width(self._job.num_ranks)
            if rows > 0 and columns > 0:  # some terminals do not know their size
                self._send({self._host_index(rank): ResizeTerminal(rank, rows, columns)})

    def finish_output(self) -> None:
        """Hand all output to the sink, also to a backlogged one. Called when the last rank has ended."""
        while self._held_output:
            self._write_output(self._held_output.popleft())

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        for timer in (self._stage_timer, self._refresh_timer):
            if timer is not None:
                timer.cancel()
        if self._terminal_input is not None:
            self._terminal_input.close()

    # --- called with what agents report ------------------------------------------------------------------------

    def handle_message(self, host_index: int, message: AgentMessage) -> None:
        match message:
            case RankOutput():
                self._show_output(message)
            case RankExit():
                self._handle_rank_exit(message)
            case RankStarted(rank, pid):
                self._update_status(rank, pid=pid)
                if rank == self._job.debug_rank:
                    self._terminal_input = RawTerminalInput(
                        self._loop, lambda data: self._send({host_index: RankInput(rank, data)})
                    )
                if rank == (self._job.debug_rank or 0):
                    self.resize_terminal()
            case FunctionResult(rank, data):
                self.return_values[rank] = data
            case UsageReport(ranks, gpus):
                for rank, cpu, memory_bytes in ranks:
                    self._update_status(rank, cpu=cpu, memory_bytes=memory_bytes)
                    if gpus:  # most scripts choose theirs like this
                        busy, gpu_bytes = gpus[self.rank_statuses[rank].local_rank % len(gpus)]
                        self._update_status(rank, gpu=busy, gpu_bytes=gpu_bytes)
            case AgentError(reason):
                self.print_message(f"host {self._job.used_hosts[host_index].name}: {reason}")
            case _:  # late replies
                pass

    def handle_agent_lost(self, host_index: int, error: HostError) -> None:
        """The connection to a host has ended, and so have its ranks: the agent there kills them."""
        for rank in sorted(self._running):
            if self._host_index(rank) == host_index:
                detail = error.last_line or error.reason
                self._handle_rank_exit(RankExit(rank, LOST_CODE, ExitReason.HOST_LOST, detail))

    def _host_index(self, rank: int) -> int:
        return self._job.placements[rank].host_index

    def _update_status(self, rank: int, **changes: float) -> None:
        self.rank_statuses[rank] = msgspec.structs.replace(self.rank_statuses[rank], **changes)

    def _handle_rank_exit(self, rank_exit: RankExit) -> None:
        rank = rank_exit.rank
        if rank not in self._running:
            return
        self._running.discard(rank)
        host = self._job.placements[rank].host.name
        rank_exit = msgspec.structs.replace(rank_exit, host=host, requested=self._exit_requested)
        self.exits.append(rank_exit)
        self._update_status(rank, exit_code=rank_exit.exit_code)
        self._on_rank_exit(rank, describe_exit(rank_exit))
        self._show_output(rank_exit)
        if rank == self._job.debug_rank and self._terminal_input is not None:
            self._terminal_input.close()
        if rank_exit.exit_code != 0:
            self._advance_termination(TerminationEvent.RANK_FAILED)

    # --- the end of the job ------------------------------------------------------------------------------------

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
            ranks: dict[int, list[int]] = {}
            for rank in sorted(self._running):
                ranks.setdefault(self._host_index(rank), []).append(rank)
            self._send({index: SignalRanks(tuple(of_host), step.signal) for index, of_host in ranks.items()})

    def _print_stage(self, stage: TerminationStage, event: TerminationEvent) -> None:
        """Print what the user waits for, unless a reader of the output has left without a word."""
        if not self._running or (self.stop_request is not None and not self.stop_request.reason):
            return
        ranks = format_ranks(self._running)
        if stage is TerminationStage.INTERRUPT:
            self.print_message(f"Ctrl-C: {ranks} may end; press it again to kill")
        elif stage is TerminationStage.KILL:
            self.print_message(f"killing {ranks}")
        elif event is TerminationEvent.TIMED_OUT and self.stop_request is None:
            self.print_message(f"ending {ranks}, still running {self._job.grace_s:g} s after the first failure")
        else:
            self.print_message(f"ending {ranks}")

    # --- output ------------------------------------------------------------------------------------------------

    def _show_output(self, message: RankOutput | RankExit) -> None:
        if self._output_paused:
            self._held_output.append(message)
        else:
            self._write_output(message)
            self._schedule_refresh()

    def _write_output(self, message: RankOutput | RankExit) -> None:
        if isinstance(message, RankOutput):
            self._output_sink.write(message.rank, message.stream, message.data)
        else:
            self._output_sink.rank_exited(message.rank)

    def _schedule_refresh(self) -> None:
        """Refresh at the end of this turn of the loop, so that what comes together is shown together."""
        if not self._refresh_scheduled:
            self._refresh_scheduled = True
            self._loop.call_later(0.0, self._refresh_output)

    def _refresh_output(self) -> None:
        self._refresh_scheduled = False
        if self._refresh_timer is not None:
            self._refresh_timer.cancel()
        now_s = time.monotonic()
        due_s = self._output_sink.refresh(now_s)
        while self._held_output and not self._output_sink.is_backlogged():
            self._write_output(self._held_output.popleft())
            due_s = self._output_sink.refresh(now_s)
        self._refresh_timer = None if due_s is None else self._loop.call_later(due_s - now_s, self._refresh_output)
        paused = self._output_sink.is_backlogged()
        if paused != self._output_paused:
            # Ranks wait while the reader of the output is behind. Agents still report everything else, and what is on
            # its way is held here.
            self._output_paused = paused
            self._send({index: PauseOutput(paused) for index in range(len(self._job.used_hosts))})
        closed = self._output_sink.closed()
        if closed is not None and self.stop_request is None:
            code, reason = (SIGPIPE_EXIT_CODE, "") if closed.broken_pipe else (WRITE_ERROR_EXIT_CODE, closed.reason)
            self.request_stop(StopRequest(code, reason))


class Driver:
    """One job. run() it, once; stop() it from any thread."""

    def __init__(self, job: Job, output_sink: Printer) -> None:
        if job.debug_rank is not None:  # the other ranks wait for a person
            settings = job.settings.replace(start_s=UNLIMITED_S, operation_s=UNLIMITED_S, stall_s=0.0)
            job = replace(job, settings=settings)
        self._job = job
        self._output_sink = output_sink
        self._stop_requests: deque[StopRequest] = deque()
        self._loop: EventLoop | None = None
        self._agents: AgentGroup | None = None
        self._supervisor: RankSupervisor | None = None

    def stop(self, reason: str) -> None:
        """End everything. From any thread, also before and after run()."""
        self._request_stop(StopRequest(TERMINATED.exit_code, reason))

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
            agents = self._agents = AgentGroup(loop, self._job)
            opened.callback(agents.close)
            self._apply_stop_requests()
            try:
                agents.start_agents()
                return self._run_ranks(loop, agents, opened)
            except StartFailed as error:
                return JobResult(START_FAILED_EXIT_CODE, str(error))
            except StartCancelled:
                stop = self._stop_requests[0]
                return JobResult(stop.exit_code, f"{stop.reason}, before any rank was started", stop_request=stop)

    def _run_ranks(self, loop: EventLoop, agents: AgentGroup, opened: ExitStack) -> JobResult:
        job, key = self._job, new_job_key()
        network = agents.probe_network(key, count_ports(job))
        if self._stop_requests:
            raise StartCancelled
        coordinator = CoordinatorServer(
            network.driver_address, 0, job.num_ranks, JobKey(key), settings=job.settings, rounds=None
        )
        opened.callback(coordinator.close)
        coordinator.start([placement.host.name for placement in job.placements])
        orders = make_rank_orders(
            job,
            network,
            coordinator=coordinator.address,
            key=key,
            environ=os.environ,
            tty_fds=[fd for fd in range(3) if os.isatty(fd)],
        )
        supervisor = self._supervisor = RankSupervisor(
            loop, job, send=agents.send, output_sink=self._output_sink, on_rank_exit=coordinator.rank_exited
        )
        opened.callback(supervisor.close)
        self._open_monitor(supervisor, coordinator, opened)
        agents.set_handlers(supervisor.handle_message, supervisor.handle_agent_lost)
        agents.send(orders)
        loop.run_until(lambda: supervisor.finished)
        supervisor.finish_output()
        result = make_job_result(
            supervisor.exits,
            num_ranks=job.num_ranks,
            tail=self._output_sink.tail,
            first_lost=coordinator.first_lost(),
            lost_peers=coordinator.lost_peers(),
            whereabouts=coordinator.whereabouts(),
            return_values=supervisor.return_values,
            stop_request=supervisor.stop_request,
        )
        if supervisor.stop_request is not None:
            self._output_sink.close(timeout_s=OUTPUT_FLUSH_TIMEOUT_S)
        return result

    def _open_monitor(self, supervisor: RankSupervisor, coordinator: CoordinatorServer, opened: ExitStack) -> None:
        """Serve `ronde top` and `ronde stack`."""
        job, began_s = self._job, time.monotonic()

        def status(name: str) -> JobStatus:
            elapsed_s = time.monotonic() - began_s
            return make_job_status(name, job.command, coordinator.activity(), supervisor.rank_statuses, elapsed_s)

        def stacks(timeout_s: float, on_done: OnStacks) -> None:
            coordinator.request_stacks(
                Deadline(timeout_s), lambda found: on_done(make_rank_stacks(found, supervisor.rank_statuses))
            )

        pid = os.getpid()
        names = [job.name] if job.name else [str(pid), *(f"{pid}-{number}" for number in range(2, 100))]
        for name in names:
            try:
                opened.enter_context(MonitorServer(name, partial(status, name), stacks, thread=coordinator.thread))
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
        assert self._agents is not None
        self._agents.suspend_heartbeat(True)
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        self._agents.suspend_heartbeat(False)
