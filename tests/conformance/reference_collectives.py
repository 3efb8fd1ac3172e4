"""What each kind of call does, carried out on the memory of all members at once. Used by the threads backend.

What any backend must leave in the memory of the members is what this does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from ronde.comm.buffers import Array, array_at
from ronde.comm.call import Call, Span, mismatch_error
from ronde.types import DType, Op, OperationKind, can_be_joined
from tests.conformance.reference_arithmetic import reduce


def check_calls_match(members: Sequence[int], calls: Sequence[Call]) -> None:
    """Raise Mismatch, the same for everybody, unless the members (ranks of the world) ask for the same.

    A member whose call is JOIN takes part in an allreduce of the others that its zeros do not change, and in nothing
    else.
    """
    asked = [call for call in calls if call.kind is not OperationKind.JOIN]
    if not asked:
        return
    first = asked[0]
    agree = all(
        (call.kind, call.signature_hash, call.peer) == (first.kind, first.signature_hash, first.peer) for call in asked
    )
    joinable = first.kind is OperationKind.ALLREDUCE and can_be_joined(first.dtype, first.op)
    if not agree or (len(asked) < len(calls) and not joinable):
        joined = [rank for rank, call in zip(members, calls, strict=True) if call.kind is OperationKind.JOIN]
        raise mismatch_error({rank: call.description for rank, call in zip(members, calls, strict=True)}, tuple(joined))


def run_calls(calls: Sequence[Call]) -> None:
    """Do what the members ask for. They agree on it; those that have joined give zeros and take nothing."""
    asked = [call for call in calls if call.kind is not OperationKind.JOIN]
    work = _RUN_BY_KIND.get(asked[0].kind) if asked else None
    if work is not None:
        work(calls)


def _allreduce(calls: Sequence[Call]) -> None:
    asked = [call for call in calls if call.kind is not OperationKind.JOIN]
    first = asked[0]
    zeros = np.zeros(sum(part.count for part in first.spans), first.dtype.numpy)
    inputs = [zeros if call.kind is OperationKind.JOIN else _read(call) for call in calls]
    # Adasum weighs every array by itself; to the others the arrays are one.
    ends = _starts([part.count for part in first.spans])[1:-1] if first.op is Op.ADASUM else []
    pieces = zip(*[np.split(array, ends) for array in inputs], strict=True)
    result = np.concatenate([reduce(p, first.dtype, first.op, first.prescale, first.postscale) for p in pieces])
    for call in asked:
        _write(call.spans, result, call.dtype)


def _allgather(calls: Sequence[Call]) -> None:
    everything = np.concatenate([_read(call) for call in calls])
    for call in calls:
        array_at(call.spans[0].output, len(everything), call.dtype.numpy)[:] = everything


def _broadcast(calls: Sequence[Call]) -> None:
    data = _read(calls[calls[0].peer])
    for call in calls:
        _write(call.spans, data, call.dtype)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    first = calls[0]
    result = reduce([_read(call) for call in calls], first.dtype, first.op, first.prescale, first.postscale)
    starts = _starts(first.counts)
    for call, start, count in zip(calls, starts, first.counts or (), strict=False):
        array_at(call.spans[0].output, count, call.dtype.numpy)[:] = result[start : start + count]


def _alltoall(calls: Sequence[Call]) -> None:
    given = []
    for call in calls:
        data, starts = _read(call), _starts(call.splits)
        given.append([data[start : start + count] for start, count in zip(starts, call.splits or (), strict=False)])
    for me, call in enumerate(calls):
        mine = np.concatenate([row[me] for row in given])
        array_at(call.spans[0].output, len(mine), call.dtype.numpy)[:] = mine


def _reduce(calls: Sequence[Call]) -> None:
    root = calls[calls[0].peer]
    result = reduce([_read(call) for call in calls], root.dtype, root.op, root.prescale, root.postscale)
    _write(root.spans, result, root.dtype)


def _gather(calls: Sequence[Call]) -> None:
    root = calls[calls[0].peer]
    everything = np.concatenate([_read(call) for call in calls])
    array_at(root.spans[0].output, len(everything), root.dtype.numpy)[:] = everything


def _scatter(calls: Sequence[Call]) -> None:
    root = calls[calls[0].peer]
    starts = _starts(root.counts)
    everything = array_at(root.spans[0].input, starts[-1], root.dtype.numpy).copy()
    for call, start in zip(calls, starts, strict=False):
        _write(call.spans, everything[start:], call.dtype)


_RUN_BY_KIND: dict[OperationKind, Callable[[Sequence[Call]], None]] = {
    OperationKind.ALLREDUCE: _allreduce,
    OperationKind.ALLGATHER: _allgather,
    OperationKind.BROADCAST: _broadcast,
    OperationKind.REDUCE_SCATTER: _reduce_scatter,
    OperationKind.ALLTOALL: _alltoall,
    OperationKind.REDUCE: _reduce,
    OperationKind.GATHER: _gather,
    OperationKind.SCATTER: _scatter,
}


def _read(call: Call) -> Array:
    """All parts of a member, one after the other, in memory of our own: outputs may overlap with inputs."""
    views = [array_at(part.input, part.count, call.dtype.numpy) for part in call.spans]
    return np.concatenate(views) if views else np.empty(0, call.dtype.numpy)


def _write(parts: Sequence[Span], data: Array, dtype: DType) -> None:
    for part, start in zip(parts, _starts([part.count for part in parts]), strict=False):
        array_at(part.output, part.count, dtype.numpy)[:] = data[start : start + part.count]


def _starts(counts: Sequence[int] | None) -> list[int]:
    return [0, *accumulate(counts or ())]
