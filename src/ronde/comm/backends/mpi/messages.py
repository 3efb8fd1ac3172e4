"""Messages of the mpi backend: send, receive and mailboxes, over one communicator for the whole round.

A message is one message of MPI: an envelope, the header, and the data, which the sender copies. Whoever polls, a thread
that waits or the endpoint's own, takes all messages that have arrived and matches them itself, because tags here are
larger than those of MPI, and because a large message that nobody has asked for must not hold up its sender. The rules
are those of the native endpoint (native/src/endpoint.h): a message is outstanding until its receiver has taken it, the
receiver reports that in batches, and a send waits while its window is full.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ronde.comm.backends.base import CallTiming, ChannelSpec, CurrentCall, Received, RunningCall
from ronde.comm.backends.mpi.failure_detection import MAX_IDLE_SLEEP_S, YIELD_TIME_S, abandon
from ronde.comm.buffers import Array, array_at, as_memory
from ronde.comm.call import NO_MEMORY, Call, Memory, MessageFlag, hash_signature, mismatch_error
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.types import Deadline, OperationKind

if TYPE_CHECKING:
    from mpi4py import MPI

TAG_MESSAGE = 1
TAG_CREDIT = 2
BLOCK_BYTES = 64
"""Messages are sent as whole blocks: MPI counts in 32 bits, and bytes would be too many."""
ENVELOPE = struct.Struct("<QQQQII")
"""Context, tag, hash of the signature, bytes of the data, bytes of the header, flags."""
CREDIT = struct.Struct("<QQ")
"""Context, and the bytes that were taken."""
CREDIT_BATCH_BYTES = 256 * 1024
IDLE_POLL_S = 0.01
"""How often the endpoint's thread looks for messages while this rank waits for none."""
CLOSE_TIMEOUT_S = 5.0

_BYTE = np.dtype(np.uint8)


class _Arrival(NamedTuple):
    """A message that has arrived."""

    source: int
    context: int
    tag: int
    signature_hash: int
    flags: int
    header: bytes
    data: Array

    @property
    def cost(self) -> int:
        return _cost(self.data.nbytes, len(self.header))


def _cost(num_bytes: int, header_bytes: int) -> int:
    return num_bytes + header_bytes + BLOCK_BYTES


@dataclass
class _Flow:
    """What was sent to a rank in one context."""

    outstanding: int = 0
    waiting: deque[MpiMessage] = field(default_factory=deque)


