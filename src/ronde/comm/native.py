"""The native backend: opens the C++ data plane's channels with sockets and memory that were authenticated here.

Members of one host share a memory file, made by the lowest of them and handed over a Unix socket. Members of different
hosts get TCP sockets, knocked for by the higher rank at the lower one's door: one alarm, some for data, and one more
where send and receive are wanted.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import numpy as np

from ronde.comm._handle import Ending, Handle, Layout
from ronde.comm._native import Status
from ronde.comm.backend import VERDICT_S, Call, ChannelSpec, Looking, Outcome
from ronde.comm.signature import mismatch
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded, StartFailed
from ronde.net.descriptors import make_memory, receive_descriptor, send_descriptor
from ronde.net.door import Caller, Connection, Door, knock
from ronde.net.keys import JobKey
from ronde.net.sockets import unreachable
from ronde.settings import Settings
from ronde.types import Deadline, Topology

__all__ = ["NativeBackend", "NativeChannel"]

T = TypeVar("T")


class NativeBackend:
    """Opens native channels among the members of a round."""

    name = "native"

    def __init__(self, topology: Topology, door: Door, key: JobKey, settings: Settings) -> None:
        self._topology = topology
        self._door = door
        self._key = key
        self._settings = settings
        self._lost: dict[int, PeerLost] = {}

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> NativeChannel:
        """Connect the members and open the channel. Collective among them."""
        layout = self._layout(spec)
        with ExitStack() as stack:
            segment = self._share_memory(spec, layout, deadline)
            if segment >= 0:
                stack.callback(os.close, segment)
            sockets = self._connect(spec, layout, stack, deadline)
            num = self._settings.num_sockets + 1
            data = {member: [sock.detach() for sock in row[:num]] for member, row in sockets.items()}
            direct = {member: row[num].detach() for member, row in sockets.items() if len(row) > num}
            try:
                return NativeChannel(spec, Handle(layout, segment, data, direct, self._settings.algorithm))
            except Ending as ending:
                raise RondeError(f"the native library could not open channel {spec.id}: {ending}") from None

    def lost(self, rank: int, why: str) -> None:
        """Nobody waits at the door for a rank that is gone, or at its own."""
        lost = PeerLost(rank=self._topology.rank, peer=rank, op="opening a channel", why=why)
        self._lost[rank] = lost
        self._door.fail(rank, lost)

    def close(self) -> None:
        """Nothing of its own: the door belongs to the world."""

    def _layout(self, spec: ChannelSpec) -> Layout:
        world = self._topology.places
        seen: dict[int, int] = {}
        return Layout(
            places=[seen.setdefault(world[rank], len(seen)) for rank in spec.members],
            me=spec.me,
            num_cores=len(os.sched_getaffinity(0)),
            slot_bytes=self._settings.slot_bytes,
            chunk_bytes=self._settings.chunk_bytes,
            bucket_bytes=spec.bucket_bytes,
        )

    def _share_memory(self, spec: ChannelSpec, layout: Layout, deadline: Deadline) -> int:
        """The descriptor of my host's memory; -1 when I am alone there."""
        local = [spec.members[index] for index in layout.local]
        if len(local) == 1:
            return -1
        purpose = f"segment {spec.id}"
        if spec.members[spec.me] != local[0]:
            address = f"unix:{self._topology.members[local[0]].unix_door}"
            with self._knock(local[0], address, purpose, deadline) as sock:
                return receive_descriptor(sock, deadline)
        segment = make_memory(f"ronde {spec.id}", layout.segment_bytes())
        try:
            for rank in local[1:]:
                with self._door.take(purpose, rank, deadline) as sock:
                    send_descriptor(sock, segment)
        except BaseException:
            os.close(segment)
            raise
        return segment

    def _connect(
        self, spec: ChannelSpec, layout: Layout, stack: ExitStack, deadline: Deadline
    ) -> dict[int, list[Connection]]:
        """Sockets to the members of other hosts. Knocks at all lower ranks first, then opens for the higher ones: doors
        answer by themselves, so no two members can wait for each other."""
        num = self._settings.num_sockets + 1 + (1 if spec.direct else 0)
        rows: dict[int, list[Connection]] = {}
        for index, rank in enumerate(spec.members):
            if layout.places[index] == layout.places[spec.me]:
                continue
            for number in range(num):
                purpose = f"{spec.id} {number}"
                if index < spec.me:
                    sock = self._knock_at(rank, purpose, deadline)
                else:
                    sock = self._door.take(purpose, rank, deadline)
                rows.setdefault(index, []).append(stack.enter_context(sock))
        return rows

    def _knock_at(self, rank: int, purpose: str, deadline: Deadline) -> Connection:
        failures = []
        doors = self._topology.members[rank].tcp_doors
        for number, address in enumerate(doors):
            patience = Deadline(deadline.left_s / (len(doors) - number))
            try:
                return self._knock(rank, address, purpose, patience)
            except StartFailed as failure:
                failures.append(str(failure))
        reasons = "; ".join(failures) or "it has no TCP door"
        raise StartFailed(f"rank {self._topology.rank} cannot reach rank {rank}: {reasons}")

    def _knock(self, rank: int, address: str, purpose: str, deadline: Deadline) -> Connection:
        def give_up_when_lost() -> None:
            if rank in self._lost:
                raise self._lost[rank]

        caller = Caller(purpose, self._topology.rank)
        heartbeat_s = self._settings.heartbeat_s
        sock, _ = knock(address, self._key, caller, deadline, heartbeat_s=heartbeat_s, before_retry=give_up_when_lost)
        return sock


