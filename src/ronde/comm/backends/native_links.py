"""Links of the native backend between hosts: opened when a call first uses them.

A call that wants to send to a member of another host asks for a link, and meanwhile moves no bytes on it. The control
thread connects to that member's listener, which is never busy with an operation, and gives the sockets to the library
on both sides. So opening a link waits for the network and for two control threads, and never for what a member's
program does: in whatever order members open links, they cannot wait for each other.

A link carries bytes in one direction, from the member that opened it. When two members open links to each other at the
same moment, both are needed, and there is nothing to agree on. A member may connect before the other one has opened the
channel; then its sockets are kept until it has.

An abort travels through the coordinator, which tells all other ranks of the first one of each channel.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from ronde.comm.backends.base import ChannelSpec, CurrentCall
from ronde.comm.backends.native_library import EventKind, LinkKind, NativeStatus
from ronde.errors import StartFailed
from ronde.net.connect import ConnectFailed, Connection, PendingConnection, make_record_pair
from ronde.net.event_loop import EventLoop
from ronde.net.handshake import ConnectionRequest, member_request
from ronde.net.keys import JobKey
from ronde.net.listener import Listener
from ronde.net.messages import AbortChannel, ChannelAborted, WorkerMessage
from ronde.settings import Settings
from ronde.types import Deadline, Topology

PURPOSE = "link"
"""What a rank connects for when it opens a link."""
MAX_LINK_SOCKETS = 1024
MIN_ANSWER_S = 10.0
"""The kernel of another host gets at least so long to answer: it is asked after 0, 1, 3 and 7 s."""
MAX_OPENING_S = 1e6
"""Above all deadlines that mean something; a loop cannot wait for centuries."""

EVENT = struct.Struct("@Qiiiiq")
"""rd_event: channel, kind, member, status, detail, deadline_ns."""

logger = logging.getLogger("ronde.comm")


class LinkRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The detail of a connection: one socket of a link."""

    channel: str
    kind: int
    number: int
    """Of the socket, counted from 0."""
    num_sockets: int


class LinkedChannel(Protocol):
    """A channel with members on several hosts."""

    spec: ChannelSpec

    def add_link(self, member: int, kind: int, opened_here: bool, sockets: list[int]) -> None:
        """Give a link to the library, which owns the sockets from here on."""

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        """As BackendChannel.abort."""

    def fail(self, why: str) -> None:
        """End all waits, because this rank itself cannot go on."""

    def current_call(self) -> CurrentCall | None:
        """As BackendChannel.current_call."""

    def abort_with(self, status: int, rank: int, error: int, why: str) -> None:
        """End all waits, because another member has aborted the channel."""


class _LinkId(NamedTuple):
    """One direction of a link between this rank and another."""

    channel: str
    rank: int
    kind: int


@dataclass
class _OpeningLink:
    """A link that this rank opens."""

    channel: LinkedChannel
    pending: dict[int, PendingConnection] = field(default_factory=dict)
    sockets: dict[int, Connection] = field(default_factory=dict)
    problem: str = ""
    """Why it could not be opened in time."""


