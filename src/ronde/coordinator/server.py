"""What other threads want the coordinator's thread to do: told in passing, or asked for with an answer.

One open socket per living rank; its end is the end of the rank. Used by the coordinator.

The kernel closes a process's sockets when it dies, however it dies, so an end is seen at once. Lines are added by the
door's thread; everything else is for the coordinator's.

Brings the ranks together, round by round, and speaks for all of them. Run by a launcher, or by rank 0 in a thread.

It only carries out: who is in a round is decided by membership, what happens in it by round. What it adds is the wire
(a door for lifelines, a control server for messages), the clock, and the care that nobody ever waits for it in vain:
whatever ends it, every rank hears Ended or sees its lifeline close.
"""

from __future__ import annotations

import enum
import logging
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from ronde.coordinator.membership import JoinDecision, LeaveReason, LostPeer, MembershipEnd, PendingRound
from ronde.coordinator.negotiation import Send
from ronde.coordinator.queries import MemberInspector, RankQueries, StackCollection, TraceCollector
from ronde.coordinator.rounds import NEVER_NS, Round, RoundSettings
from ronde.net.addresses import format_address
from ronde.net.connect import describe_disconnect
from ronde.net.control import ControlServer
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.net.messages import (
    LEAVE_GRACE_S,
    LIVENESS,
    ActivityReport,
    EndRound,
    JoinRefused,
    JoinRound,
    LeaveConfirmed,
    LeaveRound,
    RankHeartbeat,
    RankHeartbeatReply,
    StackReply,
    StackRequest,
    StallReport,
    TimelineRequest,
    TraceBatch,
    TraceFlushed,
    WorkerMessage,
    encode_admitted,
    encode_refused,
    encode_retry,
)
from ronde.observe.activity import JobActivity
from ronde.observe.stacks import RankStack
from ronde.observe.stalls import Whereabouts
from ronde.settings import Settings
from ronde.text import format_ranks, shorten
from ronde.types import Deadline, Member

__all__ = [
    "CoordinatorServer",
    "DeferredCalls",
    "LivenessConnection",
    "LivenessConnections",
    "LivenessState",
    "Watcher",
    "is_closed",
]

CALL_TIMEOUT_S = 10.0
"""The thread answers within milliseconds, unless the host is overloaded."""
ALIVE_CHECK_S = 0.1

T = TypeVar("T")


class DeferredCalls:
    """Calls that wait for their thread. Every call gets the time at which it is made."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._calls: queue.SimpleQueue[Callable[[int], None]] = queue.SimpleQueue()

    def defer(self, function: Callable[[int], None], *, notify: bool = True) -> None:
        """Let the thread do this. From every thread."""
        self._calls.put(function)
        if notify:
            self._notify()

    def run_pending(self, now_ns: int) -> None:
        """Do all that waits. For the thread itself."""
        while not self._calls.empty():
            self._calls.get()(now_ns)

    def call(self, function: Callable[[int], T], is_running: Callable[[], bool]) -> T:
        """What the thread answers. When it does not run (any more), nobody else touches its state, and the question is
        answered here."""
        answer = _DeferredResult(function)
        self.defer(answer.run)
        deadline = Deadline(CALL_TIMEOUT_S)
        while not answer.done.wait(ALIVE_CHECK_S):
            if not is_running():
                return function(time.monotonic_ns())
            if deadline.expired:
                raise TimeoutError(f"the coordinator did not answer within {CALL_TIMEOUT_S:g} s; its host is very busy")
        return answer.get()


class _DeferredResult(Generic[T]):
    """On its way from one thread to another."""

    def __init__(self, function: Callable[[int], T]) -> None:
        self.done = threading.Event()
        self._function = function
        self._values: list[T] = []
        self._error: Exception | None = None

    def run(self, now_ns: int) -> None:
        try:
            self._values.append(self._function(now_ns))
        except Exception as error:  # the edge between threads: who asked must learn of it, and nobody else
            self._error = error
        self.done.set()

    def get(self) -> T:
        if self._error is not None:
            raise self._error
        return self._values[0]


_CLOSED_EVENTS = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class LivenessConnection(Protocol):
    """The part of a socket that is needed here."""

    def fileno(self) -> int:
        """For pollers."""

    def recv(self, num_bytes: int, /) -> bytes:
        """Read what came."""

    def close(self) -> None:
        """Hang up."""


class Watcher(Protocol):
    """Who polls the lines: the control server."""

    def watch(self, fd: int) -> None:
        """Wake when it is readable."""

    def unwatch(self, fd: int) -> None:
        """No longer."""


class LivenessState(enum.Enum):
    """Of one rank: nobody is there, a living process is, or one whose line has ended but who is not given up yet."""

    ABSENT = enum.auto()
    ALIVE = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True)
class _RankConnection:
    """Who holds a rank's seat."""

    connection: LivenessConnection
    attempt: str
    """The same for all connections that one process makes in one attempt to join."""
    watched: bool = False
    """Its end will be noticed: it is polled, and has not ended yet."""


