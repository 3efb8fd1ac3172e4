"""The named operations of one group that are under way. Filled by the group, worked off by the engine.

A name is free again when its operation is over. What was announced once in full is announced by its id from then on,
as long as it is the same.

Who is still there, and what ends when somebody is not. Shared by the engine, which learns of losses, and the world,
which opens and closes lanes.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

from ronde.comm.backends.base import Backend
from ronde.comm.call import CallOptions, Signature, SignatureCache
from ronde.comm.channel import CallRecord, Channel, RunningCall
from ronde.comm.operations import AllreduceOperation, Operation, zeros_for_joined
from ronde.comm.wording import ranks_text
from ronde.comm.work import Work
from ronde.errors import OperationTimeout, PeerLost, RondeError
from ronde.net.messages import AgreedOperation, MissingRanksQuery, OperationRequest
from ronde.observe.activity import CurrentOperation
from ronde.observe.recorder import Recorder
from ronde.observe.stragglers import attribute_waits
from ronde.observe.timeline import NegotiationSlice
from ronde.types import Deadline, DType, Op, OperationKind

__all__ = [
    "BatchStart",
    "MIN_QUERY_TIME_S",
    "NamedOperations",
    "NamedWork",
    "NegotiationWaits",
    "OpenChannels",
    "QUERY_MISSING_BEFORE_S",
]

QUERY_MISSING_BEFORE_S = 0.5
"""Who waits for a named operation asks whom it waits for when only so much of its time is left, or half of it. Asking
when it is over would make the wait longer than was promised."""

MIN_QUERY_TIME_S = 0.05
"""Who has less time than this does not ask: it may look in a thousand times per second."""

MAX_CACHED_REQUESTS = 65_536
"""Names remembered for announcing by id."""


class _CachedRequest(NamedTuple):
    """What an id stands for."""

    id: int
    signature: Signature
    splits: tuple[int, ...] | None


class NamedOperations:
    """Of one group. begin() is for any thread, everything else for the engine's."""

    def __init__(self, group: int, channel: Channel, signatures: SignatureCache, waits: NegotiationWaits) -> None:
        self.group = group
        self.channel = channel
        self.closed_error: RondeError | None = None
        """Why nothing can be announced any more."""
        self._signatures = signatures
        self._waits = waits
        self._works: dict[str, NamedWork] = {}
        self._cached_requests: dict[str, _CachedRequest] = {}
        self._announced_by_id: dict[int, NamedWork] = {}
        """What was announced by id and has not been answered."""
        self._lock = threading.Lock()

    def add(self, work: NamedWork) -> None:
        """Take the name for this work."""
        if self._waits.tracing:
            work.announced_ns = time.monotonic_ns()
        with self._lock:
            if self.closed_error is not None:
                raise self.closed_error
            before = self._works.get(work.name)
            if before is not None and not before.done():
                raise ValueError(
                    f"{before.description} is still under way on this rank; wait for it, or choose another name"
                )
            self._works[work.name] = work

    def make_request(self, work: NamedWork) -> int | OperationRequest:
        """How to announce it: the id if it is what that stands for, else in full."""
        operation = work.operation
        known = self._cached_requests.get(work.name)
        if known is not None and known.signature is operation.signature and known.splits == operation.splits:
            self._announced_by_id[known.id] = work
            return known.id
        return self.make_full_request(work)

    def make_full_request(self, work: NamedWork) -> OperationRequest:
        """The announcement in full."""
        form = work.operation.signature
        return OperationRequest(
            group=self.group,
            name=work.name,
            kind=form.kind,
            dtype=form.dtype,
            shapes=form.shapes,
            op=form.op,
            root=form.root,
            prescale=form.prescale,
            postscale=form.postscale,
            splits=work.operation.splits,
        )

    def resend_in_full(self, id: int) -> OperationRequest | None:
        """The coordinator has forgotten an id: what was announced by it, in full."""
        work = self._announced_by_id.pop(id, None)
        if work is None:
            return None
        self._cached_requests.pop(work.name, None)
        return self.make_full_request(work)

    def run_agreed(self, agreed: Sequence[AgreedOperation], stragglers: tuple[tuple[int, int], ...] = ()) -> None:
        """Every member has announced these: off they go, fused into one call. `late` is Run.late."""
        departure = BatchStart(time.monotonic_ns(), stragglers)
        works: list[NamedWork] = []
        operations: list[Operation] = []
        for item in agreed:
            if item.request is not None:  # not announced here: this rank has joined
                self._cached_requests.pop(item.name, None)
                operations.append(zeros_for_joined(self._signature_of(item.request)))
            else:
                work = self._works[item.name]
                self._cache_request(work, item.id)
                works.append(work)
                operations.append(work.operation)
        if self._waits.tracing:
            self._waits.record_batch_start(works, departure.at_ns)
        try:
            flights = self._submit(operations, agreed, works)
        except RondeError as error:
            self._fail_works(works, error)
            return
        with self._waits.condition:
            for work in works:
                work.started_on(flights, departure)
            self._waits.condition.notify_all()
        if not flights:
            self._release_names(works)

    def set_missing(self, name: str, ranks: tuple[int, ...]) -> None:
        """These have not announced it, to say so when a wait for it ends."""
        work = self._works.get(name)
        if work is not None:
            work.missing = ranks

    def reject(self, name: str, error: Exception) -> None:
        """This operation cannot run."""
        self._cached_requests.pop(name, None)
        work = self._works.get(name)
        if work is not None:
            self.channel.record_failure(work.description, error)
            self._fail_works([work], error)

    def abort(self, error: RondeError) -> None:
        """Nothing runs here any more. What has taken off ends by its channel."""
        with self._lock:
            self.closed_error = self.closed_error or error
            works = list(self._works.values())
        self._fail_works([work for work in works if not work.is_started], error)

    def _submit(
        self, operations: list[Operation], agreed: Sequence[AgreedOperation], works: list[NamedWork]
    ) -> tuple[RunningCall, ...]:
        over = functools.partial(self._release_names, works)
        first = operations[0]
        if isinstance(first, AllreduceOperation) and len(operations) > 1:
            parts = tuple([part for each in operations if isinstance(each, AllreduceOperation) for part in each.spans])
            text = f"{first.signature.label} {agreed[0].name!r} and {len(agreed) - 1} more"
            entries = tuple(
                [
                    CallRecord(each.signature.label, item.name, each.signature.num_bytes)
                    for each, item in zip(operations, agreed, strict=True)
                ]
            )
            call = first.signature.make_call(parts, operations, pre_agreed=True, description=text)
            return (self.channel.submit(call, entries, on_done=over),)
        form = first.signature
        calls = first.calls(agreed[0].row_counts, f"{agreed[0].name!r}: {form.description}", True)
        entry = CallRecord(form.label, agreed[0].name, form.num_bytes)
        last = len(calls) - 1
        return tuple(
            self.channel.submit(call, (entry,) if index == last else (), on_done=over if index == last else None)
            for index, call in enumerate(calls)
        )

    def _cache_request(self, work: NamedWork, id: int) -> None:
        if self._announced_by_id.pop(id, None) is work or not id:
            return  # it was announced by this id
        if len(self._cached_requests) >= MAX_CACHED_REQUESTS:
            self._cached_requests.clear()
        self._cached_requests[work.name] = _CachedRequest(id, work.operation.signature, work.operation.splits)

    def _signature_of(self, request: OperationRequest) -> Signature:
        options = CallOptions(Op(request.op), request.prescale, request.postscale, request.root)
        return self._signatures.find(OperationKind(request.kind), DType(request.dtype), request.shapes, options)

    def _fail_works(self, works: list[NamedWork], error: Exception) -> None:
        with self._waits.condition:
            for work in works:
                work.fail(error)
            self._waits.condition.notify_all()
        self._release_names(works)

    def _release_names(self, works: Sequence[NamedWork]) -> None:
        """Their names may be used again."""
        with self._lock:
            for work in works:
                if self._works.get(work.name) is work:
                    del self._works[work.name]


