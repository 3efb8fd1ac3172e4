"""Messages between ranks that are threads: the reference for send, receive and mailboxes, in plain Python.

The members of a channel share one lock. A send copies its bytes to a receive that waits, or else leaves them with the
receiver, so it waits for nothing but its window.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from ronde.comm.backends.base import CallTiming, ChannelSpec, CurrentCall, Received, RunningCall
from ronde.comm.buffers import Array, array_at, as_memory
from ronde.comm.call import NO_MEMORY, Call, Memory, MessageFlag, mismatch_error
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.types import Deadline, OperationKind

ANY = -1
OVERHEAD_BYTES = 64


@dataclass(frozen=True)
class _Sent:
    """A message on its way."""

    source: int
    call: Call
    data: Array

    @property
    def cost(self) -> int:
        return self.data.nbytes + len(self.call.header or b"") + OVERHEAD_BYTES


class _Message(RunningCall):
    """One send or receive of one member, and what became of it."""

    def __init__(self, shared: SharedMessages, member_index: int, call: Call, deadline: Deadline) -> None:
        super().__init__(call)
        self.asked = call
        self.member_index = member_index
        self.deadline = deadline
        self.start_ns = time.monotonic_ns()
        self.outcome: CallTiming | Exception | None = None
        self._shared = shared

    def finish(self, received: Received | None = None) -> None:
        now_ns = time.monotonic_ns()
        self.outcome = CallTiming(self.start_ns, now_ns, now_ns, "threads", received=received)

    def has_ended(self) -> bool:
        return self.outcome is not None or self.deadline.expired

    def wait_for_end(self, deadline: Deadline) -> CallTiming | None:
        outcome = self._shared.wait(self, deadline)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class SharedMessages:
    """The messages of one channel. Everything happens under one lock."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self._members = members
        self._changed = threading.Condition()
        self._receives: defaultdict[int, list[_Message]] = defaultdict(list)
        """By member: receives that wait, in the order in which they were started."""
        self._unexpected: defaultdict[int, list[_Sent]] = defaultdict(list)
        """By receiver, in the order in which they arrived."""
        self._waiting: defaultdict[tuple[int, int], list[_Message]] = defaultdict(list)
        """By sender and receiver: sends for which the window has no space."""
        self._outstanding: Counter[tuple[int, int]] = Counter()
        self._lost: defaultdict[int, dict[int, str]] = defaultdict(dict)
        """By member: the ranks that it knows to be lost."""
        self._unreported: defaultdict[int, list[int]] = defaultdict(list)
        self._ended: dict[int, tuple[int, str]] = {}
        """By member: why it can do nothing more here."""

    def submit(self, message: _Message) -> _Message:
        with self._changed:
            me, call = message.member_index, message.asked
            if me in self._ended:
                raise self._end_error(message)
            if call.kind is OperationKind.RECEIVE:
                self._receive(message)
            elif self._members[call.peer] in self._lost[me]:
                message.outcome = self._loss_error(message, self._members[call.peer])
            elif call.flags & MessageFlag.EXPECTED:
                self._deliver(message)
            else:
                self._waiting[me, call.peer].append(message)
                self._start_sends(me, call.peer)
            self._changed.notify_all()
        return message

    def wait(self, message: _Message, deadline: Deadline) -> CallTiming | Exception | None:
        with self._changed:
            while message.outcome is None:
                if message.deadline.expired:
                    message.outcome = self._withdraw(message)
                elif deadline.expired:
                    return None
                else:
                    self._changed.wait(min(deadline.remaining_s, message.deadline.remaining_s))
            return message.outcome

    def rank_lost(self, me: int, rank: int, why: str) -> None:
        with self._changed:
            if rank in self._lost[me]:
                return
            self._lost[me][rank] = why
            self._unreported[me].append(rank)
            others = {each for each in self._members if each != self._members[me]}
            nobody_left = others <= self._lost[me].keys()
            for receive in list(self._receives[me]):
                call = receive.asked
                reports = bool(call.flags & MessageFlag.REPORT_LOSSES)
                if reports and self._unreported[me]:
                    self._end(receive, self._loss_error(receive, self._unreported[me].pop(0)))
                elif call.peer == ANY and nobody_left and not reports:
                    self._end(receive, self._loss_error(receive, rank))
                elif call.peer != ANY and self._members[call.peer] == rank:
                    self._end(receive, self._loss_error(receive, rank))
            for send in self._waiting.pop((me, self._members.index(rank)), []):
                send.outcome = self._loss_error(send, rank)
            self._changed.notify_all()

    def end(self, me: int, lost_rank: int, why: str) -> None:
        """The member can do nothing more here."""
        with self._changed:
            if me in self._ended:
                return
            self._ended[me] = (lost_rank, why)
            waiting = [send for key in [*self._waiting] if key[0] == me for send in self._waiting.pop(key)]
            for message in [*self._receives.pop(me, []), *waiting]:
                message.outcome = self._end_error(message)
            for sent in self._unexpected.pop(me, []):
                self._taken(sent)
            self._changed.notify_all()

    def current_call(self, me: int) -> CurrentCall | None:
        with self._changed:
            waiting = [send for key, sends in self._waiting.items() if key[0] == me for send in sends]
            shown = [each for each in (*self._receives[me], *waiting) if not each.asked.flags & MessageFlag.BACKGROUND]
            oldest = min(shown, key=lambda each: each.start_ns, default=None)
            if oldest is None:
                return None
            call, peer = oldest.asked, oldest.asked.peer
            return CurrentCall(call.kind, call.description, oldest.start_ns, () if peer == ANY else (peer,))

    # --- under the lock ------------------------------------------------------------------------------------------

    def _receive(self, receive: _Message) -> None:
        me, call = receive.member_index, receive.asked
        for sent in self._unexpected[me]:
            if sent.call.tag == call.tag and call.peer in (ANY, sent.source):
                self._unexpected[me].remove(sent)
                self._match(sent, receive)
                return
        lost = self._lost[me]
        others = {rank for rank in self._members if rank != self._members[me]}
        reports = bool(call.flags & MessageFlag.REPORT_LOSSES)
        if reports and self._unreported[me]:
            receive.outcome = self._loss_error(receive, self._unreported[me].pop(0))
        elif call.peer == ANY and not reports and lost and others <= lost.keys():
            receive.outcome = self._loss_error(receive, next(reversed(lost)))
        elif call.peer != ANY and self._members[call.peer] in lost:
            receive.outcome = self._loss_error(receive, self._members[call.peer])
        else:
            self._receives[me].append(receive)

    def _start_sends(self, me: int, to: int) -> None:
        waiting = self._waiting[me, to]
        while waiting:
            sent, outstanding = _Sent(me, waiting[0].asked, _bytes_of(waiting[0].asked)), self._outstanding[me, to]
            if outstanding and outstanding + sent.cost > waiting[0].asked.window_bytes:
                return
            self._outstanding[me, to] += sent.cost
            self._deliver(waiting.pop(0))

    def _deliver(self, send: _Message) -> None:
        sent, to = _Sent(send.member_index, send.asked, _bytes_of(send.asked).copy()), send.asked.peer
        send.finish()
        if to in self._ended:
            return self._taken(sent)
        for receive in self._receives[to]:
            if receive.asked.tag == sent.call.tag and receive.asked.peer in (ANY, sent.source):
                self._receives[to].remove(receive)
                return self._match(sent, receive)
        if not sent.call.flags & MessageFlag.EXPECTED:
            self._unexpected[to].append(sent)

    def _match(self, sent: _Sent, receive: _Message) -> None:
        self._taken(sent)
        call = receive.asked
        if call.flags & MessageFlag.ANY_SIZE:
            receive.finish(Received(sent.source, sent.call.header or b"", as_memory(sent.data)))
        elif call.signature_hash != sent.call.signature_hash:
            texts = {self._members[sent.source]: sent.call.description}
            receive.outcome = mismatch_error({**texts, self._members[receive.member_index]: call.description})
        else:
            array_at(call.spans[0].output, sent.data.nbytes, np.dtype(np.uint8))[:] = sent.data
            receive.finish(Received(sent.source) if call.peer == ANY else None)

    def _taken(self, sent: _Sent) -> None:
        if not sent.call.flags & MessageFlag.EXPECTED:
            self._outstanding[sent.source, sent.call.peer] -= sent.cost
            self._start_sends(sent.source, sent.call.peer)
        self._changed.notify_all()

    def _withdraw(self, message: _Message) -> Exception:
        call = message.asked
        if call.kind is OperationKind.RECEIVE:
            self._receives[message.member_index].remove(message)
        else:
            self._waiting[message.member_index, call.peer].remove(message)
        rank = self._members[call.peer] if call.peer != ANY else None
        reason = "" if rank is None else f", waiting for rank {rank}"
        error = OperationTimeout(f"{call.description} took over {message.deadline.timeout_s:g} s{reason}")
        error.missing = () if rank is None else (rank,)
        return error

    def _end(self, receive: _Message, error: RondeError) -> None:
        self._receives[receive.member_index].remove(receive)
        receive.outcome = error

    def _loss_error(self, message: _Message, rank: int) -> PeerLost:
        me = message.member_index
        op = message.asked.description
        return PeerLost(rank=self._members[me], peer=rank, op=op, why=self._lost[me][rank])

    def _end_error(self, message: _Message) -> RondeError:
        lost_rank, why = self._ended[message.member_index]
        rank, op = self._members[message.member_index], message.asked.description
        return PeerLost(rank=rank, peer=lost_rank, op=op, why=why) if lost_rank >= 0 else RoundEnded(f"{op}: {why}")


def _bytes_of(call: Call) -> Array:
    if not call.spans:
        return np.empty(0, np.uint8)
    return array_at(call.spans[0].input, call.spans[0].count * call.dtype.num_bytes, np.dtype(np.uint8))


class ThreadsMessageChannel:
    """A channel of messages as one member sees it."""

    def __init__(self, spec: ChannelSpec, shared: SharedMessages) -> None:
        self.spec = spec
        self._shared = shared

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        return self.submit(call, deadline).wait(deadline)

    def submit(self, call: Call, deadline: Deadline) -> RunningCall:
        return self._shared.submit(_Message(self._shared, self.spec.member_index, call, deadline))

    def make_allreduce_cache(self, timeout_s: float, record_failure: object, **more: object) -> None:
        return None

    def bucket(self) -> Memory:
        return NO_MEMORY

    def current_call(self) -> CurrentCall | None:
        return self._shared.current_call(self.spec.member_index)

    def rank_lost(self, rank: int, why: str) -> None:
        self._shared.rank_lost(self.spec.member_index, rank, why)

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        self._shared.end(self.spec.member_index, lost_rank, why)

    def close(self, why: str = "") -> None:
        self.abort(why=why or f"channel {self.spec.id} is closed")
