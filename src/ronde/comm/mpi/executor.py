"""Calls in order, one at a time. For channels whose backend has no thread of its own; the native ones do.

A call runs in the thread of its caller when nothing is before it. Only calls that were submitted, or that found the
executor busy, go through a thread, which is started when the first of them comes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ronde.comm.backend import Call, Outcome
from ronde.errors import OperationTimeout, RoundEnded
from ronde.types import Deadline

__all__ = ["Executor", "QueuedCall"]

Execute = Callable[[Call, Deadline], Outcome]
Explain = Callable[[Call], str]
"""What a call waits for, as the end of a sentence that says that it takes too long."""


class QueuedCall:
    """A call in the queue or under way: the Ticket of those who submitted it."""

    def __init__(self, call: Call, deadline: Deadline, explain: Explain) -> None:
        self.call = call
        self.deadline = deadline
        self._explain = explain
        self._over = threading.Event()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._over.is_set()

    def wait(self, deadline: Deadline, grace_s: float = 0.0) -> Outcome:
        """Wait for the call; raises what it ended in. OperationTimeout here leaves the call under way. `grace_s` is
        added to the deadline, for a call that ends at the same deadline by itself, with more to tell; and once more
        when nothing explains the wait: what is before the call may just be ending."""
        for limit_s in (deadline.left_s + grace_s, grace_s):
            if self._over.wait(limit_s):
                break
            if why := self._explain(self.call):
                raise self._timeout(deadline, why)
        else:
            raise self._timeout(deadline, "")
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def _timeout(self, deadline: Deadline, why: str) -> OperationTimeout:
        return OperationTimeout(f"{self.call.text} is still under way after a wait of {deadline.seconds:.1f} s{why}")

    def execute(self, execute: Execute) -> None:
        """Carry it out and keep the result or the error for wait()."""
        try:
            self._outcome = execute(self.call, self.deadline)
        except BaseException as error:  # the edge of the thread: whoever waits raises it
            self._error = error
        self._over.set()


class Executor:
    """Runs calls one after the other, in the order in which they came. `execute` carries one out and ends by itself
    when its owner aborts; calls behind it are then executed, too, so that each ends in its own error. `execute` may
    take up to `grace_s` longer than the deadline says. `explain` is called from any thread."""

    def __init__(self, name: str, execute: Execute, *, explain: Explain = lambda _: "", grace_s: float = 0.0) -> None:
        self.name = name
        self._execute = execute
        self._explain = explain
        self._grace_s = grace_s
        self._changed = threading.Condition()
        self._queue: deque[QueuedCall] = deque()
        self._current: tuple[Call, int] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def current(self) -> tuple[Call, int] | None:
        """The call under way and when it began (time.monotonic_ns())."""
        return self._current

    def busy(self) -> bool:
        """Whether a call is under way or waits for its turn."""
        with self._changed:
            return self._current is not None or bool(self._queue)

    def run(self, call: Call, deadline: Deadline) -> Outcome:
        """Execute the call, here when nothing is before it, and wait for it."""
        with self._changed:
            self._refuse_when_closed()
            if self._current is not None or self._queue:
                queued = self._enqueue(call, deadline)
            else:
                queued = None
                self._current = (call, time.monotonic_ns())
        if queued is not None:
            return queued.wait(deadline, self._grace_s)
        try:
            return self._execute(call, deadline)
        finally:
            self._finish_current()

    def submit(self, call: Call, deadline: Deadline) -> QueuedCall:
        """Queue the call behind those before it."""
        with self._changed:
            self._refuse_when_closed()
            return self._enqueue(call, deadline)

    def close(self, deadline: Deadline) -> bool:
        """Take no more calls, let those under way end (their owner has aborted them), end the thread. Whether all of
        that was done before the deadline. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: self._current is None and not self._queue, deadline.left_s)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline.left_s)
            idle = idle and not self._thread.is_alive()
        return idle

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise RoundEnded(f"{self.name} is closed")

    def _enqueue(self, call: Call, deadline: Deadline) -> QueuedCall:
        if self._thread is None:
            # Owned by this executor. Touches only the queue and what execute() touches; results leave by QueuedCall.
            self._thread = threading.Thread(target=self._loop, name=f"ronde-{self.name}", daemon=True)
            self._thread.start()
        queued = QueuedCall(call, deadline, self._explain)
        self._queue.append(queued)
        self._changed.notify_all()
        return queued

    def _finish_current(self) -> None:
        with self._changed:
            self._current = None
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._current is None and (self._queue or self._closed))
                if not self._queue:
                    return
                queued = self._queue.popleft()
                self._current = (queued.call, time.monotonic_ns())
            queued.execute(self._execute)
            self._finish_current()
            del queued  # it keeps memory alive; this thread may now wait for long
