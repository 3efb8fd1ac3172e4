"""The C++ data plane through ctypes: its functions, its structs and its status codes. Used by the native backend and,
for addresses and kernels, by other modules of comm.

The only module that knows ctypes. Calls drop the GIL while they run. Repeated allreduces go through hot_calls, an
extension of Python, where that can be imported; a Python before 3.11, or one without the GIL, cannot.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import itertools
import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from ronde.comm.backends.base import CallTiming, CurrentCall
from ronde.comm.call import NO_MEMORY, AnnouncedOperation, Call, Memory
from ronde.errors import RondeError
from ronde.types import DType, OperationKind

try:
    from ronde.comm.backends import hot_calls as hot_calls
except ImportError:
    hot_calls = None  # type: ignore[assignment]

ABI = 7
DESCRIPTION_BYTES = 128
MAX_MEMBERS = 65_536
MAX_LOCAL_MEMBERS = 1024
WIDEST_ELEMENT_BYTES = 8
PRE_AGREED = 1


class NativeStatus:
    """The C header's rd_status."""

    OK, BAD_CALL, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, SYSTEM, CLOSED, CANCELLED, FORKED, WITHDRAWN, NOT_AGREED = (
        range(12)
    )


class EventKind(enum.IntEnum):
    """rd_event_kind."""

    LINK_WANTED = 0
    CHANNEL_ABORTED = 1


class LinkKind(enum.IntEnum):
    """rd_link_kind."""

    SINGLE = 0
    RING = 1


ALGORITHMS = ("", "direct", "doubling", "ring", "two_level", "tree", "pairwise", "halving")


# The structs of the C header, by their names there.


