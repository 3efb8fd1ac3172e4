"""The coordinator's side of joining: which ranks have joined the next round, and whether it starts, is refused or has
to wait. Without I/O. The side of the rank is comm/joining."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from ronde.net.messages import VERSION, JoinRound
from ronde.settings import describe_settings
from ronde.text import format_rank_answers, format_ranks, shorten
from ronde.types import Member, check_group_ranks

MAX_VALUE_CHARS = 400
MAX_NAMED_RANKS = 16
"""Of ranks that have not joined yet; when there are more, only their number is shown until the time is over."""


@dataclass(frozen=True, slots=True)
class JoinDecision:
    """Whether the next round starts (with `members`), is refused, or has to wait; and why, as text for the user."""

    reason: str
    members: tuple[Member, ...] | None = None
    refused: bool = False
    exited: tuple[int, ...] = ()
    """The ranks because of whose exit the round is refused."""


@dataclass(slots=True)
class PendingRound:
    """The ranks that have joined the next round."""

    size: int
    start_timeout_s: float
    joins: dict[int, JoinRound] = field(default_factory=dict)
    exit_reasons: dict[int, str] = field(default_factory=dict)
    """Ranks whose process has ended, and how; until another process of the rank connects."""
    withdrawn: dict[int, str] = field(default_factory=dict)
    """Ranks that had joined and left again before the round started."""
    duplicates: set[int] = field(default_factory=set)
    """Ranks that two living processes claim to be."""
    first_join_ns: int = 0
    may_differ: bool = False
    """Whether a rank has joined since all were compared, with something else than another one."""
    may_be_invalid: bool = False
    """Whether a rank has joined that has not been found to be like a valid one."""
    refusal: JoinDecision | None = None
    """Why the last round was refused. Ranks that join late get the same reason, until a refused one connects again."""
    refused_ranks: set[int] = field(default_factory=set)

    def join(self, rank: int, join: JoinRound, now_ns: int) -> None:
        """A rank asks to be a member. It may ask again while it waits. The late message of a process that has ended is
        ignored: connected() comes before the join of a new process."""
        if rank in self.exit_reasons:
            return
        if not self.joins:
            self.first_join_ns = now_ns
        self.withdrawn.pop(rank, None)
        # Every rank is compared with one other: with thousands of them all values are looked at only to report them.
        other = next(iter(self.joins.values()), None)
        is_alike = other is not None and _are_alike(join, other)
        self.may_differ = self.may_differ or (other is not None and not is_alike)
        self.may_be_invalid = self.may_be_invalid or not is_alike or join.member.rank != rank
        self.joins[rank] = join

    def connected(self, rank: int) -> None:
        """A process of this rank has connected, whatever became of a former one."""
        self.exit_reasons.pop(rank, None)
        self.withdrawn.pop(rank, None)
        if rank in self.refused_ranks:
            self.refusal = None
            self.refused_ranks.clear()

    def exited(self, rank: int, why: str) -> None:
        """The rank's process has ended: nobody has to wait for it, in this round or a later one."""
        self.joins.pop(rank, None)
        self.exit_reasons[rank] = why

    def withdraw(self, rank: int, why: str) -> None:
        """A rank that had joined has left: this round is refused, the next one may start."""
        if self.joins.pop(rank, None) is not None and self.joins:
            self.withdrawn[rank] = why

    @property
    def joining(self) -> tuple[int, ...]:
        return tuple(self.joins)

    def is_joining(self, rank: int) -> bool:
        return rank in self.joins

    @property
    def num_missing(self) -> int:
        return self.size - len(self.joins)

    def describe_start(self) -> str:
        """Return what follows the name of a rank that is joining."""
        missing = [rank for rank in range(self.size) if rank not in self.joins]
        return f"is in init(){f', which waits for {format_ranks(missing)}' if missing else ''}"

    def decide(self, now_ns: int, connected: Set[int], still_in_round: Set[int] = frozenset()) -> JoinDecision:
        """Decide whether the round starts, is refused or has to wait. At least one rank has joined.

        It starts when every rank has joined, has an open liveness connection (`connected`, which counts only then), and
        has left the round before: the death of a member without a connection would go unnoticed. Called after every
        event, so as long as many ranks are missing it looks at none of them.
        """
        refusal = self.refusal or self._find_refusal()
        if refusal is not None:
            return refusal
        waited_s = (now_ns - self.first_join_ns) / 1e9
        is_late = waited_s >= self.start_timeout_s
        if self.num_missing > MAX_NAMED_RANKS and not is_late:
            return JoinDecision(f"waiting for {self.num_missing} of {self.size} ranks")
        ranks = range(self.size)
        missing = [rank for rank in ranks if rank not in self.joins]
        unconnected = [rank for rank in ranks if rank not in connected]
        difference = self._find_difference()
        if difference and not missing:  # all can be told: a coordinator in rank 0 ends with the refusal
            return JoinDecision(difference, refused=True)
        if missing or still_in_round:
            waiting = f"{format_ranks(missing or still_in_round)} of {self.size}"
            busy = f" ({format_ranks(still_in_round)} still in the round before)" if still_in_round else ""
            late, hint = f"did not join within {{}} s{busy}", "give them more time with start_s (RONDE_START_S)"
        elif unconnected:
            waiting, busy = f"the connection of {format_ranks(unconnected)} of {self.size}", ""
            late, hint = "was not there within {} s", "whether the coordinator's host is overloaded"
        else:
            members = tuple(self.joins[rank].member for rank in ranks)
            return JoinDecision(f"all {self.size} ranks are here", members=members)
        if not is_late:
            return JoinDecision(f"waiting for {waiting}{busy}")
        too_late = f"{waiting} {late.format(f'{waited_s:.3g}')}; look at their output, or {hint}"
        return JoinDecision(difference or too_late, refused=True)

    def clear(self, decision: JoinDecision) -> tuple[int, ...]:
        """The decision was carried out. Returns the ranks it was about, which are no longer joining."""
        ranks = tuple(sorted(self.joins))
        if decision.refused:
            self.refusal = decision
            self.refused_ranks.update(ranks)
        self.joins.clear()
        self.withdrawn.clear()
        self.duplicates.clear()
        self.may_differ = self.may_be_invalid = False
        return ranks

    def _find_refusal(self) -> JoinDecision | None:
        """Return the refusal if the round can never start, and None if it can."""
        if self.duplicates:
            who = format_ranks(self.duplicates)
            return JoinDecision(f"two processes say that they are {who}; give each its own RONDE_RANK", refused=True)
        ended = {
            rank: f"ended before the round began ({why})"
            for rank, why in {**self.withdrawn, **self.exit_reasons}.items()
            if rank not in self.joins
        }
        if ended:
            return JoinDecision(format_rank_answers(ended, verb=" "), refused=True, exited=tuple(sorted(ended)))
        if not self.may_be_invalid:
            return None
        errors = (_find_join_error(rank, join, self.size) for rank, join in self.joins.items())
        found = next((error for error in errors if error), None)
        self.may_be_invalid = found is not None
        return JoinDecision(self._find_difference() or found, refused=True) if found else None

    def _find_difference(self) -> str:
        """Return the first thing that must be equal on all ranks and is not, with what each has; empty if all are."""
        difference = find_difference(self.joins) if self.may_differ else None
        self.may_differ = difference is not None
        return difference.describe() if difference is not None else ""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that must be equal on all ranks and is not."""

    what: str
    values: dict[int, str]
    """By rank, or by the number of the worker."""
    hint: str
    """What to do."""

    def describe(self) -> str:
        return f"ranks disagree on {self.what}: {format_rank_answers(self.values)}; {self.hint}"


def find_difference(joins: Mapping[int, JoinRound]) -> Difference | None:
    """Return the first thing that must be equal in all requests and is not; None if all are."""
    same_ronde = "install the same ronde on all hosts"
    compared = [
        Difference(
            "the version of the protocol", {rank: str(join.version) for rank, join in joins.items()}, same_ronde
        ),
        Difference("the number of ranks", {rank: str(join.size) for rank, join in joins.items()}, "check RONDE_SIZE"),
        Difference(
            "the groups to begin with",
            {rank: ", ".join(map(_format_rank_list, join.groups)) or "none" for rank, join in joins.items()},
            "check the groups given to init()",
        ),
    ]
    variables = {setting.name: setting.env for setting in describe_settings()}
    for name in dict.fromkeys(name for join in joins.values() for name in join.must_be_equal):
        values = {rank: join.must_be_equal.get(name, "nothing") or "empty" for rank, join in joins.items()}
        hint = f"give all ranks the same {variables[name]}" if name in variables else same_ronde
        compared.append(Difference(shorten(name), values, hint))
    for found in compared:
        if len(set(found.values.values())) > 1:
            shown = {rank: shorten(value, MAX_VALUE_CHARS) for rank, value in found.values.items()}
            return Difference(found.what, shown, found.hint)
    return None


def _are_alike(join: JoinRound, other: JoinRound) -> bool:
    """Return whether two ranks give the same for all that must be equal."""
    return (join.version, join.size, join.groups) == (other.version, other.size, other.groups) and (
        join.must_be_equal == other.must_be_equal
    )


def _find_join_error(rank: int, join: JoinRound, size: int) -> str:
    if join.version != VERSION:
        return (
            f"rank {rank} speaks version {join.version} of the protocol, the coordinator {VERSION}; install one ronde"
        )
    if join.size != size:
        return f"rank {rank} has a job of {join.size} ranks, the coordinator one of {size}; check RONDE_SIZE"
    if join.member.rank != rank:
        return f"the process that connected as rank {rank} says it is rank {join.member.rank}"
    errors = (find_group_error(ranks, size) for ranks in join.groups)
    return next((f"{error}; check the groups given to init()" for error in errors if error), "")


def find_group_error(ranks: tuple[int, ...], size: int) -> str:
    """Why these ranks cannot be a group of a round of this size; empty if they can."""
    try:
        checked = check_group_ranks(ranks, size)
    except ValueError as error:
        return shorten(str(error))
    return "" if checked == ranks else f"the ranks of a group must be sorted, got {_format_rank_list(ranks)}"


def _format_rank_list(ranks: tuple[int, ...]) -> str:
    return shorten(f"[{', '.join(map(str, ranks))}]")
