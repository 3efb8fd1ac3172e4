"""The worker's thread for everything that is not data: announcements, answers, losses, heartbeats. One per round.

User threads put named works and messages into a queue; the engine sends all that is there as one message. It sleeps in
one poll of the control socket and the lifeline, and is woken when somebody puts something into the empty queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ronde.comm.named_operations import OpenChannels
from ronde.comm.telemetry import ActivityReporter, ChannelStallInspector, TraceSender
from ronde.comm.work import NegotiationWaits, Work
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.net.connect import describe_disconnect, socket_error
from ronde.net.messages import (
    AnnounceOperations,
    ChangeGroups,
    CoordinatorMessage,
    EndRound,
    GroupsChanged,
    LeaveConfirmed,
    LeaveRound,
    MissingRanks,
    OperationRejected,
    OperationRequest,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    RunOperations,
    SetTracing,
    StackReply,
    StackRequest,
    StallReport,
    TimelineReply,
    TimelineRequest,
    UnknownOperationId,
    WorkerMessage,
)
from ronde.observe.clock import ClockOffset
from ronde.observe.events import PeerGone, StallReported
from ronde.observe.recorder import Recorder
from ronde.observe.stacks import dump_stacks
from ronde.text import format_ranks
from ronde.types import Deadline

__all__ = ["ControlConnection", "ControlThread"]

HEARTBEAT_INTERVAL_NS = 1_000_000_000
NUM_INITIAL_HEARTBEATS = 16
"""So many follow each other at once: the clocks' distance is known as well as the quickest of them was."""
REASON_GRACE_S = 0.2
"""After the lifeline has ended, the reason may still be on its way."""

logger = logging.getLogger("ronde.comm")


class ControlConnection(Protocol):
    """The way to the coordinator, as net.control.ControlClient has it. Only wake() is for other threads."""

    def send(self, message: WorkerMessage) -> None:
        """Say something, without waiting."""

    def poll(self, timeout_s: float) -> list[CoordinatorMessage]:
        """What was said, oldest first."""

    def unwatch(self, fd: int) -> None:
        """Stop watching this descriptor."""

    def readable(self) -> set[int]:
        """The watched descriptors that were readable at the end of the last poll()."""

    def notify(self) -> None:
        """End a poll early."""

    def close(self) -> None:
        """Send what was said last, and free everything."""


