"""One class per collective: the operation that a caller asked for, with its signature and arrays. Used by groups, plans
and named operations.

An operation turns into the calls that a channel executes, and makes the caller's result when they have ended. Where
members may give different numbers of rows (allgather, alltoall), `own_rows` are those of this rank; calls() needs those
of all members. They come from the coordinator for an operation with a name, and from a small call ahead
(RowCountsOperation) for one in program order. Memory for results is allocated only then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ronde.comm.buffers import Array, ReceiveBuffer, SendBuffer, address_of, new_receive_buffer
from ronde.comm.call import Call, Signature, Span
from ronde.types import DType, Op, OperationKind


class Operation:
    """What all collectives have in common."""

    __slots__ = ("name", "signature")

    own_rows: tuple[int, ...] | None = None
    """The numbers of rows that this rank gives, when members may differ in them."""
    splits: tuple[int, ...] | None = None
    """For alltoall, how many rows go to each member."""

    def __init__(self, signature: Signature, name: str = "") -> None:
        self.signature = signature
        self.name = name
        """Empty for an operation that is matched by program order."""

    def calls(self, row_counts: tuple[int, ...] | None = None) -> tuple[Call, ...]:
        """What a channel executes, in this order; row_counts are those of all members, in their order."""
        raise NotImplementedError

    def result(self) -> Any:  # arrays, lists of them, or None
        """What the caller gets when the calls have ended."""
        return None

    def make_call(
        self,
        spans: tuple[Span, ...],
        *,
        peer: int = -1,
        counts: tuple[int, ...] | None = None,
        splits: tuple[int, ...] | None = None,
    ) -> Call:
        """A call on this memory that keeps the operation, and so the memory, alive. The members of an operation with a
        name have agreed on it before."""
        name, description = self.name, self.signature.description
        return self.signature.make_call(
            spans,
            self,
            peer=peer,
            counts=counts,
            splits=splits,
            pre_agreed=bool(name),
            description=f"{name!r}: {description}" if name else description,
        )


class BarrierOperation(Operation):
    """barrier: a call without memory."""

    __slots__ = ()

    def calls(self, row_counts: tuple[int, ...] | None = None) -> tuple[Call, ...]:
        return (self.make_call(()),)


class JoinOperation(Operation):
    """join among named operations: nothing to execute; the coordinator says when every member has joined."""

    __slots__ = ("own_rows",)

    def __init__(self, signature: Signature, at_ns: int) -> None:
        super().__init__(signature, "join")
        self.own_rows = (at_ns,)
        """When this rank joined, on the coordinator's clock: the members compare who was last."""

    def calls(self, row_counts: tuple[int, ...] | None = None) -> tuple[Call, ...]:
        return ()


class AllreduceOperation(Operation):
    """allreduce of one array, or of several as a unit."""

    __slots__ = ("_is_list", "_receive_buffers", "_send_buffers", "spans")

    def __init__(
        self,
        signature: Signature,
        send_buffers: Sequence[SendBuffer],
        receive_buffers: Sequence[ReceiveBuffer],
        is_list: bool,
        name: str = "",
    ) -> None:
        super().__init__(signature, name)
        self._send_buffers = send_buffers
        self._receive_buffers = receive_buffers
        self._is_list = is_list
        self.spans = tuple(
            Span(address_of(source.array), address_of(target.array), source.array.size)
            for source, target in zip(send_buffers, receive_buffers, strict=True)
        )

    def calls(self, row_counts: tuple[int, ...] | None = None) -> tuple[Call, ...]:
        """All arrays in one call; for adasum, which looks at each array as a whole, one call per array."""
        if self.signature.op is Op.ADASUM:
            return tuple([self.make_call((span,)) for span in self.spans])
        return (self.make_call(self.spans),)

    def result(self) -> Any:  # one array, or a list of them
        results = [buffer.finish() for buffer in self._receive_buffers]
        return results if self._is_list else results[0]


