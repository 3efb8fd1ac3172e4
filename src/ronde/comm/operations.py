"""One class per collective: what it asks of a channel, and what it gives back. Used by groups and the engine.

An operation is made from the caller's arrays. Where members may give different numbers of rows (allgather, alltoall),
`rows` are mine; somebody finds out everybody's, and calls() takes those: from the coordinator for a named operation,
from a small call ahead for one in program order. Memory for results is made only then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ronde.comm.buffers import Array, ReceiveBuffer, SendBuffer, address_of, new_receive_buffer
from ronde.comm.call import Call, Signature, Span
from ronde.types import DType, Op, OperationKind

__all__ = [
    "BarrierOperation",
    "BroadcastOperation",
    "AlltoallOperation",
    "AllgatherOperation",
    "JoinOperation",
    "Operation",
    "AllreduceOperation",
    "SingleArrayAllreduceOperation",
    "RowCountsCall",
    "ReduceScatterOperation",
    "even_split",
    "zeros_for_joined",
]


class Operation:
    """What all collectives have in common."""

    __slots__ = ("signature",)

    own_rows: tuple[int, ...] | None = None
    """Mine, when members may differ in them."""
    splits: tuple[int, ...] | None = None
    """alltoall: as the caller gave them."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature

    def calls(self, row_counts: tuple[int, ...] | None, description: str, pre_agreed: bool) -> tuple[Call, ...]:
        """What to run, in this order; rows are everybody's, member by member."""
        raise NotImplementedError

    def result(self) -> Any:  # what the caller gets
        """After the calls: what the caller gets."""
        return None


class BarrierOperation(Operation):
    """Everybody has come this far."""

    __slots__ = ()

    def calls(self, row_counts: tuple[int, ...] | None, description: str, pre_agreed: bool) -> tuple[Call, ...]:
        """One call without memory."""
        return (self.signature.make_call((), None, pre_agreed=pre_agreed, description=description),)


class JoinOperation(Operation):
    """Out of data. Among named operations there is nothing to run; the coordinator says when everybody has joined."""

    __slots__ = ("own_rows",)

    def __init__(self, signature: Signature, at_ns: int) -> None:
        super().__init__(signature)
        self.own_rows = (at_ns,)
        """When this rank joined, on the coordinator's clock: who was last is found by comparing."""

    def calls(self, row_counts: tuple[int, ...] | None, description: str, pre_agreed: bool) -> tuple[Call, ...]:
        """Nothing."""
        return ()


class AllreduceOperation(Operation):
    """allreduce of one array or of several as a unit."""

    __slots__ = ("_is_list", "_receive_buffers", "_send_buffers", "spans")

    def __init__(
        self,
        signature: Signature,
        send_buffers: Sequence[SendBuffer],
        receive_buffers: Sequence[ReceiveBuffer],
        is_list: bool,
    ) -> None:
        super().__init__(signature)
        self._send_buffers = send_buffers
        self._receive_buffers = receive_buffers
        self._is_list = is_list
        self.spans = tuple(
            Span(address_of(source.array), address_of(target.array), source.array.size)
            for source, target in zip(send_buffers, receive_buffers, strict=True)
        )

    def calls(self, row_counts: tuple[int, ...] | None, description: str, pre_agreed: bool) -> tuple[Call, ...]:
        """All arrays in one call; Adasum looks at each array as a whole, so there each is a call."""
        lots = [(part,) for part in self.spans] if self.signature.op is Op.ADASUM else [self.spans]
        return tuple(
            [self.signature.make_call(lot, self, pre_agreed=pre_agreed, description=description) for lot in lots]
        )

    def result(self) -> Any:  # one array, or a list of them
        """The sums."""
        results = [target.finish() for target in self._receive_buffers]
        return results if self._is_list else results[0]


class SingleArrayAllreduceOperation(AllreduceOperation):
    """allreduce of one contiguous NumPy array, in place or into a new one: the most frequent case, made cheaply."""

    __slots__ = ("_out", "_x")

    def __init__(self, signature: Signature, x: Array, out: Array | None) -> None:
        self.signature = signature
        self._x = x
        source = target = address_of(x)
        if out is None:
            out = np.empty_like(x)
            target = address_of(out)
        self._out = out
        self.spans = (Span(source, target, x.size),)

    def result(self) -> Array:
        """The sum."""
        return self._out


def zeros_for_joined(signature: Signature) -> AllreduceOperation:
    """The part in others' allreduce of a rank that has joined: zeros."""
    zeros = [np.zeros(shape, signature.dtype.numpy) for shape in signature.shapes]
    sources = [SendBuffer(array, signature.dtype, False) for array in zeros]
    return AllreduceOperation(signature, sources, [ReceiveBuffer(array, array, None) for array in zeros], True)


class BroadcastOperation(Operation):
    """The root's array to everybody."""

    __slots__ = ("_peer", "_receive_buffer", "_send_buffer")

    def __init__(self, signature: Signature, send_buffer: SendBuffer, receive_buffer: ReceiveBuffer, peer: int) -> None:
        super().__init__(signature)
        self._send_buffer = send_buffer
        self._receive_buffer = receive_buffer
        self._peer = peer

    def calls(self, row_counts: tuple[int, ...] | None, description: str, pre_agreed: bool) -> tuple[Call, ...]:
        """One call."""
        array = self._send_buffer.array
        part = Span(address_of(array), address_of(self._receive_buffer.array), array.size)
        return (
            self.signature.make_call((part,), self, peer=self._peer, pre_agreed=pre_agreed, description=description),
        )

    def result(self) -> object:
        """What the root gave."""
        return self._receive_buffer.finish()


