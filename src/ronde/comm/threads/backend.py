"""Ranks as threads of one process: the reference backend, in NumPy. Used by tests and by groups of one member.

A *hub* stands for the whole job; each rank makes its backend from it. A channel's members share a *meeting*, where
each has a queue of calls. Whoever brings the last missing call does the work for everybody, so there is no thread
here, and a member that leaves after its call is over harms nobody.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ronde.comm.backend import VERDICT_S, Call, ChannelSpec, Looking, Outcome
from ronde.comm.signature import mismatch
from ronde.comm.threads.reference import carry_out, compare, copy_across
from ronde.comm.wording import ranks_text
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded, StartFailed
from ronde.types import Deadline, Kind

__all__ = ["Hub", "ThreadsBackend"]

ALIGNMENT = 64


class Hub:
    """Where the ranks of one process find each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._meetings: dict[str, _Meeting] = {}
        self._lost: dict[int, str] = {}

    def enter(self, spec: ChannelSpec, deadline: Deadline) -> _Meeting:
        """Come to the meeting, and wait for all its members."""
        with self._changed:
            meeting = self._meetings.setdefault(spec.id, _Meeting(spec.id, spec.members))
            if meeting.members != spec.members:
                sides = f"{ranks_text(meeting.members)} and {ranks_text(spec.members)}"
                raise ValueError(f"channel {spec.id} was opened for different members: {sides}")
            meeting.present.add(spec.me)
            self._changed.notify_all()
            try:
                self._wait_for_all(meeting, spec, deadline)
            except RondeError:
                self._meetings.pop(spec.id, None)
                raise
            return meeting

    def leave(self, meeting: _Meeting, me: int) -> None:
        """The last one to leave ends the meeting."""
        with self._changed:
            meeting.present.discard(me)
            if not meeting.present:
                self._meetings.pop(meeting.id, None)

    def lost(self, rank: int, why: str) -> None:
        """Nobody has to wait for this rank any more."""
        with self._changed:
            self._lost.setdefault(rank, why)
            self._changed.notify_all()

    def _wait_for_all(self, meeting: _Meeting, spec: ChannelSpec, deadline: Deadline) -> None:
        opening = f"opening channel {spec.id}"
        while not meeting.opened:
            missing = [rank for index, rank in enumerate(spec.members) if index not in meeting.present]
            meeting.opened = not missing
            for rank in missing:
                if rank in self._lost:
                    raise PeerLost(rank=spec.members[spec.me], peer=rank, op=opening, why=self._lost[rank])
            if missing and not self._changed.wait(deadline.left_s) and deadline.passed:
                raise StartFailed(f"{opening}: {ranks_text(missing)} did not come within {deadline.seconds:g} s")
        self._changed.notify_all()


@dataclass(eq=False, slots=True)
class _Turn:
    """One call of one member, and what became of it."""

    me: int
    call: Call
    deadline: Deadline
    start_ns: int
    ready_ns: int = 0
    end_ns: int = 0
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class _Pair:
    """Messages from one member to another that have not met yet."""

    sends: deque[_Turn] = field(default_factory=deque)
    receives: deque[_Turn] = field(default_factory=deque)


