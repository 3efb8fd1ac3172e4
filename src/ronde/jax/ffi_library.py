"""The library of XLA handlers (native/jax) through ctypes: loading it, testing it, and the jobs of its handlers. The
only module of this package that knows ctypes.

XLA checks the version of its interface when a handler is registered, so one that does not fit is an error and not a
crash. The self-test runs once per process, before the first operation: a small program whose handlers end later, well
and with an error.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import jax
import msgspec
import numpy as np

from ronde.comm.buffers import address_of, array_at, as_array
from ronde.comm.call import Memory
from ronde.comm.work import Work
from ronde.comm.world import add_operations_wait, current_world, is_initialized
from ronde.errors import RondeError, RoundEnded
from ronde.jax.gradient_plans import GradientPlan, copy_in, copy_out, gradient_plans, is_planned
from ronde.training.graph_operations import (
    UNKNOWN,
    GraphOperation,
    JobHandle,
    JobSource,
    OperationJob,
    OperationThread,
    refuse_twice_at_once,
)
from ronde.types import DType

LIBRARY = Path(__file__).with_name("libronde_jax.so")
START, FINISH = "ronde_start", "ronde_finish"
"""The names of the handlers in XLA: an operation is two parts of a program."""
NUMBER_BYTES = 8
"""Of the number of a job, which the first part passes on to the second."""
SELF_TEST_S = 60.0

logger = logging.getLogger("ronde.jax")


class OperationDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a program knows of an operation besides what all ranks have in common: the attribute `details`, as JSON."""

    result_shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes for which the program is compiled, of an operation that changes them."""
    flag: str = ""
    """By which OperationFlags knows the flag, if the operation has one."""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


class HandlerJobView(ctypes.Structure):
    """The library's JobView."""

    _fields_ = (
        ("job", c_void_p),
        ("operation", c_char_p),
        ("details", c_char_p),
        ("is_repeated", c_int32),
        ("is_in_bucket", c_int32),
        ("num_inputs", c_uint64),
        ("inputs", POINTER(c_void_p)),
        ("dtypes", POINTER(c_int32)),
        ("dims", POINTER(c_int64)),
    )


class HandlerJob:
    """One operation of a program that waits for Python: an OperationJob. It works in place on copies of operands."""

    def __init__(self, library: ctypes.CDLL, view: HandlerJobView) -> None:
        self.operation = msgspec.json.decode(view.operation, type=GraphOperation)
        memories, position = [], 0
        for index in range(view.num_inputs):
            num_dims = view.dims[position]
            shape = tuple(view.dims[position + 1 : position + 1 + num_dims])
            memories.append(Memory(view.inputs[index] or 0, shape, DType(view.dtypes[index]).name.lower()))
            position += 1 + num_dims
        self._flag = memories.pop() if self.operation.has_flag else None
        self.inputs = tuple(memories)
        self.outputs = self.inputs
        self.details = msgspec.json.decode(view.details, type=OperationDetails)
        self.is_repeated = bool(view.is_repeated)
        """Whether the program runs two operations of this name that do not need each other."""
        self.is_in_bucket = bool(view.is_in_bucket)
        """Whether the operands are in the bucket of a plan of this operation; in that of its plan, once it has
        started."""
        self.plan: GradientPlan | None = None
        """The plan, while its bucket is under way."""
        self.has_ended = False
        self._library = library
        self._handle = JobHandle(view.job, library.ronde_jax_free_job)

    def finish(self, results: Sequence[Any] = ()) -> None:
        """End the operation well. `results` are those that are not where the operands are."""
        check_shapes(self.operation, results, self.details.result_shapes)
        if self.plan is not None:
            if not self.is_in_bucket:
                copy_out(self.plan.plan.spare_arrays[0], [as_array(memory) for memory in self.inputs])
            gradient_plans.release(self.plan)
            self.plan = None
        with self._handle.use() as handle:
            if handle is None:
                return
            if results:
                # The second result of an alltoall has 32 bits, as whole numbers of JAX do.
                arrays = [results[0], *(each.astype(np.int32) for each in results[1:])]
                addresses = (c_void_p * len(arrays))()
                sizes = (c_uint64 * len(arrays))(*(each.nbytes for each in arrays))
                if not self._library.ronde_jax_allocate_results(handle, sizes, len(arrays), addresses):
                    raise MemoryError("there is no memory for the results of an operation")
                for array, address in zip(arrays, addresses, strict=True):
                    if array.size:
                        array_at(address, array.size, array.dtype)[:] = array.reshape(-1)
            if self._flag is not None:
                as_array(self._flag)[...] = flags.find(self.details.flag, self.operation.name)
            self.has_ended = True
            self._library.ronde_jax_end(handle, 0, None)

    def fail(self, text: str, code: int) -> None:
        """End the operation with an error, unless it has ended. Its memory stays until free()."""
        with self._handle.use() as handle:
            if handle is not None:
                self.has_ended = True
                self._library.ronde_jax_end(handle, code, text.encode(errors="replace"))

    def free(self) -> None:
        """Nothing uses the memory any more."""
        if self.plan is not None:  # it has failed
            gradient_plans.release(self.plan)
            self.plan = None
        self._handle.free()


