"""Work: one operation from the caller's arguments to its result, and the caller's handle while it is under way.

A work in program order gets its running calls at once. One with a name gets them when every member has announced it;
until then its waiters are known to NegotiationWaits, which the control thread shares with all works.

The works of some operations are classes of their own: comm/operations.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

from ronde.comm.backends.base import CallWithdrawn, RunningCall
from ronde.comm.buffers import ReceiveBuffer
from ronde.comm.call import Call, Signature, Span
from ronde.comm.fork_and_signal_safety import InsideOperation, wait_for
from ronde.errors import OperationTimeout, RondeError
from ronde.net.event_loop import start_thread
from ronde.net.messages import MissingRanksQuery, OperationRequest, WorkerMessage
from ronde.observe.activity import CurrentOperation
from ronde.observe.recorder import Recorder
from ronde.observe.stragglers import attribute_waits
from ronde.text import format_ranks
from ronde.types import CPU, Deadline

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
ControlItem: TypeAlias = int | OperationRequest | WorkerMessage | Callable[[], None]
"""What the control thread sends or calls: an announcement by id or in full, a message, or a function."""

QUERY_MISSING_BEFORE_S = 0.5
"""A wait for the start of a named operation asks for the missing ranks when so much of its time is left, or half of it.
Asking when the time is over would make the wait longer than was promised."""

POLL_S = 0.002
"""How often calls are asked whether they have ended, by the thread for callbacks, if their backend does not tell."""
IDLE_S = 1.0
"""How long that thread waits for the next function before it ends."""

MIN_QUERY_TIME_S = 0.05
"""A wait with less time than this does not ask: some callers wait for a moment a thousand times per second."""


class BatchStart(NamedTuple):
    """When named operations started together, and the ranks that announced them last."""

    at_ns: int
    stragglers: tuple[tuple[int, int], ...]
    """(rank, nanoseconds before the last one), as in RunOperations."""


class SharedAnnouncer(Protocol):
    """Announces works in the memory that the members of a group share: NamedOperations."""

    def announce_queued(self, will_wait: bool = False) -> None:
        """Announce what is queued."""

    def find_missing(self, work: Work) -> tuple[int, ...]:
        """The ranks that have not announced the work; empty if it runs, or is over."""


class Work:
    """One operation under way. It keeps the memory it works on alive.

    wait() may be called any number of times and from any thread; it gives the same result or error each time.
    """

    __slots__ = (
        "_calls",
        "_copy_lock",
        "_done",
        "_error",
        "_on_start",
        "_owners",
        "_result",
        "_running_calls",
        "_targets",
        "announced_ns",
        "batch_start",
        "group",
        "missing",
        "name",
        "shared_announcer",
        "shared_id",
        "signature",
        "timeout_s",
        "waiting_since_ns",
        "waits",
    )

    # The numbers of rows that this rank gives, when members may differ in them.
    own_rows: tuple[int, ...] | None = None
    # For alltoall, and on the root of a scatter, how many rows go to each member.
    splits: tuple[int, ...] | None = None
    device: str = CPU
    # Of an operation on another device: as those of its calls.
    streams: tuple[int, ...] = ()

    # Thousands of these are made per step, so __init__ does no more than it must.
    def __init__(
        self,
        signature: Signature,
        name: str = "",
        calls: tuple[Call, ...] = (),
        result: Any = None,
        targets: Sequence[ReceiveBuffer] = (),
        owners: object = None,
        *,
        running_calls: tuple[RunningCall, ...] | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self.signature = signature
        self.name = name
        """The name it was given; empty for an operation matched by program order."""
        self._calls = calls
        self._result = result
        """What the caller gets; its memory is complete when the work is done."""
        self._targets = targets
        """What is copied to the caller's own arrays at the end."""
        self._copy_lock = threading.RLock() if targets else None  # reentrant: a signal handler may interrupt its owner
        """Held meanwhile: other threads that wait for the work return when that is done."""
        self._owners = owners
        """The objects that own the memory which the operation reads."""
        self._running_calls = running_calls
        self.timeout_s = timeout_s
        self._done = False
        self._error: Exception | None = None
        # Only of an operation with a name:
        self._on_start: list[Callable[[], None]] | None = None
        """Called when it has started or failed."""
        self.group = 0
        self.announced_ns = 0  # when it was announced, in shared memory or if a timeline is being written
        self.shared_id = -1  # under which it is announced in shared memory, if it is
        # Since when a thread waits for it, if it is announced in shared memory; 0 when none does.
        self.waiting_since_ns = 0
        # Who announces it in shared memory, if anybody does.
        self.shared_announcer: SharedAnnouncer | None = None
        self.missing: tuple[int, ...] = ()  # the ranks that have not announced it, if a wait has asked
        self.waits: NegotiationWaits | None = None
        self.batch_start: BatchStart | None = None

    def wait(self, timeout_s: float | None = None, *, stream: int | None = None) -> Any:  # arrays, lists, or None
        """Wait for the operation and return its result, or raise its error. OperationTimeout is raised after timeout_s;
        the operation then continues.

        Without timeout_s it waits as long as an operation may take (the setting operation_s).

        With a stream, and memory of another device than the CPU, not the caller waits but that stream: what is put on
        it from now on finds the result. An error that comes later is raised by the next wait() without a stream, by
        exception(), and by later operations of the group.
        """
        if stream is not None and self.device != CPU:
            return self._wait_on_stream(stream, Deadline(self.timeout_s if timeout_s is None else timeout_s))
        if not self._done:
            calls = self._running_calls
            if calls is not None and all([call.timing is not None for call in calls]):
                self._succeed()  # a wait for another work of the same call has seen its end
            else:
                return self.wait_until(Deadline(self.timeout_s if timeout_s is None else timeout_s))
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        """Whether wait() would return at once."""
        calls = self._running_calls
        return self._done or (calls is not None and all(call.done() for call in calls))

    def result(self) -> Any:  # as wait()
        """The result of an operation that is over, without waiting."""
        if not self.done():
            raise ValueError(f"{self.name or 'the operation'} is still under way; wait() for it")
        return self.wait()

    def exception(self) -> Exception | None:
        """The error of an operation that is over, without waiting; None if it succeeded."""
        try:
            self.result()
        except Exception:
            if self._error is None:
                raise
        return self._error

    def then(self, function: Callable[[Work], T]) -> Future[T]:
        """Call function(self) once when the operation is over, also if it has failed, in a thread of ronde's own.
        Return a concurrent.futures.Future of what the function returns or raises.

        The thread is the same for all functions, which run one after the other: one that takes long, or waits, delays
        the others.
        """
        return call_when_over((self,), lambda: function(self))

    def future(self) -> Future[Any]:
        """Return a concurrent.futures.Future of the result or the error. It cannot be cancelled."""
        return self.then(Work.wait)

    def __repr__(self) -> str:
        return f"<Work {self.name or 'unnamed'}: {'over' if self.done() else 'under way'}>"

    # --- for groups and named operations -----------------------------------------------------------------------------

    def make_calls(self, row_counts: tuple[int, ...] | None = None, description: str = "") -> tuple[Call, ...]:
        # What a channel executes, in this order; row_counts are those of all members, in their order. The description
        # is that of the calls, if it is known.
        return self._calls

    def get_spans(self, row_counts: tuple[int, ...] | None) -> tuple[Span, ...]:
        # The memory of an operation of one call.
        return self.make_calls(row_counts)[0].spans

    def finish(self) -> Any:
        # The result, when all calls have ended.
        for target in self._targets:
            if target.copy_to is not None:
                target.copy_to[...] = target.array
        return self._result

    def wait_until(self, deadline: Deadline) -> Any:
        # As wait().
        if not self._done:
            with InsideOperation(f"wait() for {self.describe()}"):
                self._complete(deadline)
        if self._error is not None:
            raise self._error
        return self._result

    def succeed(self) -> Any:
        # All calls have ended well. Returns the result.
        self._succeed()
        return self._result

    @property
    def is_started(self) -> bool:
        return self._running_calls is not None

    def is_started_or_done(self) -> bool:
        return self._running_calls is not None or self._done

    def started_on(self, running_calls: tuple[RunningCall, ...], batch_start: BatchStart | None = None) -> None:
        # With a name: in the control thread, which holds the condition of NegotiationWaits.
        self.batch_start = batch_start
        self._running_calls = running_calls
        self._tell_start()

    def withdrawn(self) -> None:
        # It was announced in shared memory and taken back; the holder of the condition of NegotiationWaits says so.
        self.shared_id = -1
        for running_call in self._running_calls or ():
            running_call.withdrawn()
        self._running_calls = None

    def fail(self, error: Exception) -> None:
        # The operation will not start, with a name as started_on(); or one of its calls has failed.
        if not self._done:
            self._error = error
            self._done = True
            self._tell_start()

    def _tell_start(self) -> None:
        if self._on_start is not None:
            for callback in self._on_start:
                callback()
            self._on_start = None

    def notify_at_progress(self, callback: Callable[[], None]) -> bool:
        # Call back once, from any thread, when the work may be over; at once when it is. Returns False if nobody would
        # call back: then done() has to be asked again.
        if self._running_calls is None and self.waits is not None:
            with self.waits.condition:
                if not self.is_started_or_done():
                    self._on_start = [*(self._on_start or ()), callback]
                    return True
        for running_call in self._running_calls or ():
            if running_call.notify_at_end(callback):
                return True
            if not running_call.done():
                return False
        callback()
        return True

    def describe(self) -> str:
        if not self.name:
            return self.signature.description
        return f"{self.signature.label} {self.name!r} of group {self.group}"

    def make_start_timeout(self, deadline: Deadline, missing: tuple[int, ...]) -> OperationTimeout:
        waited_for = f"; it waits for {format_ranks(missing)}" if missing else ""
        error = OperationTimeout(f"{self.describe()} did not start within {deadline.timeout_s:g} s{waited_for}")
        error.missing = missing
        return error

    # --- the wait ----------------------------------------------------------------------------------------------------

    def _complete(self, deadline: Deadline) -> None:
        if self._running_calls is None and self.shared_id >= 0 and self.shared_announcer is not None:
            self.shared_announcer.announce_queued(will_wait=True)
        if self._running_calls is None and not self._done:
            assert self.waits is not None
            self.waits.wait_for_start(self, deadline)
        if self._done:
            return
        calls = self._running_calls or ()
        if self.shared_id >= 0:
            self.waiting_since_ns = time.monotonic_ns()
        try:
            for running_call in calls:
                running_call.wait(deadline)
        except CallWithdrawn:
            assert self.waits is not None
            with self.waits.condition:
                if self._running_calls is calls:
                    self.withdrawn()
            self._complete(deadline)  # it is announced through the coordinator now
        except (RondeError, ValueError, TypeError) as error:
            # A timeout may be that of this wait only. The call may have ended meanwhile, or another thread may have
            # seen its result, so done() does not tell.
            if isinstance(error, OperationTimeout) and all(call.error is not error for call in calls):
                missing = self.shared_announcer.find_missing(self) if self.shared_announcer is not None else ()
                raise (self.make_start_timeout(deadline, missing) if missing else error) from None
            # Other calls of the work may be under way: the memory is kept.
            self.fail(error)
        else:
            self._succeed()
        finally:
            self.waiting_since_ns = 0

    def _wait_on_stream(self, stream: int, deadline: Deadline) -> Any:
        with InsideOperation(f"wait() for {self.describe()}"):
            if not self.is_started_or_done():
                assert self.waits is not None
                self.waits.wait_for_start(self, deadline)  # only then is it known what the stream has to wait for
            if not self._done:
                try:
                    for running_call in self._running_calls or ():
                        running_call.wait_on_stream(stream, deadline)
                except (RondeError, ValueError, TypeError) as error:
                    if all(call.error is not error for call in self._running_calls or ()):
                        raise  # the wait has failed, and not the call
                    self.fail(error)
        if self._error is not None:
            raise self._error
        return self._result

    def _succeed(self) -> None:
        if self._copy_lock is None:
            self._finish_once()
        else:
            with self._copy_lock:
                self._finish_once()

    def _finish_once(self) -> None:
        if not self._done:
            self.finish()
            self._calls = self._targets = ()
            self._owners = None
            self._done = True


