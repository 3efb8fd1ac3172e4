"""Where the operations of one group start on this rank: its channels, and the two ways onto them. Used by the group,
which prepares operations, and by plans, which have channels of their own.

A group of ranks and what they can do together. The module-level functions of ronde are one line over this.

Without a name an operation is matched by program order and goes straight to the group's ordered channel. With a name
it may come in any order: the members announce it, and it runs on the negotiated channel when all have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from ronde.comm.buffers import Array, SendBuffer, address_of, as_receive_buffer, as_send_buffer
from ronde.comm.call import Call, CallOptions, Signature, SignatureCache, Span, hash_signature
from ronde.comm.channel import CallRecord, Channel
from ronde.comm.control_thread import ControlThread
from ronde.comm.named_operations import NamedOperations, NamedWork
from ronde.comm.operations import (
    AllgatherOperation,
    AllreduceOperation,
    AlltoallOperation,
    BarrierOperation,
    BroadcastOperation,
    JoinOperation,
    Operation,
    ReduceScatterOperation,
    RowCountsCall,
    SingleArrayAllreduceOperation,
)
from ronde.comm.wording import ranks_text
from ronde.comm.work import Work
from ronde.errors import RoundEnded
from ronde.types import DType, Op, OperationKind

__all__ = ["ChannelOpener", "Group", "GroupChannels", "split_by_counts"]

JOIN_TIMEOUT_S = 10 * 365 * 86400.0
"""join() waits for as long as others have data. Losses end it, not the clock."""


class ChannelOpener(Protocol):
    """What a group needs of its world."""

    control_thread: ControlThread
    operation_timeout_s: float
    """How long one operation may take."""

    def open_channel(
        self, group: int, suffix: str, members: tuple[int, ...], *, bucket_bytes: int = 0, point_to_point: bool = False
    ) -> Channel:
        """Open a channel, together with the other members."""

    def close_channel(self, channel: Channel) -> None:
        """Close it. Idempotent."""

    def add_named_operations(self, named_operations: NamedOperations) -> None:
        """Let the engine listen for these named operations."""

    def remove_named_operations(self, group: int) -> None:
        """No more of this group."""


class GroupChannels:
    """The channels of one group of which this rank is a member."""

    def __init__(self, opener: ChannelOpener, group: int, members: tuple[int, ...], member_index: int) -> None:
        self.member_index = member_index
        """My index among the members."""
        self._opener = opener
        self._group = group
        self._members = members
        self.operation_timeout_s = opener.operation_timeout_s
        """How long one operation may take."""
        self._control_thread = opener.control_thread
        self._plan_channels: list[Channel] = []
        self._num_plans = 0
        self._closed_error: Exception | None = None
        self._ordered_channel = opener.open_channel(group, "ordered", members, point_to_point=True)
        try:
            negotiated = opener.open_channel(group, "negotiated", members)
        except BaseException:
            opener.close_channel(self._ordered_channel)
            raise
        self._named_operations = NamedOperations(group, negotiated, SignatureCache(), self._control_thread.waits)
        opener.add_named_operations(self._named_operations)

    @property
    def ordered_channel(self) -> Channel:
        """The channel of operations in program order."""
        if self._closed_error is not None:
            raise self._closed_error
        return self._ordered_channel

    def start(self, operation: Operation, name: str | None, wait: bool) -> Any:  # result or Work
        """Start an operation: announced when it has a name, else in program order."""
        if name is None:
            return self._start_ordered(operation, wait)
        work = self._announce(operation, name)
        return work.wait() if wait else work

    def join(self, signature: Signature) -> int:
        """Stand by with zeros, among named operations, those in program order, and plans. The rank that came last."""
        lane = self.ordered_channel
        operation = JoinOperation(signature, self._control_thread.now_ns())
        work = self._announce(operation, "join")
        call = signature.make_call((), None)
        flights = tuple(each.submit(call, (), timeout_s=JOIN_TIMEOUT_S) for each in (lane, *self._plan_channels))
        Work(flights, _no_value, JOIN_TIMEOUT_S).wait()
        work.wait(JOIN_TIMEOUT_S)
        ahead = RowCountsCall(operation, len(self._members))
        lane.run(ahead.call, signature.label, 8)
        return max(zip(ahead.row_counts(), self._members, strict=True))[1]

    def send_or_receive(self, call: Call, num_bytes: int, finish: Callable[[], Any], wait: bool) -> Any:
        """A message between two members, which stands outside of the order of the others."""
        label = call.kind.name.lower()
        if wait:
            self.ordered_channel.send_or_receive(call, label, num_bytes)
            return finish()
        return Work(
            (self.ordered_channel.submit(call, (CallRecord(label, "", num_bytes),)),), finish, self.operation_timeout_s
        )

    def open_plan_channel(self, bucket_bytes: int) -> Channel:
        """A channel of its own for a plan; all members open theirs in the same order."""
        self._num_plans += 1
        suffix = f"plan.{self._num_plans}"
        lane = self._opener.open_channel(self._group, suffix, self._members, bucket_bytes=bucket_bytes)
        self._plan_channels.append(lane)
        return lane

    def close_plan_channel(self, channel: Channel) -> None:
        """Close a plan's channel. Idempotent."""
        if channel in self._plan_channels:
            self._plan_channels.remove(channel)
        self._opener.close_channel(channel)

    def close(self, removed: bool) -> None:
        """Nothing starts here any more: the group was removed, or the round is over. Idempotent."""
        if self._closed_error is not None:
            return
        if removed:
            self._closed_error = ValueError(f"group {self._group} was removed; nothing can be done in it any more")
        else:
            self._closed_error = RoundEnded("the round is over: shutdown() was called")
        self._named_operations.abort(RoundEnded(str(self._closed_error)))
        self._opener.remove_named_operations(self._group)
        for lane in (*self._plan_channels, self._named_operations.channel, self._ordered_channel):
            self._opener.close_channel(lane)

    def _announce(self, operation: Operation, name: str) -> NamedWork:
        if self._closed_error is not None:
            raise self._closed_error
        if not isinstance(name, str) or not name:
            raise TypeError(f"name must be a text that is not empty, got {name!r}")
        work = NamedWork(operation, self._group, name, self._control_thread.waits, self.operation_timeout_s)
        self._control_thread.announce(self._named_operations, work)
        return work

    def _start_ordered(self, operation: Operation, wait: bool) -> Any:
        lane, form = self.ordered_channel, operation.signature
        rows = None
        if operation.own_rows is not None:
            ahead = RowCountsCall(operation, len(self._members))
            lane.run(ahead.call, f"{form.label} rows", 8 * len(operation.own_rows))
            rows = ahead.row_counts()
        calls = operation.calls(rows, "", False)
        if wait and len(calls) == 1:
            lane.run(calls[0], form.label, form.num_bytes)
            return operation.result()
        entry = CallRecord(form.label, "", form.num_bytes)
        flights = tuple([lane.submit(call, (entry,) if call is calls[-1] else ()) for call in calls])
        work = Work(flights, operation.result, self.operation_timeout_s)
        return work.wait() if wait else work


