"""One open channel of the C++ data plane, in Python's terms. Used by comm/native, which adds who, when and why."""

from __future__ import annotations

import ctypes
import errno
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_int, c_uint32, c_uint64, c_void_p

import msgspec
import numpy as np

from ronde.comm._native import (
    ABI,
    ALGORITHMS,
    CALL,
    PRE_AGREED,
    RESULT,
    SPAN,
    NativeAsked,
    NativeLayout,
    NativeNow,
    Status,
    library,
)
from ronde.comm.backend import Call, Looking, Outcome
from ronde.types import Deadline, Kind

__all__ = ["Ending", "Handle", "Layout"]


class Layout:
    """Who the members of a channel are and where they sit."""

    def __init__(
        self, *, places: Sequence[int], me: int, num_cores: int, slot_bytes: int, chunk_bytes: int, bucket_bytes: int
    ) -> None:
        self.places = tuple(places)
        self.local = tuple(index for index, place in enumerate(places) if place == places[me])
        """Members at my place."""
        numbers = (c_uint32 * len(places))(*places)
        slot_bytes, chunk_bytes = slot_bytes // 64 * 64, chunk_bytes // 64 * 64
        self.native = NativeLayout(ABI, len(places), me, num_cores, numbers, slot_bytes, chunk_bytes, bucket_bytes)

    def segment_bytes(self) -> int:
        """Bytes of shared memory that my place needs."""
        num_bytes: int = library().rd_segment_bytes(self.native)
        return num_bytes


class Ending(Exception):
    """How a call ended when it did not end well; comm/native turns it into the error the caller sees."""

    def __init__(self, status: int, member: int = -1, detail: int = 0, *, waiting: bool = False) -> None:
        super().__init__(f"status {status}, member {member}, detail {detail}")
        self.status = status
        self.member = member
        self.detail = detail
        self.waiting = waiting
        """Only the wait ran out of time: the call is still under way."""


class _Scratch(threading.local):
    """A thread's own structs, filled anew for every call."""

    def __init__(self) -> None:
        self.part = ctypes.create_string_buffer(SPAN.size)
        self.part_at = ctypes.addressof(self.part)
        self.call = ctypes.create_string_buffer(CALL.size)
        self.call_at = ctypes.addressof(self.call)
        self.result = ctypes.create_string_buffer(RESULT.size)
        self.result_at = ctypes.addressof(self.result)
        self.last: Call | None = None  # what self.call holds, when it is a call with one part and no more
        self.last_algorithm = 0
        self.texts: dict[str, tuple[c_char_p, int]] = {}

    def text_at(self, text: str) -> int:
        """Address of a call's text in C; most calls are made again and again."""
        found = self.texts.get(text)
        if found is None:
            if len(self.texts) >= MOST_TEXTS:
                self.texts.clear()
            pointer = c_char_p(text.encode(errors="replace"))
            found = self.texts[text] = (pointer, ctypes.cast(pointer, c_void_p).value or 0)
        return found[1]


MOST_TEXTS = 1024
SLICE_S = 0.2
_scratch = _Scratch()


