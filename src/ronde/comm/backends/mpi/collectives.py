"""How each kind of call moves its data over MPI. Used by the mpi channel, once all members agreed on the call.

Only nonblocking MPI calls: every wait goes through `wait`, which knows deadlines and aborts. MPI counts elements in 32
bits, so long arrays are sent in pieces.

Results are those of the native kernels, and have equal bits on all members. MPI itself reduces only what every library
reduces in that way: sums and products of float32, float64 and integers of at least 32 bits, and bits of integers. (MPI
recommends that Iallreduce gives equal results on all ranks; Open MPI and MPICH follow that.) Everything else the
members reduce themselves, each one share of what all gave, so that nothing is rounded but the result: MPI has no 16-bit
floats and no means, a NaN may lose in its minimum, and Open MPI adds integers of 8 and 16 bits with saturation on some
processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ronde.comm.backends.native_library import reduce
from ronde.comm.backends.single_rank import scale
from ronde.comm.buffers import (
    NUMPY_DTYPES,
    Array,
    address_of,
    array_at,
    bfloat16_from_float32,
    float32_from_bfloat16,
)
from ronde.comm.call import Call, even_shares
from ronde.types import REDUCING_KINDS, ROOTED_KINDS, DType, Op, OperationKind, find_reduction_error

if TYPE_CHECKING:
    from mpi4py import MPI

SMALL_BYTES = 64 * 1024
"""So much of all members together is sent to everybody, and each reduces it by itself: that is one message in MPI."""

MAX_ELEMENTS_PER_CALL = 1 << 30
TAG_ALLTOALL = 5
"""Tags below are those of the channel's notices."""
TAG_ADASUM = 6


def num_elements(call: Call) -> int:
    return sum(span.count for span in call.spans)


def check_call(call: Call, size: int, member_index: int) -> None:
    """Raises ValueError for what no member can do, before anything is sent."""
    counts = call.counts or ()
    problem, fits = "", True
    if call.kind in REDUCING_KINDS:
        scaled = call.prescale != 1.0 or call.postscale != 1.0
        problem = find_reduction_error(call.kind, call.dtype, call.op, scaled=scaled)
    if call.kind in ROOTED_KINDS:
        fits = 0 <= call.peer < size
    if call.kind in (OperationKind.SEND, OperationKind.RECEIVE):
        fits = False  # messages have channels of their own
    elif call.kind in (OperationKind.GATHER, OperationKind.SCATTER):
        fits = fits and len(counts) == size and [counts[member_index]] == [span.count for span in call.spans]
    elif call.kind is OperationKind.REDUCE_SCATTER:
        fits = len(counts) == size and sum(counts) == num_elements(call)
    elif call.kind is OperationKind.ALLGATHER:
        fits = len(counts) == size and [counts[member_index]] == [span.count for span in call.spans]
    elif call.kind is OperationKind.ALLTOALL:
        fits = len(counts) == len(call.splits or ()) == size and len(call.spans) == 1
    if problem or not fits:
        raise ValueError(f"{call.description}: {problem or 'the arguments do not fit together'}")