class RdChannelParams(ctypes.Structure):
    _fields_ = (
        ("abi", c_uint32),
        ("num_members", c_uint32),
        ("member_index", c_uint32),
        ("num_cores", c_uint32),
        ("hosts", POINTER(c_uint32)),
        ("slot_bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("bucket_bytes", c_uint64),
        ("fusion_bytes", c_uint64),
        ("max_announced", c_uint32),
    )


# Structs of the hot path are packed and unpacked whole: one call instead of one per field.
SPAN = struct.Struct("@PPQ")
"""rd_span: input, output, count."""
RD_CALL = struct.Struct("@iiiiIiddQPPQPP")
"""rd_call: kind, dtype, op, algorithm, flags, peer, prescale, postscale, signature, description, spans,
num_spans, counts, splits."""
ANNOUNCEMENT = struct.Struct("@QII")
"""rd_announcement: signature, id, num_spans."""
RD_MESSAGE = struct.Struct("@QiiQQQPPQPQII")
"""rd_message: context, kind, peer, tag, signature, window_bytes, description, data, bytes, header, header_bytes, flags,
reserved."""
RD_RESULT = struct.Struct("@iiiiqqqqq")
"""rd_result: status, member, detail, algorithm, start_ns, ready_ns, end_ns, sequence (-1 for RD_NO_SEQUENCE),
arrived_ns."""


class RdMemberCall(ctypes.Structure):
    _fields_ = (("signature", c_uint64), ("kind", c_int32), ("description", c_char * DESCRIPTION_BYTES))


class RdCurrentCall(ctypes.Structure):
    _fields_ = (
        ("sequence", c_uint64),
        ("start_ns", c_int64),
        ("kind", c_int32),
        ("num_missing", c_int32),
        ("description", c_char * DESCRIPTION_BYTES),
    )


class RdAnnounced(ctypes.Structure):
    _fields_ = (("id", c_uint32), ("announced_ns", c_int64))


class RdReceived(ctypes.Structure):
    _fields_ = (
        ("block", c_void_p),
        ("data", c_void_p),
        ("bytes", c_uint64),
        ("header", c_void_p),
        ("header_bytes", c_uint64),
    )


class RdOptimizerStep(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("dtype", c_int32),
        ("flags", c_uint32),
        ("reserved", c_uint32),
        ("count", c_uint64),
        ("step", c_int64),
        ("values", c_void_p),
        ("gradient", c_void_p),
        ("out", c_void_p),
        ("states", c_void_p * 3),
        ("lr", c_double),
        ("weight_decay", c_double),
        ("first", c_double),
        ("second", c_double),
        ("epsilon", c_double),
    )


RD_CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
"""rd_callback: context, rd_result."""

_FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {  # ctypes has no public name for the type of its types
    "rd_version": (c_char_p, ()),
    "rd_cpu": (c_char_p, ()),
    "rd_segment_bytes": (c_uint64, (POINTER(RdChannelParams),)),
    "rd_open": (
        c_int,
        (POINTER(RdChannelParams), c_int, c_int, c_uint64, POINTER(c_void_p)),
    ),
    "rd_release": (None, (c_void_p,)),
    "rd_close": (None, (c_void_p,)),
    "rd_open_link": (c_int, (c_void_p, c_uint32, c_int32, c_int, POINTER(c_int), c_uint32)),
    "rd_abort": (None, (c_void_p, c_int32, c_int32, c_int32)),
    "rd_get_bucket": (c_void_p, (c_void_p,)),
    "rd_release_bucket": (None, (c_void_p,)),
    # Hot: structs go as addresses, which ctypes passes on without making an object.
    "rd_run": (c_int, (c_void_p, c_void_p, c_void_p, c_double)),
    "rd_submit": (c_int, (c_void_p, c_void_p, c_double, c_void_p, c_void_p, c_void_p, c_void_p)),
    "rd_announce_many": (
        c_int,
        (c_void_p, c_char_p, c_uint32, c_char_p, c_double, c_int, c_void_p, c_void_p, c_void_p),
    ),
    "rd_wait_one": (c_int, (c_void_p, c_uint32, c_double, c_void_p, c_void_p, c_void_p, c_void_p, c_uint32)),
    "rd_done_one": (c_int, (c_void_p, c_uint32)),
    "rd_release_works": (None, (c_void_p,)),
    "rd_get_work": (c_void_p, (c_void_p, c_uint32)),
    "rd_run_announced": (c_int, (c_void_p, c_uint32, c_void_p, c_double, c_double, c_void_p, c_void_p)),
    "rd_wait": (c_int, (c_void_p, c_void_p, c_double)),
    "rd_done": (c_int, (c_void_p,)),
    "rd_release_work": (None, (c_void_p,)),
    "rd_add_callback": (c_int, (c_void_p, RD_CALLBACK, c_void_p)),
    "rd_agree": (c_int, (c_void_p, c_uint32, c_char_p, c_void_p)),
    "rd_revoke": (c_int, (c_void_p, c_uint32)),
    "rd_get_announced": (c_uint32, (c_void_p, c_int64, POINTER(RdAnnounced), c_uint32)),
    "rd_get_not_announced": (c_uint32, (c_void_p, c_uint32, POINTER(c_uint32))),
    "rd_get_mismatch": (c_int, (c_void_p, POINTER(RdMemberCall))),
    "rd_get_current_call": (None, (c_void_p, POINTER(RdCurrentCall), POINTER(c_uint32))),
    "rd_open_endpoint": (c_int, (c_uint32, c_uint32, c_uint32, c_uint32, POINTER(c_uint64))),
    "rd_link_bytes": (c_uint64, ()),
    "rd_add_link": (c_int, (c_uint64, c_uint32, c_int32, c_int, c_int)),
    "rd_run_message": (c_int, (c_uint64, c_void_p, c_void_p, c_double)),
    "rd_submit_message": (c_int, (c_uint64, c_void_p, c_double, c_void_p)),
    "rd_wait_message": (c_int, (c_uint64, c_uint64, c_void_p, c_double)),
    "rd_message_done": (c_int, (c_uint64, c_uint64)),
    "rd_take_received": (c_int, (POINTER(RdReceived),)),
    "rd_free_received": (None, (c_void_p,)),
    "rd_allocate_memory": (c_void_p, (c_uint64,)),
    "rd_lose_peer": (None, (c_uint64, c_uint32)),
    "rd_end_any_source": (None, (c_uint64, c_uint64, c_uint32)),
    "rd_end_context": (None, (c_uint64, c_uint64)),
    "rd_leave_endpoint": (c_int, (c_uint64, c_double)),
    "rd_close_endpoint": (None, (c_uint64,)),
    "rd_get_current_message": (None, (c_uint64, c_uint64, POINTER(RdCurrentCall), POINTER(c_int32))),
    "rd_set_interpreter": (None, (POINTER(c_void_p),)),
    "rd_fetch_exception": (c_int, (POINTER(c_void_p),)),
    "rd_optimizer_update": (c_int, (POINTER(RdOptimizerStep),)),
    "rd_reduce": (
        c_int,
        (c_int32, c_int32, c_double, c_double, POINTER(c_void_p), c_uint64, POINTER(c_void_p), c_uint64, c_uint64),
    ),
}


class NativeLibrary(ctypes.CDLL):
    """The loaded library with its functions typed."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        # Another version may lack functions, so they are looked up after this check.
        if (abi := self.rd_abi()) != ABI:
            raise RondeError(f"{path} has ABI {abi}, this ronde needs {ABI}; reinstall ronde or run `make build`")
        for name, (returns, takes) in _FUNCTIONS.items():
            try:
                function = getattr(self, name)
            except AttributeError:
                raise RondeError(f"{path} has no {name}(); reinstall ronde or run `make build`") from None
            function.restype = returns
            function.argtypes = takes
        # The only function that sets errno; to keep it costs time in every call.
        returns, takes = _FUNCTIONS["rd_open"]
        self.rd_open = ctypes.CFUNCTYPE(returns, *takes, use_errno=True)(("rd_open", self))


@lru_cache(maxsize=1)
def load_library() -> NativeLibrary:
    """The data plane, loaded once."""
    path = Path(__file__).parents[2] / "libronde.so"
    if not path.exists():
        raise RondeError(
            f"ronde's native library {path} is missing; reinstall ronde, or run `make build` in a checkout"
        )
    loaded = NativeLibrary(path)
    # How the library lets Python run its signal handlers.
    python = ctypes.pythonapi
    functions = (python.PyGILState_Ensure, python.PyErr_CheckSignals, python.PyErr_Fetch, python.PyGILState_Release)
    loaded.rd_set_interpreter((c_void_p * 4)(*[ctypes.cast(function, c_void_p) for function in functions]))
    return loaded


_first_byte = c_char.from_buffer


def address_of(array: np.ndarray[Any, np.dtype[Any]]) -> int:
    """The address of a contiguous array. NumPy's own attributes take five times as long."""
    try:
        return ctypes.addressof(_first_byte(array))  # type: ignore[arg-type]  # the stubs of NumPy hide its buffer
    except (TypeError, ValueError):  # read-only, empty, or of a dtype that buffers do not know
        return int(array.__array_interface__["data"][0])


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
    """outputs[*] = postscale * op(prescale * inputs[*]), on addresses, by the native kernels."""
    ins = (c_void_p * len(inputs))(*inputs)
    outs = (c_void_p * len(outputs))(*outputs)
    status = load_library().rd_reduce(dtype, op, prescale, postscale, ins, len(inputs), outs, len(outputs), count)
    if status != NativeStatus.OK:
        raise TypeError(f"operation {op} is not defined for dtype {dtype}")


class OptimizerKind(enum.IntEnum):
    """The rules of rd_optimizer_update; the numbers are those of the C header."""

    SGD = 0
    ADAM = 1
    ADAGRAD = 2
    RMSPROP = 3
    LAMB = 4


class OptimizerFlag(enum.IntFlag):
    """The flags of rd_optimizer_step; the numbers are those of the C header."""

    NONE = 0
    NESTEROV = 1
    DECOUPLED_DECAY = 2
    CENTERED = 4


@dataclass(frozen=True, slots=True)
class OptimizerRule:
    """What an optimizer does with an array, without the numbers that change from step to step. The meaning of `first`
    and `second` is that of rd_optimizer_step."""

    kind: OptimizerKind
    weight_decay: float = 0.0
    first: float = 0.0
    second: float = 0.0
    epsilon: float = 0.0
    flags: OptimizerFlag = OptimizerFlag.NONE


def update_parameters(
    rule: OptimizerRule,
    values: np.ndarray[Any, np.dtype[Any]],
    gradient: np.ndarray[Any, np.dtype[Any]],
    states: Sequence[np.ndarray[Any, np.dtype[Any]]],
    out: np.ndarray[Any, np.dtype[Any]],
    *,
    step: int,
    lr: float,
) -> None:
    """Compute one step of an optimizer: the new values go to `out`, which may be `values`, and the states are changed
    in place. All arrays are contiguous, and of one size and dtype, float32 or float64."""
    addresses = [address_of(state) for state in states]
    given = RdOptimizerStep(
        rule.kind,
        DType[values.dtype.name.upper()],
        rule.flags,
        0,
        values.size,
        step,
        address_of(values),
        address_of(gradient),
        address_of(out),
        (c_void_p * 3)(*addresses),
        lr,
        rule.weight_decay,
        rule.first,
        rule.second,
        rule.epsilon,
    )
    status = load_library().rd_optimizer_update(ctypes.byref(given))
    if status != NativeStatus.OK:
        raise NativeError(status)


class NativeError(Exception):
    """A status of the library other than OK; the native backend turns it into the error that the caller sees."""

    def __init__(
        self, status: int, member: int = -1, detail: int = 0, *, has_ended: bool = False, start_ns: int = 0
    ) -> None:
        super().__init__(f"status {status}, member {member}, detail {detail}")
        self.status = status
        self.member = member
        self.detail = detail
        self.has_ended = has_ended
        """Whether a call was under way and has ended. Otherwise it was refused, or only the wait for it has ended."""
        self.start_ns = start_ns


# --- an open channel -------------------------------------------------------------------------------------------------

NativeHandle: TypeAlias = int
"""The address of an rd_channel."""


def make_channel_params(
    hosts: Sequence[int],
    member_index: int,
    slot_bytes: int,
    chunk_bytes: int,
    bucket_bytes: int,
    fusion_bytes: int = 0,
    max_announced: int = 0,
) -> RdChannelParams:
    """`hosts` has the number of the host of each member."""
    num_cores = len(os.sched_getaffinity(0))
    host_numbers = (c_uint32 * len(hosts))(*hosts)
    sizes = (slot_bytes, chunk_bytes, bucket_bytes, fusion_bytes, max_announced)
    return RdChannelParams(ABI, len(hosts), member_index, num_cores, host_numbers, *sizes)


def open_channel(params: RdChannelParams, segment: int, events: int = -1, number: int = 0) -> NativeHandle:
    """Open a channel. `events` is the descriptor through which a channel between hosts asks for links, under its
    number; -1 if all members are on one host."""
    handle = c_void_p()
    status = load_library().rd_open(params, segment, events, number, ctypes.byref(handle))
    if status != NativeStatus.OK or handle.value is None:
        raise NativeError(status, detail=ctypes.get_errno())
    return handle.value


def open_link(handle: NativeHandle, member: int, kind: int, opened_here: bool, sockets: Sequence[int]) -> None:
    """Give sockets to a channel, which owns them from here on; a closed one closes them."""
    load_library().rd_open_link(handle, member, kind, opened_here, (c_int * len(sockets))(*sockets), len(sockets))


def make_allreduce_cache(handle: NativeHandle, **more: Any) -> hot_calls.AllreduceCache | None:
    """What runs repeated allreduces on this channel; None where the extension is missing or another version's."""
    if hot_calls is None or hot_calls.ABI != ABI:
        return None
    run = ctypes.cast(load_library().rd_run, c_void_p).value or 0
    return hot_calls.AllreduceCache(run=run, channel=handle, array_type=np.ndarray, empty_like=np.empty_like, **more)


def make_ready_counter(**more: Any) -> hot_calls.ReadyCounter | None:
    """What counts gradients, as training/ready_counter, but without Python; None as for make_allreduce_cache()."""
    if hot_calls is None or hot_calls.ABI != ABI:
        return None
    return hot_calls.ReadyCounter(**more)


def get_member_calls(handle: NativeHandle, num_members: int) -> list[tuple[int, str]]:
    """What each member asked for in this thread's last call that was a mismatch: the kind, and the description."""
    rows = (RdMemberCall * num_members)()
    load_library().rd_get_mismatch(handle, rows)
    return [(row.kind, row.description.decode(errors="replace")) for row in rows]


def get_current_call(handle: NativeHandle, num_members: int) -> CurrentCall | None:
    now = RdCurrentCall()
    missing = (c_uint32 * num_members)()
    load_library().rd_get_current_call(handle, ctypes.byref(now), missing)
    if now.start_ns == 0:
        return None
    sequence = -1 if now.kind in (OperationKind.SEND, OperationKind.RECEIVE) else now.sequence
    description = now.description.decode(errors="replace")
    kind = OperationKind(now.kind)
    return CurrentCall(kind, description, now.start_ns, tuple(missing[: now.num_missing]), sequence)


def announce_many(
    handle: NativeHandle, operations: Sequence[AnnouncedOperation], timeout_s: float, will_wait: bool
) -> tuple[int, bytes]:
    """Announce operations together. The handle of the calls, and per operation whether it was announced."""
    structs, number = thread_structs.own, len(operations)
    is_announced = ctypes.create_string_buffer(number + 1)
    status = load_library().rd_announce_many(
        handle,
        b"".join([ANNOUNCEMENT.pack(each.signature.hash, each.shared_id, len(each.spans)) for each in operations]),
        number,
        b"".join([SPAN.pack(span.input, span.output, span.count) for each in operations for span in each.spans]),
        timeout_s,
        will_wait,
        ctypes.addressof(is_announced),
        structs.work_address,
        structs.result_address,
    )
    if status != NativeStatus.OK:
        structs.timing_or_raise(status)
    assert structs.work.value is not None
    return structs.work.value, is_announced.raw[:number]


def get_announced(handle: NativeHandle, until_ns: int, max_calls: int) -> list[tuple[int, int]]:
    """The ids of calls that were announced until then and wait for other members, and when each was announced."""
    calls = (RdAnnounced * max_calls)()
    number = load_library().rd_get_announced(handle, until_ns, calls, max_calls)
    return [(call.id, call.announced_ns) for call in calls[:number]]


def get_not_announced(handle: NativeHandle, id: int, num_members: int) -> tuple[int, ...]:
    """The members that have not announced the id."""
    missing = (c_uint32 * num_members)()
    return tuple(missing[: load_library().rd_get_not_announced(handle, id, missing)])


def get_bucket(handle: NativeHandle, num_bytes: int) -> Memory:
    """The bucket memory of this member. It lives for as long as its owner is kept, even after the channel is closed."""
    if num_bytes == 0:
        return NO_MEMORY
    library = load_library()
    start = library.rd_get_bucket(handle)
    if start is None:
        raise NativeError(NativeStatus.CLOSED)
    memory = (ctypes.c_uint8 * num_bytes).from_address(start)
    weakref.finalize(memory, library.rd_release_bucket, start).atexit = False
    return Memory(start, (num_bytes,), "uint8", owner=memory)


# --- an endpoint for messages ----------------------------------------------------------------------------------------

EndpointHandle: TypeAlias = int


def open_endpoint(rank: int, num_ranks: int, num_local: int) -> EndpointHandle:
    """This rank's end of the links for messages, with none yet."""
    number = c_uint64()
    num_cores = len(os.sched_getaffinity(0))
    status = load_library().rd_open_endpoint(rank, num_ranks, num_local, num_cores, ctypes.byref(number))
    if status != NativeStatus.OK:
        raise NativeError(status)
    return number.value


def get_current_message(endpoint: EndpointHandle, context: int) -> tuple[OperationKind, str, int, int] | None:
    """The oldest message under way in a context: its kind and description, since when, and the rank it waits for, or
    -1."""
    now, missing = RdCurrentCall(), c_int32()
    load_library().rd_get_current_message(endpoint, context, ctypes.byref(now), ctypes.byref(missing))
    if now.start_ns == 0:
        return None
    return OperationKind(now.kind), now.description.decode(errors="replace"), now.start_ns, missing.value


class _ReceivedMemory:
    """The owner of memory of the library, which is freed with it."""

    __slots__ = ("_block", "_free")

    def __init__(self, block: int) -> None:
        self._block = block
        self._free = load_library().rd_free_received

    def __del__(self) -> None:
        self._free(self._block)


def take_received() -> tuple[bytes, Memory]:
    """The header and the bytes of what this thread's last call has received; after a mismatch, what the sender asked
    for and nothing."""
    received = RdReceived()
    load_library().rd_take_received(ctypes.byref(received))
    header = ctypes.string_at(received.header, received.header_bytes)
    if not received.block:
        return header, NO_MEMORY
    return header, Memory(received.data or 0, (received.bytes,), "uint8", owner=_ReceivedMemory(received.block))


def allocate_memory(num_bytes: int) -> Memory:
    """New memory, whose pages have most likely been used before: for arrays that are made anew in every step."""
    block = load_library().rd_allocate_memory(num_bytes)
    if not block:
        raise MemoryError(f"there is no memory for an array of {num_bytes} bytes")
    return Memory(block, (num_bytes,), "uint8", owner=_ReceivedMemory(block))


# --- the structs of a call -------------------------------------------------------------------------------------------

MAX_DESCRIPTIONS = 1024


MAX_ENDED = 128
"""Calls whose end is reported at once."""
NO_INDEX = 2**32 - 1
"""For rd_wait_one(): wait for no call."""


class EndedCalls:
    """Which of the calls that were announced together have ended, and their results."""

    def __init__(self) -> None:
        self._number = c_uint32()
        self._indices = (c_uint32 * MAX_ENDED)()
        self._results = ctypes.create_string_buffer(RD_RESULT.size * MAX_ENDED)
        self.addresses = tuple([ctypes.addressof(each) for each in (self._number, self._indices, self._results)])

    def take(self) -> list[tuple[int, CallTiming]]:
        """The indices of these calls, and their timings."""
        number = self._number.value
        if not number:
            return []
        results = RD_RESULT.iter_unpack(memoryview(self._results)[: number * RD_RESULT.size])
        return [(index, _make_timing(*result)) for index, result in zip(self._indices[:number], results, strict=True)]


def _make_timing(
    _status: int,
    _member: int,
    _detail: int,
    algorithm: int,
    start_ns: int,
    ready_ns: int,
    end_ns: int,
    sequence: int,
    arrived_ns: int,
) -> CallTiming:
    return CallTiming(start_ns, ready_ns, end_ns, ALGORITHMS[algorithm], sequence, arrived_ns)


class CallStructs:
    """A thread's own structs for a call and its result, filled for every call."""

    def __init__(self) -> None:
        self.call = ctypes.create_string_buffer(RD_CALL.size)
        self.call_address = ctypes.addressof(self.call)
        self.result = ctypes.create_string_buffer(RD_RESULT.size)
        self.result_address = ctypes.addressof(self.result)
        self.message = ctypes.create_string_buffer(RD_MESSAGE.size)
        self.message_address = ctypes.addressof(self.message)
        self.message_work = c_uint64()
        """Where rd_submit_message() writes the number of the message."""
        self.message_work_address = ctypes.addressof(self.message_work)
        self.work = c_void_p()
        """Where rd_submit() writes the handle of the submitted call."""
        self.work_address = ctypes.addressof(self.work)
        self.ended = EndedCalls()
        """Where rd_wait_one() writes which other calls have ended."""
        self._span = ctypes.create_string_buffer(SPAN.size)
        self._span_address = ctypes.addressof(self._span)
        self._last_call: Call | None = None
        """What self.call holds, if that is a call with one span and no more."""
        self._last_algorithm = 0
        self._descriptions: dict[str, tuple[c_char_p, int]] = {}

    def fill(self, call: Call, algorithm: int) -> object:
        """Write the call into the struct. The caller keeps what is returned until the library has read the struct."""
        spans = call.spans
        if len(spans) == 1:
            span = spans[0]
            SPAN.pack_into(self._span, 0, span.input, span.output, span.count)
            last = self._last_call
            # The most frequent case is the same call with other memory. Kind, dtype and options are those of the
            # signature that owns the description: the very same description is the very same signature.
            if (
                last is not None
                and call.description is last.description
                and call.kind is last.kind
                and call.dtype is last.dtype
                and call.signature_hash == last.signature_hash
                and call.peer == last.peer
                and call.pre_agreed == last.pre_agreed
                and call.counts is None
                and call.splits is None
                and self._last_algorithm == algorithm
            ):
                return None
        return self._fill_all_fields(call, algorithm)

    def fill_message(self, call: Call, context: int, peer: int) -> object:
        """Write a send or receive into the struct of messages; `peer` is a rank of the world. The caller keeps what is
        returned until the library has read the struct."""
        data = num_bytes = header_address = header_bytes = 0
        if call.spans:
            span = call.spans[0]
            data, num_bytes = span.input or span.output, span.count * call.dtype.num_bytes
        keep: list[object] = []
        if call.header is not None:
            header_address, header_bytes = _copy_bytes(keep, call.header), len(call.header)
        RD_MESSAGE.pack_into(
            self.message,
            0,
            context,
            call.kind,
            peer,
            call.tag,
            call.signature_hash,
            call.window_bytes,
            self._description_address(call.description),
            data,
            num_bytes,
            header_address,
            header_bytes,
            call.flags,
            0,
        )
        return keep

    def raise_error(self, status: int, result: bytes) -> None:
        """Raise the error of a call whose result struct has these bytes."""
        self.result.raw = result
        self.timing_or_raise(status)

    def timing_or_raise(self, status: int) -> CallTiming:
        """The timing of a call that succeeded, from the result struct; else NativeError, or what a signal raised."""
        _, _, _, algorithm, start_ns, ready_ns, end_ns, sequence, arrived_ns = self.result_or_raise(status)
        return CallTiming(start_ns, ready_ns, end_ns, ALGORITHMS[algorithm], sequence, arrived_ns)

    def has_ended(self) -> bool:
        """Whether the result struct is that of a call that has ended, and not only of a wait for it."""
        return bool(RD_RESULT.unpack_from(self.result)[6])

    def result_or_raise(self, status: int) -> tuple[int, ...]:
        """The fields of the result struct, if the call succeeded; else as timing_or_raise()."""
        result = RD_RESULT.unpack_from(self.result)
        if status != NativeStatus.OK:
            _, member, detail, _, start_ns, _, end_ns, _, _ = result
            raised = (c_void_p * 3)()
            if detail == errno.EINTR and load_library().rd_fetch_exception(raised):
                # What a signal handler raised while the library waited, such as KeyboardInterrupt: ctypes raises the
                # pending exception when a function of Python's own returns.
                restore = ctypes.pythonapi.PyErr_Restore
                restore.argtypes = (c_void_p, c_void_p, c_void_p)
                restore.restype = None
                restore(*raised)
            raise NativeError(status, member, detail, has_ended=end_ns != 0, start_ns=start_ns)
        return result

    def _fill_all_fields(self, call: Call, algorithm: int) -> object:
        spans = call.spans
        keep: list[object] = []
        spans_address = self._span_address
        if len(spans) != 1:
            packed = b"".join([SPAN.pack(span.input, span.output, span.count) for span in spans])
            spans_address = _copy_bytes(keep, packed)
        RD_CALL.pack_into(
            self.call,
            0,
            call.kind,
            call.dtype,
            call.op,
            algorithm if call.kind == OperationKind.ALLREDUCE else 0,
            PRE_AGREED if call.pre_agreed else 0,
            call.peer,
            call.prescale,
            call.postscale,
            call.signature_hash,
            self._description_address(call.description),
            spans_address,
            len(spans),
            0 if call.counts is None else _copy_bytes(keep, struct.pack(f"@{len(call.counts)}Q", *call.counts)),
            0 if call.splits is None else _copy_bytes(keep, struct.pack(f"@{len(call.splits)}Q", *call.splits)),
        )
        # Without the memory of the call, which must not be kept alive here.
        self._last_call = None if keep else msgspec.structs.replace(call, spans=(), owners=None)
        self._last_algorithm = algorithm
        return keep

    def _description_address(self, description: str) -> int:
        """The address of the text in C; most calls are made again and again."""
        found = self._descriptions.get(description)
        if found is None:
            if len(self._descriptions) >= MAX_DESCRIPTIONS:
                self._descriptions.clear()
                self._last_call = None  # self.call points to a description that is gone
            pointer = c_char_p(description.encode(errors="replace"))
            found = self._descriptions[description] = (pointer, ctypes.cast(pointer, c_void_p).value or 0)
        return found[1]


class _ThreadStructs(threading.local):
    """Python runs __init__ in each thread, at its first access."""

    def __init__(self) -> None:
        self.own = CallStructs()


thread_structs = _ThreadStructs()


class PendingCallbacks:
    """Functions that the library calls when submitted calls have ended, in its own threads; each once."""

    def __init__(self) -> None:
        self._functions: dict[int, Callable[[], None]] = {}
        self._ids = itertools.count(1)  # not 0: the library would hand on a null pointer, which is None here
        self._callback = RD_CALLBACK(self._call)

    def add(self, work: int, function: Callable[[], None]) -> bool:
        """Call the function when the call has ended. Returns False if it has: then the function is not called."""
        id = next(self._ids)
        self._functions[id] = function
        if load_library().rd_add_callback(work, self._callback, id):
            return True
        del self._functions[id]
        return False

    def _call(self, id: int, _result: int) -> None:
        self._functions.pop(id)()


pending_callbacks = PendingCallbacks()


def _copy_bytes(owners: list[object], data: bytes) -> int:
    """The address of a copy of the data that lives as long as the list."""
    memory = ctypes.create_string_buffer(data, max(1, len(data)))
    owners.append(memory)
    return ctypes.addressof(memory)