class Handle:
    """An open channel of the library. The caller sees to it that nothing is called after or during close()."""

    def __init__(
        self,
        layout: Layout,
        segment: int,
        sockets: Mapping[int, Sequence[int]],
        direct: Mapping[int, int],
        algorithm: str,
    ) -> None:
        """Takes over the descriptors in sockets (the alarm first, then data; as many for each member) and direct."""
        self._library = library()
        self._num_members = len(layout.places)
        self._algorithm = ALGORITHMS.index(algorithm)
        num_sockets = max((len(row) for row in sockets.values()), default=0)
        table = (c_int * (self._num_members * num_sockets or 1))(*[-1] * (self._num_members * num_sockets))
        for member, row in sockets.items():
            table[member * num_sockets : (member + 1) * num_sockets] = [*row]
        ones = (c_int * self._num_members)(*[direct.get(member, -1) for member in range(self._num_members)])
        handle = c_void_p()
        status = self._library.rd_open(layout.native, segment, table, num_sockets, ones, ctypes.byref(handle))
        if status != Status.OK:
            raise Ending(status)
        self._handle = handle

    def run(self, call: Call, left_s: float) -> Outcome:
        """Execute the call and wait for it."""
        scratch = _scratch
        keep = self._fill(scratch, call)
        status = self._library.rd_run(self._handle, scratch.call_at, scratch.result_at, left_s)
        del keep
        return _outcome(status, scratch)

    def submit(self, call: Call, left_s: float) -> int:
        """Queue the call; the number is for wait() and done()."""
        scratch = _scratch
        keep = self._fill(scratch, call)
        number = c_uint64()
        status = self._library.rd_submit(self._handle, scratch.call_at, left_s, ctypes.byref(number))
        del keep
        if status != Status.OK:
            raise Ending(status)
        return number.value

    def wait(self, number: int, left_s: float) -> Outcome:
        """Wait for a queued call and forget it. In slices, between which Python looks for signals."""
        scratch, deadline = _scratch, Deadline(left_s)
        while True:
            slice_s = min(SLICE_S, deadline.left_s)
            status = self._library.rd_wait(self._handle, number, scratch.result_at, slice_s)
            try:
                return _outcome(status, scratch)
            except Ending as ending:
                if not ending.waiting or deadline.passed:
                    raise

    def done(self, number: int) -> bool:
        """Whether a queued call has ended."""
        return bool(self._library.rd_done(self._handle, number))

    def asked(self) -> list[str]:
        """What each member asked for in this thread's last call that was a mismatch."""
        rows = (NativeAsked * self._num_members)()
        self._library.rd_get_mismatch(self._handle, rows)
        return [row.description.decode(errors="replace") for row in rows]

    def look(self) -> Looking | None:
        """The call under way, or None when idle."""
        now = NativeNow()
        missing = (c_uint32 * self._num_members)()
        self._library.rd_get_current_call(self._handle, ctypes.byref(now), missing)
        if now.start_ns == 0:
            return None
        number = -1 if now.kind in (Kind.SEND, Kind.RECEIVE) else now.sequence
        return Looking(
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

    def _fill(self, scratch: _Scratch, call: Call) -> object:
        """Put the call into the thread's struct. Returns what must live until the library has read it."""
        parts = call.parts
        if len(parts) == 1:
            part = parts[0]
            SPAN.pack_into(scratch.part, 0, part.source, part.target, part.count)
            last = scratch.last
            if last is not None and _alike(call, last) and scratch.last_algorithm == self._algorithm:
                return None  # as so often: the same again, with other memory
        return self._fill_anew(scratch, call)

    def _fill_anew(self, scratch: _Scratch, call: Call) -> object:
        parts = call.parts
        keep: list[object] = []
        if len(parts) == 1:
            parts_at = scratch.part_at
        else:
            parts_at = _keep(keep, b"".join([SPAN.pack(part.source, part.target, part.count) for part in parts]))
        CALL.pack_into(
            scratch.call,
            0,
            call.kind,
            call.dtype,
            call.op,
            self._algorithm if call.kind == Kind.ALLREDUCE else 0,
            PRE_AGREED if call.trusted else 0,
            call.peer,
            call.prescale,
            call.postscale,
            call.signature,
            scratch.text_at(call.text),
            parts_at,
            len(parts),
            0 if call.counts is None else _keep(keep, struct.pack(f"@{len(call.counts)}Q", *call.counts)),
            0 if call.splits is None else _keep(keep, struct.pack(f"@{len(call.splits)}Q", *call.splits)),
        )
        # Without the memory behind the call, which must not be kept.
        scratch.last = None if keep else msgspec.structs.replace(call, parts=(), keep=None)
        scratch.last_algorithm = self._algorithm
        return keep


def _alike(call: Call, last: Call) -> bool:
    """Whether two calls differ in nothing but their memory. Kind, dtype and options are of the form that owns the text:
    the very same text is the very same form."""
    return (
        call.text is last.text
        and call.kind is last.kind
        and call.dtype is last.dtype
        and call.signature == last.signature
        and call.peer == last.peer
        and call.trusted == last.trusted
        and call.counts is None
        and call.splits is None
    )


def _keep(keep: list[object], data: bytes) -> int:
    """Address of a copy of the data that lives as long as the list."""
    memory = ctypes.create_string_buffer(data, max(1, len(data)))
    keep.append(memory)
    return ctypes.addressof(memory)


def _outcome(status: int, scratch: _Scratch) -> Outcome:
    _, member, detail, algorithm, start_ns, ready_ns, end_ns = RESULT.unpack_from(scratch.result)
    if status != Status.OK:
        if detail == errno.EINTR:
            _raise_again()
        raise Ending(status, member, detail, waiting=status == Status.TIMEOUT and end_ns == 0)
    return Outcome(start_ns, ready_ns, end_ns, ALGORITHMS[algorithm])


def _raise_again() -> None:
    """Raise what a signal handler raised while the library waited, such as KeyboardInterrupt."""
    raised = (c_void_p * 3)()
    if library().rd_fetch_exception(raised):
        restore = ctypes.pythonapi.PyErr_Restore
        restore.argtypes = (c_void_p, c_void_p, c_void_p)
        restore.restype = None
        restore(*raised)  # ctypes raises what is set when a function of Python's own returns
