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

Members of one host agree on what repeats without the coordinator: an operation that ran twice alike gets a *shared id*
(AgreedOperation.shared_id), and they announce it in their shared memory from then on. When one of them announces it
here all the same, because its request has changed, or when a member joins, RevokeSharedIds brings all of them back:
whoever has announced it in shared memory takes that back and announces it here, unless all had announced it. A member
has one operation of a name under way, announced here or there. So when all have announced it here, nobody has there,
and the same id can be given to what they agree on now. docs/internals/negotiation.md has the proof.

Announcing a known id costs a few dictionary lookups, however many operations are pending. Numbers in requests come from
the network and may be anything: nothing here relies on them before find_mismatch() has checked them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ronde.coordinator.operation_requests import (
    describe_request,
    find_mismatch,
    find_received_rows,
    find_row_counts,
    title_of,
)
from ronde.net.messages import (
    MAX_SHARED_IDS,
    AgreedOperation,
    AnnounceOperations,
    CoordinatorMessage,
    OperationRejected,
    OperationRequest,
    RefuseOperation,
    RevokeSharedIds,
    RunOperations,
    UnknownOperationId,
)
from ronde.observe.stalls import WaitingOperation
from ronde.text import format_ranks, shorten
from ronde.types import CPU, JOINABLE, DType, Op, OperationKind, can_be_joined

MAX_CACHED_OPERATIONS = 65_536
"""Idle operations that are remembered; the one that ran longest ago is forgotten first."""
MAX_ERROR_CHARS = 4000
MIN_STRAGGLER_DELAY_NS = 100_000
"""Members that announce within this time are not late."""
MAX_STRAGGLERS = 8
"""Most stragglers that are reported, the last ones."""

FusionKey = tuple[int, int, int, float, float, str]


class Send(NamedTuple):
    """A message to be sent to these ranks."""

    ranks: tuple[int, ...]
    message: CoordinatorMessage


_NOT_AGREED = AgreedOperation(0, "")


@dataclass(eq=False, slots=True)
class _GroupState:
    """One group and its pending operations. Sets of ranks are bit masks."""

    id: int
    members: tuple[int, ...]
    member_mask: int
    joined_mask: int = 0
    operations: dict[str, _NegotiatedOperation] = field(default_factory=dict)
    pending: dict[int, _NegotiatedOperation] = field(default_factory=dict)
    is_closed: bool = False
    """Whether a member is lost: nothing can run any more."""
    sharing_mask: int = 0
    """Members that can announce operations in shared memory: all of them or none, when they have said so."""
    shared_ids: dict[str, int] = field(default_factory=dict)
    """By name. A name keeps its id for good: nobody can have announced another operation under it."""
    shared: dict[int, _NegotiatedOperation] = field(default_factory=dict)
    """By shared id, what the members announce in shared memory."""
    refused: dict[str, str] = field(default_factory=dict)
    """By name, why an operation cannot run any more (RefuseOperation)."""
    revoked_ids: list[int] = field(default_factory=list)
    """To be sent before anything else."""


