"""The C++ data plane through ctypes: types, functions, and the errors its status codes stand for.

With comm/_handle the only module that knows ctypes. Calls drop the GIL while they run. Used by comm/_handle and, for
its kernels and memory views, by the other backends.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import POINTER, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ronde.errors import RondeError

__all__ = ["Library", "Status", "address", "library", "reduce", "view"]

ABI = 2
DESCRIPTION_BYTES = 128
PRE_AGREED = 1


class Status:
    """The C header's rd_status."""

    OK, BAD_CALL, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, SYSTEM, CLOSED = range(8)


ALGORITHMS = ("", "direct", "doubling", "ring", "two_level", "tree", "pairwise")


class NativeLayout(ctypes.Structure):
    """rd_channel_params."""

    _fields_ = (
        ("abi", c_uint32),
        ("num_members", c_uint32),
        ("member_index", c_uint32),
        ("num_cores", c_uint32),
        ("hosts", POINTER(c_uint32)),
        ("slot_bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("bucket_bytes", c_uint64),
    )


# Structs of the hot path are packed and unpacked whole: one call instead of one per field.
SPAN = struct.Struct("@PPQ")
"""rd_span: input, output, count."""
CALL = struct.Struct("@iiiiIiddQPPQPP")
"""rd_call: kind, dtype, op, algorithm, flags, peer, prescale, postscale, signature, description, spans,
num_spans, counts, splits."""
RESULT = struct.Struct("@iiiiqqq")
"""rd_result: status, member, detail, algorithm, start_ns, ready_ns, end_ns."""


class NativeAsked(ctypes.Structure):
    """rd_member_call."""

    _fields_ = (("signature", c_uint64), ("description", c_char * DESCRIPTION_BYTES))


class NativeNow(ctypes.Structure):
    """rd_current_call."""

    _fields_ = (
        ("sequence", c_uint64),
        ("start_ns", c_int64),
        ("kind", c_int32),
        ("num_missing", c_int32),
        ("description", c_char * DESCRIPTION_BYTES),
    )


_FUNCTIONS: dict[str, tuple[object, Sequence[object]]] = {
    "rd_abi": (c_uint32, ()),
    "rd_version": (c_char_p, ()),
    "rd_cpu": (c_char_p, ()),
    "rd_segment_bytes": (c_uint64, (POINTER(NativeLayout),)),
    "rd_open": (
        c_int,
        (POINTER(NativeLayout), c_int, POINTER(c_int), c_uint32, POINTER(c_int), POINTER(c_void_p)),
    ),
    "rd_close": (None, (c_void_p,)),
    "rd_abort": (None, (c_void_p, c_int32)),
    "rd_get_bucket": (c_void_p, (c_void_p,)),
    "rd_release_bucket": (None, (c_void_p,)),
    # Hot: structs go as addresses, which ctypes passes on without making an object.
    "rd_run": (c_int, (c_void_p, c_void_p, c_void_p, c_double)),
    "rd_submit": (c_int, (c_void_p, c_void_p, c_double, POINTER(c_uint64))),
    "rd_wait": (c_int, (c_void_p, c_uint64, c_void_p, c_double)),
    "rd_done": (c_int, (c_void_p, c_uint64)),
    "rd_get_mismatch": (c_int, (c_void_p, POINTER(NativeAsked))),
    "rd_get_current_call": (None, (c_void_p, POINTER(NativeNow), POINTER(c_uint32))),
    "rd_set_interpreter": (None, (POINTER(c_void_p),)),
    "rd_fetch_exception": (c_int, (POINTER(c_void_p),)),
    "rd_reduce": (
        c_int,
        (c_int32, c_int32, c_double, c_double, POINTER(c_void_p), c_uint64, POINTER(c_void_p), c_uint64, c_uint64),
    ),
}


class Library(ctypes.CDLL):
    """The loaded library with its functions typed."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        for name, (returns, takes) in _FUNCTIONS.items():
            function = getattr(self, name)
            function.restype = returns
            function.argtypes = takes
        if self.rd_abi() != ABI:
            raise RondeError(
                f"{path} has ABI {self.rd_abi()}, this ronde needs {ABI}; reinstall ronde or run `make build`"
            )


def _interpreter() -> ctypes.Array[c_void_p]:
    """rd_interpreter: how the library lets Python run its signal handlers."""
    python = ctypes.pythonapi
    functions = (python.PyGILState_Ensure, python.PyErr_CheckSignals, python.PyErr_Fetch, python.PyGILState_Release)
    return (c_void_p * 4)(*[ctypes.cast(function, c_void_p) for function in functions])


@lru_cache(maxsize=1)
def library() -> Library:
    """The data plane, loaded once."""
    path = Path(__file__).parents[1] / "libronde.so"
    if not path.exists():
        raise RondeError(
            f"ronde's native library {path} is missing; reinstall ronde, or run `make build` in a checkout"
        )
    loaded = Library(path)
    loaded.rd_set_interpreter(_interpreter())
    return loaded


_first_byte = c_char.from_buffer


def address(array: np.ndarray[Any, np.dtype[Any]]) -> int:
    """Where a contiguous array begins. NumPy's own ways to ask take five times as long."""
    try:
        return ctypes.addressof(_first_byte(array))  # type: ignore[arg-type]  # the stubs of NumPy hide its buffer
    except (TypeError, ValueError):  # read-only, empty, or of a dtype that buffers do not know
        return int(array.__array_interface__["data"][0])


def view(address: int, num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Writable bytes at an address. The caller knows that they live long enough."""
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def reduce(
    dtype: int,
    op: int,
    sources: Sequence[int],
    targets: Sequence[int],
    count: int,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    """targets[*] = postscale * op(prescale * sources[*]), on addresses, by the native kernels."""
    ins = (c_void_p * len(sources))(*sources)
    outs = (c_void_p * len(targets))(*targets)
    status = library().rd_reduce(dtype, op, prescale, postscale, ins, len(sources), outs, len(targets), count)
    if status != Status.OK:
        raise TypeError(f"operation {op} is not defined for dtype {dtype}")
