"""The works of operations that are more than one call with memory of the caller: allreduce, which can be fused; memory
of other devices; what allocates its result when the rows of all members are known. Groups make them.

Where members may give different numbers of rows (allgather, gather, alltoall, scatter), `own_rows` are those of this
rank; make_calls() needs those of all members (of an alltoall, those for this rank; of a scatter, those of the root).
They come from the coordinator for a work with a name, and from a small call ahead for one in program order. Memory for
results is allocated only then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from ronde.comm.buffers import Array, ReceiveBuffer, SendBuffer, address_of
from ronde.comm.call import Call, Signature, Span
from ronde.comm.channel import Channel
from ronde.comm.work import Work
from ronde.types import DType, Op, OperationKind

RunAllreduce = Callable[[Array, Array | None], Array]
"""Runs an allreduce of an array, into `out` or a new array, and returns that."""


class ReceiveAnyWork(Work):
    """A receive from any member. The result also has the rank that sent it."""

    __slots__ = ("_ranks",)

    def __init__(self, signature: Signature, call: Call, target: ReceiveBuffer, ranks: tuple[int, ...]) -> None:
        super().__init__(signature, "", (call,), target.result, (target,))
        self._ranks = ranks

    def finish(self) -> Any:
        out = super().finish()
        assert self._running_calls is not None
        timing = self._running_calls[0].timing
        assert timing is not None and timing.received is not None
        self._result = (out, self._ranks[timing.received.source])
        return self._result


class AllreduceWork(Work):
    """allreduce of one array, or of several as a unit. Named operations fuse the spans of many into one call."""

    __slots__ = ("spans",)

    def __init__(
        self,
        signature: Signature,
        name: str,
        spans: tuple[Span, ...],
        owners: object,
        result: Any,
        targets: Sequence[ReceiveBuffer] = (),
    ) -> None:
        super().__init__(signature, name, (), result, targets, owners)
        self.spans = spans

    def make_calls(self, row_counts: tuple[int, ...] | None = None, description: str = "") -> tuple[Call, ...]:
        """All arrays in one call."""
        owners = (self._owners, self._result, self._targets)
        return (self.signature.make_call(self.spans, owners, name=self.name, description=description),)

    def get_spans(self, row_counts: tuple[int, ...] | None) -> tuple[Span, ...]:
        return self.spans


class DeviceWork(AllreduceWork):
    """allreduce, broadcast or reduce of memory of another device than the CPU. The caller gives the memory for the
    result: it is what the work returns."""

    __slots__ = ("_root", "device", "streams")

    def __init__(
        self,
        signature: Signature,
        name: str,
        spans: tuple[Span, ...],
        owners: object,
        result: Any,
        *,
        device: str,
        streams: tuple[int, ...],
        root: int = -1,
    ) -> None:
        super().__init__(signature, name, spans, owners, result)
        self.device = device
        self.streams = streams
        self._root = root
        """As an index among the members."""

    def make_calls(self, row_counts: tuple[int, ...] | None = None, description: str = "") -> tuple[Call, ...]:
        """All memory in one call."""
        return (
            self.signature.make_call(
                self.spans,
                self._owners,
                name=self.name,
                peer=self._root,
                description=description,
                device=self.device,
                streams=self.streams,
            ),
        )


class _RowsWork(Work):
    """An operation on the rows of one array or of several, whose result gets its memory when it is known how many rows
    come."""

    __slots__ = ("_is_list", "_sources", "own_rows")

    def __init__(
        self, signature: Signature, name: str, sources: Sequence[SendBuffer], is_list: bool, own_rows: tuple[int, ...]
    ) -> None:
        super().__init__(signature, name)
        self.own_rows = own_rows
        self._sources = sources
        self._is_list = is_list

    def finish(self) -> Any:
        self._sources = ()
        return super().finish()


class AllgatherWork(_RowsWork):
    """allgather or gather of one array or of several. A gather has a root, and no result on the other members."""

    __slots__ = ("_has_result", "_root", "counts")

    def __init__(
        self,
        signature: Signature,
        name: str,
        sources: Sequence[SendBuffer],
        is_list: bool,
        *,
        root: int = -1,
        has_result: bool = True,
    ) -> None:
        super().__init__(signature, name, sources, is_list, tuple(shape[0] for shape in signature.shapes))
        self.counts: tuple[int, ...] = ()
        """After make_calls(): elements of the (last) array per member."""
        self._root = root
        """As an index among the members."""
        self._has_result = has_result

    def make_calls(self, row_counts: tuple[int, ...] | None = None, description: str = "") -> tuple[Call, ...]:
        """One call per array. Made again when the operation was withdrawn from shared memory."""
        assert row_counts is not None
        calls, results = [], []
        for index, source in enumerate(self._sources):
            num_rows = row_counts[index :: len(self._sources)]
            row_shape = source.array.shape[1:]
            self.counts = tuple(rows * math.prod(row_shape) for rows in num_rows)
            target = np.empty((sum(num_rows) if self._has_result else 0, *row_shape), source.array.dtype)
            results.append(source.wrap(target))
            span = Span(address_of(source.array), address_of(target), source.array.size)
            owners = (source, target)
            call = self.signature.make_call((span,), owners, name=self.name, peer=self._root, counts=self.counts)
            calls.append(call)
        if self._has_result:
            self._result = results if self._is_list else results[0]
        return tuple(calls)


class AlltoallWork(_RowsWork):
    """alltoall of one array or of several with equally many rows: each member gives rows to each. The result also has
    how many came from each member."""

    __slots__ = ("splits",)

    def __init__(
        self,
        signature: Signature,
        name: str,
        sources: Sequence[SendBuffer],
        is_list: bool,
        splits: tuple[int, ...],
    ) -> None:
        super().__init__(signature, name, sources, is_list, splits)
        self.splits = splits

    def make_calls(self, row_counts: tuple[int, ...] | None = None, description: str = "") -> tuple[Call, ...]:
        """One call per array. `row_counts` come from each member to this one."""
        assert row_counts is not None and self.splits is not None
        calls, results = [], []
        for source in self._sources:
            array = source.array
            row_shape = array.shape[1:]
            row_size = math.prod(row_shape)
            target = np.empty((sum(row_counts), *row_shape), array.dtype)
            results.append(source.wrap(target))
            span = Span(address_of(array), address_of(target), sum(self.splits) * row_size)
            counts = tuple(rows * row_size for rows in row_counts)
            splits = tuple(rows * row_size for rows in self.splits)
            owners = (array, target)
            calls.append(self.signature.make_call((span,), owners, name=self.name, counts=counts, splits=splits))
        self._result = (results if self._is_list else results[0], np.array(row_counts, np.int64))
        return tuple(calls)


class ScatterWork(_RowsWork):
    """scatter of one array or of several with equally many rows. `splits` are those of the root; None elsewhere."""

    __slots__ = ("_member_index", "_root", "splits")

    def __init__(
        self,
        signature: Signature,
        name: str,
        sources: Sequence[SendBuffer],
        is_list: bool,
        splits: tuple[int, ...] | None,
        *,
        size: int,
        member_index: int,
        root: int,
    ) -> None:
        super().__init__(signature, name, sources, is_list, splits or (0,) * size)
        self.splits = splits
        self._member_index = member_index
        self._root = root
        """As an index among the members."""

    def make_calls(self, row_counts: tuple[int, ...] | None = None, description: str = "") -> tuple[Call, ...]:
        """One call per array."""
        assert row_counts is not None
        calls, results = [], []
        for source in self._sources:
            array = source.array
            row_shape = array.shape[1:]
            target = np.empty((row_counts[self._member_index], *row_shape), array.dtype)
            results.append(source.wrap(target))
            counts = tuple(rows * math.prod(row_shape) for rows in row_counts)
            span = Span(address_of(array), address_of(target), target.size)
            owners = (array, target)
            calls.append(self.signature.make_call((span,), owners, name=self.name, peer=self._root, counts=counts))
        self._result = results if self._is_list else results[0]
        return tuple(calls)


def make_row_count_exchange(
    ahead_of: Signature, own_rows: tuple[int, ...], ranks: tuple[int, ...], label: str = ""
) -> tuple[Signature, Call, Array]:
    """The small call ahead of an operation by which members in program order tell each other their row counts, or the
    root of a scatter tells its own. Returns its signature, the call, and the array in which the counts will be.

    Its hash is made from that of the operation, so members that ask for different things differ here already.
    """
    own = np.array(own_rows, np.int64)
    is_scatter = ahead_of.kind is OperationKind.SCATTER
    signature = msgspec.structs.replace(
        ahead_of,
        kind=OperationKind.BROADCAST if is_scatter else OperationKind.ALLGATHER,
        dtype=DType.INT64,
        op=Op.SUM,
        prescale=1.0,
        postscale=1.0,
        label=label or f"{ahead_of.label} rows",
        num_bytes=own.nbytes,
        # Another number than that of the operation itself, or the two could be taken for each other.
        hash=ahead_of.hash ^ ahead_of.kind ^ 1 << 63,
    )
    row_counts = np.empty(own.size if is_scatter else len(ranks) * own.size, np.int64)
    span = Span(address_of(own), address_of(row_counts), own.size)
    if is_scatter:
        call = signature.make_call((span,), (own, row_counts), peer=ranks.index(ahead_of.root))
    else:
        call = signature.make_call((span,), (own, row_counts), counts=(own.size,) * len(ranks))
    return signature, call, row_counts


def make_cached_allreduce(signature: Signature, channel: Channel) -> RunAllreduce:
    """The shortest path for the most frequent call: all that is equal each time is looked up and checked here, once."""
    run, count = channel.run, math.prod(signature.shapes[0])
    kind, dtype, op, prescale = signature.kind, signature.dtype, signature.op, signature.prescale
    postscale, description, signature_hash = signature.postscale, signature.description, signature.hash

    def allreduce(x: Array, out: Array | None) -> Array:
        source = target = address_of(x)
        if out is None:
            out = np.empty_like(x)
            target = address_of(out)
        spans = (Span(source, target, count),)
        owners = (x, out)  # a backend may have to keep them beyond an error
        call = Call(
            kind, dtype, op, spans, -1, prescale, postscale, None, None, description, signature_hash, False, owners
        )
        run(call, signature)
        return out

    return allreduce
