"""Negotiation of named operations: when may one run, and do the requests of its members agree? Without I/O.

A named operation is *idle* (remembered, so that ranks can announce it by its id) or *pending* (some members have
announced it). When the last member has, it is *ready*. The next take_sends() checks that the requests agree, sends
RunOperations to all members, or OperationRejected with the difference, and the operation is idle again or forgotten.
What became ready between two calls may be fused; no operation ever waits for another.

    idle ──first member announces──> pending ──last member announces──> ready ──agreed: RunOperations──> idle
                                                                          └─────else: OperationRejected──> forgotten

An id stands for the request that *this rank* last announced in full under that name; a rank whose request is not known
any more is asked for it (UnknownOperationId). A rank that has called join() counts as having announced every allreduce;
afterwards it has to announce in full, so that an id has one meaning on both sides.

Announcing a known id costs a few dictionary lookups, however many operations are pending. Numbers in requests come from
the network and may be anything: nothing here relies on them before _find_mismatch() has checked them.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ronde.net.messages import (
    AgreedOperation,
    AnnounceOperations,
    CoordinatorMessage,
    OperationRejected,
    OperationRequest,
    RunOperations,
    UnknownOperationId,
)
from ronde.observe.stalls import WaitingOperation
from ronde.text import format_rank_answers, format_ranks, shorten
from ronde.types import (
    JOINABLE,
    REDUCING_KINDS,
    ROOTED_KINDS,
    VARIABLE_ROW_KINDS,
    DType,
    Op,
    OperationKind,
    can_be_joined,
    find_reduction_error,
)

SPLIT_KINDS = (OperationKind.ALLTOALL, OperationKind.SCATTER)
"""Kinds whose rows are split as `splits` says, once for all arrays of an operation."""
NAMED_KINDS = (*REDUCING_KINDS, *VARIABLE_ROW_KINDS, OperationKind.BARRIER, OperationKind.BROADCAST)

MAX_CACHED_OPERATIONS = 65_536
"""Idle operations that are remembered; the one that ran longest ago is forgotten first."""
MAX_ERROR_CHARS = 4000
MIN_STRAGGLER_DELAY_NS = 100_000
"""Members that announce within this time are not late."""
MAX_STRAGGLERS = 8
"""Most stragglers that are reported, the last ones."""

ComparedField = tuple[str, Callable[[OperationRequest], str]]
FusionKey = tuple[int, int, int, float, float]


def _title(request: OperationRequest) -> str:
    """The start of an error text: `allreduce 'w'`, and the group if it is not the world."""
    where = f" of group {request.group}" if request.group else ""
    return f"{_format_kind(request)} {shorten(request.name)!r}{where}"


def _describe(request: OperationRequest) -> str:
    """The text for stall reports: `allreduce 'w' sum float32[3, 4]`."""
    words = [_format_kind(request), repr(shorten(request.name))]
    if request.kind in REDUCING_KINDS:
        words.append(_format_op(request))
    if request.shapes:
        shapes = [f"[{', '.join(map(str, shape))}]" for shape in request.shapes[:4]]
        words.append(f"{_format_dtype(request)}{' '.join(shapes)}{' …' if len(request.shapes) > 4 else ''}")
    return " ".join(words)


def _row_counts(requests: Mapping[int, OperationRequest], members: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return AgreedOperation.row_counts for valid requests. None if all members have the same number of rows; a member
    that has called join() has no request then."""
    first = next(iter(requests.values()))
    if first.kind in (OperationKind.ALLGATHER, OperationKind.GATHER):
        return tuple(shape[0] for member in members for shape in requests[member].shapes)
    if first.kind == OperationKind.ALLTOALL:
        return tuple(itertools.chain(*(_splits_of(requests[member], len(members)) for member in members)))
    if first.kind == OperationKind.SCATTER:
        return _splits_of(requests[first.root], len(members))
    return None


