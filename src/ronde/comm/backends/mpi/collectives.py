"""How each kind of call moves its data over MPI. Used by the mpi channel, once all members agreed on the call.

Only nonblocking MPI calls: every wait goes through `wait`, which knows deadlines and aborts. MPI counts elements in 32
bits, so long arrays are sent in pieces.

Members get equal bits: results are computed once and copied, or by Iallreduce, for which MPI only recommends equal
results on all ranks; Open MPI and MPICH follow that for the operations used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ronde.comm.backends.mpi.reduction import combine_adasum, from_wire, to_wire, wire_op
from ronde.comm.buffers import Array, address_of, array_at
from ronde.comm.call import Call
from ronde.types import DType, Op, OperationKind, find_reduction_error

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_ELEMENTS_PER_CALL = 1 << 30
TAG_DATA = 4
"""Data of send and receive; tags below are those of the channel's headers and notices."""
TAG_ALLTOALL = 5
TAG_ADASUM = 6

WaitForRequests = Callable[["Sequence[MPI.Request]"], None]


class MpiCollectives:
    """The data of one call. `wait` returns when the requests are complete and raises when they never will be."""

    def __init__(self, comm: MPI.Intracomm, wait: WaitForRequests) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._wait = wait
        self._member_index = comm.Get_rank()
        self._size = comm.Get_size()
        self._in_place = MPI.IN_PLACE
        self._ops = {Op.SUM: MPI.SUM, Op.MIN: MPI.MIN, Op.MAX: MPI.MAX, Op.PRODUCT: MPI.PROD}

    def run(self, call: Call) -> None:
        run_by_kind = {
            OperationKind.ALLREDUCE: self._allreduce,
            OperationKind.ALLGATHER: self._allgather,
            OperationKind.BROADCAST: self._broadcast,
            OperationKind.REDUCE_SCATTER: self._reduce_scatter,
            OperationKind.ALLTOALL: self._alltoall,
            OperationKind.SEND: self._send,
            OperationKind.RECEIVE: self._receive,
        }
        if call.kind in run_by_kind:  # a barrier has no data
            run_by_kind[call.kind](call)

    def allreduce_zeros(self, call: Call, count: int) -> None:
        """Take part in an allreduce of the others, for a member that has joined."""
        self._reduce(call, np.zeros(count, call.dtype.numpy), None)

    # --- reductions ---------------------------------------------------------------------------------------------

    def _allreduce(self, call: Call) -> None:
        data, target = _read_spans(call), None
        if len(call.spans) == 1 and call.spans[0].input != call.spans[0].output:
            target = _array_at(call.spans[0].output, call.spans[0].count, call.dtype)
            data = data.copy() if np.may_share_memory(data, target) else data
        _write_spans(call, self._reduce(call, data, target))

    def _reduce(self, call: Call, data: Array, target: Array | None) -> Array:
        """The reduction of the data of all members, in `target` when there is one, else possibly in that of `data`."""
        wire = to_wire(data, call.dtype, call.op, call.prescale)
        must_keep = target is not None and np.may_share_memory(wire, data)
        if call.op is Op.ADASUM:
            wire = wire.copy() if must_keep else wire
            self._adasum(wire, [span.count for span in call.spans])
        elif must_keep and target is not None:
            result = target.view(wire.dtype)
            self._allreduce_array(call, wire, result)
            wire = result
        else:
            self._allreduce_array(call, None, wire)
        return from_wire(wire, call.dtype, call.op, call.postscale, self._size)

    def _allreduce_array(self, call: Call, source: Array | None, result: Array) -> None:
        op = self._ops[wire_op(call.dtype, call.op)]
        for piece in _pieces(len(result)):
            given = self._in_place if source is None else source[piece]
            self._wait([self._comm.Iallreduce(given, result[piece], op)])

    def _adasum(self, data: Array, counts: Sequence[int]) -> None:
        # Members beyond the largest power of two are combined with the first ones. Then neighbours at distance 1, 2, 4,
        # … are combined, the lower one keeping the result, until member 0 has it and broadcasts it. Each combination is
        # computed once, so that different processors cannot come to different bits. Each array has its own weights.
        full = 1 << (self._size.bit_length() - 1)
        if self._member_index >= full:
            self._send_or_receive(data, self._member_index - full, sending=True)
        elif self._member_index + full < self._size:
            self._combine_adasum(data, self._member_index + full, counts)
        distance = 1
        while distance < full and self._member_index < full:
            if self._member_index % (2 * distance):
                self._send_or_receive(data, self._member_index - distance, sending=True)
                break
            self._combine_adasum(data, self._member_index + distance, counts)
            distance *= 2
        self._broadcast_data(data, 0)

    def _combine_adasum(self, data: Array, peer: int, counts: Sequence[int]) -> None:
        other = np.empty_like(data)
        self._send_or_receive(other, peer, sending=False)
        ends = np.cumsum(counts)[:-1]
        for own_array, other_array in zip(np.split(data, ends), np.split(other, ends), strict=True):
            combine_adasum(own_array, other_array)

    def _reduce_scatter(self, call: Call) -> None:
        counts = call.counts
        assert counts is not None
        wire = to_wire(_read_spans(call), call.dtype, call.op, call.prescale)
        op = self._ops[wire_op(call.dtype, call.op)]
        own = np.empty(counts[self._member_index], wire.dtype)
        if len(wire) <= MAX_ELEMENTS_PER_CALL:
            self._wait([self._comm.Ireduce_scatter(wire, own, counts, op)])
        else:
            for member, start in enumerate(_starts(counts)):
                for piece in _pieces(counts[member]):
                    share = wire[start : start + counts[member]][piece]
                    received = own[piece] if member == self._member_index else None
                    self._wait([self._comm.Ireduce(share, received, op, member)])
        result = from_wire(own, call.dtype, call.op, call.postscale, self._size)
        _array_at(call.spans[0].output, len(own), call.dtype)[:] = result

    # --- data that only moves -----------------------------------------------------------------------------------

    def _broadcast(self, call: Call) -> None:
        if self._member_index == call.peer:
            data = _read_spans(call)
        elif len(call.spans) == 1:
            data = _array_at(call.spans[0].output, call.spans[0].count, call.dtype)
        else:
            data = np.empty(sum(span.count for span in call.spans), call.dtype.numpy)
        self._broadcast_data(data, call.peer)
        _write_spans(call, data)

    def _allgather(self, call: Call) -> None:
        counts = call.counts
        assert counts is not None
        starts = _starts(counts)
        target = _as_unsigned(_array_at(call.spans[0].output, sum(counts), call.dtype))
        own = target[starts[self._member_index] :][: counts[self._member_index]]
        # NumPy copies correctly where the two overlap; MPI would not.
        own[:] = _as_unsigned(_array_at(call.spans[0].input, counts[self._member_index], call.dtype))
        if len(target) <= MAX_ELEMENTS_PER_CALL:
            self._wait([self._comm.Iallgatherv(self._in_place, [target, (counts, starts)])])
            return
        for member, start in enumerate(starts):
            self._broadcast_data(target[start : start + counts[member]], member)

    def _alltoall(self, call: Call) -> None:
        # Pairs, not Ialltoallv: whether everything fits in 32-bit counts differs from member to member.
        counts, splits = call.counts, call.splits
        assert counts is not None and splits is not None
        source = _as_unsigned(_array_at(call.spans[0].input, sum(splits), call.dtype))
        target = _as_unsigned(_array_at(call.spans[0].output, sum(counts), call.dtype))
        if np.may_share_memory(source, target):
            source = source.copy()
        requests = []
        for distance in range(self._size):
            sender = (self._member_index - distance) % self._size
            receiver = (self._member_index + distance) % self._size
            received = target[_starts(counts)[sender] :][: counts[sender]]
            sent = source[_starts(splits)[receiver] :][: splits[receiver]]
            requests += [self._comm.Irecv(received[p], sender, TAG_ALLTOALL) for p in _pieces(counts[sender])]
            requests += [self._comm.Isend(sent[p], receiver, TAG_ALLTOALL) for p in _pieces(splits[receiver])]
        self._wait(requests)

    def _send(self, call: Call) -> None:
        self._send_or_receive(_read_spans(call), call.peer, sending=True, tag=TAG_DATA)

    def _receive(self, call: Call) -> None:
        data = np.empty(sum(span.count for span in call.spans), call.dtype.numpy)
        if len(call.spans) == 1:
            data = _array_at(call.spans[0].output, call.spans[0].count, call.dtype)
        self._send_or_receive(data, call.peer, sending=False, tag=TAG_DATA)
        _write_spans(call, data)

    def _send_or_receive(self, data: Array, peer: int, *, sending: bool, tag: int = TAG_ADASUM) -> None:
        move = self._comm.Isend if sending else self._comm.Irecv
        self._wait([move(_as_unsigned(data)[piece], peer, tag) for piece in _pieces(len(data))])

    def _broadcast_data(self, data: Array, root: int) -> None:
        for piece in _pieces(len(data)):
            self._wait([self._comm.Ibcast(_as_unsigned(data)[piece], root)])


