"""A test of the kernels, run in a process of its own before ranks use them: do kernels that end later, in another
thread, work with this TensorFlow? Where they do not, the process crashes or hangs. op_library.py starts it."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import tensorflow as tf

from ronde.comm.buffers import as_array
from ronde.tensorflow.op_library import OPEN_PLAN, KernelJob, OpLibrary
from ronde.training.graph_operations import UNKNOWN, GraphOperation

NUM_OPERATIONS = 50
DELAY_S = 0.001
"""Long enough that the kernel's caller has returned, and its stack is used for other things."""


def main() -> None:
    """Raises, or crashes, if the kernels do not work."""
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_inter_op_parallelism_threads(1)
    library = OpLibrary()
    thread = threading.Thread(target=_end_jobs, args=(library,), name="ronde-self-test", daemon=True)
    thread.start()
    _check_operations(library)
    _check_buckets(library)
    _check_error(library)
    library.stop()
    thread.join()
    sys.stdout.write("passed\n")


def _end_jobs(library: OpLibrary) -> None:
    try:
        while True:
            job = library.take_job(1.0)
            if job is not None:
                time.sleep(DELAY_S)
                _end(job)
    except EOFError:
        return


def _end(job: KernelJob) -> None:
    if job.kind == OPEN_PLAN:
        job.start_on(None, 1, 1.0, 0)
        return
    if job.operation.name == "fails":
        job.fail("it was meant to fail", UNKNOWN)
    elif job.operation.kind == "allgather":
        job.finish([np.concatenate([as_array(job.inputs[0])] * 2)])
    else:
        for source, target in zip(job.inputs, job.outputs, strict=True):
            as_array(target)[...] = as_array(source)
        job.finish()
    job.free()


def _check_operations(library: OpLibrary) -> None:
    def compute(x: Any) -> Any:
        operation = GraphOperation("allreduce", "self-test").encode()
        ys = [library.ops.ronde_allreduce(inputs=[x * float(i)], operation=operation)[0] for i in range(NUM_OPERATIONS)]
        for _ in range(3):  # one after the other
            ys[0] = library.ops.ronde_allreduce(inputs=[ys[0] + 1.0], operation=operation)[0]
        gathered = library.ops.ronde_allgather(input=ys[1], operation=GraphOperation("allgather").encode())
        return tf.add_n(ys), gathered

    function = tf.function(compute)
    for _ in range(5):
        total, gathered = function(tf.ones([1000]))
        expected = NUM_OPERATIONS * (NUM_OPERATIONS - 1) / 2 + 3.0
        if not np.array_equal(total.numpy(), np.full(1000, expected, np.float32)):
            raise ValueError(f"wrong numbers: {total}")
        if not np.array_equal(gathered.numpy(), np.ones(2000, np.float32)):
            raise ValueError(f"wrong rows: {gathered}")


def _check_buckets(library: OpLibrary) -> None:
    options = dict(operation=GraphOperation("bucket").encode(), plan="p", signature=0, description="", scales="2.0 0.5")

    def compute(x: Any) -> Any:
        parts = []
        for bucket in range(2):
            started = library.ops.ronde_start_bucket(
                inputs=[x, x + 1.0], bucket=bucket, num_buckets=2, count=2000, op=0, **options
            )
            parts += library.ops.ronde_finish_bucket(inputs=started.outputs, run=started.run)
        return tf.add_n(parts)

    total = tf.function(compute)(tf.ones([1000]))
    if not np.array_equal(total.numpy(), np.full(1000, 6.0, np.float32)):
        raise ValueError(f"wrong numbers in buckets: {total}")


def _check_error(library: OpLibrary) -> None:
    operation = GraphOperation("allreduce", "fails").encode()
    function = tf.function(lambda x: library.ops.ronde_allreduce(inputs=[x], operation=operation)[0])
    try:
        function(tf.ones([3]))
    except tf.errors.UnknownError as error:
        if "meant to fail" not in str(error):
            raise
        return
    raise ValueError("a kernel that failed has not raised an error")


if __name__ == "__main__":
    main()
