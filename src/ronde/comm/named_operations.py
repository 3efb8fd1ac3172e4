"""The named operations of a group that are under way. Groups announce operations here; the control thread starts,
rejects and aborts them as the coordinator says.

A name can be used again when its operation is over. What was announced once in full is announced by its id from then
on, as long as it is the same. If all members are on one host, an operation that has run twice alike gets a shared id:
then it is announced in their shared memory, on a channel of its own, and the coordinator learns nothing of it. It takes
the shared id back when it is needed again (RevokeSharedIds).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ronde.comm.backends.base import CallWithdrawn, IdNotAgreed, RunningCall
from ronde.comm.backends.native_library import NativeStatus
from ronde.comm.buffers import address_of
from ronde.comm.call import AnnouncedOperation, CallOptions, Signature, Span, describe_named, get_signature
from ronde.comm.channel import AnnouncedChannel, Channel
from ronde.comm.fork_and_signal_safety import InsideOperation, reentry_error, this_thread
from ronde.comm.operations import AllreduceWork
from ronde.comm.work import BatchStart, ControlItem, NegotiationWaits, Work
from ronde.errors import PeerLost, RondeError, RoundEnded
from ronde.net.messages import AbortChannel, AgreedOperation, OperationRequest, RefuseOperation
from ronde.observe.activity import CurrentOperation
from ronde.observe.timeline import NegotiationSlice
from ronde.types import Deadline, DType, Op, OperationKind

MAX_CACHED_REQUESTS = 65_536
"""Names that are remembered for announcing by id."""


class CachedRequest(NamedTuple):
    """What the members agreed on when a name ran last."""

    id: int
    """The coordinator's id of the request with this signature and these splits."""
    signature: Signature
    splits: tuple[int, ...] | None
    row_counts: tuple[int, ...] | None
    shared_id: int
    """Under which it is announced in shared memory; -1 if it is not."""
    description: str
    """Of its call, the same object each time."""


