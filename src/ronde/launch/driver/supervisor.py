"""The ranks of a job between their start and the last exit: which run, how the others have ended, what they print, and
how the job is ended. Used by the driver, in its loop.

What an exit means for the job is decided by its policy: with a fixed number of ranks any failure ends it (FixedRanks);
an elastic job goes on and starts other workers (worker_pool). In an elastic job a rank is known here by the number of
its worker, which no other process of the job ever has.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from ronde.exit_codes import INTERRUPTED_CODE, LOST_CODE
from ronde.launch.driver.failure_report import StopRequest, describe_exit, format_processes
from ronde.launch.driver.monitor import RankStatus
from ronde.launch.driver.ssh import HostError
from ronde.launch.driver.termination import Termination, TerminationEvent, TerminationStage
from ronde.launch.job import Job
from ronde.launch.output.printer import prefix_width
from ronde.launch.output.terminal import OutputClosed
from ronde.launch.protocol import (
    AgentError,
    AgentMessage,
    AgentStopping,
    DriverMessage,
    ExitReason,
    FunctionResult,
    PauseOutput,
    RankExit,
    RankInput,
    RankMessage,
    RankOutput,
    RankStarted,
    ResizeTerminal,
    SignalRanks,
    StartRanks,
    StdStream,
    UsageReport,
)
from ronde.launch.timeouts import HELPER_END_TIMEOUT_S
from ronde.launch.tty import RawTerminalInput
from ronde.net.event_loop import EventLoop, Timer

SIGPIPE_EXIT_CODE = 141
"""A shell's exit code for a program whose output nobody reads any more (SIGPIPE)."""
WRITE_ERROR_EXIT_CODE = 1
"""Output cannot be written, to a full disk for example."""


class RankLocation(NamedTuple):
    """Where a rank runs."""

    rank: int
    host_index: int
    host: str
    local_rank: int


class OutputSink(Protocol):
    """What takes the output of ranks: the Printer of a command, or files of a search. Called in the loop."""

    def rank_started(self, rank: int) -> None: ...

    def write(self, rank: int, stream: StdStream, data: bytes) -> None: ...

    def rank_exited(self, rank: int) -> None: ...

    def print_message(self, text: str) -> None:
        """Take a line of the driver itself."""

    def tail(self, rank: int, exit_code: int) -> str:
        """Return the last output of a rank, which explains this exit code."""

    def refresh(self, now_s: float) -> float | None:
        """Called after writes. Return when to call again at the latest; None while nothing waits."""

    def is_backlogged(self) -> bool:
        """Whether ranks have to wait before they print more."""

    def closed(self) -> OutputClosed | None:
        """Return why nothing can be written any more; None while it can."""

    def close(self, *, timeout_s: float | None = None) -> None: ...


class JobPolicy(Protocol):
    """What the end of a rank or of a host means for the job."""

    @property
    def goes_on(self) -> bool:
        """Whether the job goes on when no rank runs."""

    def handle_exit(self, rank_exit: RankExit) -> TerminationEvent | None:
        """A rank has ended. Return the event with which the whole job ends; None if it goes on."""

    def handle_agent_lost(self, host_index: int, error: HostError) -> None:
        """A host was lost; the exits of its ranks were handled."""

    def handle_agent_stopping(self, host_index: int) -> None:
        """The agent of a host ends its ranks, and then itself."""


class FixedRanks:
    """The policy of a job that needs all of its ranks."""

    @property
    def goes_on(self) -> bool:
        return False

    def handle_exit(self, rank_exit: RankExit) -> TerminationEvent | None:
        return TerminationEvent.RANK_FAILED if rank_exit.exit_code != 0 else None

    def handle_agent_lost(self, host_index: int, error: HostError) -> None: ...

    def handle_agent_stopping(self, host_index: int) -> None: ...


