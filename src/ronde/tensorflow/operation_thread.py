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
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from ronde.tensorflow.op_library import (
    AT_ONCE,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    OPEN_PLAN,
    OUT_OF_TURN,
    RUN_OPERATION,
    UNKNOWN,
    GraphOperation,
    KernelJob,
    OpLibrary,
    hash_members,
    load_op_library,
)
from ronde.text import format_ranks
from ronde.training.carried_errors import describe_error
from ronde.types import Deadline

TAKE_S = 5.0
"""How long the thread waits for a job before it looks at deadlines again."""
LAST_S = 1.0
"""So long before its deadline, an operation that has not started gets a thread that waits for it, so that its error can
name the missing ranks."""
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


def find_group(id: int, members: int = 0) -> Group:
    """The group with this number in the current round. `members` is the hash of the ranks that it must have; 0 if they
    are not known, or may change."""
    world = current_world("an operation of a TensorFlow graph")
    for group in world.groups:
        if group.id == id and members in (0, hash_members(group.ranks)):
            return group
        if group.id == id:
            raise ValueError(
                f"a TensorFlow graph uses group {id} of an earlier round; in this one, group {id} has other members "
                f"({format_ranks(group.ranks)}); build the graph again, with a group of this round"
            )
    raise ValueError(f"a TensorFlow graph uses group {id}, which this round does not have; build the graph again")


def check_group(group: Group) -> None:
    """ValueError if the group is not one of this round: graphs know groups by their numbers."""
    find_group(group.id, hash_members(group.ranks))


def group_of(operation: GraphOperation) -> Group:
    """The group of an operation in a graph, if the current round has it."""
    return find_group(operation.group, operation.members)


def read_number(operation: GraphOperation) -> int:
    """What RondeNumber returns: a rank or a size."""
    group = group_of(operation)
    return NUMBERS[operation.kind](current_world(), group)


def start_by_name(operation: GraphOperation, inputs: Any, outputs: Any = None, splits: Any = None) -> Work:
    """Start an operation of a graph. `inputs` are arrays or memory, and `outputs` are as they are."""
    group, kind, name = group_of(operation), operation.kind, operation.name
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


def refuse_twice_at_once(operation: GraphOperation) -> Mismatch:
    """The error for an operation that begins while another one of its name is under way in this process. Which of the
    two another rank means cannot be known, so no rank can run an operation of this name any more in this round."""
    group = group_of(operation)
    why = (
        f"{operation.kind} {operation.name!r} of group {group.id}: rank {current_world().rank} runs it twice at once, "
        "so which of the two the other ranks have to meet is not known; give the two different names (name=), or run "
        "them one after the other, in one thread"
    )
    group.refuse_operation(operation.name, why)
    return Mismatch(why)


class NamesInPython:
    """The names of operations that nodes in Python run at this moment. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[tuple[int, str]] = set()

    @contextmanager
    def hold(self, operations: Sequence[GraphOperation]) -> Iterator[None]:
        """Take the names meanwhile. Mismatch if one of them is taken."""
        keys = [(operation.group, operation.name) for operation in operations]
        with self._lock:
            taken = [each for each, key in zip(operations, keys, strict=True) if key in self._names]
            if not taken:
                self._names.update(keys)
        if taken:
            raise refuse_twice_at_once(taken[0])
        try:
            yield
        finally:
            with self._lock:
                self._names.difference_update(keys)


names_in_python = NamesInPython()


# --- channels of plans -----------------------------------------------------------------------------------------------


class PlanChannels:
    """The channels on which buckets of gradients are reduced, one per plan and round. Safe from any thread."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[World, Channel]] = {}
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._held: set[str] = set()

    @contextmanager
    def hold(self, plan: str, group: Group) -> Iterator[Channel]:
        """The channel of a plan, for a step whose buckets are reduced in Python. Mismatch if another one holds it."""
        channel = self.open(plan, group)
        with self._lock:
            is_held = plan in self._held
            self._held.add(plan)
        if is_held:
            raise refuse_steps_at_once(group, channel, plan)
        try:
            yield channel
        finally:
            with self._lock:
                self._held.discard(plan)

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
                channel = group.open_plan_channel(0, _channel_name(plan), overlapped=True, number=1)
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
    return RondeError(
        f"{description}: {why}; look for the error that ended that step, and end the job or begin a new round after it"
    )