def _splits_of(request: OperationRequest, num_members: int) -> tuple[int, ...]:
    if request.splits is not None:
        return request.splits
    least, more = divmod(request.shapes[0][0], num_members)
    return tuple(least + (index < more) for index in range(num_members))


def _find_mismatch(requests: Mapping[int, OperationRequest], members: tuple[int, ...]) -> str:
    """Return why these requests, by rank, cannot run as one operation; empty if they can."""
    ranks = sorted(requests)
    first = requests[ranks[0]]
    if any(requests[rank].kind != first.kind for rank in ranks):
        kinds = format_rank_answers({rank: _format_kind(requests[rank]) for rank in ranks})
        return f"operation {first.name!r}: ranks disagree on what it is: {kinds}"
    if any(requests[rank] != first for rank in ranks):
        for what, text in _compared_fields(first, requests):
            answers = {rank: text(requests[rank]) for rank in ranks}
            if len(set(answers.values())) > 1:
                return f"{_title(first)}: ranks disagree on {what}: {format_rank_answers(answers)}"
    errors = {rank: _find_invalid(requests[rank], members) for rank in ranks}
    wrong = {rank: error for rank, error in errors.items() if error}
    if len(wrong) == len(ranks) and len(set(wrong.values())) == 1:
        return f"{_title(first)}: {wrong[ranks[0]]}"
    return f"{_title(first)}: {format_rank_answers(wrong, verb=': ')}" if wrong else ""


def _compared_fields(first: OperationRequest, requests: Mapping[int, OperationRequest]) -> Iterator[ComparedField]:
    """What has to be equal on all members. The first difference in this order is reported."""
    if first.kind not in NAMED_KINDS or first.kind == OperationKind.BARRIER:
        return
    yield "dtype", _format_dtype
    if first.kind in REDUCING_KINDS:
        yield "op", _format_op
    if first.kind in ROOTED_KINDS:
        yield "root", lambda request: str(request.root)
    yield "the number of arrays", lambda request: str(len(request.shapes))
    yield _first_unequal_shape(first, requests)
    if first.kind in REDUCING_KINDS:
        yield "prescale", lambda request: repr(request.prescale)
        yield "postscale", lambda request: repr(request.postscale)


def _first_unequal_shape(first: OperationRequest, requests: Mapping[int, OperationRequest]) -> ComparedField:
    """Of a group of hundreds of arrays, only the first one that differs is shown."""
    has_rows = first.kind in VARIABLE_ROW_KINDS

    def text(shape: tuple[int, ...]) -> str:
        """A shape; if its first dimension may differ, with a star in its place: `(*, 4)`."""
        return f"(*{''.join(f', {dimension}' for dimension in shape[1:])})" if has_rows and shape else str(shape)

    differing = (
        index
        for index, shape in enumerate(first.shapes)
        if any(text(request.shapes[index]) != text(shape) for request in requests.values())
    )
    index = next(differing, 0)
    what = "shape" if len(first.shapes) == 1 else f"the shape of array {index}"
    return what, lambda request: text(request.shapes[index]) if request.shapes else ""


def _find_invalid(request: OperationRequest, members: tuple[int, ...]) -> str:
    """Return what is wrong with one request by itself."""
    if request.kind not in NAMED_KINDS:
        return f"{_format_kind(request)} is nothing that can be asked for by name"
    if request.kind == OperationKind.BARRIER:
        return ""
    if request.dtype not in DType.__members__.values():
        return f"{_format_dtype(request)} is not known"
    if not request.shapes:
        return "no arrays were given"
    if any(dimension < 0 for shape in request.shapes for dimension in shape):
        return f"a dimension below 0 in {', '.join(map(str, request.shapes))}"
    if request.kind in (*VARIABLE_ROW_KINDS, OperationKind.REDUCE_SCATTER) and not all(request.shapes):
        return "it needs arrays of at least 1 dimension, got a scalar"
    if request.kind in ROOTED_KINDS and request.root not in members:
        return f"root {request.root} is not a member ({format_ranks(members)})"
    if request.kind in REDUCING_KINDS:
        if request.op not in Op.__members__.values():
            return f"{_format_op(request)} is not known"
        scaled = (request.prescale, request.postscale) != (1.0, 1.0)
        return find_reduction_error(OperationKind(request.kind), DType(request.dtype), Op(request.op), scaled=scaled)
    return _find_invalid_splits(request, len(members)) if request.kind in SPLIT_KINDS else ""


