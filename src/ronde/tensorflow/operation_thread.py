"""Runs what the kernels of graphs ask for: operations by their names, the channels of their plans for buckets of
gradients, and the errors of failed calls.

The thread is that of ronde.training.graph_operations, "ronde-tensorflow". What has to wait for other ranks before it
can start (opening the channel of a plan, join) gets a thread of its own, "ronde-tensorflow-wait", so that ranks may
come to such things in different orders.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

from ronde.comm.backends.native import NativeChannel
from ronde.comm.backends.native_library import ALGORITHMS, NativeError, NativeStatus
from ronde.comm.call import mismatch_error
from ronde.comm.group import Group
from ronde.comm.world import current_world
from ronde.errors import RoundEnded
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
from ronde.tensorflow.plan_channels import abandoned_error, plan_channels, refuse_steps_at_once
from ronde.training.graph_operations import OperationJob, OperationThread, group_of
from ronde.types import Deadline


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
