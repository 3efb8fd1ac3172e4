"""Operations that the kernels of a framework ask for, in a graph that the framework has compiled: one of TensorFlow,
or a program of JAX. ronde.tensorflow and ronde.jax share what is here: how such an operation is described, and the
thread that runs it by its name.

One thread takes the jobs of kernels and starts their operations without waiting for them. It lives from the first use
until the process ends, and touches only what is in this module. Kernels are finished by the thread that runs callbacks
of works. What has to wait for other ranks before it can start gets a thread of its own, so that ranks may come to such
things in different orders.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
import numpy as np

from ronde.comm.buffers import as_array
from ronde.comm.call import Memory, hash_signature
from ronde.comm.group import Group
from ronde.comm.operations import AllgatherWork
from ronde.comm.work import Work, call_when_over
from ronde.comm.world import World, current_world
from ronde.errors import Mismatch, OperationTimeout
from ronde.net.event_loop import start_thread
from ronde.text import format_ranks
from ronde.training.graph_errors import describe_error
from ronde.types import Deadline

UNKNOWN, INVALID_ARGUMENT, FAILED_PRECONDITION = 2, 3, 9
"""Codes of errors, which TensorFlow and XLA have in common. An operation that failed for a reason outside of the
program is UNKNOWN, and not ABORTED, after which a MonitoredSession would begin again and again. A mistake of the caller
is INVALID_ARGUMENT; when ranks disagree, it is FAILED_PRECONDITION."""

TAKE_S = 5.0
"""How long the thread waits for a job before it looks at deadlines again."""
LAST_S = 1.0
"""So long before its deadline, an operation that has not started gets a thread that waits for it, so that its error can
name the missing ranks."""
STOP_S = 5.0


def hash_members(ranks: Sequence[int]) -> int:
    """A hash of a group's ranks. Never 0, which stands for any."""
    return hash_signature(repr(tuple(ranks))) or 1


