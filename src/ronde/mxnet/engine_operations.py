"""Operations in MXNet's engine: what is asynchronous on its arrays.

The engine makes a job of an operation when its arrays are there. One thread, "ronde-mxnet", takes the jobs and starts
the operations without waiting for them; the thread that runs callbacks of works ends them, and the engine goes on. It
lives from the first use until the process ends. What has to wait for other ranks before it can start (opening a
channel), or is about to time out, gets a thread of its own, "ronde-mxnet-wait".

The engine computes arrays in an order of its own, so operations without a name are not started in the order in which
they become ready. They form a *stream* with a channel of its own, on which each rank starts them in the order in which
its program has called them. Operations of one name are a stream, too: each starts when the one before it is over.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from ronde.comm.call import Call, Signature, hash_signature
from ronde.comm.channel import Channel
from ronde.comm.fork_and_signal_safety import InsideOperation
from ronde.comm.group import Group
from ronde.comm.work import Work, call_when_over
from ronde.comm.world import add_operations_wait
from ronde.errors import OperationTimeout, RondeError
from ronde.mxnet.engine_library import FAILED, SKIPPED, EngineJob, EngineLibrary, load_engine_library
from ronde.net.event_loop import start_thread
from ronde.training.graph_errors import describe_error
from ronde.types import Deadline, OperationKind

TAKE_S = 5.0
"""How long the thread waits for a job before it looks at deadlines again."""
LAST_S = 1.0
"""So long before its deadline, a named operation that has not started gets a thread that waits for it, so that its
error can name the missing ranks."""
STOP_S = 5.0

StartOperation = Callable[[Sequence[int]], Work]
"""Starts an operation on arrays at these addresses."""


class EngineOperation:
    """One operation that was pushed to the engine."""

    __slots__ = (
        *("addresses", "description", "error", "expires_at", "handle", "number", "start", "store", "stream", "work"),
    )

    def __init__(
        self,
        description: str,
        start: StartOperation,
        store: Callable[[Any, Sequence[int]], None] | None = None,
    ) -> None:
        self.description = description
        self.start = start
        self.store = store
        """Copies the result of the work to the arrays, if that is elsewhere."""
        self.number = 0
        """By which the library knows it."""
        self.stream: OrderedStream | NamedStream | None = None
        self.handle: int | None = None
        """With which the engine's operation is ended; None before the engine has called it, and after its end."""
        self.addresses: tuple[int, ...] | None = None
        """None before the arrays are there."""
        self.work: Work | None = None
        self.error: Exception | None = None
        """Why it fails, whatever the work says."""
        self.expires_at = 0.0


class OrderedStream:
    """Operations without a name, of one group, in the order in which this rank has called them. Each has its channel, a
    plan channel of the group, which is opened when the first one is ready."""

    def __init__(self, group: Group, name: str, streams: OrderedStreams, owner: object = None) -> None:
        """With an owner, no operation comes any more when that is gone."""
        self.group = group
        self.channel: Channel | None = None
        # Operations that have not ended; guarded by the lock of EngineThread.
        self.num_operations = 0
        self._name = name
        self._streams = streams
        self._owner = None if owner is None else weakref.ref(owner)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._is_opening = False
        self._pushed: deque[EngineOperation] = deque()

    def open_channel(self) -> Channel:
        """The channel, opened together with the other members if it is not open."""
        with self._opening:
            if self.channel is None:
                _ = self.group.ordered_channel  # raises when nothing can start here
                self._streams.close_unused(self.group, self._name)
                self.channel = self.group.open_plan_channel(0, self._name, overlapped=True, number=1)
            return self.channel

    @property
    def is_unused(self) -> bool:
        """Whether nothing is under way, and nothing will be."""
        return self._owner is not None and self._owner() is None and not self.num_operations

    def close(self) -> None:
        """Close the channel, when no member uses it any more."""
        if self.channel is not None:
            self.group.close_plan_channel(self.channel)

    def add(self, operation: EngineOperation) -> None:
        with self._lock:
            self._pushed.append(operation)

    def remove(self, operation: EngineOperation) -> None:
        with self._lock:
            self._pushed.remove(operation)

    def advance(self, thread: EngineThread) -> None:
        """Start what can be started. The order is that of the lock."""
        with self._lock:
            while self._pushed and (self._pushed[0].addresses is not None or self._pushed[0].error is not None):
                if self.channel is None:
                    if not self._is_opening:
                        self._is_opening = True
                        thread.run_in_thread(functools.partial(self._open_and_advance, thread))
                    return
                operation = self._pushed.popleft()
                if operation.addresses is None:
                    _refuse(self.channel, operation)
                    thread.end(operation, operation.error)
                else:
                    thread.start(operation)

    def _open_and_advance(self, thread: EngineThread) -> None:
        try:
            self.open_channel()
        except Exception as error:  # of any kind: the operations must end
            with self._lock:
                ready = [each for each in self._pushed if each.addresses is not None or each.error is not None]
                for each in ready:
                    self._pushed.remove(each)
            for each in ready:
                thread.end(each, error)
        finally:
            with self._lock:
                self._is_opening = False
        self.advance(thread)