def refuse_steps_at_once(group: Group, channel: Channel, plan: str) -> Mismatch:
    """The error for a step that begins while another one of its plan is under way in this process. Buckets are matched
    by their order, so all members lose this rank on the channel."""
    name = plan.partition(".")[2]
    why = (
        f"rank {channel.members[group.rank or 0]} reduces {name!r} twice at once, so which of the two the other ranks "
        "have to meet is not known; give the two different names (name=), or run them one after the other, in one "
        "thread"
    )
    group.abort_plan_channel(channel, why)
    return Mismatch(why)


def _explain_failure(job: KernelJob) -> Exception:
    """The error of a bucket whose call has failed or was refused."""
    channel, failure = plan_channels.find_last(job.plan), job.failure
    if channel is None:
        return RoundEnded(f"{job.description}: the round is over")
    if failure.refusal == AT_ONCE:
        return refuse_steps_at_once(group_of(job.operation), channel, job.plan)
    if failure.refusal == OUT_OF_TURN:
        return abandoned_error(group_of(job.operation), channel, job.description)
    if failure.status == NativeStatus.MISMATCH and failure.descriptions:
        return mismatch_error({r: text for r, text in zip(channel.members, failure.descriptions, strict=True) if text})
    backend_channel = channel.backend_channel
    assert isinstance(backend_channel, NativeChannel)
    elapsed_s = (time.monotonic_ns() - failure.submitted_ns) / 1e9 if failure.submitted_ns else 0.0
    timeout_s = group_of(job.operation).operation_timeout_s
    error = NativeError(failure.status, failure.member, failure.detail, has_ended=True)
    return backend_channel.make_error(job.description, error, Deadline(timeout_s, elapsed_s=elapsed_s))


# --- the thread ------------------------------------------------------------------------------------------------------


class _NamedJob:
    """A job of an operation with a name: it runs, or waits until the one before it is over."""

    __slots__ = ("expires_at", "is_waiting", "job", "timeout_s", "work")

    def __init__(self, job: KernelJob) -> None:
        self.job = job
        self.work: Work | None = None
        """None until it has started."""
        self.is_waiting = False
        """Whether it waits for the one before it."""
        self.timeout_s = group_of(job.operation).operation_timeout_s
        self.expires_at = time.monotonic() + self.timeout_s
        """Until when it has to start."""


