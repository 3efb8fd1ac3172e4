"""The library that puts operations into MXNet's engine (native/mxnet) through ctypes: loading it, testing it, pushing
operations, and the jobs that they leave. The only module of this package that knows ctypes.

Whether it works with the installed MXNet is found out by a self-test (training/native_self_test.py), and whether the
engine of this process keeps the errors of operations by trying: NaiveEngine does not.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import mxnet as mx
from mxnet.base import _LIB, check_call
from mxnet.libinfo import find_lib_path

from ronde.comm.world import current_world
from ronde.errors import RondeError
from ronde.training.native_self_test import find_problem_by_test

LIBRARY = Path(__file__).with_name("libronde_mxnet.so")
READY, SKIPPED, FAILED = range(3)
"""What the engine has done with an operation: JobKind in the library."""
MAX_PRIORITY = 2**31 - 1

logger = logging.getLogger("ronde.mxnet")


class EngineJobView(ctypes.Structure):
    """The library's EngineJobView."""

    _fields_ = (
        ("operation", c_void_p),
        ("number", c_int64),
        ("kind", c_int32),
        ("num_arrays", c_int32),
        ("data", POINTER(c_void_p)),
        ("problem", c_char_p),
    )


class EngineJob(NamedTuple):
    """What the engine has come to with an operation."""

    kind: int
    number: int
    handle: int | None
    """With which it is ended, once; None of one that is skipped, which has ended."""
    addresses: tuple[int, ...]
    """Of the arrays, in the order in which they were pushed; 0 of one without elements."""
    problem: str


class EngineLibrary:
    """The loaded library. Its methods may be called from any thread, take_job() from one."""

    def __init__(self, path: Path = LIBRARY) -> None:
        if not path.exists():
            raise RondeError(f"{path} is missing; reinstall ronde, or run `make build` in a checkout")
        library = ctypes.CDLL(str(path))
        library.ronde_mx_connect.argtypes = (c_char_p,)
        library.ronde_mx_connect.restype = c_char_p
        library.ronde_mx_push.argtypes = (
            *(c_int64, POINTER(c_void_p), POINTER(c_uint8), c_uint64, c_uint64),
            *(c_int, c_char_p),
        )
        library.ronde_mx_push_failure.argtypes = (c_void_p,)
        library.ronde_mx_take_job.argtypes = (POINTER(EngineJobView), c_double, POINTER(c_int32))
        library.ronde_mx_take_job.restype = c_void_p
        library.ronde_mx_fail.argtypes = (c_void_p, c_char_p)
        for name in ("finish", "free_job"):
            getattr(library, f"ronde_mx_{name}").argtypes = (c_void_p,)
        if problem := library.ronde_mx_connect(find_lib_path()[0].encode()):
            raise RondeError(f"{path.name}: {problem.decode(errors='replace')}")
        self._library = library
        self._view = EngineJobView()
        self._is_stopped = c_int32()
        self._restore_layout = _find_restore_layout()

    def push(self, number: int, read: Sequence[Any], written: Sequence[Any], priority: int, name: str) -> None:
        """Let the engine make a job of this number when the arrays can be read and written. One that is both is given
        as written. The engine keeps them until the operation is ended."""
        for each in read:
            if each.ndim > 1 and self._restore_layout is not None:
                self._restore_layout(each.handle)
        arrays = (*read, *written)
        handles = (c_void_p * len(arrays))(*[each.handle for each in arrays])
        is_empty = (c_uint8 * len(arrays))(*[not each.size for each in arrays])
        priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))
        check_call(
            self._library.ronde_mx_push(number, handles, is_empty, len(read), len(arrays), priority, name.encode())
        )

    def take_job(self, timeout_s: float) -> EngineJob | None:
        """Wait for the next job; None when the time is over. EOFError after stop()."""
        view = self._view
        job = self._library.ronde_mx_take_job(ctypes.byref(view), timeout_s, ctypes.byref(self._is_stopped))
        if job is None:
            if self._is_stopped.value:
                raise EOFError
            return None
        try:
            addresses = tuple([each or 0 for each in view.data[: view.num_arrays]]) if view.num_arrays else ()
            return EngineJob(view.kind, view.number, view.operation, addresses, view.problem.decode(errors="replace"))
        finally:
            self._library.ronde_mx_free_job(job)

    def finish(self, handle: int) -> None:
        """End an operation well: what waits for its arrays goes on."""
        self._library.ronde_mx_finish(handle)

    def fail(self, handle: int, text: str) -> None:
        """End an operation with an error, which is raised where somebody waits for one of its arrays."""
        self._library.ronde_mx_fail(handle, text.encode(errors="replace"))

    def stop(self) -> None:
        """End all operations that wait for their job to be taken, and all later ones, with an error."""
        self._library.ronde_mx_stop()

    def keeps_errors(self) -> bool:
        """Whether an array tells who waits for it that the operation which writes it has failed."""
        array = mx.nd.zeros((1,))
        check_call(self._library.ronde_mx_push_failure(array.handle))
        try:
            array.wait_to_read()
        except mx.MXNetError as error:
            return "meant to fail" in str(error)
        return False


def _find_restore_layout() -> Any:
    """The function that pushes an operation which gives an array MXNet's own layout, if it has that of oneDNN; None in
    a build without it."""
    function = getattr(_LIB, "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv", None)
    if function is not None:
        function.argtypes = (c_void_p,)
        function.restype = None
    return function


def get_address(x: Any) -> int:
    """Where the elements of an array lie that is computed, and not under way."""
    data = c_void_p()
    check_call(_LIB.MXNDArrayGetData(x.handle, ctypes.byref(data)))
    return data.value or 0


def wait_to_write(x: Any) -> None:
    """Wait until nobody reads or writes an array."""
    check_call(_LIB.MXNDArrayWaitToWrite(x.handle))


# --- whether the library can be used ---------------------------------------------------------------------------------


class _EngineLibraryState:
    library: EngineLibrary | None = None
    problem: str | None = None
    """Why operations do not run in the engine; empty if they do, None before that is known."""


_state = _EngineLibraryState()
_lock = threading.Lock()


def load_engine_library() -> EngineLibrary | None:
    """The library, loaded once; None, with one line of warning, if asynchronous operations are waited for."""
    if _state.problem is None:
        with _lock:
            if _state.problem is None:
                _decide()
    return _state.library


def find_problem(ops: str) -> str:
    """Why operations cannot run in the engine: empty if they can. `ops` is the setting mxnet_ops."""
    if ops == "python":
        return "the setting mxnet_ops says so"
    if ops == "native":
        return ""
    if not LIBRARY.exists():
        return f"{LIBRARY} is missing"
    return find_problem_by_test("ronde.mxnet.self_test", LIBRARY, (mx.__version__, *_library_file()))


def _library_file() -> tuple[object, ...]:
    path = Path(find_lib_path()[0])
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _decide() -> None:
    world = current_world("an asynchronous operation on arrays of MXNet")
    ops = world.settings.mxnet_ops
    problem, library = find_problem(ops), None
    if not problem:
        try:
            library = EngineLibrary()
            if not library.keeps_errors():
                problem = "this engine of MXNet (NaiveEngine) runs one operation after the other and forgets errors"
        except (RondeError, OSError) as error:
            problem = str(error)
        if problem and ops == "native":
            raise RondeError(f"the setting mxnet_ops is native, but {problem}")
    if problem:
        logger.warning("rank %d: asynchronous operations on MXNet arrays are waited for: %s", world.rank, problem)
    else:
        _state.library = library
    _state.problem = problem
