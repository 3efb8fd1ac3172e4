"""The native backend: opens the C++ data plane's channels with sockets and memory that were authenticated here.

Members of one host share a memory file, made by the lowest of them and handed over a Unix socket. Members of different
hosts get TCP sockets, knocked for by the higher rank at the lower one's door: one alarm, some for data, and one more
where send and receive are wanted.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ronde.comm import _native
from ronde.comm._native import NativeLayout, NativeResult, Status
from ronde.comm.backend import Call, ChannelSpec, Looking, Outcome
from ronde.comm.signature import mismatch
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded, StartFailed
from ronde.net.descriptors import make_memory, receive_descriptor, send_descriptor
from ronde.net.door import Caller, Door, knock
from ronde.net.keys import JobKey
from ronde.settings import Settings
from ronde.types import Deadline, Topology

__all__ = ["NativeBackend", "NativeChannel"]

SEGMENT = "segment"
"""Purpose of a call at the door: give me the descriptor of our host's memory."""

VERDICT_S = 0.5
"""How long a failed call waits for the words of the coordinator, which knows how a member ended."""


class NativeBackend:
    """Opens native channels among the members of a round."""

    name = "native"

    def __init__(self, topology: Topology, door: Door, key: JobKey, settings: Settings) -> None:
        self._topology = topology
        self._door = door
        self._key = key
        self._settings = settings

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> NativeChannel:
        """Connect the members and open the channel. Collective among them."""
        layout = _Layout.of(spec, self._topology, self._settings)
        wiring = _Wiring(len(spec.members), self._settings.num_sockets + 1)
        segment = -1
        try:
            segment = self._share_memory(spec, layout, deadline)
            self._connect(spec, layout, wiring, deadline)
            return NativeChannel(spec, layout, segment, wiring, self._settings)
        finally:
            wiring.close()  # what the channel did not take over
            if segment >= 0:
                os.close(segment)

    def lost(self, rank: int, why: str) -> None:
        """Nobody waits at the door for a rank that is gone."""
        self._door.fail(rank, PeerLost(rank=self._topology.rank, peer=rank, op="opening a channel", why=why))

    def close(self) -> None:
        """Nothing of its own: the door belongs to the world."""

    def _share_memory(self, spec: ChannelSpec, layout: _Layout, deadline: Deadline) -> int:
        local = [spec.members[index] for index in layout.local]
        if len(local) == 1:
            return -1
        me, purpose = spec.members[spec.me], f"{SEGMENT} {spec.id}"
        if me != local[0]:
            address = f"unix:{self._topology.members[local[0]].unix_door}"
            sock, _ = knock(address, self._key, Caller(purpose, me), deadline)
            with sock:
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

    def _connect(self, spec: ChannelSpec, layout: _Layout, wiring: _Wiring, deadline: Deadline) -> None:
        """Knock at all lower ranks first, then open for the higher ones: the doors answer by themselves, so no two
        members can wait for each other."""
        remote = [index for index in range(len(spec.members)) if layout.places[index] != layout.places[spec.me]]
        num = wiring.num_sockets + (1 if spec.direct else 0)
        for index in (index for index in remote if index < spec.me):
            for number in range(num):
                wiring.add(index, self._knock_at(spec.members[index], f"{spec.id} {number}", deadline))
        for index in (index for index in remote if index > spec.me):
            for number in range(num):
                wiring.add(index, self._door.take(f"{spec.id} {number}", spec.members[index], deadline))

    def _knock_at(self, rank: int, purpose: str, deadline: Deadline) -> socket.socket:
        failures = []
        doors = self._topology.members[rank].tcp_doors
        for number, address in enumerate(doors):
            patience = Deadline(deadline.left_s / (len(doors) - number))
            try:
                sock, _ = knock(address, self._key, Caller(purpose, self._topology.rank), patience)
            except StartFailed as failure:
                failures.append(str(failure))
            else:
                return sock
        raise StartFailed(f"rank {self._topology.rank} cannot reach rank {rank}: {'; '.join(failures) or 'it has no TCP door'}")


@dataclass(slots=True)
class _Wiring:
    """The sockets of a channel until the library takes them over."""

    num_members: int
    num_sockets: int
    rows: dict[int, list[socket.socket]] = field(default_factory=dict)

    def add(self, member: int, sock: socket.socket) -> None:
        self.rows.setdefault(member, []).append(sock)

    def detach(self) -> tuple[ctypes.Array[ctypes.c_int], ctypes.Array[ctypes.c_int]]:
        """Descriptors for rd_open: alarm and data sockets row by row, then the direct ones."""
        sockets = (ctypes.c_int * (self.num_members * self.num_sockets))(*[-1] * (self.num_members * self.num_sockets))
        direct = (ctypes.c_int * self.num_members)(*[-1] * self.num_members)
        for member, row in self.rows.items():
            for number, sock in enumerate(row):
                if number < self.num_sockets:
                    sockets[member * self.num_sockets + number] = sock.detach()
                else:
                    direct[member] = sock.detach()
        self.rows.clear()
        return sockets, direct

    def close(self) -> None:
        for row in self.rows.values():
            for sock in row:
                sock.close()


