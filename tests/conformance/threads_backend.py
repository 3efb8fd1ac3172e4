"""Ranks as threads of one process: the reference backend, in NumPy, for tests.

A ThreadsHub stands for the whole job; each rank makes its backend from it. The members of a channel share the calls of
each; the thread that brings the last missing call does the work for all, so there is no other thread here, and a member
that leaves after its call has ended harms nobody.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ronde.comm.backends.base import LOSS_REASON_S, CallTiming, ChannelSpec, CurrentCall, RunningCall
from ronde.comm.buffers import aligned_zeros
from ronde.comm.call import Call, mismatch_error
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded, StartFailed
from ronde.text import format_ranks
from ronde.types import Deadline, OperationKind
from tests.conformance.reference_collectives import check_calls_match, copy_message, run_calls

__all__ = ["ThreadsHub", "ThreadsBackend"]


class ThreadsHub:
    """Where the ranks of one process find each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._channels: dict[str, _SharedChannel] = {}
        self._lost: dict[int, str] = {}

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> _SharedChannel:
        """Wait for all members of the channel."""
        with self._changed:
            channel = self._channels.setdefault(spec.id, _SharedChannel(spec.id, spec.members))
            if channel.members != spec.members:
                sides = f"{format_ranks(channel.members)} and {format_ranks(spec.members)}"
                raise ValueError(f"channel {spec.id} was opened for different members: {sides}")
            channel.present.add(spec.member_index)
            self._changed.notify_all()
            try:
                self._wait_for_all(channel, spec, deadline)
            except RondeError:
                self._channels.pop(spec.id, None)
                raise
            return channel

    def close_channel(self, channel: _SharedChannel, member_index: int) -> None:
        """The last member to leave ends the channel."""
        with self._changed:
            channel.present.discard(member_index)
            if not channel.present:
                self._channels.pop(channel.id, None)

    def rank_lost(self, rank: int, why: str) -> None:
        """Nobody has to wait for this rank any more."""
        with self._changed:
            self._lost.setdefault(rank, why)
            self._changed.notify_all()

    def _wait_for_all(self, channel: _SharedChannel, spec: ChannelSpec, deadline: Deadline) -> None:
        opening = f"opening channel {spec.id}"
        while not channel.opened:
            missing = [rank for index, rank in enumerate(spec.members) if index not in channel.present]
            channel.opened = not missing
            for rank in missing:
                if rank in self._lost:
                    raise PeerLost(rank=spec.members[spec.member_index], peer=rank, op=opening, why=self._lost[rank])
            if missing and not self._changed.wait(deadline.remaining_s) and deadline.expired:
                raise StartFailed(f"{opening}: {format_ranks(missing)} did not come within {deadline.timeout_s:g} s")
        self._changed.notify_all()


@dataclass(eq=False, slots=True)
class _MemberCall:
    """One call of one member, and what became of it."""

    member_index: int
    call: Call
    deadline: Deadline
    start_ns: int
    ready_ns: int = 0
    end_ns: int = 0
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class _PointToPointQueues:
    """Messages from one member to another that have not met yet."""

    sends: deque[_MemberCall] = field(default_factory=deque)
    receives: deque[_MemberCall] = field(default_factory=deque)