class RanksWithHelpers:
    """The policy of a job that has a scheduler and servers besides its ranks: it needs all of them until the last rank
    has ended. They end by themselves then, or are asked to. With servers of TensorFlow that is so when the chief, rank
    0, has ended: its workers serve for ever."""

    def __init__(self, loop: EventLoop, supervisor: RankSupervisor, helpers: Collection[int], job: Job) -> None:
        self._loop = loop
        self._supervisor = supervisor
        self._helpers = frozenset(helpers)
        self._has_chief = job.has_tf_servers
        self._delays_s = ((signal.SIGTERM, HELPER_END_TIMEOUT_S), (signal.SIGKILL, job.terminate_s))

    @property
    def goes_on(self) -> bool:
        return False

    def handle_exit(self, rank_exit: RankExit) -> TerminationEvent | None:
        is_helper = self._has_chief or rank_exit.rank in self._helpers
        if rank_exit.exit_code != 0 and not (rank_exit.requested and is_helper):
            return TerminationEvent.RANK_FAILED
        if self._has_chief:
            if rank_exit.rank == 0:
                self._end_others()
            return None
        if self._helpers.issuperset(self._supervisor.running) and rank_exit.rank not in self._helpers:
            self._end_helpers()
        return None

    def handle_agent_lost(self, host_index: int, error: HostError) -> None: ...

    def handle_agent_stopping(self, host_index: int) -> None: ...

    def _end_others(self) -> None:
        """The chief has ended: nobody needs the others any more."""
        running = sorted(self._supervisor.running)
        self._supervisor.ask_to_end(running, signal.SIGTERM)
        delay_s = self._delays_s[-1][1]
        self._loop.call_later(delay_s, partial(self._supervisor.ask_to_end, running, signal.SIGKILL))

    def _end_helpers(self) -> None:
        """The last rank has ended: ask those that still run to end, first in one way and then in another."""
        delay_s = 0.0
        for number, more_s in self._delays_s:
            delay_s += more_s
            self._loop.call_later(delay_s, partial(self._supervisor.ask_to_end, sorted(self._helpers), number))