class NamedStream:
    """Operations of one name of a group: each starts when the one before it is over."""

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self.name = name
        # Operations that have not ended; guarded by the lock of EngineThread.
        self.num_operations = 0
        self._lock = threading.Lock()
        self._pushed: deque[EngineOperation] = deque()
        self._is_running = False

    def add(self, operation: EngineOperation) -> None:
        with self._lock:
            self._pushed.append(operation)

    def remove(self, operation: EngineOperation) -> None:
        with self._lock:
            self._pushed.remove(operation)

    def advance(self, thread: EngineThread) -> None:
        with self._lock:
            while not self._is_running and self._pushed:
                operation = self._pushed[0]
                if operation.addresses is None and operation.error is None:
                    return
                if operation.addresses is None:
                    self._pushed.popleft()
                    self.refuse(f"{operation.description}: {operation.error}")
                    thread.end(operation, operation.error)
                else:
                    self._is_running = True
                    thread.start(operation)

    def over(self, thread: EngineThread) -> None:
        """The operation that was running has ended, and its name is free."""
        with self._lock:
            self._is_running = False
            self._pushed.popleft()
        self.advance(thread)

    def refuse(self, why: str) -> None:
        """Let the operation of this name, and later ones, fail on all members."""
        self.group.refuse_operation(self.name, why)


def _refuse(channel: Channel, operation: EngineOperation) -> None:
    """Let the other members have a Mismatch instead of an operation in which this one cannot take part."""
    description = f"no {operation.description}: {operation.error}"
    try:
        call = Call(OperationKind.BARRIER, description=description, signature_hash=hash_signature(description))
        channel.submit(call)
    except (RondeError, ValueError, TypeError):  # they have an error already
        return