def check_shapes(operation: GraphOperation, results: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """ValueError if results have other shapes than those for which a program is compiled."""
    for result, shape in zip(results, shapes, strict=False):
        if tuple(result.shape) != tuple(shape):
            raise ValueError(
                f"{operation.kind} {operation.name!r}: the result is {list(result.shape)}, and the program was "
                f"compiled for {list(shape)}; all members have to give equally many rows, and a program for another "
                "number of ranks has to be compiled again, after jax.clear_caches()"
            )


class OperationFlags:
    """What is called when an operation with a flag is over. It keeps no object alive. Safe from any thread."""

    def __init__(self) -> None:
        self._methods: dict[str, tuple[str, WeakMethod[Callable[[bool], bool]]]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, method: Callable[[bool], bool]) -> str:
        """Return by what the flag of an operation with this name is known. The method of an object is called whenever
        the operation is over, with whether it is repeated: a program has it once more, under another name, and in any
        order. It must not wait, and returns the flag. Objects may use one name in different programs."""
        with self._lock:
            for number in itertools.count():
                flag = f"{name}~{number}" if number else name
                found = self._methods[flag][1]() if flag in self._methods else None
                if found is None or found == method:
                    self._methods[flag] = (name, WeakMethod(method))
                    return flag
        raise AssertionError("count() has no end")

    def find(self, flag: str, operation_name: str) -> bool:
        """The value of a flag whose operation is over; False if its object is gone."""
        name, reference = self._methods[flag]
        method = reference()
        return method is not None and method(operation_name != name)


flags = OperationFlags()


class ProgramThread(OperationThread):
    """Takes the jobs of handlers, and sees to it that each of them ends."""

    def run_job(self, job: OperationJob) -> None:
        if isinstance(job, HandlerJob) and job.is_repeated:
            raise refuse_twice_at_once(job.operation)
        if is_planned(job.operation) and gradient_plans.find(job.operation, job.inputs) is None:
            self.run_in_thread(job, functools.partial(self._open_plan_and_start, job))
        else:
            super().run_job(job)

    def start_job(self, job: OperationJob) -> Work:
        assert isinstance(job, HandlerJob)
        if not is_planned(job.operation):
            return super().start_job(job)
        found = gradient_plans.find(job.operation, job.inputs)
        if found is None:
            raise RoundEnded(f"{job.operation.kind} {job.operation.name!r}: the round is over")
        gradient_plans.take(job.operation, found)
        # The handler may have used the bucket of another plan: one of the same operation on other shapes.
        is_in_bucket = job.is_in_bucket and job.inputs[0].address == address_of(found.plan.arrays[0])
        job.plan, job.is_in_bucket = found, is_in_bucket
        if not job.is_in_bucket:
            copy_in([as_array(memory) for memory in job.inputs], found.plan.spare_arrays[0])
        return found.plan.start(0, spare=not job.is_in_bucket)

    def _open_plan_and_start(self, job: OperationJob) -> None:
        gradient_plans.open(job.operation, job.inputs)
        self.start_or_queue(job)


class FfiLibrary(JobSource):
    """The loaded library. Its handlers are registered in XLA."""

    def __init__(self, path: Path = LIBRARY) -> None:
        if not path.exists():
            raise RondeError(f"{path} is missing; reinstall ronde, or run `make build` in a checkout")
        library = ctypes.CDLL(str(path))
        library.ronde_jax_take_job.argtypes = (POINTER(HandlerJobView), c_double)
        library.ronde_jax_end.argtypes = (c_void_p, c_int, c_char_p)
        library.ronde_jax_free_job.argtypes = (c_void_p,)
        library.ronde_jax_allocate_results.argtypes = (c_void_p, POINTER(c_uint64), c_uint64, POINTER(c_void_p))
        library.ronde_jax_set_bucket.argtypes = (c_char_p, c_void_p, c_uint64)
        library.ronde_jax_is_bucket_used.argtypes = (c_void_p,)
        self._library = library
        self._view = HandlerJobView()
        jax.ffi.register_ffi_target(START, jax.ffi.pycapsule(library.ronde_jax_start), platform="cpu")
        jax.ffi.register_ffi_target(FINISH, jax.ffi.pycapsule(library.ronde_jax_finish), platform="cpu")

    def take_job(self, timeout_s: float) -> HandlerJob | None:
        outcome = self._library.ronde_jax_take_job(ctypes.byref(self._view), timeout_s)
        if outcome < 0:
            raise EOFError
        if not outcome:
            return None
        try:
            return HandlerJob(self._library, self._view)
        except Exception as error:  # of any kind: the handler must end
            text = f"an operation of ronde cannot be read: {error!r}".encode()
            self._library.ronde_jax_end(self._view.job, UNKNOWN, text)
            self._library.ronde_jax_free_job(self._view.job)
            return None

    def set_bucket(self, operation: str, address: int, num_bytes: int) -> None:
        """Let operands be copied into the bucket of an operation, by its text; with address 0 no more."""
        self._library.ronde_jax_set_bucket(operation.encode(), address, num_bytes)

    def is_bucket_used(self, address: int) -> bool:
        """Whether an operation that is not over has its arrays in a bucket that was replaced by set_bucket()."""
        return bool(self._library.ronde_jax_is_bucket_used(address))

    def stop(self) -> None:
        self._library.ronde_jax_stop()


# --- whether the library can be used ---------------------------------------------------------------------------------


def run_self_test(library: FfiLibrary) -> None:
    """Let handlers end later, well and with an error. Raises RondeError if they do not work with this JAX."""

    def end_jobs() -> None:
        for _ in range(2):
            job = library.take_job(SELF_TEST_S)
            if job is None:
                return
            if job.operation.name == "fails":
                job.fail("it was meant to fail", UNKNOWN)
            else:
                as_array(job.inputs[0])[...] *= 2
                job.finish()
            job.free()

    def call(x: Any, name: str) -> Any:
        number = jax.ShapeDtypeStruct((NUMBER_BYTES,), np.uint8)
        text = GraphOperation("allreduce", name).encode()
        started = jax.ffi.ffi_call(START, number, has_side_effect=True)(x, operation=text, details="{}")
        return jax.ffi.ffi_call(FINISH, jax.ShapeDtypeStruct(x.shape, x.dtype), has_side_effect=True)(started)

    thread = threading.Thread(target=end_jobs, name="ronde-self-test", daemon=True)
    thread.start()
    device = jax.local_devices(backend="cpu")[0]
    numbers = np.arange(5, dtype=np.float32)
    try:
        with jax.default_device(device):
            doubled = np.asarray(jax.jit(lambda x: call(x, "self-test"))(numbers))
            if not np.array_equal(doubled, numbers * 2):
                raise RondeError(f"the self-test of the handlers gave {doubled}")
            try:
                jax.block_until_ready(jax.jit(lambda x: call(x, "fails"))(numbers))
            except jax.errors.JaxRuntimeError as error:
                if "meant to fail" not in str(error):
                    raise
            else:
                raise RondeError("a handler that failed has not raised an error")
    finally:
        thread.join(SELF_TEST_S)


class _FfiState:
    is_native: bool | None = None
    """None before that is known."""
    thread: OperationThread | None = None


_state = _FfiState()
_lock = threading.Lock()


def is_native() -> bool:
    """Whether operations in programs of this process run by native handlers. If not, they run through Python, and one
    line of warning has said so. Called when a program is traced; starts the thread "ronde-jax", which serves the
    handlers."""
    if _state.is_native is None:
        with _lock:
            if _state.is_native is None:
                _state.is_native = _load()
                add_operations_wait(finish_programs)
                atexit.register(_finish_programs_at_exit)  # comes before the thread stops and the round is left
    return _state.is_native


def finish_programs() -> None:
    """Wait for the programs with operations that JAX runs in the background: other ranks wait for theirs. Their own
    timeouts bound it."""
    try:
        jax.effects_barrier()
    except Exception as error:  # of any kind: JAX raises it again where the results are used, or when the process ends
        logger.debug("a program has failed: %s", error)


def _finish_programs_at_exit() -> None:
    has_failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not has_failed and is_initialized():
        finish_programs()


def _run_outside_of_traces(function: Callable[..., None], *args: Any) -> None:
    """Call a function in a thread of its own, because this one may be tracing a program."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            function(*args)
        except Exception as error:  # of any kind: raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="ronde-self-test", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _load() -> bool:
    world = current_world("an operation in a JAX program")
    ops = world.settings.jax_ops
    problem = "the setting jax_ops says so" if ops == "python" else ""
    if not problem:
        try:
            library = FfiLibrary()
            _run_outside_of_traces(run_self_test, library)
            gradient_plans.use_buckets(library)
            _state.thread = ProgramThread(library, "ronde-jax")
            return True
        except (RondeError, OSError, AttributeError, jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
            if ops == "native":
                raise
            problem = str(error)
    logger.warning("rank %d: operations in JAX programs run through Python, which is slower: %s", world.rank, problem)
    return False
