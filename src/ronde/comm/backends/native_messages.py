"""Messages of the native backend: this rank's endpoint, the links to other ranks, and the channels that share them.

A rank opens a link to another one when it first sends to it: inside a host a piece of shared memory with a Unix socket
that wakes the other side, between hosts a TCP socket. Both were authenticated with the job's key. The library moves the
bytes (native/src/endpoint.h), in the threads that wait and in one of its own, which starts with the first link.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from functools import partial

from ronde.comm.backends.base import (
    LOSS_REASON_S,
    CallTiming,
    ChannelSpec,
    CurrentCall,
    Received,
    RunningCall,
)
from ronde.comm.backends.native_library import (
    EndpointHandle,
    NativeError,
    NativeStatus,
    get_current_message,
    load_library,
    open_endpoint,
    take_received,
    thread_structs,
)
from ronde.comm.call import NO_MEMORY, Call, Memory, MessageFlag, hash_signature, mismatch_error
from ronde.comm.fork_and_signal_safety import forked_error, reentry_error
from ronde.errors import OperationTimeout, PeerLost, ProtocolError, RondeError, RoundEnded, StartFailed
from ronde.net.connect import Connection, describe_disconnect
from ronde.net.event_loop import EventLoop
from ronde.net.listener import ConnectionRequest, Listener
from ronde.net.open_files import is_open_files_error, make_open_files_error
from ronde.net.shared_memory import create_shared_memory, receive_descriptor, send_descriptor
from ronde.types import Deadline, OperationKind, Topology

PURPOSE = "messages"
"""What a rank connects for when it opens a link."""
WAIT_SLICE_S = 0.2
"""A wait of the main thread for a submitted message returns to Python this often, which then runs its signal handlers.
"""
ANY_SOURCE = -1

logger = logging.getLogger("ronde.comm")

Connect = Callable[[int, str, str, Deadline], Connection]
"""Connects to a rank at an address, for a purpose."""


class NativeEndpoint:
    """This rank's end of all links for messages. One per round; without use_links() it is for a rank that sends only to
    itself. Safe from any thread."""

    def __init__(self, rank: int, num_ranks: int, num_local: int = 1) -> None:
        self.rank = rank
        self.library = load_library()
        self.lost: dict[int, str] = {}
        """Ranks that are gone, and why."""
        self.open_handle: EndpointHandle | None = None
        """The library's endpoint: opened when it is needed, None after close()."""
        self._places = (rank, num_ranks, num_local)
        self._closed = False
        self._topology: Topology | None = None
        self._connect: Connect | None = None
        self._linked: set[int] = {rank}
        """Ranks that this one can send to."""
        self._changed = threading.Condition()
        """Guards the handle and `lost`; notified of a loss."""
        self._link_locks = [threading.Lock() for _ in range(num_ranks)]
        self._awaiting_memory: dict[Connection, int] = {}
        """Of the loop: connections whose shared memory has not come yet, and the ranks that they are from."""
        self._loop: EventLoop | None = None
        self._loop_thread = 0

    def use_links(self, topology: Topology, listener: Listener, loop: EventLoop, connect: Connect) -> None:
        """Let other ranks connect to this one, and this one to them."""
        self._topology, self._connect = topology, connect
        listener.serve(PURPOSE, partial(self._on_connection, loop))

    @property
    def handle(self) -> EndpointHandle:
        """Raises RoundEnded when the endpoint is closed."""
        return self.open_handle or self._open()

    def _open(self) -> EndpointHandle:
        with self._changed:
            if self._closed:
                raise RoundEnded("the round is over: shutdown() was called")
            if self.open_handle is None:
                try:
                    handle = open_endpoint(*self._places)
                except NativeError as error:
                    raise RondeError(f"rank {self.rank} cannot open its endpoint for messages: {error}") from None
                for rank in self.lost:
                    self.library.rd_lose_peer(handle, rank)
                self.open_handle = handle
            return self.open_handle

    # --- links -------------------------------------------------------------------------------------------------------

    def ensure_link(self, rank: int, deadline: Deadline) -> None:
        """Open the link to a rank, unless it is open or the rank is gone."""
        if rank in self._linked or rank in self.lost:
            return
        assert self._topology is not None and self._connect is not None
        with self._link_locks[rank]:
            if rank in self._linked:
                return
            peer, hosts = self._topology.members[rank], self._topology.host_indices
            if hosts[rank] != hosts[self.rank]:
                self._add_link(rank, self._connect(rank, peer.tcp_addresses[0], PURPOSE, deadline), opened_here=True)
            else:
                memory = create_shared_memory(f"ronde messages {self.rank} to {rank}", self.library.rd_link_bytes())
                try:
                    sock = self._connect(rank, f"unix:{peer.unix_socket}", PURPOSE, deadline)
                    send_descriptor(sock, memory)
                    self._add_link(rank, sock, memory, opened_here=True)
                finally:
                    os.close(memory)
            self._linked.add(rank)

    def _add_link(self, rank: int, sock: Connection, memory: int = -1, *, opened_here: bool) -> None:
        status = self.library.rd_add_link(self.handle, rank, opened_here, sock.detach(), memory)
        if status not in (NativeStatus.OK, NativeStatus.CLOSED):
            raise RondeError(
                f"rank {self.rank} has no resources for messages with rank {rank} (status {status}); check the limits "
                "of open files and threads (ulimit -n, ulimit -u)"
            )

    def _on_connection(self, loop: EventLoop, request: ConnectionRequest, sock: Connection) -> None:
        """Called by the loop, which must not wait: the descriptor of the memory may still be on its way."""
        rank, self._loop, self._loop_thread = request.rank, loop, threading.get_ident()
        if not 0 <= rank < len(self._link_locks):
            sock.close()
        elif sock.family.name == "AF_UNIX":
            self._awaiting_memory[sock] = rank
            loop.add_reader(sock.fileno(), partial(self._receive_memory, sock, 1.0))  # when it is there
        else:
            self._accept_link(rank, sock)

    def _receive_memory(self, sock: Connection, wait_s: float) -> None:
        assert self._loop is not None
        self._loop.remove_reader(sock.fileno())
        rank = self._awaiting_memory.pop(sock)
        try:
            memory = receive_descriptor(sock, Deadline(wait_s))
        except (StartFailed, ProtocolError) as error:  # it has died, or given up
            logger.debug("rank %d did not open its link for messages: %s", rank, error)
            sock.close()
            return
        except OSError as error:  # the other rank sees that the link is closed
            what = f"rank {self.rank} cannot take the link for messages from rank {rank}"
            logger.error("%s", make_open_files_error(what) if is_open_files_error(error.errno) else f"{what}: {error}")
            sock.close()
            return
        try:
            if os.fstat(memory).st_size == self.library.rd_link_bytes():
                self._accept_link(rank, sock, memory)
            else:
                logger.error("rank %d opened a link for messages with memory of another size; install one ronde", rank)
                sock.close()
        finally:
            os.close(memory)

    def _accept_link(self, rank: int, sock: Connection, memory: int = -1) -> None:
        try:
            self._add_link(rank, sock, memory, opened_here=False)
        except RoundEnded:
            sock.close()
        except RondeError:  # the other rank sees that the link is closed
            logger.exception("a link for messages could not be opened")
            sock.close()

    # --- losses and the end ------------------------------------------------------------------------------------------

    def rank_lost(self, rank: int, why: str) -> None:
        """End all messages to and from a rank. What it had sent can still be received, also over a link whose memory
        has come in the same moment as the loss."""
        if threading.get_ident() == self._loop_thread:
            for sock in [sock for sock, source in self._awaiting_memory.items() if source == rank]:
                self._receive_memory(sock, 0.0)
        with self._changed:
            self.lost.setdefault(rank, why)
            self._changed.notify_all()
            if self.open_handle is not None:
                self.library.rd_lose_peer(self.open_handle, rank)

    def loss_reason(self, rank: int, error: int) -> str:
        """Why a rank is lost. The coordinator knows, and may say it a moment after the end of the links."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self.lost or self._closed, timeout=LOSS_REASON_S)
            return self.lost.get(rank) or describe_disconnect(error) or "its connection closed"

    def flush(self, deadline: Deadline) -> None:
        if self.open_handle is not None:
            self.library.rd_leave_endpoint(self.open_handle, deadline.remaining_s)

    def close(self) -> None:
        """Idempotent."""
        with self._changed:
            self._closed = True
            handle, self.open_handle = self.open_handle, None
            self._changed.notify_all()
        if handle is not None:
            self.library.rd_close_endpoint(handle)
        for sock in self._awaiting_memory:  # the loop has ended
            sock.close()
        self._awaiting_memory.clear()


class NativeMessageChannel:
    """The messages of one group, or of one mailbox. Opening it needs nobody else."""

    def __init__(self, spec: ChannelSpec, endpoint: NativeEndpoint, *, owns_endpoint: bool = False) -> None:
        self.spec = spec
        self.endpoint = endpoint
        self._owns_endpoint = owns_endpoint
        self._pid = os.getpid()
        self.context = hash_signature(spec.id)
        """Messages of channels with the same id meet."""
        self._index = {rank: index for index, rank in enumerate(spec.members)}
        self._end_reason: tuple[int, str] | None = None
        for rank, why in list(endpoint.lost.items()):
            self.rank_lost(rank, why)

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        endpoint, structs = self.endpoint, thread_structs.own
        keep = self._fill(call, deadline)
        status = endpoint.library.rd_run_message(
            endpoint.handle, structs.message_address, structs.result_address, deadline.remaining_s
        )
        del keep
        return self.timing_or_raise(call, status, deadline)

    def submit(self, call: Call, deadline: Deadline) -> RunningCall:
        endpoint, structs = self.endpoint, thread_structs.own
        keep = self._fill(call, deadline)
        status = endpoint.library.rd_submit_message(
            endpoint.handle, structs.message_address, deadline.remaining_s, structs.message_work_address
        )
        del keep
        if status != NativeStatus.OK:
            raise self._make_error(call, NativeError(status), deadline)
        return NativeMessage(self, structs.message_work.value, call)

    def _fill(self, call: Call, deadline: Deadline) -> object:
        """Write the call into the struct of this thread, and open the link that it needs."""
        if self._end_reason is not None:
            raise self._make_error(call, NativeError(NativeStatus.CLOSED), deadline)
        peer = self.spec.members[call.peer] if call.peer >= 0 else ANY_SOURCE
        if call.kind is OperationKind.SEND:
            try:
                self.endpoint.ensure_link(peer, deadline)
            except StartFailed as error:
                if deadline.expired:
                    timeout = OperationTimeout(f"{call.description} did not finish in time: {error}")
                    timeout.missing = (peer,)
                    raise timeout from None
                why = self.endpoint.loss_reason(peer, 0)
                raise PeerLost(rank=self.endpoint.rank, peer=peer, op=call.description, why=why) from None
        return thread_structs.own.fill_message(call, self.context, peer)

    def timing_or_raise(self, call: Call, status: int, deadline: Deadline) -> CallTiming:
        try:
            _, source, _, _, start_ns, ready_ns, end_ns, _, _ = thread_structs.own.result_or_raise(status)
        except NativeError as error:
            raise self._make_error(call, error, deadline) from None
        if call.kind is OperationKind.SEND or (call.peer >= 0 and not call.flags):
            return CallTiming(start_ns, ready_ns, end_ns)
        if call.flags & MessageFlag.ANY_SIZE:
            received = Received(self._index[source], *take_received())
        else:
            received = Received(self._index[source])
        return CallTiming(start_ns, ready_ns, end_ns, received=received)

    def make_allreduce_cache(self, timeout_s: float, record_failure: object, **more: object) -> None:
        return None

    def bucket(self) -> Memory:
        return NO_MEMORY

    def current_call(self) -> CurrentCall | None:
        handle = self.endpoint.open_handle
        current = None if handle is None else get_current_message(handle, self.context)
        if current is None:
            return None
        kind, description, since_ns, rank = current
        return CurrentCall(kind, description, since_ns, (self._index[rank],) if rank in self._index else ())

    def rank_lost(self, rank: int, why: str) -> None:
        self.endpoint.rank_lost(rank, why)
        lost = self.endpoint.lost
        if rank in self._index and all(other in lost or other == self.endpoint.rank for other in self._index):
            self.endpoint.library.rd_end_any_source(self.endpoint.handle, self.context, rank)

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        if self._end_reason is None:
            self._end_reason = (lost_rank, why)
            if self.endpoint.open_handle is not None:
                self.endpoint.library.rd_end_context(self.endpoint.open_handle, self.context)

    def close(self, why: str = "") -> None:
        self.abort(why=why or f"channel {self.spec.id} is closed")
        if self._owns_endpoint:
            self.endpoint.close()

    def _make_error(self, call: Call, error: NativeError, deadline: Deadline) -> Exception:
        rank, peer, description = self.endpoint.rank, error.member, call.description
        if error.status == NativeStatus.MISMATCH:
            sent, _ = take_received()
            return mismatch_error({peer: sent.decode(errors="replace"), rank: description})
        if error.status == NativeStatus.FORKED:
            return forked_error(self._pid, description)
        if error.status == NativeStatus.BAD_CALL and error.detail == errno.EDEADLK:
            return reentry_error(description)
        if error.status == NativeStatus.BAD_CALL:
            return ValueError(f"{description}: the arguments do not fit together")
        if error.status == NativeStatus.TIMEOUT:
            late = f": rank {peer} did not come in time" if peer >= 0 else ""
            if error.detail == errno.ENOBUFS:
                late = f": rank {peer} has too much that it has not received yet"
            timeout = OperationTimeout(
                f"{description} did not finish within {deadline.timeout_s:g} s on rank {rank}{late}"
            )
            timeout.missing = (peer,) if peer >= 0 else ()
            return timeout
        if error.status == NativeStatus.SYSTEM:
            return RondeError(f"{description} failed on rank {rank}: {os.strerror(error.detail)}")
        if error.status == NativeStatus.PEER_LOST:
            why = self.endpoint.loss_reason(peer, error.detail)
            return PeerLost(rank=rank, peer=peer, op=description, why=why)
        lost_rank, why = self._end_reason or (-1, "the round is over: shutdown() was called")
        if lost_rank >= 0:
            return PeerLost(rank=rank, peer=lost_rank, op=description, why=why)
        return RoundEnded(f"{description} on rank {rank}: {why}")


class NativeMessage(RunningCall):
    __slots__ = ("_channel", "_work")

    def __init__(self, channel: NativeMessageChannel, work: int, call: Call) -> None:
        super().__init__(call)
        self._channel = channel
        self._work = work
        """The library's number of the message, which it forgets when it has reported the end."""

    def has_ended(self) -> bool:
        endpoint = self._channel.endpoint
        handle = endpoint.open_handle
        return handle is None or endpoint.library.rd_message_done(handle, self._work) != 0

    def wait_for_end(self, deadline: Deadline) -> CallTiming | None:
        channel, structs = self._channel, thread_structs.own
        assert self.call is not None
        while True:
            slice_s = deadline.remaining_s
            if threading.current_thread() is threading.main_thread():
                slice_s = min(WAIT_SLICE_S, slice_s)
            handle = channel.endpoint.handle
            status = channel.endpoint.library.rd_wait_message(handle, self._work, structs.result_address, slice_s)
            if status != NativeStatus.TIMEOUT or structs.has_ended():
                return channel.timing_or_raise(self.call, status, deadline)
            if deadline.expired:
                return None
