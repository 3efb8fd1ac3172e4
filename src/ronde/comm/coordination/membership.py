"""Who is in the next round, or why it cannot begin yet. Decisions only; carried out by the coordinator."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ronde.comm.wording import answers
from ronde.net.messages import VERSION, Failure, Join, Leave
from ronde.observe.events import name_ranks, shorten
from ronde.types import Member

__all__ = ["Decision", "Departure", "Gathering", "How", "decide_round", "find_group_fault"]


class How(enum.Enum):
    """How a rank has gone."""

    SHUTDOWN = enum.auto()
    """It has left by shutdown()."""
    SCRIPT_ENDED = enum.auto()
    """Its script came to its end without shutdown(). Most scripts do."""
    FAILED = enum.auto()
    """It said itself what ended it: an exception, a start that failed."""
    TIMED_OUT = enum.auto()
    """It said that an operation ran out of time."""
    MISMATCHED = enum.auto()
    """It said that the members of an operation asked for different things."""
    PROCESS_ENDED = enum.auto()
    """Whoever started its process says how that ended."""
    PROCESS_GONE = enum.auto()
    """Its process is no more, and nobody said why."""
    UNREACHABLE = enum.auto()
    """The network to its host is cut."""


@dataclass(frozen=True, slots=True)
class Departure:
    """That a rank has gone, and how; `detail` is for people."""

    how: How
    detail: str = ""
    missing: tuple[int, ...] = ()
    """If it timed out: the ranks that it waited for."""
    line: str = ""
    """If it failed: the line of its program."""

    @classmethod
    def of_leave(cls, leave: Leave) -> Departure:
        """What the rank says itself."""
        detail = shorten(leave.why, 1000)
        if leave.orderly:
            return cls(How.SCRIPT_ENDED if detail else How.SHUTDOWN, detail)
        return cls(_FAILURES[leave.failure], detail, leave.missing, shorten(leave.line, 400))

    @property
    def is_loss(self) -> bool:
        """Whether it went before it had come to its end."""
        return self.how not in (How.SHUTDOWN, How.SCRIPT_ENDED)

    @property
    def words(self) -> str:
        """For errors and reports; the rank is their subject."""
        return self.detail or _WORDS[self.how]


_FAILURES = {Failure.OTHER: How.FAILED, Failure.TIMEOUT: How.TIMED_OUT, Failure.MISMATCH: How.MISMATCHED}
_WORDS = {
    How.SHUTDOWN: "it has left the round by shutdown()",
    How.SCRIPT_ENDED: "exited without shutdown",
    How.FAILED: "it gave up",
    How.TIMED_OUT: "an operation ran out of time",
    How.MISMATCHED: "ranks disagreed on an operation",
    How.PROCESS_ENDED: "its process has ended",
    How.PROCESS_GONE: "its process is gone",
    How.UNREACHABLE: "its host cannot be reached",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of those who have joined so far: a round, a refusal, or more waiting; and why."""

    reason: str
    members: tuple[Member, ...] | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """All that the decision depends on."""

    size: int
    joins: Mapping[int, Join]
    gone: Mapping[int, str]
    """Ranks that will not come, and why."""
    doubled: frozenset[int]
    """Ranks that two living processes claim to be."""
    watched: frozenset[int]
    """Ranks with an open connection to the coordinator, whose death would be noticed."""
    busy: frozenset[int]
    """Ranks that are still in the round before."""
    waited_s: float
    """Since the first joined."""


def decide_round(view: View, limit_s: float) -> Decision:
    """Whether the round begins, is refused to all, or has to wait. It begins when every rank has joined, is watched,
    and has left the round before: a member that nobody watches could die without the others hearing of it."""
    fault = _find_fault(view)
    if fault:
        return Decision(fault, refused=True)
    missing = [rank for rank in range(view.size) if rank not in view.joins]
    unwatched = [rank for rank in range(view.size) if rank in view.joins and rank not in view.watched]
    if not missing and not unwatched and not view.busy:
        members = tuple(view.joins[rank].member for rank in range(view.size))
        return Decision(f"all {view.size} ranks are here", members=members)
    if not missing and not view.busy:
        waiting = f"the connection of {name_ranks(unwatched)} of {view.size}"
        if view.waited_s < limit_s:
            return Decision(f"waiting for {waiting}")
        return Decision(
            f"{waiting} was not there within {view.waited_s:.3g} s; look at their output, or whether the coordinator's "
            "host is overloaded",
            refused=True,
        )
    waiting = f"{name_ranks(missing or view.busy)} of {view.size}"
    busy = f" ({name_ranks(view.busy)} still in the round before)" if view.busy else ""
    if view.waited_s < limit_s:
        return Decision(f"waiting for {waiting}{busy}")
    return Decision(
        f"{waiting} did not join within {view.waited_s:.3g} s{busy}; "
        "look at their output, or give them more time with start_s (RONDE_START_S)",
        refused=True,
    )


