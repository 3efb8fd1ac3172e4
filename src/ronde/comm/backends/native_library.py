"""The C++ data plane through ctypes: types, functions, and the errors its status codes stand for.

With comm/_handle the only module that knows ctypes. Calls drop the GIL while they run. Used by comm/_handle and, for
its kernels and memory views, by the other backends.

One open channel of the C++ data plane, in Python's terms. Used by comm/native, which adds who, when and why.
"""

from __future__ import annotations

import ctypes
import errno
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ronde.comm.backends.base import CallTiming, CurrentCall
from ronde.comm.call import Call
from ronde.errors import RondeError
from ronde.types import Deadline, OperationKind

__all__ = [
    "ChannelHandle",
    "ChannelParams",
    "NativeError",
    "NativeLibrary",
    "NativeStatus",
    "address_of",
    "bytes_at",
    "load_library",
    "reduce",
]

ABI = 2
DESCRIPTION_BYTES = 128
PRE_AGREED = 1


class NativeStatus:
    """The C header's rd_status."""

    OK, BAD_CALL, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, SYSTEM, CLOSED = range(8)


ALGORITHMS = ("", "direct", "doubling", "ring", "two_level", "tree", "pairwise")


class RdChannelParams(ctypes.Structure):
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
RD_CALL = struct.Struct("@iiiiIiddQPPQPP")
"""rd_call: kind, dtype, op, algorithm, flags, peer, prescale, postscale, signature, description, spans,
num_spans, counts, splits."""
RD_RESULT = struct.Struct("@iiiiqqq")
"""rd_result: status, member, detail, algorithm, start_ns, ready_ns, end_ns."""


class RdMemberCall(ctypes.Structure):
    """rd_member_call."""

    _fields_ = (("signature", c_uint64), ("description", c_char * DESCRIPTION_BYTES))


class RdCurrentCall(ctypes.Structure):
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
    "rd_segment_bytes": (c_uint64, (POINTER(RdChannelParams),)),
    "rd_open": (
        c_int,
        (POINTER(RdChannelParams), c_int, POINTER(c_int), c_uint32, POINTER(c_int), POINTER(c_void_p)),
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
    "rd_get_mismatch": (c_int, (c_void_p, POINTER(RdMemberCall))),
    "rd_get_current_call": (None, (c_void_p, POINTER(RdCurrentCall), POINTER(c_uint32))),
    "rd_set_interpreter": (None, (POINTER(c_void_p),)),
    "rd_fetch_exception": (c_int, (POINTER(c_void_p),)),
    "rd_reduce": (
        c_int,
        (c_int32, c_int32, c_double, c_double, POINTER(c_void_p), c_uint64, POINTER(c_void_p), c_uint64, c_uint64),
    ),
}


class NativeLibrary(ctypes.CDLL):
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


def _python_functions() -> ctypes.Array[c_void_p]:
    """rd_interpreter: how the library lets Python run its signal handlers."""
    python = ctypes.pythonapi
    functions = (python.PyGILState_Ensure, python.PyErr_CheckSignals, python.PyErr_Fetch, python.PyGILState_Release)
    return (c_void_p * 4)(*[ctypes.cast(function, c_void_p) for function in functions])


@lru_cache(maxsize=1)
def load_library() -> NativeLibrary:
    """The data plane, loaded once."""
    path = Path(__file__).parents[2] / "libronde.so"
    if not path.exists():
        raise RondeError(
            f"ronde's native library {path} is missing; reinstall ronde, or run `make build` in a checkout"
        )
    loaded = NativeLibrary(path)
    loaded.rd_set_interpreter(_python_functions())
    return loaded


_first_byte = c_char.from_buffer


def address_of(array: np.ndarray[Any, np.dtype[Any]]) -> int:
    """Where a contiguous array begins. NumPy's own ways to ask take five times as long."""
    try:
        return ctypes.addressof(_first_byte(array))  # type: ignore[arg-type]  # the stubs of NumPy hide its buffer
    except (TypeError, ValueError):  # read-only, empty, or of a dtype that buffers do not know
        return int(array.__array_interface__["data"][0])