def _no_value() -> None:
    """The result of a call that only has to end."""


MAX_CACHED_ALLREDUCES = 1024


class Group:
    """Some ranks of the world, in order. Made by ronde.init() and ronde.add_group(), which all ranks call alike."""

    def __init__(self, id: int, ranks: tuple[int, ...], rank: int, channels: GroupChannels | None) -> None:
        self.id = id
        """Its number; 0 is the world."""
        self.ranks = ranks
        """The members, as ranks of the world."""
        self.size = len(ranks)
        """Number of members."""
        self.rank = ranks.index(rank) if rank in ranks else None
        """My index among the members; None when I am not one."""
        self._world_rank = rank
        self._channels = channels
        self._signatures = SignatureCache()
        self._cached_allreduces: dict[tuple[object, ...], _CachedAllreduce] = {}

    @property
    def included(self) -> bool:
        """Whether this rank is a member."""
        return self.rank is not None

    def __repr__(self) -> str:
        """For messages and debugging."""
        return f"<Group {self.id}: {ranks_text(self.ranks)}>"

    def allreduce(
        self,
        x: Any,  # an array of any library
        *,
        op: str | Op = "sum",
        out: Any = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wait: bool = True,
    ) -> Any:
        """postscale * op(prescale * x) over all members, in a new array or in `out` (which may be x itself).

        A list or tuple of arrays of one dtype travels as a unit; then the result is a list, and out a list too.
        """
        dispatch = self.dispatch
        if type(x) is np.ndarray and (out is None or out is x):
            quick = self._cached_allreduces.get((x.shape, x.dtype, op, prescale, postscale))
            flags = x.flags
            if quick is not None and flags.c_contiguous and (out is None or flags.writeable):
                if name is None and wait:
                    return quick.run(x, out)
                return dispatch.start(SingleArrayAllreduceOperation(quick.signature, x, out), name, wait)
        sources, many = self._as_send_buffers(x, "allreduce")
        if out is None:
            outs = [None] * len(sources)
        elif many and (not isinstance(out, list | tuple) or len(out) != len(sources)):
            raise ValueError(f"allreduce: out must be a list of {len(sources)} arrays, as x is")
        else:
            outs = list(out) if many else [out]
        targets = [as_receive_buffer(given, source, "allreduce") for given, source in zip(outs, sources, strict=True)]
        form = self._signature_of(OperationKind.ALLREDUCE, sources, CallOptions(op, prescale, postscale))
        if type(x) is np.ndarray:
            if len(self._cached_allreduces) >= MAX_CACHED_ALLREDUCES:
                self._cached_allreduces.clear()
            self._cached_allreduces[x.shape, x.dtype, op, prescale, postscale] = _CachedAllreduce(
                form, _make_cached_run(form, dispatch.ordered_channel)
            )
        return dispatch.start(AllreduceOperation(form, sources, targets, many), name, wait)

    def allgather(self, x: Any, *, name: str | None = None, wait: bool = True) -> Any:
        """The members' arrays, one after the other along the first dimension, in which they may differ.

        A scalar counts as one row. A list or tuple gives a list. Without a name, wait=False still waits until every
        member has called, for only then is it known how much will come.
        """
        dispatch = self.dispatch
        sources, many = self._as_send_buffers(x, "allgather", scalars_as_rows=True)
        form = self._signature_of(OperationKind.ALLGATHER, sources, CallOptions())
        return dispatch.start(AllgatherOperation(form, sources, many), name, wait)

    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        name: str | None = None,
        wait: bool = True,
    ) -> Any:
        """The root's array for everybody, in a new array or in `out`. root is a rank of the world."""
        dispatch = self.dispatch
        peer = self._member_index_of(root, "broadcast: root")
        source = self._as_send_buffer(x, "broadcast")
        target = as_receive_buffer(out, source, "broadcast")
        form = self._signature_of(OperationKind.BROADCAST, [source], CallOptions(root=root))
        return dispatch.start(BroadcastOperation(form, source, target, peer), name, wait)

    def reduce_scatter(
        self,
        x: Any,
        *,
        op: str | Op = "sum",
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wait: bool = True,
    ) -> Any:
        """My rows of the sum: the first dimension is shared out, the first members get one row more if need be."""
        dispatch = self.dispatch
        source = self._as_send_buffer(x, "reduce_scatter")
        if not source.array.shape:
            raise ValueError("reduce_scatter shares out rows: it needs an array of at least 1 dimension, got a scalar")
        form = self._signature_of(OperationKind.REDUCE_SCATTER, [source], CallOptions(op, prescale, postscale))
        return dispatch.start(ReduceScatterOperation(form, source, dispatch.member_index, self.size), name, wait)

    def alltoall(
        self,
        x: Any,
        *,
        splits: Any = None,  # a sequence of whole numbers, or an array of them
        name: str | None = None,
        wait: bool = True,
    ) -> Any:
        """Rows from each member to each: splits[i] of mine go to member i (default: equal shares).

        Returns the rows that came, in the order of the members, and how many came from each. As allgather, without a
        name it waits until every member has called.
        """
        dispatch = self.dispatch
        source = self._as_send_buffer(x, "alltoall")
        if not source.array.shape:
            raise ValueError("alltoall shares out rows: it needs an array of at least 1 dimension, got a scalar")
        mine = self._check_splits(splits, source.array.shape[0])
        form = self._signature_of(OperationKind.ALLTOALL, [source], CallOptions())
        return dispatch.start(AlltoallOperation(form, source, mine, dispatch.member_index), name, wait)

    def barrier(self, *, name: str | None = None, wait: bool = True) -> Any:
        """Return when every member has come here."""
        form = self._signatures.find(OperationKind.BARRIER, DType.UINT8, (), CallOptions())
        return self.dispatch.start(BarrierOperation(form), name, wait)

    def join(self) -> int:
        """Out of data: give zeros to the others' allreduces until every member has joined. The rank that did last."""
        return self.dispatch.join(self._signatures.find(OperationKind.JOIN, DType.UINT8, (), CallOptions()))

    def send(self, x: Any, to: int, *, wait: bool = True) -> Any:
        """Give an array to one member (a rank of the world), which calls receive()."""
        dispatch = self.dispatch
        source = self._as_send_buffer(x, "send")
        part = Span(address_of(source.array), 0, source.array.size)
        call = self._point_to_point_call(OperationKind.SEND, source, part, to, source)
        return dispatch.send_or_receive(call, source.array.nbytes, _no_result, wait)

    def receive(self, out: Any, source: int, *, wait: bool = True) -> Any:
        """Fill the array `out` with what one member (a rank of the world) sends, and return it."""
        dispatch = self.dispatch
        given = self._as_send_buffer(out, "receive")
        target = as_receive_buffer(out, given, "receive")
        part = Span(0, address_of(target.array), target.array.size)
        call = self._point_to_point_call(OperationKind.RECEIVE, given, part, source, target)
        return dispatch.send_or_receive(call, target.array.nbytes, target.finish, wait)

    # --- for the world, plans and objects --------------------------------------------------------------------------

    def allgather_each(self, x: Array) -> list[Array]:
        """As allgather of a flat array, but one array per member."""
        sources, _ = self._as_send_buffers(x, "allgather")
        operation = AllgatherOperation(
            self._signature_of(OperationKind.ALLGATHER, sources, CallOptions()), sources, False
        )
        everything: Array = self.dispatch.start(operation, None, True)
        return split_by_counts(everything, operation.counts)

    @property
    def dispatch(self) -> GroupChannels:
        """Where operations start. Raises when there is nothing to start here."""
        if self._channels is None:
            raise ValueError(f"rank {self._world_rank} is not a member of group {self.id} ({ranks_text(self.ranks)})")
        return self._channels

    def close(self, removed: bool = False) -> None:
        """Nothing starts here any more. Idempotent."""
        if self._channels is not None:
            self._channels.close(removed)
        self._cached_allreduces.clear()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _as_send_buffers(self, x: object, what: str, scalars_as_rows: bool = False) -> tuple[list[SendBuffer], bool]:
        """The arrays of an operation, and whether there may be several."""
        many = isinstance(x, list | tuple)
        sources = [as_send_buffer(each, what) for each in (x if isinstance(x, list | tuple) else (x,))]
        if not sources:
            raise ValueError(f"{what}: the list of arrays is empty")
        dtypes = {source.dtype.name.lower() for source in sources}
        if len(dtypes) > 1:
            raise TypeError(f"{what}: the arrays of a list must have one dtype, got {', '.join(sorted(dtypes))}")
        if scalars_as_rows:
            for source in sources:
                source.array = np.atleast_1d(source.array)
        return sources, many

    def _as_send_buffer(self, x: object, what: str) -> SendBuffer:
        if isinstance(x, list | tuple):
            raise TypeError(f"{what} takes one array, got a {type(x).__name__}; call it once per array")
        return as_send_buffer(x, what)

    def _signature_of(self, kind: OperationKind, send_buffers: Sequence[SendBuffer], options: CallOptions) -> Signature:
        shapes = tuple([source.array.shape for source in send_buffers])
        return self._signatures.find(kind, send_buffers[0].dtype, shapes, options)

    def _member_index_of(self, rank: int, what: str) -> int:
        if rank not in self.ranks:
            raise ValueError(f"{what} must be a member of group {self.id} ({ranks_text(self.ranks)}), got {rank!r}")
        return self.ranks.index(rank)

    def _check_splits(self, splits: object, num_rows: int) -> tuple[int, ...]:
        if splits is None:
            if num_rows % self.size:
                raise ValueError(f"alltoall: {num_rows} rows are no equal shares for {self.size} members; give splits")
            return (num_rows // self.size,) * self.size
        given = np.asarray(splits)
        if given.shape != (self.size,) or given.dtype.kind not in "iu" or given.min() < 0:
            raise ValueError(
                f"alltoall: splits must be {self.size} whole numbers from 0, one per member, got {splits!r}"
            )
        if int(given.sum()) > num_rows:
            raise ValueError(f"alltoall: splits ask for {int(given.sum())} rows of an array with {num_rows}")
        return tuple(given.tolist())

    def _point_to_point_call(
        self, kind: OperationKind, data: SendBuffer, span: Span, peer_rank: int, owners: object
    ) -> Call:
        what, word = ("send: to", "to") if kind is OperationKind.SEND else ("receive: source", "from")
        peer = self._member_index_of(peer_rank, what)
        if peer == self.rank:
            raise ValueError(f"{what} is this very rank, {peer_rank}; a message needs two")
        amount = f"{data.dtype.name.lower()}{list(data.array.shape)}"
        text = f"{kind.name.lower()} {amount} {word} rank {peer_rank}"
        return Call(
            kind=kind,
            dtype=data.dtype,
            spans=(span,),
            peer=peer,
            description=text,
            signature_hash=hash_signature(f"message of {amount}"),
            owners=owners,
        )


class _CachedAllreduce(NamedTuple):
    """All that is known about an allreduce from the last time it was asked for."""

    signature: Signature
    run: Callable[[Array, Array | None], Array]
    """Do it now, in program order."""


def _make_cached_run(call_signature: Signature, channel: Channel) -> Callable[[Array, Array | None], Array]:
    """The shortest way for the most frequent call: all that is equal each time is looked up and checked here, once."""
    run, label, num_bytes = channel.run, call_signature.label, call_signature.num_bytes
    kind, dtype, op, text, signature = (
        call_signature.kind,
        call_signature.dtype,
        call_signature.op,
        call_signature.description,
        call_signature.hash,
    )
    prescale, postscale, count = call_signature.prescale, call_signature.postscale, math.prod(call_signature.shapes[0])

    def allreduce(x: Array, out: Array | None) -> Array:
        source = target = address_of(x)
        if out is None:
            out = np.empty_like(x)
            target = address_of(out)
        parts = (Span(source, target, count),)
        run(Call(kind, dtype, op, parts, -1, prescale, postscale, None, None, text, signature), label, num_bytes)
        return out

    return allreduce


def _no_result() -> None:
    """The result of a send."""


def split_by_counts(data: Array, counts: Sequence[int]) -> list[Array]:
    """A flat array in pieces of these lengths."""
    return [data[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]
