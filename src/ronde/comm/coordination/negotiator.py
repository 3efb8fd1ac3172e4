"""When may a named operation run? A state machine without I/O: announcements in, messages out. Used by the coordinator.

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

from collections.abc import Iterator
from typing import NamedTuple

from ronde.comm.coordination.requests import described, find_fault, fusion_key, num_bytes, rows_of, title
from ronde.net.messages import Announce, Failed, FromCoordinator, Request, Run, RunItem, Unknown
from ronde.observe.events import name_ranks, shorten
from ronde.types import Kind

__all__ = ["Negotiator", "Pending", "Send"]

REMEMBERED = 65_536
"""Names kept for announcing by id; the one that ran longest ago is forgotten first."""
WHY_LIMIT = 4000
"""Characters of an error that go to every member."""
LATE_NS = 100_000
"""Members that announce within so short a time are not late."""
MOST_LATE = 8
"""Members told of as late, those that came last."""

_Key = tuple[int, int, int, float, float]


class Send(NamedTuple):
    """What the state machine wants done: this message to these ranks, in this order."""

    ranks: tuple[int, ...]
    message: FromCoordinator


class Pending(NamedTuple):
    """An operation in flight, for the stall watch."""

    group: int
    name: str
    text: str
    since_ns: int
    announced: tuple[int, ...]
    missing: tuple[int, ...]


class _Group:
    """One group: who is in it, what is in flight. Sets of ranks are bit masks."""

    __slots__ = ("entries", "flights", "full", "id", "joined", "members", "over")

    def __init__(self, group: int, members: tuple[int, ...]) -> None:
        self.id = group
        self.members = members
        self.full = sum(1 << rank for rank in members)
        self.joined = 0
        self.entries: dict[str, _Entry] = {}
        self.flights: dict[int, _Entry] = {}
        self.over = ""
        """Why nothing can run here any more: a member is gone."""


class _Entry:
    """One name of a group. `run` and what follows are made when the members agree, and hold until a request changes."""

    __slots__ = (
        *("id", "group", "name", "requests"),
        *("arrived", "came", "ready", "since_ns", "spoiled"),
        *("agreed", "run", "item", "key", "num_bytes"),
    )

    def __init__(self, entry: int, group: _Group, name: str) -> None:
        self.id = entry
        self.group = group
        self.name = name
        self.requests: dict[int, Request] = {}
        self.arrived = 0
        self.came: list[tuple[int, int]] = []
        """(bit of the rank, when), in the order of arrival."""
        self.ready = False
        self.since_ns = 0
        self.spoiled = ""
        self.agreed = False
        self.item = RunItem(entry, name)
        self.run = Send(group.members, Run(group.id, (self.item,)))
        self.key: _Key | None = None
        self.num_bytes = 0


class Negotiator:
    """All groups of one round. feed() what the ranks say, then flush() for what to tell them."""

    def __init__(self, size: int, *, fusion_bytes: int, remembered: int = REMEMBERED) -> None:
        self._fusion_bytes = fusion_bytes
        self._remembered = remembered
        self._groups: dict[int, _Group] = {}
        self._entries: dict[int, _Entry] = {}
        self._idle: dict[int, _Entry] = {}  # in the order of their last run
        self._ready: list[_Entry] = []
        self._out: list[Send] = []
        self._last_id = 0
        self.add_group(0, tuple(range(size)))

    def add_group(self, group: int, members: tuple[int, ...]) -> None:
        """Members are ranks of the world; their order is the order of rows."""
        assert group not in self._groups, f"group {group} exists"
        self._groups[group] = _Group(group, members)

    def remove_group(self, group: int) -> None:
        """What is in flight there fails on those who announced it."""
        self._settle()
        gone = self._groups.pop(group)
        for entry in gone.flights.values():
            self._fail(entry, f"{self._title(entry)}: the group was removed before all members announced it")
        self._forget_all(gone)

    def lose(self, rank: int, why: str) -> None:
        """A rank is gone: nothing more runs in its groups. Those who wait there are told by Lost, not from here."""
        self._settle()
        for group in self._groups.values():
            if group.full >> rank & 1 and not group.over:
                group.over = f"rank {rank} is gone: {why}"
                self._forget_all(group)

    def feed(self, rank: int, announce: Announce, now_ns: int) -> None:
        """A rank is ready for operations. Answers wait for flush()."""
        bit = 1 << rank
        for request in announce.new:
            self._announce(rank, bit, request, now_ns)
        entries = self._entries
        for known in announce.known:
            entry = entries.get(known)
            if entry is None or rank not in entry.requests:
                self._out.append(Send((rank,), Unknown(known)))
            else:
                self._arrive(entry, bit, now_ns)

    def flush(self) -> list[Send]:
        """What to send now, in this order."""
        if self._ready:
            self._settle()
        out = self._out
        if out:
            self._out = []
        return out

    def missing(self, group: int, name: str) -> tuple[int, ...]:
        """Whom a named operation waits for; nobody when it is not in flight."""
        found = self._groups.get(group)
        entry = found.entries.get(name) if found is not None else None
        return _missing(entry) if entry is not None and entry.arrived else ()

    def pending(self, until_ns: int) -> Iterator[Pending]:
        """What is in flight since until_ns or longer, per group the oldest first."""
        for group in self._groups.values():
            for entry in group.flights.values():
                if entry.since_ns > until_ns:
                    break
                announced = _ranks(group, entry.arrived)
                request = entry.requests[announced[0]]
                yield Pending(group.id, entry.name, described(request), entry.since_ns, announced, _missing(entry))

    # --- announcements ---------------------------------------------------------------------------------------------

    def _announce(self, rank: int, bit: int, request: Request, now_ns: int) -> None:
        group = self._groups.get(request.group)
        why = _exclusion(group, rank, request)
        if group is None or why:
            self._out.append(Send((rank,), Failed(request.group, request.name, f"{title(request)}: {why}")))
            return
        if request.kind == Kind.JOIN:
            self._join(group, rank, request)
            return
        entry = group.entries.get(request.name)
        if entry is None:
            self._last_id += 1
            entry = _Entry(self._last_id, group, request.name)
            group.entries[request.name] = self._entries[entry.id] = entry
        if entry.arrived & bit:  # the first stands: do not replace what it asked for
            self._arrive(entry, bit, now_ns)
            return
        before = entry.requests.get(rank)
        if before is None or before != request:
            entry.requests[rank] = request
            entry.agreed = False
        self._arrive(entry, bit, now_ns)

    def _arrive(self, entry: _Entry, bit: int, now_ns: int) -> None:
        arrived = entry.arrived
        group = entry.group
        if not arrived:
            self._idle.pop(entry.id, None)
            group.flights[entry.id] = entry
            entry.since_ns = now_ns
        elif arrived & bit:
            # Told when all have announced, as every other error: then each member gets it once, for this flight.
            twice = name_ranks(_ranks(group, bit))
            entry.spoiled = f"{self._title(entry)}: {twice} announced it again while it was under way"
            return
        arrived |= bit
        entry.arrived = arrived
        entry.came.append((bit, now_ns))
        if arrived | group.joined == group.full and not entry.ready:
            entry.ready = True
            self._ready.append(entry)

    def _join(self, group: _Group, rank: int, request: Request) -> None:
        group.joined |= 1 << rank
        for entry in group.flights.values():
            if entry.arrived | group.joined == group.full and not entry.ready:
                entry.ready = True
                self._ready.append(entry)
        if group.joined != group.full:
            return
        self._settle()
        group.joined = 0
        item = RunItem(0, request.name, rows=(rank,))  # 0 is nobody's id: a join is always announced in full
        self._out.append(Send(group.members, Run(group.id, (item,))))

    # --- what is ready ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Run or fail everything that is ready, fusing in the order of readiness."""
        ready = self._ready
        self._ready = []
        runs: list[list[_Entry]] = []
        open_runs: dict[_Key, list[_Entry]] = {}
        left: dict[_Key, int] = {}  # bytes of room in the open run
        for entry in ready:
            if (not entry.agreed or entry.spoiled or entry.arrived != entry.group.full) and not self._agree(entry):
                continue
            key = entry.key
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
            self._run(run)

    def _agree(self, entry: _Entry) -> bool:
        """Whether the members that announced it agree, and joined ones can stand in. Otherwise it has failed."""
        group = entry.group
        announced = _ranks(group, entry.arrived)
        requests = {rank: entry.requests[rank] for rank in announced}
        request = requests[announced[0]]
        why = entry.spoiled or find_fault(requests, group.members)
        if not why and len(announced) < len(group.members) and request.kind != Kind.ALLREDUCE:
            joined = name_ranks(_ranks(group, group.full & ~entry.arrived))
            why = f"{title(request)}: {joined} called join() and takes part in allreduce only"
        if why:
            self._fail(entry, why)
            self._forget(entry)
            return False
        entry.item = RunItem(entry.id, entry.name, rows=rows_of(requests, group.members))
        entry.run = Send(group.members, Run(group.id, (entry.item,)))
        entry.key = fusion_key(request) if self._fusion_bytes else None
        entry.num_bytes = num_bytes(request) if entry.key else 0
        entry.agreed = len(announced) == len(group.members)
        return True

    def _run(self, run: list[_Entry]) -> None:
        group = run[0].group
        late = _late(run)
        if any(entry.arrived != group.full for entry in run):
            self._run_for_joined(run, late)
        elif len(run) == 1 and not late:
            self._out.append(run[0].run)
        else:
            self._out.append(Send(group.members, Run(group.id, tuple([entry.item for entry in run]), late)))
        for entry in run:
            entry.arrived = 0
            entry.came.clear()
            entry.ready = False
            del group.flights[entry.id]
            self._idle[entry.id] = entry
        while len(self._entries) > self._remembered and self._idle:
            self._forget(next(iter(self._idle.values())))

    def _run_for_joined(self, run: list[_Entry], late: tuple[tuple[int, int], ...]) -> None:
        """Each member gets in full what it has not announced itself, and its id for that is forgotten."""
        group = run[0].group
        for rank in group.members:
            items = []
            for entry in run:
                if entry.arrived >> rank & 1:
                    items.append(entry.item)
                else:
                    entry.requests.pop(rank, None)
                    entry.agreed = False
                    request = next(entry.requests[other] for other in group.members if entry.arrived >> other & 1)
                    items.append(RunItem(entry.id, entry.name, request))
            self._out.append(Send((rank,), Run(group.id, tuple(items), late)))

    def _fail(self, entry: _Entry, why: str) -> None:
        announced = _ranks(entry.group, entry.arrived)
        self._out.append(Send(announced, Failed(entry.group.id, entry.name, shorten(why, WHY_LIMIT))))

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.id], entry.group.entries[entry.name]
        self._idle.pop(entry.id, None)
        entry.group.flights.pop(entry.id, None)

    def _forget_all(self, group: _Group) -> None:
        for entry in list(group.entries.values()):
            self._forget(entry)

    def _title(self, entry: _Entry) -> str:
        return title(entry.requests[_ranks(entry.group, entry.arrived)[0]])