class MpiCollectives:
    """The data of one call. `wait` returns when the requests are complete and raises when they never will be."""

    def __init__(self, comm: MPI.Intracomm, wait: Callable[[Sequence[MPI.Request]], None]) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._wait = wait
        self._member_index = comm.Get_rank()
        self._size = comm.Get_size()
        self._in_place = MPI.IN_PLACE
        self._ops = {
            Op.SUM: MPI.SUM,
            Op.MEAN: MPI.SUM,
            Op.PRODUCT: MPI.PROD,
            Op.BIT_AND: MPI.BAND,
            Op.BIT_OR: MPI.BOR,
            Op.BIT_XOR: MPI.BXOR,
        }

    def run(self, call: Call) -> None:
        match call.kind:
            case OperationKind.ALLREDUCE:
                source = self._direct_source(call)
                self.allreduce(call, _working_memory(call, filled=source is None), source)
            case OperationKind.ALLGATHER:
                self._allgather(call)
            case OperationKind.BROADCAST:
                data = _working_memory(call, filled=self._member_index == call.peer)
                self._broadcast(data, call.peer)
                _write_spans(call, data)
            case OperationKind.REDUCE_SCATTER:
                self._reduce_scatter(call)
            case OperationKind.ALLTOALL:
                self._alltoall(call)
            case OperationKind.REDUCE:
                self._reduce(call)
            case OperationKind.GATHER:
                self._gather(call)
            case OperationKind.SCATTER:
                self._scatter(call)

    # --- reductions ---------------------------------------------------------------------------------------------

    def _direct_source(self, call: Call) -> Array | None:
        """The input, if MPI can read it where it is; None if it has to be copied first."""
        if len(call.spans) != 1 or call.prescale != 1.0 or not self._is_known_to_mpi(call):
            return None
        (span,) = call.spans
        source, target = (array_at(start, span.count, call.dtype.numpy) for start in (span.input, span.output))
        return None if np.may_share_memory(source, target) else _to_wire(call, source)

    def allreduce(self, call: Call, data: Array, source: Array | None = None) -> None:
        """Reduce the data of all members, which is overwritten, into the outputs of the call. The data of this one is
        in `source` if that is given."""
        if call.op is Op.ADASUM:
            data = self._adasum(call, data)
        elif self._is_known_to_mpi(call):
            wire = _to_wire(call, data)
            for piece in _pieces(len(wire)):
                given = self._in_place if source is None else source[piece]
                self._wait([self._comm.Iallreduce(given, wire[piece], self._ops[call.op])])
            data = self._from_wire(call, wire)
        elif data.nbytes * self._size <= SMALL_BYTES:
            rows = np.empty((self._size, len(data)), data.dtype)
            self._wait([self._comm.Iallgather(_as_unsigned(data), _as_unsigned(rows.reshape(-1)))])
            scales = {"prescale": call.prescale, "postscale": call.postscale}
            reduce(call.dtype, call.op, [address_of(row) for row in rows], [address_of(data)], len(data), **scales)
        else:
            counts = even_shares(len(data), self._size)
            own = data[_starts(counts)[self._member_index] :][: counts[self._member_index]]
            self._reduce_share(call, data, counts, own)
            self._gather_shares(data, counts)
        _write_spans(call, data)

    def _reduce_scatter(self, call: Call) -> None:
        data, counts = _read_spans(call), call.counts
        assert counts is not None
        own = array_at(call.spans[0].output, counts[self._member_index], call.dtype.numpy)
        if self._is_known_to_mpi(call) and len(data) <= MAX_ELEMENTS_PER_CALL:
            wire = _to_wire(call, data)
            share = np.empty(len(own), wire.dtype)
            self._wait([self._comm.Ireduce_scatter(wire, share, counts, self._ops[call.op])])
            own[:] = self._from_wire(call, share)
        else:
            self._reduce_share(call, data, counts, own)

    def _reduce(self, call: Call) -> None:
        data, root = _read_spans(call), call.peer
        is_root = self._member_index == root
        if self._is_known_to_mpi(call):
            wire = _to_wire(call, data)
            result = np.empty_like(wire) if is_root else None
            for piece in _pieces(len(wire)):
                to = None if result is None else result[piece]
                self._wait([self._comm.Ireduce(wire[piece], to, self._ops[call.op], root)])
            if result is not None:
                _write_spans(call, self._from_wire(call, result))
            return
        counts = even_shares(len(data), self._size)
        own = np.empty(counts[self._member_index], data.dtype)
        self._reduce_share(call, data, counts, own)
        gathered = np.empty(len(data) if is_root else 0, data.dtype)
        self._send_to_root(own, gathered, counts, root)
        if is_root:
            _write_spans(call, gathered)

    def _is_known_to_mpi(self, call: Call) -> bool:
        if call.dtype.is_float:
            return call.op in self._ops and call.dtype in (DType.FLOAT32, DType.FLOAT64)
        if call.op.is_bitwise:
            return call.dtype is not DType.BOOL  # any byte but 0 is true
        return call.op in (Op.SUM, Op.PRODUCT) and call.dtype.num_bytes >= 4

    def _from_wire(self, call: Call, wire: Array) -> Array:
        data, factor = wire.view(call.dtype.numpy), call.postscale
        if call.op is Op.MEAN:
            factor /= self._size
        return data if factor == 1.0 else scale(data, call.dtype, factor, out=data)

    def _reduce_share(self, call: Call, data: Array, counts: Sequence[int], out: Array) -> None:
        """Send to each member its share of the data, and reduce the own share of all members into `out`."""
        received = np.empty((self._size, len(out)), data.dtype)
        self._exchange(data, counts, received.reshape(-1), [len(out)] * self._size)
        inputs, scales = [address_of(row) for row in received], {"prescale": call.prescale, "postscale": call.postscale}
        reduce(call.dtype, call.op, inputs, [address_of(out)], len(out), **scales)

    def _adasum(self, call: Call, data: Array) -> Array:
        """Members beyond the largest power of two are combined with the first ones, then neighbours at distance 1, 2,
        4, …, the lower one keeping the result, until member 0 has it and broadcasts it. Each combination is computed
        once, so that different processors cannot come to different bits. Each array has its own weights."""
        if call.dtype is DType.FLOAT16:
            data = data.astype(np.float32)
        elif call.dtype is DType.BFLOAT16:
            data = float32_from_bfloat16(data)
        if call.prescale != 1.0:
            data = scale(data, NUMPY_DTYPES[data.dtype], call.prescale)
        me, full = self._member_index, 1 << (self._size.bit_length() - 1)
        counts = [span.count for span in call.spans]
        if me >= full:
            self._move(self._comm.Isend, data, me - full, TAG_ADASUM)
        elif me + full < self._size:
            self._combine_adasum(data, me + full, counts)
        distance = 1
        while distance < full and me < full:
            if me % (2 * distance):
                self._move(self._comm.Isend, data, me - distance, TAG_ADASUM)
                break
            self._combine_adasum(data, me + distance, counts)
            distance *= 2
        self._broadcast(data, 0)
        if call.postscale != 1.0:
            data = scale(data, NUMPY_DTYPES[data.dtype], call.postscale)
        if call.dtype is DType.FLOAT16:
            with np.errstate(all="ignore"):
                return data.astype(np.float16)
        return bfloat16_from_float32(data) if call.dtype is DType.BFLOAT16 else data

    def _combine_adasum(self, data: Array, peer: int, counts: Sequence[int]) -> None:
        other = np.empty_like(data)
        self._move(self._comm.Irecv, other, peer, TAG_ADASUM)
        ends = np.cumsum(counts)[:-1]
        for own_array, other_array in zip(np.split(data, ends), np.split(other, ends), strict=True):
            combine_adasum(own_array, other_array)

    # --- data that only moves -----------------------------------------------------------------------------------

    def _allgather(self, call: Call) -> None:
        counts = call.counts
        assert counts is not None
        start, count = sum(counts[: self._member_index]), counts[self._member_index]
        target = array_at(call.spans[0].output, sum(counts), call.dtype.numpy)
        # NumPy copies correctly where the two overlap; MPI would not.
        target[start : start + count] = array_at(call.spans[0].input, count, call.dtype.numpy)
        self._gather_shares(target, counts)

    def _gather_shares(self, data: Array, counts: Sequence[int]) -> None:
        if len(data) <= MAX_ELEMENTS_PER_CALL:
            self._wait([self._comm.Iallgatherv(self._in_place, [_as_unsigned(data), (counts, _starts(counts))])])
            return
        for member, start in enumerate(_starts(counts)):
            self._broadcast(data[start : start + counts[member]], member)

    def _alltoall(self, call: Call) -> None:
        counts, splits = call.counts, call.splits
        assert counts is not None and splits is not None
        source = array_at(call.spans[0].input, sum(splits), call.dtype.numpy)
        target = array_at(call.spans[0].output, sum(counts), call.dtype.numpy)
        self._exchange(source.copy() if np.may_share_memory(source, target) else source, splits, target, counts)

    def _gather(self, call: Call) -> None:
        counts = call.counts
        assert counts is not None
        (span,), is_root = call.spans, self._member_index == call.peer
        source = array_at(span.input, span.count, call.dtype.numpy)
        target = array_at(span.output, sum(counts) if is_root else 0, call.dtype.numpy)
        self._send_to_root(source, target, counts, call.peer)

    def _send_to_root(self, source: Array, target: Array, counts: Sequence[int], root: int) -> None:
        """Send everything to the root, which receives counts[i] elements from member i."""
        splits = [len(source) if member == root else 0 for member in range(self._size)]
        self._exchange(source, splits, target, counts if self._member_index == root else [0] * self._size)

    def _scatter(self, call: Call) -> None:
        counts = call.counts
        assert counts is not None
        (span,), is_root = call.spans, self._member_index == call.peer
        source = array_at(span.input, sum(counts) if is_root else 0, call.dtype.numpy)
        target = array_at(span.output, span.count, call.dtype.numpy)
        from_root = [span.count if member == call.peer else 0 for member in range(self._size)]
        self._exchange(source, counts if is_root else [0] * self._size, target, from_root)

    def _exchange(self, source: Array, splits: Sequence[int], target: Array, counts: Sequence[int]) -> None:
        # Pairs, not Ialltoallv: whether everything fits in 32-bit counts differs from member to member.
        source, target, requests = _as_unsigned(source), _as_unsigned(target), []
        source_starts, target_starts = _starts(splits), _starts(counts)
        for distance in range(self._size):
            sender = (self._member_index - distance) % self._size
            receiver = (self._member_index + distance) % self._size
            received = target[target_starts[sender] :][: counts[sender]]
            sent = source[source_starts[receiver] :][: splits[receiver]]
            requests += [self._comm.Irecv(received[p], sender, TAG_ALLTOALL) for p in _pieces(counts[sender])]
            requests += [self._comm.Isend(sent[p], receiver, TAG_ALLTOALL) for p in _pieces(splits[receiver])]
        self._wait(requests)

    def _move(self, move: Callable[[Array, int, int], MPI.Request], data: Array, peer: int, tag: int) -> None:
        self._wait([move(_as_unsigned(data)[piece], peer, tag) for piece in _pieces(len(data))])

    def _broadcast(self, data: Array, root: int) -> None:
        for piece in _pieces(len(data)):
            self._wait([self._comm.Ibcast(_as_unsigned(data)[piece], root)])