class MpiMessage(RunningCall):
    """One send or receive of this rank, until its end and after."""

    __slots__ = ("_endpoint", "asked", "context", "deadline", "outcome", "peer", "start_ns")

    def __init__(self, endpoint: MpiEndpoint, context: int, peer: int, call: Call, deadline: Deadline) -> None:
        super().__init__(call)
        self.asked = call
        self.context = context
        self.peer = peer
        """The rank of the other side; -1 for any."""
        self.deadline = deadline
        self.start_ns = time.monotonic_ns()
        self.outcome: CallTiming | Exception | None = None
        self._endpoint = endpoint

    def finish(self, received: Received | None = None) -> None:
        now_ns = time.monotonic_ns()
        self.outcome = CallTiming(self.start_ns, now_ns, now_ns, "mpi", received=received)

    def has_ended(self) -> bool:
        return self.outcome is not None

    def wait_for_end(self, deadline: Deadline) -> CallTiming | None:
        outcome = self._endpoint.wait(self, deadline)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class MpiEndpoint:
    """This rank's end of all messages. One per round; safe from any thread."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self.rank = comm.Get_rank()
        self.lost: dict[int, str] = {}
        """Ranks that are gone, and why."""
        self._comm = comm
        self._block: MPI.Datatype = MPI.BYTE.Create_contiguous(BLOCK_BYTES).Commit()
        self._changed = threading.Condition()
        """Guards everything here; notified when the thread has something to do at once."""
        self._receives: dict[tuple[int, int], list[MpiMessage]] = defaultdict(list)
        """By context and tag: those that wait, in the order in which they were started."""
        self._unexpected: dict[tuple[int, int], list[_Arrival]] = defaultdict(list)
        """By context and tag, in the order in which they arrived."""
        self._flows: dict[tuple[int, int], _Flow] = defaultdict(_Flow)
        """By rank and context."""
        self._untaken: dict[tuple[int, int], int] = defaultdict(int)
        """By rank and context: bytes that were taken and not yet reported."""
        self._losses: dict[int, deque[int]] = {}
        """By context that reports losses: the ranks whose loss has not been reported."""
        self._sending: list[tuple[MPI.Request, object]] = []
        self._arriving: dict[int, deque[tuple[MPI.Request, Array]]] = defaultdict(deque)
        """By source, in the order of sending."""
        self._ended_contexts: dict[int, tuple[int, str]] = {}
        """By context: the lost rank or -1, and why nothing can be done in it any more."""
        self._members: dict[int, tuple[int, ...]] = {}
        """By context: its ranks."""
        self._closed = False
        # Owned by the endpoint. It polls MPI and touches nothing else but what the lock guards.
        self._thread = threading.Thread(target=self._loop, name="ronde-mpi-messages", daemon=True)
        self._thread.start()

    # --- for channels --------------------------------------------------------------------------------------------

    def add_context(self, context: int, members: tuple[int, ...]) -> None:
        with self._changed:
            self._members[context] = members

    def start(self, message: MpiMessage) -> None:
        with self._changed:
            call = message.asked
            if self._closed or message.context in self._ended_contexts:
                raise self._end_error(message)
            if call.kind is OperationKind.RECEIVE:
                self._start_receive(message)
            elif message.peer in self.lost:
                message.outcome = self._loss_error(message, message.peer)
            elif call.flags & MessageFlag.EXPECTED:
                self._send(message)
            else:
                self._flows[message.peer, message.context].waiting.append(message)
                self._admit(message.peer, message.context)
            if message.outcome is None or self._sending:
                self._changed.notify_all()

    def wait(self, message: MpiMessage, deadline: Deadline) -> CallTiming | Exception | None:
        """Poll until the message has ended; None if it is still under way at the deadline."""
        if message.asked.flags & MessageFlag.BACKGROUND:
            with self._changed:  # the thread polls
                self._changed.wait_for(lambda: message.outcome is not None, deadline.remaining_s)
                return message.outcome
        began = time.monotonic()
        while True:
            with self._changed:
                if message.outcome is None:
                    self._poll()
                if message.outcome is None and message.deadline.expired:
                    self._withdraw(message, self._timeout_error(message))
                if message.outcome is not None:
                    return message.outcome
            if deadline.expired:
                return None
            waited_s = time.monotonic() - began
            if waited_s < YIELD_TIME_S:
                os.sched_yield()
            else:
                time.sleep(min(MAX_IDLE_SLEEP_S, waited_s / 8))

    def rank_lost(self, rank: int, why: str) -> None:
        """End what involves a rank, after everything that has come from it was taken."""
        with self._changed:
            if rank in self.lost:
                return
            if not self._closed:
                self._poll()
            self.lost[rank] = why
            for request, blocks in self._arriving.pop(rank, ()):
                abandon([request], blocks)
            for losses in self._losses.values():
                losses.append(rank)
            for (_, context), flow in [item for item in self._flows.items() if item[0][0] == rank]:
                for send in flow.waiting:
                    send.outcome = self._loss_error(send, rank)
                del self._flows[rank, context]
            for receive in self._waiting_receives():
                if receive.asked.flags & MessageFlag.REPORT_LOSSES:
                    if unreported := self._losses.get(receive.context):
                        self._withdraw(receive, self._loss_error(receive, unreported.popleft()))
                elif receive.peer == rank or (receive.peer < 0 and self._nobody_left(receive.context)):
                    self._withdraw(receive, self._loss_error(receive, rank))

    def end_context(self, context: int, lost_rank: int, why: str) -> None:
        with self._changed:
            if context in self._ended_contexts:
                return
            self._ended_contexts[context] = (lost_rank, why)
            for message in self._under_way():
                if message.context == context:
                    self._withdraw(message, self._end_error(message))
            for key in [key for key in self._unexpected if key[0] == context]:
                for arrival in self._unexpected.pop(key):
                    self._report_taken(arrival)

    def current_message(self, context: int) -> MpiMessage | None:
        """The message of the context that has been under way for longest."""
        with self._changed:
            own = (message for message in self._under_way() if message.context == context)
            shown = (message for message in own if not message.asked.flags & MessageFlag.BACKGROUND)
            return min(shown, key=lambda message: message.start_ns, default=None)

    def flush(self, deadline: Deadline) -> None:
        """Wait until MPI has sent everything."""
        while True:
            with self._changed:
                self._poll()
                if not self._sending and not any(flow.waiting for flow in self._flows.values()):
                    return
            if deadline.expired:
                return
            time.sleep(MAX_IDLE_SLEEP_S / 10)

    def close(self) -> None:
        """End all messages and the thread. Idempotent."""
        with self._changed:
            self._closed = True
            for message in self._under_way():
                self._withdraw(message, self._end_error(message))
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)

    # --- under the lock --------------------------------------------------------------------------------------------

    def _start_receive(self, receive: MpiMessage) -> None:
        self._poll()
        call, context = receive.asked, receive.context
        for arrival in self._unexpected.get((context, call.tag), ()):
            if receive.peer in (-1, arrival.source):
                self._unexpected[context, call.tag].remove(arrival)
                return self._match(arrival, receive)
        if call.flags & MessageFlag.REPORT_LOSSES:
            losses = self._losses.setdefault(context, deque(self.lost))
            if losses:
                receive.outcome = self._loss_error(receive, losses.popleft())
                return None
        elif receive.peer in self.lost:
            receive.outcome = self._loss_error(receive, receive.peer)
            return None
        elif receive.peer < 0 and self._nobody_left(context):
            receive.outcome = self._loss_error(receive, next(reversed(self.lost)))
            return None
        self._receives[context, call.tag].append(receive)
        return None

    def _nobody_left(self, context: int) -> bool:
        return all(rank in self.lost or rank == self.rank for rank in self._members[context])

    def _admit(self, rank: int, context: int) -> None:
        """Start the sends that fit into the window."""
        flow = self._flows[rank, context]
        while flow.waiting:
            send = flow.waiting[0]
            cost = _cost(_num_bytes(send.asked), len(_header_of(send.asked)))
            is_full = flow.outstanding + cost > send.asked.window_bytes
            if flow.outstanding > CREDIT_BATCH_BYTES and is_full:
                return
            flow.outstanding += cost
            self._send(flow.waiting.popleft())

    def _send(self, send: MpiMessage) -> None:
        call, header, num_bytes = send.asked, _header_of(send.asked), _num_bytes(send.asked)
        start = ENVELOPE.size + len(header)
        blocks = np.empty(-(-(start + num_bytes) // BLOCK_BYTES) * BLOCK_BYTES, _BYTE)
        fields = (send.context, call.tag, call.signature_hash, num_bytes, len(header), int(call.flags))
        blocks[:start] = np.frombuffer(ENVELOPE.pack(*fields) + header, _BYTE)
        if num_bytes:
            blocks[start : start + num_bytes] = array_at(call.spans[0].input, num_bytes, _BYTE)
        buffer = [blocks, len(blocks) // BLOCK_BYTES, self._block]
        self._sending.append((self._comm.Isend(buffer, send.peer, TAG_MESSAGE), blocks))
        self._test_sends()
        send.finish()

    def _test_sends(self) -> None:
        self._sending = [item for item in self._sending if not item[0].Test()]

    def _poll(self) -> bool:
        """Take all that has arrived. Whether something has."""
        from mpi4py import MPI

        self._test_sends()
        status, found = MPI.Status(), False
        # Probed and received as one, so that another thread cannot take the message in between.
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, TAG_MESSAGE, status)) is not None:
            num_blocks = status.Get_count(self._block)
            blocks = np.empty(num_blocks * BLOCK_BYTES, _BYTE)
            request = message.Irecv([blocks, num_blocks, self._block])
            self._arriving[status.Get_source()].append((request, blocks))
        for source, arriving in list(self._arriving.items()):
            while arriving and arriving[0][0].Test():
                self._deliver(_parse(source, arriving.popleft()[1]))
                found = True
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, TAG_CREDIT, status)) is not None:
            data = bytearray(CREDIT.size)
            message.Recv(data)
            context, num_bytes = CREDIT.unpack(data)
            self._credit(status.Get_source(), context, num_bytes)
        return found

    def _credit(self, rank: int, context: int, num_bytes: int) -> None:
        if rank not in self.lost:
            self._flows[rank, context].outstanding -= num_bytes
            self._admit(rank, context)

    def _deliver(self, arrival: _Arrival) -> None:
        key = (arrival.context, arrival.tag)
        if arrival.context in self._ended_contexts:
            return self._report_taken(arrival)
        for receive in self._receives.get(key, ()):
            if receive.peer in (-1, arrival.source):
                self._remove(receive)
                return self._match(arrival, receive)
        if not arrival.flags & MessageFlag.EXPECTED:
            self._unexpected[key].append(arrival)
        return None

    def _match(self, arrival: _Arrival, receive: MpiMessage) -> None:
        self._report_taken(arrival)
        call, members = receive.asked, self._members[receive.context]
        source = members.index(arrival.source)
        if call.flags & MessageFlag.ANY_SIZE:
            receive.finish(Received(source, arrival.header, as_memory(arrival.data)))
        elif call.signature_hash != arrival.signature_hash or _num_bytes(call) != arrival.data.nbytes:
            sent = arrival.header.decode(errors="replace")
            receive.outcome = mismatch_error({arrival.source: sent, self.rank: call.description})
        else:
            array_at(call.spans[0].output, arrival.data.nbytes, _BYTE)[:] = arrival.data
            receive.finish(Received(source) if receive.peer < 0 else None)
        self._changed.notify_all()

    def _report_taken(self, arrival: _Arrival) -> None:
        if arrival.flags & MessageFlag.EXPECTED:
            return
        key = (arrival.source, arrival.context)
        self._untaken[key] += arrival.cost
        if self._untaken[key] >= CREDIT_BATCH_BYTES and arrival.source not in self.lost:
            data = CREDIT.pack(arrival.context, self._untaken.pop(key))
            self._sending.append((self._comm.Isend(data, arrival.source, TAG_CREDIT), data))

    def _waiting_receives(self) -> list[MpiMessage]:
        return [receive for receives in self._receives.values() for receive in receives]

    def _withdraw(self, message: MpiMessage, error: Exception) -> None:
        self._remove(message)
        message.outcome = error
        self._changed.notify_all()

    def _remove(self, message: MpiMessage) -> None:
        key = (message.context, message.asked.tag)
        if message.asked.kind is OperationKind.SEND:
            self._flows[message.peer, message.context].waiting.remove(message)
            return
        self._receives[key].remove(message)
        if not self._receives[key]:
            del self._receives[key]

    def _under_way(self) -> list[MpiMessage]:
        return [*self._waiting_receives(), *(send for flow in self._flows.values() for send in flow.waiting)]

    def _end_error(self, message: MpiMessage) -> RondeError:
        over = (-1, "the round is over: shutdown() was called")
        lost_rank, why = self._ended_contexts.get(message.context, over)
        op = message.asked.description
        if lost_rank >= 0:
            return PeerLost(rank=self.rank, peer=lost_rank, op=op, why=why)
        return RoundEnded(f"{op} on rank {self.rank}: {why}")

    def _loss_error(self, message: MpiMessage, rank: int) -> PeerLost:
        return PeerLost(rank=self.rank, peer=rank, op=message.asked.description, why=self.lost[rank])

    def _timeout_error(self, message: MpiMessage) -> OperationTimeout:
        late = "" if message.peer < 0 else f", waiting for rank {message.peer}"
        if message.asked.kind is OperationKind.SEND:
            late = f": rank {message.peer} has too much that it has not received yet"
        error = OperationTimeout(f"{message.asked.description} took over {message.deadline.timeout_s:g} s{late}")
        error.missing = () if message.peer < 0 else (message.peer,)
        return error

    # --- the thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                found = self._poll()
                for message in self._under_way():
                    if message.deadline.expired:
                        self._withdraw(message, self._timeout_error(message))
                is_busy = found or bool(self._sending) or bool(self._under_way())
                if not is_busy:
                    self._changed.wait(IDLE_POLL_S)
            if is_busy and not found:
                time.sleep(MAX_IDLE_SLEEP_S)


def _header_of(call: Call) -> bytes:
    """What travels ahead of the data: the caller's header, or the description, for the error of a mismatch."""
    return call.description.encode() if call.header is None else call.header


