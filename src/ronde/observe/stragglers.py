"""When callers were blocked in a channel, to tell which part of an operation they waited for and which they computed
through. Used by comm/lane for operations that run in the background.

Which operations of a channel are told to the coordinator, with when this rank came. Filled by comm/lane.

To find who was late, the arrivals of *all* members at *one* operation are needed, so the members have to choose the
same ones without asking each other. An operation has a number, the same on all members. At *level* 0 every operation is
noted, at level n one of each block of 2**n. Which one is drawn from the numbers themselves, as in a knockout: of two
neighbouring blocks one wins. So the choice does not beat in time with the steps of a training, and what a member notes
at a higher level is part of what it would note at a lower one.

Few operations take most of the waiting, so none of them may slip through: who has waited for long notes that at every
level. Who has not noted such an operation came to it shortly before its end.

Who is waited for, and how long. Pure; run by the coordinator, and by each rank for named operations.

Everybody who waits sees the same waiting time, whoever is late; only the arrivals of all members tell who it was. In
each moment between the first and the last arrival, the time of those who do nothing but wait is shared out evenly among
the members that are missing in that moment:

    rank 0  ───●━━━━━━━━━━━━━━━┓        ● arrives   ━ its caller waits   ┃ all are there
    rank 1  ──────────●━━━━━━━━┫
    rank 2  ───────────────────●        rank 1 is blamed for half of the first piece, rank 2 for all the rest

So the blame of all ranks adds up to the time that was lost by all, and a rank that waits itself is never blamed for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

__all__ = [
    "ArrivalSample",
    "ArrivalSampler",
    "BlockedIntervals",
    "StragglerDetector",
    "attribute_waits",
    "long_wait_ns",
    "max_samples_per_s",
    "next_sampled",
]

MAX_BLOCKED_INTERVALS = 16
"""An operation is looked at soon after it is over: older times are not asked for."""
MIN_BLOCKED_NS = 10_000
"""Asking for what is over takes a few microseconds, too; nobody was blocked then."""


class BlockedIntervals:
    """The last times in which callers were blocked. Any thread may add."""

    def __init__(self) -> None:
        self._intervals: deque[tuple[int, int]] = deque(maxlen=MAX_BLOCKED_INTERVALS)

    def add(self, begin_ns: int, end_ns: int) -> None:
        """A caller was blocked from then to then."""
        if end_ns - begin_ns >= MIN_BLOCKED_NS:
            self._intervals.append((begin_ns, end_ns))

    def blocked_ns_between(self, begin_ns: int, end_ns: int) -> int:
        """How long callers were blocked between these two moments. Two callers at once count as one."""
        total = 0
        for since_ns, until_ns in sorted(self._intervals.copy()):  # the copy is one step for other threads
            since_ns, until_ns = max(since_ns, begin_ns), min(until_ns, end_ns)
            if until_ns > since_ns:
                total += until_ns - since_ns
                begin_ns = until_ns
        return total


NEVER = 1 << 62
MAX_SAMPLING_LEVEL = 30
_BITS = (1 << 64) - 1


class ArrivalSample(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One operation, as one member saw it."""

    sequence: int
    """Equal on all members of the channel."""
    sampling_level: Annotated[int, msgspec.Meta(ge=0, le=MAX_SAMPLING_LEVEL)]
    """One operation of 2**level is noted."""
    arrived_ns: int
    waited_ns: int
    """From then on, until every member had arrived."""
    blocked_ns: int
    """The last part of this, in which a caller did nothing but wait."""


