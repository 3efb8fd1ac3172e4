"""Runs what the kernels of graphs ask for: operations by their names, the channels of gradient plans, and the errors of
failed calls.

The thread is that of ronde.training.graph_operations, "ronde-tensorflow". What has to wait for other ranks before it
can start (opening the channel of a plan, join) gets a thread of its own, "ronde-tensorflow-wait", so that ranks may
come to such things in different orders.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ronde.comm.backends.native import NativeChannel
from ronde.comm.backends.native_library import ALGORITHMS, NativeError, NativeStatus
from ronde.comm.call import hash_signature, mismatch_error
from ronde.comm.channel import Channel
from ronde.comm.group import Group
from ronde.comm.world import World, current_world
from ronde.errors import Mismatch, RondeError, RoundEnded
from ronde.observe.metrics import Counts
from ronde.tensorflow.op_library import (
    AT_ONCE,
    OPEN_PLAN,
    OUT_OF_TURN,
    RUN_OPERATION,
    KernelJob,
    OpLibrary,
    load_op_library,
)
from ronde.training.graph_operations import OperationJob, OperationThread, group_of
from ronde.types import Deadline

MAX_CHANNEL_NAME = 60

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


class GraphThread(OperationThread):
    """Takes the jobs of kernels, and sees to it that each of them ends."""

    def __init__(self, library: OpLibrary) -> None:
        self._library = library
        super().__init__(library, "ronde-tensorflow")

    def run_job(self, job: OperationJob) -> None:
        assert isinstance(job, KernelJob)
        # A step of an earlier round may not have started all of its buckets. Then this is the first one of this round.
        is_first = job.failure.refusal == OUT_OF_TURN and not job.bucket and plan_channels.find(job.plan) is None
        if job.kind == OPEN_PLAN or is_first:
            self.run_in_thread(job, functools.partial(self._start_bucket, job))
        elif job.kind != RUN_OPERATION:
            # The reason of a loss may come a moment later than the loss.
            self.run_in_thread(job, functools.partial(_fail_with_reason, job))
        else:
            super().run_job(job)

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


def _fail_with_reason(job: KernelJob) -> None:
    error = _explain_failure(job)
    channel = plan_channels.find_last(job.plan)
    if channel is not None:
        channel.record_failure(job.description, error)
    raise error


_thread: GraphThread | None = None
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
            _thread = GraphThread(library)
    return library.ops