def _find_invalid_splits(request: OperationRequest, num_members: int) -> str:
    rows = request.shapes[0][0]
    if request.kind == OperationKind.ALLTOALL and any(shape[0] != rows for shape in request.shapes):
        return f"its arrays must have equally many rows, got {', '.join(str(shape[0]) for shape in request.shapes)}"
    if request.splits is None:
        uneven = request.kind == OperationKind.ALLTOALL and rows % num_members
        return f"{rows} rows are no equal shares for {num_members} members; give splits" if uneven else ""
    if len(request.splits) != num_members:
        return f"splits has {len(request.splits)} entries for {num_members} members"
    if min(request.splits) < 0:
        return f"splits {request.splits} has an entry below 0"
    if sum(request.splits) > rows:
        return f"splits {request.splits} asks for {sum(request.splits)} rows of an array with {rows}"
    return ""


def _format_kind(request: OperationRequest) -> str:
    return _format_enum(OperationKind, request.kind, "kind")


def _format_dtype(request: OperationRequest) -> str:
    return _format_enum(DType, request.dtype, "dtype")


def _format_op(request: OperationRequest) -> str:
    return _format_enum(Op, request.op, "op")


def _format_enum(type: type[enum.IntEnum], value: int, what: str) -> str:
    return type(value).name.lower() if value in type.__members__.values() else f"{what} {value}"


class Send(NamedTuple):
    """A message to be sent to these ranks."""

    ranks: tuple[int, ...]
    message: CoordinatorMessage


_NOT_AGREED = AgreedOperation(0, "")
_NOTHING_TO_SEND = Send((), RunOperations(0, ()))


@dataclass(eq=False, slots=True)
class _GroupState:
    """One group and its pending operations. Sets of ranks are bit masks."""

    id: int
    members: tuple[int, ...]
    member_mask: int
    joined_mask: int = 0
    operations: dict[str, _NegotiatedOperation] = field(default_factory=dict)
    pending: dict[int, _NegotiatedOperation] = field(default_factory=dict)
    closed_reason: str = ""
    """Why nothing can run any more: a member is lost."""


@dataclass(eq=False, slots=True)
class _NegotiatedOperation:
    """One name of a group. What follows is_agreed is made when the members agree, and valid until a request changes."""

    id: int
    group: _GroupState
    name: str
    requests: dict[int, OperationRequest] = field(default_factory=dict)
    announced_mask: int = 0
    announce_times: list[tuple[int, int]] = field(default_factory=list)
    """(bit of the rank, when), in the order of arrival."""
    ready: bool = False
    since_ns: int = 0
    invalid_reason: str = ""
    is_agreed: bool = False
    agreed_operation: AgreedOperation = _NOT_AGREED
    run_message: Send = _NOTHING_TO_SEND
    fusion_key: FusionKey | None = None
    num_bytes: int = 0

    @property
    def title(self) -> str:
        return _title(self.requests[_ranks_in_mask(self.group, self.announced_mask)[0]])