def _pieces(count: int) -> Iterator[slice]:
    return (slice(start, min(start + MAX_ELEMENTS_PER_CALL, count)) for start in range(0, count, MAX_ELEMENTS_PER_CALL))


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _as_unsigned(data: Array) -> Array:
    """The same bits as unsigned integers, which MPI libraries know; they do not know float16 and the like."""
    return data.view(f"u{data.itemsize}")


# --- the memory of a call --------------------------------------------------------------------------------------------


def _read_spans(call: Call) -> Array:
    """The inputs of all spans as one array: a view when there is one span, else a copy."""
    sources = [array_at(span.input, span.count, call.dtype.numpy) for span in call.spans]
    if len(sources) == 1:
        return sources[0]
    return np.concatenate(sources) if sources else np.empty(0, call.dtype.numpy)


def _working_memory(call: Call, *, filled: bool) -> Array:
    """One array for all spans that may be overwritten: the output when there is one span, else new memory. Filled with
    the inputs if that is wanted."""
    if len(call.spans) != 1:
        return _read_spans(call) if filled else np.empty(num_elements(call), call.dtype.numpy)
    (span,) = call.spans
    data = array_at(span.output, span.count, call.dtype.numpy)
    if filled and span.input != span.output:
        data[:] = array_at(span.input, span.count, call.dtype.numpy)
    return data