# --- what is called when works are over ------------------------------------------------------------------------------


class _WorkCallback:
    """Works, and what is called when all of them are over."""

    __slots__ = ("call", "future", "works")

    def __init__(self, works: Sequence[Work], call: Callable[[], Any], future: Future[Any]) -> None:
        self.works = works
        self.call = call
        self.future = future

    def finish(self) -> None:
        try:
            self.future.set_result(self.call())
        except BaseException as error:  # belongs to whoever has the future
            self.future.set_exception(error)


class _CallbackThread:
    """Runs functions when works are over. Its thread, "ronde-callbacks", starts with the first function and ends when
    there is none for a while. The library's threads and the control thread say when to look at a work again; calls of
    backends that do not are polled."""

    def __init__(self) -> None:
        self.forget_all()

    def forget_all(self) -> None:
        """As at first. In a forked child, where the thread does not exist, nothing of the parent is called."""
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its owner
        self._num_callbacks = 0
        self._thread: threading.Thread | None = None
        self._inbox: SimpleQueue[_WorkCallback | None] = SimpleQueue()
        """What is to be looked at. None: the thread is to end, unless it has works to wait for."""

    def add(self, callback: _WorkCallback) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ronde-callbacks", daemon=True)
                start_thread(thread)
                self._thread = thread
            self._num_callbacks += 1
        self._inbox.put(callback)

    def finish(self, deadline: Deadline) -> None:
        """Wait until everything was called and the thread has ended, when all works are over. It returns at once in a
        callback."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._inbox.put(None)
            thread.join(deadline.remaining_s)

    def _run(self) -> None:
        callbacks: list[_WorkCallback] = []
        while True:
            has_more = self._take(callbacks)
            callbacks = [callback for callback in callbacks if self._needs_poll(callback)]
            if not has_more and self._end_if_idle():
                return

    def _take(self, callbacks: list[_WorkCallback]) -> bool:
        """Wait for what is to be looked at next, and add it; returns whether there was something."""
        try:
            callback = self._inbox.get(timeout=POLL_S if callbacks else IDLE_S)
        except Empty:
            return False
        if callback is not None:
            callbacks.append(callback)
        return callback is not None

    def _end_if_idle(self) -> bool:
        with self._lock:
            if self._num_callbacks == 0:
                self._thread = None
            return self._thread is None

    def _needs_poll(self, callback: _WorkCallback) -> bool:
        """Finish a callback whose works are over. Returns whether nobody says when to look at it again."""
        for work in callback.works:
            if not work.done():
                return not work.notify_at_progress(functools.partial(self._inbox.put, callback))
        callback.finish()
        with self._lock:
            self._num_callbacks -= 1
        return False


_callback_thread = _CallbackThread()
os.register_at_fork(after_in_child=_callback_thread.forget_all)


def finish_callbacks(deadline: Deadline) -> None:
    """Wait until what follows works has been called. All works must be over."""
    _callback_thread.finish(deadline)


def call_when_over(works: Sequence[Work], function: Callable[[], T]) -> Future[T]:
    """Call the function once when all works are over, in the callback thread; return a future of what it returns."""
    from concurrent.futures import Future  # not at the top: few ranks have a use for it

    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    _callback_thread.add(_WorkCallback(works, function, future))
    return future


class NegotiationWaits:
    """The threads that wait for the start of named operations; one object per rank, made by the control thread."""

    def __init__(self, recorder: Recorder, enqueue: Callable[[ControlItem], None]) -> None:
        self.condition = threading.Condition()
        """Guards the start of works, and is notified of it."""
        self.enqueue = enqueue
        self.recorder = recorder
        self._waiting: dict[int, tuple[int, Work]] = {}
        """By thread: since when it waits, and for which work."""
        self._forked_error: RondeError | None = None

    def refuse_in_child(self, error: RondeError) -> None:
        """This process is a forked child: waits and announcements raise the error."""

        def refuse(item: object) -> NoReturn:
            raise error

        self.condition = threading.Condition()  # a thread of the parent may have held it
        self.enqueue = refuse
        self._forked_error = error

    def wait_for_start(self, work: Work, deadline: Deadline) -> None:
        """Wait until the work has started or failed. OperationTimeout says which ranks have not announced it."""
        if self._forked_error is not None:
            raise self._forked_error
        began_ns = time.monotonic_ns()
        query_s = min(QUERY_MISSING_BEFORE_S, deadline.timeout_s / 2)
        with self.condition:
            self._waiting[threading.get_ident()] = (began_ns, work)
            try:
                if wait_for(self.condition, work.is_started_or_done, max(0.0, deadline.remaining_s - query_s)):
                    return
                work.missing = ()
                if query_s >= MIN_QUERY_TIME_S:
                    self.enqueue(MissingRanksQuery(work.group, work.name))
                if not wait_for(self.condition, work.is_started_or_done, deadline.remaining_s):
                    raise work.make_start_timeout(deadline, work.missing)
            finally:
                self._waiting.pop(threading.get_ident(), None)
                self._record_wait(began_ns, work.batch_start)

    def _record_wait(self, began_ns: int, batch_start: BatchStart | None) -> None:
        """Record how long the calling thread has waited, and for which ranks; batch_start is None after a failure."""
        end_ns = time.monotonic_ns() if batch_start is None else batch_start.at_ns
        self.recorder.record_overlap(-max(0, end_ns - began_ns), 0)
        if batch_start is not None and batch_start.stragglers:
            own = self.recorder.rank  # this rank was there, whenever the coordinator received its announcement
            arrivals = {rank: end_ns - before_ns for rank, before_ns in batch_start.stragglers if rank != own}
            self.recorder.record_waits(attribute_waits(arrivals, [(began_ns, end_ns)]))

    def blocked_operation(self) -> CurrentOperation | None:
        """The operation that a caller has waited for longest, if one does."""
        with self.condition:
            if not self._waiting:
                return None
            began_ns, work = min(self._waiting.values(), key=lambda item: item[0])
            return CurrentOperation(work.describe(), began_ns, named_operation=(work.group, work.name))
