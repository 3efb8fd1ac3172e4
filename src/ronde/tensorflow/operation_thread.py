"""Runs what the kernels of graphs ask for: operations by their names, the channels of gradient plans, and the errors of
failed calls.

One thread, "ronde-tensorflow", takes the jobs of kernels and starts their operations without waiting for them. It lives
from the first use until the process ends, and touches only what is in this module. Kernels are finished by the thread
that runs callbacks of works. What has to wait for other ranks before it can start (opening the channel of a plan, join)
gets a thread of its own, "ronde-tensorflow-wait", so that ranks may come to such things in different orders.
"""

from __future__ import annotations

import atexit
import functools
import heapq
import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ronde.comm.backends.native import NativeChannel
from ronde.comm.backends.native_library import ALGORITHMS, NativeError, NativeStatus
from ronde.comm.buffers import array_at
from ronde.comm.call import hash_signature, mismatch_error
from ronde.comm.channel import Channel
from ronde.comm.group import Group
from ronde.comm.work import Work, call_when_over
from ronde.comm.world import World, current_world
from ronde.errors import Mismatch, OperationTimeout, RondeError, RoundEnded
from ronde.net.event_loop import start_thread
from ronde.observe.metrics import Counts
from ronde.tensorflow.graph_errors import describe_error
from ronde.tensorflow.op_library import (
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    OPEN_PLAN,
    RUN_OPERATION,
    UNKNOWN,
    GraphOperation,
    KernelJob,
    OpLibrary,
    load_op_library,
)
from ronde.types import Deadline

TAKE_S = 5.0
"""How long the thread waits for a job before it looks at deadlines again."""
LAST_S = 1.0
"""When so much of its time is left, an operation that has not started is waited for, by a thread that learns which
ranks are missing."""
STOP_S = 5.0
MAX_CHANNEL_NAME = 60

NUMBERS: dict[str, Callable[[World, Group], int]] = {
    "rank": lambda world, group: world.rank,
    "size": lambda world, group: group.size,
    "local_rank": lambda world, group: world.local_rank,
    "local_size": lambda world, group: world.topology.local_size,
    "group_rank": lambda world, group: -1 if group.rank is None else group.rank,
}
"""What the operation RondeNumber can ask for."""


def find_group(id: int) -> Group:
    """The group with this number in the current round."""
    world = current_world("an operation of a TensorFlow graph")
    for group in world.groups:
        if group.id == id:
            return group
    raise ValueError(f"a TensorFlow graph uses group {id}, which this round does not have; build the graph again")


def read_number(operation: GraphOperation) -> int:
    """What RondeNumber returns: a rank or a size."""
    group = find_group(operation.group)
    return NUMBERS[operation.kind](current_world(), group)


def start_by_name(operation: GraphOperation, inputs: Any, outputs: Any = None, splits: Any = None) -> Work:
    """Start an operation of a graph. `inputs` are arrays or memory, and `outputs` are as they are."""
    group, kind, name = find_group(operation.group), operation.kind, operation.name
    scales: dict[str, Any] = {"prescale": operation.prescale, "postscale": operation.postscale}
    work: Work
    if kind == "allreduce":
        out = None if outputs is None else list(outputs)
        work = group.allreduce(list(inputs), op=operation.op, out=out, name=name, wait=False, **scales)
    elif kind == "broadcast":
        out = None if outputs is None else outputs[0]
        work = group.broadcast(inputs[0], root=operation.root, out=out, name=name, wait=False)
    elif kind == "allgather":
        work = group.allgather(inputs[0], name=name, wait=False)
    elif kind == "reduce_scatter":
        work = group.reduce_scatter(inputs[0], op=operation.op, name=name, wait=False, **scales)
    elif kind == "alltoall":
        work = group.alltoall(inputs[0], splits=splits, name=name, wait=False)
    else:
        assert kind == "barrier", kind
        work = group.barrier(name=name, wait=False)
    return work


# --- channels of plans -----------------------------------------------------------------------------------------------


class PlanChannels:
    """The channels on which buckets of gradients are reduced, one per plan and round. Safe from any thread."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[World, Channel]] = {}
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}

    def open(self, plan: str, group: Group) -> Channel:
        """The channel of a plan in this round, opened together with the other members if it is not open. Members may
        open those of different plans in any order."""
        with self._lock:
            opening = self._opening.setdefault(plan, threading.Lock())
        with opening:
            channel = self.find(plan)
            if channel is None:
                world = current_world("gradients")
                _ = group.ordered_channel  # raises when nothing can start here
                channel = group.open_plan_channel(0, _channel_name(plan), overlapped=True)
                with self._lock:
                    self._channels[plan] = (world, channel)
            return channel

    def find(self, plan: str) -> Channel | None:
        """The channel, if it was opened in this round."""
        with self._lock:
            found = self._channels.get(plan)
        return found[1] if found is not None and found[0] is current_world("gradients") else None

    def find_last(self, plan: str) -> Channel | None:
        """The channel of this round or of the one in which the plan was used last."""
        with self._lock:
            found = self._channels.get(plan)
        return None if found is None else found[1]


def _channel_name(plan: str) -> str:
    """The plan's name as that of a channel: short, and of characters that a file name can have."""
    readable = re.sub(r"[^\w.-]+", "-", plan)[:MAX_CHANNEL_NAME]
    return f"tensorflow.{readable}.{hash_signature(plan) & 0xFFFFFFFF:08x}"