@dataclass(eq=False, slots=True)
class _NegotiatedOperation:
    """One name of a group. What follows is_agreed is made when the members agree, and valid until a request changes."""

    id: int
    group: _GroupState
    name: str
    request: OperationRequest | None = None
    """What all members asked for when it ran last; None if it did not run, or if they asked for different things."""
    requests: dict[int, OperationRequest] = field(default_factory=dict)
    """By rank, what members asked for if they asked for different things (numbers of rows)."""
    unknown_mask: int = 0
    """Members that had joined when it ran last: what they would ask for is not known."""
    is_agreed: bool = False
    agreed_operation: AgreedOperation = _NOT_AGREED
    received_rows: dict[tuple[int, ...], tuple[int, ...]] | None = None
    """Of an alltoall: numbers of rows, and the members to which they apply."""
    run_messages: tuple[Send, ...] = ()
    fusion_key: FusionKey | None = None
    num_bytes: int = 0
    # While it is pending:
    single_mask: int = 0
    """The first rank of each announcement."""
    repeated: list[_Announcement] = field(default_factory=list)
    """The announcements that other ranks have repeated; their masks are the other ranks."""
    announcements: list[_Announcement] = field(default_factory=list)
    first_request: OperationRequest | None = None
    other_requests: dict[int, OperationRequest] = field(default_factory=dict)
    """By rank, what differs from first_request."""
    is_changed: bool = False
    """Whether a rank asks for something else than when it ran last."""
    ready: bool = False
    since_ns: int = 0
    known_twice_mask: int = 0
    """Ranks that were seen to announce it twice."""

    @property
    def announced_mask(self) -> int:
        mask = self.single_mask
        for announcement in self.repeated:
            mask |= announcement.mask
        return mask

    @property
    def waiting_mask(self) -> int:
        """Members that it waits for. Those that have joined count as having announced it."""
        group = self.group
        return group.member_mask & ~(self.announced_mask | group.joined_mask)

    @property
    def twice_mask(self) -> int:
        """Ranks that have announced it twice. Whoever repeats an announcement is not looked for in others at once."""
        twice, seen = self.known_twice_mask, self.single_mask
        for announcement in self.repeated:
            twice |= seen & announcement.mask
            seen |= announcement.mask
        return twice

    def announced_requests(self) -> dict[int, OperationRequest]:
        """What each rank that has announced it asks for."""
        assert self.first_request is not None
        first, other = self.first_request, self.other_requests
        return {rank: other.get(rank, first) for rank in _ranks_in_mask(self.announced_mask)}

    def lowest_request(self) -> OperationRequest:
        """What the lowest rank that has announced it asks for."""
        assert self.first_request is not None
        if not self.other_requests:
            return self.first_request
        mask = self.announced_mask
        return self.other_requests.get((mask & -mask).bit_length() - 1, self.first_request)

    def known_request(self, rank: int) -> OperationRequest | None:
        """What the id stands for when this rank announces it."""
        if self.request is not None:
            mask = self.group.member_mask & ~self.unknown_mask
            return self.request if mask >> rank & 1 else None
        return self.requests.get(rank)

    def make_run_messages(self, stragglers: tuple[tuple[int, int], ...] = ()) -> tuple[Send, ...]:
        """RunOperations for the members, who have agreed on it: one for all, or for those of equal row_counts."""
        group, agreed = self.group, self.agreed_operation
        if self.received_rows is None:
            return (Send(group.members, RunOperations(group.id, (agreed,), stragglers)),)
        return tuple(
            Send(ranks, RunOperations(group.id, (msgspec.structs.replace(agreed, row_counts=rows),), stragglers))
            for rows, ranks in self.received_rows.items()
        )

    def reset(self) -> None:
        """It is not pending any more."""
        self.single_mask = 0
        self.repeated.clear()
        self.announcements.clear()
        self.first_request = None
        self.other_requests = {}
        self.is_changed = self.ready = False
        self.known_twice_mask = 0


@dataclass(eq=False, slots=True)
class _Announcement:
    """A message of a rank, and all equal ones that came after it from other ranks: these cost nothing per operation.

    Other ranks can repeat it until one of its operations runs. Then it stands for what it was in that run, and the next
    equal message is a new announcement.
    """

    message: AnnounceOperations
    first_bit: int
    operations: list[_NegotiatedOperation]
    groups: tuple[_GroupState, ...]
    is_repeatable: bool
    last_ranks: deque[tuple[int, int]]
    """(rank, when) of the last ones, as many as may be reported as stragglers."""
    mask: int = 0
    """The ranks that have repeated it."""
    check_at: int = 0
    """The number of announcements before which none of its operations can be ready."""