def check_call(call: Call, size: int, member_index: int) -> None:
    """Raises ValueError for what no member can do, before anything is sent."""
    name = call.description or call.kind.name.lower()
    if call.kind in (OperationKind.ALLREDUCE, OperationKind.REDUCE_SCATTER):
        scaled = call.prescale != 1.0 or call.postscale != 1.0
        if problem := find_reduction_error(call.kind, call.dtype, call.op, scaled=scaled):
            raise ValueError(f"{name}: {problem}")
    if call.kind in (OperationKind.BROADCAST, OperationKind.SEND, OperationKind.RECEIVE) and not 0 <= call.peer < size:
        raise ValueError(f"{name}: peer must be from 0 to {size - 1}, got {call.peer}")
    if call.kind not in (OperationKind.ALLGATHER, OperationKind.REDUCE_SCATTER, OperationKind.ALLTOALL):
        return
    if call.counts is None or len(call.counts) != size:
        raise ValueError(f"{name}: counts must have {size} entries, one per member, got {call.counts}")
    if call.kind is OperationKind.ALLTOALL and (call.splits is None or len(call.splits) != size):
        raise ValueError(f"{name}: splits must have {size} entries, one per member, got {call.splits}")
    if call.kind is OperationKind.REDUCE_SCATTER and sum(span.count for span in call.spans) != sum(call.counts):
        raise ValueError(f"{name}: counts {call.counts} do not add up to the number of elements")
    if call.kind is not OperationKind.REDUCE_SCATTER and len(call.spans) != 1:
        raise ValueError(f"{name}: takes one span, got {len(call.spans)}")
    if call.kind is OperationKind.ALLGATHER and call.spans[0].count != call.counts[member_index]:
        raise ValueError(f"{name}: gives {call.spans[0].count} elements, but counts say {call.counts[member_index]}")


def _pieces(count: int) -> Iterator[slice]:
    return (slice(start, min(start + MAX_ELEMENTS_PER_CALL, count)) for start in range(0, count, MAX_ELEMENTS_PER_CALL))


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _array_at(start: int, count: int, dtype: DType) -> Array:
    return array_at(start, count, dtype.numpy)


def _as_unsigned(data: Array) -> Array:
    """The same bits as unsigned integers, which MPI libraries know; they do not know float16 and the like."""
    return data.view(f"u{data.itemsize}")


def _read_spans(call: Call) -> Array:
    """The inputs of all spans as one array: a view when there is one span, else a copy."""
    sources = [_array_at(span.input, span.count, call.dtype) for span in call.spans]
    if len(sources) == 1:
        return sources[0]
    return np.concatenate(sources) if sources else np.empty(0, call.dtype.numpy)


def _write_spans(call: Call, data: Array) -> None:
    """Copy the data to the outputs of all spans, except where it is already there."""
    start = 0
    for span in call.spans:
        piece = data[start : start + span.count]
        if span.count and address_of(piece) != span.output:
            _array_at(span.output, span.count, call.dtype)[:] = piece
        start += span.count