def _num_bytes(call: Call) -> int:
    return call.spans[0].count * call.dtype.num_bytes if call.spans else 0


def _parse(source: int, blocks: Array) -> _Arrival:
    fields = ENVELOPE.unpack(blocks[: ENVELOPE.size].tobytes())
    context, tag, signature_hash, num_bytes, header_bytes, flags = fields
    start = ENVELOPE.size + header_bytes
    header = blocks[ENVELOPE.size : start].tobytes()
    return _Arrival(source, context, tag, signature_hash, flags, header, blocks[start : start + num_bytes])


class MpiMessageChannel:
    """The messages of one group, or of one mailbox. Opening it needs nobody else."""

    def __init__(self, spec: ChannelSpec, endpoint: MpiEndpoint) -> None:
        self.spec = spec
        self._endpoint = endpoint
        self._context = hash_signature(spec.id)
        endpoint.add_context(self._context, spec.members)

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        return self.submit(call, deadline).wait(deadline)

    def submit(self, call: Call, deadline: Deadline) -> MpiMessage:
        peer = self.spec.members[call.peer] if call.peer >= 0 else -1
        message = MpiMessage(self._endpoint, self._context, peer, call, deadline)
        self._endpoint.start(message)
        return message

    def make_allreduce_cache(self, timeout_s: float, record_failure: object, **more: object) -> None:
        return None

    def bucket(self) -> Memory:
        return NO_MEMORY

    def current_call(self) -> CurrentCall | None:
        message = self._endpoint.current_message(self._context)
        if message is None:
            return None
        asked, peer = message.asked, message.asked.peer
        return CurrentCall(asked.kind, asked.description, message.start_ns, () if peer < 0 else (peer,))

    def rank_lost(self, rank: int, why: str) -> None:
        self._endpoint.rank_lost(rank, why)

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        self._endpoint.end_context(self._context, lost_rank, why)

    def close(self, why: str = "") -> None:
        self.abort(why=why or f"channel {self.spec.id} is closed")
