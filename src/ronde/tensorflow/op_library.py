"""The library of TensorFlow operations (native/tensorflow) through ctypes: loading it, testing it, and the jobs of its
kernels. The only module of this package that knows ctypes.

Whether the kernels work with the installed TensorFlow is found out by a self-test (training/native_self_test.py). Ranks
need not agree on it: what runs through Python instead does the same on the wire, and docs/decisions/0019 says why it
cannot deadlock.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tensorflow as tf

from ronde.comm.backends.native_library import RdMemberCall, load_library
from ronde.comm.buffers import array_at
from ronde.comm.call import Memory
from ronde.comm.world import current_world
from ronde.errors import RondeError
from ronde.observe.metrics import Counts
from ronde.training.graph_operations import UNKNOWN, GraphOperation, JobHandle
from ronde.training.native_self_test import find_problem_by_test
from ronde.types import DType

LIBRARY = Path(__file__).with_name("libronde_tensorflow.so")
FUNCTIONS = ("rd_submit", "rd_retain", "rd_release", "rd_get_mismatch", "rd_reduce")
"""Functions of libronde that the kernels call, in the order of RondeFunctions in the library."""

RUN_OPERATION, OPEN_PLAN, EXPLAIN_FAILURE = range(3)
"""What a kernel asks for: JobKind in the library."""
NOT_REFUSED, OUT_OF_TURN, AT_ONCE = range(3)
"""Why a bucket was not submitted: Refusal in the library."""

logger = logging.getLogger("ronde.tensorflow")


class JobView(ctypes.Structure):
    """The library's JobView."""

    _fields_ = (
        ("job", c_void_p),
        ("kind", c_int32),
        ("dtype", c_int32),
        ("operation", c_char_p),
        ("plan", c_char_p),
        ("description", c_char_p),
        ("num_inputs", c_uint64),
        ("inputs", POINTER(c_void_p)),
        ("num_outputs", c_uint64),
        ("outputs", POINTER(c_void_p)),
        ("dims", POINTER(c_int64)),
        ("status", c_int32),
        ("member", c_int32),
        ("detail", c_int32),
        ("refusal", c_int32),
        ("bucket", c_int64),
        ("submitted_ns", c_int64),
        ("end_ns", c_int64),
        ("num_member_calls", c_uint64),
        ("member_calls", POINTER(RdMemberCall)),
    )


class CallFailure(NamedTuple):
    """How the call of a bucket has failed."""

    status: int
    member: int
    detail: int
    refusal: int
    submitted_ns: int
    descriptions: tuple[str, ...]
    """After a mismatch, the call of each member; empty for one that has no call."""


class KernelJob:
    """One execution of a kernel that waits for Python. It ends once, well or with an error; free() comes last, when
    nothing uses the memory of its tensors any more. Safe from any thread."""

    def __init__(self, library: ctypes.CDLL, view: JobView) -> None:
        self.kind: int = view.kind
        self.operation = msgspec.json.decode(view.operation, type=GraphOperation)
        self.plan: str = view.plan.decode()
        self.bucket: int = view.bucket
        self.description: str = view.description.decode(errors="replace")
        dtype = DType(view.dtype).name.lower() if view.dtype >= 0 else "uint8"
        shapes, position = [], 0
        for _ in range(view.num_inputs):
            num_dims = view.dims[position]
            shapes.append(tuple(view.dims[position + 1 : position + 1 + num_dims]))
            position += 1 + num_dims
        self.inputs = tuple(Memory(view.inputs[index] or 0, shape, dtype) for index, shape in enumerate(shapes))
        """The memory of the tensors, until free(). All have the dtype of the first, but for the splits of an
        alltoall."""
        self.outputs = tuple(
            Memory(view.outputs[index] or 0, shapes[index], dtype) for index in range(view.num_outputs)
        )
        rows = view.member_calls[: view.num_member_calls] if view.num_member_calls else []
        self.failure = CallFailure(
            view.status,
            view.member,
            view.detail,
            view.refusal,
            view.submitted_ns,
            tuple(row.description.decode(errors="replace") for row in rows),
        )
        self.has_ended = False
        """Whether the kernel has ended, well or with an error."""
        self._library = library
        self._handle = JobHandle(view.job, library.ronde_tf_free_job)

    def finish(self, results: Sequence[Any] = ()) -> None:
        """End the kernel well. `results` are the arrays of those outputs that the kernel has not allocated."""
        with self._handle.use() as handle:
            if handle is None:
                return
            for index, result in enumerate(results):
                dims, data = (c_int64 * result.ndim)(*result.shape), c_void_p()
                given = (handle, index, dims, result.ndim, ctypes.byref(data))
                if not self._library.ronde_tf_allocate_output(*given):
                    return
                if result.size:
                    array_at(data.value or 0, result.size, result.dtype)[:] = result.reshape(-1)
            self.has_ended = True
            self._library.ronde_tf_finish(handle)

    def fail(self, text: str, code: int) -> None:
        """End the kernel with an error, unless it has ended. Its memory stays until free()."""
        with self._handle.use() as handle:
            if handle is not None:
                self.has_ended = True
                self._library.ronde_tf_fail(handle, code, text.encode(errors="replace"))

    def start_on(self, channel: int | None, num_members: int, timeout_s: float, algorithm: int) -> None:
        """Start the bucket on this rd_channel; None if its group has one member. Frees the job."""
        handle = self._handle.take()
        if handle is not None:
            self._library.ronde_tf_start_on(handle, channel, num_members, timeout_s, algorithm)

    def free(self) -> None:
        self._handle.free()