class OpenChannels:
    """The lanes and named operations of this rank; each ends when a member is lost or the round is over."""

    def __init__(self, rank: int, size: int, backend: Backend) -> None:
        self._rank = rank
        self._size = size
        self._backend = backend
        self._lock = threading.Lock()
        self._closed_error: RondeError | None = None
        self._lost: dict[int, str] = {}
        self._channels: tuple[Channel, ...] = ()
        self._named_operations: dict[int, NamedOperations] = {}

    @property
    def closed_error(self) -> RondeError | None:
        """Why the round is over for this rank, if it is."""
        return self._closed_error

    @property
    def channels(self) -> tuple[Channel, ...]:
        """All that are open."""
        return self._channels

    @property
    def all_named_operations(self) -> tuple[NamedOperations, ...]:
        """The named operations of all groups."""
        with self._lock:
            return tuple(self._named_operations.values())

    def named_operations_of(self, group: int) -> NamedOperations | None:
        """Those of one group."""
        return self._named_operations.get(group)

    def error_for(self, members: Container[int]) -> RondeError | None:
        """Why these ranks cannot do anything together any more, the first reason there was; None when they can."""
        for rank, why in self._lost.items():
            if rank in members:
                return PeerLost(rank=self._rank, peer=rank, why=why)
        return self._closed_error

    def add(self, channel: Channel) -> None:
        """Watch over a lane. It ends at once if a member is lost already."""
        with self._lock:
            self._channels = (*self._channels, channel)
            error = self.error_for(channel.members)
        if error is not None:
            _abort_channel(channel, error)

    def remove(self, channel: Channel) -> None:
        """The lane is closed."""
        with self._lock:
            self._channels = tuple(each for each in self._channels if each is not channel)

    def add_named_operations(self, named_operations: NamedOperations) -> None:
        """Watch over a group's named operations. They end at once if a member is lost already."""
        with self._lock:
            self._named_operations[named_operations.group] = named_operations
            error = self.error_for(named_operations.channel.members)
        if error is not None:
            named_operations.abort(error)

    def remove_named_operations(self, group: int) -> None:
        """The group is no more."""
        with self._lock:
            self._named_operations.pop(group, None)

    def abort_for(self, rank: int, why: str) -> None:
        """A rank is gone: everything it was part of is over."""
        with self._lock:
            self._lost.setdefault(rank, why)
            lanes = [lane for lane in self._channels if rank in lane.members]
            named = [each for each in self._named_operations.values() if rank in each.channel.members]
        self._backend.rank_lost(rank, why)
        _abort_each(lanes, named, PeerLost(rank=self._rank, peer=rank, why=why))

    def abort_all(self, error: RondeError) -> None:
        """The round is over, and everything with it. The first reason stays."""
        with self._lock:
            if self._closed_error is not None:
                return
            self._closed_error = error
            lanes, named = list(self._channels), list(self._named_operations.values())
        for rank in range(self._size):
            if rank != self._rank:
                self._backend.rank_lost(rank, str(error))  # so that nobody waits in the opening of a channel
        _abort_each(lanes, named, error)