class NativeLinks:
    """Opens links for all channels of a rank. Methods are for the loop's thread unless they say otherwise."""

    def __init__(
        self,
        topology: Topology,
        listener: Listener,
        key: JobKey,
        settings: Settings,
        loop: EventLoop,
        send: Callable[[WorkerMessage], None],
    ) -> None:
        """`send` gives a message to the coordinator."""
        self._topology = topology
        self._key = key
        self._num_sockets = settings.num_sockets
        self._heartbeat_s = settings.heartbeat_s
        self._loop = loop
        self._send = send
        self._reader, self._writer = make_record_pair()
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # guards the next four; reentrant: a signal handler may close a channel
        self._channels: dict[int, LinkedChannel] = {}
        """By their numbers in the library's events."""
        self._closed: set[str] = set()
        """Ids of channels that were open."""
        self._aborts: dict[str, ChannelAborted] = {}
        """The first abort of each channel, as other members have reported it."""
        self._accepted: dict[_LinkId, list[Connection | None]] = {}
        """Sockets that others have opened, by number: of links that are not complete, or whose channel is not open."""
        self._opening: dict[_LinkId, _OpeningLink] = {}
        loop.add_reader(self._reader.fileno(), self._on_events)
        listener.serve(PURPOSE, self._on_connection)
        listener.on_shortage = self._on_shortage

    @property
    def events_fd(self) -> int:
        """For the library, which sends its events to it."""
        return self._writer.fileno()

    def new_number(self) -> int:
        """A number for a channel. For any thread."""
        return next(self._numbers)

    def add_channel(self, number: int, channel: LinkedChannel) -> None:
        """A channel is open: give it the links that others have opened, and the abort that they have reported. For any
        thread."""
        id = channel.spec.id
        with self._lock:
            self._channels[number] = channel
            abort = self._aborts.get(id)
            for link in [link for link in self._accepted if link.channel == id]:
                self._hand_over(link)
        if abort is not None:
            channel.abort_with(abort.status, abort.rank, abort.error, abort.reason)

    def remove_channel(self, number: int) -> None:
        """A channel was closed. Idempotent; for any thread."""
        with self._lock:
            channel = self._channels.get(number)
            if channel is None or channel.spec.id in self._closed:
                return
            self._closed.add(channel.spec.id)
        self._loop.call_soon_threadsafe(partial(self._forget_channel, number, channel.spec.id))

    def rank_lost(self, rank: int) -> None:
        """Give up the links to a rank and from it. For any thread."""
        self._loop.call_soon_threadsafe(partial(self._drop, lambda link: link.rank == rank))

    def find_problem(self, channel: LinkedChannel, rank: int) -> str:
        """Why the link to a rank could not be opened so far; empty if it is open, or was not needed. For any thread."""
        for link, opening in list(self._opening.items()):
            if link.rank == rank and opening.channel is channel:
                problems = [opening.problem, *[pending.problem for pending in list(opening.pending.values())]]
                return self._describe_problem(rank, next(filter(None, problems), ""))
        return ""

    def channel_aborted(self, abort: ChannelAborted) -> None:
        """Another member has aborted a channel, which may not be open here yet."""
        if abort.status == NativeStatus.PEER_LOST and abort.rank == self._topology.rank and not abort.reason:
            # Its connection with this rank broke. That says no more of this rank than of that one.
            abort = msgspec.structs.replace(abort, rank=abort.reporter)
        with self._lock:
            self._aborts.setdefault(abort.channel, abort)
            found = self._find_channel(abort.channel)
        if found is not None:
            found.abort_with(abort.status, abort.rank, abort.error, abort.reason)

    def close(self) -> None:
        """Close what the library does not own. Called when the loop does not run any more, or by it. Idempotent."""
        self._loop.remove_reader(self._reader.fileno())
        self._drop(lambda link: True)
        self._channels.clear()
        self._reader.close()
        self._writer.close()

    # --- in the loop -------------------------------------------------------------------------------------------------

    def _on_events(self) -> None:
        while True:
            try:
                record = self._reader.recv(EVENT.size)
            except BlockingIOError:
                return
            number, kind, member, status, detail, deadline_ns = EVENT.unpack(record)
            with self._lock:
                channel = self._channels.get(number)
            if channel is None:  # closed meanwhile
                continue
            rank = channel.spec.members[member] if member >= 0 else -1
            if kind == EventKind.LINK_WANTED:
                self._open_link(channel, rank, status, deadline_ns)
            else:
                self._send(AbortChannel(channel.spec.id, status, rank, detail))

    def _forget_channel(self, number: int, id: str) -> None:
        self._on_events()  # the last one may be an abort, because the channel was closed in the middle of a call
        with self._lock:
            self._channels.pop(number, None)
        self._drop(lambda link: link.channel == id)

    def _open_link(self, channel: LinkedChannel, rank: int, kind: int, deadline_ns: int) -> None:
        num_sockets = self._num_sockets if kind == LinkKind.RING else 1
        remaining_s = (deadline_ns - time.monotonic_ns()) / 1e9
        deadline = Deadline(min(max(0.0, remaining_s), MAX_OPENING_S))
        link, opening = _LinkId(channel.spec.id, rank, kind), _OpeningLink(channel)
        self._opening[link] = opening
        for number in range(num_sockets):
            detail = msgspec.json.encode(LinkRequest(channel.spec.id, kind, number, num_sockets)).decode()
            opening.pending[number] = PendingConnection(
                self._loop,
                self._topology.members[rank].tcp_addresses[0],
                self._key,
                member_request(self._topology, PURPOSE, detail),
                deadline,
                partial(self._on_connected, link, number, deadline),
                heartbeat_s=self._heartbeat_s,
                answer_s=max(MIN_ANSWER_S, self._heartbeat_s),
            )

    def _on_connected(
        self, link: _LinkId, number: int, deadline: Deadline, outcome: Connection | ConnectFailed
    ) -> None:
        opening = self._opening[link]
        channel = opening.channel
        if isinstance(outcome, ConnectFailed):  # ahead of the next line: another thread may ask for the problem now
            opening.problem = opening.problem or str(outcome)
        del opening.pending[number]
        if not isinstance(outcome, ConnectFailed):
            opening.sockets[number] = outcome
            if not opening.pending:
                del self._opening[link]
                sockets = [opening.sockets[each].detach() for each in sorted(opening.sockets)]
                channel.add_link(channel.spec.members.index(link.rank), link.kind, True, sockets)
            return
        if deadline.expired:  # the call that wants the link ends by itself
            return
        self._drop_opening(lambda each: each == link)
        if outcome.is_own_fault:
            return self._fail(channel, str(outcome))
        why = self._describe_problem(link.rank, str(outcome))
        channel.abort(lost_rank=link.rank, why=why)
        self._send(AbortChannel(channel.spec.id, NativeStatus.PEER_LOST, link.rank, 0, why))

    def _describe_problem(self, rank: int, problem: str) -> str:
        if not problem:
            return ""
        members, here = self._topology.members, self._topology.rank
        return f"rank {here} on host {members[here].host} cannot reach it on host {members[rank].host}: {problem}"

    def _fail(self, channel: LinkedChannel, why: str) -> None:
        """This rank cannot go on, and no other is to blame."""
        channel.fail(why)
        self._send(AbortChannel(channel.spec.id, NativeStatus.PEER_LOST, self._topology.rank, 0, why))

    def _on_shortage(self, problem: StartFailed) -> None:
        """No connection can be accepted: whoever waits for one would wait in vain."""
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            if channel.current_call() is not None:
                self._fail(channel, str(problem))

    def _on_connection(self, request: ConnectionRequest, sock: Connection) -> None:
        try:
            wanted = msgspec.json.decode(request.detail, type=LinkRequest)
        except msgspec.DecodeError:
            wanted = None
        if (
            wanted is None
            or not 0 <= request.rank < self._topology.size
            or not 0 <= wanted.number < wanted.num_sockets <= MAX_LINK_SOCKETS
            or wanted.kind not in tuple(LinkKind)
        ):
            logger.error("rank %d asked for a link that cannot be; install one ronde", request.rank)
            return sock.close()
        link = _LinkId(wanted.channel, request.rank, wanted.kind)
        with self._lock:
            if wanted.channel in self._closed:
                return sock.close()
            sockets = self._accepted.setdefault(link, [None] * wanted.num_sockets)
            if len(sockets) != wanted.num_sockets:
                return sock.close()
            previous, sockets[wanted.number] = sockets[wanted.number], sock
            if previous is not None:  # a second attempt: the other side has given up the first
                previous.close()
            self._hand_over(link)

    def _find_channel(self, id: str) -> LinkedChannel | None:
        return next((channel for channel in self._channels.values() if channel.spec.id == id), None)

    def _hand_over(self, link: _LinkId) -> None:
        """Give a link that another member has opened to the library, if it is complete and the channel is open."""
        channel = self._find_channel(link.channel)
        if channel is None or None in self._accepted[link] or link.rank not in channel.spec.members:
            return
        sockets = [sock.detach() for sock in self._accepted[link] if sock is not None]
        del self._accepted[link]
        channel.add_link(channel.spec.members.index(link.rank), link.kind, False, sockets)

    def _drop(self, is_dropped: Callable[[_LinkId], bool]) -> None:
        """Close the sockets of links that are not open yet."""
        self._drop_opening(is_dropped)
        with self._lock:
            for link in [link for link in self._accepted if is_dropped(link)]:
                for sock in self._accepted.pop(link):
                    if sock is not None:
                        sock.close()

    def _drop_opening(self, is_dropped: Callable[[_LinkId], bool]) -> None:
        for link in [link for link in self._opening if is_dropped(link)]:
            opening = self._opening.pop(link)
            for pending in opening.pending.values():
                pending.cancel()
            for sock in opening.sockets.values():
                sock.close()