def max_samples_per_s(num_members: int) -> int:
    """About how many operations a member notes per second: fewer where there are many members, as all of their notes
    go to one coordinator."""
    return max(64, min(1024, 65_536 // num_members))


def long_wait_ns(num_members: int) -> int:
    """A wait that is noted in any case. Nobody can have more of them in a second than it may note."""
    return 1_000_000_000 // max_samples_per_s(num_members)


def next_sampled(sequence: int, sampling_level: int) -> int:
    """The next operation behind `number` that is noted at this level."""
    block = (sequence + 1) >> sampling_level
    found = _sampled_of_block(block, sampling_level)
    return found if found > sequence else _sampled_of_block(block + 1, sampling_level)


def _sampled_of_block(block: int, level: int) -> int:
    """The number that stands for a block of 2**level numbers."""
    for size in range(level, 0, -1):
        block = 2 * block + _hash_bit(block, size)
    return block


def _hash_bit(block: int, size: int) -> int:
    """0 or 1, without a pattern, but always the same for the same block."""
    mixed = (block * 0x9E3779B97F4A7C15 + size * 0xD1B54A32D192ED03) & _BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
    return mixed >> 63


class ArrivalSampler:
    """The notes of one channel until they are fetched. Who is in a hurry calls add() only when the number has reached
    `next`, or the wait `long_ns`.

    add() is for the threads that run operations, take() for one other thread.
    """

    def __init__(self, num_members: int) -> None:
        """Nobody has to wait where there is but one member, or none: then nothing is noted."""
        self.next_sequence = 0 if num_members > 1 else NEVER
        """The number of the next operation to note."""
        self.long_wait_ns = long_wait_ns(num_members) if num_members > 1 else NEVER
        """A wait that is noted in any case."""
        self._max_samples = max_samples_per_s(num_members) if num_members > 1 else 0
        """With more notes between two fetches, the level rises."""
        self._sampling_level = 0
        self._num_remaining = self._max_samples
        self._samples: deque[ArrivalSample] = deque()

    def add(self, sequence: int, arrived_ns: int, waited_ns: int, blocked_ns: int) -> None:
        """Note an operation if it is one to be noted. Those in the background may be told out of their order."""
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
        """The next operation has this number."""
        if self._max_samples:
            self.next_sequence = next_sampled(sequence - 1, self._sampling_level)

    def take_samples(self, offset_ns: int = 0) -> tuple[ArrivalSample, ...]:
        """All notes since the last call, moved by the offset to another clock. Called about once per second."""
        num = len(self._samples)
        taken = [self._samples.popleft() for _ in range(num)]
        if num < self._max_samples // 4 and self._sampling_level > 0:
            self._sampling_level -= 1
        self._num_remaining = self._max_samples
        if offset_ns:
            return tuple([msgspec.structs.replace(note, arrived_ns=note.arrived_ns + offset_ns) for note in taken])
        return tuple(taken)


REPORT_GRACE_NS = 200_000_000
"""An operation ends everywhere at about the same time: who tells anything later than this has told of it, too."""
REPORT_TIMEOUT_NS = 30_000_000_000
"""A member that has not told of an operation by then never will: it has joined, or is gone."""
MAX_OPEN_OPERATIONS = 65_536
"""Operations of which not all members have told yet."""
LONG_WAIT_FACTOR = 4
"""An operation counts as long when somebody has waited so many times as long as is noted in any case. Those who did not
note it came at most a quarter of that wait before its end."""


def attribute_waits(arrivals: Mapping[int, int], blocked: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Nanoseconds that each rank was waited for.

    `arrivals` says when each member came to the operation, `blocked` from when to when callers of members did nothing
    but wait in it; all on one clock. Time after the last arrival is nobody's fault.
    """
    if not arrivals:
        return {}
    # (when, change of the number that wait, who arrives or -1)
    moments = [(at_ns, 0, rank) for rank, at_ns in arrivals.items()]
    for begin_ns, end_ns in blocked:
        if end_ns > begin_ns:
            moments += ((begin_ns, 1, -1), (end_ns, -1, -1))
    moments.sort()
    blamed: dict[int, float] = {}
    per_missing, num_waiting, num_missing, before_ns = 0.0, 0, len(arrivals), 0
    for at_ns, change, rank in moments:
        if num_waiting:
            per_missing += num_waiting * (at_ns - before_ns) / num_missing
        before_ns = at_ns
        num_waiting += change
        if rank >= 0:
            blamed[rank] = per_missing  # what every missing one was blamed for until it came
            num_missing -= 1
            if not num_missing:
                break
    return blamed


class _OpenOperation:
    """An operation of which not all members have told yet."""

    __slots__ = ("channel", "members", "samples", "since_ns")

    def __init__(self, channel: str, members: tuple[int, ...], since_ns: int) -> None:
        self.channel = channel
        self.members = members
        self.since_ns = since_ns
        self.samples: dict[int, ArrivalSample] = {}


class StragglerDetector:
    """Puts together what the members of channels tell of the same operations.

    Long operations are told of by all who waited in them, and count as they are. Of the others only some are told of,
    the same ones by all members, and each stands for all of its block.
    """

    def __init__(self) -> None:
        self.held_up_ns: dict[int, float] = {}
        """By rank, how long others have waited for it, all of them added up."""
        self._last_report_ns: dict[int, int] = {}
        self._open: dict[tuple[str, int], _OpenOperation] = {}
        """In the order in which they were first heard of."""

    def add(
        self, rank: int, channel: str, members: tuple[int, ...], samples: Iterable[ArrivalSample], now_ns: int
    ) -> None:
        """A member of a channel tells of operations. Times in notes are on one clock for all members."""
        opened = self._open
        for note in samples:
            key = (channel, note.sequence)
            operation = opened.get(key)
            if operation is None:
                operation = opened[key] = _OpenOperation(channel, members, now_ns)
            operation.samples[rank] = note
            if len(operation.samples) == len(members):
                del opened[key]
                self._attribute(operation)

    def add_wait(self, rank: int, waited_ns: float) -> None:
        """Somebody knows by itself that it has waited for this rank."""
        self.held_up_ns[rank] = self.held_up_ns.get(rank, 0.0) + waited_ns

    def rank_reported(self, rank: int, now_ns: int) -> None:
        """A rank has told all that it has to tell by now."""
        self._last_report_ns[rank] = now_ns
        last_ns: dict[str, int] = {}
        told: list[tuple[str, int]] = []
        for key, operation in self._open.items():
            channel = operation.channel
            if channel not in last_ns:
                last_ns[channel] = min(self._last_report_ns.get(member, 0) for member in operation.members)
            is_told = last_ns[channel] - operation.since_ns >= REPORT_GRACE_NS
            if (
                not is_told
                and len(self._open) - len(told) <= MAX_OPEN_OPERATIONS
                and now_ns - operation.since_ns < REPORT_TIMEOUT_NS
            ):
                break
            told.append(key)
        for key in told:
            self._attribute(self._open.pop(key))

    def finish(self) -> None:
        """Nobody tells anything any more."""
        for operation in self._open.values():
            self._attribute(operation)
        self._open.clear()

    def _attribute(self, operation: _OpenOperation) -> None:
        notes = operation.samples
        ready_ns = {rank: note.arrived_ns + note.waited_ns for rank, note in notes.items()}
        blocked = [(ready_ns[rank] - note.blocked_ns, ready_ns[rank]) for rank, note in notes.items()]
        is_long = max(note.waited_ns for note in notes.values()) >= LONG_WAIT_FACTOR * long_wait_ns(
            len(operation.members)
        )
        if len(notes) < len(operation.members) and not is_long:
            return  # chosen by some members only, while their levels changed
        weight = 1 if is_long else 1 << max(note.sampling_level for note in notes.values())
        arrivals = dict.fromkeys(operation.members, max(ready_ns.values()))
        arrivals.update({rank: note.arrived_ns for rank, note in notes.items()})
        for rank, waited_ns in attribute_waits(arrivals, blocked).items():
            if waited_ns:
                self.add_wait(rank, weight * waited_ns)
