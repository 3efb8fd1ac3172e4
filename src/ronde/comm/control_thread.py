"""A rank's one control thread: everything that is not data, from the start of a round to its end.

It sends announcements and reports, handles the coordinator's messages, notices when the coordinator is gone, and runs
the listener's handshakes with other ranks. Each of these is a callback of one EventLoop, and no callback waits. User
threads put named operations and messages into a queue; the operations in it are announced in one message.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ronde.comm.backends.base import Backend
from ronde.comm.fork_and_signal_safety import SIGNAL_CHECK_S
from ronde.comm.open_channels import OpenChannels
from ronde.comm.telemetry import ChannelStallInspector, TraceSender, make_activity_report
from ronde.comm.work import ControlItem, NegotiationWaits
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.net.connect import describe_disconnect, send_and_hang_up, socket_error
from ronde.net.event_loop import EventLoop, start_thread
from ronde.net.messages import (
    AnnounceOperations,
    ChangeGroups,
    ChannelAborted,
    CoordinatorMessage,
    EndRound,
    FinishConfirmed,
    GroupsChanged,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    MissingRanks,
    OperationRejected,
    OperationRequest,
    ProposeValue,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    RanksLost,
    RevokeSharedIds,
    RoundChangeWanted,
    RunOperations,
    SetTracing,
    StackReply,
    StackRequest,
    StallReport,
    TimelineReply,
    TimelineRequest,
    TrainingFinished,
    UnknownOperationId,
    ValueDecided,
    WaitingTooLong,
    WorkerMessage,
    encode,
)
from ronde.observe.clock import ClockOffset
from ronde.observe.events import PeerGone, StallReported
from ronde.observe.recorder import Recorder
from ronde.observe.stacks import dump_stacks
from ronde.settings import Settings
from ronde.text import format_ranks, shorten
from ronde.types import Deadline, Topology

HEARTBEAT_INTERVAL_S = 1.0
NUM_INITIAL_HEARTBEATS = 16
"""So many heartbeats are sent at once at the start: the quickest round trip gives the best clock offset."""
CHECKS_PER_STALL_TIME = 4
ENDING_S = 0.1
"""How long a thread that is at its end may take to end."""
MAX_FAILURE_CHARS = 1000
"""Of the reason that is sent over the liveness connection."""
REASON_GRACE_S = 0.2
"""How long the coordinator's reason may take to arrive after its connection was closed."""

logger = logging.getLogger("ronde.comm")


class ControlConnection(Protocol):
    """The connection to the coordinator: net.control.ControlClient, or one inside the process."""

    def send(self, message: WorkerMessage) -> None:
        """Send without waiting."""

    def start_receiving(
        self, loop: EventLoop, on_message: Callable[[CoordinatorMessage], None], on_lost: Callable[[str], None]
    ) -> None:
        """Hand every message to on_message, in the loop, and the reason to on_lost when messages were lost."""


@dataclass
class JoinedRound:
    """A rank's connections in a round that has started."""

    settings: Settings
    topology: Topology
    control: ControlConnection
    backend: Backend
    liveness_fd: int = -1
    """Readable when the coordinator is gone; -1 if it is in this process."""
    coordinator_rank: int = -1
    """The rank that hosts the coordinator; -1 when a launcher does."""
    loop: EventLoop = field(default_factory=EventLoop)
    """The loop of the control thread, which closes it. The listener's handshakes run in it, too."""
    resources: ExitStack = field(default_factory=ExitStack)
    """Closing this closes all connections of the round."""
    object_key: bytes = b""
    """Equal on all members, and of this round alone: with it ronde.objects signs what it sends."""
    coordinator_address: str = ""
    """`host:port` of the coordinator; empty if it is in this process alone."""
    hosting: ExitStack = field(default_factory=ExitStack)
    """Closing this closes the coordinator, if this process hosts it. `resources` does so, unless the next round of the
    process has taken it over (pop_all)."""
    is_elastic: bool = False
    """Whether the next round may have other members."""
    candidate: tuple[int, int] | None = None
    """Of a newcomer to an elastic job, which is in a round of its own: the rank that it would have among the members
    of the job's round, and the size of that. None in all other rounds."""