class OpLibrary:
    """The loaded library: its operations for graphs, and the queue of their jobs."""

    def __init__(self, path: Path = LIBRARY) -> None:
        if not path.exists():
            raise RondeError(f"{path} is missing; reinstall ronde, or run `make build` in a checkout")
        self.ops: Any = tf.load_op_library(str(path))
        """Functions that add the operations to a graph."""
        library = ctypes.CDLL(str(path))
        library.ronde_tf_error.restype = c_char_p
        if problem := library.ronde_tf_error():
            raise RondeError(f"{path.name}: {problem.decode(errors='replace')}")
        library.ronde_tf_take_job.argtypes = (POINTER(JobView), c_double)
        library.ronde_tf_allocate_output.argtypes = (c_void_p, c_int, POINTER(c_int64), c_int, POINTER(c_void_p))
        library.ronde_tf_get_counts.argtypes = (c_char_p, POINTER(c_int64))
        library.ronde_tf_fail.argtypes = (c_void_p, c_int, c_char_p)
        library.ronde_tf_start_on.argtypes = (c_void_p, c_void_p, c_uint32, c_double, c_int32)
        for name in ("finish", "free_job"):
            getattr(library, f"ronde_tf_{name}").argtypes = (c_void_p,)
        data_plane = load_library()
        addresses = [ctypes.cast(getattr(data_plane, name), c_void_p) for name in FUNCTIONS]
        library.ronde_tf_connect((c_void_p * len(FUNCTIONS))(*addresses))
        self._library = library
        self._view = JobView()

    def take_job(self, timeout_s: float) -> KernelJob | None:
        """Wait for the next job of a kernel; None when the time is over. EOFError after stop(). For one thread."""
        outcome = self._library.ronde_tf_take_job(ctypes.byref(self._view), timeout_s)
        if outcome < 0:
            raise EOFError
        if not outcome:
            return None
        try:
            return KernelJob(self._library, self._view)
        except Exception as error:  # of any kind: the kernel must end
            self._library.ronde_tf_fail(
                self._view.job, UNKNOWN, f"a kernel of ronde cannot be read: {error!r}".encode()
            )
            self._library.ronde_tf_free_job(self._view.job)
            return None

    def get_counts(self, plan: str) -> Counts:
        """What the buckets of a plan have taken so far, in all rounds."""
        counts = (c_int64 * 4)()
        self._library.ronde_tf_get_counts(plan.encode(), counts)
        operations, num_bytes, wait_ns, move_ns = counts
        return operations, num_bytes, wait_ns, move_ns

    def stop(self) -> None:
        """End all kernels that wait for their job to be taken, and all later ones, with an error."""
        self._library.ronde_tf_stop()


# --- whether the library can be used ---------------------------------------------------------------------------------


def find_problem(ops: str, backend: str) -> str:
    """Why operations of graphs have to run through Python: empty if they need not. `ops` and `backend` are the settings
    tensorflow_ops and backend."""
    if ops == "python":
        return "the setting tensorflow_ops says so"
    if backend != "native":
        return f"the kernels need the native backend, and this job has {backend!r}"
    if ops == "native":
        return ""
    if not LIBRARY.exists():
        return f"{LIBRARY} is missing"
    build = (tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION, tf.__file__)
    return find_problem_by_test("ronde.tensorflow.self_test", LIBRARY, build)


class _LibraryState:
    library: OpLibrary | None = None
    problem: str | None = None
    """Why operations run through Python; empty if they do not, None before that is known."""


_state = _LibraryState()
_lock = threading.Lock()


def load_op_library() -> OpLibrary | None:
    """The library, loaded once; None, with one line of warning, if operations have to run through Python."""
    if _state.problem is None:
        with _lock:
            if _state.problem is None:
                _decide()
    return _state.library


def _decide() -> None:
    world = current_world("an operation in a TensorFlow graph")
    settings = world.settings
    problem = find_problem(settings.tensorflow_ops, settings.backend)
    if not problem:
        try:
            _state.library = OpLibrary()
        except (RondeError, OSError, tf.errors.OpError) as error:
            if settings.tensorflow_ops == "native":
                raise
            problem = str(error)
    if problem:
        logger.warning(
            "rank %d: operations in TensorFlow graphs run through Python, which is slower: %s", world.rank, problem
        )
    _state.problem = problem
