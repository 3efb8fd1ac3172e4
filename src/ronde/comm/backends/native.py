"""The native backend: opens channels, and hands shared memory and calls to the C++ data plane.

Members of one host share a memory file, made by the lowest of them and passed over a Unix socket that was authenticated
with the job's key. Members of different hosts are connected when a call first needs it: native_links. Messages have
links of their own: native_messages.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ronde.comm.backends.base import (
    LOSS_REASON_S,
    MAX_LATE,
    AnnouncedCall,
    CallTiming,
    CallWithdrawn,
    ChannelSpec,
    CurrentCall,
    IdNotAgreed,
    RunningCall,
)
from ronde.comm.backends.native_library import (
    ALGORITHMS,
    MAX_ENDED,
    MAX_LOCAL_MEMBERS,
    MAX_MEMBERS,
    NO_INDEX,
    WIDEST_ELEMENT_BYTES,
    NativeError,
    NativeHandle,
    NativeStatus,
    announce_many,
    get_announced,
    get_bucket,
    get_current_call,
    get_member_calls,
    get_not_announced,
    load_library,
    make_allreduce_cache,
    make_channel_params,
    open_channel,
    open_link,
    pending_callbacks,
    thread_structs,
)
from ronde.comm.backends.native_links import NativeLinks
from ronde.comm.backends.native_messages import NativeEndpoint, NativeMessageChannel
from ronde.comm.call import AnnouncedOperation, Call, Memory, mismatch_error
from ronde.comm.fork_and_signal_safety import forked_error, reentry_error, this_thread
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded, StartFailed
from ronde.net.connect import Connection, connect_authenticated, describe_disconnect
from ronde.net.event_loop import THREADS_HINT, EventLoop
from ronde.net.handshake import member_request
from ronde.net.keys import JobKey
from ronde.net.listener import Listener
from ronde.net.messages import MAX_SHARED_IDS, ChannelAborted, WorkerMessage
from ronde.net.open_files import explain_open_files, is_open_files_error, make_open_files_error
from ronde.net.shared_memory import create_shared_memory, receive_descriptor, send_descriptor
from ronde.settings import Settings
from ronde.types import CPU, Deadline, OperationKind, Topology

if TYPE_CHECKING:
    from ronde.comm.backends.hot_calls import AllreduceCache

LOSS_NOTICE_S = 5.0
"""How long the coordinator may take to report the loss of a rank that has closed its connection."""


class NativeBackend:
    name = "native"
    devices: tuple[str, ...] = (CPU,)

    def __init__(
        self,
        topology: Topology,
        listener: Listener,
        key: JobKey,
        settings: Settings,
        loop: EventLoop | None = None,
        send: Callable[[WorkerMessage], None] = lambda message: None,
    ) -> None:
        """`loop` is that of the listener; without it, all ranks are on this host. `send` gives a message to the
        coordinator, in the loop."""
        self._topology = topology
        self._listener = listener
        self._key = key
        self._settings = settings
        self._lost: dict[int, PeerLost] = {}
        self._channels: weakref.WeakValueDictionary[str, NativeChannel] = weakref.WeakValueDictionary()
        """By id."""
        self._endpoint = NativeEndpoint(topology.rank, topology.size, topology.local_size)
        if loop is not None:
            self._endpoint.use_links(topology, listener, loop, self._connect_to_address)
        self._links: NativeLinks | None = None
        if loop is not None and any(topology.host_indices):
            self._links = NativeLinks(topology, listener, key, settings, loop, send)

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> NativeChannel | NativeMessageChannel:
        if spec.point_to_point:
            return NativeMessageChannel(spec, self._endpoint)
        return self._open(spec, self._hosts_of(spec), deadline)

    def open_announced_channel(self, spec: ChannelSpec, deadline: Deadline) -> NativeChannel | None:
        """Members of one host announce calls in their shared memory."""
        hosts = self._hosts_of(spec)
        return None if any(hosts) else self._open(spec, hosts, deadline, max_announced=MAX_SHARED_IDS)

    def _hosts_of(self, spec: ChannelSpec) -> list[int]:
        """The number of the host of each member, counted from 0 in the order of the members."""
        seen: dict[int, int] = {}
        return [seen.setdefault(self._topology.host_indices[rank], len(seen)) for rank in spec.members]

    def _open(self, spec: ChannelSpec, hosts: list[int], deadline: Deadline, max_announced: int = 0) -> NativeChannel:
        # Members wait for each other in every chunk. What they compute meanwhile keeps a waiting thread from its core.
        chunk_bytes = self._settings.slot_bytes if spec.overlapped else self._settings.chunk_bytes
        sizes = (self._settings.slot_bytes, chunk_bytes, spec.bucket_bytes)
        params = make_channel_params(hosts, spec.member_index, *sizes, self._settings.fusion_bytes, max_announced)
        segment_bytes = load_library().rd_segment_bytes(params)
        if not segment_bytes:
            raise ValueError(f"channel {spec.id}: {self._find_size_error(spec, hosts)}")
        what = f"rank {self._topology.rank} could not open channel {spec.id}"
        with explain_open_files(what), ExitStack() as stack:
            segment = self._share_segment(spec, hosts, segment_bytes, deadline)
            if segment >= 0:
                stack.callback(os.close, segment)
            links = self._links if any(hosts) else None
            number = links.new_number() if links is not None else 0
            try:
                handle = open_channel(params, segment, links.events_fd if links is not None else -1, number)
            except NativeError as error:
                raise self._make_open_error(what, error, segment, segment_bytes) from None
            channel = NativeChannel(spec, handle, self._settings.algorithm, links, number)
            self._channels[spec.id] = channel
            if links is not None:
                links.add_channel(number, channel)
            return channel

    def rank_lost(self, rank: int, why: str) -> None:
        """A rank is gone: end all waits for its connections, and all attempts to connect to it."""
        lost = PeerLost(rank=self._topology.rank, peer=rank, op="opening a channel", why=why)
        self._lost[rank] = lost
        self._listener.fail_rank(rank, lost)
        if self._links is not None:
            self._links.rank_lost(rank)

    def channel_aborted(self, abort: ChannelAborted) -> None:
        if self._links is not None:
            self._links.channel_aborted(abort)
        elif (channel := self._channels.get(abort.channel)) is not None:  # its members know that, but not why
            channel.abort_with(abort.status, abort.rank, abort.error, abort.reason)

    def flush(self, deadline: Deadline) -> None:
        self._endpoint.flush(deadline)

    def close(self) -> None:
        self._endpoint.close()  # the listener is closed with the round
        if self._links is not None:
            self._links.close()

    def _find_size_error(self, spec: ChannelSpec, hosts: list[int]) -> str:
        """Return why the library refuses the sizes of a channel."""
        slot_bytes, chunk_bytes = self._settings.slot_bytes, self._settings.chunk_bytes
        num_local = max(map(hosts.count, set(hosts)))
        if len(hosts) > MAX_MEMBERS:
            return f"it has {len(hosts)} members, at most {MAX_MEMBERS} are possible"
        if num_local > MAX_LOCAL_MEMBERS:
            return f"it has {num_local} members on one host, at most {MAX_LOCAL_MEMBERS} are possible"
        if chunk_bytes < num_local * WIDEST_ELEMENT_BYTES:
            least = num_local * WIDEST_ELEMENT_BYTES
            return f"chunk_bytes must be at least {least} for {num_local} members on one host, got {chunk_bytes}"
        return (
            f"{num_local} members on one host with slot_bytes = {slot_bytes}, chunk_bytes = {chunk_bytes} and "
            f"{spec.bucket_bytes} bytes of buckets each need more shared memory than possible"
        )

    def _make_open_error(self, what: str, error: NativeError, segment: int, segment_bytes: int) -> RondeError:
        """Return why the library could not open a channel."""
        if segment >= 0 and (given_bytes := os.fstat(segment).st_size) != segment_bytes:
            return StartFailed(
                f"{what}: the shared memory of its host has {given_bytes} bytes, and it needs {segment_bytes}; "
                "give all ranks the same settings and the same plans"
            )
        if is_open_files_error(error.detail):
            return make_open_files_error(what)
        return RondeError(f"{what}: {os.strerror(error.detail) if error.detail else error}")

    def _share_segment(self, spec: ChannelSpec, hosts: list[int], num_bytes: int, deadline: Deadline) -> int:
        """The descriptor of the memory that the members of this host share; -1 when there is one member."""
        local = [rank for rank, host in zip(spec.members, hosts, strict=True) if host == hosts[spec.member_index]]
        if len(local) == 1:
            return -1
        purpose = f"segment {spec.id}"
        if spec.members[spec.member_index] != local[0]:
            address = f"unix:{self._topology.members[local[0]].unix_socket}"
            with self._connect_to_address(local[0], address, purpose, deadline) as sock:
                try:
                    return receive_descriptor(sock, deadline)
                except StartFailed as error:
                    if local[0] in self._lost:
                        raise self._lost[local[0]] from None
                    raise StartFailed(
                        f"rank {local[0]} did not come to open {purpose!r} within {deadline.timeout_s:g} s ({error}); "
                        f"look at the output of rank {local[0]}: all members have to run the same operation, and one "
                        "that has called join() can open nothing"
                    ) from None
        segment = create_shared_memory(f"ronde {spec.id}", num_bytes)
        try:
            for rank in local[1:]:
                self._send_segment(segment, purpose, rank, deadline)
        except BaseException:
            os.close(segment)
            raise
        return segment

    def _send_segment(self, segment: int, purpose: str, rank: int, deadline: Deadline) -> None:
        limit = deadline
        while True:
            with self._listener.accept(purpose, rank, limit) as sock:
                try:
                    return send_descriptor(sock, segment)
                except ConnectionError:
                    # The rank has died or given up. The coordinator is about to say so: then accept() raises PeerLost.
                    limit = Deadline(min(LOSS_NOTICE_S, deadline.remaining_s))

    def _connect_to_address(self, rank: int, address: str, purpose: str, deadline: Deadline) -> Connection:
        def give_up_when_lost() -> None:
            if rank in self._lost:
                raise self._lost[rank]

        request, heartbeat_s = member_request(self._topology, purpose), self._settings.heartbeat_s
        return connect_authenticated(
            address, self._key, request, deadline, heartbeat_s=heartbeat_s, before_retry=give_up_when_lost
        )[0]


class NativeChannel:
    def __init__(
        self, spec: ChannelSpec, handle: NativeHandle, algorithm: str, links: NativeLinks | None = None, number: int = 0
    ) -> None:
        """`links` opens those to other hosts, if there are any, and knows the channel by its number."""
        self.spec = spec
        self.library = load_library()
        self._handle = handle
        self._links = links
        self._number = number
        self._algorithm = ALGORITHMS.index(algorithm)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        """Guards _abort_reason; notified when that is set."""
        self._abort_reason: tuple[int, str] | None = None
        # Who is in a method has a reference to this object, so the handle is valid for as long.
        weakref.finalize(self, self.library.rd_release, handle).atexit = False

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        structs = thread_structs.own
        keep = structs.fill(call, self._algorithm)
        status = self.library.rd_run(self._handle, structs.call_address, structs.result_address, deadline.remaining_s)
        del keep
        try:
            return structs.timing_or_raise(status)
        except NativeError as error:
            raise self.make_error(call.description, error, deadline) from None

    def make_allreduce_cache(
        self, timeout_s: float, record_failure: Callable[[str, Exception], None], **more: Any
    ) -> AllreduceCache | None:
        def raise_error(description: bytes, status: int, result: bytes) -> None:
            what = description.decode(errors="replace")
            try:
                thread_structs.own.raise_error(status, result)
            except NativeError as error:
                deadline = Deadline(timeout_s, elapsed_s=(time.monotonic_ns() - error.start_ns) / 1e9)
                raised = self.make_error(what, error, deadline)
            record_failure(what, raised)
            raise raised

        more.update(algorithm=self._algorithm, timeout_s=timeout_s, this_thread=this_thread, on_failure=raise_error)
        return make_allreduce_cache(self._handle, **more)

    def submit(self, call: Call, deadline: Deadline) -> NativeRunningCall:
        structs = thread_structs.own
        keep = structs.fill(call, self._algorithm)
        status = self.library.rd_submit(
            self._handle,
            structs.call_address,
            deadline.remaining_s,
            None,
            None,
            structs.work_address,
            structs.result_address,
        )
        del keep
        if status != NativeStatus.OK:
            try:
                structs.timing_or_raise(status)
            except NativeError as error:
                raise self.make_error(call.description, error, deadline) from None
        work = structs.work.value
        assert work is not None
        return NativeRunningCall(self, work, call)

    @property
    def handle(self) -> NativeHandle:
        """The rd_channel, for native code that announces calls by name (rd_announce_named). It is valid for as long as
        this object, or after rd_retain()."""
        return self._handle

    def agree(self, id: int, name: str, call: Call) -> None:
        structs = thread_structs.own
        keep = structs.fill(call, self._algorithm)
        status = self.library.rd_agree(self._handle, id, name.encode(errors="surrogatepass"), structs.call_address)
        del keep
        assert status in (NativeStatus.OK, NativeStatus.CLOSED), status

    def revoke(self, id: int) -> bool:
        return bool(self.library.rd_revoke(self._handle, id))

    def announce_many(
        self,
        operations: Sequence[AnnouncedOperation],
        timeout_s: float,
        *,
        will_wait: bool,
        on_wait: Callable[[int, int], object],
        on_ended: Callable[[Sequence[AnnouncedCall]], None],
    ) -> NativeAnnouncedBatch:
        try:
            handle, is_announced = announce_many(self._handle, operations, timeout_s, will_wait)
        except NativeError as error:
            description = operations[0].description if operations else "an announced operation"
            raise self.make_error(description, error, Deadline(timeout_s)) from None
        return NativeAnnouncedBatch(self, handle, operations, is_announced, on_wait, on_ended)

    def run_announced(
        self, id: int, call: Call, deadline: Deadline, on_unfinished: Callable[[RunningCall], None]
    ) -> CallTiming | None:
        structs = thread_structs.own
        keep = structs.fill(call, self._algorithm)
        status = self.library.rd_run_announced(
            self._handle,
            id,
            structs.call_address,
            deadline.timeout_s,
            deadline.remaining_s,
            structs.result_address,
            structs.work_address,
        )
        del keep
        if structs.work.value is not None:
            on_unfinished(NativeRunningCall(self, structs.work.value, call))
            if status == NativeStatus.TIMEOUT:
                return None
        return self._raise_unless_ok(status, call, deadline)

    def announced_until(self, until_ns: int) -> list[tuple[int, int]]:
        return get_announced(self._handle, until_ns, MAX_LATE)

    def not_announced(self, id: int) -> tuple[int, ...]:
        return get_not_announced(self._handle, id, len(self.spec.members))

    def bucket(self) -> Memory:
        try:
            return get_bucket(self._handle, 2 * self.spec.bucket_bytes)
        except NativeError:
            raise RoundEnded(f"channel {self.spec.id} is closed") from None

    def current_call(self) -> CurrentCall | None:
        return get_current_call(self._handle, len(self.spec.members))

    def rank_lost(self, rank: int, why: str) -> None:
        self.abort(lost_rank=rank, why=why)

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        is_member = lost_rank in self.spec.members
        self.abort_with(NativeStatus.PEER_LOST if is_member else NativeStatus.ABORTED, lost_rank, 0, why)

    def abort_with(self, status: int, rank: int, error: int, why: str) -> None:
        """End all waits of the members on this host, as another one has: with this status of the library, errno, and
        the rank that has caused it. Without a reason the coordinator's is awaited."""
        if why:
            self._set_abort_reason(rank, why)
        member = self.spec.members.index(rank) if rank in self.spec.members else -1
        self.library.rd_abort(self._handle, status, member, error)

    def fail(self, why: str) -> None:
        self.abort(lost_rank=self.spec.members[self.spec.member_index], why=why)

    def add_link(self, member: int, kind: int, opened_here: bool, sockets: list[int]) -> None:
        open_link(self._handle, member, kind, opened_here, sockets)

    def close(self, why: str = "") -> None:
        """Leave in good order when idle, end what is under way otherwise. Everything is freed when the last thread has
        left."""
        self._set_abort_reason(-1, why or f"channel {self.spec.id} was closed")
        self.library.rd_close(self._handle)
        if self._links is not None:
            self._links.remove_channel(self._number)

    def _set_abort_reason(self, lost_rank: int, why: str) -> None:
        with self._changed:
            if self._abort_reason is None:
                self._abort_reason = (lost_rank, why)
            self._changed.notify_all()

    def _raise_unless_ok(self, status: int, call: Call, deadline: Deadline) -> CallTiming:
        """The timing of an announced call that succeeded; else its error."""
        try:
            return thread_structs.own.timing_or_raise(status)
        except NativeError as error:
            raise self.make_error(call.description, error, deadline) from None

    def make_error(self, description: str, error: NativeError, deadline: Deadline) -> Exception:
        members, rank = self.spec.members, self.spec.members[self.spec.member_index]
        blamed = members[error.member] if error.member >= 0 else -1
        if error.status == NativeStatus.MISMATCH:
            calls = zip(members, get_member_calls(self._handle, len(members)), strict=True)
            asked = {member: (kind, text) for member, (kind, text) in calls if text}
            joined = tuple(member for member, (kind, _) in asked.items() if kind == OperationKind.JOIN)
            return mismatch_error({member: text for member, (_, text) in asked.items()}, joined)
        if error.status == NativeStatus.NOT_AGREED:
            return IdNotAgreed(description)
        if error.status == NativeStatus.WITHDRAWN:
            return CallWithdrawn(description)
        if error.status == NativeStatus.FORKED:
            return forked_error(self._pid, description)
        if error.status == NativeStatus.BAD_CALL:
            if error.detail == errno.EDEADLK:
                return reentry_error(description)
            return ValueError(f"{description}: the arguments do not fit together")
        if error.status == NativeStatus.TIMEOUT:
            late = f": rank {blamed} did not come in time" if blamed >= 0 else ""
            if blamed >= 0 and self._links is not None and (problem := self._links.find_problem(self, blamed)):
                late = f": {problem}"
            timeout: RondeError = RoundEnded(
                f"{description} on rank {rank}: an operation timed out on another member{late}"
            )
            if deadline.expired:
                limit = f"{deadline.timeout_s:g} s"
                timeout = OperationTimeout(f"{description} did not finish within {limit} on rank {rank}{late}")
            timeout.missing = (blamed,) if blamed >= 0 else ()
            return timeout
        if error.status == NativeStatus.SYSTEM:
            reason = os.strerror(error.detail)
            if error.detail == errno.EAGAIN and not error.has_ended:
                reason = f"no thread could be started for it ({reason}); {THREADS_HINT}"
            return RondeError(f"{description} failed on rank {rank}: {reason}")
        lost, why = self._loss_reason(blamed, error.detail)
        if lost == rank:  # this rank itself cannot go on
            return RondeError(f"{description} failed on rank {rank}: {why}")
        if lost >= 0:
            return PeerLost(rank=rank, peer=lost, op=description, why=why)
        return RoundEnded(f"{description} on rank {rank}: {why}")

    def _loss_reason(self, member_rank: int, errno_code: int) -> tuple[int, str]:
        """The rank to blame and why. The coordinator's reason may arrive a moment after the sockets closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._abort_reason is not None, timeout=LOSS_REASON_S)
            if self._abort_reason is not None:
                return self._abort_reason
        if member_rank < 0:
            return -1, "another member ended the operation"
        return member_rank, describe_disconnect(errno_code) or "its connection closed"


class NativeAnnouncedBatch:
    """Calls that were announced together: one handle for all of them, and one call of the library to learn that many
    have ended."""

    def __init__(
        self,
        channel: NativeChannel,
        handle: int,
        operations: Sequence[AnnouncedOperation],
        is_announced: bytes,
        on_wait: Callable[[int, int], object],
        on_ended: Callable[[Sequence[AnnouncedCall]], None],
    ) -> None:
        self.channel = channel
        self.handle = handle
        self.calls: Sequence[_NativeAnnouncedCall | None] = [
            _NativeAnnouncedCall(operation, self, index) if is_announced[index] else None
            for index, operation in enumerate(operations)
        ]
        self._on_wait = on_wait
        self._on_ended = on_ended
        self._num_left = sum(is_announced)
        """Calls whose end was not reported, and which were not taken back."""
        self._lock = threading.Lock()

    def poll(self) -> bool:
        structs = thread_structs.own
        addresses = (structs.result_address, *structs.ended.addresses)
        self.channel.library.rd_wait_one(self.handle, NO_INDEX, 0.0, *addresses, MAX_ENDED)
        self._report(structs.ended.take())
        return self._num_left == 0

    def wait(self, call: _NativeAnnouncedCall, index: int, deadline: Deadline) -> None:
        """Wait for one of them, and report others that have ended."""
        channel, structs = self.channel, thread_structs.own
        addresses = (structs.result_address, *structs.ended.addresses)
        began_ns = call.waiting_since_ns = time.monotonic_ns()
        try:
            status = channel.library.rd_wait_one(self.handle, index, deadline.remaining_s, *addresses, MAX_ENDED)
        finally:
            call.waiting_since_ns = 0
            self._on_wait(began_ns, time.monotonic_ns())
        ended = structs.ended.take()
        try:
            timing = structs.timing_or_raise(status)
        except NativeError as error:
            if error.status == NativeStatus.TIMEOUT and not error.has_ended:
                raise call.make_timeout(deadline) from None
            failure = channel.make_error(call.operation.description, error, deadline)
            if error.has_ended and not isinstance(failure, CallWithdrawn):
                with self._lock:
                    if call.error is None:  # else another thread has seen it
                        call.error = failure
                        self._leave(1)
            self._report(ended)  # the library does not report them again
            raise failure from None
        self._report([(index, timing), *ended])

    def call_withdrawn(self) -> None:
        with self._lock:
            self._leave(1)

    def _report(self, ended: list[tuple[int, CallTiming]]) -> None:
        reported = []
        with self._lock:
            for index, timing in ended:
                call = self.calls[index] if self.calls else None
                if call is not None and call.timing is None:  # else another thread has reported it
                    call.timing = timing
                    reported.append(call)
            self._leave(len(reported))
        if reported:
            self._on_ended(reported)

    def _leave(self, num_ended: int) -> None:
        self._num_left -= num_ended
        if not self._num_left:
            self.calls = ()  # they refer to this object, too

    def __del__(self) -> None:
        self.channel.library.rd_release_works(self.handle)


class _NativeAnnouncedCall(AnnouncedCall):
    __slots__ = ("_batch", "_index")

    # Thousands of these are made per step, so __init__ does no more than it must.
    def __init__(self, operation: AnnouncedOperation, batch: NativeAnnouncedBatch, index: int) -> None:
        self.operation = operation
        self._batch = batch
        self._index = index
        self.call = None
        self.timing = None
        self.error = None
        self.waiting_since_ns = 0

    def wait(self, deadline: Deadline) -> CallTiming:
        if self.timing is None and self.error is None:
            self._batch.wait(self, self._index, deadline)
        if self.error is not None:
            raise self.error
        assert self.timing is not None
        return self.timing

    def has_ended(self) -> bool:
        return bool(self._batch.channel.library.rd_done_one(self._batch.handle, self._index) == 1)

    def withdrawn(self) -> None:
        self._batch.call_withdrawn()

    def notify_at_end(self, callback: Callable[[], None]) -> bool:
        library = self._batch.channel.library
        work = library.rd_get_work(self._batch.handle, self._index)
        try:
            return work is not None and pending_callbacks.add(work, callback)
        finally:
            if work is not None:
                library.rd_release_work(work)


class NativeRunningCall(RunningCall):
    __slots__ = ("_channel", "_work")

    def __init__(self, channel: NativeChannel, work: int, call: Call) -> None:
        super().__init__(call)
        self._channel = channel
        self._work = work
        """The handle of the call; 0 when it was released."""

    def has_ended(self) -> bool:
        return bool(self._channel.library.rd_done(self._work) == 1)  # 2: it was withdrawn, and will run as another call

    def wait_for_end(self, deadline: Deadline) -> CallTiming | None:
        channel, structs = self._channel, thread_structs.own
        status = channel.library.rd_wait(self._work, structs.result_address, deadline.remaining_s)
        try:
            return structs.timing_or_raise(status)
        except NativeError as error:
            if error.status == NativeStatus.TIMEOUT and not error.has_ended:
                return None
            assert self.call is not None
            raise channel.make_error(self.call.description, error, deadline) from None

    def notify_at_end(self, callback: Callable[[], None]) -> bool:
        return pending_callbacks.add(self._work, callback)

    def __del__(self) -> None:
        self._channel.library.rd_release_work(self._work)
