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

from ronde.comm.backends.base import LOSS_REASON_S, CallTiming, ChannelSpec, CurrentCall
from ronde.comm.backends.native_library import ChannelHandle, ChannelParams, NativeError, NativeStatus
from ronde.comm.call import Call, mismatch_error
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded, StartFailed
from ronde.net.connect import Connection, connect_authenticated, describe_disconnect
from ronde.net.descriptors import create_shared_memory, receive_descriptor, send_descriptor
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.settings import Settings
from ronde.types import Deadline, Topology

__all__ = ["NativeBackend", "NativeChannel"]

T = TypeVar("T")


class NativeBackend:
    """Opens native channels among the members of a round."""

    name = "native"

    def __init__(self, topology: Topology, listener: Listener, key: JobKey, settings: Settings) -> None:
        self._topology = topology
        self._listener = listener
        self._key = key
        self._settings = settings
        self._lost: dict[int, PeerLost] = {}

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> NativeChannel:
        """Connect the members and open the channel. Collective among them."""
        layout = self._make_params(spec)
        with ExitStack() as stack:
            segment = self._share_segment(spec, layout, deadline)
            if segment >= 0:
                stack.callback(os.close, segment)
            sockets = self._connect_members(spec, layout, stack, deadline)
            num = self._settings.num_sockets + 1
            data = {member: [sock.detach() for sock in row[:num]] for member, row in sockets.items()}
            direct = {member: row[num].detach() for member, row in sockets.items() if len(row) > num}
            try:
                return NativeChannel(spec, ChannelHandle(layout, segment, data, direct, self._settings.algorithm))
            except NativeError as ending:
                raise RondeError(f"the native library could not open channel {spec.id}: {ending}") from None

    def rank_lost(self, rank: int, why: str) -> None:
        """Nobody waits at the door for a rank that is gone, or at its own."""
        lost = PeerLost(rank=self._topology.rank, peer=rank, op="opening a channel", why=why)
        self._lost[rank] = lost
        self._listener.fail_rank(rank, lost)

    def close(self) -> None:
        """Nothing of its own: the door belongs to the world."""

    def _make_params(self, spec: ChannelSpec) -> ChannelParams:
        world = self._topology.host_indices
        seen: dict[int, int] = {}
        return ChannelParams(
            hosts=[seen.setdefault(world[rank], len(seen)) for rank in spec.members],
            member_index=spec.member_index,
            num_cores=len(os.sched_getaffinity(0)),
            slot_bytes=self._settings.slot_bytes,
            chunk_bytes=self._settings.chunk_bytes,
            bucket_bytes=spec.bucket_bytes,
        )

    def _share_segment(self, spec: ChannelSpec, params: ChannelParams, deadline: Deadline) -> int:
        """The descriptor of my host's memory; -1 when I am alone there."""
        local = [spec.members[index] for index in params.local_members]
        if len(local) == 1:
            return -1
        purpose = f"segment {spec.id}"
        if spec.members[spec.member_index] != local[0]:
            address = f"unix:{self._topology.members[local[0]].unix_socket}"
            with self._connect_to_address(local[0], address, purpose, deadline) as sock:
                return receive_descriptor(sock, deadline)
        segment = create_shared_memory(f"ronde {spec.id}", params.segment_bytes())
        try:
            for rank in local[1:]:
                with self._listener.accept(purpose, rank, deadline) as sock:
                    send_descriptor(sock, segment)
        except BaseException:
            os.close(segment)
            raise
        return segment

    def _connect_members(
        self, spec: ChannelSpec, params: ChannelParams, stack: ExitStack, deadline: Deadline
    ) -> dict[int, list[Connection]]:
        """Sockets to the members of other hosts. Knocks at all lower ranks first, then opens for the higher ones: doors
        answer by themselves, so no two members can wait for each other."""
        num = self._settings.num_sockets + 1 + (1 if spec.point_to_point else 0)
        rows: dict[int, list[Connection]] = {}
        for index, rank in enumerate(spec.members):
            if params.hosts[index] == params.hosts[spec.member_index]:
                continue
            for number in range(num):
                purpose = f"{spec.id} {number}"
                if index < spec.member_index:
                    sock = self._connect_to(rank, purpose, deadline)
                else:
                    sock = self._listener.accept(purpose, rank, deadline)
                rows.setdefault(index, []).append(stack.enter_context(sock))
        return rows

    def _connect_to(self, rank: int, purpose: str, deadline: Deadline) -> Connection:
        failures = []
        doors = self._topology.members[rank].tcp_addresses
        for number, address in enumerate(doors):
            patience = Deadline(deadline.remaining_s / (len(doors) - number))
            try:
                return self._connect_to_address(rank, address, purpose, patience)
            except StartFailed as failure:
                failures.append(str(failure))
        reasons = "; ".join(failures) or "it has no TCP door"
        raise StartFailed(f"rank {self._topology.rank} cannot reach rank {rank}: {reasons}")

    def _connect_to_address(self, rank: int, address: str, purpose: str, deadline: Deadline) -> Connection:
        def give_up_when_lost() -> None:
            if rank in self._lost:
                raise self._lost[rank]

        caller = ConnectionRequest(purpose, self._topology.rank)
        heartbeat_s = self._settings.heartbeat_s
        sock, _ = connect_authenticated(
            address, self._key, caller, deadline, heartbeat_s=heartbeat_s, before_retry=give_up_when_lost
        )
        return sock