class ControlThread:
    """One thread does everything; others may only call waits.enqueue, request_groups, request_timeline, leave and stop."""

    def __init__(
        self,
        control: ControlConnection,
        open_channels: OpenChannels,
        recorder: Recorder,
        *,
        liveness_fd: int = -1,
        coordinator_rank: int = -1,
        stall_s: float = 0.0,
        report_activity: bool = False,
        early_messages: Sequence[CoordinatorMessage] = (),
    ) -> None:
        self.waits = NegotiationWaits(recorder, self._enqueue)
        self._control = control
        self._open_channels = open_channels
        self._recorder = recorder
        self._liveness_fd = liveness_fd
        self._coordinator_rank = coordinator_rank
        """The rank that hosts the coordinator; -1 when the launcher does."""
        self._stall_inspector = ChannelStallInspector(stall_s)
        self._activity_reporter = ActivityReporter(recorder, open_channels, self.waits) if report_activity else None
        """Only when somebody listens: a launcher that hosts the coordinator."""
        self._trace_sender = TraceSender(recorder, control.send)
        self._clock = ClockOffset()
        self._offset_ns = 0
        self._num_heartbeat_replies = 0
        self._queue: deque[Work | WorkerMessage] = deque()
        self._is_sleeping = False
        self._stopping = False
        self._leave_confirmed = threading.Event()
        self._early_messages = early_messages
        self._group_replies: list[GroupsChanged] = []
        """Changes of groups that nobody has fetched yet; under the board's lock."""
        self._timeline_replies: list[TimelineReply] = []
        """As well."""
        self._handlers = self._make_handlers()
        # Owned by the engine. Touches the control client, and through the presence lanes and named works.
        self._thread = threading.Thread(target=self._run, name="ronde-engine", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    # --- for other threads -----------------------------------------------------------------------------------------

    def request_groups(self, change: ChangeGroups, deadline: Deadline) -> GroupsChanged:
        """Ask for a change of groups, and wait until all ranks have."""
        self._enqueue(change)
        changed = self.waits.condition
        with changed:
            while True:
                for answer in self._group_replies:
                    if answer.id == change.id if change.id else answer.ranks == change.ranks and not answer.removed:
                        self._group_replies.remove(answer)
                        return answer
                if self._open_channels.closed_error is not None:
                    raise self._open_channels.closed_error
                if not changed.wait(deadline.remaining_s) and deadline.expired:
                    what = f"remove group {change.id}" if change.id else f"make a group of {format_ranks(change.ranks)}"
                    raise OperationTimeout(f"not every rank of the job asked to {what} within {deadline.timeout_s:g} s")

    def request_timeline(self, request: TimelineRequest, deadline: Deadline) -> str:
        """Ask for a timeline, or for its end, and wait until it is so. Why it cannot be; empty when it is. For one
        thread at a time."""
        self._enqueue(request)
        changed = self.waits.condition
        with changed:
            while not self._timeline_replies:
                if self._open_channels.closed_error is not None:
                    raise self._open_channels.closed_error
                if not changed.wait(deadline.remaining_s) and deadline.expired:
                    raise OperationTimeout(f"the timeline was not {'begun' if request.path else 'ended'} in time")
            return self._timeline_replies.pop().reason

    def now_ns(self) -> int:
        """The time on the coordinator's clock, as well as it is known."""
        return time.monotonic_ns() + self._offset_ns

    def leave(self, message: LeaveRound, deadline: Deadline) -> None:
        """Say goodbye. An orderly goodbye waits for the answer."""
        self._enqueue(message)
        if message.orderly and self._open_channels.closed_error is None:
            self._leave_confirmed.wait(deadline.remaining_s)

    def stop(self) -> None:
        """Send what is left to say and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._stopping = True
            self._control.notify()
            self._thread.join()

    def _enqueue(self, item: Work | WorkerMessage) -> None:
        self._queue.append(item)
        # The engine says that it sleeps before it looks at the queue for the last time; we look whether it sleeps
        # after filling the queue. So one of us always sees the other.
        if self._is_sleeping:
            self._is_sleeping = False
            self._control.notify()

    # --- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._handle(self._early_messages)
            next_beat_ns = 0
            while not self._stopping:
                next_beat_ns = self._step(next_beat_ns)
            self._send_queue()
        except Exception as error:  # the thread's edge: everybody who waits must learn of it
            logger.exception("the engine broke")
            self._end_round(RoundEnded(f"ronde's engine broke: {error!r}"))

    def _step(self, next_heartbeat_ns: int) -> int:
        now_ns = time.monotonic_ns()
        if now_ns >= next_heartbeat_ns:
            next_heartbeat_ns = now_ns + HEARTBEAT_INTERVAL_NS
            self._send_heartbeat(now_ns)
        for waiting in self._stall_inspector.overdue(self._open_channels.channels, now_ns, self._offset_ns):
            self._control.send(waiting)
        self._trace_sender.send_due(now_ns)
        self._is_sleeping = True
        if not self._queue:
            left_s = (next_heartbeat_ns - now_ns) / 1e9
            self._receive(
                min(left_s, self._stall_inspector.remaining_s(now_ns), self._trace_sender.remaining_s(now_ns))
            )
        self._is_sleeping = False
        self._send_queue()
        return next_heartbeat_ns

    def _receive(self, timeout_s: float) -> None:
        self._handle(self._control.poll(timeout_s))
        if self._liveness_fd in self._control.readable():
            self._on_liveness_closed()

    def _handle(self, messages: Sequence[CoordinatorMessage]) -> None:
        for message in messages:
            handle = self._handlers.get(type(message))
            if handle is not None:  # a Welcome may come twice
                handle(message)

    def _send_queue(self) -> None:
        queue = self._queue
        new: list[OperationRequest] = []
        known: list[int] = []
        while queue:
            item = queue.popleft()
            if isinstance(item, Work):
                named = self._open_channels.named_operations_of(item.group)
                how = None if named is None else named.make_request(item)
                if isinstance(how, int):
                    known.append(how)
                elif how is not None:
                    new.append(how)
            else:
                self._send_announce(new, known)
                if isinstance(item, LeaveRound):
                    self._send_activity(time.monotonic_ns())
                    self._trace_sender.send()
                self._control.send(item)
        self._send_announce(new, known)

    def _send_announce(self, new: list[OperationRequest], known: list[int]) -> None:
        if new or known:
            self._control.send(AnnounceOperations(tuple(new), tuple(known)))
            new.clear()
            known.clear()

    def _send_heartbeat(self, now_ns: int) -> None:
        self._control.send(RankHeartbeat(now_ns))
        self._send_activity(now_ns)

    def _send_activity(self, now_ns: int) -> None:
        if self._activity_reporter is not None:
            self._control.send(self._activity_reporter.make_report(now_ns, self._offset_ns))

    def _on_liveness_closed(self) -> None:
        cut_off = describe_disconnect(socket_error(self._liveness_fd))
        self._control.unwatch(self._liveness_fd)
        self._liveness_fd = -1
        if not self._leave_confirmed.is_set():
            self._receive(REASON_GRACE_S)
        if self._leave_confirmed.is_set():  # we have left, or have heard why the round is over
            return
        if self._coordinator_rank >= 0:
            why = cut_off or "it hosted the coordinator, which is gone"
            self._end_round(PeerLost(rank=self._recorder.rank, peer=self._coordinator_rank, why=why))
        else:
            gone = f"the coordinator is gone ({cut_off})" if cut_off else "the coordinator is gone"
            self._end_round(RoundEnded(f"{gone}; look at the output of the launcher"))

    def _end_round(self, error: RondeError) -> None:
        self._open_channels.abort_all(error)
        self._leave_confirmed.set()
        self._notify_waiters()

    def _notify_waiters(self) -> None:
        with self.waits.condition:
            self.waits.condition.notify_all()

    # --- what the coordinator says ---------------------------------------------------------------------------------

    def _make_handlers(self) -> dict[type[Any], Callable[[Any], None]]:
        return {
            RunOperations: self._on_run_operations,
            OperationRejected: self._on_rejected,
            UnknownOperationId: self._on_unknown_id,
            MissingRanks: self._on_missing_ranks,
            RankLost: self._on_rank_lost,
            EndRound: self._on_end_round,
            GroupsChanged: self._on_groups_changed,
            StackRequest: self._on_stack_request,
            StallReport: self._on_stall_report,
            SetTracing: self._trace_sender.handle,
            TimelineReply: self._on_timeline_reply,
            RankHeartbeatReply: self._on_heartbeat_reply,
            LeaveConfirmed: self._on_leave_confirmed,
        }

    def _on_run_operations(self, run: RunOperations) -> None:
        named = self._open_channels.named_operations_of(run.group)
        if named is not None:
            named.run_agreed(run.operations, run.stragglers)

    def _on_rejected(self, failed: OperationRejected) -> None:
        named = self._open_channels.named_operations_of(failed.group)
        if named is not None:
            named.reject(failed.name, Mismatch(failed.reason))

    def _on_unknown_id(self, unknown: UnknownOperationId) -> None:
        for named in self._open_channels.all_named_operations:
            request = named.resend_in_full(unknown.id)
            if request is not None:
                self._control.send(AnnounceOperations(new=(request,)))

    def _on_missing_ranks(self, missing: MissingRanks) -> None:
        named = self._open_channels.named_operations_of(missing.group)
        if named is not None:
            named.set_missing(missing.name, missing.ranks)

    def _on_rank_lost(self, lost: RankLost) -> None:
        rank = self._recorder.rank
        self._recorder.record_event(PeerGone(at_ns=time.monotonic_ns(), rank=rank, peer=lost.rank, why=lost.reason))
        self._open_channels.abort_for(lost.rank, lost.reason)
        self._notify_waiters()

    def _on_end_round(self, ended: EndRound) -> None:
        self._end_round(RoundEnded(ended.reason))

    def _on_groups_changed(self, changed: GroupsChanged) -> None:
        with self.waits.condition:
            self._group_replies.append(changed)
            self.waits.condition.notify_all()

    def _on_timeline_reply(self, changed: TimelineReply) -> None:
        with self.waits.condition:
            self._timeline_replies.append(changed)
            self.waits.condition.notify_all()

    def _on_stack_request(self, query: StackRequest) -> None:
        line, stack = dump_stacks()
        self._control.send(StackReply(query.query_id, line, stack))

    def _on_stall_report(self, stalled: StallReport) -> None:
        self._recorder.record_event(
            StallReported(
                at_ns=time.monotonic_ns(),
                rank=self._recorder.rank,
                op=stalled.op,
                group=stalled.group,
                waited_s=stalled.waited_s,
                missing=stalled.missing,
                report=stalled.report,
            )
        )

    def _on_heartbeat_reply(self, answer: RankHeartbeatReply) -> None:
        now_ns = time.monotonic_ns()
        self._num_heartbeat_replies += 1
        if self._num_heartbeat_replies < NUM_INITIAL_HEARTBEATS:
            self._control.send(RankHeartbeat(now_ns))
        if self._clock.add(answer.sent_ns, answer.coordinator_ns, now_ns):
            offset_ns, error_ns = self._clock.offset_ns, self._clock.error_ns(now_ns) or 0.0
            # Clocks that differ by less than one can measure are one clock: this host's.
            self._offset_ns = 0 if abs(offset_ns) <= error_ns else offset_ns
            self._recorder.set_clock_offset(self._offset_ns)

    def _on_leave_confirmed(self, bye: LeaveConfirmed) -> None:
        self._leave_confirmed.set()