class LivenessConnections:
    """Which ranks are connected. A rank holds its seat from add() until it is released, or until the same process calls
    anew because its handshake broke."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._lock = threading.Lock()
        self._rank_connections: dict[int, _RankConnection] = {}
        self._watched: dict[
            int, tuple[int, LivenessConnection]
        ] = {}  # by descriptor, those that are watched; also of released ranks
        self._new: list[tuple[int, LivenessConnection]] = []
        self._closed = False

    def state(self, rank: int, attempt: str) -> LivenessState:
        """Who holds the rank's seat, seen by a caller: for it, a seat of its own attempt is free. From every thread."""
        with self._lock:
            return self._state(rank, attempt)

    def drop_attempt(self, rank: int, attempt: str) -> bool:
        """The caller makes this attempt anew: its former connection, if it had one, no longer counts, and its end means
        nothing. Returns whether there was one. From every thread."""
        with self._lock:
            holder = self._rank_connections.get(rank)
            if holder is None or holder.attempt != attempt:
                return False
            del self._rank_connections[rank]
            return True

    def add(self, rank: int, connection: LivenessConnection, attempt: str) -> LivenessState:
        """Give the rank's seat to this line if it is free, else close the line; returns how the seat was. From every
        thread."""
        with self._lock:
            seat = self._state(rank, attempt)
            if self._closed or seat is not LivenessState.ABSENT:
                connection.close()
            else:
                self._rank_connections[rank] = _RankConnection(connection, attempt)
                self._new.append((rank, connection))
            return seat

    def watched_ranks(self) -> frozenset[int]:
        """The ranks whose death would be noticed."""
        with self._lock:
            return frozenset(rank for rank, holder in self._rank_connections.items() if holder.watched)

    def watch_new(self) -> None:
        """Begin to watch the lines added since the last call."""
        if not self._new:  # looked at on every message: without the lock, as a new line also wakes the watcher
            return
        with self._lock:
            new, self._new = self._new, []
        for rank, line in new:
            self._watched[line.fileno()] = (rank, line)
            self._watcher.watch(line.fileno())
            with self._lock:
                holder = self._rank_connections.get(rank)
                if holder is not None and holder.connection is line:
                    holder.watched = not is_closed(line)  # one that has ended is found by the next poll

    def find_closed(self, readable: Iterable[int]) -> dict[int, MembershipEnd]:
        """Close those of the readable lines that have ended; returns the ranks among them that hold their seat, and
        how each ended."""
        ended = {}
        for fd in [fd for fd in readable if fd in self._watched]:
            rank, line = self._watched[fd]
            if not is_closed(line):
                line.recv(4096)  # nobody is meant to write here; what is left unread would wake us for ever
                continue
            del self._watched[fd]
            self._watcher.unwatch(fd)
            how = _describe_close(line)
            line.close()
            with self._lock:
                holder = self._rank_connections.get(rank)
                if holder is not None and holder.connection is line:
                    holder.watched = False
                    ended[rank] = how
        return ended

    def release(self, rank: int) -> None:
        """The rank has said goodbye or was given up: the end of its line means nothing any more, its seat is free. A
        line that came since the last watch_new() keeps the seat: it is not the one that was given up."""
        with self._lock:
            if not any(new == rank for new, _ in self._new):
                self._rank_connections.pop(rank, None)

    def close(self) -> None:
        """Hang up on everybody, when nobody polls any more. Idempotent."""
        with self._lock:
            self._closed = True
            lines = [line for _, line in (*self._watched.values(), *self._new)]
            self._watched.clear()
            self._new.clear()
        for line in lines:
            line.close()

    def _state(self, rank: int, attempt: str) -> LivenessState:
        holder = self._rank_connections.get(rank)
        if holder is None or holder.attempt == attempt:
            return LivenessState.ABSENT
        return LivenessState.CLOSED if is_closed(holder.connection) else LivenessState.ALIVE