class Negotiator:
    """The named operations of a round. announce() takes what ranks announce, take_sends() returns the answers."""

    def __init__(self, size: int, *, fusion_bytes: int, max_cached: int = MAX_CACHED_OPERATIONS) -> None:
        self._fusion_bytes = fusion_bytes
        self._max_cached = max_cached
        self._groups: dict[int, _GroupState] = {}
        self._operations: dict[int, _NegotiatedOperation] = {}
        self._idle: dict[int, _NegotiatedOperation] = {}  # in the order of their last run
        self._repeatable: dict[int, _Announcement] = {}
        """Announcements that can be repeated, by the identity of their message: net/messages interns equal ones."""
        self._num_announcements = 0
        """Messages and joins. Each brings an operation at most one rank nearer to being ready."""
        self._ready: list[_NegotiatedOperation] = []
        self._sends: list[Send] = []
        self._revoking: list[_GroupState] = []
        """Groups with revoked_ids."""
        self._last_id = 0
        self._last_group = -1
        self.add_group(tuple(range(size)))

    def members(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group; empty if there is no such group."""
        found = self._groups.get(group)
        return found.members if found is not None else ()

    def is_member(self, group: int, rank: int) -> bool:
        found = self._groups.get(group)
        return found is not None and bool(found.member_mask >> rank & 1)

    def add_group(self, members: tuple[int, ...]) -> int:
        """Add a group and return its id; 0 is the world. No id is used again: a late message cannot mean another group.
        allgather concatenates rows in the order of the members, which are sorted."""
        self._last_group += 1
        mask = _mask_of(members)
        self._groups[self._last_group] = _GroupState(self._last_group, members, mask)
        return self._last_group

    def remove_group(self, group: int) -> tuple[int, ...]:
        """Remove a group and return its members. Its pending operations are rejected on those that announced them."""
        self._decide_ready()
        removed = self._groups.pop(group)
        for operation in removed.pending.values():
            title = title_of(operation.lowest_request())
            self._reject(operation, f"{title}: the group was removed before all members announced it")
        self._forget_all(removed)
        return removed.members

    def rank_lost(self, rank: int) -> None:
        """Let nothing more run in the groups of a lost rank. Rejects nothing, also not what is announced there from
        now on: the members get RankLost or RanksLost."""
        self._decide_ready()
        for group in self._groups.values():
            if not group.is_closed and group.member_mask >> rank & 1:
                group.is_closed = True
                self._forget_all(group)

    def share_ids(self, rank: int, group: int) -> None:
        """A member can announce operations of this group in shared memory."""
        found = self._groups.get(group)
        if found is not None:
            found.sharing_mask |= found.member_mask & 1 << rank

    def announce(self, rank: int, message: AnnounceOperations, now_ns: int) -> None:
        """Take the operations that a rank is ready for. take_sends() returns the answers."""
        bit = 1 << rank
        self._num_announcements += 1
        same = self._repeatable.get(id(message))
        if same is None:
            self._announce_first(rank, bit, message, now_ns)
        elif all([group.member_mask & bit for group in same.groups]):
            self._announce_again(rank, bit, same, now_ns)
        else:
            self._announce_first(rank, bit, message, now_ns)

    def refuse(self, rank: int, message: RefuseOperation) -> None:
        """Let no operation of this name run any more. It is rejected on those that have announced it, and on whoever
        announces it from now on; what they have announced in shared memory comes here first."""
        group, name = self._groups.get(message.group), message.name
        if group is None or group.is_closed or not group.member_mask >> rank & 1 or name in group.refused:
            return
        self._decide_ready()
        group.refused[name] = shorten(message.reason, MAX_ERROR_CHARS)
        self._revoke(group, group.shared_ids.get(name, -1))
        operation = group.operations.get(name)
        if operation is not None:
            if operation.announcements:
                self._reject(operation, message.reason)
            self._forget(operation)

    def take_sends(self) -> list[Send]:
        """Return what to send, in this order."""
        if self._ready:
            self._decide_ready()
        if self._revoking:
            self._send_revoked()
        out = self._sends
        if out:
            self._sends = []
        return out

    def missing(self, group: int, name: str) -> tuple[int, ...]:
        """Return the ranks that a named operation waits for; empty if it is not pending."""
        found = self._groups.get(group)
        operation = found.operations.get(name) if found is not None else None
        return _ranks_in_mask(operation.waiting_mask) if operation is not None and operation.announcements else ()

    def pending(self, until_ns: int) -> Iterator[WaitingOperation]:
        """Yield what has been pending since until_ns or longer, per group the oldest first. Operations that wait for
        the same ranks have the same tuples of ranks."""
        for group in self._groups.values():
            ranks_of: dict[int, tuple[int, ...]] = {}
            for operation in group.pending.values():
                if operation.since_ns > until_ns:
                    break
                masks = (operation.waiting_mask, operation.announced_mask)
                for mask in masks:
                    if mask not in ranks_of:
                        ranks_of[mask] = _ranks_in_mask(mask)
                yield WaitingOperation(
                    op=describe_request(operation.lowest_request()),
                    group=group.id,
                    since_ns=operation.since_ns,
                    missing=ranks_of[masks[0]],
                    present=ranks_of[masks[1]],
                )

    # --- announcements ---------------------------------------------------------------------------------------------

    def _announce_first(self, rank: int, bit: int, message: AnnounceOperations, now_ns: int) -> None:
        """Take a message that is not known, operation by operation."""
        last_ranks = deque([(rank, now_ns)], MAX_STRAGGLERS)
        announcement = _Announcement(message, bit, [], (), True, last_ranks)
        for request in message.new:
            self._announce_in_full(rank, announcement, request, now_ns)
        operations = self._operations
        for known in message.known_ids:
            operation = operations.get(known)
            known_request = operation.known_request(rank) if operation is not None else None
            if operation is None or known_request is None:
                self._sends.append(Send((rank,), UnknownOperationId(known)))
                announcement.is_repeatable = False
            else:
                self._count_announcement(operation, announcement, known_request, now_ns)
        if announcement.is_repeatable and announcement.operations:
            announcement.groups = tuple({op.group.id: op.group for op in announcement.operations}.values())
            self._repeatable[id(message)] = announcement

    def _announce_in_full(self, rank: int, announcement: _Announcement, request: OperationRequest, now_ns: int) -> None:
        bit = announcement.first_bit
        group = self._groups.get(request.group)
        why = ""
        if group is None:
            why = f"group {request.group} does not exist, or was removed"
        elif not group.member_mask & bit:
            why = f"rank {rank} is not a member ({format_ranks(group.members)})"
        refused = group.refused.get(request.name, "") if group is not None else ""
        if group is None or why or refused:
            reason = refused or f"{title_of(request)}: {why}"
            self._sends.append(Send((rank,), OperationRejected(request.group, request.name, reason)))
            announcement.is_repeatable = False
            return
        if group.is_closed:
            announcement.is_repeatable = False
            return
        if request.kind == OperationKind.JOIN:
            announcement.is_repeatable = False
            self._join(group, rank, request)
            return
        operation = group.operations.get(request.name)
        if operation is None:
            self._last_id += 1
            operation = _NegotiatedOperation(self._last_id, group, request.name)
            group.operations[request.name] = self._operations[operation.id] = operation
        self._count_announcement(operation, announcement, request, now_ns)

    def _count_announcement(
        self, operation: _NegotiatedOperation, announcement: _Announcement, request: OperationRequest, now_ns: int
    ) -> None:
        """Count the rank of a new announcement for one of its operations."""
        bit = announcement.first_bit
        announced_mask = operation.announced_mask
        group = operation.group
        rank = bit.bit_length() - 1
        if announced_mask & bit:  # the first request stays
            operation.known_twice_mask |= bit
            announcement.is_repeatable = False
            return
        if not announced_mask:
            self._idle.pop(operation.id, None)
            if group.shared:
                self._revoke(group, group.shared_ids.get(operation.name, -1))
            group.pending[operation.id] = operation
            operation.since_ns = now_ns
            operation.first_request = request
        elif request is not operation.first_request and request != operation.first_request:
            operation.other_requests[rank] = request
            announcement.is_repeatable = False
        if operation.requests or operation.unknown_mask:  # each rank is compared with what it asked for last time
            announcement.is_repeatable = False
        if not operation.is_changed and request is not operation.request:
            operation.is_changed = operation.known_request(rank) != request
        operation.single_mask |= bit
        operation.announcements.append(announcement)
        announcement.operations.append(operation)
        if announced_mask | bit | group.joined_mask == group.member_mask and not operation.ready:
            operation.ready = True
            self._ready.append(operation)

    def _announce_again(self, rank: int, bit: int, announcement: _Announcement, now_ns: int) -> None:
        """Count a rank for all operations of an announcement at once."""
        if (announcement.mask | announcement.first_bit) & bit:
            for operation in announcement.operations:
                operation.known_twice_mask |= bit
            return
        if not announcement.mask:
            for operation in announcement.operations:
                operation.repeated.append(announcement)
        announcement.mask |= bit
        announcement.last_ranks.append((rank, now_ns))
        if self._num_announcements >= announcement.check_at:
            self._find_ready(announcement)

    def _find_ready(self, announcement: _Announcement) -> None:
        least_missing = self._num_announcements
        for operation in announcement.operations:
            num_missing = operation.waiting_mask.bit_count()
            if not num_missing and not operation.ready:
                operation.ready = True
                self._ready.append(operation)
            elif num_missing:
                least_missing = min(least_missing, num_missing)
        announcement.check_at = self._num_announcements + least_missing

    def _join(self, group: _GroupState, rank: int, request: OperationRequest) -> None:
        self._num_announcements += 1  # as many as there may be in one message
        group.joined_mask |= 1 << rank
        for id in list(group.shared):  # a member that has joined takes part in what is announced here
            self._revoke(group, id)
        for operation in group.pending.values():
            if not operation.waiting_mask and not operation.ready:
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
        if self._revoking:
            self._send_revoked()
        ready = self._ready
        self._ready = []
        runs: list[list[_NegotiatedOperation]] = []
        open_runs: dict[FusionKey, list[_NegotiatedOperation]] = {}
        left: dict[FusionKey, int] = {}  # bytes of room in the open run
        for operation in ready:
            if self._is_agreed(operation):
                if operation.group.sharing_mask:
                    self._share(operation)
            elif not self._check_agreement(operation):
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

    def _is_agreed(self, operation: _NegotiatedOperation) -> bool:
        """Return whether all members have announced what they agreed on when it ran last."""
        return (
            operation.is_agreed
            and not operation.is_changed
            and operation.announced_mask == operation.group.member_mask
            and not operation.twice_mask
        )

    def _check_agreement(self, operation: _NegotiatedOperation) -> bool:
        """Return whether it can run: the requests agree, and joined members can contribute zeros. Else reject it."""
        group = operation.group
        announced_mask = operation.announced_mask
        everybody = announced_mask == group.member_mask
        request = operation.lowest_request()
        requests = operation.announced_requests() if operation.other_requests else {}
        is_allreduce = request.kind == OperationKind.ALLREDUCE
        # Checked when all have announced it, as every other mistake: then each member gets one answer.
        twice = _ranks_in_mask(operation.twice_mask)
        why = f"{title_of(request)}: {format_ranks(twice)} announced it again while it was under way" if twice else ""
        # A request that all have in common is checked once.
        why = why or find_mismatch(requests or {group.members[0]: request}, group.members)
        joined: tuple[int, ...] = ()
        if not why and not everybody:
            if not is_allreduce or not can_be_joined(DType(request.dtype), Op(request.op)) or request.device != CPU:
                joined = _ranks_in_mask(group.member_mask & ~announced_mask)
                where = " of memory of the CPU" if request.device != CPU else ""
                why = f"{title_of(request)}: {format_ranks(joined)} called join() and takes part {JOINABLE}{where}"
        if why:
            self._reject(operation, why, joined)
            self._forget(operation)
            return False
        rows = find_row_counts(requests, request, group.members)
        operation.agreed_operation = AgreedOperation(operation.id, operation.name, row_counts=rows)
        is_alltoall = request.kind == OperationKind.ALLTOALL
        operation.received_rows = find_received_rows(requests, request, group.members) if is_alltoall else None
        operation.run_messages = operation.make_run_messages()
        operation.fusion_key = None
        if self._fusion_bytes and is_allreduce and request.op != Op.ADASUM:  # Adasum looks at each tensor as a whole
            scales = (request.prescale, request.postscale)
            operation.fusion_key = (request.group, request.dtype, request.op, *scales, request.device)
            operation.num_bytes = sum(map(math.prod, request.shapes)) * DType(request.dtype).num_bytes
        operation.request = None if requests else request
        operation.requests = requests
        operation.unknown_mask = group.member_mask & ~announced_mask
        operation.is_agreed = everybody
        return True

    def _run_batch(self, batch: list[_NegotiatedOperation]) -> None:
        group = batch[0].group
        stragglers = _stragglers(batch)
        if any([operation.unknown_mask for operation in batch]):
            self._run_batch_with_joined(batch, stragglers)
        elif len(batch) == 1:
            self._sends += batch[0].make_run_messages(stragglers) if stragglers else batch[0].run_messages
        else:
            agreed = tuple([operation.agreed_operation for operation in batch])
            self._sends.append(Send(group.members, RunOperations(group.id, agreed, stragglers)))
        for operation in batch:
            self._end_pending(operation)
            if operation.agreed_operation.shared_id < 0:
                self._idle[operation.id] = operation
        while len(self._operations) > self._max_cached and self._idle:
            self._forget(next(iter(self._idle.values())))

    # --- what the members announce in shared memory -----------------------------------------------------------------

    def _share(self, operation: _NegotiatedOperation) -> None:
        """Let the members announce in shared memory what has run twice alike, if they can: a rank that has joined
        cannot, and there an operation is one call."""
        group, agreed = operation.group, operation.agreed_operation
        shared_id, request = -1, operation.lowest_request()
        is_one_call = len(request.shapes) <= 1 or request.kind == OperationKind.ALLREDUCE
        is_on_cpu = request.device == CPU
        if is_one_call and is_on_cpu and group.sharing_mask == group.member_mask and not group.joined_mask:
            if len(group.shared_ids) < MAX_SHARED_IDS:
                group.shared_ids.setdefault(operation.name, len(group.shared_ids))
            shared_id = group.shared_ids.get(operation.name, -1)
        if shared_id >= 0:
            group.shared[shared_id] = operation
        if agreed.shared_id != shared_id:
            agreed = AgreedOperation(agreed.id, agreed.name, row_counts=agreed.row_counts, shared_id=shared_id)
            operation.agreed_operation = agreed
            operation.run_messages = operation.make_run_messages()

    def _revoke(self, group: _GroupState, shared_id: int) -> None:
        """Bring the members back to the coordinator, if they announce this operation in shared memory."""
        if group.shared.pop(shared_id, None) is not None:
            if not group.revoked_ids:
                self._revoking.append(group)
            group.revoked_ids.append(shared_id)

    def _send_revoked(self) -> None:
        for group in self._revoking:
            self._sends.append(Send(group.members, RevokeSharedIds(group.id, tuple(group.revoked_ids))))
            group.revoked_ids.clear()
        self._revoking.clear()

    def _run_batch_with_joined(
        self, batch: list[_NegotiatedOperation], stragglers: tuple[tuple[int, int], ...]
    ) -> None:
        """Each member gets in full what it has not announced itself, and has to announce that in full next time."""
        group = batch[0].group
        parts = [group.member_mask]  # members that have announced the same operations of the batch
        for joined_mask in {operation.unknown_mask for operation in batch}:
            parts = [part for mask in parts for part in (mask & joined_mask, mask & ~joined_mask) if part]
        for part in parts:
            items = tuple(
                [
                    AgreedOperation(operation.id, operation.name, operation.request)
                    if operation.unknown_mask & part
                    else operation.agreed_operation
                    for operation in batch
                ]
            )
            self._sends.append(Send(_ranks_in_mask(part), RunOperations(group.id, items, stragglers)))

    def _reject(self, operation: _NegotiatedOperation, why: str, joined: tuple[int, ...] = ()) -> None:
        announced = _ranks_in_mask(operation.announced_mask)
        rejected = OperationRejected(operation.group.id, operation.name, shorten(why, MAX_ERROR_CHARS), joined)
        self._sends.append(Send(announced, rejected))

    def _end_pending(self, operation: _NegotiatedOperation) -> None:
        """It is not pending any more: what was announced with it is over, too, for those who would repeat it."""
        operation.group.pending.pop(operation.id, None)
        for announcement in operation.announcements:
            if announcement.is_repeatable:
                announcement.is_repeatable = False
                self._repeatable.pop(id(announcement.message), None)
        operation.reset()

    def _forget(self, operation: _NegotiatedOperation) -> None:
        self._end_pending(operation)
        del self._operations[operation.id], operation.group.operations[operation.name]
        self._idle.pop(operation.id, None)

    def _forget_all(self, group: _GroupState) -> None:
        for operation in list(group.operations.values()):
            self._forget(operation)


def _stragglers(batch: list[_NegotiatedOperation]) -> tuple[tuple[int, int], ...]:
    """Return RunOperations.stragglers: the members that announced this batch last, the very last first."""
    announcements = {id(each): each for operation in batch for each in operation.announcements}.values()
    last_ns = max([announcement.last_ranks[-1][1] for announcement in announcements])
    if last_ns - min([operation.since_ns for operation in batch]) < MIN_STRAGGLER_DELAY_NS:
        return ()
    # The last ranks of the batch are among the last ones of its announcements.
    last_announced: dict[int, int] = {}
    for announcement in announcements:
        for rank, at_ns in announcement.last_ranks:
            last_announced[rank] = max(at_ns, last_announced.get(rank, 0))
    latest = sorted(last_announced.items(), key=lambda item: -item[1])[:MAX_STRAGGLERS]
    return tuple((rank, last_ns - at_ns) for rank, at_ns in latest)


def _mask_of(ranks: tuple[int, ...]) -> int:
    bits = bytearray(ranks[-1] // 8 + 1)
    for rank in ranks:
        bits[rank >> 3] |= 1 << (rank & 7)
    return int.from_bytes(bits, "little")


def _ranks_in_mask(mask: int) -> tuple[int, ...]:
    return tuple([rank for rank, bit in enumerate(bin(mask)[:1:-1]) if bit == "1"])
