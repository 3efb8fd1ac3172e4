"""A group of ranks, the operations they can do together, and the channels these run on. The module-level functions of
ronde are one line over this.

An operation without a name is matched by program order and goes straight to the group's ordered channel. One with a
name may come in any order: the members announce it to the coordinator, and it runs on the negotiated channel when all
have. One that repeats is announced in memory that the members share, if they are on one host, and runs on the announced
channel.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ronde.comm.arguments import (
    as_receive_buffers,
    as_send_buffers,
    check_device_memory,
    check_equal_rows,
    check_name,
    check_rows,
    check_splits,
    is_on_device,
)
from ronde.comm.backends.native_library import NativeStatus
from ronde.comm.buffers import Array, ReceiveBuffer, SendBuffer, address_of, as_receive_buffer, split_by_counts
from ronde.comm.call import (
    Call,
    CallOptions,
    Memory,
    Signature,
    Span,
    even_shares,
    get_signature,
    hash_signature,
    kind_of_device,
)
from ronde.comm.channel import Channel
from ronde.comm.control_thread import ControlThread
from ronde.comm.mailbox import CLOSE_TIMEOUT_S, THREAD_NAME, Handler, Mailbox
from ronde.comm.named_operations import NamedOperations
from ronde.comm.open_channels import OpenChannels
from ronde.comm.operations import (
    AllgatherWork,
    AllreduceWork,
    AlltoallWork,
    DeviceWork,
    ReceiveAnyWork,
    RunAllreduce,
    ScatterWork,
    make_cached_allreduce,
    make_row_count_exchange,
)
from ronde.comm.work import Work
from ronde.errors import PeerLost, RondeError, RoundEnded
from ronde.net.event_loop import check_threads_can_start
from ronde.net.messages import AbortChannel, CanShareIds
from ronde.observe.recorder import Recorder
from ronde.text import format_ranks
from ronde.types import Deadline, DType, Op, OperationKind

JOIN_TIMEOUT_S = 10 * 365 * 86400.0
"""join() waits for as long as others have data. The loss of a rank ends it, not the clock."""

MAX_CACHED_ALLREDUCES = 1024
MAX_CACHED_MESSAGES = 1024
MAX_TAG = 2**31 - 1

_RunCached = Callable[..., Any]


class Group:
    """Some ranks of the world, in order. ronde.init() and ronde.add_group() make groups; all ranks call them alike."""

    def __init__(
        self,
        id: int,
        ranks: tuple[int, ...],
        rank: int,
        open_channels: OpenChannels,
        control_thread: ControlThread,
        *,
        object_key: bytes = b"",
    ) -> None:
        # Opens the group's channels, together with the other members, when this rank is one.
        self.id = id
        """Its number; 0 is the world."""
        self.ranks = ranks
        """The members, as ranks of the world, sorted."""
        self.size = len(ranks)
        """Number of members."""
        self.rank = ranks.index(rank) if rank in ranks else None
        """The index of this rank among the members; None when it is not one."""
        # How long one operation may take.
        self.operation_timeout_s = open_channels.operation_timeout_s
        # With this, ronde.objects signs what it sends; empty in a job whose ranks are in one process.
        self.object_key = object_key
        # How many calls of ronde.objects there were: collectives, and messages by sender and receiver.
        self.num_objects: Counter[tuple[int, ...]] = Counter()
        self._world_rank = rank
        self._open_channels = open_channels
        self._control_thread = control_thread
        self._cached_allreduces: dict[tuple[object, ...], tuple[Signature, RunAllreduce]] = {}
        """By shape, dtype and options: the signature, and what runs it in program order and waits."""
        self._message_signatures: dict[tuple[object, ...], tuple[Signature, int]] = {}
        """By kind, dtype, shape, rank and tag: the signature, and the index of the other side."""
        self._plan_channels: list[Channel] = []
        self._num_plans: Counter[str] = Counter()
        """By name of the plan."""
        self._num_reducers = 0
        self._mailboxes: list[Mailbox] = []
        self._num_mailboxes = 0
        self._closed_error: Exception | None = None
        self._ordered_channel: Channel | None = None
        self._message_channel: Channel | None = None
        self._run_cached_allreduce: _RunCached | None = None
        self._named_operations: NamedOperations | None = None
        if self.rank is not None:
            opened: list[Channel] = []
            try:
                opened.append(open_channels.open(id, "ordered", ranks))
                opened.append(open_channels.open(id, "negotiated", ranks))
                opened.append(open_channels.open(id, "messages", ranks, point_to_point=True))
                announced_channel = open_channels.open_announced(id, ranks)
            except BaseException:
                for channel in opened:
                    open_channels.close(channel)
                raise
            self._ordered_channel, negotiated_channel, self._message_channel = opened
            self._run_cached_allreduce = self._ordered_channel.run_cached_allreduce
            self._named_operations = NamedOperations(id, negotiated_channel, control_thread.waits, announced_channel)
            open_channels.add_named_operations(self._named_operations)
            if announced_channel is not None:
                control_thread.waits.enqueue(CanShareIds(id))

    @property
    def included(self) -> bool:
        """Whether this rank is a member."""
        return self.rank is not None

    @property
    def recorder(self) -> Recorder:
        # What this rank reports of itself, for parameter servers.
        return self._open_channels.recorder

    def __repr__(self) -> str:
        return f"<Group {self.id}: {format_ranks(self.ranks)}>"

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
        """Return postscale * op(prescale * x) over all members, in a new array or in `out` (which may be x itself).

        A list or tuple of arrays of one dtype travels as a unit; then the result is a list, and out a list too.
        """
        if name is None and wait and self._run_cached_allreduce is not None:
            result = self._run_cached_allreduce(x, out, op, prescale, postscale)
            if result is not None:
                return result
        if type(x) is np.ndarray and (out is None or out is x):
            cached = self._cached_allreduces.get((x.shape, x.dtype, op, prescale, postscale))
            flags = x.flags
            if cached is not None and flags.c_contiguous and (out is None or flags.writeable):
                if name is None and wait:
                    return cached[1](x, out)
                source = target = address_of(x)
                if out is None:
                    out = np.empty_like(x)
                    target = address_of(out)
                span = Span(source, target, x.size)
                return self._start(AllreduceWork(cached[0], check_name(name), (span,), x, out), wait)
        if is_on_device(x):
            options = CallOptions(op, prescale, postscale)
            return self._start_on_device(OperationKind.ALLREDUCE, x, out, options, name, wait)
        sources, is_list = self._as_send_buffers(x, "allreduce")
        targets = as_receive_buffers(out, sources, is_list, "allreduce")
        signature = _signature_of(OperationKind.ALLREDUCE, sources, CallOptions(op, prescale, postscale))
        if type(x) is np.ndarray:
            if len(self._cached_allreduces) >= MAX_CACHED_ALLREDUCES:
                self._cached_allreduces.clear()
            run = make_cached_allreduce(signature, self.ordered_channel)
            self._cached_allreduces[x.shape, x.dtype, op, prescale, postscale] = (signature, run)
            self.ordered_channel.cache_allreduce(x, op, signature)
        spans = tuple(
            Span(address_of(source.array), address_of(target.array), source.array.size)
            for source, target in zip(sources, targets, strict=True)
        )
        results = [target.result for target in targets]
        result = results if is_list else results[0]
        return self._start(AllreduceWork(signature, check_name(name), spans, sources, result, targets), wait)

    def allgather(self, x: Any, *, name: str | None = None, wait: bool = True) -> Any:
        """Return the arrays of all members, concatenated along the first dimension, in which they may differ.

        A scalar counts as one row. A list or tuple gives a list. Without a name, wait=False still waits until every
        member has called, because only then is the size of the result known.
        """
        sources, is_list = self._as_rows(x, "allgather")
        signature = _signature_of(OperationKind.ALLGATHER, sources, CallOptions())
        return self._start(AllgatherWork(signature, check_name(name), sources, is_list), wait)

    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        name: str | None = None,
        wait: bool = True,
    ) -> Any:
        """Return the array of the root, a rank of the world, in a new array or in `out`."""
        if is_on_device(x):
            return self._start_on_device(OperationKind.BROADCAST, x, out, CallOptions(root=root), name, wait)
        source = self._as_send_buffer(x, "broadcast")
        root_index = self._member_index_of(root, "broadcast: root")
        target = as_receive_buffer(out, source, "broadcast")
        signature = _signature_of(OperationKind.BROADCAST, [source], CallOptions(root=root))
        span = Span(address_of(source.array), address_of(target.array), source.array.size)
        name = check_name(name)
        call = signature.make_call((span,), (source, target), name=name, peer=root_index)
        return self._start(Work(signature, name, (call,), target.result, (target,)), wait)

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
        """Reduce x over all members and return this rank's share of the rows. If the rows cannot be divided evenly, the
        first members get one more. A list of arrays of one dtype travels as a unit and gives a list."""
        sources, is_list = self._as_send_buffers(x, "reduce_scatter")
        check_rows(sources, "reduce_scatter")
        signature = _signature_of(OperationKind.REDUCE_SCATTER, sources, CallOptions(op, prescale, postscale))
        name = check_name(name)
        # One call, also for a list: members whose lists differ in length would lose the order of their calls otherwise.
        shares = [even_shares(source.array.shape[0], self.size) for source in sources]
        pieces = [split_by_counts(source.array, rows) for source, rows in zip(sources, shares, strict=True)]
        counts = tuple(sum(piece.size for piece in row) for row in zip(*pieces, strict=True))
        given = sources[0].array
        if is_list:  # the shares of member 0 of all arrays, then those of member 1, and so on
            given = np.concatenate([piece.reshape(-1) for row in zip(*pieces, strict=True) for piece in row])
        target = np.empty(counts[self.rank or 0], given.dtype)
        span = Span(address_of(given), address_of(target), given.size)
        call = signature.make_call((span,), (given, target), name=name, counts=counts)
        own = [row[self.rank or 0] for row in pieces]
        parts = split_by_counts(target, [piece.size for piece in own])
        results = [
            source.wrap(part.reshape(piece.shape)) for source, part, piece in zip(sources, parts, own, strict=True)
        ]
        return self._start(Work(signature, name, (call,), results if is_list else results[0]), wait)

    def alltoall(
        self,
        x: Any,
        *,
        splits: Any = None,  # a sequence of whole numbers, or an array of them
        name: str | None = None,
        wait: bool = True,
    ) -> Any:
        """Send splits[i] rows of x to member i (default: equal shares).

        Return the rows that this rank received, in the order of the members, and how many came from each. A list of
        arrays of one dtype with equally many rows travels as a unit; then the rows are a list. Without a name,
        wait=False still waits until every member has called, as in allgather.
        """
        sources, is_list = self._as_send_buffers(x, "alltoall")
        num_rows = check_equal_rows(sources, "alltoall")
        if splits is None and num_rows % self.size:
            raise ValueError(f"alltoall: {num_rows} rows are no equal shares for {self.size} members; give splits")
        own_splits = check_splits(splits, num_rows, self.size, "alltoall")
        signature = _signature_of(OperationKind.ALLTOALL, sources, CallOptions())
        work = AlltoallWork(signature, check_name(name), sources, is_list, own_splits)
        return self._start(work, wait)

    def reduce(
        self,
        x: Any,
        *,
        root: int = 0,
        op: str | Op = "sum",
        out: Any = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wait: bool = True,
    ) -> Any:
        """Return postscale * op(prescale * x) over all members on the root (a rank of the world), None on the others.

        On the root the result is in a new array or in `out`; the other members' `out` is not used. A list of arrays of
        one dtype travels as a unit; then the result is a list, and out a list too.
        """
        if is_on_device(x):
            options = CallOptions(op, prescale, postscale, root)
            return self._start_on_device(OperationKind.REDUCE, x, out, options, name, wait)
        sources, is_list = self._as_send_buffers(x, "reduce")
        root_index = self._member_index_of(root, "reduce: root")
        targets: list[ReceiveBuffer] = []
        if root_index == self.rank:
            targets = as_receive_buffers(out, sources, is_list, "reduce")
        signature = _signature_of(OperationKind.REDUCE, sources, CallOptions(op, prescale, postscale, root))
        outputs = [address_of(target.array) for target in targets] or [0] * len(sources)
        spans = tuple(
            Span(address_of(source.array), output, source.array.size)
            for source, output in zip(sources, outputs, strict=True)
        )
        results = [target.result for target in targets]
        result = (results if is_list else results[0]) if results else None
        name = check_name(name)
        call = signature.make_call(spans, (sources, targets), name=name, peer=root_index)
        return self._start(Work(signature, name, (call,), result, targets), wait)

    def gather(self, x: Any, *, root: int = 0, name: str | None = None, wait: bool = True) -> Any:
        """Return the arrays of all members on the root, a rank of the world, and None on the others.

        They are concatenated along the first dimension, in which they may differ. Without a name, wait=False still
        waits until every member has called, as in allgather.
        """
        sources, is_list = self._as_rows(x, "gather")
        root_index = self._member_index_of(root, "gather: root")
        signature = _signature_of(OperationKind.GATHER, sources, CallOptions(root=root))
        is_root = root_index == self.rank
        work = AllgatherWork(signature, check_name(name), sources, is_list, root=root_index, has_result=is_root)
        return self._start(work, wait)

    def scatter(
        self,
        x: Any,
        *,
        root: int = 0,
        splits: Any = None,  # a sequence of whole numbers, or an array of them
        name: str | None = None,
        wait: bool = True,
    ) -> Any:
        """Share out the rows of the root's array, and return those of this rank: splits[i] rows for member i. By
        default all get equally many, or the first members one more.

        The arrays of the other members only give dtype and the shape of a row, and their splits are not used. A list of
        arrays of one dtype with equally many rows travels as a unit and gives a list. Without a name, wait=False still
        waits until every member has called, as in allgather.
        """
        sources, is_list = self._as_send_buffers(x, "scatter")
        root_index = self._member_index_of(root, "scatter: root")
        check_rows(sources, "scatter")
        own_splits = None
        if root_index == self.rank:
            num_rows = check_equal_rows(sources, "scatter")
            own_splits = check_splits(splits, num_rows, self.size, "scatter")
        signature = _signature_of(OperationKind.SCATTER, sources, CallOptions(root=root))
        member_index = self.rank or 0
        work = ScatterWork(
            signature,
            check_name(name),
            sources,
            is_list,
            own_splits,
            size=self.size,
            member_index=member_index,
            root=root_index,
        )
        return self._start(work, wait)

    def barrier(self, *, name: str | None = None, wait: bool = True) -> Any:
        """Wait until every member has called barrier()."""
        signature = get_signature(OperationKind.BARRIER, DType.UINT8, (), CallOptions())
        name = check_name(name)
        return self._start(Work(signature, name, (signature.make_call((), None, name=name),)), wait)

    def join(self) -> int:
        """Contribute zeros to the allreduces of the others until every member has joined; for a rank that has no more
        data. Return the rank that joined last.

        The others can only use operations that zeros do not change: sum, mean (still divided by the number of all
        members), bit_or, bit_xor, and max of unsigned numbers. Anything else is a Mismatch for them.
        """
        channel = self.ordered_channel
        assert self._named_operations is not None
        signature = get_signature(OperationKind.JOIN, DType.UINT8, (), CallOptions())
        joined_ns = self._control_thread.now_ns()
        announced = Work(signature, "join")  # nothing to execute: the coordinator says when every member has joined
        self._named_operations.announce(announced, JOIN_TIMEOUT_S)
        call = signature.make_call((), None)
        running_calls = tuple(each.submit(call, timeout_s=JOIN_TIMEOUT_S) for each in (channel, *self._plan_channels))
        Work(signature, running_calls=running_calls, timeout_s=JOIN_TIMEOUT_S).wait()
        announced.wait()
        all_joined_ns = self._exchange_row_counts(signature, (joined_ns,), signature.label)
        return max(zip(all_joined_ns, self.ranks, strict=True))[1]

    def send(self, x: Any, to: int, *, tag: int = 0, wait: bool = True) -> Any:
        """Send an array to one member (a rank of the world), which calls receive() with the same tag.

        It returns, or its Work is done, as soon as x may be changed again: the receiver need not be there.
        """
        source = self._as_send_buffer(x, "send")
        signature, peer = self._get_message_signature(OperationKind.SEND, source, to, tag)
        span = Span(address_of(source.array), 0, source.array.size)
        call = self._make_message(signature, span, source, peer, tag)
        if wait:
            self.message_channel.send_or_receive(call, signature)
            return None
        return self._start_message(Work(signature, "", (call,)), call)

    def receive(self, out: Any, source: int | None = None, *, tag: int = 0, wait: bool = True) -> Any:
        """Receive an array from one member (a rank of the world) into `out`, and return `out`. Messages of one member
        with one tag arrive in the order in which they were sent.

        Without a source the message may come from any member; then it returns `out` and the rank that sent it.
        """
        given = self._as_send_buffer(out, "receive")
        target = as_receive_buffer(out, given, "receive")
        signature, peer = self._get_message_signature(OperationKind.RECEIVE, given, source, tag)
        span = Span(0, address_of(target.array), target.array.size)
        call = self._make_message(signature, span, target, peer, tag)
        if not wait:
            if source is None:
                return self._start_message(ReceiveAnyWork(signature, call, target, self.ranks), call)
            return self._start_message(Work(signature, "", (call,), target.result, (target,)), call)
        timing = self.message_channel.send_or_receive(call, signature)
        if target.copy_to is not None:
            target.copy_to[...] = target.array
        return target.result if timing.received is None else (target.result, self.ranks[timing.received.source])

    def open_mailbox(
        self,
        handler: Handler | None = None,
        *,
        on_lost: Callable[[int, str], object] | None = None,
        in_place: bool = False,
    ) -> Mailbox:
        """Open a mailbox, for messages that a handler takes as they come. All members open the mailboxes of a group in
        the same order, and no one waits for the others; a rank that only posts and requests needs no handler.

        The handler gets one MailboxMessage at a time, in a thread of the mailbox. `on_lost` is called there with the
        rank and the reason when a member is gone, so it needs a handler. With `in_place`, large payloads are not copied
        to memory of their own: arrays may lie in memory that is shared with the sender, and have to be let go of before
        this process forks a child that reads them.
        """
        _ = self.ordered_channel  # raises when nothing can start here
        if handler is None and on_lost is not None:
            raise ValueError("open_mailbox: on_lost needs a handler, in whose thread it is called")
        if handler is not None:
            check_threads_can_start(1, THREAD_NAME)  # now, because a channel that was closed cannot be opened again
        self._num_mailboxes += 1
        try:
            name = f"mailbox.{self._num_mailboxes}"
            channel = self._open_channels.open(self.id, name, self.ranks, point_to_point=True)
            try:
                mailbox = Mailbox(
                    channel,
                    self._world_rank,
                    handler,
                    on_lost,
                    open_channels=self._open_channels,
                    in_place=in_place,
                )
            except BaseException:
                self._open_channels.close(channel)
                raise
        except BaseException:
            self._num_mailboxes -= 1  # the next one must have the same number on all members
            raise
        self._mailboxes.append(mailbox)
        return mailbox

    # --- for the world, plans and objects --------------------------------------------------------------------------

    def decide(self, key: str, value: bytes) -> bytes:
        # The value of the member that was the first to call this with the key, in this round. The members need not all
        # call it, and a lost one hinders nobody.
        _ = self.ordered_channel  # raises when nothing can start here
        return self._control_thread.propose(f"{self.id}.{key}", value, Deadline(self.operation_timeout_s))

    def allgather_each(self, x: Array, name: str = "") -> list[Array]:
        # As allgather of a flat array, but the result is one array per member.
        sources, _ = self._as_send_buffers(x, "allgather")
        work = AllgatherWork(_signature_of(OperationKind.ALLGATHER, sources, CallOptions()), name, sources, False)
        everything: Array = self._start(work, True)
        return split_by_counts(everything, work.counts)

    @property
    def ordered_channel(self) -> Channel:
        # The channel of operations in program order. Raises when this rank can start nothing in the group.
        if self._closed_error is not None:
            raise self._closed_error
        if self._ordered_channel is None:
            raise ValueError(f"rank {self._world_rank} is not a member of group {self.id} ({format_ranks(self.ranks)})")
        return self._ordered_channel

    @property
    def message_channel(self) -> Channel:
        # The channel of send and receive. Raises as ordered_channel does.
        _ = self.ordered_channel
        assert self._message_channel is not None
        return self._message_channel

    def with_channel(self, channel: Channel) -> Group:
        # The same members, whose operations without a name run on this channel, such as that of a plan.
        group = copy.copy(self)
        group._ordered_channel = channel
        group._run_cached_allreduce = channel.run_cached_allreduce
        group._cached_allreduces = {}
        group.num_objects = Counter()
        return group

    def new_reducer_number(self) -> int:
        # Counts the reducers of gradients; all members make theirs in the same order.
        self._num_reducers += 1
        return self._num_reducers

    def open_plan_channel(self, bucket_bytes: int, name: str, *, overlapped: bool = False, number: int = 0) -> Channel:
        # A channel for one plan. All members open those of one name, which may be empty, in the same order; or they
        # give a number, under which it is opened once and can be tried again. The options are those of ChannelSpec.
        if not number:
            self._num_plans[name] += 1
        suffix = f"plan.{name}{'.' if name else ''}{number or self._num_plans[name]}"
        options = {"bucket_bytes": bucket_bytes, "overlapped": overlapped}
        channel = self._open_channels.open(self.id, suffix, self.ranks, **options)
        self._plan_channels.append(channel)
        return channel

    def close_plan_channel(self, channel: Channel) -> None:
        # Idempotent.
        if channel in self._plan_channels:
            self._plan_channels.remove(channel)
        self._open_channels.close(channel)

    def abort_plan_channel(self, channel: Channel, why: str) -> None:
        # Let the members lose this rank on the channel, because it has not done there what they expect of it.
        rank = self._world_rank
        channel.abort(PeerLost(rank=rank, peer=rank, why=why))
        id = channel.backend_channel.spec.id
        self._control_thread.waits.enqueue(AbortChannel(id, NativeStatus.PEER_LOST, rank, 0, why))

    def refuse_operation(self, name: str, why: str) -> None:
        # Let no operation of this name run any more in this round: each member gets a Mismatch for it.
        if self._named_operations is not None:
            self._named_operations.refuse(name, why)

    def leave_mailboxes(self, deadline: Deadline) -> None:
        # Called before this rank sends its last messages: no handler is called any more, and nothing more is posted.
        for mailbox in self._mailboxes:
            mailbox.leave(deadline)

    def close(self, removed: bool = False) -> None:
        # Nothing starts here any more: the group was removed, or the round is over. Idempotent.
        self._cached_allreduces.clear()
        if self._closed_error is not None or self._ordered_channel is None or self._named_operations is None:
            return
        if removed:
            self._closed_error = ValueError(f"group {self.id} was removed; nothing can be done in it any more")
        else:
            self._closed_error = RoundEnded("the round is over: shutdown() was called")
        why = str(self._closed_error)
        self._named_operations.abort(RoundEnded(why))
        self._open_channels.remove_named_operations(self.id)
        mailboxes, self._mailboxes = self._mailboxes, []
        for mailbox in mailboxes:
            mailbox.end(why)
        channels = (
            *self._plan_channels,
            *self._named_operations.channels,
            self._message_channel,
            self._ordered_channel,
        )
        for channel in channels:
            if channel is not None:
                self._open_channels.close(channel, why)
        deadline = Deadline(CLOSE_TIMEOUT_S)
        for mailbox in mailboxes:
            mailbox.join(deadline)  # last, because a handler may have waited on any of the channels

    def refuse_in_child(self, error: RondeError) -> None:
        # This process is a forked child: everything raises the error. OpenChannels sees to the channels.
        self._cached_allreduces.clear()
        self._closed_error = error

    # --- starting an operation ---------------------------------------------------------------------------------------

    def _start(self, work: Work, wait: bool) -> Any:  # the result, or the work
        """Announce an operation that has a name; start any other one in program order."""
        channel, signature = self.ordered_channel, work.signature
        if work.name:
            assert self._named_operations is not None
            if wait and not work.streams:
                return self._named_operations.run(work, self.operation_timeout_s)
            self._named_operations.announce(work, self.operation_timeout_s)
            return _wait_on_streams(work) if wait else work
        rows = work.own_rows
        calls = work.make_calls(None if rows is None else self._exchange_row_counts(signature, rows))
        if wait and len(calls) == 1 and not work.streams:
            channel.run(calls[0], signature)
            return work.finish()
        running_calls = [channel.submit(call) for call in calls[:-1]]
        running_calls.append(channel.submit(calls[-1], ((signature, ""),)))
        work.timeout_s = self.operation_timeout_s
        work.started_on(tuple(running_calls))
        if not wait:
            return work
        return _wait_on_streams(work) if work.streams else work.wait()

    def _start_on_device(
        self, kind: OperationKind, x: Any, out: Any, options: CallOptions, name: str | None, wait: bool
    ) -> Any:  # the result, or the work
        """Start an operation on memory of another device than the CPU."""
        what = kind.name.lower()
        _ = self.ordered_channel  # raises when nothing can start here
        is_list = isinstance(x, list | tuple)
        if is_list and kind is OperationKind.BROADCAST:
            raise TypeError(f"broadcast takes one array, got a {type(x).__name__}; call it once per array")
        sources: list[Memory] = list(x) if is_list else [x]
        root_index = -1 if kind is OperationKind.ALLREDUCE else self._member_index_of(options.root, f"{what}: root")
        has_result = kind is not OperationKind.REDUCE or root_index == self.rank
        outs = list(out) if is_list and isinstance(out, list | tuple) else [out]
        targets: list[Memory] = outs if has_result else []
        check_device_memory(sources, targets, what)
        device = sources[0].device
        self._open_channels.check_device(device, what)
        shapes = tuple([source.shape for source in sources])
        options = options._replace(device=kind_of_device(device))
        signature = get_signature(kind, sources[0].number, shapes, options)
        outputs = [target.address for target in targets] or [0] * len(sources)
        spans = tuple(
            Span(source.address, output, source.size) for source, output in zip(sources, outputs, strict=True)
        )
        given = [each.stream for each in (*sources, *targets) if each.stream is not None]
        work = DeviceWork(
            signature,
            check_name(name),
            spans,
            (sources, targets),
            out if has_result else None,
            device=device,
            streams=tuple(dict.fromkeys(given)),
            root=root_index,
        )
        return self._start(work, wait)

    def _exchange_row_counts(self, ahead_of: Signature, own_rows: tuple[int, ...], label: str = "") -> tuple[int, ...]:
        """The row counts of all members, in their order, of an alltoall those for this rank, or of the root of a
        scatter, by a small call ahead of the operation."""
        signature, call, row_counts = make_row_count_exchange(ahead_of, own_rows, self.ranks, label)
        self.ordered_channel.run(call, signature)
        if ahead_of.kind is OperationKind.ALLTOALL:
            row_counts = row_counts[self.rank or 0 :: self.size]
        return tuple(row_counts.tolist())

    # --- checking the caller's arguments -----------------------------------------------------------------------------

    def _as_send_buffers(self, x: object, what: str) -> tuple[list[SendBuffer], bool]:
        """The arrays of an operation, and whether they were given as a list."""
        _ = self.ordered_channel  # raises, before arguments are looked at, when nothing can start here
        return as_send_buffers(x, what)

    def _as_rows(self, x: object, what: str) -> tuple[list[SendBuffer], bool]:
        """As _as_send_buffers; a scalar counts as one row."""
        sources, is_list = self._as_send_buffers(x, what)
        return [source._replace(array=np.atleast_1d(source.array)) for source in sources], is_list

    def _as_send_buffer(self, x: object, what: str) -> SendBuffer:
        if isinstance(x, list | tuple):
            raise TypeError(f"{what} takes one array, got a {type(x).__name__}; call it once per array")
        return self._as_send_buffers(x, what)[0][0]

    def _member_index_of(self, rank: int | None, what: str) -> int:
        try:
            return self.ranks.index(operator.index(rank))  # type: ignore[arg-type]  # None is refused, too
        except (TypeError, ValueError):
            members = format_ranks(self.ranks)
            raise ValueError(f"{what} must be a member of group {self.id} ({members}), got {rank!r}") from None

    # --- messages ----------------------------------------------------------------------------------------------------

    def _get_message_signature(
        self, kind: OperationKind, data: SendBuffer, peer_rank: int | None, tag: int
    ) -> tuple[Signature, int]:
        """The signature of a message and the index of its other side, -1 for any; made and checked once."""
        key = (kind, data.dtype, data.array.shape, peer_rank, tag)
        found = self._message_signatures.get(key)
        if found is None:
            if len(self._message_signatures) >= MAX_CACHED_MESSAGES:
                self._message_signatures.clear()
            found = self._message_signatures[key] = self._make_message_signature(kind, data, peer_rank, tag)
        return found

    def _make_message_signature(
        self, kind: OperationKind, data: SendBuffer, peer_rank: int | None, tag: int
    ) -> tuple[Signature, int]:
        what, word = ("send: to", "to") if kind is OperationKind.SEND else ("receive: source", "from")
        if peer_rank is None and kind is OperationKind.RECEIVE:
            peer, other_side = -1, "any rank"
            if self.size == 1:
                raise ValueError(f"receive: group {self.id} has one member, so there is nobody to receive from")
        else:
            peer, other_side = self._member_index_of(peer_rank, what), f"rank {peer_rank}"
        if peer == self.rank:
            raise ValueError(f"{what} is this very rank, {peer_rank}; a message needs two")
        if not isinstance(tag, int | np.integer) or not 0 <= tag <= MAX_TAG:
            raise ValueError(f"{kind.name.lower()}: tag must be a whole number from 0 to {MAX_TAG}, got {tag!r}")
        label, amount = kind.name.lower(), f"{data.dtype.name.lower()}{list(data.array.shape)}"
        description = f"{label} {amount} {word} {other_side}" + (f" with tag {tag}" if tag else "")
        hash = hash_signature(f"message of {amount}")
        shapes, num_bytes = (data.array.shape,), data.array.nbytes
        signature = Signature(kind, data.dtype, shapes, Op.SUM, 1.0, 1.0, -1, label, description, hash, num_bytes)
        return signature, peer

    def _make_message(self, signature: Signature, span: Span, owners: object, peer: int, tag: int) -> Call:
        return Call(
            signature.kind,
            signature.dtype,
            spans=(span,),
            peer=peer,
            description=signature.description,
            signature_hash=signature.hash,
            owners=owners,
            tag=tag,
            window_bytes=self._open_channels.message_buffer_bytes,
        )

    def _start_message(self, work: Work, call: Call) -> Work:
        work.timeout_s = self.operation_timeout_s
        work.started_on((self.message_channel.submit(call, ((work.signature, ""),)),))
        return work


def _signature_of(kind: OperationKind, send_buffers: Sequence[SendBuffer], options: CallOptions) -> Signature:
    shapes = tuple([buffer.array.shape for buffer in send_buffers])
    return get_signature(kind, send_buffers[0].dtype, shapes, options)


def _wait_on_streams(work: Work) -> Any:
    """The result of an operation on another device, for which its streams wait, and not the caller."""
    result = None
    for stream in work.streams or (None,):
        result = work.wait(stream=stream)
    return result
