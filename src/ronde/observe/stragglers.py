"""Stragglers: which ranks the others wait for, and how long.

Everybody who waits sees the same waiting time, whoever is late; only the arrivals of all members tell who it was. At
each moment between the first and the last arrival, the time of the callers that do nothing but wait is shared out
evenly among the members that are missing at that moment (attribute_waits):

    rank 0  ───●━━━━━━━━━━━━━━━┓        ● arrives   ━ its caller waits   ┃ all are there
    rank 1  ──────────●━━━━━━━━┫
    rank 2  ───────────────────●        half of the first piece is rank 1's, all the rest is rank 2's

So the times of all ranks add up to what all have lost, and a rank that waits itself is never charged for it.

Channels run too many operations to report them all (ArrivalSampler). The arrivals of *all* members at *one* operation
are needed, so the members sample the same ones without asking each other. An operation has a sequence number, the same
on all members. At sampling level 0 every operation is sampled, at level n one of each block of 2**n. Which one follows
from hashes of the block numbers, as in a knockout: of two neighbouring blocks one wins. So the choice has no period in
common with the steps of a training, and what is sampled at a higher level is also sampled at a lower one. Few
operations make up most of the waiting, so a long wait is sampled at every level. A member that did not sample such an
operation came to it shortly before its end.

A caller may compute while an operation runs; only the time in which it was blocked counts (BlockedIntervals). The
StragglerDetector, in the coordinator, brings the samples of all members together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec

MAX_BLOCKED_INTERVALS = 16
"""Callers ask about an operation soon after it is over, so older intervals are not needed."""
MIN_BLOCKED_NS = 10_000
"""Waiting for an operation that is over takes a few microseconds. That is no wait."""
NEVER = 1 << 62
MAX_SAMPLING_LEVEL = 30
REPORT_GRACE_NS = 200_000_000
"""An operation ends on all members at about the same time: what a member reports later than this, comes after it."""
REPORT_TIMEOUT_NS = 30_000_000_000
"""A member that has not reported an operation after this time never will: it has joined, or is gone."""
MAX_OPEN_OPERATIONS = 65_536
"""Operations that not all members have reported yet."""
LONG_WAIT_FACTOR = 4
"""An operation counts as long when somebody has waited for so many times long_wait_ns. Those who did not sample it came
at most a quarter of that wait before its end."""
_BITS = (1 << 64) - 1


class BlockedIntervals:
    """The last intervals in which callers were blocked in a channel. Any thread may add."""

    def __init__(self) -> None:
        self._intervals: deque[tuple[int, int]] = deque(maxlen=MAX_BLOCKED_INTERVALS)

    def add(self, begin_ns: int, end_ns: int) -> None:
        if end_ns - begin_ns >= MIN_BLOCKED_NS:
            self._intervals.append((begin_ns, end_ns))

    def blocked_ns_between(self, begin_ns: int, end_ns: int) -> int:
        """Return how long callers were blocked between these two times. Two callers at once count as one."""
        if end_ns - begin_ns < MIN_BLOCKED_NS:  # as most messages, which are sent at once
            return 0
        total = 0
        for since_ns, until_ns in sorted(self._intervals.copy()):  # the copy is atomic
            since_ns, until_ns = max(since_ns, begin_ns), min(until_ns, end_ns)
            if until_ns > since_ns:
                total += until_ns - since_ns
                begin_ns = until_ns
        return total


class ArrivalSample(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One operation, as one member observed it."""

    sequence: int
    """Equal on all members of the channel."""
    sampling_level: Annotated[int, msgspec.Meta(ge=0, le=MAX_SAMPLING_LEVEL)]
    """One operation of 2**level is sampled."""
    arrived_ns: int
    waited_ns: int
    """From its arrival until every member had arrived."""
    blocked_ns: int
    """The last part of that, in which a caller did nothing but wait."""