def _exclusion(group: _Group | None, rank: int, request: Request) -> str:
    """Why this rank cannot announce anything in this group."""
    if group is None:
        return f"group {request.group} does not exist, or was removed"
    if not group.full >> rank & 1:
        return f"rank {rank} is not a member ({name_ranks(group.members)})"
    return group.over


def _late(run: list[_Entry]) -> tuple[tuple[int, int], ...]:
    """Run.late: the members that came last to what travels together, the very last first."""
    last_ns = max([entry.came[-1][1] for entry in run])
    if last_ns - min([entry.since_ns for entry in run]) < LATE_NS:
        return ()
    came: dict[int, int] = {}
    for entry in run:
        for bit, at_ns in entry.came:
            came[bit] = max(at_ns, came.get(bit, 0))
    latest = sorted(came.items(), key=lambda item: -item[1])[:MOST_LATE]
    return tuple((bit.bit_length() - 1, last_ns - at_ns) for bit, at_ns in latest)


def _missing(entry: _Entry) -> tuple[int, ...]:
    """Ranks that wait in join() count as having announced it."""
    group = entry.group
    return _ranks(group, group.full & ~(entry.arrived | group.joined))


def _ranks(group: _Group, mask: int) -> tuple[int, ...]:
    return tuple(rank for rank in group.members if mask >> rank & 1)