class NativeChannel:
    """A channel of the C++ data plane."""

    def __init__(self, spec: ChannelSpec, handle: ChannelHandle) -> None:
        self.spec = spec
        self._handle: ChannelHandle | None = handle
        # One entry per thread that uses the handle, which is freed when they have left. A deque, because on the path of
        # every call a lock would cost more than all the rest: who enters is seen by close(), or sees that it is closed.
        self._users: deque[None] = deque()
        self._changed = threading.Condition()  # guards _end, and tells of it and of the last one who left
        self._abort_reason: tuple[int, str] | None = None

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        """Execute the call and wait for it."""
        handle = self._acquire_handle()
        try:
            return handle.run(call, deadline.remaining_s)
        except NativeError as ending:
            raise self._make_error(call.description, ending, deadline, handle) from None
        finally:
            self._release_handle()

    def submit(self, call: Call, deadline: Deadline) -> NativeRunningCall:
        """Queue the call behind those before it."""
        try:
            number = self._with_handle(lambda handle: handle.submit(call, deadline.remaining_s))
        except NativeError as ending:
            raise ValueError(f"{call.description}: the arguments do not fit together ({ending})") from None
        return NativeRunningCall(self, number, call)

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """My bucket memory."""
        return self._with_handle(lambda handle: handle.bucket(self.spec.bucket_bytes))

    def current_call(self) -> CurrentCall | None:
        """The call under way, or None when idle."""
        try:
            return self._with_handle(lambda handle: handle.current_call())
        except RoundEnded:
            return None

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        """End all waits of all members."""
        with self._changed:
            if self._abort_reason is None:
                self._abort_reason = (lost_rank, why)
            self._changed.notify_all()
        member = self.spec.members.index(lost_rank) if lost_rank in self.spec.members else -1
        try:
            self._with_handle(lambda handle: handle.abort(member))
        except RoundEnded:
            return

    def close(self) -> None:
        """Leave in good order when idle, end what is under way otherwise, then free everything."""
        with self._changed:
            handle, self._handle = self._handle, None
            if handle is None:
                return
            if self._abort_reason is None:
                self._abort_reason = (-1, f"channel {self.spec.id} was closed")
            if self._users:
                handle.abort(-1)
            while self._users:
                self._changed.wait()  # an abort ends every call inside within moments
        handle.close()

    def _acquire_handle(self) -> ChannelHandle:
        """The handle, kept from being freed until _leave()."""
        self._users.append(None)
        handle = self._handle
        if handle is None:
            self._release_handle()
            raise RoundEnded(f"channel {self.spec.id} is closed")
        return handle

    def _release_handle(self) -> None:
        self._users.pop()
        if self._handle is None:
            with self._changed:
                self._changed.notify_all()

    def _with_handle(self, use: Callable[[ChannelHandle], T]) -> T:
        handle = self._acquire_handle()
        try:
            return use(handle)
        finally:
            self._release_handle()

    def _wait(self, work: int, call: Call, deadline: Deadline) -> CallTiming:
        handle = self._acquire_handle()
        try:
            return handle.wait(work, deadline.remaining_s)
        except NativeError as ending:
            if ending.still_running:
                raise WaitTimedOut(f"{call.description} is still under way after {deadline.timeout_s:g} s") from None
            raise self._make_error(call.description, ending, deadline, handle) from None
        finally:
            self._release_handle()

    def _make_error(self, description: str, error: NativeError, deadline: Deadline, handle: ChannelHandle) -> Exception:
        """What the caller sees."""
        members, me = self.spec.members, self.spec.members[self.spec.member_index]
        blamed = members[error.member] if error.member >= 0 else -1
        if error.status == NativeStatus.MISMATCH:
            return mismatch_error(
                {rank: said for rank, said in zip(members, handle.member_descriptions(), strict=True) if said}
            )
        if error.status == NativeStatus.BAD_CALL:
            return ValueError(f"{description}: the arguments do not fit together")
        if error.status == NativeStatus.TIMEOUT:
            late = f": rank {blamed} did not come in time" if blamed >= 0 else ""
            timeout: RondeError = (
                OperationTimeout(f"{description} did not finish within {deadline.timeout_s:g} s on rank {me}{late}")
                if deadline.expired
                else RoundEnded(f"{description} on rank {me}: an operation timed out on another member{late}")
            )
            timeout.missing = (blamed,) if blamed >= 0 else ()
            return timeout
        if error.status == NativeStatus.SYSTEM:
            return RondeError(f"{description} failed on rank {me}: {os.strerror(error.detail)}")
        lost, why = self._loss_reason(blamed, error.detail)
        if lost >= 0:
            return PeerLost(rank=me, peer=lost, op=description, why=why)
        return RoundEnded(f"{description} on rank {me}: {why}")

    def _loss_reason(self, member_rank: int, errno_code: int) -> tuple[int, str]:
        """Who is to blame and why, as seen by whoever saw it; that may arrive a moment after the sockets closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._abort_reason is not None, timeout=LOSS_REASON_S)
            if self._abort_reason is not None:
                return self._abort_reason
        if member_rank < 0:
            return -1, "another member ended the operation"
        return member_rank, describe_disconnect(errno_code) or "its connection closed"


class WaitTimedOut(OperationTimeout):
    """Only the wait ended: the call is still under way."""


class NativeRunningCall:
    """A call under way on a native channel."""

    __slots__ = ("_call", "_channel", "_lock", "_result", "_work")

    def __init__(self, channel: NativeChannel, work: int, call: Call) -> None:
        self._channel = channel
        self._work = work
        self._call = call
        self._lock = threading.Lock()  # one thread asks the library, which forgets the call then
        self._result: CallTiming | Exception | None = None

    def done(self) -> bool:
        """Whether wait() would return at once."""
        if self._result is not None:
            return True
        try:
            return self._channel._with_handle(lambda handle: handle.done(self._work))
        except RoundEnded:
            return True

    def wait(self, deadline: Deadline) -> CallTiming:
        """Wait for the call; raises what it ended in."""
        with self._lock:
            if self._result is None:
                try:
                    self._result = self._channel._wait(self._work, self._call, deadline)
                except WaitTimedOut:
                    raise
                except Exception as error:
                    self._result = error
        if isinstance(self._result, Exception):
            raise self._result
        return self._result