def is_closed(connection: LivenessConnection) -> bool:
    """Whether the process at the other end is gone, or has hung up."""
    poll = select.poll()
    try:
        poll.register(connection.fileno(), _CLOSED_EVENTS)
    except ValueError:  # closed here already
        return True
    return bool(poll.poll(0))


def _describe_close(connection: LivenessConnection) -> MembershipEnd:
    """A process that ends closes its line; who cannot be reached any more leaves it to the kernel to give up."""
    try:
        connection.recv(1)
    except OSError as error:
        cut = describe_disconnect(error.errno or 0)
        if cut:
            return MembershipEnd(LeaveReason.UNREACHABLE, cut)
    return MembershipEnd(LeaveReason.PROCESS_GONE)


REASON_GRACE_NS = 10_000_000
"""A rank has died: its own last words may be a moment behind."""
EXIT_REPORT_GRACE_NS = 200_000_000
"""Its line has ended: the launcher is about to say how."""
CLOSE_TIMEOUT_S = 5.0
"""Beyond all waits that were asked for: how long the thread may take to close its sockets."""

logger = logging.getLogger("ronde.coordinator")
stall_logger = logging.getLogger("ronde.stall")


class _ReportedExit(NamedTuple):
    """A rank whose end was seen; it is told to the others a moment later."""

    due_ns: int
    end: MembershipEnd


