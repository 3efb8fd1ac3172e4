"""Ranks as threads of one process: the reference backend, in NumPy, for tests.

One ThreadsBackend stands for the whole job and is the backend of every rank. The members of a channel share the calls
of each; the thread that brings the last missing call does the work for all, so there is no other thread here, and a
member that waits for nobody never blocks.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from ronde.comm.backends.base import LOSS_REASON_S, CallTiming, ChannelSpec, CurrentCall, RunningCall
from ronde.comm.buffers import aligned_zeros, as_memory
from ronde.comm.call import Call, Memory
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded, StartFailed
from ronde.net.messages import ChannelAborted
from ronde.text import format_ranks
from ronde.types import CPU, Deadline, OperationKind
from tests.conformance.reference_collectives import check_calls_match, run_calls
from tests.conformance.threads_messages import SharedMessages, ThreadsMessageChannel


class ThreadsBackend:
    """Where the ranks of one process find each other."""

    name = "threads"
    devices: tuple[str, ...] = (CPU,)

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._channels: dict[str, _SharedChannel] = {}
        self._messages: dict[str, SharedMessages] = {}
        self._lost: dict[int, str] = {}

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> _ThreadsChannel | ThreadsMessageChannel:
        with self._changed:
            if spec.point_to_point:
                shared = self._messages.setdefault(spec.id, SharedMessages(spec.members))
                return ThreadsMessageChannel(spec, shared)
            channel = self._channels.setdefault(spec.id, _SharedChannel(spec.id, spec.members))
            channel.present.add(spec.member_index)
            self._changed.notify_all()
            try:
                self._wait_for_all(channel, spec, deadline)
            except RondeError:
                self._channels.pop(spec.id, None)
                raise
            return _ThreadsChannel(self, spec, channel)

    def open_announced_channel(self, spec: ChannelSpec, deadline: Deadline) -> None:
        return None

    def close_channel(self, channel: _SharedChannel, member_index: int) -> None:
        """The last member to leave ends the channel."""
        with self._changed:
            channel.present.discard(member_index)
            if not channel.present:
                self._channels.pop(channel.id, None)

    def rank_lost(self, rank: int, why: str) -> None:
        with self._changed:
            self._lost.setdefault(rank, why)
            self._changed.notify_all()

    def channel_aborted(self, abort: ChannelAborted) -> None:
        return None  # no channel of this backend reports it

    def flush(self, deadline: Deadline) -> None:
        pass

    def close(self) -> None:
        pass

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


class _MemberCall(RunningCall):
    """One call of one member, and what became of it."""

    def __init__(self, channel: _SharedChannel, member_index: int, call: Call, deadline: Deadline) -> None:
        super().__init__(call)
        self.asked = call
        self.member_index = member_index
        self.rank = channel.members[member_index]
        self.deadline = deadline
        self.start_ns = time.monotonic_ns()
        self.ready_ns = self.end_ns = 0
        self.failure: Exception | None = None
        self._channel = channel

    def finish(self, ready_ns: int, failure: Exception | None) -> None:
        self.ready_ns, self.failure, self.end_ns = ready_ns, failure, time.monotonic_ns()

    def has_ended(self) -> bool:
        return bool(self.end_ns) or self._channel.is_over or self.deadline.expired

    def wait_for_end(self, deadline: Deadline) -> CallTiming | None:
        try:
            self._channel.wait(self, deadline)
        except OperationTimeout:
            if self.has_ended():
                raise
            return None
        if self.failure is not None:
            raise self.failure
        return CallTiming(self.start_ns, self.ready_ns, self.end_ns, "threads")


class _SharedChannel:
    """The shared state of one channel. Everything happens under one lock."""

    def __init__(self, id: str, members: tuple[int, ...]) -> None:
        self.id = id
        self.members = members
        self.present: set[int] = set()
        self.opened = False
        self._changed = threading.Condition()
        self._queues: list[deque[_MemberCall]] = [deque() for _ in members]
        self._aborted: tuple[int, str] | None = None
        self._first_closed: tuple[int, Deadline] | None = None
        """Who closed the channel first, and until when to wait for an abort that says why."""

    @property
    def is_over(self) -> bool:
        return bool(self._aborted or self._first_closed)

    def submit(self, turn: _MemberCall) -> _MemberCall:
        with self._changed:
            self._check(turn)
            self._queues[turn.member_index].append(turn)
            self._advance()
            self._changed.notify_all()
        return turn

    def wait(self, turn: _MemberCall, deadline: Deadline) -> None:
        with self._changed:
            while not turn.end_ns:
                self._check(turn)
                self._changed.wait(min(deadline.remaining_s, turn.deadline.remaining_s))
                if not turn.end_ns and self._aborted is None and (deadline.expired or turn.deadline.expired):
                    raise self._make_timeout(turn, deadline)

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
                call = turn.asked
                return CurrentCall(call.kind, call.description, turn.start_ns, tuple(self._late_members()))
        return None

    def _late_members(self) -> list[int]:
        return [index for index, queue in enumerate(self._queues) if not queue]

    def _advance(self) -> None:
        """Do all calls for which every member has come."""
        while all(self._queues):
            turns = [queue[0] for queue in self._queues]
            calls = [turn.asked for turn in turns]
            everybody_joined = all(call.kind is OperationKind.JOIN for call in calls)
            ready_ns = time.monotonic_ns()
            error: Exception | None = None
            try:
                check_calls_match(self.members, calls)
                run_calls(calls)
            except Exception as caught:  # the edge between members: all of them must learn of it
                error = caught
            for turn, queue in zip(turns, self._queues, strict=True):
                # Who has joined stays for the next call of the others, also when these made a mistake.
                if turn.asked.kind is not OperationKind.JOIN or everybody_joined:
                    queue.popleft()
                    turn.finish(ready_ns, error)

    def _check(self, turn: _MemberCall) -> None:
        """Raise when nothing can be done here any more."""
        description = turn.asked.description
        while self._first_closed is not None and self._aborted is None:
            who, deadline = self._first_closed
            if who == turn.member_index:
                raise RoundEnded(f"{description} cannot finish: channel {self.id} is closed")
            if not self._changed.wait(deadline.remaining_s) and deadline.expired:
                self._aborted = (self.members[who], f"it has closed channel {self.id}")
        if self._aborted is None or turn.end_ns:
            return
        lost, why = self._aborted
        if lost >= 0 and lost != turn.rank:
            raise PeerLost(rank=turn.rank, peer=lost, op=description, why=why)
        raise RoundEnded(f"{description} cannot finish: {why}")

    def _make_timeout(self, turn: _MemberCall, deadline: Deadline) -> OperationTimeout:
        own, call = turn.deadline.expired, turn.asked
        missing = self._late_members()
        waiting = f", waiting for {format_ranks(self.members[index] for index in missing)}" if missing else ""
        limit_s = (turn.deadline if own else deadline).timeout_s
        error = OperationTimeout(f"{call.description} took over {limit_s:g} s{waiting}")
        if own:  # for every member: the order of calls is lost
            self._aborted = (-1, f"rank {turn.rank} gave up: {error}")
            self._changed.notify_all()
        return error


class _ThreadsChannel:
    """A channel as one member sees it."""

    def __init__(self, backend: ThreadsBackend, spec: ChannelSpec, shared: _SharedChannel) -> None:
        self.spec = spec
        self._backend = backend
        self._shared = shared
        self._closed = False
        self._bucket = aligned_zeros(2 * spec.bucket_bytes)

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        return self.submit(call, deadline).wait(deadline)

    def make_allreduce_cache(self, timeout_s: float, record_failure: object, **more: object) -> None:
        return None

    def submit(self, call: Call, deadline: Deadline) -> RunningCall:
        return self._shared.submit(_MemberCall(self._shared, self.spec.member_index, call, deadline))

    def bucket(self) -> Memory:
        return as_memory(self._bucket)

    def current_call(self) -> CurrentCall | None:
        return self._shared.current_call(self.spec.member_index)

    def rank_lost(self, rank: int, why: str) -> None:
        self.abort(lost_rank=rank, why=why)

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        self._shared.abort(lost_rank, why)

    def close(self, why: str = "") -> None:
        if not self._closed:
            self._closed = True
            self._shared.close_member(self.spec.member_index)
            self._backend.close_channel(self._shared, self.spec.member_index)