def find_group_fault(ranks: tuple[int, ...], size: int) -> str:
    """What is wrong with a group of these ranks, or nothing."""
    if not ranks:
        return "a group needs at least one rank"
    if list(ranks) != sorted(set(ranks)):
        return f"the ranks of a group must be sorted and different, got {_shown(ranks)}"
    if ranks[0] < 0 or ranks[-1] >= size:
        return f"the ranks of a group must be from 0 to {size - 1}, got {_shown(ranks)}"
    return ""


def _find_fault(view: View) -> str:
    """Why no round can come of this, however long one waits."""
    if view.doubled:
        return f"two processes say that they are {name_ranks(view.doubled)}; give each its own RONDE_RANK"
    ended = {rank: f"ended before the round began ({why})" for rank, why in view.gone.items() if rank not in view.joins}
    if ended:
        return answers(ended, verb=" ")
    said = {
        "the version of the protocol": {rank: str(join.version) for rank, join in view.joins.items()},
        "the number of ranks": {rank: str(join.size) for rank, join in view.joins.items()},
        "the groups to begin with": {rank: _groups_text(join) for rank, join in view.joins.items()},
    }
    for what, answer in said.items():
        if len(set(answer.values())) > 1:
            return f"ranks disagree on {what}: {answers(answer)}"
    for rank, join in view.joins.items():
        fault = _join_fault(rank, join, view.size)
        if fault:
            return fault
    return ""


def _join_fault(rank: int, join: Join, size: int) -> str:
    if join.version != VERSION:
        return (
            f"rank {rank} speaks version {join.version} of the protocol, the coordinator {VERSION}; install one ronde"
        )
    if join.size != size:
        return f"rank {rank} was told of {join.size} ranks, the coordinator of {size}; check RONDE_SIZE"
    if join.member.rank != rank:
        return f"the process that connected as rank {rank} says it is rank {join.member.rank}"
    for ranks in join.groups:
        fault = find_group_fault(ranks, size)
        if fault:
            return f"{fault}; check the groups given to init()"
    return ""


def _groups_text(join: Join) -> str:
    return shorten(", ".join(_shown(ranks) for ranks in join.groups) or "none", 400)


def _shown(ranks: tuple[int, ...]) -> str:
    return shorten(f"[{', '.join(map(str, ranks))}]")


@dataclass(slots=True)
class Gathering:
    """Who has come for the next round. What happens goes in; `decide` says what to do about it."""

    size: int
    limit_s: float
    joins: dict[int, Join] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    """Ranks whose process has ended, and how; until another one comes."""
    withdrawn: dict[int, str] = field(default_factory=dict)
    """Ranks that had joined and, still alive, went away again."""
    doubled: set[int] = field(default_factory=set)
    since_ns: int = 0
    refusal: str = ""
    """Why the last round was refused; told to those who come late to it, until one of the refused tries anew."""
    refused: set[int] = field(default_factory=set)

    def join(self, rank: int, join: Join, now_ns: int) -> None:
        """A rank wants to be in. It may say so again while it waits. Nothing is made of it when the rank's process has
        ended since: come() stands before the join of a new one."""
        if rank in self.gone:
            return
        if not self.joins:
            self.since_ns = now_ns
        self.withdrawn.pop(rank, None)
        self.joins[rank] = join

    def come(self, rank: int) -> None:
        """A process of this rank has connected: whatever was before, it is here; one that was refused tries anew."""
        self.gone.pop(rank, None)
        self.withdrawn.pop(rank, None)
        if rank in self.refused:
            self.refusal = ""
            self.refused.clear()

    def end(self, rank: int, why: str) -> None:
        """The rank's process has ended: nobody needs to wait for it, in this gathering or a later one."""
        self.joins.pop(rank, None)
        self.gone[rank] = why

    def withdraw(self, rank: int, why: str) -> None:
        """A rank that had joined does not want to any more: this gathering fails, the next may go well."""
        if self.joins.pop(rank, None) is not None and self.joins:
            self.withdrawn[rank] = why

    def double(self, rank: int) -> None:
        """A second living process says it is this rank."""
        self.doubled.add(rank)

    def decide(self, now_ns: int, watched: frozenset[int], busy: frozenset[int] = frozenset()) -> Decision | None:
        """What becomes of those who have joined; None when nobody has."""
        if not self.joins:
            return None
        if self.refusal:
            return Decision(self.refusal, refused=True)
        waited_s = (now_ns - self.since_ns) / 1e9
        gone = {**self.withdrawn, **self.gone}
        view = View(self.size, self.joins, gone, frozenset(self.doubled), watched, busy, waited_s)
        return decide_round(view, self.limit_s)

    def settle(self, decision: Decision) -> tuple[int, ...]:
        """The decision was carried out: nobody waits any more. Returns those whom it concerned."""
        concerned = tuple(sorted(self.joins))
        if decision.refused:
            self.refusal = decision.reason
            self.refused.update(concerned)
        self.joins.clear()
        self.withdrawn.clear()
        self.doubled.clear()
        return concerned
