"""Which ranks have joined the next round, and the decision whether it starts, is refused or waits. Without I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from ronde.coordinator.membership import find_group_error, format_rank_list
from ronde.net.messages import VERSION, JoinRound
from ronde.text import format_rank_answers, format_ranks, shorten
from ronde.types import Member

MAX_GROUPS_CHARS = 400


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

    def decide(
        self, now_ns: int, connected: frozenset[int], still_in_round: frozenset[int] = frozenset()
    ) -> JoinDecision | None:
        """Decide whether the round starts, is refused or has to wait; None if nobody has joined.

        It starts when every rank has joined, has an open liveness connection (`connected`), and has left the round
        before: the death of a member without a connection would go unnoticed.
        """
        if not self.joins:
            return None
        refusal = self.refusal or self._find_refusal()
        if refusal is not None:
            return refusal
        ranks = range(self.size)
        missing = [rank for rank in ranks if rank not in self.joins]
        unconnected = [rank for rank in ranks if rank not in connected]
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
        waited_s = (now_ns - self.first_join_ns) / 1e9
        if waited_s < self.start_timeout_s:
            return JoinDecision(f"waiting for {waiting}{busy}")
        return JoinDecision(
            f"{waiting} {late.format(f'{waited_s:.3g}')}; look at their output, or {hint}", refused=True
        )

    def clear(self, decision: JoinDecision) -> tuple[int, ...]:
        """The decision was carried out. Returns the ranks it was about, which are no longer joining."""
        ranks = tuple(sorted(self.joins))
        if decision.refused:
            self.refusal = decision
            self.refused_ranks.update(ranks)
        self.joins.clear()
        self.withdrawn.clear()
        self.duplicates.clear()
        return ranks

    def _find_refusal(self) -> JoinDecision | None:
        """Return the refusal if the round can never start, and None if it can."""
        if self.duplicates:
            return JoinDecision(
                f"two processes say that they are {format_ranks(self.duplicates)}; give each its own RONDE_RANK",
                refused=True,
            )
        ended = {
            rank: f"ended before the round began ({why})"
            for rank, why in {**self.withdrawn, **self.exit_reasons}.items()
            if rank not in self.joins
        }
        if ended:
            return JoinDecision(format_rank_answers(ended, verb=" "), refused=True, exited=tuple(sorted(ended)))
        error = self._find_disagreement()
        return JoinDecision(error, refused=True) if error else None

    def _find_disagreement(self) -> str:
        answers = {
            "the version of the protocol": {rank: str(join.version) for rank, join in self.joins.items()},
            "the number of ranks": {rank: str(join.size) for rank, join in self.joins.items()},
            "the groups to begin with": {rank: _format_groups(join) for rank, join in self.joins.items()},
        }
        for what, answer in answers.items():
            if len(set(answer.values())) > 1:
                return f"ranks disagree on {what}: {format_rank_answers(answer)}"
        errors = (_find_join_error(rank, join, self.size) for rank, join in self.joins.items())
        return next(filter(None, errors), "")


def _find_join_error(rank: int, join: JoinRound, size: int) -> str:
    if join.version != VERSION:
        return (
            f"rank {rank} speaks version {join.version} of the protocol, the coordinator {VERSION}; install one ronde"
        )
    if join.size != size:
        return f"rank {rank} has a job of {join.size} ranks, the coordinator one of {size}; check RONDE_SIZE"
    if join.member.rank != rank:
        return f"the process that connected as rank {rank} says it is rank {join.member.rank}"
    for ranks in join.groups:
        error = find_group_error(ranks, size)
        if error:
            return f"{error}; check the groups given to init()"
    return ""


def _format_groups(join: JoinRound) -> str:
    return shorten(", ".join(format_rank_list(ranks) for ranks in join.groups) or "none", MAX_GROUPS_CHARS)