def _abort_each(channels: Iterable[Channel], named_operations: Iterable[NamedOperations], error: RondeError) -> None:
    for lane in channels:
        _abort_channel(lane, error)
    for each in named_operations:
        each.abort(error)


def _abort_channel(channel: Channel, error: RondeError) -> None:
    if isinstance(error, PeerLost):
        channel.abort(lost_rank=error.peer, why=error.why)
    else:
        channel.abort(why=str(error))


class BatchStart(NamedTuple):
    """When named works took off, and who was late: (rank, nanoseconds before the last), as in Run.late."""

    at_ns: int
    stragglers: tuple[tuple[int, int], ...]


class NegotiationWaits:
    """Where the engine announces departures: named works wait here until their flight is known."""

    def __init__(self, recorder: Recorder, send_query: Callable[[MissingRanksQuery], None]) -> None:
        self.condition = threading.Condition()
        self._recorder = recorder
        self._send_query = send_query
        self._waiting: dict[int, tuple[int, NamedWork]] = {}
        """Who waits for a departure, by thread: since when, and of what."""

    @property
    def tracing(self) -> bool:
        """Whether a timeline is being written."""
        return self._recorder.tracing

    def record_batch_start(self, works: Iterable[NamedWork], at_ns: int) -> None:
        """For the timeline: these take off together."""
        negotiated = [
            NegotiationSlice(work.operation.signature.label, work.name, work.group, work.announced_ns or at_ns, at_ns)
            for work in works
        ]
        self._recorder.record_batch_start(at_ns, negotiated)

    def begin(self, work: NamedWork, began_ns: int) -> None:
        """The calling thread waits for a departure from now on. It holds the lock."""
        self._waiting[threading.get_ident()] = (began_ns, work)

    def end(self, began_ns: int, batch_start: BatchStart | None) -> None:
        """The wait is over, by a departure or without. Takes down how long it was, and who is to blame for it."""
        self._waiting.pop(threading.get_ident(), None)
        end_ns = time.monotonic_ns() if batch_start is None else batch_start.at_ns
        self._recorder.record_overlap(-max(0, end_ns - began_ns), 0)
        if batch_start is not None and batch_start.stragglers:
            me = self._recorder.rank  # has come, whenever the coordinator heard of it
            arrivals = {rank: end_ns - before_ns for rank, before_ns in batch_start.stragglers if rank != me}
            self._recorder.record_waits(attribute_waits(arrivals, [(began_ns, end_ns)]))

    def blocked_operation(self) -> CurrentOperation | None:
        """What a caller has waited for longest, if one does."""
        with self.condition:
            began_ns, work = min(self._waiting.values(), key=lambda item: item[0], default=(0, None))
            return (
                None
                if work is None
                else CurrentOperation(work.description, began_ns, named_operation=(work.group, work.name))
            )

    def query_missing(self, work: NamedWork) -> None:
        """Ask the coordinator whom it waits for. The answer comes to the work."""
        self._send_query(MissingRanksQuery(work.group, work.name))