class EngineThread:
    """Takes the jobs of operations, and sees to it that each of them ends."""

    def __init__(self, library: EngineLibrary) -> None:
        self._library = library
        self._push_lock = threading.Lock()
        """Held while an operation gets its number, its place in a stream and in the engine. Nothing that holds another
        lock takes it."""
        self._lock = threading.Lock()
        """Guards the rest. Nobody who holds it takes another one."""
        self._idle = threading.Condition(self._lock)
        self._last_number = 0
        self._pushed: dict[int, EngineOperation] = {}
        """By number, operations that have not ended."""
        self._named: dict[tuple[Group, str], NamedStream] = {}
        self._expiring: OrderedDict[int, EngineOperation] = OrderedDict()
        """By number, named operations that may not have started; the one that expires first is in front."""
        self._thread = threading.Thread(target=self._run, name="ronde-mxnet", daemon=True)
        start_thread(self._thread)
        atexit.register(self.stop)
        os.register_at_fork(before=self.wait_until_idle)

    def push(
        self,
        operation: EngineOperation,
        stream: OrderedStream | tuple[Group, str],
        read: Sequence[Any],
        written: Sequence[Any],
        priority: int,
    ) -> None:
        """Give an operation to the engine, and a place in its stream: an OrderedStream, or that of a group and name."""
        add_operations_wait(self.wait_for_pushed)
        with InsideOperation(operation.description), self._push_lock:
            with self._lock:
                found: OrderedStream | NamedStream
                if isinstance(stream, tuple):
                    found = self._named.setdefault(stream, NamedStream(*stream))
                else:
                    found = stream
                found.num_operations += 1
                self._last_number += 1
                operation.number, operation.stream = self._last_number, found
                self._pushed[operation.number] = operation
            found.add(operation)  # before the engine can call it
            label = f"ronde_{operation.description.partition(' ')[0]}"
            try:
                self._library.push(operation.number, read, written, priority, label)
            except BaseException:
                found.remove(operation)
                self._forget(operation)
                raise

    def start(self, operation: EngineOperation) -> None:
        """Start an operation whose turn it is. Called by its stream."""
        assert operation.stream is not None and operation.addresses is not None
        try:
            operation.work = operation.start(operation.addresses)
        except Exception as error:  # of any kind: it must end
            operation.error = error
            is_named = isinstance(operation.stream, NamedStream)
            self.run_in_thread(functools.partial(self._end_failed, operation, is_named))
            return
        if isinstance(operation.stream, NamedStream):
            operation.expires_at = time.monotonic() + operation.work.timeout_s
            with self._lock:
                self._expiring[operation.number] = operation
        call_when_over((operation.work,), functools.partial(self._on_over, operation))

    def end(self, operation: EngineOperation, error: Exception | None) -> None:
        """Let the engine go on: with the result, or with an error."""
        handle, operation.handle = operation.handle, None
        try:
            if handle is None:
                return
            if error is None:
                self._library.finish(handle)
            else:
                self._library.fail(handle, describe_error(error))
        finally:
            self._forget(operation)

    def run_in_thread(self, function: Callable[[], None]) -> None:
        start_thread(threading.Thread(target=function, name="ronde-mxnet-wait", daemon=True))

    def wait_until_idle(self) -> None:
        """Called before a fork: MXNet waits then until its engine has nothing to do, without letting other threads of
        Python run, and operations are ended by such."""
        if threading.current_thread() is not self._thread:
            with self._idle:
                self._idle.wait_for(lambda: not self._pushed)

    def stop(self) -> None:
        """Called when the process ends, before the rank leaves the round and MXNet ends its engine: wait for what was
        pushed, in which other ranks may count on this one."""
        self.wait_for_pushed()
        self._library.stop()
        self._thread.join(STOP_S)

    def wait_for_pushed(self) -> None:
        """Wait for what was pushed. Operations end when their time is over, or when the rank has left because of an
        error."""
        with self._idle:
            timeouts_s = [each.stream.group.operation_timeout_s for each in self._pushed.values() if each.stream]
            self._idle.wait_for(lambda: not self._pushed, max(timeouts_s, default=0.0) + STOP_S)

    def _forget(self, operation: EngineOperation) -> None:
        """The operation is over."""
        with self._lock:
            if self._pushed.pop(operation.number, None) is None:
                return
            stream = operation.stream
            assert stream is not None
            stream.num_operations -= 1
            if isinstance(stream, NamedStream) and not stream.num_operations:
                del self._named[stream.group, stream.name]
            if not self._pushed:
                self._idle.notify_all()

    def _run(self) -> None:
        try:
            while True:
                job = self._library.take_job(self._end_expired())
                if job is not None:
                    self._handle(job)
        except EOFError:
            return

    def _handle(self, job: EngineJob) -> None:
        with self._lock:
            operation = self._pushed.get(job.number)
        if operation is None:  # the engine has refused it
            return
        assert operation.stream is not None
        operation.handle = job.handle
        if job.kind == SKIPPED:
            operation.error = RondeError("an array that it reads holds the error of another operation")
        elif job.kind == FAILED:
            operation.error = RondeError(job.problem)
        else:
            operation.addresses = job.addresses
        operation.stream.advance(self)

    def _on_over(self, operation: EngineOperation) -> None:
        """The work of an operation is over. Called by the thread of callbacks."""
        assert operation.work is not None and operation.stream is not None and operation.addresses is not None
        with self._lock:
            self._expiring.pop(operation.number, None)
        error = operation.error
        try:
            result = operation.work.wait()
            error = None
            if operation.store is not None:
                operation.store(result, operation.addresses)
        except Exception as raised:  # of any kind: it must end
            error = error or raised
        if isinstance(operation.stream, NamedStream):
            operation.stream.over(self)  # before the arrays are there: the next loop may use the name at once
        self.end(operation, error)

    def _end_failed(self, operation: EngineOperation, is_named: bool) -> None:
        """End an operation that could not be started; not in start(), whose caller holds the lock of the stream."""
        if is_named:
            assert isinstance(operation.stream, NamedStream)
            operation.stream.over(self)
        self.end(operation, operation.error)

    def _end_expired(self) -> float:
        """See to named operations that have not started in time. Returns how long to wait for the next job."""
        while True:
            with self._lock:
                first = next(iter(self._expiring.values()), None)
                if first is None:
                    return TAKE_S
                remaining_s = first.expires_at - LAST_S - time.monotonic()
                if remaining_s > 0.0:
                    return min(TAKE_S, remaining_s)
                del self._expiring[first.number]
            assert first.work is not None
            if not first.work.is_started_or_done():
                self.run_in_thread(functools.partial(self._await_start, first))

    def _await_start(self, operation: EngineOperation) -> None:
        """Wait for a named operation until its time is over, and let it fail on all members then: its memory cannot be
        given back to the engine while it might still run."""
        work = operation.work
        assert work is not None and isinstance(operation.stream, NamedStream)
        elapsed_s = time.monotonic() - (operation.expires_at - work.timeout_s)
        try:
            work.wait_until(Deadline(work.timeout_s, elapsed_s=elapsed_s))
        except OperationTimeout as error:
            operation.error = error
            operation.stream.refuse(str(error))
        except Exception:  # _on_over() sees the same error
            return