class SingleArrayAllreduceOperation(AllreduceOperation):
    """allreduce of one contiguous NumPy array, in place or into a new one: the most frequent case, made cheaply."""

    __slots__ = ("_out", "_x")

    def __init__(self, signature: Signature, x: Array, out: Array | None, name: str = "") -> None:
        self.signature = signature
        self.name = name
        self._x = x
        source = target = address_of(x)
        if out is None:
            out = np.empty_like(x)
            target = address_of(out)
        self._out = out
        self.spans = (Span(source, target, x.size),)

    def result(self) -> Array:
        return self._out


def zeros_for_joined(signature: Signature, name: str) -> AllreduceOperation:
    """What a rank that has joined contributes to an allreduce of the others."""
    zeros = [np.zeros(shape, signature.dtype.numpy) for shape in signature.shapes]
    send_buffers = [SendBuffer(array, signature.dtype, False) for array in zeros]
    receive_buffers = [ReceiveBuffer(array, array, None) for array in zeros]
    return AllreduceOperation(signature, send_buffers, receive_buffers, True, name)


class BroadcastOperation(Operation):
    """broadcast: the root's array for all members."""

    __slots__ = ("_receive_buffer", "_root_index", "_send_buffer")

    def __init__(
        self, signature: Signature, send_buffer: SendBuffer, receive_buffer: ReceiveBuffer, root_index: int, name: str
    ) -> None:
        super().__init__(signature, name)
        self._send_buffer = send_buffer
        self._receive_buffer = receive_buffer
        self._root_index = root_index

    def calls(self, row_counts: tuple[int, ...] | None = None) -> tuple[Call, ...]:
        array = self._send_buffer.array
        span = Span(address_of(array), address_of(self._receive_buffer.array), array.size)
        return (self.make_call((span,), peer=self._root_index),)

    def result(self) -> object:
        return self._receive_buffer.finish()


class AllgatherOperation(Operation):
    """allgather of one array or of several."""

    __slots__ = ("_is_list", "_receive_buffers", "_send_buffers", "counts", "own_rows")

    def __init__(self, signature: Signature, send_buffers: Sequence[SendBuffer], is_list: bool, name: str = "") -> None:
        super().__init__(signature, name)
        self.own_rows = tuple(shape[0] for shape in signature.shapes)
        self.counts: tuple[int, ...] = ()
        """After calls(): elements of the (last) array per member."""
        self._send_buffers = send_buffers
        self._receive_buffers: list[ReceiveBuffer] = []
        self._is_list = is_list

    def calls(self, row_counts: tuple[int, ...] | None = None) -> tuple[Call, ...]:
        """One call per array."""
        assert row_counts is not None
        made = []
        for index, source in enumerate(self._send_buffers):
            num_rows = row_counts[index :: len(self._send_buffers)]
            row_shape = source.array.shape[1:]
            target = new_receive_buffer(source, (sum(num_rows), *row_shape))
            self._receive_buffers.append(target)
            self.counts = tuple(rows * math.prod(row_shape) for rows in num_rows)
            span = Span(address_of(source.array), address_of(target.array), source.array.size)
            made.append(self.make_call((span,), counts=self.counts))
        return tuple(made)

    def result(self) -> Any:  # one array, or a list of them
        results = [buffer.finish() for buffer in self._receive_buffers]
        return results if self._is_list else results[0]


class ReduceScatterOperation(Operation):
    """reduce_scatter: each member gets its rows of the reduction."""

    __slots__ = ("_counts", "_receive_buffer", "_send_buffer")

    def __init__(
        self, signature: Signature, send_buffer: SendBuffer, member_index: int, num_members: int, name: str
    ) -> None:
        super().__init__(signature, name)
        num_rows = _even_split(send_buffer.array.shape[0], num_members)
        row_shape = send_buffer.array.shape[1:]
        self._send_buffer = send_buffer
        self._receive_buffer = new_receive_buffer(send_buffer, (num_rows[member_index], *row_shape))
        self._counts = tuple(rows * math.prod(row_shape) for rows in num_rows)

    def calls(self, row_counts: tuple[int, ...] | None = None) -> tuple[Call, ...]:
        array = self._send_buffer.array
        span = Span(address_of(array), address_of(self._receive_buffer.array), array.size)
        return (self.make_call((span,), counts=self._counts),)

    def result(self) -> object:
        return self._receive_buffer.finish()