class GraphOperation(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node of a graph asks for: its attribute `operation`, as JSON."""

    kind: str
    name: str = ""
    group: int = 0
    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    equal_rows: bool = False
    """Whether members have to give equally many rows, because the shape of the result is fixed."""
    has_flag: bool = False
    """Whether the last operand is no part of it, but a flag that a function of Python sets when it is over."""
    is_planned: bool = False
    """Whether it is repeated in every step, so that it is worth a channel and memory of its own."""
    members: int = 0
    """A hash of the group's ranks, by which a group of an earlier round is told from one that has its number now; 0 of
    the world, whose ranks may change from round to round."""

    def __post_init__(self) -> None:
        if self.group and not self.members:
            ranks = [
                group.ranks
                for group in current_world("an operation of a compiled graph").groups
                if group.id == self.group
            ]
            msgspec.structs.force_setattr(self, "members", hash_members(ranks[0]) if ranks else 0)

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


AGAIN = "build the graph again (with JAX, jax.clear_caches() does so)"

NUMBERS: dict[str, Callable[[World, Group], int]] = {
    "rank": lambda world, group: world.rank,
    "size": lambda world, group: group.size,
    "local_rank": lambda world, group: world.local_rank,
    "local_size": lambda world, group: world.topology.local_size,
    "group_rank": lambda world, group: -1 if group.rank is None else group.rank,
}
"""What an operation can ask for that needs no other rank."""


def find_group(id: int, members: int = 0) -> Group:
    """The group with this number in the current round. `members` is the hash of the ranks that it must have; 0 if they
    are not known, or may change."""
    world = current_world("an operation of a compiled graph")
    for group in world.groups:
        if group.id == id and members in (0, hash_members(group.ranks)):
            return group
        if group.id == id:
            raise ValueError(
                f"a compiled graph uses group {id} of an earlier round; in this one, group {id} has other members "
                f"({format_ranks(group.ranks)}); {AGAIN}, with a group of this round"
            )
    raise ValueError(f"a compiled graph uses group {id}, which this round does not have; {AGAIN}")


def check_group(group: Group) -> None:
    """ValueError if the group is not one of this round: graphs know groups by their numbers."""
    find_group(group.id, hash_members(group.ranks))


def group_of(operation: GraphOperation) -> Group:
    """The group of an operation in a graph, if the current round has it."""
    return find_group(operation.group, operation.members)


def read_number(operation: GraphOperation) -> int:
    """A rank or a size, for an operation that asks for it."""
    group = group_of(operation)
    return NUMBERS[operation.kind](current_world(), group)


def start_by_name(operation: GraphOperation, inputs: Any, outputs: Any = None, splits: Any = None) -> Work:
    """Start an operation of a graph. `inputs` are arrays or memory, and `outputs` are as they are; the two may be the
    same memory."""
    group, kind, name = group_of(operation), operation.kind, operation.name
    scales: dict[str, Any] = {"prescale": operation.prescale, "postscale": operation.postscale}
    work: Work
    if kind == "allreduce":
        out = None if outputs is None else list(outputs)
        work = group.allreduce(list(inputs), op=operation.op, out=out, name=name, wait=False, **scales)
    elif kind == "broadcast":
        out = None if outputs is None else outputs[0]
        work = group.broadcast(inputs[0], root=operation.root, out=out, name=name, wait=False)
    elif kind == "reduce":
        work = group.reduce(inputs[0], root=operation.root, op=operation.op, out=outputs[0], name=name, wait=False)
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


# --- the thread ------------------------------------------------------------------------------------------------------


class OperationJob(Protocol):
    """One execution of a kernel that waits for Python. It ends once, well or with an error; free() comes last, when
    nothing uses the memory of its tensors any more. Safe from any thread."""

    operation: GraphOperation
    inputs: tuple[Memory, ...]
    outputs: tuple[Memory, ...]
    """What the kernel has allocated."""
    has_ended: bool
    """Whether the kernel has ended, well or with an error."""

    def finish(self, results: Sequence[Any] = ()) -> None:
        """End the kernel well. `results` are the arrays of those outputs that start_by_name() has not written."""

    def fail(self, text: str, code: int) -> None:
        """End the kernel with an error, unless it has ended. Its memory stays until free()."""

    def free(self) -> None:
        """Nothing uses the memory any more."""


class JobHandle:
    """The handle of a job in a library of kernels. It is freed when nobody uses it any more. Safe from any thread."""

    def __init__(self, handle: int, free: Callable[[int], object]) -> None:
        self._lock = threading.Lock()
        self._handle: int | None = handle
        """None when the job is freed."""
        self._free = free
        self._is_free = False
        self._num_users = 0
        """Threads that use the handle: the last of them frees it, after free()."""

    def free(self) -> None:
        with self.use(), self._lock:
            self._is_free = True

    def take(self) -> int | None:
        """The handle, for a function of the library that frees the job by itself."""
        with self._lock:
            handle, self._handle = self._handle, None
        return handle

    @contextmanager
    def use(self) -> Iterator[int | None]:
        """The handle, which is valid meanwhile; None after free()."""
        with self._lock:
            handle = None if self._is_free else self._handle
            self._num_users += 1
        try:
            yield handle
        finally:
            with self._lock:
                self._num_users -= 1
                freed = None
                if self._is_free and not self._num_users:
                    freed, self._handle = self._handle, None
            if freed is not None:
                self._free(freed)


class JobSource(Protocol):
    """A library of kernels."""

    def take_job(self, timeout_s: float) -> OperationJob | None:
        """Wait for the next job of a kernel; None when the time is over. EOFError after stop(). For one thread."""

    def stop(self) -> None:
        """End all kernels that wait for their job to be taken, and all later ones, with an error."""


class _NamedJob:
    """A job of an operation with a name: it runs, or waits until the one before it is over."""

    __slots__ = ("expires_at", "is_waiting", "job", "timeout_s", "work")

    def __init__(self, job: OperationJob) -> None:
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

    def __init__(self, jobs: JobSource, name: str) -> None:
        self._jobs = jobs
        self._name = name
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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread)
        atexit.register(self.stop)

    def stop(self) -> None:
        self._jobs.stop()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            while True:
                job = self._jobs.take_job(self._end_expired())
                if job is not None:
                    self._handle(job)
        except EOFError:
            return

    def _handle(self, job: OperationJob) -> None:
        try:
            self.run_job(job)
        except Exception as error:  # of any kind: the kernel must end
            fail_job(job, error)

    def run_job(self, job: OperationJob) -> None:
        """Run the operation of a job, or start it. A subclass may know other jobs."""
        if job.operation.kind == "join":
            self.run_in_thread(job, functools.partial(_join, job))
        elif job.operation.kind in NUMBERS:
            job.finish([np.array(read_number(job.operation), np.int32)])
            job.free()
        else:
            self.start_or_queue(job)

    def run_in_thread(self, job: OperationJob, function: Callable[[], None]) -> None:
        """Call a function that may have to wait for other ranks. The job fails with what it raises."""

        def run() -> None:
            try:
                function()
            except Exception as error:  # of any kind: the kernel must end
                fail_job(job, error)

        start_thread(threading.Thread(target=run, name=f"{self._name}-wait", daemon=True))

    def start_or_queue(self, job: OperationJob) -> None:
        """Start the operation of a job, behind one of its name that has timed out."""
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
                work = next_job.work = self.start_job(next_job.job)
            except Exception as error:  # of any kind: the kernel must end
                after = self._take_next(key, next_job)
                fail_job(next_job.job, error)
                next_job = after
                continue
            call_when_over((work,), functools.partial(self._on_over, key, next_job, work))
            return

    def start_job(self, job: OperationJob) -> Work:
        """Start the operation of a job. A subclass may do so in other ways."""
        return _start_job(job)

    def _on_over(self, key: tuple[int, str], named_job: _NamedJob, work: Work) -> None:
        """An operation has ended. Called by the thread of callbacks."""
        job = named_job.job
        # Before the kernel ends: the next turn of a loop may come at once, and its name has to be free.
        next_job = self._take_next(key, named_job)
        try:
            job.finish(_results_of(job, work))
            job.free()
        except Exception as error:  # of any kind: the kernel must end
            fail_job(job, error)
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
                self.run_in_thread(first.job, functools.partial(self._await_start, first))

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


def _start_job(job: OperationJob) -> Work:
    inputs, splits = job.inputs, None
    if job.operation.kind == "alltoall" and len(inputs) > 1:
        splits = as_array(dataclasses.replace(inputs[1], dtype="int64")).copy() if inputs[1].size else None
        inputs = inputs[:1]
    return start_by_name(job.operation, inputs, job.outputs or None, splits)


def _results_of(job: OperationJob, work: Work) -> list[Any]:
    """The arrays of the outputs that start_by_name() has not written. The work is over."""
    operation, result = job.operation, work.wait()
    if operation.kind == "reduce" and current_world().rank != operation.root:
        for memory in job.outputs:  # not before: they may be the operands
            as_array(memory)[...] = 0
    if operation.kind not in ("allgather", "reduce_scatter", "alltoall"):
        return []
    if operation.kind == "alltoall":
        rows, received = result
        check_equal_rows(operation, received)
        return [rows, np.asarray(received, np.int64)]
    if isinstance(work, AllgatherWork):
        check_equal_rows(operation, work.counts)
    return [result]


def check_equal_rows(operation: GraphOperation, counts: Sequence[int]) -> None:
    """ValueError if members have given different numbers of rows where the shape of the result is fixed."""
    if operation.equal_rows and len(set(counts)) > 1:
        given = ", ".join(
            f"{count} by rank {rank}" for count, rank in zip(counts, group_of(operation).ranks, strict=True)
        )
        raise ValueError(
            f"{operation.kind} {operation.name!r}: in a compiled program all members give equally many rows, and these "
            f"were given: {given}; fill them up, or call it outside of the program"
        )


def _join(job: OperationJob) -> None:
    last = group_of(job.operation).join()
    job.finish([np.array(last, np.int32)])
    job.free()


def fail_job(job: OperationJob, error: Exception) -> None:
    """Let the kernel end with an error. Nothing may use its memory any more."""
    code = UNKNOWN
    if isinstance(error, Mismatch):
        code = FAILED_PRECONDITION
    elif isinstance(error, ValueError | TypeError):
        code = INVALID_ARGUMENT
    job.fail(describe_error(error), code)
    job.free()
