"""A channel of a group, with the calls under way on it and the records of what ran. Used by groups, plans and named
operations.

The channel keeps every running call until it has ended, so that memory stays alive when a caller forgets its work, and
records each of them, no matter which thread waited for it.

Collectives are numbered, equally on all members because they run in one order: so the coordinator can compare when each
member came to one of them (observe/stragglers). Messages between two members are not part of that order.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ronde.comm.backends.base import (
    AnnouncedBackendChannel,
    AnnouncedBatch,
    AnnouncedCall,
    BackendChannel,
    CallTiming,
    CurrentCall,
    RunningCall,
)
from ronde.comm.buffers import Array
from ronde.comm.call import AnnouncedOperation, Call, Signature
from ronde.comm.fork_and_signal_safety import InsideOperation, reentry_error, this_thread
from ronde.errors import PeerLost, RondeError
from ronde.observe.activity import CurrentOperation
from ronde.observe.events import OperationFailed
from ronde.observe.recorder import Recorder
from ronde.observe.stragglers import MIN_BLOCKED_NS, ArrivalSampler, BlockedIntervals
from ronde.observe.timeline import NegotiationSlice
from ronde.types import Deadline, Op, OperationKind

POINT_TO_POINT = (OperationKind.SEND, OperationKind.RECEIVE)
NO_SEQUENCE = -1
SEQUENCE_EPOCH = 1 << 32
"""Numbers continue at a multiple of this after a join: while some members have joined, only the others count."""


class Channel:
    def __init__(
        self,
        backend_channel: BackendChannel,
        group: int,
        recorder: Recorder,
        operation_timeout_s: float,
        *,
        sample_arrivals: bool = False,
    ) -> None:
        self.backend_channel = backend_channel
        self.group = group
        self.members = backend_channel.spec.members
        self._is_point_to_point = backend_channel.spec.point_to_point
        self.arrival_sampler = ArrivalSampler(len(self.members) if sample_arrivals else 0)
        """When this rank arrived at operations, for the coordinator; stays empty without sample_arrivals."""
        self._run = backend_channel.run
        self._submit = backend_channel.submit
        self._record = recorder.record_operation
        self._recorder = recorder
        self._operation_timeout_s = operation_timeout_s
        self._lock = threading.RLock()  # reentrant: a signal handler that calls shutdown() may interrupt its owner
        self._running_calls: deque[RunningCall] = deque()
        self._closed = False
        self.has_lost_peer = False
        """Whether an operation has ended with PeerLost."""
        self._sequence_epoch = 0
        self._next_sequence = itertools.count().__next__
        self._blocked_intervals = BlockedIntervals()
        self._allreduce_cache = backend_channel.make_allreduce_cache(
            operation_timeout_s,
            self.record_failure,
            recorder=recorder,
            running_calls=self._running_calls,
            next_sequence=self._next_sequence,
            sampler=self.arrival_sampler,
        )
        self.run_cached_allreduce: Callable[..., Any] | None = None
        """Runs an allreduce of an array that cache_allreduce() was called for: (x, out, op, prescale, postscale).
        Returns None if it has to be done in the usual way."""
        if self._allreduce_cache is not None:
            self.run_cached_allreduce = self._allreduce_cache.run
            recorder.add_counts(group, "allreduce", self._allreduce_cache.counts)

    def cache_allreduce(self, x: Array, op: str | Op, signature: Signature) -> None:
        """From now on run_cached_allreduce() can run this allreduce, on any array like x."""
        if self._allreduce_cache is not None:
            description = signature.description.encode(errors="replace")
            options = (signature.prescale, signature.postscale, signature.dtype, signature.op)
            self._allreduce_cache.add(x, op, *options, signature.hash, description)

    def run(self, call: Call, signature: Signature) -> None:
        """Execute a collective and wait for it. Every blocking operation comes through here, so it has to be short."""
        thread = this_thread
        if thread.operation:
            raise reentry_error(call.description)
        try:
            thread.operation = call.description  # as InsideOperation, which would take longer
            sequence = self._next_sequence()
            submitted_ns = 0
            if self._running_calls:
                submitted_ns = time.monotonic_ns()
                self._reap_completed()  # so that the next allreduce can be run_cached_allreduce()
            timing = self._run(call, Deadline(self._operation_timeout_s))
            start_ns, ready_ns = timing.start_ns, timing.ready_ns
            self._record(signature.label, "", self.group, signature.num_bytes, start_ns, ready_ns, timing.end_ns)
            sampler = self.arrival_sampler
            if sequence >= sampler.next_sequence or ready_ns - start_ns >= sampler.long_wait_ns:
                sampler.add(sequence, start_ns, ready_ns - start_ns, ready_ns - start_ns)
            if submitted_ns:  # it may have waited for running calls before it
                self._blocked_intervals.add(submitted_ns, start_ns)
        except (RondeError, ValueError, TypeError) as error:
            self.record_failure(call.description, error)
            raise
        finally:
            thread.operation = ""

    def send_or_receive(self, call: Call, signature: Signature) -> CallTiming:
        with InsideOperation(call.description):
            try:
                timing = self._run(call, Deadline(self._operation_timeout_s))
            except (RondeError, ValueError, TypeError) as error:
                self.record_failure(call.description, error)
                raise
            start_ns, ready_ns = timing.start_ns, timing.ready_ns
            self._record(signature.label, "", self.group, signature.num_bytes, start_ns, ready_ns, timing.end_ns)
            self._recorder.record_waits({self._other_side(call, timing): ready_ns - start_ns})
            return timing

    def submit(
        self,
        call: Call,
        records: Sequence[tuple[Signature, str]] = (),
        *,
        timeout_s: float | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> RunningCall:
        """Queue a call. At its end its operations, (signature, name) in `records`, are recorded, and `on_done` is
        called, in the thread that sees it."""
        with InsideOperation(call.description):
            self._reap_completed()
            sequence = NO_SEQUENCE
            if call.kind is OperationKind.JOIN:
                self._sequence_epoch += SEQUENCE_EPOCH
                self._next_sequence = itertools.count(self._sequence_epoch).__next__
                self.arrival_sampler.skip_to(self._sequence_epoch)
                if self._allreduce_cache is not None:
                    self._allreduce_cache.restart(self._next_sequence)
            elif call.kind not in POINT_TO_POINT:
                sequence = self._next_sequence()
            deadline = Deadline(self._operation_timeout_s if timeout_s is None else timeout_s)
            running_call = self._submit(call, deadline)
            running_call.on_wait = self._blocked_intervals.add
            running_call.on_end = functools.partial(self._record_end, call, records, sequence, on_done)
            self._running_calls.append(running_call)
            return running_call

    def current_call(self) -> CurrentCall | None:
        """The call under way; None when the channel is idle or closed."""
        return None if self._closed else self.backend_channel.current_call()

    def has_sends_under_way(self) -> bool:
        """Whether a message that this rank has submitted is still to be sent."""
        for running_call in self._running_calls.copy():
            call = running_call.call
            if call is not None and call.kind is OperationKind.SEND and not running_call.done():
                return True
        return False

    def blocked_operation(self) -> CurrentOperation | None:
        """The operation in which a caller is blocked right now, if one is."""
        current = self.current_call()
        if current is None:
            return None
        since_ns = current.since_ns
        running_calls = self._running_calls.copy()
        if running_calls and not running_calls[-1].done():
            waits_ns = [call.waiting_since_ns for call in running_calls if call.waiting_since_ns]
            if not waits_ns:
                return None  # the caller computes meanwhile
            since_ns = max(since_ns, min(waits_ns))
        missing = tuple(self.members[index] for index in current.missing)
        return CurrentOperation(
            current.description, since_ns, () if current.kind is OperationKind.JOIN else missing, bool(missing)
        )

    def rank_lost(self, error: PeerLost) -> None:
        """A member is lost: end the messages to it and from it, or on a channel of collectives all waits."""
        if not self._closed:
            self.backend_channel.rank_lost(error.peer, error.why)

    def abort(self, error: RondeError) -> None:
        """End all waits at once, because the round is over."""
        if self._closed:
            return
        if isinstance(error, PeerLost):
            self.backend_channel.abort(lost_rank=error.peer, why=error.why)
        else:
            self.backend_channel.abort(why=str(error))

    def close(self, why: str = "") -> None:
        """Close the channel; what is under way ends with RoundEnded, for this reason. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.backend_channel.close(why)
        self._close_allreduce_cache()
        if self._allreduce_cache is not None:
            self._recorder.remove_counts(self.group, "allreduce", self._allreduce_cache.counts)
        self._running_calls.clear()

    def refuse_in_child(self, error: RondeError) -> None:
        """This process is a forked child: everything raises the error, and nothing reaches the backend."""
        self._close_allreduce_cache()

        def refuse(call: Call, deadline: Deadline) -> NoReturn:
            raise error

        self._run = self._submit = refuse
        self._lock = threading.RLock()  # a thread of the parent may have held it
        self._closed = True
        for running_call in self._running_calls:
            running_call.fail_in_child(error)
        self._running_calls.clear()

    def _close_allreduce_cache(self) -> None:
        if self._allreduce_cache is not None:
            self._allreduce_cache.close()

    def record_failure(self, op: str, error: BaseException) -> None:
        self.has_lost_peer = self.has_lost_peer or isinstance(error, PeerLost)
        rank = self._recorder.rank
        event = OperationFailed(at_ns=time.monotonic_ns(), rank=rank, op=op, group=self.group, why=str(error))
        self._recorder.record_event(event)

    def _record_end(
        self,
        call: Call,
        records: Sequence[tuple[Signature, str]],
        sequence: int,
        on_done: Callable[[], None] | None,
        outcome: CallTiming | Exception,
    ) -> None:
        """Record how a submitted call ended, and for how much of its time a caller was blocked. The first parameters
        were bound when it was submitted."""
        if isinstance(outcome, CallTiming):
            start_ns, ready_ns, end_ns = outcome.start_ns, outcome.ready_ns, outcome.end_ns
            for signature, name in records:
                self._record(signature.label, name, self.group, signature.num_bytes, start_ns, ready_ns, end_ns)
            # Each operation of the call was recorded with all of the time.
            counted_wait_ns, counted_move_ns = len(records) * (ready_ns - start_ns), len(records) * (end_ns - ready_ns)
            if call.kind is OperationKind.JOIN:
                ready_ns = end_ns  # a join only waits
            waited_ns = self._blocked_intervals.blocked_ns_between(start_ns, ready_ns)
            moved_ns = self._blocked_intervals.blocked_ns_between(ready_ns, end_ns)
            self._recorder.record_overlap(counted_wait_ns - waited_ns, counted_move_ns - moved_ns)
            if call.kind in POINT_TO_POINT:
                self._recorder.record_waits({self._other_side(call, outcome): waited_ns})
            elif sequence != NO_SEQUENCE:
                self.arrival_sampler.add(sequence, start_ns, ready_ns - start_ns, waited_ns)
        else:
            self.record_failure(call.description, outcome)
        if on_done is not None:
            on_done()

    def _other_side(self, message: Call, timing: CallTiming) -> int:
        """The rank that a message went to or came from."""
        return self.members[message.peer if timing.received is None else timing.received.source]

    def _reap_completed(self) -> None:
        """Record and forget calls that have ended, so that works nobody waits for are recorded, too. A channel runs its
        collectives in order, so only the first need be looked at; messages end in any order, and each time two of them
        are."""
        running_calls = self._running_calls
        num_kept = 0
        while running_calls:
            with self._lock:
                try:
                    if not running_calls[0].done():
                        num_kept += 1
                        if not self._is_point_to_point or num_kept == 2:
                            return
                        running_calls.rotate(-1)
                        continue
                    running_call = running_calls.popleft()
                except IndexError:  # a signal handler or another thread has closed the channel
                    return
            try:
                running_call.wait(Deadline(0.0))
            except (RondeError, ValueError, TypeError):
                pass  # recorded, and raised again for those who wait


