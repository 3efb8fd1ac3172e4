"""A test of operations in MXNet's engine, run in a process of its own before ranks use them: does the engine call them
when their arrays are ready, keep the arrays meanwhile, and take results and errors from another thread? Where it does
not, the process crashes or hangs. training/native_self_test.py starts it."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import mxnet as mx
import numpy as np

from ronde.comm.buffers import array_at
from ronde.mxnet.engine_library import SKIPPED, EngineLibrary
from ronde.types import Deadline

NUM_OPERATIONS = 50
COUNT = 1000
DELAY_S = 0.001
"""Long enough that the engine's caller has returned, and its stack is used for other things."""
SKIPPED_S = 30.0
FAILS = 1_000_000
"""Operations from this number on fail."""


def main() -> None:
    """Raises, or crashes, if operations in the engine do not work."""
    library = EngineLibrary()
    skipped: list[int] = []
    thread = threading.Thread(target=_end_jobs, args=(library, skipped), name="ronde-self-test", daemon=True)
    thread.start()
    if library.keeps_errors():  # else nothing runs in the engine
        _check_chains(library)
        _check_views(library)
        _check_layout(library)
        _check_errors(library, skipped)
    mx.nd.waitall()
    library.stop()
    thread.join()
    sys.stdout.write("passed\n")


def _end_jobs(library: EngineLibrary, skipped: list[int]) -> None:
    """Add 1 to what each operation reads, or to what it writes."""
    try:
        while True:
            job = library.take_job(1.0)
            if job is None:
                continue
            if job.kind == SKIPPED or job.handle is None:
                skipped.append(job.number)
                continue
            time.sleep(DELAY_S)
            if job.number >= FAILS:
                library.fail(job.handle, "it was meant to fail")
                continue
            source, target = (array_at(at, COUNT, np.dtype(np.float32)) for at in (job.addresses[0], job.addresses[-1]))
            target[:] = source + np.float32(1.0)
            library.finish(job.handle)
    except EOFError:
        return


def _expect(found: Any, value: float, what: str) -> None:
    if not np.array_equal(found.asnumpy().reshape(-1), np.full(COUNT, value, np.float32)):
        raise ValueError(f"wrong numbers in {what}: {found}")


def _check_chains(library: EngineLibrary) -> None:
    """Operations wait for what they read, and are waited for; arrays that Python forgets stay until then."""
    x = mx.nd.zeros((COUNT,))
    for number in range(NUM_OPERATIONS):
        y = mx.nd.empty((COUNT,))
        library.push(number, [x * 2.0], [y], -number, "ronde_test")
        x = y - 1.0
        library.push(number, [], [x], 0, "ronde_test")
        x = x - 1.0
    _expect(x, 0.0, "a chain")


def _check_views(library: EngineLibrary) -> None:
    """Two views of one array in one operation, which must not wait for itself."""
    x = mx.nd.ones((2, COUNT))
    library.push(0, [x[0]], [x[1]], 0, "ronde_test")
    _expect(x[1], 2.0, "a view")
    library.push(0, [], [x[0], x[1]], 0, "ronde_test")
    _expect(x[1], 2.0, "two views")


def _check_layout(library: EngineLibrary) -> None:
    """An array in the layout of oneDNN is brought back, to be read and to be written."""
    x = mx.nd.ones((1, 8, 5, 25))
    for written in (False, True):
        y = mx.nd.Convolution(x, mx.nd.ones((8, 8, 1, 1)) / 8.0, kernel=(1, 1), num_filter=8, no_bias=True)
        result = y if written else mx.nd.empty((COUNT,))
        library.push(0, [] if written else [y], [result], 0, "ronde_test")
        _expect(result, 2.0, "an array of oneDNN")


def _check_errors(library: EngineLibrary, skipped: list[int]) -> None:
    """An error is raised where somebody waits, and what reads the array is skipped."""
    x = mx.nd.ones((COUNT,))
    y = mx.nd.ones((COUNT,))
    library.push(FAILS, [], [x], 0, "ronde_test")
    library.push(7, [x], [y], 0, "ronde_test")
    try:
        y.wait_to_read()
    except mx.MXNetError as error:
        if "meant to fail" not in str(error):
            raise
    else:
        raise ValueError("an operation that failed has not raised an error")
    deadline = Deadline(SKIPPED_S)
    while not skipped and not deadline.expired:  # the engine deletes an operation when those who wait may go on
        time.sleep(DELAY_S)
    if skipped != [7]:
        raise ValueError(f"operation 7 was not skipped, but {skipped}")


if __name__ == "__main__":
    main()