class Negotiator:
    """The named operations of a round. announce() takes what ranks announce, take_sends() returns the answers."""

    def __init__(self, size: int, *, fusion_bytes: int, max_cached: int = MAX_CACHED_OPERATIONS) -> None:
        self._fusion_bytes = fusion_bytes
        self._max_cached = max_cached
        self._groups: dict[int, _GroupState] = {}
        self._operations: dict[int, _NegotiatedOperation] = {}
        self._idle: dict[int, _NegotiatedOperation] = {}  # in the order of their last run
        self._ready: list[_NegotiatedOperation] = []
        self._sends: list[Send] = []
        self._last_id = 0
        self._last_group = -1
        self.add_group(tuple(range(size)))

    def members(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group; empty if there is no such group."""
        found = self._groups.get(group)
        return found.members if found is not None else ()

    def add_group(self, members: tuple[int, ...]) -> int:
        """Add a group and return its id; 0 is the world. No id is used again: a late message cannot mean another group.
        allgather concatenates rows in the order of the members."""
        self._last_group += 1
        mask = sum(1 << rank for rank in members)
        self._groups[self._last_group] = _GroupState(self._last_group, members, mask)
        return self._last_group

    def remove_group(self, group: int) -> tuple[int, ...]:
        """Remove a group and return its members. Its pending operations are rejected on those that announced them."""
        self._decide_ready()
        removed = self._groups.pop(group)
        for operation in removed.pending.values():
            self._reject(operation, f"{operation.title}: the group was removed before all members announced it")
        self._forget_all(removed)
        return removed.members

    def rank_lost(self, rank: int, why: str) -> None:
        """Let nothing more run in the groups of a lost rank. Rejects nothing: members that wait get RankLost."""
        self._decide_ready()
        for group in self._groups.values():
            if group.member_mask >> rank & 1 and not group.closed_reason:
                group.closed_reason = f"rank {rank} is gone: {why}"
                self._forget_all(group)

    def announce(self, rank: int, message: AnnounceOperations, now_ns: int) -> None:
        """Take the operations that a rank is ready for. take_sends() returns the answers."""
        bit = 1 << rank
        for request in message.new:
            self._announce_in_full(rank, bit, request, now_ns)
        operations = self._operations
        for known in message.known_ids:
            operation = operations.get(known)
            if operation is None or rank not in operation.requests:
                self._sends.append(Send((rank,), UnknownOperationId(known)))
            else:
                self._count_announcement(operation, bit, now_ns)

    def take_sends(self) -> list[Send]:
        """Return what to send, in this order."""
        if self._ready:
            self._decide_ready()
        out = self._sends
        if out:
            self._sends = []
        return out

    def missing(self, group: int, name: str) -> tuple[int, ...]:
        """Return the ranks that a named operation waits for; empty if it is not pending."""
        found = self._groups.get(group)
        operation = found.operations.get(name) if found is not None else None
        return _missing_ranks(operation) if operation is not None and operation.announced_mask else ()

    def pending(self, until_ns: int) -> Iterator[WaitingOperation]:
        """Yield what has been pending since until_ns or longer, per group the oldest first."""
        for group in self._groups.values():
            for operation in group.pending.values():
                if operation.since_ns > until_ns:
                    break
                announced = _ranks_in_mask(group, operation.announced_mask)
                yield WaitingOperation(
                    op=_describe(operation.requests[announced[0]]),
                    group=group.id,
                    since_ns=operation.since_ns,
                    missing=_missing_ranks(operation),
                    present=announced,
                )

    # --- announcements ---------------------------------------------------------------------------------------------

    def _announce_in_full(self, rank: int, bit: int, request: OperationRequest, now_ns: int) -> None:
        group = self._groups.get(request.group)
        if group is None:
            why = f"group {request.group} does not exist, or was removed"
        elif not group.member_mask & bit:
            why = f"rank {rank} is not a member ({format_ranks(group.members)})"
        else:
            why = group.closed_reason
        if group is None or why:
            reason = f"{_title(request)}: {why}"
            self._sends.append(Send((rank,), OperationRejected(request.group, request.name, reason)))
            return
        if request.kind == OperationKind.JOIN:
            self._join(group, rank, request)
            return
        operation = group.operations.get(request.name)
        if operation is None:
            self._last_id += 1
            operation = _NegotiatedOperation(self._last_id, group, request.name)
            group.operations[request.name] = self._operations[operation.id] = operation
        announced_twice = operation.announced_mask & bit  # the first request stays
        if not announced_twice and operation.requests.get(rank) != request:
            operation.requests[rank] = request
            operation.is_agreed = False
        self._count_announcement(operation, bit, now_ns)

    def _count_announcement(self, operation: _NegotiatedOperation, bit: int, now_ns: int) -> None:
        arrived = operation.announced_mask
        group = operation.group
        if not arrived:
            self._idle.pop(operation.id, None)
            group.pending[operation.id] = operation
            operation.since_ns = now_ns
        elif arrived & bit:
            # Rejected when all have announced it, as for every other error: then each member gets one answer.
            twice = f"rank {bit.bit_length() - 1} announced it again while it was under way"
            operation.invalid_reason = f"{operation.title}: {twice}"
            return
        operation.announced_mask = arrived | bit
        operation.announce_times.append((bit, now_ns))
        if operation.announced_mask | group.joined_mask == group.member_mask and not operation.ready:
            operation.ready = True
            self._ready.append(operation)

    def _join(self, group: _GroupState, rank: int, request: OperationRequest) -> None:
        group.joined_mask |= 1 << rank
        for operation in group.pending.values():
            if operation.announced_mask | group.joined_mask == group.member_mask and not operation.ready:
                operation.ready = True
                self._ready.append(operation)
        if group.joined_mask != group.member_mask:
            return
        self._decide_ready()
        group.joined_mask = 0
        item = AgreedOperation(0, request.name, row_counts=(rank,))  # no id: a join is always announced in full
        self._sends.append(Send(group.members, RunOperations(group.id, (item,))))

    # --- what is ready ---------------------------------------------------------------------------------------------

    def _decide_ready(self) -> None:
        """Run or reject everything that is ready, fused in the order of readiness."""
        ready = self._ready
        self._ready = []
        runs: list[list[_NegotiatedOperation]] = []
        open_runs: dict[FusionKey, list[_NegotiatedOperation]] = {}
        left: dict[FusionKey, int] = {}  # bytes of room in the open run
        for operation in ready:
            if (
                not operation.is_agreed
                or operation.invalid_reason
                or operation.announced_mask != operation.group.member_mask
            ) and not self._check_agreement(operation):
                continue
            key = operation.fusion_key
            if key is None:
                runs.append([operation])
            elif key in open_runs and operation.num_bytes <= left[key]:
                open_runs[key].append(operation)
                left[key] -= operation.num_bytes
            else:
                open_runs[key] = run = [operation]
                left[key] = self._fusion_bytes - operation.num_bytes
                runs.append(run)
        for run in runs:
            self._run_batch(run)

    def _check_agreement(self, operation: _NegotiatedOperation) -> bool:
        """Return whether it can run: the requests agree, and joined members can contribute zeros. Else reject it."""
        group = operation.group
        announced = _ranks_in_mask(group, operation.announced_mask)
        requests = {rank: operation.requests[rank] for rank in announced}
        request = requests[announced[0]]
        is_allreduce = request.kind == OperationKind.ALLREDUCE
        why = operation.invalid_reason or _find_mismatch(requests, group.members)
        if not why and len(announced) < len(group.members):
            if not is_allreduce or not can_be_joined(DType(request.dtype), Op(request.op)):
                joined = format_ranks(_ranks_in_mask(group, group.member_mask & ~operation.announced_mask))
                why = f"{_title(request)}: {joined} called join() and takes part {JOINABLE}"
        if why:
            self._reject(operation, why)
            self._forget(operation)
            return False
        rows = _row_counts(requests, group.members)
        operation.agreed_operation = AgreedOperation(operation.id, operation.name, row_counts=rows)
        operation.run_message = Send(group.members, RunOperations(group.id, (operation.agreed_operation,)))
        operation.fusion_key = None
        if self._fusion_bytes and is_allreduce and request.op != Op.ADASUM:  # Adasum looks at each tensor as a whole
            scales = (request.prescale, request.postscale)
            operation.fusion_key = (request.group, request.dtype, request.op, *scales)
            operation.num_bytes = sum(map(math.prod, request.shapes)) * DType(request.dtype).num_bytes
        operation.is_agreed = len(announced) == len(group.members)
        return True

    def _run_batch(self, batch: list[_NegotiatedOperation]) -> None:
        group = batch[0].group
        stragglers = _stragglers(batch)
        if any(operation.announced_mask != group.member_mask for operation in batch):
            self._run_batch_with_joined(batch, stragglers)
        elif len(batch) == 1 and not stragglers:
            self._sends.append(batch[0].run_message)
        else:
            agreed = tuple([operation.agreed_operation for operation in batch])
            self._sends.append(Send(group.members, RunOperations(group.id, agreed, stragglers)))
        for operation in batch:
            operation.announced_mask = 0
            operation.announce_times.clear()
            operation.ready = False
            del group.pending[operation.id]
            self._idle[operation.id] = operation
        while len(self._operations) > self._max_cached and self._idle:
            self._forget(next(iter(self._idle.values())))

    def _run_batch_with_joined(
        self, batch: list[_NegotiatedOperation], stragglers: tuple[tuple[int, int], ...]
    ) -> None:
        """Each member gets in full what it has not announced itself, and has to announce that in full next time."""
        group = batch[0].group
        for rank in group.members:
            items = []
            for operation in batch:
                if operation.announced_mask >> rank & 1:
                    items.append(operation.agreed_operation)
                else:
                    operation.requests.pop(rank, None)
                    operation.is_agreed = False
                    request = next(
                        operation.requests[other] for other in group.members if operation.announced_mask >> other & 1
                    )
                    items.append(AgreedOperation(operation.id, operation.name, request))
            self._sends.append(Send((rank,), RunOperations(group.id, tuple(items), stragglers)))

    def _reject(self, operation: _NegotiatedOperation, why: str) -> None:
        announced = _ranks_in_mask(operation.group, operation.announced_mask)
        rejected = OperationRejected(operation.group.id, operation.name, shorten(why, MAX_ERROR_CHARS))
        self._sends.append(Send(announced, rejected))

    def _forget(self, operation: _NegotiatedOperation) -> None:
        del self._operations[operation.id], operation.group.operations[operation.name]
        self._idle.pop(operation.id, None)
        operation.group.pending.pop(operation.id, None)

    def _forget_all(self, group: _GroupState) -> None:
        for operation in list(group.operations.values()):
            self._forget(operation)


def _stragglers(batch: list[_NegotiatedOperation]) -> tuple[tuple[int, int], ...]:
    """Return RunOperations.stragglers: the members that announced this batch last, the very last first."""
    last_ns = max([operation.announce_times[-1][1] for operation in batch])
    if last_ns - min([operation.since_ns for operation in batch]) < MIN_STRAGGLER_DELAY_NS:
        return ()
    last_announced: dict[int, int] = {}
    for operation in batch:
        for bit, at_ns in operation.announce_times:
            last_announced[bit] = max(at_ns, last_announced.get(bit, 0))
    latest = sorted(last_announced.items(), key=lambda item: -item[1])[:MAX_STRAGGLERS]
    return tuple((bit.bit_length() - 1, last_ns - at_ns) for bit, at_ns in latest)


def _missing_ranks(operation: _NegotiatedOperation) -> tuple[int, ...]:
    """Ranks that wait in join() count as having announced it."""
    group = operation.group
    return _ranks_in_mask(group, group.member_mask & ~(operation.announced_mask | group.joined_mask))


def _ranks_in_mask(group: _GroupState, mask: int) -> tuple[int, ...]:
    return tuple(rank for rank in group.members if mask >> rank & 1)