class AllgatherOperation(Operation):
    """allgather of one array or of several."""

    __slots__ = ("_is_list", "_receive_buffers", "_send_buffers", "counts", "own_rows")

    def __init__(self, signature: Signature, send_buffers: Sequence[SendBuffer], is_list: bool) -> None:
        super().__init__(signature)
        self.own_rows = tuple(shape[0] for shape in signature.shapes)
        self.counts: tuple[int, ...] = ()
        """After calls(): elements of the (last) array per member."""
        self._send_buffers = send_buffers
        self._receive_buffers: list[ReceiveBuffer] = []
        self._is_list = is_list

    def calls(self, row_counts: tuple[int, ...] | None, description: str, pre_agreed: bool) -> tuple[Call, ...]:
        """One call per array."""
        assert row_counts is not None
        made = []
        for index, source in enumerate(self._send_buffers):
            mine = row_counts[index :: len(self._send_buffers)]
            row_shape = source.array.shape[1:]
            target = new_receive_buffer(source, (sum(mine), *row_shape))
            self._receive_buffers.append(target)
            self.counts = tuple(num_rows * math.prod(row_shape) for num_rows in mine)
            part = Span(address_of(source.array), address_of(target.array), source.array.size)
            made.append(
                self.signature.make_call(
                    (part,), self, counts=self.counts, pre_agreed=pre_agreed, description=description
                )
            )
        return tuple(made)

    def result(self) -> Any:  # one array, or a list of them
        """Everybody's rows, in the order of the members."""
        results = [target.finish() for target in self._receive_buffers]
        return results if self._is_list else results[0]


class ReduceScatterOperation(Operation):
    """reduce_scatter: everybody gets its rows of the sum."""

    __slots__ = ("_counts", "_receive_buffer", "_send_buffer")

    def __init__(self, signature: Signature, send_buffer: SendBuffer, member_index: int, num_members: int) -> None:
        super().__init__(signature)
        shares = even_split(send_buffer.array.shape[0], num_members)
        row_shape = send_buffer.array.shape[1:]
        self._send_buffer = send_buffer
        self._receive_buffer = new_receive_buffer(send_buffer, (shares[member_index], *row_shape))
        self._counts = tuple(share * math.prod(row_shape) for share in shares)

    def calls(self, row_counts: tuple[int, ...] | None, description: str, pre_agreed: bool) -> tuple[Call, ...]:
        """One call."""
        array = self._send_buffer.array
        part = Span(address_of(array), address_of(self._receive_buffer.array), array.size)
        return (
            self.signature.make_call(
                (part,), self, counts=self._counts, pre_agreed=pre_agreed, description=description
            ),
        )

    def result(self) -> object:
        """My rows of the sum."""
        return self._receive_buffer.finish()


class AlltoallOperation(Operation):
    """alltoall: each member gives rows to each."""

    __slots__ = ("_member_index", "_receive_buffer", "_received_rows", "_send_buffer", "own_rows", "splits")

    def __init__(
        self, signature: Signature, send_buffer: SendBuffer, splits: tuple[int, ...], member_index: int
    ) -> None:
        super().__init__(signature)
        self.own_rows = self.splits = splits
        self._send_buffer = send_buffer
        self._member_index = member_index
        self._received_rows: tuple[int, ...] = ()
        self._receive_buffer: ReceiveBuffer | None = None

    def calls(self, row_counts: tuple[int, ...] | None, description: str, pre_agreed: bool) -> tuple[Call, ...]:
        """One call. Of everybody's rows, those that are for me come in."""
        assert row_counts is not None and self.splits is not None
        num_members = len(self.splits)
        self._received_rows = row_counts[self._member_index :: num_members]
        array = self._send_buffer.array
        row_shape = array.shape[1:]
        width = math.prod(row_shape)
        self._receive_buffer = new_receive_buffer(self._send_buffer, (sum(self._received_rows), *row_shape))
        part = Span(address_of(array), address_of(self._receive_buffer.array), sum(self.splits) * width)
        counts = tuple(num_rows * width for num_rows in self._received_rows)
        splits = tuple(num_rows * width for num_rows in self.splits)
        return (
            self.signature.make_call(
                (part,), self, counts=counts, splits=splits, pre_agreed=pre_agreed, description=description
            ),
        )

    def result(self) -> tuple[object, Array]:
        """The rows that came, and how many from whom."""
        assert self._receive_buffer is not None
        return self._receive_buffer.finish(), np.array(self._received_rows, np.int64)


class RowCountsCall:
    """The small call ahead in which members tell each other their numbers of rows.

    It has the signature of the operation it belongs to, so members that ask for different things differ here already.
    """

    __slots__ = ("_row_counts", "call")

    def __init__(self, operation: Operation, num_members: int) -> None:
        assert operation.own_rows is not None
        mine = np.array(operation.own_rows, np.int64)
        self._row_counts = np.empty(num_members * mine.size, np.int64)
        form = operation.signature
        self.call = Call(
            kind=OperationKind.ALLGATHER,
            dtype=DType.INT64,
            spans=(Span(address_of(mine), address_of(self._row_counts), mine.size),),
            counts=(mine.size,) * num_members,
            description=form.description,
            # Another number than the second call's, or the two could be taken for each other.
            signature_hash=form.hash ^ form.kind ^ 1 << 63,
            owners=(mine, self._row_counts),
        )

    def row_counts(self) -> tuple[int, ...]:
        """Everybody's, member by member."""
        return tuple(self._row_counts.tolist())


def even_split(num_rows: int, num_members: int) -> tuple[int, ...]:
    """As even as possible: the first members get one row more."""
    least, more = divmod(num_rows, num_members)
    return tuple(least + (index < more) for index in range(num_members))
