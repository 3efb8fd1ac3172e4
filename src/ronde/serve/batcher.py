"""Which requests are predicted together, on which replica, and when. Without I/O and without a clock: the time is an
argument. Used by the front.

A request never waits for company while a replica is idle: it is sent at once, with all that has come meanwhile and fits
(natural batching). While all replicas are busy, requests collect. They are sent to the replica with the least
outstanding work, behind what that has, as soon as they fill a batch or the oldest has waited for `max_delay_s`, which
is the bound of what batching costs; at most MAX_OUTSTANDING batches are with one replica.

When a replica dies, what it had is predicted by others. If the death may be the fault of a request, all that it had are
suspects: each is tried once more, alone, one at a time in the whole service, and not on the last replica that is left.
So one that kills every replica it meets costs two of them, and never all.

A request whose client leaves while it waits is not predicted.

    request    WAITING ──► SENT ──► done
                  ▲          │ its replica died, by somebody else's fault: at most MAX_ATTEMPTS times
                  ├──────────┤
               SUSPECT ◄─────┘ its replica died, perhaps because of it ──► SENT, alone ──► done
                                                                             └─► replica died again: set aside
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

MAX_OUTSTANDING = 2
"""Batches with one replica: one that it predicts, and one that it has at hand when that is done."""
ALONE = "alone"
"""The group of requests that are never in a batch with others."""
MAX_ATTEMPTS = 5
"""A request whose replicas were killed so often, by others, is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """How large batches and the queue may become. ValueError if they cannot be."""

    max_rows: int = 32
    """Samples in a batch. A request with more is a batch of its own."""
    max_delay_s: float = 0.002
    """How long requests may wait for company while all replicas are busy."""
    max_waiting: int = 1000
    """Requests that wait; further ones are refused."""
    num_replicas: int = 1
    """How many there are when none is missing."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_waiting", "num_replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.max_delay_s < math.inf:
            raise ValueError(f"max_delay_s must be at least 0, got {self.max_delay_s}")


class QueueFull(Exception):
    """Too many requests wait."""


@dataclass(eq=False, slots=True)
class WaitingRequest(Generic[T]):
    """A request between its arrival and its end."""

    payload: T
    group: Hashable
    """Only requests of equal groups can be in one batch; ALONE: it is always alone."""
    num_rows: int
    arrived_s: float
    deadline_s: float
    num_attempts: int = 0
    is_suspect: bool = False
    is_sent: bool = False
    """A replica has it."""
    is_over: bool = False
    """Nobody waits for its result any more: see Batcher.withdraw()."""


class Batch(NamedTuple, Generic[T]):
    number: int
    replica: int
    requests: tuple[WaitingRequest[T], ...]
    num_rows: int


@dataclass(eq=False, slots=True)
class _ReplicaState(Generic[T]):
    batches: dict[int, Batch[T]] = field(default_factory=dict)
    num_rows: int = 0
    is_ready: bool = True
    last_used: int = 0


class LostRequests(NamedTuple, Generic[T]):
    """What becomes of the requests of a replica that has died."""

    retried: list[WaitingRequest[T]]
    set_aside: list[WaitingRequest[T]]
    """They were alone on a replica that died, for the second time."""
    given_up: list[WaitingRequest[T]]
    """Replicas died too often with them, by others' fault."""


