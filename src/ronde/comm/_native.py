"""The C++ data plane through ctypes: types, functions, and the errors its status codes stand for.

The only module that knows ctypes. Calls drop the GIL while they run. Used by comm/native and, for its kernels and
memory views, by the other backends.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ronde.errors import RondeError

__all__ = ["ABI", "Library", "NativeCall", "NativeLayout", "NativePart", "NativeResult", "Status", "address", "library", "reduce", "view"]

ABI = 1
TEXT_BYTES = 128
TRUSTED = 1


class Status:
    """The C header's rd_status."""

    OK, BAD_CALL, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, SYSTEM, CLOSED = range(8)


ALGORITHMS = ("", "direct", "doubling", "ring", "two_level", "tree", "pairwise")


class NativeLayout(ctypes.Structure):
    """rd_layout."""

    _fields_ = (
        ("abi", c_uint32),
        ("num_members", c_uint32),
        ("me", c_uint32),
        ("num_cores", c_uint32),
        ("places", POINTER(c_uint32)),
        ("slot_bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("bucket_bytes", c_uint64),
    )


class NativePart(ctypes.Structure):
    """rd_part."""

    _fields_ = (("source", c_void_p), ("target", c_void_p), ("count", c_uint64))


class NativeCall(ctypes.Structure):
    """rd_call."""

    _fields_ = (
        ("kind", c_int32),
        ("dtype", c_int32),
        ("op", c_int32),
        ("algorithm", c_int32),
        ("flags", c_uint32),
        ("peer", c_int32),
        ("prescale", c_double),
        ("postscale", c_double),
        ("signature", c_uint64),
        ("text", c_char_p),
        ("parts", POINTER(NativePart)),
        ("num_parts", c_uint64),
        ("counts", POINTER(c_uint64)),
        ("splits", POINTER(c_uint64)),
    )


class NativeResult(ctypes.Structure):
    """rd_result."""

    _fields_ = (
        ("status", c_int32),
        ("member", c_int32),
        ("detail", c_int32),
        ("algorithm", c_int32),
        ("start_ns", c_int64),
        ("ready_ns", c_int64),
        ("end_ns", c_int64),
    )


class NativeAsked(ctypes.Structure):
    """rd_asked."""

    _fields_ = (("signature", c_uint64), ("text", c_char * TEXT_BYTES))


class NativeNow(ctypes.Structure):
    """rd_status_now."""

    _fields_ = (
        ("calls", c_uint64),
        ("since_ns", c_int64),
        ("kind", c_int32),
        ("num_missing", c_int32),
        ("text", c_char * TEXT_BYTES),
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
    "rd_bucket": (c_void_p, (c_void_p,)),
    "rd_run": (c_int, (c_void_p, POINTER(NativeCall), POINTER(NativeResult), c_double)),
    "rd_submit": (c_int, (c_void_p, POINTER(NativeCall), c_double, POINTER(c_uint64))),
    "rd_wait": (c_int, (c_void_p, c_uint64, POINTER(NativeResult), c_double)),
    "rd_done": (c_int, (c_void_p, c_uint64)),
    "rd_asked_by": (c_int, (c_void_p, POINTER(NativeAsked))),
    "rd_look": (None, (c_void_p, POINTER(NativeNow), POINTER(c_uint32))),
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
            raise RondeError(f"{path} has ABI {self.rd_abi()}, this ronde needs {ABI}; reinstall ronde or run `make build`")


def _places() -> list[Path]:
    package = sys.modules["ronde"]
    return [Path(folder) / "libronde.so" for folder in package.__path__]


@lru_cache(maxsize=1)
def library() -> Library:
    """The data plane, loaded once."""
    for path in _places():
        if path.exists():
            return Library(path)
    looked = ", ".join(str(path) for path in _places())
    raise RondeError(f"ronde's native library is missing (looked for {looked}); reinstall ronde or run `make build`")


_first_byte = c_char.from_buffer


def address(array: np.ndarray[Any, np.dtype[Any]]) -> int:
    """Where a contiguous array begins. NumPy's own ways to ask take five times as long."""
    try:
        return ctypes.addressof(_first_byte(array))
    except (TypeError, ValueError):  # read-only, empty, or of a dtype that buffers do not know
        return int(array.__array_interface__["data"][0])


def view(address: int, num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Writable bytes at an address. The caller knows that they live long enough."""
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def reduce(
    dtype: int, op: int, sources: Sequence[int], targets: Sequence[int], count: int, *, prescale: float = 1.0, postscale: float = 1.0
) -> None:
    """targets[*] = postscale * op(prescale * sources[*]), on addresses, by the native kernels."""
    ins = (c_void_p * len(sources))(*sources)
    outs = (c_void_p * len(targets))(*targets)
    status = library().rd_reduce(dtype, op, prescale, postscale, ins, len(sources), outs, len(targets), count)
    if status != Status.OK:
        raise TypeError(f"operation {op} is not defined for dtype {dtype}")