@dataclass(frozen=True, slots=True)
class _Layout:
    """rd_layout of a channel, and which members are at my place."""

    native: NativeLayout
    places: tuple[int, ...]
    local: tuple[int, ...]
    keep: object

    @classmethod
    def of(cls, spec: ChannelSpec, topology: Topology, settings: Settings) -> _Layout:
        world = topology.places
        seen: dict[int, int] = {}
        places = tuple(seen.setdefault(world[rank], len(seen)) for rank in spec.members)
        numbers = (ctypes.c_uint32 * len(places))(*places)
        native = NativeLayout(
            _native.ABI,
            len(places),
            spec.me,
            len(os.sched_getaffinity(0)),
            numbers,
            settings.slot_bytes // 64 * 64,
            settings.chunk_bytes // 64 * 64,
            spec.bucket_bytes,
        )
        local = tuple(index for index, place in enumerate(places) if place == places[spec.me])
        return cls(native, places, local, numbers)

    def segment_bytes(self) -> int:
        num_bytes: int = _native.library().rd_segment_bytes(self.native)
        return num_bytes


class _Scratch(threading.local):
    """A thread's own structs, filled anew for every call: making them is dearer than filling them."""

    def __init__(self) -> None:
        self.part = _native.NativePart()
        self.one_part = ctypes.pointer(self.part)
        self.call = _native.NativeCall()
        self.result = NativeResult()


_scratch = _Scratch()