class AnnouncedChannel(Channel):
    """A channel of operations with names that the members announce among themselves, under ids on which they have
    agreed. They run in the order in which they become ready. Whoever announces them keeps their memory."""

    def __init__(
        self,
        backend_channel: AnnouncedBackendChannel,
        group: int,
        recorder: Recorder,
        operation_timeout_s: float,
        *,
        sample_arrivals: bool = False,
    ) -> None:
        super().__init__(backend_channel, group, recorder, operation_timeout_s, sample_arrivals=sample_arrivals)
        self.agree = backend_channel.agree
        self.announced_until = backend_channel.announced_until
        self._announced_backend_channel = backend_channel
        self._unreported: deque[AnnouncedBatch] = deque()
        """Calls that were announced together, of which nobody may have seen the end."""
        self._kept: dict[int, RunningCall] = {}
        """By id, the calls of run_announced() that go on."""

    def run_announced(
        self,
        call: Call,
        operation: AnnouncedOperation,
        deadline: Deadline,
        on_unfinished: Callable[[RunningCall], None],
    ) -> bool:
        """Announce a call, wait for it and record it, as AnnouncedBackendChannel.run_announced. Returns False if the
        call goes on: then on_unfinished() has got it, and gives it to keep()."""
        timing = self._announced_backend_channel.run_announced(operation.shared_id, call, deadline, on_unfinished)
        if timing is None:
            return False
        self._record_operation(operation, timing)
        announced_ns, start_ns, sequence = operation.announced_ns, timing.start_ns, timing.sequence
        if start_ns - announced_ns >= MIN_BLOCKED_NS:  # the caller was blocked before the start, too
            self._recorder.record_overlap(announced_ns - start_ns, 0)
        sampler, waited_ns = self.arrival_sampler, timing.ready_ns - timing.arrived_ns
        if sequence >= sampler.next_sequence or (waited_ns >= sampler.long_wait_ns and sequence != NO_SEQUENCE):
            sampler.add(sequence, timing.arrived_ns, waited_ns, waited_ns)
        return True

    def keep(
        self, running_call: RunningCall, operation: AnnouncedOperation, on_done: Callable[[Sequence[str]], None]
    ) -> None:
        """Keep a call of run_announced() that goes on. At its end the operation is recorded and on_done() gets its
        name, in the thread that sees it."""
        running_call.on_wait = self._blocked_intervals.add
        running_call.on_end = functools.partial(self._record_kept, operation, on_done)
        self._kept[operation.shared_id] = running_call

    def announce_many(
        self, operations: Sequence[AnnouncedOperation], *, will_wait: bool, on_done: Callable[[Sequence[str]], None]
    ) -> Sequence[RunningCall | None]:
        """Announce operations together, as AnnouncedBackendChannel.announce_many. Those that have succeeded are
        recorded and on_done() gets their names, in the thread that sees it."""
        self._report_oldest()
        announced = self._announced_backend_channel.announce_many(
            operations,
            self._operation_timeout_s,
            will_wait=will_wait,
            on_wait=self._blocked_intervals.add,
            on_ended=functools.partial(self._record_ended, on_done),
        )
        if operations:
            self._unreported.append(announced)
        return announced.calls

    def revoke(self, id: int) -> bool:
        """The id stands for nothing any more. Returns whether a call that was announced here was taken back."""
        withdrawn = self._announced_backend_channel.revoke(id)
        if withdrawn:
            self._kept.pop(id, None)
        return withdrawn

    def not_announced(self, id: int) -> tuple[int, ...]:
        """The ranks that have not announced the id."""
        return tuple([self.members[index] for index in self._announced_backend_channel.not_announced(id)])

    def blocked_operation(self) -> CurrentOperation | None:
        return None  # NamedOperations knows who waits for which call

    def close(self, why: str = "") -> None:
        super().close(why)
        self._unreported.clear()
        self._kept.clear()

    def refuse_in_child(self, error: RondeError) -> None:
        super().refuse_in_child(error)
        announced = [call for each in self._unreported for call in each.calls if call is not None]
        for running_call in (*announced, *self._kept.values()):
            running_call.fail_in_child(error)
        self._unreported.clear()
        self._kept.clear()

    def _record_operation(self, operation: AnnouncedOperation, timing: CallTiming) -> None:
        signature, name, start_ns = operation.signature, operation.name, timing.start_ns
        if self._recorder.tracing:
            negotiated = NegotiationSlice(signature.label, name, self.group, operation.announced_ns, start_ns)
            self._recorder.record_batch_start(start_ns if timing.sequence != NO_SEQUENCE else None, (negotiated,))
        self._record(signature.label, name, self.group, signature.num_bytes, start_ns, timing.ready_ns, timing.end_ns)

    def _record_ended(self, on_done: Callable[[Sequence[str]], None], ended: Sequence[AnnouncedCall]) -> None:
        """As _record_end, for calls that have succeeded. Each is recorded with all of its time; of those that were
        fused, one has a sequence number and tells how long callers were blocked."""
        unblocked_wait_ns = unblocked_move_ns = 0
        for call in ended:
            timing = call.timing
            assert timing is not None
            self._record_operation(call.operation, timing)
            arrived_ns, ready_ns = timing.arrived_ns, timing.ready_ns
            unblocked_wait_ns += ready_ns - timing.start_ns
            unblocked_move_ns += timing.end_ns - ready_ns
            if timing.sequence != NO_SEQUENCE:
                waited_ns = self._blocked_intervals.blocked_ns_between(arrived_ns, ready_ns)
                unblocked_wait_ns -= waited_ns
                unblocked_move_ns -= self._blocked_intervals.blocked_ns_between(ready_ns, timing.end_ns)
                self.arrival_sampler.add(timing.sequence, arrived_ns, ready_ns - arrived_ns, waited_ns)
        self._recorder.record_overlap(unblocked_wait_ns, unblocked_move_ns)
        on_done([call.operation.name for call in ended])

    def _record_kept(
        self,
        operation: AnnouncedOperation,
        on_done: Callable[[Sequence[str]], None],
        outcome: CallTiming | Exception,
    ) -> None:
        self._kept.pop(operation.shared_id, None)
        if isinstance(outcome, CallTiming):
            ended = AnnouncedCall(operation)
            ended.timing = outcome
            self._record_ended(on_done, (ended,))
        else:
            self.record_failure(operation.description, outcome)
            on_done((operation.name,))

    def _report_oldest(self) -> None:
        """Record calls that have ended and that nobody has waited for. If some of the oldest go on, they become the
        youngest, so all of them get their turn."""
        unreported = self._unreported
        for _ in range(2):  # one more than is added
            try:
                oldest = unreported.popleft()
            except IndexError:
                return
            if not oldest.poll():
                unreported.append(oldest)