class Batcher(Generic[T]):
    """The requests that wait and those that replicas have."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._groups: dict[Hashable, deque[WaitingRequest[T]]] = {}
        self._suspects: deque[WaitingRequest[T]] = deque()
        self._suspect_replica: int | None = None
        """The replica that tries a suspect now, or will when it has done what it has. It gets nothing else."""
        self._replicas: dict[int, _ReplicaState[T]] = {}
        self._num_batches = 0
        self.num_waiting = 0
        """Requests that no replica has."""

    # --- what happens ------------------------------------------------------------------------------------------------

    def add(self, request: WaitingRequest[T]) -> None:
        """QueueFull if too many wait."""
        if self.num_waiting >= self.limits.max_waiting:
            raise QueueFull
        self._groups.setdefault(request.group, deque()).append(request)
        self.num_waiting += 1

    def withdraw(self, request: WaitingRequest[T]) -> None:
        """Nobody waits for the result any more: it is there, or the client has left. A request that no replica has is
        not predicted; it stays in its queue until it is found there."""
        if not request.is_over:
            request.is_over = True
            self.num_waiting -= not request.is_sent

    def set_ready(self, replica: int, is_ready: bool = True) -> None:
        """A replica has come, or takes no more batches for a while, or takes them again."""
        self._replicas.setdefault(replica, _ReplicaState()).is_ready = is_ready

    def batch_done(self, replica: int, number: int) -> Batch[T] | None:
        """A replica has answered. None if it did not have that batch."""
        state = self._replicas.get(replica)
        batch = state.batches.pop(number, None) if state is not None else None
        if state is not None and batch is not None:
            state.num_rows -= batch.num_rows
        return batch

    def replica_lost(self, replica: int, *, by_request: bool) -> LostRequests[T]:
        """A replica has died; `by_request`: perhaps because of what it had. What is retried waits before all others."""
        lost: LostRequests[T] = LostRequests([], [], [])
        state = self._replicas.pop(replica, None)
        if state is None:
            return lost
        if self._suspect_replica == replica:
            self._suspect_replica = None
        for batch in state.batches.values():
            for request in batch.requests:
                request.num_attempts += 1
                if request.is_over:
                    continue
                if by_request and request.is_suspect:
                    lost.set_aside.append(request)
                elif not by_request and request.num_attempts >= MAX_ATTEMPTS:
                    lost.given_up.append(request)
                else:
                    request.is_suspect = request.is_suspect or by_request
                    lost.retried.append(request)
        for request in reversed(lost.retried):
            request.is_sent = False
            if request.is_suspect:
                self._suspects.appendleft(request)
            else:
                self._groups.setdefault(request.group, deque()).appendleft(request)
        self.num_waiting += len(lost.retried)
        return lost

    def take_expired(self, now_s: float) -> list[WaitingRequest[T]]:
        """Remove and return the requests that no replica has, and whose time is over."""
        expired: list[WaitingRequest[T]] = []
        for queue in (*self._groups.values(), self._suspects):
            kept = [each for each in queue if each.deadline_s > now_s and not each.is_over]
            if len(kept) < len(queue):
                expired += (each for each in queue if not each.is_over and each.deadline_s <= now_s)
                queue.clear()
                queue.extend(kept)
        self.num_waiting -= len(expired)
        return expired

    # --- what is done ------------------------------------------------------------------------------------------------

    def take_batches(self, now_s: float) -> list[Batch[T]]:
        """Remove what is to be sent now, and return it."""
        batches = self._take_suspect()
        while True:
            group = self._oldest_group()
            if group is None:
                return batches
            replica = self._choose_replica(self._groups[group], group, now_s)
            if replica is None:
                return batches
            batches.append(self._send(replica, self._fill(group)))

    def due_s(self) -> float:
        """When take_batches() has to be called again, even if nothing happens."""
        if all(len(state.batches) >= MAX_OUTSTANDING for state in self._usable().values()):
            return math.inf
        group = self._oldest_group()
        return math.inf if group is None else self._groups[group][0].arrived_s + self.limits.max_delay_s

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        return sum(state.is_ready for state in self._replicas.values())

    @property
    def num_sent(self) -> int:
        """Requests that replicas have."""
        return sum(len(batch.requests) for state in self._replicas.values() for batch in state.batches.values())

    def outstanding(self, replica: int) -> Sequence[Batch[T]]:
        state = self._replicas.get(replica)
        return () if state is None else tuple(state.batches.values())

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _usable(self) -> dict[int, _ReplicaState[T]]:
        return {
            number: state
            for number, state in self._replicas.items()
            if state.is_ready and number != self._suspect_replica
        }

    def _oldest_group(self) -> Hashable | None:
        """The group of the request that has waited longest; empty groups are forgotten."""
        oldest, oldest_s = None, math.inf
        for group in [*self._groups]:
            queue = self._groups[group]
            _drop_withdrawn(queue)
            if not queue:
                del self._groups[group]
            elif queue[0].arrived_s < oldest_s:
                oldest, oldest_s = group, queue[0].arrived_s
        return oldest

    def _choose_replica(self, queue: deque[WaitingRequest[T]], group: Hashable, now_s: float) -> int | None:
        """The replica for the next batch of a group; None if it has to wait."""
        usable = {number: state for number, state in self._usable().items() if len(state.batches) < MAX_OUTSTANDING}
        if not usable:
            return None
        # An idle one, then that with the least outstanding work; of equal ones the last that was used, as its model is
        # in the caches of a core.
        number = min(usable, key=lambda each: (usable[each].num_rows, -usable[each].last_used))
        if not usable[number].batches:
            return number
        has_waited = now_s - queue[0].arrived_s >= self.limits.max_delay_s
        return number if has_waited or self._is_full(queue, group) else None

    def _is_full(self, queue: Iterable[WaitingRequest[T]], group: Hashable) -> bool:
        if group == ALONE:
            return True
        num_rows = 0
        for request in queue:
            num_rows += 0 if request.is_over else request.num_rows
            if num_rows >= self.limits.max_rows:
                return True
        return False

    def _fill(self, group: Hashable) -> list[WaitingRequest[T]]:
        queue = self._groups[group]
        requests = [queue.popleft()]
        num_rows = requests[0].num_rows
        _drop_withdrawn(queue)
        while group != ALONE and queue and num_rows + queue[0].num_rows <= self.limits.max_rows:
            num_rows += queue[0].num_rows
            requests.append(queue.popleft())
            _drop_withdrawn(queue)
        return requests

    def _take_suspect(self) -> list[Batch[T]]:
        """Send the next suspect, if the replica that tries them is idle. There is such a replica as long as there are
        suspects, and as long as another one serves meanwhile."""
        chosen = self._replicas.get(-1 if self._suspect_replica is None else self._suspect_replica)
        if chosen is not None and chosen.batches:
            return []
        may_try = self.num_ready > 1 or self.limits.num_replicas == 1
        ready = {number: state for number, state in self._replicas.items() if state.is_ready}
        _drop_withdrawn(self._suspects)
        if not self._suspects or not may_try or not ready:
            self._suspect_replica = None
            return []
        if self._suspect_replica not in ready:
            self._suspect_replica = min(ready, key=lambda number: ready[number].num_rows)
        if ready[self._suspect_replica].batches:
            return []
        return [self._send(self._suspect_replica, [self._suspects.popleft()])]

    def _send(self, replica: int, requests: list[WaitingRequest[T]]) -> Batch[T]:
        self._num_batches += 1
        state = self._replicas[replica]
        batch = Batch(self._num_batches, replica, tuple(requests), sum(each.num_rows for each in requests))
        state.batches[batch.number] = batch
        state.num_rows += batch.num_rows
        state.last_used = batch.number
        self.num_waiting -= len(requests)
        for request in requests:
            request.is_sent = True
        return batch


def _drop_withdrawn(queue: deque[WaitingRequest[T]]) -> None:
    """Remove from the front of a queue what nobody waits for any more."""
    while queue and queue[0].is_over:
        queue.popleft()