class NativeChannel:
    """A channel of the C++ data plane."""

    def __init__(self, spec: ChannelSpec, layout: _Layout, segment: int, wiring: _Wiring, settings: Settings) -> None:
        self.spec = spec
        self._library = _native.library()
        self._algorithm = _native.ALGORITHMS.index(settings.algorithm)
        self._lock = threading.Lock()  # guards what follows
        self._inside = 0
        self._left = threading.Condition(self._lock)
        self._end: tuple[int, str] | None = None
        sockets, direct = wiring.detach()
        handle = ctypes.c_void_p()
        status = self._library.rd_open(layout.native, segment, sockets, wiring.num_sockets, direct, ctypes.byref(handle))
        if status != Status.OK:
            raise RondeError(f"the native library could not open channel {spec.id} (status {status})")
        self._handle: ctypes.c_void_p | None = handle

    def run(self, call: Call, deadline: Deadline) -> Outcome:
        """Execute the call and wait for it."""
        scratch = _scratch
        keep = self._fill(scratch, call)
        result = scratch.result
        handle = self._enter()
        try:
            status = self._library.rd_run(handle, scratch.call, result, deadline.left_s)
        finally:
            self._leave()
        del keep
        if status != Status.OK:
            raise self._error(call.text, result, deadline)
        return Outcome(result.start_ns, result.ready_ns, result.end_ns, _native.ALGORITHMS[result.algorithm])

    def submit(self, call: Call, deadline: Deadline) -> NativeTicket:
        """Queue the call behind those before it."""
        scratch = _scratch
        keep = self._fill(scratch, call)
        number = ctypes.c_uint64()
        handle = self._enter()
        try:
            status = self._library.rd_submit(handle, scratch.call, deadline.left_s, ctypes.byref(number))
        finally:
            self._leave()
        del keep
        if status != Status.OK:
            raise self._error(call.text, NativeResult(status, -1), deadline)
        return NativeTicket(self, number.value, call)

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """My bucket memory."""
        address = self._within(self._library.rd_bucket)
        return _native.view(address or 0, self.spec.bucket_bytes)

    def look(self) -> Looking | None:
        """The call under way, or None when idle."""
        now = _native.NativeNow()
        missing = (ctypes.c_uint32 * len(self.spec.members))()
        try:
            self._within(self._library.rd_look, ctypes.byref(now), missing)
        except RoundEnded:
            return None
        if now.since_ns == 0:
            return None
        return Looking(now.text.decode(errors="replace"), now.since_ns, tuple(missing[: now.num_missing]))

    def abort(self, *, lost: int = -1, why: str) -> None:
        """End all waits of all members."""
        with self._lock:
            if self._end is None:
                self._end = (lost, why)
            self._left.notify_all()
        member = self.spec.members.index(lost) if lost in self.spec.members else -1
        try:
            self._within(self._library.rd_abort, member)
        except RoundEnded:
            return

    def close(self) -> None:
        """Leave in good order when idle, end what is under way otherwise, then free everything."""
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is None:
                return
            if self._end is None:
                self._end = (-1, f"channel {self.spec.id} was closed")
            if self._inside:
                self._library.rd_abort(handle, -1)
            while self._inside:
                self._left.wait()  # an abort ends every call inside within moments
        self._library.rd_close(handle)

    def _enter(self) -> ctypes.c_void_p:
        """The handle, kept from being freed until _leave()."""
        with self._lock:
            if self._handle is None:
                raise RoundEnded(f"channel {self.spec.id} is closed")
            self._inside += 1
            return self._handle

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._handle is None:
                self._left.notify_all()

    def _within(self, function: Callable[..., int | None], *arguments: object) -> int | None:
        handle = self._enter()
        try:
            return function(handle, *arguments)
        finally:
            self._leave()

    def _fill(self, scratch: _Scratch, call: Call) -> object:
        """Put the call into the thread's struct. Returns what must live until the library has read it."""
        native = scratch.call
        native.kind = call.kind
        native.dtype = call.dtype
        native.op = call.op
        native.algorithm = self._algorithm if call.kind == 1 else 0
        native.flags = _native.TRUSTED if call.trusted else 0
        native.peer = call.peer
        native.prescale = call.prescale
        native.postscale = call.postscale
        native.signature = call.signature
        text = native.text = call.text.encode(errors="replace")
        parts = call.parts
        native.num_parts = len(parts)
        if len(parts) == 1:
            part = scratch.part
            part.source, part.target, part.count = parts[0].source, parts[0].target, parts[0].count
            native.parts = scratch.one_part
            array: object = None
        else:
            array = (_native.NativePart * len(parts))(*[(part.source, part.target, part.count) for part in parts])
            native.parts = ctypes.cast(array, ctypes.POINTER(_native.NativePart))
        native.counts = _numbers(call.counts)
        native.splits = _numbers(call.splits)
        return text, array

    def _error(self, text: str, result: NativeResult, deadline: Deadline) -> Exception:
        """What a status stands for."""
        status, me = result.status, self.spec.members[self.spec.me]
        if status == Status.MISMATCH:
            return mismatch(self._asked())
        if status == Status.BAD_CALL:
            return ValueError(f"{text}: the arguments do not fit together")
        if status == Status.TIMEOUT:
            missing = f"; rank {self.spec.members[result.member]} has not come" if result.member >= 0 else ""
            return OperationTimeout(f"{text} did not finish within {deadline.seconds:g} s on rank {me}{missing}")
        if status == Status.SYSTEM:
            return RondeError(f"{text} failed on rank {me}: {os.strerror(result.detail)}")
        blamed = self.spec.members[result.member] if result.member >= 0 else -1
        lost, why = self._verdict(blamed)
        if lost >= 0:
            return PeerLost(rank=me, peer=lost, op=text, why=why)
        return RoundEnded(f"{text} on rank {me}: {why}")

    def _verdict(self, blamed: int) -> tuple[int, str]:
        """Who is to blame and why, in the words of whoever saw it. Those may arrive a moment after the sockets closed."""
        with self._lock:
            self._left.wait_for(lambda: self._end is not None, timeout=VERDICT_S)
            if self._end is not None:
                return self._end
        return (blamed, "its connection closed") if blamed >= 0 else (-1, "another member ended the operation")

    def _asked(self) -> dict[int, str]:
        asked = (_native.NativeAsked * len(self.spec.members))()
        self._within(self._library.rd_asked_by, asked)
        texts = {rank: one.text.decode(errors="replace") for rank, one in zip(self.spec.members, asked, strict=True)}
        return {rank: text for rank, text in texts.items() if text}


def _numbers(numbers: tuple[int, ...] | None) -> ctypes.Array[ctypes.c_uint64] | None:
    return None if numbers is None else (ctypes.c_uint64 * len(numbers))(*numbers)


class NativeTicket:
    """A call under way on a native channel."""

    __slots__ = ("_call", "_channel", "_number", "_outcome")

    def __init__(self, channel: NativeChannel, number: int, call: Call) -> None:
        self._channel = channel
        self._number = number
        self._call = call
        self._outcome: Outcome | Exception | None = None

    def done(self) -> bool:
        """Whether wait() would return at once."""
        if self._outcome is not None:
            return True
        try:
            return self._channel._within(self._channel._library.rd_done, self._number) != 0
        except RoundEnded:
            return True

    def wait(self, deadline: Deadline) -> Outcome:
        """Wait for the call; raises what it ended in."""
        if self._outcome is None:
            self._outcome = self._wait(deadline)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def _wait(self, deadline: Deadline) -> Outcome | Exception:
        channel, result = self._channel, _scratch.result
        status = channel._within(channel._library.rd_wait, self._number, result, deadline.left_s)
        if status == Status.OK:
            return Outcome(result.start_ns, result.ready_ns, result.end_ns, _native.ALGORITHMS[result.algorithm])
        if status == Status.TIMEOUT and result.end_ns == 0:  # only this wait ran out of time
            raise OperationTimeout(f"{self._call.text} is still under way after {deadline.seconds:g} s")
        return channel._error(self._call.text, result, deadline)