plan_channels = PlanChannels()


def abandoned_error(group: Group, channel: Channel, description: str) -> RondeError:
    """The error for a step that begins before all buckets of the one before were started. The members cannot know what
    the next call on the channel stands for, so all of them lose this rank there."""
    why = (
        f"the training step before was abandoned on rank {channel.members[group.rank or 0]}, when only some of its "
        "gradients were reduced"
    )
    group.abort_plan_channel(channel, why)
    return RondeError(f"{description}: {why}; look for the error that ended that step, and end the job after it")


def _explain_failure(job: KernelJob) -> Exception:
    """The error of a bucket whose call has failed or was refused."""
    channel, failure = plan_channels.find_last(job.plan), job.failure
    if channel is None:
        return RoundEnded(f"{job.description}: the round is over")
    if failure.is_abandoned:
        return abandoned_error(find_group(job.operation.group), channel, job.description)
    if failure.status == NativeStatus.MISMATCH and failure.descriptions:
        return mismatch_error({r: text for r, text in zip(channel.members, failure.descriptions, strict=True) if text})
    backend_channel = channel.backend_channel
    assert isinstance(backend_channel, NativeChannel)
    elapsed_s = (time.monotonic_ns() - failure.submitted_ns) / 1e9 if failure.submitted_ns else 0.0
    timeout_s = find_group(job.operation.group).operation_timeout_s
    error = NativeError(failure.status, failure.member, failure.detail, has_ended=True)
    return backend_channel.make_error(job.description, error, Deadline(timeout_s, elapsed_s=elapsed_s))


# --- the thread ------------------------------------------------------------------------------------------------------


class OperationThread:
    """Takes the jobs of kernels, and sees to it that each of them ends."""

    def __init__(self, library: OpLibrary) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._in_flight: dict[tuple[int, str], deque[KernelJob]] = {}
        """By group and name of an operation that is under way: further jobs of that name, such as those of the next
        turn of a loop. A name can be used again when its operation is over."""
        self._deadlines: list[tuple[float, int, KernelJob, Work]] = []
        """A heap: until when an operation has to start."""
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="ronde-tensorflow", daemon=True)
        start_thread(self._thread)
        atexit.register(self.stop)

    def stop(self) -> None:
        self._library.stop()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            while True:
                job = self._library.take_job(self._end_expired())
                if job is not None:
                    self._handle(job)
        except EOFError:
            return

    def _handle(self, job: KernelJob) -> None:
        try:
            if job.kind == OPEN_PLAN:
                _run_in_thread(job, functools.partial(self._start_bucket, job))
            elif job.kind != RUN_OPERATION:
                # The reason of a loss may come a moment later than the loss.
                _run_in_thread(job, functools.partial(_fail_with_reason, job))
            elif job.operation.kind == "join":
                _run_in_thread(job, functools.partial(_join, job))
            elif job.operation.kind in NUMBERS:
                job.finish([np.array(read_number(job.operation), np.int32)])
                job.free()
            else:
                self._start_or_queue(job)
        except Exception as error:  # of any kind: the kernel must end
            _fail(job, error)

    def _start_or_queue(self, job: KernelJob) -> None:
        key = (job.operation.group, job.operation.name)
        with self._lock:
            if key in self._in_flight:
                self._in_flight[key].append(job)
                return
            self._in_flight[key] = deque()
        self._start(key, job)

    def _start(self, key: tuple[int, str], job: KernelJob) -> None:
        """Start an operation whose name is free, or the next one of that name if it cannot be started."""
        next_job: KernelJob | None = job
        while next_job is not None:
            try:
                work = _start_job(next_job)
            except Exception as error:  # of any kind: the kernel must end
                _fail(next_job, error)
                next_job = self._take_next(key)
                continue
            expires_at = time.monotonic() + max(0.0, work.timeout_s - LAST_S)
            with self._lock:
                heapq.heappush(self._deadlines, (expires_at, next(self._numbers), next_job, work))
            call_when_over((work,), functools.partial(self._on_over, key, next_job, work))
            return

    def _on_over(self, key: tuple[int, str], job: KernelJob, work: Work) -> None:
        """An operation has ended. Called by the thread of callbacks."""
        try:
            job.finish(_results_of(job, work.wait()))
            job.free()
        except Exception as error:  # of any kind: the kernel must end
            _fail(job, error)
        next_job = self._take_next(key)
        if next_job is not None:
            self._start(key, next_job)

    def _take_next(self, key: tuple[int, str]) -> KernelJob | None:
        with self._lock:
            waiting = self._in_flight[key]
            if waiting:
                return waiting.popleft()
            del self._in_flight[key]
            return None

    def _end_expired(self) -> float:
        """See to operations that have not started in time. Returns how long to wait for the next job."""
        while True:
            with self._lock:
                if not self._deadlines:
                    return TAKE_S
                expires_at, _, job, work = self._deadlines[0]
                is_over = work.is_started_or_done()
                remaining_s = expires_at - time.monotonic()
                if not is_over and remaining_s > 0.0:
                    return min(TAKE_S, remaining_s)
                heapq.heappop(self._deadlines)
            if not is_over:
                _run_in_thread(job, functools.partial(_await_start, job, work))

    def _start_bucket(self, job: KernelJob) -> None:
        """Give the channel of its plan to a bucket that has found none."""
        group = find_group(job.operation.group)
        if group.size == 1 and group.rank is not None:
            job.start_on(None, 1, 0.0, 0)
            return
        if job.bucket:
            raise RoundEnded(f"{job.description}: the round is over, or a new one has begun in the middle of the step")
        is_new = plan_channels.find(job.plan) is None
        channel = plan_channels.open(job.plan, group)
        if is_new:
            self._count(job.plan, group)
        backend_channel = channel.backend_channel
        assert isinstance(backend_channel, NativeChannel)
        algorithm = ALGORITHMS.index(current_world().settings.algorithm)
        job.start_on(backend_channel.handle, group.size, group.operation_timeout_s, algorithm)

    def _count(self, plan: str, group: Group) -> None:
        """Let the metrics of this round count the buckets of a plan, from now on."""
        before = self._library.get_counts(plan)

        def counts() -> Counts:
            calls, num_bytes, wait_ns, move_ns = self._library.get_counts(plan)
            return calls - before[0], num_bytes - before[1], wait_ns - before[2], move_ns - before[3]

        current_world().recorder.add_counts(group.id, "bucket", counts)