def bytes_at(address: int, num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Writable bytes at an address. The caller knows that they live long enough."""
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def reduce(
    dtype: int,
    op: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    count: int,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    """targets[*] = postscale * op(prescale * sources[*]), on addresses, by the native kernels."""
    ins = (c_void_p * len(inputs))(*inputs)
    outs = (c_void_p * len(outputs))(*outputs)
    status = load_library().rd_reduce(dtype, op, prescale, postscale, ins, len(inputs), outs, len(outputs), count)
    if status != NativeStatus.OK:
        raise TypeError(f"operation {op} is not defined for dtype {dtype}")


class ChannelParams:
    """Who the members of a channel are and where they sit."""

    def __init__(
        self,
        *,
        hosts: Sequence[int],
        member_index: int,
        num_cores: int,
        slot_bytes: int,
        chunk_bytes: int,
        bucket_bytes: int,
    ) -> None:
        self.hosts = tuple(hosts)
        self.local_members = tuple(index for index, place in enumerate(hosts) if place == hosts[member_index])
        """Members at my place."""
        numbers = (c_uint32 * len(hosts))(*hosts)
        slot_bytes, chunk_bytes = slot_bytes // 64 * 64, chunk_bytes // 64 * 64
        self.struct = RdChannelParams(
            ABI, len(hosts), member_index, num_cores, numbers, slot_bytes, chunk_bytes, bucket_bytes
        )

    def segment_bytes(self) -> int:
        """Bytes of shared memory that my place needs."""
        num_bytes: int = load_library().rd_segment_bytes(self.struct)
        return num_bytes


class NativeError(Exception):
    """How a call ended when it did not end well; comm/native turns it into the error the caller sees."""

    def __init__(self, status: int, member: int = -1, detail: int = 0, *, still_running: bool = False) -> None:
        super().__init__(f"status {status}, member {member}, detail {detail}")
        self.status = status
        self.member = member
        self.detail = detail
        self.still_running = still_running
        """Only the wait ran out of time: the call is still under way."""


class _CallStructs(threading.local):
    """A thread's own structs, filled anew for every call."""

    def __init__(self) -> None:
        self.span = ctypes.create_string_buffer(SPAN.size)
        self.span_address = ctypes.addressof(self.span)
        self.call = ctypes.create_string_buffer(RD_CALL.size)
        self.call_address = ctypes.addressof(self.call)
        self.result = ctypes.create_string_buffer(RD_RESULT.size)
        self.result_address = ctypes.addressof(self.result)
        self.last_call: Call | None = None  # what self.call holds, when it is a call with one part and no more
        self.last_algorithm = 0
        self.descriptions: dict[str, tuple[c_char_p, int]] = {}

    def description_address(self, description: str) -> int:
        """Address of a call's text in C; most calls are made again and again."""
        found = self.descriptions.get(description)
        if found is None:
            if len(self.descriptions) >= MAX_DESCRIPTIONS:
                self.descriptions.clear()
            pointer = c_char_p(description.encode(errors="replace"))
            found = self.descriptions[description] = (pointer, ctypes.cast(pointer, c_void_p).value or 0)
        return found[1]


MAX_DESCRIPTIONS = 1024
WAIT_SLICE_S = 0.2
_call_structs = _CallStructs()


class ChannelHandle:
    """An open channel of the library. The caller sees to it that nothing is called after or during close()."""

    def __init__(
        self,
        params: ChannelParams,
        segment: int,
        sockets: Mapping[int, Sequence[int]],
        point_to_point: Mapping[int, int],
        algorithm: str,
    ) -> None:
        """Takes over the descriptors in sockets (the alarm first, then data; as many for each member) and direct."""
        self._library = load_library()
        self._num_members = len(params.hosts)
        self._algorithm = ALGORITHMS.index(algorithm)
        num_sockets = max((len(row) for row in sockets.values()), default=0)
        table = (c_int * (self._num_members * num_sockets or 1))(*[-1] * (self._num_members * num_sockets))
        for member, row in sockets.items():
            table[member * num_sockets : (member + 1) * num_sockets] = [*row]
        ones = (c_int * self._num_members)(*[point_to_point.get(member, -1) for member in range(self._num_members)])
        handle = c_void_p()
        status = self._library.rd_open(params.struct, segment, table, num_sockets, ones, ctypes.byref(handle))
        if status != NativeStatus.OK:
            raise NativeError(status)
        self._handle = handle

    def run(self, call: Call, remaining_s: float) -> CallTiming:
        """Execute the call and wait for it."""
        scratch = _call_structs
        keep = self._fill_call(scratch, call)
        status = self._library.rd_run(self._handle, scratch.call_address, scratch.result_address, remaining_s)
        del keep
        return _timing_or_raise(status, scratch)

    def submit(self, call: Call, remaining_s: float) -> int:
        """Queue the call; the number is for wait() and done()."""
        scratch = _call_structs
        keep = self._fill_call(scratch, call)
        number = c_uint64()
        status = self._library.rd_submit(self._handle, scratch.call_address, remaining_s, ctypes.byref(number))
        del keep
        if status != NativeStatus.OK:
            raise NativeError(status)
        return number.value

    def wait(self, work: int, remaining_s: float) -> CallTiming:
        """Wait for a queued call and forget it. In slices, between which Python looks for signals."""
        scratch, deadline = _call_structs, Deadline(remaining_s)
        while True:
            slice_s = min(WAIT_SLICE_S, deadline.remaining_s)
            status = self._library.rd_wait(self._handle, work, scratch.result_address, slice_s)
            try:
                return _timing_or_raise(status, scratch)
            except NativeError as ending:
                if not ending.still_running or deadline.expired:
                    raise

    def done(self, work: int) -> bool:
        """Whether a queued call has ended."""
        return bool(self._library.rd_done(self._handle, work))

    def member_descriptions(self) -> list[str]:
        """What each member asked for in this thread's last call that was a mismatch."""
        rows = (RdMemberCall * self._num_members)()
        self._library.rd_get_mismatch(self._handle, rows)
        return [row.description.decode(errors="replace") for row in rows]

    def current_call(self) -> CurrentCall | None:
        """The call under way, or None when idle."""
        now = RdCurrentCall()
        missing = (c_uint32 * self._num_members)()
        self._library.rd_get_current_call(self._handle, ctypes.byref(now), missing)
        if now.start_ns == 0:
            return None
        number = -1 if now.kind in (OperationKind.SEND, OperationKind.RECEIVE) else now.sequence
        return CurrentCall(
            now.description.decode(errors="replace"), now.start_ns, tuple(missing[: now.num_missing]), number
        )

    def bucket(self, num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """My bucket memory. It stays for as long as an array looks into it, even after close()."""
        if num_bytes == 0:
            return np.empty(0, np.uint8)
        start = self._library.rd_get_bucket(self._handle)
        memory = (ctypes.c_uint8 * num_bytes).from_address(start)
        weakref.finalize(memory, self._library.rd_release_bucket, start).atexit = False
        return np.ctypeslib.as_array(memory)

    def abort(self, member: int) -> None:
        """End all waits of all members; `member` is to blame, or -1."""
        self._library.rd_abort(self._handle, member)

    def close(self) -> None:
        """Free everything."""
        self._library.rd_close(self._handle)

    def _fill_call(self, structs: _CallStructs, call: Call) -> object:
        """Put the call into the thread's struct. Returns what must live until the library has read it."""
        parts = call.spans
        if len(parts) == 1:
            part = parts[0]
            SPAN.pack_into(structs.span, 0, part.input, part.output, part.count)
            last = structs.last_call
            if last is not None and _differ_only_in_memory(call, last) and structs.last_algorithm == self._algorithm:
                return None  # as so often: the same again, with other memory
        return self._fill_all_fields(structs, call)

    def _fill_all_fields(self, structs: _CallStructs, call: Call) -> object:
        parts = call.spans
        keep: list[object] = []
        if len(parts) == 1:
            parts_at = structs.span_address
        else:
            parts_at = _copy_bytes(keep, b"".join([SPAN.pack(part.input, part.output, part.count) for part in parts]))
        RD_CALL.pack_into(
            structs.call,
            0,
            call.kind,
            call.dtype,
            call.op,
            self._algorithm if call.kind == OperationKind.ALLREDUCE else 0,
            PRE_AGREED if call.pre_agreed else 0,
            call.peer,
            call.prescale,
            call.postscale,
            call.signature_hash,
            structs.description_address(call.description),
            parts_at,
            len(parts),
            0 if call.counts is None else _copy_bytes(keep, struct.pack(f"@{len(call.counts)}Q", *call.counts)),
            0 if call.splits is None else _copy_bytes(keep, struct.pack(f"@{len(call.splits)}Q", *call.splits)),
        )
        # Without the memory behind the call, which must not be kept.
        structs.last_call = None if keep else msgspec.structs.replace(call, spans=(), owners=None)
        structs.last_algorithm = self._algorithm
        return keep


def _differ_only_in_memory(call: Call, last: Call) -> bool:
    """Whether two calls differ in nothing but their memory. Kind, dtype and options are of the form that owns the text:
    the very same text is the very same form."""
    return (
        call.description is last.description
        and call.kind is last.kind
        and call.dtype is last.dtype
        and call.signature_hash == last.signature_hash
        and call.peer == last.peer
        and call.pre_agreed == last.pre_agreed
        and call.counts is None
        and call.splits is None
    )


def _copy_bytes(owners: list[object], data: bytes) -> int:
    """Address of a copy of the data that lives as long as the list."""
    memory = ctypes.create_string_buffer(data, max(1, len(data)))
    owners.append(memory)
    return ctypes.addressof(memory)


def _timing_or_raise(status: int, structs: _CallStructs) -> CallTiming:
    _, member, detail, algorithm, start_ns, ready_ns, end_ns = RD_RESULT.unpack_from(structs.result)
    if status != NativeStatus.OK:
        if detail == errno.EINTR:
            _raise_pending_exception()
        raise NativeError(status, member, detail, still_running=status == NativeStatus.TIMEOUT and end_ns == 0)
    return CallTiming(start_ns, ready_ns, end_ns, ALGORITHMS[algorithm])


def _raise_pending_exception() -> None:
    """Raise what a signal handler raised while the library waited, such as KeyboardInterrupt."""
    raised = (c_void_p * 3)()
    if load_library().rd_fetch_exception(raised):
        restore = ctypes.pythonapi.PyErr_Restore
        restore.argtypes = (c_void_p, c_void_p, c_void_p)
        restore.restype = None
        restore(*raised)  # ctypes raises what is set when a function of Python's own returns