class NamedWork(Work):
    """An operation with a name: it takes off when every member has announced it."""

    __slots__ = ("_batch_start", "_waits", "announced_ns", "group", "missing", "operation")

    def __init__(self, operation: Operation, group: int, name: str, waits: NegotiationWaits, timeout_s: float) -> None:
        # Written out, not left to Work.__init__: thousands of these are made per step.
        self.name = name
        self._running_calls = None
        self._finish = operation.result
        self._timeout_s = timeout_s
        self._done = False
        self._error = None
        self._result = None
        self.operation = operation
        self.group = group
        self._waits = waits
        self._batch_start: BatchStart | None = None
        self.announced_ns = 0
        """When it was, as far as somebody wants to know."""
        self.missing: tuple[int, ...] = ()
        """Whom it waits for, as far as a wait has asked."""

    @property
    def is_started(self) -> bool:
        """Whether it has taken off."""
        return self._running_calls is not None

    def started_on(self, running_calls: tuple[RunningCall, ...], batch_start: BatchStart) -> None:
        """It is under way on these. The engine holds the board's lock."""
        self._batch_start = batch_start
        self._running_calls = running_calls

    def fail(self, error: Exception) -> None:
        """It will not take off. The engine holds the board's lock."""
        if not self._done:
            self._end(error)

    @property
    def description(self) -> str:
        """For messages."""
        return f"{self.operation.signature.label} {self.name!r} of group {self.group}"

    def _wait_for_start(self, deadline: Deadline) -> tuple[RunningCall, ...]:
        if self._running_calls is None:
            self._wait_in_negotiation(self._waits, deadline)
        if self._error is not None:
            raise self._error
        assert self._running_calls is not None
        return self._running_calls

    def _wait_in_negotiation(self, negotiation_waits: NegotiationWaits, deadline: Deadline) -> None:
        began_ns = time.monotonic_ns()
        changed, ask_s = negotiation_waits.condition, min(QUERY_MISSING_BEFORE_S, deadline.timeout_s / 2)
        with changed:
            negotiation_waits.begin(self, began_ns)
            try:
                if changed.wait_for(self._is_started_or_done, max(0.0, deadline.remaining_s - ask_s)):
                    return
                self.missing = ()
                if ask_s >= MIN_QUERY_TIME_S:
                    negotiation_waits.query_missing(self)
                if not changed.wait_for(self._is_started_or_done, deadline.remaining_s):
                    waits = f"; it waits for {ranks_text(self.missing)}" if self.missing else ""
                    error = OperationTimeout(f"{self.description} did not start within {deadline.timeout_s:g} s{waits}")
                    error.missing = self.missing
                    raise error
            finally:
                negotiation_waits.end(began_ns, self._batch_start)

    def _is_started_or_done(self) -> bool:
        return self._running_calls is not None or self._done