def max_samples_per_s(num_members: int) -> int:
    """Return about how many operations a member samples per second: fewer where there are many members, because all
    their samples go to one coordinator."""
    return max(4, min(1024, 65_536 // num_members))


def long_wait_ns(num_members: int) -> int:
    """Return the wait from which on an operation is always sampled. So many fit in a second as may be sampled."""
    return 1_000_000_000 // max_samples_per_s(num_members)


def next_sampled(sequence: int, sampling_level: int) -> int:
    """Return the first operation after `sequence` that is sampled at this level."""
    block = (sequence + 1) >> sampling_level
    found = _sampled_of_block(block, sampling_level)
    return found if found > sequence else _sampled_of_block(block + 1, sampling_level)


def _sampled_of_block(block: int, level: int) -> int:
    """Return the sampled number of a block of 2**level numbers."""
    for size in range(level, 0, -1):  # a hash, without a pattern, chooses one of the two halves
        mixed = (block * 0x9E3779B97F4A7C15 + size * 0xD1B54A32D192ED03) & _BITS
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
        block = 2 * block + (mixed >> 63)
    return block


class ArrivalSampler:
    """The samples of one channel until they are sent. Callers in a hurry call add() only when the sequence number has
    reached `next_sequence`, or the wait `long_wait_ns`. The threads that run operations call add(), one other thread
    calls take_samples()."""

    def __init__(self, num_members: int) -> None:
        # Nobody waits where there is one member, or none: then nothing is sampled.
        self.next_sequence = 0 if num_members > 1 else NEVER
        self.long_wait_ns = long_wait_ns(num_members) if num_members > 1 else NEVER
        self._max_samples = max_samples_per_s(num_members) if num_members > 1 else 0
        """With more samples between two calls of take_samples(), the level rises."""
        self._sampling_level = 0
        self._num_remaining = self._max_samples
        self._samples: deque[ArrivalSample] = deque()

    def add(self, sequence: int, arrived_ns: int, waited_ns: int, blocked_ns: int) -> None:
        """Add an operation if it is to be sampled. Operations in the background may come out of order."""
        if not self._max_samples:
            return
        if waited_ns >= self.long_wait_ns or next_sampled(sequence - 1, self._sampling_level) == sequence:
            self._samples.append(ArrivalSample(sequence, self._sampling_level, arrived_ns, waited_ns, blocked_ns))
        if sequence >= self.next_sequence:
            self._num_remaining -= 1
            if self._num_remaining <= 0 and self._sampling_level < MAX_SAMPLING_LEVEL:
                self._sampling_level += 1
                self._num_remaining = self._max_samples
            self.next_sequence = next_sampled(sequence, self._sampling_level)

    def skip_to(self, sequence: int) -> None:
        """Called when the next operation has this number."""
        if self._max_samples:
            self.next_sequence = next_sampled(sequence - 1, self._sampling_level)

    def take_samples(self, offset_ns: int = 0) -> tuple[ArrivalSample, ...]:
        """Return the samples since the last call, moved by the offset to another clock. Called about every second."""
        num = len(self._samples)
        taken = [self._samples.popleft() for _ in range(num)]
        if num < self._max_samples // 4 and self._sampling_level > 0:
            self._sampling_level -= 1
        self._num_remaining = self._max_samples
        if offset_ns:
            return tuple([msgspec.structs.replace(each, arrived_ns=each.arrived_ns + offset_ns) for each in taken])
        return tuple(taken)


def attribute_waits(arrivals: Mapping[int, int], blocked: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Return for how many nanoseconds the others waited for each rank.

    `arrivals` has when each member came to the operation, `blocked` the intervals in which callers did nothing but wait
    in it, all on one clock. Time after the last arrival counts for nobody.
    """
    if not arrivals:
        return {}
    # (time, change of the number of waiting callers, rank that arrives or -1)
    moments = [(at_ns, 0, rank) for rank, at_ns in arrivals.items()]
    for begin_ns, end_ns in blocked:
        if end_ns > begin_ns:
            moments += ((begin_ns, 1, -1), (end_ns, -1, -1))
    moments.sort()
    waited_for_ns: dict[int, float] = {}
    per_missing, num_waiting, num_missing, before_ns = 0.0, 0, len(arrivals), 0
    for at_ns, change, rank in moments:
        if num_waiting:
            per_missing += num_waiting * (at_ns - before_ns) / num_missing
        before_ns = at_ns
        num_waiting += change
        if rank >= 0:
            waited_for_ns[rank] = per_missing  # what every missing rank was charged for until now
            num_missing -= 1
            if not num_missing:
                break
    return waited_for_ns


class _OpenOperation(NamedTuple):
    """An operation that not all members have reported yet."""

    channel: str
    members: tuple[int, ...]
    since_ns: int
    samples: dict[int, ArrivalSample]


class StragglerDetector:
    """Brings together the samples that the members of channels report of the same operations.

    Long operations are reported by all who waited in them, and count once. Of the others only some are sampled, the
    same ones by all members, and each counts for its whole block.
    """

    def __init__(self) -> None:
        self.held_up_ns: dict[int, float] = {}
        """By rank, how long others have waited for it, added up over all of them."""
        self._last_report_ns: dict[int, int] = {}
        self._open: dict[tuple[str, int], _OpenOperation] = {}
        """By channel and sequence number, in the order of their first reports."""
        self._awaited: set[int] = set()
        """Members of the oldest open operation that have not reported since the time in which they would report it."""
        self._awaited_by: _OpenOperation | None = None

    def add(
        self, rank: int, channel: str, members: tuple[int, ...], samples: Iterable[ArrivalSample], now_ns: int
    ) -> None:
        """Add the samples of a member of a channel. Their times are on one clock for all members."""
        opened = self._open
        for sample in samples:
            key = (channel, sample.sequence)
            operation = opened.get(key)
            if operation is None:
                operation = opened[key] = _OpenOperation(channel, members, now_ns, {})
            operation.samples[rank] = sample
            if len(operation.samples) == len(members):
                del opened[key]
                self._attribute(operation)

    def add_wait(self, rank: int, waited_ns: float) -> None:
        """Add a wait of which the waiting rank knows by itself for whom it was."""
        self.held_up_ns[rank] = self.held_up_ns.get(rank, 0.0) + waited_ns

    def rank_reported(self, rank: int, now_ns: int) -> None:
        """Called when a rank has sent all its samples up to now. Closes operations that nobody will report any more."""
        self._last_report_ns[rank] = now_ns
        if not self._open:
            return
        oldest = next(iter(self._open.values()))
        reported_from_ns = oldest.since_ns + REPORT_GRACE_NS
        if oldest is not self._awaited_by:
            last_report_ns = self._last_report_ns
            self._awaited = {each for each in oldest.members if last_report_ns.get(each, 0) < reported_from_ns}
            self._awaited_by = oldest
        elif now_ns >= reported_from_ns:
            self._awaited.discard(rank)
        is_full = len(self._open) > MAX_OPEN_OPERATIONS
        if self._awaited and not is_full and now_ns - oldest.since_ns < REPORT_TIMEOUT_NS:
            return
        last_ns: dict[str, int] = {}
        complete: list[tuple[str, int]] = []
        for key, operation in self._open.items():
            channel = operation.channel
            if channel not in last_ns:
                last_ns[channel] = min(self._last_report_ns.get(member, 0) for member in operation.members)
            is_complete = last_ns[channel] - operation.since_ns >= REPORT_GRACE_NS
            if (
                not is_complete
                and len(self._open) - len(complete) <= MAX_OPEN_OPERATIONS
                and now_ns - operation.since_ns < REPORT_TIMEOUT_NS
            ):
                break
            complete.append(key)
        for key in complete:
            self._attribute(self._open.pop(key))

    def finish(self) -> None:
        """Called when no more samples come."""
        for operation in self._open.values():
            self._attribute(operation)
        self._open.clear()

    def _attribute(self, operation: _OpenOperation) -> None:
        samples = operation.samples
        ready_ns = {rank: sample.arrived_ns + sample.waited_ns for rank, sample in samples.items()}
        blocked = [(ready_ns[rank] - sample.blocked_ns, ready_ns[rank]) for rank, sample in samples.items()]
        longest_wait_ns = max(sample.waited_ns for sample in samples.values())
        is_long = longest_wait_ns >= LONG_WAIT_FACTOR * long_wait_ns(len(operation.members))
        if len(samples) < len(operation.members) and not is_long:
            return  # sampled by some members only, while their levels changed
        weight = 1 if is_long else 1 << max(sample.sampling_level for sample in samples.values())
        arrivals = dict.fromkeys(operation.members, max(ready_ns.values()))
        arrivals.update({rank: sample.arrived_ns for rank, sample in samples.items()})
        for rank, waited_ns in attribute_waits(arrivals, blocked).items():
            if waited_ns:
                self.add_wait(rank, weight * waited_ns)