def _write_spans(call: Call, data: Array) -> None:
    """Copy the data to the outputs of all spans, except where it is already there."""
    start = 0
    for span in call.spans:
        piece = data[start : start + span.count]
        if span.count and address_of(piece) != span.output:
            array_at(span.output, span.count, call.dtype.numpy)[:] = piece
        start += span.count


def _to_wire(call: Call, data: Array) -> Array:
    """The array that MPI reduces. Integers go as unsigned ones, where overflow is defined: it wraps."""
    data = data if call.prescale == 1.0 else scale(data, call.dtype, call.prescale)
    return data if call.dtype.is_float else _as_unsigned(data)


BLOCK_ELEMENTS = 1 << 16
"""Elements that Adasum turns into doubles at a time."""
MIN_SQUARE = 2.0**-511
"""Below this a vector's square has no precision left to divide by."""


def combine_adasum(a: Array, b: Array) -> None:
    """Write the Adasum of a and b (float32 or float64) into a: the sum, with half of the overlap taken from each."""
    dots = np.zeros(3)
    blocks = [slice(start, start + BLOCK_ELEMENTS) for start in range(0, len(a), BLOCK_ELEMENTS)]
    with np.errstate(all="ignore"):
        for block in blocks:
            x, y = a[block].astype(np.float64), b[block].astype(np.float64)
            dots += (np.dot(x, y), np.dot(x, x), np.dot(y, y))
        weight_a, weight_b = (1.0 - dots[0] / (2.0 * dot) if dot >= MIN_SQUARE else 1.0 for dot in dots[1:])
        for block in blocks:
            a[block] = weight_a * a[block].astype(np.float64) + weight_b * b[block].astype(np.float64)