class RankSupervisor:
    """Which ranks run, how the others have ended, and what is done about it. Its methods are called in the loop."""

    def __init__(
        self,
        loop: EventLoop,
        job: Job,
        *,
        send: Callable[[Mapping[int, DriverMessage]], None],
        output_sink: OutputSink,
        on_rank_exit: Callable[[int, str], None],
        host_name: Callable[[int], str],
        names: Mapping[int, str] | None = None,
        on_message: Callable[[int, bytes], None] | None = None,
    ) -> None:
        """`send` sends messages to agents by host index. `on_rank_exit` is called with every rank that has ended, and a
        description of how; `host_name` gives the name of a host by its index. `names` are those of processes that are
        no ranks, by number. `on_message` gets the messages of ranks."""
        self._loop = loop
        self._job = job
        self._send = send
        self._output_sink = output_sink
        self._on_rank_exit = on_rank_exit
        self._host_name = host_name
        self._names: Mapping[int, str] = {} if names is None else names
        self._on_message = on_message
        self.policy: JobPolicy = FixedRanks()
        """May be replaced before ranks are started."""
        self._running: dict[int, RankLocation] = {}
        self._asked: set[int] = set()
        """Ranks that were asked to end, while the job goes on."""
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
        self.rank_statuses: dict[int, RankStatus] = {}
        """By rank; other threads may copy it."""
        self.stop_request: StopRequest | None = None
        """The first request to end the job from outside, if there was one."""

    @property
    def finished(self) -> bool:
        if self._running:
            return self._termination.stage is TerminationStage.ABANDONED
        return self.is_ending or not self.policy.goes_on

    @property
    def is_ending(self) -> bool:
        """Whether the whole job is being ended: no rank is started any more."""
        return self._termination.stage is not TerminationStage.RUNNING

    @property
    def running(self) -> Mapping[int, RankLocation]:
        return self._running

    @property
    def running_ranks(self) -> Mapping[int, RankLocation]:
        """Those that run, without processes that are no ranks."""
        return {number: location for number, location in self._running.items() if number not in self._names}

    # --- called by the driver ----------------------------------------------------------------------------------

    def start_ranks(self, locations: Iterable[RankLocation], orders: Mapping[int, StartRanks]) -> None:
        """Have ranks started, by orders for the agents of their hosts."""
        for location in locations:
            rank, _, host, local_rank = location
            self._running[rank] = location
            name = self._names.get(rank, "")
            self.rank_statuses[rank] = RankStatus(
                rank=rank, state="starting", host=host, local_rank=local_rank, name=name
            )
            self._output_sink.rank_started(rank)
        self._send(orders)
        if self._output_paused:
            self._send(dict.fromkeys(orders, PauseOutput(True)))

    def ask_to_end(self, ranks: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to some ranks, while the job goes on."""
        running = [rank for rank in ranks if rank in self._running]
        self._asked.update(running)
        self._signal_ranks(running, number)

    def end_job(self, event: TerminationEvent) -> None:
        """End the ranks that run, because of what has happened."""
        self._advance_termination(event)

    def request_stop(self, stop_request: StopRequest) -> None:
        self.stop_request = self.stop_request or stop_request
        interrupted = stop_request.exit_code == INTERRUPTED_CODE
        self._advance_termination(TerminationEvent.INTERRUPTED if interrupted else TerminationEvent.STOP_REQUESTED)

    def send_message(self, rank: int, data: bytes) -> None:
        """Send a message to a rank, if it runs."""
        if rank in self._running:
            self._send({self._running[rank].host_index: RankMessage(rank, data)})

    def print_message(self, text: str) -> None:
        self._output_sink.print_message(text)
        self._schedule_refresh()

    def resize_terminal(self) -> None:
        """Give the ptys of ranks the size of the driver's terminal."""
        rank = self._job.debug_rank or 0
        if os.isatty(1) and rank in self._running:
            columns, rows = os.get_terminal_size(1)
            columns -= 0 if rank == self._job.debug_rank else prefix_width(self._job.num_ranks)
            if rows > 0 and columns > 0:  # some terminals do not know their size
                self._send({self._running[rank].host_index: ResizeTerminal(rank, rows, columns)})

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
            case RankMessage(rank, data):
                if self._on_message is not None:
                    self._on_message(rank, data)
            case FunctionResult(rank, data):
                self.return_values[rank] = data
            case UsageReport(ranks, gpus):
                for rank, cpu, memory_bytes in ranks:
                    if rank not in self._running:
                        continue
                    self._update_status(rank, cpu=cpu, memory_bytes=memory_bytes)
                    if gpus:  # most scripts choose theirs like this
                        busy, gpu_bytes = gpus[self.rank_statuses[rank].local_rank % len(gpus)]
                        self._update_status(rank, gpu=busy, gpu_bytes=gpu_bytes)
            case AgentError(reason):
                self.print_message(f"host {self._host_name(host_index)}: {reason}")
            case AgentStopping(reason):
                self.print_message(f"host {self._host_name(host_index)}: its agent ends its ranks ({reason})")
                self.policy.handle_agent_stopping(host_index)
            case _:  # late replies
                pass

    def handle_agent_lost(self, host_index: int, error: HostError) -> None:
        """The connection to a host has ended, and so have its ranks: the agent there kills them."""
        for rank in [rank for rank, location in self._running.items() if location.host_index == host_index]:
            detail = error.last_line or error.reason
            self._handle_rank_exit(RankExit(rank, LOST_CODE, ExitReason.HOST_LOST, detail))
        self.policy.handle_agent_lost(host_index, error)

    def _update_status(self, rank: int, **changes: float) -> None:
        self.rank_statuses[rank] = msgspec.structs.replace(self.rank_statuses[rank], **changes)

    def _handle_rank_exit(self, rank_exit: RankExit) -> None:
        rank = rank_exit.rank
        if rank not in self._running:
            return
        host = self._running.pop(rank).host
        requested = self._exit_requested or rank in self._asked
        name = self._names.get(rank, "")
        rank_exit = msgspec.structs.replace(rank_exit, host=host, requested=requested, name=name)
        self.exits.append(rank_exit)
        self._update_status(rank, exit_code=rank_exit.exit_code)
        if not name:
            self._on_rank_exit(rank, describe_exit(rank_exit))
        self._show_output(rank_exit)
        if rank == self._job.debug_rank and self._terminal_input is not None:
            self._terminal_input.close()
        event = self.policy.handle_exit(rank_exit)
        if event is not None:
            self._advance_termination(event)

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
            self._signal_ranks(sorted(self._running), step.signal)

    def _signal_ranks(self, ranks: Iterable[int], number: signal.Signals) -> None:
        by_host: dict[int, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._running[rank].host_index, []).append(rank)
        self._send({index: SignalRanks(tuple(of_host), number) for index, of_host in by_host.items()})

    def _print_stage(self, stage: TerminationStage, event: TerminationEvent) -> None:
        """Print what the user waits for, unless a reader of the output has left without a word."""
        if not self._running or (self.stop_request is not None and not self.stop_request.reason):
            return
        noun = "rank" if self._job.limits is None else "worker"
        ranks = format_processes(sorted(self._running), self._names, noun)
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
            hosts = {location.host_index for location in self._running.values()}
            self._send(dict.fromkeys(sorted(hosts), PauseOutput(paused)))
        closed = self._output_sink.closed()
        if closed is not None and self.stop_request is None:
            code, reason = (SIGPIPE_EXIT_CODE, "") if closed.broken_pipe else (WRITE_ERROR_EXIT_CODE, closed.reason)
            self.request_stop(StopRequest(code, reason))
