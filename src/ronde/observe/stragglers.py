"""Who is waited for, and how long. Pure; run by the coordinator, and by each rank for named operations.

Everybody who waits sees the same waiting time, whoever is late; only the arrivals of all members tell who it was. In
each moment between the first and the last arrival, the time of those who do nothing but wait is shared out evenly among
the members that are missing in that moment:

    rank 0  ───●━━━━━━━━━━━━━━━┓        ● arrives   ━ its caller waits   ┃ all are there
    rank 1  ──────────●━━━━━━━━┫
    rank 2  ───────────────────●        rank 1 is blamed for half of the first piece, rank 2 for all the rest

So the blame of all ranks adds up to the time that was lost by all, and a rank that waits itself is never blamed for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ronde.observe.sampling import Note, long_wait_ns

__all__ = ["Stragglers", "blame"]

SETTLING_NS = 200_000_000
"""An operation ends everywhere at about the same time: who tells anything later than this has told of it, too."""
PATIENCE_NS = 30_000_000_000
"""A member that has not told of an operation by then never will: it has joined, or is gone."""
MOST_OPEN = 65_536
"""Operations of which not all members have told yet."""
LONG = 4
"""An operation counts as long when somebody has waited so many times as long as is noted in any case. Those who did not
note it came at most a quarter of that wait before its end."""


def blame(arrivals: Mapping[int, int], blocked: Iterable[tuple[int, int]]) -> dict[int, float]:
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


class _Open:
    """An operation of which not all members have told yet."""

    __slots__ = ("channel", "members", "notes", "since_ns")

    def __init__(self, channel: str, members: tuple[int, ...], since_ns: int) -> None:
        self.channel = channel
        self.members = members
        self.since_ns = since_ns
        self.notes: dict[int, Note] = {}


class Stragglers:
    """Puts together what the members of channels tell of the same operations.

    Long operations are told of by all who waited in them, and count as they are. Of the others only some are told of,
    the same ones by all members, and each stands for all of its block.
    """

    def __init__(self) -> None:
        self.held_up_ns: dict[int, float] = {}
        """By rank, how long others have waited for it, all of them added up."""
        self._heard_ns: dict[int, int] = {}
        self._open: dict[tuple[str, int], _Open] = {}
        """In the order in which they were first heard of."""

    def add(self, rank: int, channel: str, members: tuple[int, ...], notes: Iterable[Note], now_ns: int) -> None:
        """A member of a channel tells of operations. Times in notes are on one clock for all members."""
        opened = self._open
        for note in notes:
            key = (channel, note.number)
            operation = opened.get(key)
            if operation is None:
                operation = opened[key] = _Open(channel, members, now_ns)
            operation.notes[rank] = note
            if len(operation.notes) == len(members):
                del opened[key]
                self._judge(operation)

    def charge(self, rank: int, waited_ns: float) -> None:
        """Somebody knows by itself that it has waited for this rank."""
        self.held_up_ns[rank] = self.held_up_ns.get(rank, 0.0) + waited_ns

    def heard(self, rank: int, now_ns: int) -> None:
        """A rank has told all that it has to tell by now."""
        self._heard_ns[rank] = now_ns
        last_ns: dict[str, int] = {}
        told: list[tuple[str, int]] = []
        for key, operation in self._open.items():
            channel = operation.channel
            if channel not in last_ns:
                last_ns[channel] = min(self._heard_ns.get(member, 0) for member in operation.members)
            is_told = last_ns[channel] - operation.since_ns >= SETTLING_NS
            if not is_told and len(self._open) - len(told) <= MOST_OPEN and now_ns - operation.since_ns < PATIENCE_NS:
                break
            told.append(key)
        for key in told:
            self._judge(self._open.pop(key))

    def finish(self) -> None:
        """Nobody tells anything any more."""
        for operation in self._open.values():
            self._judge(operation)
        self._open.clear()

    def _judge(self, operation: _Open) -> None:
        notes = operation.notes
        ready_ns = {rank: note.arrived_ns + note.waited_ns for rank, note in notes.items()}
        blocked = [(ready_ns[rank] - note.blocked_ns, ready_ns[rank]) for rank, note in notes.items()]
        is_long = max(note.waited_ns for note in notes.values()) >= LONG * long_wait_ns(len(operation.members))
        if len(notes) < len(operation.members) and not is_long:
            return  # chosen by some members only, while their levels changed
        weight = 1 if is_long else 1 << max(note.level for note in notes.values())
        arrivals = dict.fromkeys(operation.members, max(ready_ns.values()))
        arrivals.update({rank: note.arrived_ns for rank, note in notes.items()})
        for rank, waited_ns in blame(arrivals, blocked).items():
            if waited_ns:
                self.charge(rank, weight * waited_ns)