class OperationThread:
    """Takes the jobs of kernels, and sees to it that each of them ends."""

    def __init__(self, library: OpLibrary) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._turns = threading.Condition(self._lock)
        """Notified when a job does not wait any more for the one before it."""
        self._in_flight: dict[tuple[int, str], deque[_NamedJob]] = {}
        """By group and name, what is under way: the first one runs. There are others only if the kernel of the first
        has failed because its time was over: its operation still waits for other ranks, and what is tried again
        comes after it."""
        self._not_over: OrderedDict[int, _NamedJob] = OrderedDict()
        """By identity, the jobs whose operations are not over, or wait for one that is not; the one that expires first
        is in front. Those that _await_start() has taken over are not in it."""
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
            elif job.failure.refusal == OUT_OF_TURN and not job.bucket and plan_channels.find(job.plan) is None:
                # A step of an earlier round has not started all of its buckets. This is the first one of this round.
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
        key, named_job = (job.operation.group, job.operation.name), _NamedJob(job)
        with self._lock:
            under_way = self._in_flight.setdefault(key, deque())
            others = [each.job for each in under_way if not each.job.has_ended]
            if not others:
                under_way.append(named_job)
                self._not_over[id(named_job)] = named_job
                named_job.is_waiting = under_way[0] is not named_job
        if others:
            error = refuse_twice_at_once(job.operation)
            for other in others:  # it keeps its memory until its operation is over
                other.fail(describe_error(error), FAILED_PRECONDITION)
            raise error
        if not named_job.is_waiting:
            self._start(key, named_job)

    def _start(self, key: tuple[int, str], named_job: _NamedJob) -> None:
        """Start an operation whose name is free, or the next one of that name if it cannot be started."""
        next_job: _NamedJob | None = named_job
        while next_job is not None:
            try:
                work = next_job.work = _start_job(next_job.job)
            except Exception as error:  # of any kind: the kernel must end
                after = self._take_next(key, next_job)
                _fail(next_job.job, error)
                next_job = after
                continue
            call_when_over((work,), functools.partial(self._on_over, key, next_job, work))
            return

    def _on_over(self, key: tuple[int, str], named_job: _NamedJob, work: Work) -> None:
        """An operation has ended. Called by the thread of callbacks."""
        job = named_job.job
        # Before the kernel ends: the next turn of a loop may come at once, and its name has to be free.
        next_job = self._take_next(key, named_job)
        try:
            job.finish(_results_of(job, work.wait()))
            job.free()
        except Exception as error:  # of any kind: the kernel must end
            _fail(job, error)
        if next_job is not None:
            self._start(key, next_job)

    def _take_next(self, key: tuple[int, str], ended: _NamedJob) -> _NamedJob | None:
        """The first job of a name is over. Returns the one after it, if there is one."""
        with self._lock:
            self._not_over.pop(id(ended), None)
            under_way = self._in_flight[key]
            under_way.popleft()
            if under_way:
                next_job = under_way[0]
                next_job.is_waiting = False
                next_job.expires_at = time.monotonic() + next_job.timeout_s
                self._not_over.pop(id(next_job), None)
                self._not_over[id(next_job)] = next_job
                self._turns.notify_all()
                return next_job
            del self._in_flight[key]
            return None

    def _end_expired(self) -> float:
        """See to operations that have not started in time. Returns how long to wait for the next job."""
        while True:
            with self._lock:
                first = next(iter(self._not_over.values()), None)
                if first is None:
                    return TAKE_S
                remaining_s = first.expires_at - LAST_S - time.monotonic()
                if remaining_s > 0.0:
                    return min(TAKE_S, remaining_s)
                del self._not_over[id(first)]
            if first.work is None or not first.work.is_started_or_done():
                _run_in_thread(first.job, functools.partial(self._await_start, first))

    def _await_start(self, named_job: _NamedJob) -> None:
        """Wait for an operation until its time is over, and let the kernel fail then."""
        job, work = named_job.job, named_job.work
        elapsed_s = time.monotonic() - (named_job.expires_at - named_job.timeout_s)
        deadline = Deadline(named_job.timeout_s, elapsed_s=elapsed_s)
        if work is None:
            with self._turns:
                self._turns.wait_for(lambda: not named_job.is_waiting, deadline.remaining_s)
                if named_job.is_waiting:
                    self._in_flight[(job.operation.group, job.operation.name)].remove(named_job)
            if named_job.is_waiting:
                raise OperationTimeout(
                    f"{job.operation.kind} {job.operation.name!r} of group {job.operation.group} did not start within "
                    f"{named_job.timeout_s:g} s: the one before it, which has timed out, still waits for other ranks"
                )
            return  # the one before has ended: it starts, and its own time begins
        try:
            work.wait_until(deadline)
        except OperationTimeout as error:
            if not work.is_started_or_done():  # the operation keeps the memory
                job.fail(describe_error(error), UNKNOWN)
        except Exception:  # _on_over() sees the same error
            return

    def _start_bucket(self, job: KernelJob) -> None:
        """Give the channel of its plan to a bucket that has found none."""
        group = group_of(job.operation)
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
    last = group_of(job.operation).join()
    job.finish([np.array(last, np.int32)])
    job.free()


def _fail_with_reason(job: KernelJob) -> None:
    error = _explain_failure(job)
    channel = plan_channels.find_last(job.plan)
    if channel is not None:
        channel.record_failure(job.description, error)
    raise error


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