class NamedOperations:
    """The named operations of one group. announce(), run(), refuse(), the reports on what waits, and abort() are for
    any thread, the rest for the control thread."""

    def __init__(
        self,
        group: int,
        channel: Channel,
        waits: NegotiationWaits,
        announced_channel: AnnouncedChannel | None = None,
    ) -> None:
        self.group = group
        self.channel = channel
        self.announced_channel = announced_channel
        """For what is announced in shared memory; None if the members share none."""
        self._waits = waits
        self._closed_error: RondeError | None = None
        """Why nothing can be announced any more."""
        self._works: dict[str, Work] = {}
        self._cached_requests: dict[str, CachedRequest] = {}
        """By name."""
        self._shared_names: dict[int, str] = {}
        """By shared id."""
        self._queued: dict[str, tuple[Work, CachedRequest]] = {}
        """By name, what is to be announced in shared memory: when one of them is waited for, or by the control
        thread."""
        self._announced_by_id: dict[int, Work] = {}
        """By id, the works that were announced by it and have not been answered."""
        self._lock = threading.RLock()  # reentrant: a signal handler that calls shutdown() may interrupt its owner

    @property
    def channels(self) -> tuple[Channel, ...]:
        return (self.channel,) if self.announced_channel is None else (self.channel, self.announced_channel)

    def announce(self, work: Work, timeout_s: float) -> None:
        """Announce that this rank is ready for the operation: in shared memory or by its id, if these stand for the
        same request, else in full. The name is taken until the operation has ended."""
        work.group, work.waits, work.timeout_s = self.group, self._waits, timeout_s
        item: ControlItem | None
        with InsideOperation(work.describe()), self._lock:
            self._add(work)
            cached = self._cached_requests.get(work.name)
            if cached is None or cached.signature is not work.signature or cached.splits != work.splits:
                item = self._make_request(work)
            elif cached.shared_id >= 0:
                work.shared_id, work.shared_announcer = cached.shared_id, self
                work.announced_ns = time.monotonic_ns()
                # One alone is announced at once; those that follow while it is under way are announced together.
                item = self.announce_queued if len(self._works) > 1 and not self._queued else None
                self._queued[work.name] = (work, cached)
                if len(self._works) == 1:
                    self.announce_queued()
            else:
                item = cached.id
                self._announced_by_id[cached.id] = work
        if item is not None:
            self._enqueue(work, item)

    def run(self, work: Work, timeout_s: float) -> Any:
        """Announce the operation and return its result, as work.wait() does."""
        cached = self._cached_requests.get(work.name)
        if (
            cached is None
            or cached.shared_id < 0
            or cached.signature is not work.signature
            or cached.splits != work.splits
        ):
            self.announce(work, timeout_s)
            return work.wait()
        return self._run_shared(work, cached, Deadline(timeout_s))

    def refuse(self, name: str, why: str) -> None:
        """Let no operation of this name run any more in this round, on any member: each gets a Mismatch for what it has
        announced under it, or announces later. What this rank has announced in shared memory is taken back first."""
        request = None
        with self._lock:
            work = self._works.get(name)
            if work is not None and work.shared_id >= 0 and not work.done() and self._withdraw(work):
                request = self._make_request(work)
        self._waits.enqueue(RefuseOperation(self.group, name, why))
        if request is not None:
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
                    self._cache_request(work, item)
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
        except Exception as error:  # of any kind: the others execute what this rank cannot
            if not isinstance(error, RoundEnded):  # else the others know, or will
                self._abort_channel(error)
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
            self._announced_by_id.pop(cached.id, None)  # the coordinator has forgotten the id, too
        work = self._works.get(name)
        if work is not None:
            self.channel.record_failure(work.describe(), error)
            self._fail_works([work], error)

    def abort(self, error: RondeError) -> None:
        """Start nothing any more, and end with this error what has not started. The rest ends with its channel."""
        with self._lock:
            self._closed_error = self._closed_error or error
            works = list(self._works.values())
            for work in works:
                if work.shared_id >= 0:
                    self._withdraw(work)
        self._fail_works([work for work in works if not work.is_started and work.shared_id < 0], error)

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
            streams = tuple({stream: None for each in operations for stream in each.streams})
            call = first.signature.make_call(
                spans, operations, name=first.name, description=description, device=first.device, streams=streams
            )
            calls = (call,)
        running_calls = [self.channel.submit(call) for call in calls[:-1]]
        running_calls += [self.channel.submit(call, records, on_done=on_done) for call in calls[-1:]]
        return tuple(running_calls)

    def _abort_channel(self, error: Exception) -> None:
        """Let the members lose this rank on the channel: it cannot execute what all have agreed on. They would take its
        next call for that one, because what was agreed on is not compared again."""
        rank, why = self._waits.recorder.rank, str(error) or repr(error)
        self.channel.abort(PeerLost(rank=rank, peer=rank, why=why))
        id = self.channel.backend_channel.spec.id
        self._waits.enqueue(AbortChannel(id, NativeStatus.PEER_LOST, rank, 0, why))

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
            device=signature.device,
        )

    def _cache_request(self, work: Work, agreed: AgreedOperation) -> None:
        id, shared_id = agreed.id, agreed.shared_id if self.announced_channel is not None else -1
        if not id or (self._announced_by_id.pop(id, None) is work and shared_id < 0):
            return  # it was announced by this id
        if len(self._cached_requests) >= MAX_CACHED_REQUESTS:
            self._cached_requests.clear()
        signature, name = work.signature, work.name
        if self.announced_channel is not None and shared_id >= 0:
            self.announced_channel.agree(shared_id, name, work.make_calls(agreed.row_counts)[0])
            self._shared_names[shared_id] = name
        description = f"{name!r}: {signature.description}"
        self._cached_requests[name] = CachedRequest(
            id, signature, work.splits, agreed.row_counts, shared_id, description
        )

    # --- in shared memory --------------------------------------------------------------------------------------------

    def revoke_shared(self, ids: Sequence[int]) -> None:
        """Announce these operations through the coordinator from now on, also what was announced in shared memory and
        has not run."""
        withdrawn: list[OperationRequest] = []
        with self._lock:
            for id in ids:
                name = self._shared_names.pop(id, "")
                cached = self._cached_requests.get(name)
                if cached is not None and cached.shared_id == id:
                    self._cached_requests[name] = cached._replace(shared_id=-1)
                work = self._works.get(name)
                if work is not None and work.shared_id == id and self._withdraw(work):
                    withdrawn.append(self._make_request(work))
                elif self.announced_channel is not None:
                    self.announced_channel.revoke(id)
        for request in withdrawn:
            self._waits.enqueue(request)

    def late_operations(self, until_ns: int) -> list[tuple[str, int, tuple[int, ...]]]:
        """What was announced in shared memory until then and still waits for other ranks: a description, when it was
        announced, and these ranks."""
        channel, found = self.announced_channel, []
        for id, announced_ns in channel.announced_until(until_ns) if channel is not None else ():
            with self._lock:
                name = self._shared_names.get(id, "")
                cached = self._cached_requests.get(name)
            missing = self._not_announced(id)
            if cached is not None and missing:
                found.append((describe_named(cached.signature, name), announced_ns, missing))
        return found

    def blocked_operation(self) -> CurrentOperation | None:
        """The operation announced in shared memory that a caller has waited for longest, if one does."""
        waiting = [(work.waiting_since_ns, work) for work in self._shared_works() if work.waiting_since_ns]
        if not waiting or self.announced_channel is None:
            return None
        since_ns, work = min(waiting, key=lambda item: item[0])
        missing = self.find_missing(work)
        if not missing:  # it runs, or others before it do
            current = self.announced_channel.current_call()
            missing = tuple(self.channel.members[index] for index in current.missing) if current is not None else ()
        return CurrentOperation(work.describe(), since_ns, missing, bool(missing))

    def _shared_works(self) -> list[Work]:
        with self._lock:
            return [work for work in self._works.values() if work.shared_id >= 0 and not work.done()]

    def find_missing(self, work: Work) -> tuple[int, ...]:
        """The ranks that have not announced the work in shared memory; empty if it runs, or is over."""
        return self._not_announced(work.shared_id) if work.shared_id >= 0 else ()

    def _not_announced(self, id: int) -> tuple[int, ...]:
        channel, rank = self.announced_channel, self._waits.recorder.rank
        missing = channel.not_announced(id) if channel is not None else ()
        return () if rank in missing else missing

    def announce_queued(self, will_wait: bool = False) -> None:
        """Announce in shared memory what is queued for that. With will_wait the caller waits for a part of it at once;
        the control thread comes a little later and sees to it that it is executed in any case."""
        channel = self.announced_channel
        assert channel is not None
        withdrawn: list[OperationRequest] = []
        with self._lock:
            queued, self._queued = list(self._queued.values()), {}
            if will_wait and not queued:
                return
            operations = [
                AnnouncedOperation(
                    work.signature, work.name, work.announced_ns, work.shared_id, work.get_spans(cached.row_counts)
                )
                for work, cached in queued
            ]
            try:
                calls = channel.announce_many(operations, will_wait=will_wait, on_done=self._release)
            except RondeError as error:
                self._fail_works([work for work, _ in queued], error)
                return
            with self._waits.condition:
                for (work, _), call in zip(queued, calls, strict=True):
                    if call is not None:
                        work.started_on((call,))
                    else:
                        work.withdrawn()
                        withdrawn.append(self._make_request(work))
        for request in withdrawn:
            self._waits.enqueue(request)

    def _run_shared(self, work: Work, cached: CachedRequest, deadline: Deadline) -> Any:
        """Announce the work in shared memory and wait for it."""
        assert self.announced_channel is not None
        work.group, work.waits, work.timeout_s = self.group, self._waits, deadline.timeout_s
        thread = this_thread
        if thread.operation:
            raise reentry_error(work.describe())
        [call] = work.make_calls(cached.row_counts, cached.description)
        announced_ns = work.announced_ns = time.monotonic_ns()
        work.shared_announcer = self
        operation = AnnouncedOperation(work.signature, work.name, announced_ns, cached.shared_id, call.spans)
        on_unfinished = functools.partial(self._on_unfinished, work, operation)
        try:
            thread.operation = cached.description  # as InsideOperation, which would take longer
            with self._lock:
                self._add(work)
                work.shared_id, work.waiting_since_ns = cached.shared_id, announced_ns
            if self.announced_channel.run_announced(call, operation, deadline, on_unfinished):
                self._release_names((work,))
                return work.succeed()
        except IdNotAgreed:
            work.shared_id = -1
            self._enqueue(work, self._make_request(work))
        except CallWithdrawn:
            pass  # and announced through the coordinator, by revoke_shared()
        except (RondeError, ValueError, TypeError) as error:
            if self._works.get(work.name) is work:
                self.announced_channel.record_failure(call.description, error)
                self._fail_works([work], error)
            raise
        finally:
            work.waiting_since_ns = 0
            thread.operation = ""
        return work.wait_until(deadline)

    def _on_unfinished(self, work: Work, operation: AnnouncedOperation, running_call: RunningCall) -> None:
        """The wait for a work has ended, and not the work."""
        assert self.announced_channel is not None
        with self._lock:
            if work.shared_id >= 0:  # else the call was withdrawn since
                self.announced_channel.keep(running_call, operation, self._release)
                with self._waits.condition:
                    work.started_on((running_call,))

    def _withdraw(self, work: Work) -> bool:
        """Take back a work that was announced in shared memory. Returns False if it runs. The caller holds the lock."""
        assert self.announced_channel is not None
        withdrawn = self.announced_channel.revoke(work.shared_id)
        if self._queued.pop(work.name, None) is None and not withdrawn:
            return False
        with self._waits.condition:
            work.withdrawn()
        return True

    # --- names -------------------------------------------------------------------------------------------------------

    def _add(self, work: Work) -> None:
        """Take the name. The caller holds the lock."""
        if self._closed_error is not None:
            raise self._closed_error
        before = self._works.get(work.name)
        if before is not None and not before.done():
            raise ValueError(
                f"{before.describe()} is still under way on this rank; wait for it, or choose another name"
            )
        self._works[work.name] = work

    def _enqueue(self, work: Work, item: ControlItem) -> None:
        if self._closed_error is not None:  # since _add(), by a signal handler
            raise self._closed_error
        if not work.announced_ns and self._waits.recorder.tracing:
            work.announced_ns = time.monotonic_ns()
        self._waits.enqueue(item)

    def _fail_works(self, works: list[Work], error: Exception) -> None:
        with self._waits.condition:
            for work in works:
                work.fail(error)
            self._waits.condition.notify_all()
        self._release_names(works)

    def _release(self, names: Sequence[str]) -> None:
        """Operations of these names that were announced in shared memory have ended."""
        with self._lock:
            for name in names:
                work = self._works.get(name)
                if work is not None and work.shared_id >= 0 and work.done():
                    del self._works[name]

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
