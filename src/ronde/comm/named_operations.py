"""The named operations of a group that are under way, and all open channels of this rank. Groups announce operations
here; the control thread starts, rejects and aborts them as the coordinator says.

A name can be used again when its operation is over. What was announced once in full is announced by its id from then
on, as long as it is the same.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Container, Sequence

import numpy as np

from ronde.comm.backends.base import Backend, ChannelSpec, InsideOperation, RunningCall
from ronde.comm.backends.single_rank import SingleRankBackend
from ronde.comm.buffers import address_of
from ronde.comm.call import CallOptions, Signature, Span, get_signature
from ronde.comm.channel import Channel
from ronde.comm.work import AllreduceWork, BatchStart, NegotiationWaits, Work
from ronde.errors import PeerLost, RondeError, RoundEnded
from ronde.net.messages import AgreedOperation, OperationRequest
from ronde.observe.events import ChannelClosed, ChannelOpened
from ronde.observe.recorder import Recorder
from ronde.observe.timeline import NegotiationSlice
from ronde.settings import Settings
from ronde.types import Deadline, DType, Op, OperationKind

MAX_CACHED_REQUESTS = 65_536
"""Names that are remembered for announcing by id."""


class NamedOperations:
    """The named operations of one group. announce() and abort() are for any thread, the rest for the control thread."""

    def __init__(self, group: int, channel: Channel, waits: NegotiationWaits) -> None:
        self.group = group
        self.channel = channel
        self._waits = waits
        self._closed_error: RondeError | None = None
        """Why nothing can be announced any more."""
        self._works: dict[str, Work] = {}
        self._cached_requests: dict[str, tuple[int, Signature, tuple[int, ...] | None]] = {}
        """By name: the id that stands for the request with this signature and these splits."""
        self._announced_by_id: dict[int, Work] = {}
        """By id, the works that were announced by it and have not been answered."""
        self._lock = threading.RLock()  # reentrant: a signal handler that calls shutdown() may interrupt its owner

    def announce(self, work: Work, timeout_s: float) -> None:
        """Announce that this rank is ready for the operation: by its id, if that stands for the same request, else in
        full. The name is taken until the operation has ended."""
        work.group, work.waits, work.timeout_s = self.group, self._waits, timeout_s
        if self._waits.recorder.tracing:
            work.announced_ns = time.monotonic_ns()
        name = work.name
        with InsideOperation(work.describe()), self._lock:
            if self._closed_error is not None:
                raise self._closed_error
            before = self._works.get(name)
            if before is not None and not before.done():
                raise ValueError(
                    f"{before.describe()} is still under way on this rank; wait for it, or choose another name"
                )
            self._works[name] = work
            cached = self._cached_requests.get(name)
            if cached is not None and cached[1] is work.signature and cached[2] == work.splits:
                request: int | OperationRequest = cached[0]
                self._announced_by_id[cached[0]] = work
            else:
                request = self._make_request(work)
        if self._closed_error is not None:  # since the first look, by a signal handler
            raise self._closed_error
        self._waits.enqueue(request)

    def resend_in_full(self, id: int) -> OperationRequest | None:
        """Return the request in full that was announced by an id which the coordinator does not know any more; None if
        this group has not announced it, or has ended it meanwhile."""
        work = self._announced_by_id.pop(id, None)
        if work is None or work.done():
            return None
        self._cached_requests.pop(work.name, None)
        return self._make_request(work)

    def run_agreed(self, agreed: Sequence[AgreedOperation], stragglers: tuple[tuple[int, int], ...] = ()) -> None:
        """Start operations that every member has announced, fused into one call. `stragglers` came last."""
        batch_start = BatchStart(time.monotonic_ns(), stragglers)
        works: list[Work] = []
        operations: list[Work] = []
        with self._lock:
            if self._closed_error is not None:
                return
            for item in agreed:
                if item.request is not None:  # not announced here: this rank has joined
                    self._cached_requests.pop(item.name, None)
                    operations.append(_zeros_for_joined(item.request))
                else:
                    work = self._works[item.name]
                    self._cache_request(work, item.id)
                    works.append(work)
                    operations.append(work)
        recorder, at_ns = self._waits.recorder, batch_start.at_ns
        if recorder.tracing:
            slices = [
                NegotiationSlice(work.signature.label, work.name, self.group, work.announced_ns or at_ns, at_ns)
                for work in works
            ]
            recorder.record_batch_start(at_ns, slices)
        try:
            running_calls = self._submit(operations, agreed[0].row_counts, works)
        except RondeError as error:
            self._fail_works(works, error)
            return
        with self._waits.condition:
            for work in works:
                work.started_on(running_calls, batch_start)
            self._waits.condition.notify_all()
        if not running_calls:
            self._release_names(works)

    def set_missing(self, name: str, ranks: tuple[int, ...]) -> None:
        """Store the ranks that have not announced the operation: a wait that times out names them."""
        work = self._works.get(name)
        if work is not None:
            work.missing = ranks

    def reject(self, name: str, error: Exception) -> None:
        """End the operation with this error, because the members do not agree on it."""
        cached = self._cached_requests.pop(name, None)
        if cached is not None:
            self._announced_by_id.pop(cached[0], None)  # the coordinator has forgotten the id, too
        work = self._works.get(name)
        if work is not None:
            self.channel.record_failure(work.describe(), error)
            self._fail_works([work], error)

    def abort(self, error: RondeError) -> None:
        """Start nothing any more, and end with this error what has not started. The rest ends with its channel."""
        with self._lock:
            self._closed_error = self._closed_error or error
            works = list(self._works.values())
        self._fail_works([work for work in works if not work.is_started], error)

    def refuse_in_child(self, error: RondeError) -> None:
        """This process is a forked child: nothing can be announced."""
        self._lock = threading.RLock()  # a thread of the parent may have held it
        self._closed_error = error

    def _submit(
        self, operations: list[Work], row_counts: tuple[int, ...] | None, works: list[Work]
    ) -> tuple[RunningCall, ...]:
        on_done = functools.partial(self._release_names, works)
        records = [(each.signature, each.name) for each in operations]
        first = operations[0]
        if len(operations) == 1:
            calls = first.make_calls(row_counts)
        else:
            spans = tuple([span for each in operations if isinstance(each, AllreduceWork) for span in each.spans])
            description = f"{first.signature.label} {first.name!r} and {len(operations) - 1} more"
            calls = (first.signature.make_call(spans, operations, name=first.name, description=description),)
        running_calls = [self.channel.submit(call) for call in calls[:-1]]
        running_calls += [self.channel.submit(call, records, on_done=on_done) for call in calls[-1:]]
        return tuple(running_calls)

    def _make_request(self, work: Work) -> OperationRequest:
        signature = work.signature
        return OperationRequest(
            group=self.group,
            name=work.name,
            kind=signature.kind,
            dtype=signature.dtype,
            shapes=signature.shapes,
            op=signature.op,
            root=signature.root,
            prescale=signature.prescale,
            postscale=signature.postscale,
            splits=work.splits,
        )

    def _cache_request(self, work: Work, id: int) -> None:
        if self._announced_by_id.pop(id, None) is work or not id:
            return  # it was announced by this id
        if len(self._cached_requests) >= MAX_CACHED_REQUESTS:
            self._cached_requests.clear()
        self._cached_requests[work.name] = (id, work.signature, work.splits)

    def _fail_works(self, works: list[Work], error: Exception) -> None:
        with self._waits.condition:
            for work in works:
                work.fail(error)
            self._waits.condition.notify_all()
        self._release_names(works)

    def _release_names(self, works: Sequence[Work]) -> None:
        with self._lock:
            for work in works:
                if self._works.get(work.name) is work:
                    del self._works[work.name]


def _zeros_for_joined(request: OperationRequest) -> AllreduceWork:
    """What a rank that has joined contributes to an allreduce of the others."""
    options = CallOptions(Op(request.op), request.prescale, request.postscale, request.root)
    signature = get_signature(OperationKind(request.kind), DType(request.dtype), request.shapes, options)
    zeros = [np.zeros(shape, signature.dtype.numpy) for shape in signature.shapes]
    spans = tuple(Span(address_of(array), address_of(array), array.size) for array in zeros)
    return AllreduceWork(signature, request.name, spans, zeros, None)


class OpenChannels:
    """Opens and closes the channels of this rank, and aborts them, with the named operations of their groups, when a
    member is lost or the round is over. Safe from any thread."""

    def __init__(self, rank: int, size: int, backend: Backend, recorder: Recorder, settings: Settings) -> None:
        self.operation_timeout_s = settings.operation_s
        self.open_timeout_s = settings.start_s
        """How long opening a channel may take: at first start_s, from the end of the start on operation_s."""
        self.channels: tuple[Channel, ...] = ()
        self.closed_error: RondeError | None = None
        """Why the round is over for this rank, if it is."""
        self.named_operations: dict[int, NamedOperations] = {}
        self._rank = rank
        self._size = size
        self._backend = backend
        self._recorder = recorder
        self._sample_arrivals = settings.coordinator_hosted
        self._lock = threading.RLock()  # reentrant: a signal handler that calls shutdown() may interrupt its owner
        self._lost: dict[int, str] = {}
        self._opening: deque[None] = deque()
        """One entry for each channel that is being opened."""
        self._shut = False

    def error_for(self, members: Container[int]) -> RondeError | None:
        """Why these ranks cannot do anything together any more, the first reason there was; None when they can."""
        for rank, why in self._lost.items():
            if rank in members:
                return PeerLost(rank=self._rank, peer=rank, why=why)
        return self.closed_error

    def open(
        self, group: int, suffix: str, members: tuple[int, ...], *, bucket_bytes: int = 0, point_to_point: bool = False
    ) -> Channel:
        """Open a channel together with the other members."""
        if self.closed_error is not None:
            raise self.closed_error
        spec = ChannelSpec(
            id=f"{group}.{suffix}",
            members=members,
            member_index=members.index(self._rank),
            bucket_bytes=bucket_bytes,
            point_to_point=point_to_point,
        )
        backend = SingleRankBackend() if len(members) == 1 else self._backend
        self._opening.append(None)
        try:
            with InsideOperation(f"opening channel {spec.id}"):
                opened = backend.open_channel(spec, Deadline(self.open_timeout_s))
        except RondeError as error:
            raise (self.closed_error or error) from None
        finally:
            self._opening.pop()
        channel = Channel(
            opened, group, self._recorder, self.operation_timeout_s, sample_arrivals=self._sample_arrivals
        )
        self.add(channel)
        if self._shut:  # meanwhile, by another thread or a signal handler, which did not know this channel
            self.close(channel)
            raise self.closed_error or RoundEnded(f"channel {spec.id} is closed")
        at_ns = time.monotonic_ns()
        self._recorder.record_event(ChannelOpened(at_ns=at_ns, rank=self._rank, channel=spec.id, members=members))
        return channel

    def close(self, channel: Channel, why: str = "") -> None:
        """Close a channel; what is under way ends with RoundEnded, for this reason. Idempotent."""
        with self._lock:
            if channel not in self.channels:
                return
            self.channels = tuple(each for each in self.channels if each is not channel)
        channel.close(why)
        event = ChannelClosed(at_ns=time.monotonic_ns(), rank=self._rank, channel=channel.backend_channel.spec.id)
        self._recorder.record_event(event)

    def add(self, channel: Channel) -> None:
        """Add an open channel. It is aborted at once if a member is lost already."""
        with self._lock:
            self.channels = (*self.channels, channel)
            error = self.error_for(channel.members)
        if error is not None:
            channel.abort(error)

    def add_named_operations(self, named_operations: NamedOperations) -> None:
        """Add a group's named operations. They are aborted at once if a member is lost already."""
        with self._lock:
            self.named_operations = {**self.named_operations, named_operations.group: named_operations}
            error = self.error_for(named_operations.channel.members)
        if error is not None:
            named_operations.abort(error)

    def remove_named_operations(self, group: int) -> None:
        with self._lock:
            self.named_operations = {id: named for id, named in self.named_operations.items() if id != group}

    def abort_for(self, rank: int, why: str) -> None:
        """Abort all channels and named operations of which the lost rank is a member."""
        with self._lock:
            self._lost.setdefault(rank, why)
        self._backend.rank_lost(rank, why)
        self._abort(PeerLost(rank=self._rank, peer=rank, why=why), rank)

    def abort_all(self, error: RondeError) -> None:
        """Abort all channels and named operations, because the round is over. The first error counts."""
        with self._lock:
            if self.closed_error is not None:
                return
            self.closed_error = error
        self._end_openings(str(error))
        self._abort(error, self._rank)

    def shut(self, error: RondeError) -> None:
        """This rank leaves the round: open nothing any more, and end with the error what is being opened. What is open
        stays so, to be closed in good order."""
        with self._lock:
            self._shut = True
            self.closed_error = self.closed_error or error
        if self._opening:
            self._end_openings(str(error))

    def refuse_in_child(self, error: RondeError) -> None:
        """This process is a forked child: everything raises the error, and nothing reaches the backend."""
        self._lock = threading.RLock()  # a thread of the parent may have held it
        for channel in self.channels:
            channel.refuse_in_child(error)
        for named in self.named_operations.values():
            named.refuse_in_child(error)
        self.closed_error, self.channels, self.named_operations = error, (), {}

    def _end_openings(self, why: str) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                self._backend.rank_lost(rank, why)

    def _abort(self, error: RondeError, rank: int) -> None:
        """Abort what has the rank as a member. What is added from now on sees the error by itself."""
        for channel in self.channels:
            if rank in channel.members:
                channel.abort(error)
        for named in self.named_operations.values():
            if rank in named.channel.members:
                named.abort(error)