class _SharedChannel:
    """The shared state of one channel. Everything happens under one lock."""

    def __init__(self, id: str, members: tuple[int, ...]) -> None:
        self.id = id
        self.members = members
        self.present: set[int] = set()
        self.opened = False
        self._changed = threading.Condition()
        self._queues: list[deque[_MemberCall]] = [deque() for _ in members]
        self._pairs: dict[tuple[int, int], _PointToPointQueues] = {}
        self._aborted: tuple[int, str] | None = None
        self._first_closed: tuple[int, Deadline] | None = None
        """Who closed the channel first, and until when to wait for an abort that says why."""

    def submit(self, member_index: int, call: Call, deadline: Deadline) -> _MemberCall:
        turn = _MemberCall(member_index, call, deadline, time.monotonic_ns())
        with self._changed:
            self._check(turn)
            if call.kind in (OperationKind.SEND, OperationKind.RECEIVE):
                self._match_point_to_point(turn)
            else:
                self._queues[member_index].append(turn)
                self._advance()
            self._changed.notify_all()
        return turn

    def wait(self, member_call: _MemberCall, deadline: Deadline) -> CallTiming:
        with self._changed:
            while not member_call.end_ns:
                self._check(member_call)
                self._changed.wait(min(deadline.remaining_s, member_call.deadline.remaining_s))
                if (
                    not member_call.end_ns
                    and self._aborted is None
                    and (deadline.expired or member_call.deadline.expired)
                ):
                    raise self._make_timeout(member_call, deadline)
        if member_call.error is not None:
            raise member_call.error
        return CallTiming(member_call.start_ns, member_call.ready_ns, member_call.end_ns, "threads")

    def done(self, member_call: _MemberCall) -> bool:
        return bool(member_call.end_ns or self._aborted or self._first_closed) or member_call.deadline.expired

    def abort(self, lost_rank: int, why: str) -> None:
        with self._changed:
            if self._aborted is None:
                self._aborted = (lost_rank, why)
                self._changed.notify_all()

    def close_member(self, member_index: int) -> None:
        with self._changed:
            if self._first_closed is None:
                self._first_closed = (member_index, Deadline(LOSS_REASON_S))
                self._changed.notify_all()

    def current_call(self, member_index: int) -> CurrentCall | None:
        with self._changed:
            if self._queues[member_index]:
                turn = self._queues[member_index][0]
                missing = tuple(index for index, queue in enumerate(self._queues) if not queue)
                return CurrentCall(turn.call.description, turn.start_ns, missing)
            for pair in self._pairs.values():
                for turn in (*pair.sends, *pair.receives):
                    if turn.member_index == member_index:
                        return CurrentCall(turn.call.description, turn.start_ns, (turn.call.peer,))
        return None

    def _advance(self) -> None:
        """Do all calls for which every member has come."""
        while all(self._queues):
            turns = [queue[0] for queue in self._queues]
            calls = [turn.call for turn in turns]
            everybody_joined = all(call.kind is OperationKind.JOIN for call in calls)
            ready_ns = time.monotonic_ns()
            error: Exception | None = None
            try:
                check_calls_match(self.members, calls)
                run_calls(calls)
            except Exception as caught:  # the edge between members: all of them must learn of it
                error = caught
            for turn, queue in zip(turns, self._queues, strict=True):
                # Who has joined stays for the next call of the others.
                if turn.call.kind is not OperationKind.JOIN or everybody_joined or error is not None:
                    queue.popleft()
                    _finish(turn, ready_ns, error)

    def _match_point_to_point(self, member_call: _MemberCall) -> None:
        me, peer = member_call.member_index, member_call.call.peer
        is_send = member_call.call.kind is OperationKind.SEND
        pair = self._pairs.setdefault((me, peer) if is_send else (peer, me), _PointToPointQueues())
        (pair.sends if is_send else pair.receives).append(member_call)
        if not (pair.sends and pair.receives):
            return
        send, receive = pair.sends.popleft(), pair.receives.popleft()
        ready_ns = time.monotonic_ns()
        error: Exception | None = None
        if send.call.signature_hash == receive.call.signature_hash:
            copy_message(send.call, receive.call)
        else:
            error = mismatch_error({self.members[each.member_index]: each.call.description for each in (send, receive)})
        _finish(send, ready_ns, error)
        _finish(receive, ready_ns, error)

    def _check(self, member_call: _MemberCall) -> None:
        """Raise when nothing can be done here any more."""
        while self._first_closed is not None and self._aborted is None:
            who, deadline = self._first_closed
            if who == member_call.member_index:
                raise RoundEnded(f"{member_call.call.description} cannot finish: channel {self.id} is closed")
            if not self._changed.wait(deadline.remaining_s) and deadline.expired:
                self._aborted = (self.members[who], f"it has closed channel {self.id}")
        if self._aborted is None or member_call.end_ns:
            return
        lost, why = self._aborted
        if lost >= 0 and lost != self.members[member_call.member_index]:
            raise PeerLost(
                rank=self.members[member_call.member_index], peer=lost, op=member_call.call.description, why=why
            )
        raise RoundEnded(f"{member_call.call.description} cannot finish: {why}")

    def _make_timeout(self, member_call: _MemberCall, deadline: Deadline) -> OperationTimeout:
        own, call = member_call.deadline.expired, member_call.call
        late = [index for index, queue in enumerate(self._queues) if not queue]
        missing = [call.peer] if call.kind in (OperationKind.SEND, OperationKind.RECEIVE) else late
        waiting = f", waiting for {format_ranks(self.members[index] for index in missing)}" if missing else ""
        error = OperationTimeout(
            f"{call.description} took over {(member_call.deadline if own else deadline).timeout_s:g} s{waiting}"
        )
        if own:  # for every member: the order of calls is lost
            self._aborted = (-1, f"rank {self.members[member_call.member_index]} gave up: {error}")
            self._changed.notify_all()
        return error


def _finish(member_call: _MemberCall, ready_ns: int, error: Exception | None) -> None:
    member_call.error = error
    member_call.ready_ns = ready_ns
    member_call.end_ns = time.monotonic_ns()


class _ThreadsRunningCall(RunningCall):
    def __init__(self, channel: _SharedChannel, member_call: _MemberCall) -> None:
        super().__init__(member_call.call)
        self._channel = channel
        self._member_call = member_call

    def has_ended(self) -> bool:
        return self._channel.done(self._member_call)

    def wait_for_end(self, deadline: Deadline) -> CallTiming | None:
        try:
            return self._channel.wait(self._member_call, deadline)
        except OperationTimeout:
            if self.has_ended():
                raise
            return None


class _ThreadsChannel:
    """A channel as one member sees it."""

    def __init__(self, hub: ThreadsHub, spec: ChannelSpec, shared: _SharedChannel) -> None:
        self.spec = spec
        self._hub = hub
        self._shared = shared
        self._closed = False
        self._bucket = aligned_zeros(spec.bucket_bytes)

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        return self._shared.wait(self._shared.submit(self.spec.member_index, call, deadline), deadline)

    def submit(self, call: Call, deadline: Deadline) -> _ThreadsRunningCall:
        return _ThreadsRunningCall(self._shared, self._shared.submit(self.spec.member_index, call, deadline))

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._bucket

    def current_call(self) -> CurrentCall | None:
        return self._shared.current_call(self.spec.member_index)

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        self._shared.abort(lost_rank, why)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._shared.close_member(self.spec.member_index)
            self._hub.close_channel(self._shared, self.spec.member_index)


class ThreadsBackend:
    """One rank's way to the others in its process."""

    name = "threads"

    def __init__(self, hub: ThreadsHub) -> None:
        self._hub = hub

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> _ThreadsChannel:
        """Wait for all members and make the channel."""
        return _ThreadsChannel(self._hub, spec, self._hub.open_channel(spec, deadline))

    def rank_lost(self, rank: int, why: str) -> None:
        """End the waits for this rank in open_channel."""
        self._hub.rank_lost(rank, why)

    def close(self) -> None:
        """Nothing is held."""