class NativeChannel:
    """A channel of the C++ data plane."""

    def __init__(self, spec: ChannelSpec, handle: Handle) -> None:
        self.spec = spec
        self._handle: Handle | None = handle
        # One entry per thread that uses the handle, which is freed when they have left. A deque, because on the path of
        # every call a lock would cost more than all the rest: who enters is seen by close(), or sees that it is closed.
        self._inside: deque[None] = deque()
        self._changed = threading.Condition()  # guards _end, and tells of it and of the last one who left
        self._end: tuple[int, str] | None = None

    def run(self, call: Call, deadline: Deadline) -> Outcome:
        """Execute the call and wait for it."""
        handle = self._enter()
        try:
            return handle.run(call, deadline.left_s)
        except Ending as ending:
            raise self._error(call.text, ending, deadline, handle) from None
        finally:
            self._leave()

    def submit(self, call: Call, deadline: Deadline) -> NativeTicket:
        """Queue the call behind those before it."""
        try:
            number = self._within(lambda handle: handle.submit(call, deadline.left_s))
        except Ending as ending:
            raise ValueError(f"{call.text}: the arguments do not fit together ({ending})") from None
        return NativeTicket(self, number, call)

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """My bucket memory."""
        return self._within(lambda handle: handle.bucket(self.spec.bucket_bytes))

    def look(self) -> Looking | None:
        """The call under way, or None when idle."""
        try:
            return self._within(lambda handle: handle.look())
        except RoundEnded:
            return None

    def abort(self, *, lost: int = -1, why: str) -> None:
        """End all waits of all members."""
        with self._changed:
            if self._end is None:
                self._end = (lost, why)
            self._changed.notify_all()
        member = self.spec.members.index(lost) if lost in self.spec.members else -1
        try:
            self._within(lambda handle: handle.abort(member))
        except RoundEnded:
            return

    def close(self) -> None:
        """Leave in good order when idle, end what is under way otherwise, then free everything."""
        with self._changed:
            handle, self._handle = self._handle, None
            if handle is None:
                return
            if self._end is None:
                self._end = (-1, f"channel {self.spec.id} was closed")
            if self._inside:
                handle.abort(-1)
            while self._inside:
                self._changed.wait()  # an abort ends every call inside within moments
        handle.close()

    def _enter(self) -> Handle:
        """The handle, kept from being freed until _leave()."""
        self._inside.append(None)
        handle = self._handle
        if handle is None:
            self._leave()
            raise RoundEnded(f"channel {self.spec.id} is closed")
        return handle

    def _leave(self) -> None:
        self._inside.pop()
        if self._handle is None:
            with self._changed:
                self._changed.notify_all()

    def _within(self, use: Callable[[Handle], T]) -> T:
        handle = self._enter()
        try:
            return use(handle)
        finally:
            self._leave()

    def _wait(self, number: int, call: Call, deadline: Deadline) -> Outcome:
        handle = self._enter()
        try:
            return handle.wait(number, deadline.left_s)
        except Ending as ending:
            if ending.waiting:
                raise StillWaiting(f"{call.text} is still under way after {deadline.seconds:g} s") from None
            raise self._error(call.text, ending, deadline, handle) from None
        finally:
            self._leave()

    def _error(self, text: str, ending: Ending, deadline: Deadline, handle: Handle) -> Exception:
        """What the caller sees."""
        members, me = self.spec.members, self.spec.members[self.spec.me]
        blamed = members[ending.member] if ending.member >= 0 else -1
        if ending.status == Status.MISMATCH:
            return mismatch({rank: said for rank, said in zip(members, handle.asked(), strict=True) if said})
        if ending.status == Status.BAD_CALL:
            return ValueError(f"{text}: the arguments do not fit together")
        if ending.status == Status.TIMEOUT:
            late = f": rank {blamed} did not come in time" if blamed >= 0 else ""
            error: RondeError = (
                OperationTimeout(f"{text} did not finish within {deadline.seconds:g} s on rank {me}{late}")
                if deadline.passed
                else RoundEnded(f"{text} on rank {me}: an operation timed out on another member{late}")
            )
            error.missing = (blamed,) if blamed >= 0 else ()
            return error
        if ending.status == Status.SYSTEM:
            return RondeError(f"{text} failed on rank {me}: {os.strerror(ending.detail)}")
        lost, why = self._verdict(blamed, ending.detail)
        if lost >= 0:
            return PeerLost(rank=me, peer=lost, op=text, why=why)
        return RoundEnded(f"{text} on rank {me}: {why}")

    def _verdict(self, blamed: int, error: int) -> tuple[int, str]:
        """Who is to blame and why, as seen by whoever saw it; that may arrive a moment after the sockets closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None, timeout=VERDICT_S)
            if self._end is not None:
                return self._end
        if blamed < 0:
            return -1, "another member ended the operation"
        return blamed, unreachable(error) or "its connection closed"


class StillWaiting(OperationTimeout):
    """Only the wait ended: the call is still under way."""


class NativeTicket:
    """A call under way on a native channel."""

    __slots__ = ("_call", "_channel", "_ended", "_lock", "_number")

    def __init__(self, channel: NativeChannel, number: int, call: Call) -> None:
        self._channel = channel
        self._number = number
        self._call = call
        self._lock = threading.Lock()  # one thread asks the library, which forgets the call then
        self._ended: Outcome | Exception | None = None

    def done(self) -> bool:
        """Whether wait() would return at once."""
        if self._ended is not None:
            return True
        try:
            return self._channel._within(lambda handle: handle.done(self._number))
        except RoundEnded:
            return True

    def wait(self, deadline: Deadline) -> Outcome:
        """Wait for the call; raises what it ended in."""
        with self._lock:
            if self._ended is None:
                try:
                    self._ended = self._channel._wait(self._number, self._call, deadline)
                except StillWaiting:
                    raise
                except Exception as error:
                    self._ended = error
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended
