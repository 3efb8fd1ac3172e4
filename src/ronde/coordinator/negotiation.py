"""Whether requests of one name can run together, and what to say when they cannot. Used by the negotiator.

Everything here is a function of the requests. Numbers come from the wire and may be anything: nothing here trusts them.

When may a named operation run? A state machine without I/O: announcements in, messages out. Used by the coordinator.

An *entry* is a name of a group with what each rank asked for under it. It is *idle* (remembered, so that ranks can
announce it by its id) or *in flight* (some members have announced it). When the last member has, the entry is *ready*;
the next flush() checks that the members agree, tells all of them to run it, or all of them why not, and the entry is
idle again. What became ready between two flushes may travel together; nothing ever waits for company.

    idle ──first member announces──> in flight ──last member announces──> ready ──flush: Run──> idle
                                                                            └─────flush: Failed──> forgotten

An id stands for what *this rank* announced last in full under that name; so a rank whose words are not known any more
is asked for them (Unknown). A rank that has joined counts as having announced every allreduce; afterwards it has to
announce in full, so that an id can never mean something else here than there.

Cost: a known announcement is a few dictionary lookups, however many names are in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
from ronde.text import format_rank_answers, format_ranks, shorten
from ronde.types import DType, Op, OperationKind, find_reduction_error

__all__ = [
    "Negotiator",
    "PendingOperation",
    "Send",
    "describe_request",
    "find_mismatch",
    "fusion_key",
    "num_bytes",
    "operation_title",
    "row_counts",
]

REDUCING_KINDS = (OperationKind.ALLREDUCE, OperationKind.REDUCE_SCATTER)
SINGLE_ARRAY_KINDS = (OperationKind.REDUCE_SCATTER, OperationKind.ALLTOALL)
"""Kinds that work on one array: how rows are shared out is said once per operation."""
VARIABLE_ROW_KINDS = (OperationKind.ALLGATHER, OperationKind.ALLTOALL)
"""Kinds where members may give different numbers of rows."""
NAMED_KINDS = (*REDUCING_KINDS, *VARIABLE_ROW_KINDS, OperationKind.BARRIER, OperationKind.BROADCAST)

ComparedField = tuple[str, Callable[[OperationRequest], str]]


def operation_title(request: OperationRequest) -> str:
    """What an error starts with: `allreduce 'w'`, and the group when it is not the world."""
    where = f" of group {request.group}" if request.group else ""
    return f"{_format_kind(request)} {shorten(request.name)!r}{where}"


def describe_request(request: OperationRequest) -> str:
    """In words, for the stall report: `allreduce 'w' sum float32[3, 4]`, as without a name but for that."""
    words = [_format_kind(request), repr(shorten(request.name))]
    if request.kind in REDUCING_KINDS:
        words.append(_format_op(request))
    if request.shapes:
        shapes = [f"[{', '.join(map(str, shape))}]" for shape in request.shapes[:4]]
        words.append(f"{_format_dtype(request)}{' '.join(shapes)}{' …' if len(request.shapes) > 4 else ''}")
    return " ".join(words)


def num_bytes(request: OperationRequest) -> int:
    """Size of what one member gives. The request must be without fault."""
    return sum(map(math.prod, request.shapes)) * DType(request.dtype).num_bytes


def fusion_key(request: OperationRequest) -> tuple[int, int, int, float, float] | None:
    """Requests with equal keys may travel as one; None travels alone."""
    if request.kind != OperationKind.ALLREDUCE or request.op == Op.ADASUM:  # Adasum looks at each tensor as a whole
        return None
    return (request.group, request.dtype, request.op, request.prescale, request.postscale)


def row_counts(requests: Mapping[int, OperationRequest], members: tuple[int, ...]) -> tuple[int, ...] | None:
    """RunItem.rows for requests without fault: who gives how many rows, where members may differ in that. Where they
    may not, a member that has joined may be without a request."""
    kind = next(iter(requests.values())).kind
    if kind == OperationKind.ALLGATHER:
        return tuple(shape[0] for member in members for shape in requests[member].shapes)
    if kind == OperationKind.ALLTOALL:
        return tuple(rows for member in members for rows in _splits(requests[member], len(members)))
    return None


def find_mismatch(requests: Mapping[int, OperationRequest], members: tuple[int, ...]) -> str:
    """Why these requests, by rank, cannot run as one operation of the members; empty when they can."""
    ranks = sorted(requests)
    first = requests[ranks[0]]
    if any(requests[rank].kind != first.kind for rank in ranks):
        gave = format_rank_answers({rank: _format_kind(requests[rank]) for rank in ranks})
        return f"operation {first.name!r}: ranks disagree on what it is: {gave}"
    if any(requests[rank] != first for rank in ranks):
        for what, text in _compared_fields(first, requests):
            said = {rank: text(requests[rank]) for rank in ranks}
            if len(set(said.values())) > 1:
                return f"{operation_title(first)}: ranks disagree on {what}: {format_rank_answers(said)}"
    faults = {rank: _find_invalid(requests[rank], members) for rank in ranks}
    wrong = {rank: fault for rank, fault in faults.items() if fault}
    if not wrong:
        return ""
    if len(wrong) == len(ranks) and len(set(wrong.values())) == 1:
        return f"{operation_title(first)}: {wrong[ranks[0]]}"
    return f"{operation_title(first)}: {format_rank_answers(wrong, verb=': ')}"


def _compared_fields(first: OperationRequest, requests: Mapping[int, OperationRequest]) -> Iterator[ComparedField]:
    """What has to be equal on all members, in the order in which a difference is told."""
    if first.kind not in NAMED_KINDS or first.kind == OperationKind.BARRIER:
        return
    yield "dtype", _format_dtype
    if first.kind in REDUCING_KINDS:
        yield "op", _format_op
    if first.kind == OperationKind.BROADCAST:
        yield "root", lambda request: str(request.root)
    yield "the number of arrays", lambda request: str(len(request.shapes))
    yield _first_unequal_shape(first, requests)
    if first.kind in REDUCING_KINDS:
        yield "prescale", lambda request: repr(request.prescale)
        yield "postscale", lambda request: repr(request.postscale)


def _first_unequal_shape(first: OperationRequest, requests: Mapping[int, OperationRequest]) -> ComparedField:
    """A group of hundreds of arrays is not worth reading: only the first array that differs is shown."""
    text = _format_row_shape if first.kind in VARIABLE_ROW_KINDS else str
    differing = (
        index
        for index, shape in enumerate(first.shapes)
        if any(text(request.shapes[index]) != text(shape) for request in requests.values())
    )
    index = next(differing, 0)
    what = "shape" if len(first.shapes) == 1 else f"the shape of array {index}"
    return what, lambda request: text(request.shapes[index]) if request.shapes else ""


def _find_invalid(request: OperationRequest, members: tuple[int, ...]) -> str:
    """What is wrong with one request, whatever the others ask for."""
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
    if request.kind in SINGLE_ARRAY_KINDS and len(request.shapes) > 1:
        return f"it takes one array, got {len(request.shapes)}"
    if request.kind in (*VARIABLE_ROW_KINDS, OperationKind.REDUCE_SCATTER) and not all(request.shapes):
        return "it needs arrays of at least 1 dimension, got a scalar"
    if request.kind in REDUCING_KINDS:
        return _find_invalid_op(request)
    if request.kind == OperationKind.BROADCAST and request.root not in members:
        return f"root {request.root} is not a member ({format_ranks(members)})"
    if request.kind == OperationKind.ALLTOALL:
        return _find_invalid_splits(request, len(members))
    return ""


def _find_invalid_op(request: OperationRequest) -> str:
    if request.op not in Op.__members__.values():
        return f"{_format_op(request)} is not known"
    scaled = (request.prescale, request.postscale) != (1.0, 1.0)
    kind, dtype, op = OperationKind(request.kind), DType(request.dtype), Op(request.op)
    return find_reduction_error(kind, dtype, op, scaled=scaled)


def _find_invalid_splits(request: OperationRequest, num_members: int) -> str:
    rows = request.shapes[0][0]
    if request.splits is None:
        return f"{rows} rows are no equal shares for {num_members} members; give splits" if rows % num_members else ""
    if len(request.splits) != num_members:
        return f"splits has {len(request.splits)} entries for {num_members} members"
    if min(request.splits) < 0:
        return f"splits {request.splits} has an entry below 0"
    if sum(request.splits) > rows:
        return f"splits {request.splits} asks for {sum(request.splits)} rows of an array with {rows}"
    return ""


def _splits(request: OperationRequest, num_members: int) -> tuple[int, ...]:
    if request.splits is not None:
        return request.splits
    return (request.shapes[0][0] // num_members,) * num_members


def _format_kind(request: OperationRequest) -> str:
    return (
        OperationKind(request.kind).name.lower()
        if request.kind in OperationKind.__members__.values()
        else f"kind {request.kind}"
    )


def _format_dtype(request: OperationRequest) -> str:
    return (
        DType(request.dtype).name.lower() if request.dtype in DType.__members__.values() else f"dtype {request.dtype}"
    )


def _format_op(request: OperationRequest) -> str:
    return Op(request.op).name.lower() if request.op in Op.__members__.values() else f"op {request.op}"


def _format_row_shape(shape: tuple[int, ...]) -> str:
    """A shape whose first dimension may differ: `(*, 4)`."""
    return f"(*{''.join(f', {dimension}' for dimension in shape[1:])})" if shape else "()"


MAX_CACHED_OPERATIONS = 65_536
"""Names kept for announcing by id; the one that ran longest ago is forgotten first."""
MAX_ERROR_CHARS = 4000
"""Characters of an error that go to every member."""
MIN_STRAGGLER_DELAY_NS = 100_000
"""Members that announce within so short a time are not late."""
MAX_STRAGGLERS = 8
"""Members told of as late, those that came last."""

_FusionKey = tuple[int, int, int, float, float]


class Send(NamedTuple):
    """What the state machine wants done: this message to these ranks, in this order."""

    ranks: tuple[int, ...]
    message: CoordinatorMessage


class PendingOperation(NamedTuple):
    """An operation in flight, for the stall watch."""

    group: int
    name: str
    description: str
    since_ns: int
    announced: tuple[int, ...]
    missing: tuple[int, ...]


class _GroupState:
    """One group: who is in it, what is in flight. Sets of ranks are bit masks."""

    __slots__ = ("closed_reason", "id", "joined_mask", "member_mask", "members", "operations", "pending")

    def __init__(self, group: int, members: tuple[int, ...]) -> None:
        self.id = group
        self.members = members
        self.member_mask = sum(1 << rank for rank in members)
        self.joined_mask = 0
        self.operations: dict[str, _NegotiatedOperation] = {}
        self.pending: dict[int, _NegotiatedOperation] = {}
        self.closed_reason = ""
        """Why nothing can run here any more: a member is gone."""


class _NegotiatedOperation:
    """One name of a group. `run` and what follows are made when the members agree, and hold until a request changes."""

    __slots__ = (
        *("id", "group", "name", "requests"),
        *("announced_mask", "announce_times", "ready", "since_ns", "invalid_reason"),
        *("is_agreed", "run_message", "agreed_operation", "fusion_key", "num_bytes"),
    )

    def __init__(self, id: int, group: _GroupState, name: str) -> None:
        self.id = id
        self.group = group
        self.name = name
        self.requests: dict[int, OperationRequest] = {}
        self.announced_mask = 0
        self.announce_times: list[tuple[int, int]] = []
        """(bit of the rank, when), in the order of arrival."""
        self.ready = False
        self.since_ns = 0
        self.invalid_reason = ""
        self.is_agreed = False
        self.agreed_operation = AgreedOperation(id, name)
        self.run_message = Send(group.members, RunOperations(group.id, (self.agreed_operation,)))
        self.fusion_key: _FusionKey | None = None
        self.num_bytes = 0


class Negotiator:
    """All groups of one round. feed() what the ranks say, then flush() for what to tell them."""

    def __init__(self, size: int, *, fusion_bytes: int, max_cached: int = MAX_CACHED_OPERATIONS) -> None:
        self._fusion_bytes = fusion_bytes
        self._max_cached = max_cached
        self._groups: dict[int, _GroupState] = {}
        self._operations: dict[int, _NegotiatedOperation] = {}
        self._idle: dict[int, _NegotiatedOperation] = {}  # in the order of their last run
        self._ready: list[_NegotiatedOperation] = []
        self._sends: list[Send] = []
        self._last_id = 0
        self.add_group(0, tuple(range(size)))

    def add_group(self, group: int, members: tuple[int, ...]) -> None:
        """Members are ranks of the world; their order is the order of rows."""
        assert group not in self._groups, f"group {group} exists"
        self._groups[group] = _GroupState(group, members)

    def remove_group(self, group: int) -> None:
        """What is in flight there fails on those who announced it."""
        self._decide_ready()
        gone = self._groups.pop(group)
        for entry in gone.pending.values():
            self._reject(entry, f"{self._title(entry)}: the group was removed before all members announced it")
        self._forget_all(gone)

    def rank_lost(self, rank: int, why: str) -> None:
        """A rank is gone: nothing more runs in its groups. Those who wait there are told by Lost, not from here."""
        self._decide_ready()
        for group in self._groups.values():
            if group.member_mask >> rank & 1 and not group.closed_reason:
                group.closed_reason = f"rank {rank} is gone: {why}"
                self._forget_all(group)

    def announce(self, rank: int, message: AnnounceOperations, now_ns: int) -> None:
        """A rank is ready for operations. Answers wait for flush()."""
        bit = 1 << rank
        for request in message.new:
            self._announce_in_full(rank, bit, request, now_ns)
        entries = self._operations
        for known in message.known_ids:
            entry = entries.get(known)
            if entry is None or rank not in entry.requests:
                self._sends.append(Send((rank,), UnknownOperationId(known)))
            else:
                self._count_announcement(entry, bit, now_ns)

    def take_sends(self) -> list[Send]:
        """What to send now, in this order."""
        if self._ready:
            self._decide_ready()
        out = self._sends
        if out:
            self._sends = []
        return out

    def missing(self, group: int, name: str) -> tuple[int, ...]:
        """Whom a named operation waits for; nobody when it is not in flight."""
        found = self._groups.get(group)
        entry = found.operations.get(name) if found is not None else None
        return _missing_ranks(entry) if entry is not None and entry.announced_mask else ()

    def pending(self, until_ns: int) -> Iterator[PendingOperation]:
        """What is in flight since until_ns or longer, per group the oldest first."""
        for group in self._groups.values():
            for entry in group.pending.values():
                if entry.since_ns > until_ns:
                    break
                announced = _ranks_in_mask(group, entry.announced_mask)
                request = entry.requests[announced[0]]
                yield PendingOperation(
                    group.id, entry.name, describe_request(request), entry.since_ns, announced, _missing_ranks(entry)
                )

    # --- announcements ---------------------------------------------------------------------------------------------

    def _announce_in_full(self, rank: int, bit: int, request: OperationRequest, now_ns: int) -> None:
        group = self._groups.get(request.group)
        why = _find_exclusion(group, rank, request)
        if group is None or why:
            self._sends.append(
                Send((rank,), OperationRejected(request.group, request.name, f"{operation_title(request)}: {why}"))
            )
            return
        if request.kind == OperationKind.JOIN:
            self._join(group, rank, request)
            return
        entry = group.operations.get(request.name)
        if entry is None:
            self._last_id += 1
            entry = _NegotiatedOperation(self._last_id, group, request.name)
            group.operations[request.name] = self._operations[entry.id] = entry
        if entry.announced_mask & bit:  # the first stands: do not replace what it asked for
            self._count_announcement(entry, bit, now_ns)
            return
        before = entry.requests.get(rank)
        if before is None or before != request:
            entry.requests[rank] = request
            entry.is_agreed = False
        self._count_announcement(entry, bit, now_ns)

    def _count_announcement(self, operation: _NegotiatedOperation, bit: int, now_ns: int) -> None:
        arrived = operation.announced_mask
        group = operation.group
        if not arrived:
            self._idle.pop(operation.id, None)
            group.pending[operation.id] = operation
            operation.since_ns = now_ns
        elif arrived & bit:
            # Told when all have announced, as every other error: then each member gets it once, for this flight.
            twice = format_ranks(_ranks_in_mask(group, bit))
            operation.invalid_reason = f"{self._title(operation)}: {twice} announced it again while it was under way"
            return
        arrived |= bit
        operation.announced_mask = arrived
        operation.announce_times.append((bit, now_ns))
        if arrived | group.joined_mask == group.member_mask and not operation.ready:
            operation.ready = True
            self._ready.append(operation)

    def _join(self, group: _GroupState, rank: int, request: OperationRequest) -> None:
        group.joined_mask |= 1 << rank
        for entry in group.pending.values():
            if entry.announced_mask | group.joined_mask == group.member_mask and not entry.ready:
                entry.ready = True
                self._ready.append(entry)
        if group.joined_mask != group.member_mask:
            return
        self._decide_ready()
        group.joined_mask = 0
        item = AgreedOperation(
            0, request.name, row_counts=(rank,)
        )  # 0 is nobody's id: a join is always announced in full
        self._sends.append(Send(group.members, RunOperations(group.id, (item,))))

    # --- what is ready ---------------------------------------------------------------------------------------------

    def _decide_ready(self) -> None:
        """Run or fail everything that is ready, fusing in the order of readiness."""
        ready = self._ready
        self._ready = []
        runs: list[list[_NegotiatedOperation]] = []
        open_runs: dict[_FusionKey, list[_NegotiatedOperation]] = {}
        left: dict[_FusionKey, int] = {}  # bytes of room in the open run
        for entry in ready:
            if (
                not entry.is_agreed or entry.invalid_reason or entry.announced_mask != entry.group.member_mask
            ) and not self._check_agreement(entry):
                continue
            key = entry.fusion_key
            if key is None:
                runs.append([entry])
            elif key in open_runs and entry.num_bytes <= left[key]:
                open_runs[key].append(entry)
                left[key] -= entry.num_bytes
            else:
                open_runs[key] = run = [entry]
                left[key] = self._fusion_bytes - entry.num_bytes
                runs.append(run)
        for run in runs:
            self._run_batch(run)

    def _check_agreement(self, operation: _NegotiatedOperation) -> bool:
        """Whether the members that announced it agree, and joined ones can stand in. Otherwise it has failed."""
        group = operation.group
        announced = _ranks_in_mask(group, operation.announced_mask)
        requests = {rank: operation.requests[rank] for rank in announced}
        request = requests[announced[0]]
        why = operation.invalid_reason or find_mismatch(requests, group.members)
        if not why and len(announced) < len(group.members) and request.kind != OperationKind.ALLREDUCE:
            joined = format_ranks(_ranks_in_mask(group, group.member_mask & ~operation.announced_mask))
            why = f"{operation_title(request)}: {joined} called join() and takes part in allreduce only"
        if why:
            self._reject(operation, why)
            self._forget(operation)
            return False
        operation.agreed_operation = AgreedOperation(
            operation.id, operation.name, row_counts=row_counts(requests, group.members)
        )
        operation.run_message = Send(group.members, RunOperations(group.id, (operation.agreed_operation,)))
        operation.fusion_key = fusion_key(request) if self._fusion_bytes else None
        operation.num_bytes = num_bytes(request) if operation.fusion_key else 0
        operation.is_agreed = len(announced) == len(group.members)
        return True

    def _run_batch(self, batch: list[_NegotiatedOperation]) -> None:
        group = batch[0].group
        late = _stragglers(batch)
        if any(entry.announced_mask != group.member_mask for entry in batch):
            self._run_batch_with_joined(batch, late)
        elif len(batch) == 1 and not late:
            self._sends.append(batch[0].run_message)
        else:
            self._sends.append(
                Send(group.members, RunOperations(group.id, tuple([entry.agreed_operation for entry in batch]), late))
            )
        for entry in batch:
            entry.announced_mask = 0
            entry.announce_times.clear()
            entry.ready = False
            del group.pending[entry.id]
            self._idle[entry.id] = entry
        while len(self._operations) > self._max_cached and self._idle:
            self._forget(next(iter(self._idle.values())))

    def _run_batch_with_joined(
        self, batch: list[_NegotiatedOperation], stragglers: tuple[tuple[int, int], ...]
    ) -> None:
        """Each member gets in full what it has not announced itself, and its id for that is forgotten."""
        group = batch[0].group
        for rank in group.members:
            items = []
            for entry in batch:
                if entry.announced_mask >> rank & 1:
                    items.append(entry.agreed_operation)
                else:
                    entry.requests.pop(rank, None)
                    entry.is_agreed = False
                    request = next(
                        entry.requests[other] for other in group.members if entry.announced_mask >> other & 1
                    )
                    items.append(AgreedOperation(entry.id, entry.name, request))
            self._sends.append(Send((rank,), RunOperations(group.id, tuple(items), stragglers)))

    def _reject(self, operation: _NegotiatedOperation, why: str) -> None:
        announced = _ranks_in_mask(operation.group, operation.announced_mask)
        self._sends.append(
            Send(announced, OperationRejected(operation.group.id, operation.name, shorten(why, MAX_ERROR_CHARS)))
        )

    def _forget(self, operation: _NegotiatedOperation) -> None:
        del self._operations[operation.id], operation.group.operations[operation.name]
        self._idle.pop(operation.id, None)
        operation.group.pending.pop(operation.id, None)

    def _forget_all(self, group: _GroupState) -> None:
        for entry in list(group.operations.values()):
            self._forget(entry)

    def _title(self, operation: _NegotiatedOperation) -> str:
        return operation_title(operation.requests[_ranks_in_mask(operation.group, operation.announced_mask)[0]])


def _find_exclusion(group: _GroupState | None, rank: int, request: OperationRequest) -> str:
    """Why this rank cannot announce anything in this group."""
    if group is None:
        return f"group {request.group} does not exist, or was removed"
    if not group.member_mask >> rank & 1:
        return f"rank {rank} is not a member ({format_ranks(group.members)})"
    return group.closed_reason


def _stragglers(batch: list[_NegotiatedOperation]) -> tuple[tuple[int, int], ...]:
    """Run.late: the members that came last to what travels together, the very last first."""
    last_ns = max([entry.announce_times[-1][1] for entry in batch])
    if last_ns - min([entry.since_ns for entry in batch]) < MIN_STRAGGLER_DELAY_NS:
        return ()
    came: dict[int, int] = {}
    for entry in batch:
        for bit, at_ns in entry.announce_times:
            came[bit] = max(at_ns, came.get(bit, 0))
    latest = sorted(came.items(), key=lambda item: -item[1])[:MAX_STRAGGLERS]
    return tuple((bit.bit_length() - 1, last_ns - at_ns) for bit, at_ns in latest)


def _missing_ranks(operation: _NegotiatedOperation) -> tuple[int, ...]:
    """Ranks that wait in join() count as having announced it."""
    group = operation.group
    return _ranks_in_mask(group, group.member_mask & ~(operation.announced_mask | group.joined_mask))


def _ranks_in_mask(group: _GroupState, mask: int) -> tuple[int, ...]:
    return tuple(rank for rank in group.members if mask >> rank & 1)