class AlltoallOperation(Operation):
    """alltoall: each member gives rows to each."""

    __slots__ = ("_member_index", "_receive_buffer", "_received_rows", "_send_buffer", "own_rows", "splits")

    def __init__(
        self, signature: Signature, send_buffer: SendBuffer, splits: tuple[int, ...], member_index: int, name: str
    ) -> None:
        super().__init__(signature, name)
        self.own_rows = self.splits = splits
        self._send_buffer = send_buffer
        self._member_index = member_index
        self._received_rows: tuple[int, ...] = ()
        self._receive_buffer: ReceiveBuffer | None = None

    def calls(self, row_counts: tuple[int, ...] | None = None) -> tuple[Call, ...]:
        assert row_counts is not None and self.splits is not None
        self._received_rows = row_counts[self._member_index :: len(self.splits)]
        array = self._send_buffer.array
        row_shape = array.shape[1:]
        row_size = math.prod(row_shape)
        self._receive_buffer = new_receive_buffer(self._send_buffer, (sum(self._received_rows), *row_shape))
        span = Span(address_of(array), address_of(self._receive_buffer.array), sum(self.splits) * row_size)
        counts = tuple(rows * row_size for rows in self._received_rows)
        return (self.make_call((span,), counts=counts, splits=tuple(rows * row_size for rows in self.splits)),)

    def result(self) -> tuple[object, Array]:
        """The rows that came, and how many from each member."""
        assert self._receive_buffer is not None
        return self._receive_buffer.finish(), np.array(self._received_rows, np.int64)


class PointToPointOperation(Operation):
    """send or receive."""

    __slots__ = ("_buffer", "_peer", "_span")

    def __init__(self, signature: Signature, span: Span, peer: int, buffer: SendBuffer | ReceiveBuffer) -> None:
        super().__init__(signature)
        self._span = span
        self._peer = peer
        self._buffer = buffer

    def calls(self, row_counts: tuple[int, ...] | None = None) -> tuple[Call, ...]:
        return (self.make_call((self._span,), peer=self._peer),)

    def result(self) -> object:
        """The array that was received; None after a send."""
        return self._buffer.finish() if isinstance(self._buffer, ReceiveBuffer) else None


class RowCountsOperation(Operation):
    """The small call ahead of another operation, in which members exchange their numbers of rows.

    Its hash is made from that of the other operation, so members that ask for different things differ here already.
    """

    __slots__ = ("_num_members", "_own", "_row_counts")

    def __init__(self, operation: Operation, num_members: int, label: str) -> None:
        assert operation.own_rows is not None
        self._own = np.array(operation.own_rows, np.int64)
        self._row_counts = np.empty(num_members * self._own.size, np.int64)
        self._num_members = num_members
        ahead_of = operation.signature
        signature = msgspec.structs.replace(
            ahead_of,
            kind=OperationKind.ALLGATHER,
            dtype=DType.INT64,
            op=Op.SUM,
            prescale=1.0,
            postscale=1.0,
            label=label,
            num_bytes=self._own.nbytes,
            # Another number than that of the operation itself, or the two could be taken for each other.
            hash=ahead_of.hash ^ ahead_of.kind ^ 1 << 63,
        )
        super().__init__(signature)

    def calls(self, row_counts: tuple[int, ...] | None = None) -> tuple[Call, ...]:
        span = Span(address_of(self._own), address_of(self._row_counts), self._own.size)
        return (self.make_call((span,), counts=(self._own.size,) * self._num_members),)

    def result(self) -> tuple[int, ...]:
        """The row counts of all members, in their order."""
        return tuple(self._row_counts.tolist())


def _even_split(num_rows: int, num_members: int) -> tuple[int, ...]:
    """Return how many rows each member gets: equally many, and the first members one more if there is a remainder."""
    least, more = divmod(num_rows, num_members)
    return tuple(least + (index < more) for index in range(num_members))