class ControlThread:
    """Owns the loop and its thread. Other threads may call waits.enqueue, request_groups, request_timeline, propose,
    now_ns, finish, leave and stop."""

    def __init__(
        self,
        joined_round: JoinedRound,
        open_channels: OpenChannels,
        recorder: Recorder,
        on_change_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change_wanted` is called in the control thread when ranks wait to join an elastic job."""
        self.coordinator_is_gone = False
        """Whether the connection to the coordinator has ended without a reason from it."""
        self.is_finished = False
        """Whether the work of an elastic job is done. The coordinator is told so as soon as a rank is lost, so that
        nobody waits for this one."""
        self.opening_since_ns: int | None = time.monotonic_ns()
        """Since when the first channels of the round are being opened; None when they are open. In an elastic round the
        coordinator is told, once, when this takes too long."""
        self.waits = NegotiationWaits(recorder, self._enqueue)
        self._loop = joined_round.loop
        self._resources = joined_round.resources
        self._control = joined_round.control
        self._open_channels = open_channels
        self._recorder = recorder
        self._liveness_fd = joined_round.liveness_fd
        self._coordinator_rank = joined_round.coordinator_rank
        self._is_elastic = joined_round.is_elastic
        self._size = joined_round.topology.size
        settings = joined_round.settings
        self._stall_s = settings.stall_s
        if joined_round.is_elastic:
            # Then it is by these reports that others are known to wait for a suspended rank
            self._stall_s = min(settings.stall_s or settings.suspend_s, settings.suspend_s)
        self._stall_inspector = ChannelStallInspector(self._stall_s)
        self._report_activity = joined_round.settings.coordinator_hosted
        """Only if a launcher hosts the coordinator, which shows the activity to its user."""
        self._trace_sender = TraceSender(self._loop, recorder, self._control.send)
        self._clock = ClockOffset()
        self._offset_ns = 0
        self._num_heartbeat_replies = 0
        self._queue: deque[ControlItem] = deque()
        self._send_scheduled = False
        self._stopping = False
        self._closes_connections = False
        self._finish_confirmed = threading.Event()
        self._leave_confirmed = threading.Event()
        self._has_left = False
        """Whether the coordinator was told over the liveness connection that this rank cannot go on."""
        self._replies: list[GroupsChanged | TimelineReply | ValueDecided] = []
        """Answers that the threads in _wait_for_reply() have not taken yet; under the lock of `waits`."""
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            RunOperations: self._on_run_operations,
            OperationRejected: self._on_rejected,
            UnknownOperationId: self._on_unknown_id,
            RevokeSharedIds: self._on_revoke_shared_ids,
            MissingRanks: self._on_missing_ranks,
            RankLost: lambda lost: self._on_rank_lost(lost.rank, lost.reason),
            RanksLost: self._on_ranks_lost,
            ChannelAborted: joined_round.backend.channel_aborted,
            EndRound: lambda ended: self._end_round(RoundEnded(ended.reason)),
            GroupsChanged: self._on_reply,
            TimelineReply: self._on_reply,
            ValueDecided: self._on_reply,
            StackRequest: self._on_stack_request,
            StallReport: self._on_stall_report,
            RoundChangeWanted: lambda wanted: on_change_wanted(),
            SetTracing: self._trace_sender.handle,
            RankHeartbeatReply: self._on_heartbeat_reply,
            FinishConfirmed: lambda confirmed: self._finish_confirmed.set(),
            LeaveConfirmed: lambda confirmed: self._leave_confirmed.set(),
        }
        self._thread = threading.Thread(target=self._run, name="ronde-control", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    # --- for other threads -----------------------------------------------------------------------------------------

    def request_groups(self, change: ChangeGroups, deadline: Deadline) -> GroupsChanged:
        """Ask for a change of groups, and wait until all ranks have asked for it."""

        def is_answer(reply: object) -> bool:
            if not isinstance(reply, GroupsChanged):
                return False
            return reply.id == change.id if change.id else reply.ranks == change.ranks and not reply.removed

        what = f"remove group {change.id}" if change.id else f"make a group of {format_ranks(change.ranks)}"
        late = f"not every rank of the job asked to {what} within {deadline.timeout_s:g} s"
        reply = self._wait_for_reply(change, is_answer, deadline, late)
        assert isinstance(reply, GroupsChanged)
        return reply

    def request_timeline(self, request: TimelineRequest, deadline: Deadline) -> str:
        """Start a timeline or end it, and wait until that is done. Returns why it cannot be done; empty if it is done.
        For one thread at a time."""
        late = f"the timeline was not {'begun' if request.path else 'ended'} in time"
        reply = self._wait_for_reply(request, lambda reply: isinstance(reply, TimelineReply), deadline, late)
        assert isinstance(reply, TimelineReply)
        return reply.reason

    def propose(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        """Return the value that the first member to propose one for this key has given. For one thread at a time and
        key."""
        late = f"the coordinator did not answer within {deadline.timeout_s:g} s which value of {key} was the first"
        reply = self._wait_for_reply(
            ProposeValue(key, value), lambda reply: isinstance(reply, ValueDecided) and reply.key == key, deadline, late
        )
        assert isinstance(reply, ValueDecided)
        return reply.value

    def now_ns(self) -> int:
        """Return the time of the coordinator's clock, as well as it is known."""
        return time.monotonic_ns() + self._offset_ns

    def finish(self, deadline: Deadline) -> None:
        """The work of an elastic job is done. Return when the coordinator knows it: a rank that is killed behind this
        call has failed. This rank stays in the round."""
        self.is_finished = True
        if self._is_elastic:
            self._enqueue(TrainingFinished())
            self._finish_confirmed.wait(deadline.remaining_s)

    def leave(self, message: LeaveRound, deadline: Deadline) -> None:
        """Leave the round. If it is orderly, wait until the coordinator has confirmed it."""
        if self._has_left:
            return
        self._enqueue(message)
        if message.reason.is_orderly and self._open_channels.closed_error is None:
            self._leave_confirmed.wait(deadline.remaining_s)

    def end_requests(self) -> None:
        """Let the waits for replies see that the round is over."""
        with self.waits.condition:
            self.waits.condition.notify_all()

    def stop(self, deadline: Deadline) -> None:
        """Send what is queued, end the thread, and close the loop and all connections of the round. Idempotent.

        The thread may wait for a lock of the frame that a signal handler has interrupted to call this. If it has not
        ended at the deadline, it closes everything itself when it can go on.
        """
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(deadline.remaining_s)
            if self._thread.is_alive():
                self._closes_connections = True
                self._thread.join(ENDING_S)  # if it had looked before that was set, it is at its end
                if self._thread.is_alive():
                    logger.warning("the control thread has not ended yet; it closes its connections when it does")
                    return
        self._close_connections()

    def _enqueue(self, item: ControlItem) -> None:
        self._queue.append(item)
        # The loop resets the flag before it empties the queue; here the queue is filled before the flag is read. So
        # either the item is in time for the call that is scheduled, or a new one is.
        if not self._send_scheduled:
            self._send_scheduled = True
            self._loop.call_soon_threadsafe(self._send_queue)

    def _wait_for_reply(
        self, request: WorkerMessage, is_answer: Callable[[object], bool], deadline: Deadline, late: str
    ) -> GroupsChanged | TimelineReply | ValueDecided:
        if self._open_channels.closed_error is not None:
            raise self._open_channels.closed_error
        self._enqueue(request)
        changed = self.waits.condition
        with changed:
            while True:
                for reply in self._replies:
                    if is_answer(reply):
                        self._replies.remove(reply)
                        return reply
                if self._open_channels.closed_error is not None:
                    raise self._open_channels.closed_error
                if not changed.wait(min(SIGNAL_CHECK_S, deadline.remaining_s)) and deadline.expired:
                    raise OperationTimeout(late)

    # --- in the control thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._liveness_fd >= 0:
                self._loop.add_reader(self._liveness_fd, self._on_liveness_closed)
            self._control.start_receiving(self._loop, self._handle, self._on_messages_lost)
            self._send_heartbeat()
            self._check_stalls()
            self._trace_sender.send_due()
            self._loop.run_until(lambda: self._stopping)
            self._send_queue()
        except Exception as error:  # the end of the thread: whoever waits must learn of it
            logger.exception("the control thread failed")
            why = f"ronde's control thread failed: {error!r}"
            if not self._leave_confirmed.is_set():
                self._leave_by_liveness(LeaveRound(LeaveReason.FAILED, shorten(why, MAX_FAILURE_CHARS)))
            self._end_round(RoundEnded(why))
        finally:
            if self._closes_connections:
                self._close_connections()

    def _close_connections(self) -> None:
        self._loop.close()
        self._resources.close()

    def _stop(self) -> None:
        self._stopping = True

    def _check_stalls(self) -> None:
        if self._stall_s:
            now_ns = time.monotonic_ns()
            channels, named = self._open_channels.channels, self._open_channels.named_operations.values()
            for waiting in self._stall_inspector.overdue(channels, now_ns, self._offset_ns, tuple(named)):
                self._control.send(waiting)
            since_ns = self.opening_since_ns
            if self._is_elastic and since_ns is not None and now_ns - since_ns >= self._stall_s * 1e9:
                self.opening_since_ns = None
                others = tuple(rank for rank in range(self._size) if rank != self._recorder.rank)
                self._control.send(
                    WaitingTooLong("opening of the first channels", 0, since_ns + self._offset_ns, others)
                )
            self._loop.call_later(self._stall_s / CHECKS_PER_STALL_TIME, self._check_stalls)

    def _handle(self, message: CoordinatorMessage) -> None:
        handle = self._handlers.get(type(message))
        if handle is not None:  # RoundStarted may come twice
            handle(message)

    def _send_queue(self) -> None:
        self._send_scheduled = False
        queue = self._queue
        new: list[OperationRequest] = []
        known: list[int] = []
        while queue:
            item = queue.popleft()
            if isinstance(item, int):
                known.append(item)
            elif isinstance(item, OperationRequest):
                new.append(item)
            elif not isinstance(item, WorkerMessage):
                item()
            else:
                self._send_announce(new, known)
                if isinstance(item, LeaveRound):
                    self._send_activity()
                    self._trace_sender.send_all()
                self._control.send(item)
        self._send_announce(new, known)

    def _send_announce(self, new: list[OperationRequest], known: list[int]) -> None:
        if new or known:
            self._control.send(AnnounceOperations(tuple(new), tuple(known)))
            new.clear()
            known.clear()

    def _send_heartbeat(self) -> None:
        self._loop.call_later(HEARTBEAT_INTERVAL_S, self._send_heartbeat)
        self._control.send(RankHeartbeat(time.monotonic_ns()))
        self._send_activity()

    def _send_activity(self) -> None:
        if self._report_activity:
            channels, named = self._open_channels.channels, self._open_channels.named_operations.values()
            report = make_activity_report(self._recorder, channels, (self.waits, *named), self._offset_ns)
            self._control.send(report)

    def _on_liveness_closed(self) -> None:
        unreachable = describe_disconnect(socket_error(self._liveness_fd))
        self._loop.remove_reader(self._liveness_fd)
        self._loop.call_later(REASON_GRACE_S, lambda: self._on_coordinator_gone(unreachable))

    def _on_coordinator_gone(self, unreachable: str) -> None:
        if self._leave_confirmed.is_set():  # the rank has left, or the coordinator has sent the reason
            return
        self.coordinator_is_gone = True
        if self._coordinator_rank >= 0:
            why = unreachable or "it hosted the coordinator, which is gone"
            self._end_round(PeerLost(rank=self._recorder.rank, peer=self._coordinator_rank, why=why))
        else:
            gone = f"the coordinator is gone ({unreachable})" if unreachable else "the coordinator is gone"
            self._end_round(RoundEnded(f"{gone}; look at the output of the launcher"))

    def _on_messages_lost(self, why: str) -> None:
        """Others may wait for what was lost: this rank cannot go on, and tells the coordinator so over the connection
        that still exists."""
        if self._leave_confirmed.is_set():
            return
        self._leave_by_liveness(LeaveRound(LeaveReason.MESSAGES_LOST, why))
        rank = self._recorder.rank
        self._end_round(RoundEnded(f"rank {rank} cannot go on: {why}; check the network, and start a new round"))

    def _leave_by_liveness(self, leave: LeaveRound) -> None:
        """Leave the round over the liveness connection, as the control connection cannot be used."""
        if self._liveness_fd >= 0:
            self._has_left = True  # before the program learns of it: what it would say when it leaves says less
            self._loop.remove_reader(self._liveness_fd)
            send_and_hang_up(self._liveness_fd, encode(leave))

    def _end_round(self, error: RondeError) -> None:
        self._open_channels.abort_all(error)
        self._finish_confirmed.set()
        self._leave_confirmed.set()
        self.end_requests()

    # --- messages of the coordinator -------------------------------------------------------------------------------

    def _on_run_operations(self, run: RunOperations) -> None:
        named = self._open_channels.named_operations.get(run.group)
        if named is not None:
            named.run_agreed(run.operations, run.stragglers)

    def _on_rejected(self, failed: OperationRejected) -> None:
        named = self._open_channels.named_operations.get(failed.group)
        if named is not None:
            error = Mismatch(failed.reason)
            error.joined = failed.joined
            named.reject(failed.name, error)

    def _on_unknown_id(self, unknown: UnknownOperationId) -> None:
        for named in self._open_channels.named_operations.values():
            request = named.resend_in_full(unknown.id)
            if request is not None:
                self._control.send(AnnounceOperations(new=(request,)))

    def _on_revoke_shared_ids(self, revoked: RevokeSharedIds) -> None:
        named = self._open_channels.named_operations.get(revoked.group)
        if named is not None:
            named.revoke_shared(revoked.ids)

    def _on_missing_ranks(self, missing: MissingRanks) -> None:
        named = self._open_channels.named_operations.get(missing.group)
        if named is not None:
            named.set_missing(missing.name, missing.ranks)

    def _on_rank_lost(self, lost: int, reason: str) -> None:
        rank = self._recorder.rank
        self._recorder.record_event(PeerGone(at_ns=time.monotonic_ns(), rank=rank, peer=lost, why=reason))
        self._open_channels.abort_for(lost, reason)
        if self.is_finished:
            self._control.send(LeaveRound(LeaveReason.FINISHED))

    def _on_ranks_lost(self, message: RanksLost) -> None:
        for lost, reason in message.losses:
            self._on_rank_lost(lost, reason)

    def _on_reply(self, reply: GroupsChanged | TimelineReply | ValueDecided) -> None:
        with self.waits.condition:
            self._replies.append(reply)
            self.waits.condition.notify_all()

    def _on_stack_request(self, query: StackRequest) -> None:
        line, stack = dump_stacks()
        self._control.send(StackReply(query.query_id, line, stack))

    def _on_stall_report(self, stalled: StallReport) -> None:
        fields = msgspec.structs.asdict(stalled)
        self._recorder.record_event(StallReported(at_ns=time.monotonic_ns(), rank=self._recorder.rank, **fields))

    def _on_heartbeat_reply(self, answer: RankHeartbeatReply) -> None:
        now_ns = time.monotonic_ns()
        self._num_heartbeat_replies += 1
        if self._num_heartbeat_replies < NUM_INITIAL_HEARTBEATS:
            self._control.send(RankHeartbeat(now_ns))
        if self._clock.add(answer.sent_ns, answer.coordinator_ns, now_ns):
            offset_ns, error_ns = self._clock.offset_ns, self._clock.error_ns(now_ns)
            # An offset below what can be measured is none: the coordinator is on this host.
            self._offset_ns = 0 if abs(offset_ns) <= error_ns else offset_ns
            self._recorder.clock_offset_ns = self._offset_ns