class OrderedStreams:
    """The streams of this process, by group and name. Safe from any thread.

    The channel of a stream has a thread and descriptors, and a program may make any number of trainers one after the
    other. So a stream can have an owner. When the next channel of a group is opened, its members tell each other which
    streams have lost theirs, and close the channels of those that all of them have told: when an owner is freed is not
    the same on all ranks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[Group, str], OrderedStream] = {}

    def get(self, group: Group, name: str, owner: object = None) -> OrderedStream:
        """The stream of this name, equal on all members. A group belongs to a round, and its streams with it. A name
        that has an owner is used once."""
        with self._lock:
            stream = self._streams.get((group, name))
            if stream is None:
                for key in [key for key in self._streams if _is_over(key[0])]:
                    del self._streams[key]
                stream = self._streams[group, name] = OrderedStream(group, name, self, owner)
            return stream

    def close_unused(self, group: Group, opened: str) -> None:
        """Close the channels of streams that no member uses any more. Collective: called by all members before they
        open the channel of another stream."""
        with self._lock:
            unused = [name for (each, name), stream in self._streams.items() if each is group and stream.is_unused]
        mine = np.frombuffer(msgspec.json.encode(unused), np.uint8)
        told = group.allgather_each(mine, f"opening of {opened}")
        for name in set.intersection(*(set(msgspec.json.decode(each.tobytes(), type=list[str])) for each in told)):
            with self._lock:
                stream = self._streams.pop((group, name), None)  # None if another thread, which opens one, was faster
            if stream is not None:
                stream.close()


def _is_over(group: Group) -> bool:
    try:
        _ = group.ordered_channel
    except (RondeError, ValueError):
        return True
    return False


streams = OrderedStreams()


class _EngineThreadState:
    thread: EngineThread | None = None


_state = _EngineThreadState()
_state_lock = threading.Lock()


def get_engine_thread() -> EngineThread | None:
    """The thread that serves operations in the engine, started at the first call; None if operations cannot run there
    and have to be waited for."""
    library = load_engine_library()
    if library is None:
        return None
    with _state_lock:
        if _state.thread is None:
            _state.thread = EngineThread(library)
    return _state.thread


def submit(stream: OrderedStream, signature: Signature, call: Call) -> Work:
    """Start a call on the open channel of a stream."""
    channel = stream.open_channel()
    running_call = channel.submit(call, ((signature, ""),))
    return Work(signature, calls=(call,), running_calls=(running_call,), timeout_s=stream.group.operation_timeout_s)