class CoordinatorServer:
    """Serves `rounds` rounds of `size` ranks; None for as many as come. start() it, and close() it at the end.

    It listens from the beginning, so that ranks may call before start().
    """

    def __init__(
        self, host: str, port: int, size: int, key: JobKey, *, settings: Settings, rounds: int | None = 1
    ) -> None:
        self._size = size
        self._shutdown_s = settings.shutdown_s
        self._rounds_left = rounds
        self._num_rounds = 0
        self._first_lost: tuple[int, MembershipEnd] | None = None
        """Of the rounds that are over."""
        self._last_whereabouts: Whereabouts | None = None
        """Of the same round."""
        self._lost_peers: dict[int, LostPeer] = {}
        self._round: Round | None = None
        self._member_inspector = MemberInspector()
        self._queries = RankQueries(size, self._member_inspector.process_state)
        # The ranks' own clocks began a little earlier; whoever runs out of time should hear why, and from here.
        self._pending_round = PendingRound(size, settings.start_s - min(1.0, 0.1 * settings.start_s))
        self._round_settings = RoundSettings(
            fusion_bytes=settings.fusion_bytes,
            stall_s=settings.stall_s,
            leave_grace_s=min(LEAVE_GRACE_S, settings.shutdown_s),
            process_state=self._member_inspector.process_state,
            host_name=self._member_inspector.host_name,
        )
        self._reported_exits: dict[int, _ReportedExit] = {}
        self._exit_grace_ns = EXIT_REPORT_GRACE_NS if rounds is None else REASON_GRACE_NS
        self._logged_reason = ""
        self._close_deadline: Deadline | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        with ExitStack() as opened:
            self._trace_collector = TraceCollector(settings.timeline, settings.timeline_events)
            opened.callback(self._trace_collector.close)
            self._server = ControlServer(host, key)
            opened.callback(self._server.close, 0)
            self._deferred_calls = DeferredCalls(self._server.notify)
            self._liveness = LivenessConnections(self._server)
            # Last: from here on ranks come, and everything they need has to be there.
            self._listener = self._open_listener(host, port, key, settings.heartbeat_s)
            opened.pop_all()
        self.address = format_address(host, self._listener.tcp_port)
        """`host:port` where ranks find it: what goes into RONDE_COORDINATOR."""

    def _open_listener(self, host: str, port: int, key: JobKey, heartbeat_s: float) -> Listener:
        return Listener(
            key,
            unix=False,
            tcp_host=host,
            port=port,
            make_reply=lambda caller: self._refusal_reply(caller) or self._admission_reply(caller),
            on_connection=self._on_connection,
            heartbeat_s=heartbeat_s,
        )

    def start(self, host_names: Sequence[str] = ()) -> None:
        """Begin to serve, in a thread. A launcher knows by what names its user calls the hosts, here by rank."""
        self._member_inspector.host_names = host_names
        # Owned by the coordinator. Touches all state but for what the door's thread reads: the lifelines, which have a
        # lock, and whether rounds are left. Other threads reach it by self._events.
        self._thread = threading.Thread(target=self._serve, name="ronde-coordinator", daemon=True)
        self._thread.start()

    def rank_exited(self, rank: int, why: str) -> None:
        """A rank's process has ended, says who started it. From every thread; also when the rank had left before."""
        self._deferred_calls.defer(lambda now_ns: self._on_process_exit(rank, why, now_ns))

    def first_lost(self) -> tuple[int, MembershipEnd] | None:
        """The first rank that was lost in the newest round that lost one, and how. From every thread.

        Its peers may have ended before it: they were told of the loss while it was still printing its traceback.
        """
        current = self._round
        return (current.first_lost if current is not None else None) or self._first_lost

    def whereabouts(self) -> Whereabouts | None:
        """Where ranks were when the rank of first_lost() failed, if that was for an operation. From every thread."""

        def find(now_ns: int) -> Whereabouts | None:
            current = self._round
            lost_now = current is not None and current.first_lost is not None
            return current.whereabouts() if current is not None and lost_now else self._last_whereabouts

        return self._deferred_calls.call(find, self._is_running)

    def lost_peers(self) -> dict[int, LostPeer]:
        """By rank, those that failed because another rank was gone, in the newest round. From every thread."""
        return dict(self._lost_peers)

    def activity(self) -> JobActivity:
        """How all ranks are. From every thread."""
        return self._deferred_calls.call(
            lambda now_ns: self._queries.activity(self._pending_round, now_ns), self._is_running
        )

    def collect_stacks(self, deadline: Deadline) -> tuple[RankStack, ...]:
        """Where the programs of all ranks are, as far as they answer before the deadline. From every thread."""
        poll = StackCollection()

        def ask(now_ns: int) -> None:
            for rank in self._queries.begin_stack_query(poll):
                self._server.send(rank, StackRequest(poll.query_id))

        self._deferred_calls.call(ask, self._is_running)
        poll.done.wait(deadline.remaining_s)
        return self._deferred_calls.call(
            lambda now_ns: self._queries.end_stack_query(poll, self._pending_round), self._is_running
        )

    def wait(self, timeout_s: float) -> bool:
        """Wait until all rounds were served; whether they were."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self._is_running()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """End. If it serves a counted number of rounds, members of the last one get shutdown_s to leave before."""
        with self._lock:
            if self._close_deadline is None:
                self._close_deadline = Deadline(0.0 if self._rounds_left is None else self._shutdown_s)
        self._server.notify()
        if self._thread is None:
            self._close_all()
        elif not self.wait(self._close_deadline.remaining_s + CLOSE_TIMEOUT_S):
            logger.error("the coordinator's thread did not end; its sockets stay open")

    def __enter__(self) -> CoordinatorServer:
        """Itself, started."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    # --- the door's thread -----------------------------------------------------------------------------------------

    def _refusal_reply(self, request: ConnectionRequest) -> bytes | None:
        """Why a caller cannot come in, if so."""
        rank = request.rank
        if request.purpose != LIVENESS:
            return encode_refused(f"the coordinator has no use for {shorten(request.purpose)!r}")
        if not 0 <= rank < self._size:
            return encode_refused(
                f"there is no rank {rank} among the {self._size} of this job; check RONDE_RANK and RONDE_SIZE"
            )
        seat = self._liveness.state(rank, request.detail)
        if seat is LivenessState.ALIVE:
            self._deferred_calls.defer(lambda now_ns: self._on_duplicate(rank))
            return encode_refused(f"another process already is rank {rank} of this job; give each its own RONDE_RANK")
        if seat is LivenessState.CLOSED or self._rounds_left == 0 or self._close_deadline is not None:
            return encode_retry("the round before is not over")
        return None

    def _admission_reply(self, request: ConnectionRequest) -> bytes:
        # Before it hears the greeting, so that it is known before its Join comes.
        again = self._liveness.drop_attempt(request.rank, request.detail)
        self._deferred_calls.defer(lambda now_ns: self._on_admitted(request.rank, again), notify=False)
        return encode_admitted(self._server.port)

    def _on_connection(self, request: ConnectionRequest, connection: LivenessConnection) -> bool:
        """Take in a caller that was welcomed. Its Join may have come before; the round waits for this."""
        if self._liveness.add(request.rank, connection, request.detail) is LivenessState.ALIVE:
            self._deferred_calls.defer(lambda now_ns: self._on_duplicate(request.rank))
        self._server.notify()
        return True

    # --- the coordinator's thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        why = "the coordinator was closed by its host (the launcher, or rank 0)"
        try:
            while self._is_needed():
                self._step()
        except Exception as error:  # the thread's edge: nobody may wait for a coordinator that is no more
            logger.exception("the coordinator broke; the round ends")
            why = f"the coordinator broke: {error!r}"
        finally:
            self._send_end(why)
            self._close_all()

    def _is_needed(self) -> bool:
        if self._close_deadline is None:
            return self._rounds_left != 0 or self._round is not None
        return self._round is not None and not self._close_deadline.expired

    def _step(self) -> None:
        """Hear everything that was said, then act on it once: what came together may travel together."""
        messages = self._server.poll(self._poll_timeout_s(time.monotonic_ns()))
        now_ns = time.monotonic_ns()
        self._deferred_calls.run_pending(now_ns)
        self._liveness.watch_new()
        for rank, message in messages:
            self._on_message(rank, message, now_ns)
        for rank, how in self._liveness.find_closed(self._server.readable()).items():
            self._reported_exits.setdefault(rank, _ReportedExit(now_ns + self._exit_grace_ns, how))
        if self._reported_exits:
            self._declare_lost(now_ns)
        self._start_round_if_ready(now_ns)
        if self._round is not None:
            self._send(self._round.advance(now_ns))
            for rank in self._round.vanished & self._round.present:
                self._reported_exits.setdefault(
                    rank, _ReportedExit(now_ns + self._exit_grace_ns, MembershipEnd(LeaveReason.PROCESS_GONE))
                )
            self._send(self._trace_collector.close_if_complete(self._round.present))
            if not self._round.present:
                self._end_round()

    def _poll_timeout_s(self, now_ns: int) -> float:
        due_ns = [death.due_ns for death in self._reported_exits.values()]
        if self._round is not None:
            due_ns.append(self._round.next_due_ns(now_ns))
        if self._pending_round.joins:
            due_ns.append(self._pending_round.first_join_ns + int(self._pending_round.start_timeout_s * 1e9))
        if self._close_deadline is not None:
            due_ns.append(now_ns + int(self._close_deadline.remaining_s * 1e9))
        # Rounded up, or the last millisecond would be spent polling.
        return min(60.0, max(0.0, (min(due_ns, default=NEVER_NS) - now_ns) / 1e9 + 0.0005))

    def _on_message(self, rank: int, message: WorkerMessage, now_ns: int) -> None:
        here = self._round is not None and rank in self._round.present
        if here and self._round is not None and self._round.handle(rank, message, now_ns):
            return
        if isinstance(message, RankHeartbeat):
            self._server.send(rank, RankHeartbeatReply(message.sent_ns, time.monotonic_ns()))
        elif isinstance(message, ActivityReport):
            if here:
                self._queries.record_activity(rank, message, now_ns)
        elif isinstance(message, StackReply):
            self._queries.add_stack_reply(rank, message)
        elif isinstance(message, TraceBatch | TimelineRequest | TraceFlushed):
            self._send(
                self._trace_collector.handle(rank, message, self._round.present if self._round is not None else ())
            )
        elif isinstance(message, LeaveRound):
            self._on_leave(rank, message, now_ns)
        elif isinstance(message, JoinRound) and not here:
            self._on_join(rank, message, now_ns)
        else:  # late words of a rank that was given up, or of one that is out of step
            logger.info("dropped %s of rank %d, which is not said now", type(message).__name__, rank)

    def _on_join(self, rank: int, message: JoinRound, now_ns: int) -> None:
        if not 0 <= rank < self._size:
            self._server.send(rank, JoinRefused(f"there is no rank {rank} among the {self._size} of this job"))
        elif self._rounds_left == 0:
            self._server.send(rank, JoinRefused("the only round of this coordinator has begun without it"))
        else:
            self._pending_round.join(rank, message, now_ns)

    def _on_leave(self, rank: int, message: LeaveRound, now_ns: int) -> None:
        departure = MembershipEnd.from_leave_message(message)
        if departure.lost_peer is not None:
            self._lost_peers[rank] = LostPeer(departure.lost_peer, departure.description)
        self._reported_exits.pop(rank, None)
        self._liveness.release(rank)
        if self._round is not None and rank in self._round.present:
            if departure.is_loss:
                self._round.member_lost(rank, departure)
            else:
                self._round.member_left(rank, departure, now_ns)
        self._pending_round.withdraw(rank, departure.detail or "it gave up")
        self._server.send(rank, LeaveConfirmed())

    def _on_admitted(self, rank: int, again: bool) -> None:
        """A process was welcomed. `again`: it had a connection before, in the same attempt, and has given that up."""
        if again:
            self._reported_exits.pop(rank, None)
        self._pending_round.connected(rank)

    def _on_process_exit(self, rank: int, why: str, now_ns: int) -> None:
        """From the launcher. It knows better than the kernel's "gone", but not as well as the rank itself."""
        if self._is_joining_or_member(rank):
            self._reported_exits[rank] = _ReportedExit(
                now_ns + REASON_GRACE_NS, MembershipEnd(LeaveReason.PROCESS_ENDED, why)
            )
        else:
            self._pending_round.exited(rank, why)

    def _is_joining_or_member(self, rank: int) -> bool:
        return rank in self._pending_round.joins or (self._round is not None and rank in self._round.present)

    def _on_duplicate(self, rank: int) -> None:
        logger.warning("a second process says that it is rank %d; it was sent away", rank)
        if self._round is None or rank not in self._round.present:
            self._pending_round.duplicate(rank)

    def _declare_lost(self, now_ns: int) -> None:
        """Those whose time for last words is over are lost."""
        for rank in [rank for rank, death in self._reported_exits.items() if death.due_ns <= now_ns]:
            departure = self._reported_exits.pop(rank).end
            if self._is_joining_or_member(rank):
                logger.warning("rank %d is lost: %s", rank, departure.description)
                self._pending_round.exited(rank, departure.description)
                if self._round is not None and rank in self._round.present:
                    self._round.member_lost(rank, departure)
            self._liveness.release(rank)
            self._server.drop_rank(rank)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _start_round_if_ready(self, now_ns: int) -> None:
        if not self._pending_round.joins:
            return
        busy = frozenset(self._round.present) if self._round is not None else frozenset[int]()
        decision = self._pending_round.decide(now_ns, self._liveness.watched_ranks(), busy)
        if decision is None:
            return
        if decision.reason != self._logged_reason:
            self._logged_reason = decision.reason
            logger.info("round %d: %s", self._num_rounds, decision.reason)
        if decision.members is not None:
            self._start_round(decision, decision.members, now_ns)
        elif decision.refused:
            refused = self._pending_round.clear(decision)
            self._send([Send(refused, JoinRefused(decision.reason))])
            for rank in refused if decision.exited else ():
                self._lost_peers[rank] = LostPeer(decision.exited[0], f"StartFailed: {decision.reason}")
            for rank in refused:  # each may try anew, and its former connection is not to be in its way
                self._liveness.release(rank)

    def _start_round(self, decision: JoinDecision, members: tuple[Member, ...], now_ns: int) -> None:
        if self._round is not None:
            self._end_round()
        groups = self._pending_round.joins[0].groups
        self._member_inspector.begin(self._pending_round.joins.values())
        self._pending_round.clear(decision)
        self._lost_peers.clear()
        self._round = Round(members, groups, self._round_settings, now_ns)
        self._round.start(self._num_rounds)
        self._queries.start_round(self._round, self._num_rounds, now_ns)
        self._num_rounds += 1
        if self._rounds_left is not None:
            self._rounds_left -= 1

    def _end_round(self) -> None:
        assert self._round is not None
        logger.info("round %d is over", self._num_rounds - 1)
        if self._round.first_lost is not None:
            self._first_lost, self._last_whereabouts = self._round.first_lost, self._round.whereabouts()
        self._trace_collector.end_round()
        self._round = None
        self._logged_reason = ""

    def _send(self, sends: list[Send]) -> None:
        send = self._server.send
        for ranks, message in sends:
            if type(message) is StallReport:
                stall_logger.warning("%s", message.report)
            for rank in ranks:
                send(rank, message)

    def _send_end(self, why: str) -> None:
        try:
            if self._round is not None and self._round.present:
                logger.info("the round ends with %s still in it: %s", format_ranks(self._round.present), why)
                self._send([Send(tuple(self._round.present), EndRound(why))])
            self._send([Send(tuple(self._pending_round.joins), JoinRefused(why))])
        except Exception:  # they learn it from their lifelines
            logger.exception("the end could not be told")

    def _close_all(self) -> None:
        self._listener.close()
        self._server.close()  # sends what was said last: who also sees the end of its line should hear why first
        self._liveness.close()
        self._queries.close()
        self._trace_collector.close()
