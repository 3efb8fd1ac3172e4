"""The coordinator on the network: sockets, thread and clock around CoordinatorCore.

Run by the launcher, or by rank 0 in a thread of its own. It only carries out what the core decides, and makes sure that
no rank waits for it in vain: however it ends, every rank gets EndRound or sees its liveness connection close.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from ronde.coordinator.coordinator import (
    MAX_DETAIL_CHARS,
    CoordinatorCore,
    Event,
    MessageReceived,
    MessagesLost,
    ProcessExited,
    RankConnected,
    RankDisconnected,
)
from ronde.coordinator.negotiation import Send
from ronde.coordinator.queries import OnStacks
from ronde.coordinator.round_planning import ElasticLimits, Membership
from ronde.coordinator.rounds import LostPeer, MembershipEnd
from ronde.errors import ProtocolError
from ronde.net.addresses import format_address, host_identity
from ronde.net.connect import Connection, describe_disconnect, is_closed
from ronde.net.control_connection import ControlServer
from ronde.net.event_loop import LoopThread, Timer
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.net.messages import (
    AdmissionStatus,
    LeaveReason,
    LeaveRound,
    StallReport,
    WorkerMessage,
    decode_from_worker,
    encode,
)
from ronde.net.open_files import check_open_files, explain_open_files, raise_open_files_limit
from ronde.observe.activity import JobActivity
from ronde.observe.stacks import pid_namespace, process_state
from ronde.observe.stalls import FailureStacks
from ronde.settings import Settings
from ronde.text import shorten
from ronde.types import Deadline, Member

CLOSE_TIMEOUT_S = 5.0
"""How long the thread may take to close its sockets, after all other waits."""

logger = logging.getLogger("ronde.coordinator")
stall_logger = logging.getLogger("ronde.stall")


class CoordinatorServer:
    """Serves `rounds` rounds of `size` ranks, None for any number; or, with `limits`, those of an elastic job.

    It listens from the beginning and answers from start() to close().

    In an elastic job `on_membership` is called in the server's thread whenever something about the rounds has changed,
    and all that is said here about ranks, but for the results of first_lost() and the queries, is about workers: the
    ranks in requests, host names and exits are their numbers.
    """

    def __init__(
        self,
        host: str,
        port: int,
        size: int,
        key: JobKey,
        *,
        settings: Settings,
        rounds: int | None = 1,
        limits: ElasticLimits | None = None,
        on_membership: Callable[[Membership], None] | None = None,
        reports_losses: bool = True,
    ) -> None:
        self._close_wait_s = settings.shutdown_s if rounds is not None else 0.0
        self._close_deadline: Deadline | None = None
        self._closed = False
        self._connections: dict[str, tuple[int, Connection]] = {}
        """The rank and the socket of every open liveness connection, by the name of the control connection with it."""
        self._names_by_rank: dict[int, set[str]] = {}
        """The same connections by their rank."""
        self._admitted: dict[tuple[int, str], str] = {}
        """By rank and attempt, the name of a worker that was admitted and is about to have a liveness connection."""
        self._advance_scheduled = False
        self._timer: Timer | None = None
        self.thread = LoopThread("ronde-coordinator")
        """The only thread that touches the core and the sockets. What is about the job may run in its loop as well."""
        self._loop = self.thread.loop
        with explain_open_files("the coordinator cannot start"), ExitStack() as opened:
            opened.callback(self._loop.close)
            raise_open_files_limit()
            check_open_files()
            self._core = CoordinatorCore(
                size,
                settings,
                rounds=rounds,
                limits=limits,
                on_membership=on_membership or (lambda membership: None),
                process_state=_process_state,
                reports_losses=reports_losses,
            )
            opened.callback(self._core.close, "")
            self._control = ControlServer(host, key)
            opened.callback(self._control.close, 0)
            self._listener = Listener(
                key,
                unix=False,
                tcp_host=host,
                port=port,
                loop=self._loop,
                make_reply=self._make_reply,
                on_connection=self._on_connection,
                heartbeat_s=settings.heartbeat_s,
            )
            opened.pop_all()
        self.address = format_address(host, self._listener.tcp_port)
        """`host:port` where ranks connect: the value of RONDE_COORDINATOR."""

    def start(self, host_names: Sequence[str] | Mapping[int, str] = ()) -> None:
        """Serve in a thread. A launcher gives the user's names for the hosts, by rank."""
        self._core.host_names = dict(host_names if isinstance(host_names, Mapping) else enumerate(host_names))
        self._control.start_receiving(self._loop, self._on_message, self._on_messages_lost)
        self.thread.start(self._serve)

    # --- for all threads -------------------------------------------------------------------------------------------

    def rank_exited(self, rank: int, how: str) -> None:
        """The launcher reports that a rank's process has ended, also if the rank had left before."""
        self._loop.call_soon_threadsafe(lambda: self._handle(ProcessExited(rank, how)))

    def set_host_name(self, number: int, name: str) -> None:
        """The launcher of an elastic job starts a worker on the host of this name."""
        self._loop.call_soon_threadsafe(lambda: self._core.host_names.__setitem__(number, name))

    def set_num_starting(self, count: int) -> None:
        """The launcher of an elastic job has started so many workers that are not in a round and are not ready for the
        next one yet."""

        def set_count() -> None:
            self._core.set_num_starting(count)
            self._schedule_advance()

        self._loop.call_soon_threadsafe(set_count)

    def first_lost(self) -> tuple[int, MembershipEnd] | None:
        """As CoordinatorCore.first_lost, failure_stacks and lost_peers."""
        return self.thread.call(lambda: self._core.first_lost)

    def failure_stacks(self) -> FailureStacks | None:
        return self.thread.call(lambda: self._core.failure_stacks)

    def lost_peers(self) -> dict[int, LostPeer]:
        return self.thread.call(lambda: dict(self._core.lost_peers))

    def activity(self) -> JobActivity:
        return self.thread.call(lambda: self._core.queries.activity(time.monotonic_ns()))

    def request_stacks(self, deadline: Deadline, on_done: OnStacks) -> None:
        """Call on_done in the server's thread with the stacks of all ranks that answer before the deadline."""

        def start() -> None:
            due_ns = time.monotonic_ns() + int(deadline.remaining_s * 1e9)
            self._send(self._core.start_stack_query(due_ns, on_done))
            self._schedule_advance()

        self.thread.call(start)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all rounds were served; returns whether they were."""
        return self.thread.join(timeout_s)

    def close(self) -> None:
        """End. If it serves a counted number of rounds, members of the last one get shutdown_s to leave before. Then
        every rank that is still there gets EndRound. Idempotent."""
        if not self.thread.is_running():
            self._close_all("")
            return
        self._loop.call_soon_threadsafe(self._begin_close)
        if not self.thread.join(self._close_wait_s + CLOSE_TIMEOUT_S):
            logger.error("the coordinator's thread did not end; its sockets stay open")

    # --- in its thread ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        reason = "the coordinator was closed by its host (the launcher, or rank 0)"
        try:
            self._schedule_advance()  # the time in which the first worker may come begins
            self._loop.run_until(lambda: not self._is_needed())
        except Exception as error:  # the end of the thread: no rank may wait for a coordinator that has failed
            logger.exception("the coordinator failed; the round ends")
            reason = f"the coordinator failed: {error!r}"
        finally:
            self._close_all(reason)

    def _is_needed(self) -> bool:
        if self._close_deadline is None:
            return not self._core.is_finished
        return (self._core.has_round or self._core.must_tell_end) and not self._close_deadline.expired

    def _begin_close(self) -> None:
        if self._close_deadline is None:
            self._core.stop_admitting()
            self._close_deadline = Deadline(self._close_wait_s)
            self._loop.call_later(self._close_wait_s, lambda: None)  # so that the loop looks at the deadline

    def _close_all(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._send(self._core.close(reason))
        except Exception:  # the ranks notice that their connections are closed
            logger.exception("the ranks could not be informed of the end")
        self._listener.close()
        self._control.close()  # before the connections: a rank should get the reason before it sees the connection end
        for _, connection in self._connections.values():
            connection.close()
        self._loop.close()

    def _handle(self, event: Event) -> None:
        sends = self._core.handle(event, time.monotonic_ns())
        if sends:
            self._send(sends)
        if not self._advance_scheduled:
            self._schedule_advance()

    def _schedule_advance(self) -> None:
        """Advance after all other events that are there now."""
        self._advance_scheduled = True
        self._loop.call_soon(self._advance)

    def _advance(self) -> None:
        self._advance_scheduled = False
        now_ns = time.monotonic_ns()
        self._send(self._core.advance(now_ns))
        due_s = self._core.next_due_ns(now_ns) / 1e9
        if self._timer is None or not self._timer.pending or self._timer.due_s > due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(due_s - time.monotonic(), self._advance)

    def _send(self, sends: list[Send]) -> None:
        for ranks, message in sends:
            if type(message) is StallReport:
                stall_logger.warning("%s", message.report)
            senders = self._core.senders
            self._control.send_to_all([senders[rank] for rank in ranks if rank in senders], message)

    def _on_message(self, sender: str, round: int, message: WorkerMessage) -> None:
        self._handle(MessageReceived(sender, round, message))

    def _on_messages_lost(self, sender: str, num_lost: int) -> None:
        self._handle(MessagesLost(sender, num_lost))

    # --- liveness connections --------------------------------------------------------------------------------------

    def _make_reply(self, request: ConnectionRequest) -> bytes:
        for name in list(self._names_by_rank.get(request.rank, ())):
            while name in self._connections and is_closed(self._connections[name][1]):
                self._on_liveness_closed(name)  # the loop has not come to it yet
        former = self._core.senders.get(request.rank, "")
        admission = self._core.admit(request, self._control.port)
        if admission.status is AdmissionStatus.ADMITTED:
            self._control.forget(former)
            self._admitted[request.rank, request.detail] = admission.sender
        return encode(admission)

    def _on_connection(self, request: ConnectionRequest, connection: Connection) -> bool:
        name = self._admitted.pop((request.rank, request.detail), None)
        if name is None:  # it was refused, or has to retry
            connection.close()
            return True
        connection.setblocking(False)
        self._connections[name] = (request.rank, connection)
        self._names_by_rank.setdefault(request.rank, set()).add(name)
        self._loop.add_reader(connection.fileno(), functools.partial(self._on_liveness_closed, name))
        self._handle(RankConnected(request.rank, name, request.detail))
        return True

    def _on_liveness_closed(self, name: str) -> None:
        """The liveness connection of a rank was closed, or has the last message of one that lost control messages, or
        whose control thread has failed."""
        rank, connection = self._connections[name]
        end = MembershipEnd(LeaveReason.PROCESS_GONE)
        try:
            data = connection.recv(4096)
            if data:
                leave = _decode_leave(data)
                if leave is None:
                    return
                end = MembershipEnd(leave.reason, shorten(leave.detail, MAX_DETAIL_CHARS))
        except BlockingIOError:
            return
        except OSError as error:
            unreachable = describe_disconnect(error.errno or 0)
            if unreachable:
                end = MembershipEnd(LeaveReason.UNREACHABLE, unreachable)
        del self._connections[name]
        self._names_by_rank[rank].discard(name)
        self._loop.remove_reader(connection.fileno())
        connection.close()
        self._handle(RankDisconnected(rank, name, end))


def _decode_leave(data: bytes) -> LeaveRound | None:
    try:
        message = decode_from_worker(data)
    except ProtocolError:
        return None
    return message if isinstance(message, LeaveRound) else None


def _process_state(member: Member) -> str:
    """The state of a rank's process; empty if it cannot be seen because it runs on another host or in a container."""
    is_visible = member.host == host_identity() and member.pid_namespace == pid_namespace() != ""
    return process_state(member.pid) if is_visible else ""