def _start_job(job: KernelJob) -> Work:
    inputs, splits = job.inputs, None
    if job.operation.kind == "alltoall":
        memory = job.inputs[1]
        splits = array_at(memory.address, memory.size, np.dtype(np.int64)).copy() if memory.size else None
        inputs = job.inputs[:1]
    return start_by_name(job.operation, inputs, job.outputs or None, splits)


def _results_of(job: KernelJob, result: Any) -> list[Any]:
    """The arrays of the outputs that the kernel has not allocated."""
    if job.operation.kind in ("allgather", "reduce_scatter"):
        return [result]
    if job.operation.kind == "alltoall":
        rows, received = result
        return [rows, np.asarray(received, np.int64)]
    return []


def _join(job: KernelJob) -> None:
    last = find_group(job.operation.group).join()
    job.finish([np.array(last, np.int32)])
    job.free()


def _fail_with_reason(job: KernelJob) -> None:
    error = _explain_failure(job)
    channel = plan_channels.find_last(job.plan)
    if channel is not None:
        channel.record_failure(job.description, error)
    raise error


def _await_start(job: KernelJob, work: Work) -> None:
    """Wait for an operation until its time is over, and let the kernel fail then. The operation keeps the memory."""
    try:
        work.wait_until(Deadline(work.timeout_s, elapsed_s=max(0.0, work.timeout_s - LAST_S)))
    except OperationTimeout as error:
        if not work.is_started_or_done():
            job.fail(describe_error(error), UNKNOWN)
    except Exception:  # _on_over() sees the same error
        return


def _fail(job: KernelJob, error: Exception) -> None:
    code = UNKNOWN
    if isinstance(error, Mismatch):
        code = FAILED_PRECONDITION
    elif isinstance(error, ValueError | TypeError):
        code = INVALID_ARGUMENT
    job.fail(describe_error(error), code)
    job.free()


def _run_in_thread(job: KernelJob, function: Callable[[], None]) -> None:
    def run() -> None:
        try:
            function()
        except Exception as error:  # of any kind: the kernel must end
            _fail(job, error)

    start_thread(threading.Thread(target=run, name="ronde-tensorflow-wait", daemon=True))


_thread: OperationThread | None = None
_thread_lock = threading.Lock()


def get_ops() -> Any:
    """The functions that add the native operations to a graph; None if operations have to run through Python. Starts
    the thread that serves them."""
    global _thread
    library = load_op_library()
    if library is None:
        return None
    with _thread_lock:
        if _thread is None:
            _thread = OperationThread(library)
    return library.ops