class _Meeting:
    """The shared state of one channel. Everything happens under one lock."""

    def __init__(self, id: str, members: tuple[int, ...]) -> None:
        self.id = id
        self.members = members
        self.present: set[int] = set()
        self.opened = False
        self._changed = threading.Condition()
        self._queues: list[deque[_Turn]] = [deque() for _ in members]
        self._pairs: dict[tuple[int, int], _Pair] = {}
        self._aborted: tuple[int, str] | None = None
        self._deserted: tuple[int, Deadline] | None = None
        """Who closed the channel first, and until when to wait for an abort that says why."""

    def submit(self, me: int, call: Call, deadline: Deadline) -> _Turn:
        turn = _Turn(me, call, deadline, time.monotonic_ns())
        with self._changed:
            self._check(turn)
            if call.kind in (Kind.SEND, Kind.RECEIVE):
                self._pass_on(turn)
            else:
                self._queues[me].append(turn)
                self._advance()
            self._changed.notify_all()
        return turn

    def wait(self, turn: _Turn, deadline: Deadline) -> Outcome:
        with self._changed:
            while not turn.end_ns:
                self._check(turn)
                self._changed.wait(min(deadline.left_s, turn.deadline.left_s))
                if not turn.end_ns and self._aborted is None and (deadline.passed or turn.deadline.passed):
                    raise self._timeout(turn, deadline)
        if turn.error is not None:
            raise turn.error
        return Outcome(turn.start_ns, turn.ready_ns, turn.end_ns, "threads")

    def done(self, turn: _Turn) -> bool:
        return bool(turn.end_ns or self._aborted or self._deserted) or turn.deadline.passed

    def abort(self, lost: int, why: str) -> None:
        with self._changed:
            if self._aborted is None:
                self._aborted = (lost, why)
                self._changed.notify_all()

    def desert(self, me: int) -> None:
        with self._changed:
            if self._deserted is None:
                self._deserted = (me, Deadline(VERDICT_S))
                self._changed.notify_all()

    def look(self, me: int) -> Looking | None:
        with self._changed:
            if self._queues[me]:
                turn = self._queues[me][0]
                missing = tuple(index for index, queue in enumerate(self._queues) if not queue)
                return Looking(turn.call.text, turn.start_ns, missing)
            for pair in self._pairs.values():
                for turn in (*pair.sends, *pair.receives):
                    if turn.me == me:
                        return Looking(turn.call.text, turn.start_ns, (turn.call.peer,))
        return None

    def _advance(self) -> None:
        """Do all calls for which every member has come."""
        while all(self._queues):
            turns = [queue[0] for queue in self._queues]
            calls = [turn.call for turn in turns]
            everybody_joined = all(call.kind is Kind.JOIN for call in calls)
            ready_ns = time.monotonic_ns()
            error: Exception | None = None
            try:
                compare(self.members, calls)
                carry_out(calls)
            except Exception as caught:  # the edge between members: all of them must learn of it
                error = caught
            for turn, queue in zip(turns, self._queues, strict=True):
                # Who has joined stays for the next call of the others.
                if turn.call.kind is not Kind.JOIN or everybody_joined or error is not None:
                    queue.popleft()
                    _settle(turn, ready_ns, error)

    def _pass_on(self, turn: _Turn) -> None:
        me, peer = turn.me, turn.call.peer
        is_send = turn.call.kind is Kind.SEND
        pair = self._pairs.setdefault((me, peer) if is_send else (peer, me), _Pair())
        (pair.sends if is_send else pair.receives).append(turn)
        if not (pair.sends and pair.receives):
            return
        send, receive = pair.sends.popleft(), pair.receives.popleft()
        ready_ns = time.monotonic_ns()
        error: Exception | None = None
        if send.call.signature == receive.call.signature:
            copy_across(send.call, receive.call)
        else:
            error = mismatch({self.members[each.me]: each.call.text for each in (send, receive)})
        _settle(send, ready_ns, error)
        _settle(receive, ready_ns, error)

    def _check(self, turn: _Turn) -> None:
        """Raise when nothing can be done here any more."""
        while self._deserted is not None and self._aborted is None:
            who, patience = self._deserted
            if who == turn.me:
                raise RoundEnded(f"{turn.call.text} cannot finish: channel {self.id} is closed")
            if not self._changed.wait(patience.left_s) and patience.passed:
                self._aborted = (self.members[who], f"it has closed channel {self.id}")
        if self._aborted is None or turn.end_ns:
            return
        lost, why = self._aborted
        if lost >= 0 and lost != self.members[turn.me]:
            raise PeerLost(rank=self.members[turn.me], peer=lost, op=turn.call.text, why=why)
        raise RoundEnded(f"{turn.call.text} cannot finish: {why}")

    def _timeout(self, turn: _Turn, deadline: Deadline) -> OperationTimeout:
        own, call = turn.deadline.passed, turn.call
        late = [index for index, queue in enumerate(self._queues) if not queue]
        missing = [call.peer] if call.kind in (Kind.SEND, Kind.RECEIVE) else late
        waiting = f", waiting for {ranks_text(self.members[index] for index in missing)}" if missing else ""
        error = OperationTimeout(f"{call.text} took over {(turn.deadline if own else deadline).seconds:g} s{waiting}")
        if own:  # for every member: the order of calls is lost
            self._aborted = (-1, f"rank {self.members[turn.me]} gave up: {error}")
            self._changed.notify_all()
        return error


def _settle(turn: _Turn, ready_ns: int, error: Exception | None) -> None:
    turn.error = error
    turn.ready_ns = ready_ns
    turn.end_ns = time.monotonic_ns()


class _Ticket:
    """A call under way."""

    def __init__(self, meeting: _Meeting, turn: _Turn) -> None:
        self._meeting = meeting
        self._turn = turn

    def done(self) -> bool:
        return self._meeting.done(self._turn)

    def wait(self, deadline: Deadline) -> Outcome:
        return self._meeting.wait(self._turn, deadline)


class _Channel:
    """One member's place in a meeting."""

    def __init__(self, hub: Hub, spec: ChannelSpec, meeting: _Meeting) -> None:
        self.spec = spec
        self._hub = hub
        self._meeting = meeting
        self._closed = False
        room = np.zeros(spec.bucket_bytes + ALIGNMENT, np.uint8)
        start = -room.__array_interface__["data"][0] % ALIGNMENT
        self._bucket = room[start : start + spec.bucket_bytes]

    def run(self, call: Call, deadline: Deadline) -> Outcome:
        return self._meeting.wait(self._meeting.submit(self.spec.me, call, deadline), deadline)

    def submit(self, call: Call, deadline: Deadline) -> _Ticket:
        return _Ticket(self._meeting, self._meeting.submit(self.spec.me, call, deadline))

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._bucket

    def look(self) -> Looking | None:
        return self._meeting.look(self.spec.me)

    def abort(self, *, lost: int = -1, why: str) -> None:
        self._meeting.abort(lost, why)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._meeting.desert(self.spec.me)
            self._hub.leave(self._meeting, self.spec.me)


class ThreadsBackend:
    """One rank's way to the others in its process."""

    name = "threads"

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> _Channel:
        """Wait for all members and make the channel."""
        return _Channel(self._hub, spec, self._hub.enter(spec, deadline))

    def lost(self, rank: int, why: str) -> None:
        """End the waits for this rank in open_channel."""
        self._hub.lost(rank, why)

    def close(self) -> None:
        """Nothing is held."""
