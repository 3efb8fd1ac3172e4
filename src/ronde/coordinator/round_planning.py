"""Who is in the next round of an elastic job: a pure function of what is known about its workers.

A worker is a process of the job. It has a number, which no other process of the job ever has, and a rank in each round
in which it takes part. Survivors, the workers that were in the round before, keep their order and so the low ranks:
rank 0 always holds the state of training. Newcomers come behind them. When all that held the state are lost, the job
begins again, as in its first round.

The coordinator's core calls plan_round() when something has happened or its time has come (next_change_s), and carries
the plan out; the launcher, `ronde top` and the report of a job show the reason. docs/internals/elastic.md describes the
protocol, and elastic_rounds keeps what is known about the workers.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ronde.text import format_count

JOIN_SETTLE_S = 2.0
"""A change of the round waits so long for further newcomers that are being started, so that a host with several slots
changes the round once."""
MAX_ERRORS = 3
"""An error of the script that ends so many rounds, without progress of training between them, would end the next ones,
too, as that of a sample that cannot be read: a step that is done again has the same samples."""
QUIET_S = 3.0
"""A worker that waits for the next round sends something twice a second. One that has been silent for so long may be
stopped: no round starts with it until it is heard again, or has been silent for suspend_s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticLimits:
    """What the user of an elastic job has decided about its size. ValueError if it cannot be."""

    start_ranks: int
    """The first round has at least so many (`-np`)."""
    min_ranks: int = 1
    """No round has fewer."""
    max_ranks: int | None = None
    """No round has more."""
    reset_limit: int | None = None
    """How many rounds may start because ranks were lost; None for any number."""
    timeout_s: float = 600.0
    """How long a round may wait for enough ranks, and for those that were in the one before."""
    suspend_s: float = 30.0
    """A rank that others wait for and that has been silent for so long is left behind. So is one that did not come to
    an operation in time, and is not back so long after the round has ended because of that."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_ranks <= self.start_ranks:
            raise ValueError(f"min_np must be from 1 to np, which is {self.start_ranks}; got {self.min_ranks}")
        if self.max_ranks is not None and self.max_ranks < self.start_ranks:
            raise ValueError(f"max_np must be at least np, which is {self.start_ranks}; got {self.max_ranks}")
        if self.reset_limit is not None and self.reset_limit < 0:
            raise ValueError(f"reset_limit must be 0 or more, got {self.reset_limit}")


class WorkerStage(enum.Enum):
    MEMBER = enum.auto()
    """It is in the round under way."""
    REJOINING = enum.auto()
    """It has left the round to be in the next one, and has not asked for that yet."""
    READY = enum.auto()
    """It has asked to be in the next round, and is watched."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What is known about a worker that is connected, or has promised to come back."""

    number: int
    stage: WorkerStage
    rank: int | None = None
    """Its rank in the newest round; None for a newcomer."""
    silent_s: float = 0.0
    """How long nothing was heard from it, and its process was not seen running."""
    is_awaited: bool = False
    """Whether members have waited for it in an operation for long."""
    ready_s: float = 0.0
    """How long it has been READY."""
    away_s: float = 0.0
    """If it was in a round that is over, and is not READY for the next one: how long that round has been over."""
    is_missed: bool = False
    """Whether another member has left the round because this one did not come to an operation in time."""


class PlanAction(enum.Enum):
    CONTINUE = enum.auto()
    """The round under way goes on."""
    CHANGE = enum.auto()
    """The members are to leave the round after the step under way, and to join the next one."""
    WAIT = enum.auto()
    """There is no round, and the next one cannot start yet."""
    START = enum.auto()
    FAIL = enum.auto()
    """There will be no further round; the job is over."""


class PlanReason(enum.Enum):
    """Why. RoundPlan.describe() makes words of it."""

    COMPLETE = enum.auto()
    """Nobody wants a change."""
    NEWCOMERS = enum.auto()
    """Newcomers are ready."""
    SETTLING = enum.auto()
    """Newcomers are ready, and further ones are being started."""
    SURVIVORS = enum.auto()
    """Survivors have not come back yet."""
    TOO_FEW = enum.auto()
    """Fewer ranks than needed are ready."""
    ENOUGH = enum.auto()
    """Survivors and newcomers are ready."""
    STATE_LOST = enum.auto()
    """All that had the state of training are lost, so that newcomers begin again."""
    RESET_LIMIT = enum.auto()
    """Ranks were lost more often than the user allows."""
    SAME_ERROR = enum.auto()
    """An error of the script comes again and again, without progress of training."""
    DISAGREEMENT = enum.auto()
    """The workers of the first round differ in what must be equal on all ranks."""
    FINISHED = enum.auto()
    """A member has finished the job."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    action: PlanAction
    reason: PlanReason
    members: tuple[int, ...] = ()
    """START: the numbers of the members, by their new ranks."""
    workers: tuple[int, ...] = ()
    """The numbers that the reason is about: those that are waited for, have come, or are ready in vain."""
    num_ready: int = 0
    num_needed: int = 0
    left_behind: tuple[int, ...] = ()
    """The numbers of workers that are suspended or absent: they are lost from now on, and never come back."""
    absent: tuple[int, ...] = ()
    """Of these, the ones that were heard, and did not come back from the round before in time."""
    detail: str = ""
    """DISAGREEMENT: who differs in what, SAME_ERROR: the last error, as text for the user."""

    def describe(self) -> str:
        """The plan as text for the user, without a subject: `waiting for 2 more ranks`."""
        workers = ", ".join(f"worker {number}" for number in self.workers)
        match self.reason:
            case PlanReason.COMPLETE:
                return "no change"
            case PlanReason.NEWCOMERS:
                return f"{workers} will join after the step under way"
            case PlanReason.SETTLING:
                return f"{workers} {'is' if len(self.workers) == 1 else 'are'} ready; others are being started"
            case PlanReason.SURVIVORS:
                return f"waiting for {workers} to come back from the round before"
            case PlanReason.TOO_FEW if self.action is PlanAction.FAIL:
                return f"only {self.num_ready} of the {self.num_needed} ranks that are needed came in time"
            case PlanReason.TOO_FEW:
                return f"{self.num_ready} of the {self.num_needed} ranks that are needed are ready"
            case PlanReason.STATE_LOST if self.action is PlanAction.START:
                return f"{format_count(len(self.members), 'rank')}, which begin again from the checkpoint of the script"
            case PlanReason.STATE_LOST:
                return (
                    "all ranks that had the state of training are lost, so the job begins again from the checkpoint of "
                    f"the script; {self.num_ready} of the {self.num_needed} ranks that are needed are ready"
                )
            case PlanReason.RESET_LIMIT:
                return f"ranks were lost more than {self.num_needed} times (the reset limit)"
            case PlanReason.SAME_ERROR:
                return (
                    f"the script has failed in {self.num_needed} rounds, and training has made no progress between "
                    f"them; the last error: {self.detail}"
                )
            case PlanReason.ENOUGH:
                return format_count(len(self.members), "rank") + (
                    f", {workers} among them for the first time" if workers else ""
                )
            case PlanReason.DISAGREEMENT:
                return self.detail
            case PlanReason.FINISHED:
                return "the job is finished"


@dataclass(frozen=True, slots=True)
class Membership:
    """The rounds of an elastic job so far, for its launcher."""

    plan: RoundPlan
    """The newest one."""
    members: tuple[int, ...] = ()
    """The workers of the newest round by rank, also of those that have left it; empty before the first."""
    num_rounds: int = 0
    """Rounds that have started."""
    num_resets: int = 0
    """Of these, the ones that started because ranks were lost."""
    is_finished: bool = False
    """Whether a member has finished the job: no worker is needed any more."""
    preempted: tuple[int, ...] = ()
    """Workers that have left a round because they were told to end (LeaveReason.PREEMPTED)."""
    unreachable: tuple[int, ...] = ()
    """Workers that were lost because of the network. Their processes may live, and are of no use any more."""
    finished: tuple[int, ...] = ()
    """Workers of the newest round that have finished training. What their scripts do behind it, such as saving the
    model, no other worker makes up for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundHistory:
    """What plan_round() has to know about earlier rounds."""

    is_first: bool
    """Whether the next round is the first one."""
    num_members: int = 0
    """How many ranks the newest round began with."""
    has_loss: bool = False
    """Whether one of them was lost: the next round will be a reset."""
    num_resets: int = 0
    is_finished: bool = False
    """Whether one of them has finished the job."""
    state_is_lost: bool = False
    """Whether nobody has the state of training any more."""
    num_errors: int = 0
    """How many rounds in a row were ended by an error of the script, without progress of training between them."""
    last_error: str = ""
    """The last of these errors, as text for the user."""
    has_lost_newcomer: bool = False
    """Whether a member was lost in the round in which it had come to the job."""


def plan_round(
    workers: Sequence[WorkerView],
    limits: ElasticLimits,
    history: RoundHistory,
    *,
    num_starting: int = 0,
    waited_s: float = 0.0,
) -> RoundPlan:
    """Decide what happens next. `num_starting` processes are being started; `waited_s`: how long there has been no
    round."""
    suspended = _find_suspended(workers, limits, history)
    absent = _find_absent([each for each in workers if each.number not in suspended], limits, history)
    left_behind = tuple(sorted((*suspended, *absent)))
    present = [each for each in workers if each.number not in left_behind]
    if any(each.rank is not None for each in workers if each.number in left_behind):
        history = dataclasses.replace(history, has_loss=True)
    plan = _plan_without_absent(present, limits, history, num_starting, waited_s)
    return dataclasses.replace(plan, left_behind=left_behind, absent=absent)


def _plan_without_absent(
    workers: Sequence[WorkerView], limits: ElasticLimits, history: RoundHistory, num_starting: int, waited_s: float
) -> RoundPlan:
    """As plan_round(), when it is known who is left behind."""
    survivors = sorted((each for each in workers if each.rank is not None), key=lambda each: each.rank or 0)
    newcomers = [each for each in workers if each.rank is None and _can_start(each)]
    newcomers.sort(key=lambda each: each.number)
    if history.is_finished:
        return RoundPlan(PlanAction.CONTINUE, PlanReason.FINISHED)
    num_members = sum(each.stage is WorkerStage.MEMBER for each in survivors)
    if num_members and num_members == history.num_members:
        return _plan_change(num_members, newcomers, limits, num_starting)
    awaited = tuple(sorted(each.number for each in survivors if not _can_start(each)))
    if awaited:
        return RoundPlan(PlanAction.WAIT, PlanReason.SURVIVORS, workers=awaited)
    if limits.reset_limit is not None and history.num_resets + history.has_loss > limits.reset_limit:
        limit, ready = limits.reset_limit, tuple(each.number for each in (*survivors, *newcomers))
        return RoundPlan(PlanAction.FAIL, PlanReason.RESET_LIMIT, workers=ready, num_needed=limit)
    if history.num_errors >= MAX_ERRORS:
        return RoundPlan(
            PlanAction.FAIL,
            PlanReason.SAME_ERROR,
            workers=tuple(each.number for each in (*survivors, *newcomers)),
            num_needed=history.num_errors,
            detail=history.last_error,
        )
    needed = limits.start_ranks if history.is_first else limits.min_ranks
    if history.has_lost_newcomer and len(survivors) >= needed:
        newcomers = []  # the next one may fail, too: the survivors make a step first, or it is they who fail
    chosen = tuple([each.number for each in (*survivors, *newcomers)][: limits.max_ranks])
    if len(chosen) < needed:
        is_late = waited_s >= limits.timeout_s
        return RoundPlan(
            PlanAction.FAIL if is_late else PlanAction.WAIT,
            PlanReason.STATE_LOST if history.state_is_lost and not is_late else PlanReason.TOO_FEW,
            workers=chosen,
            num_ready=len(chosen),
            num_needed=needed,
        )
    new = () if history.is_first else chosen[len(survivors) :]
    reason = PlanReason.STATE_LOST if history.state_is_lost else PlanReason.ENOUGH
    return RoundPlan(PlanAction.START, reason, members=chosen, workers=new)


def next_change_s(workers: Sequence[WorkerView], limits: ElasticLimits, *, waited_s: float = 0.0) -> float:
    """Return after which time plan_round() may decide otherwise although nothing has happened; infinity for never."""
    limits_s = [
        *((each.silent_s, limit_s) for each in workers for limit_s in (QUIET_S, limits.suspend_s)),
        *((each.ready_s, JOIN_SETTLE_S) for each in workers if each.stage is WorkerStage.READY),
        *((each.away_s, limit_s) for each in workers for limit_s in (limits.suspend_s, limits.timeout_s)),
        (waited_s, limits.timeout_s),
    ]
    return min((limit_s - now_s for now_s, limit_s in limits_s if now_s < limit_s), default=math.inf)


def _can_start(worker: WorkerView) -> bool:
    return worker.stage is WorkerStage.READY and worker.silent_s < QUIET_S


def _find_suspended(workers: Sequence[WorkerView], limits: ElasticLimits, history: RoundHistory) -> tuple[int, ...]:
    """The numbers of the silent workers that somebody waits for. Those that are not in the round are always waited for,
    and so are all its members when one has left it, was lost or is left behind: it cannot go on."""
    silent = [each for each in workers if each.silent_s >= limits.suspend_s]
    members = [each for each in workers if each.stage is WorkerStage.MEMBER]
    is_over = (
        history.is_finished
        or len(members) < history.num_members
        or any(each.is_awaited for each in silent if each.stage is WorkerStage.MEMBER)
    )
    return tuple(sorted(each.number for each in silent if each.stage is not WorkerStage.MEMBER or is_over))


def _find_absent(workers: Sequence[WorkerView], limits: ElasticLimits, history: RoundHistory) -> tuple[int, ...]:
    """The numbers of the workers that are heard, and have not come back in time from a round that is over: they hang,
    or are busy with something else. When nobody is ready, nobody waits for them. A job that is finished has no further
    round, and waits for what its workers do behind training."""
    if history.is_finished or not any(_can_start(each) for each in workers):
        return ()
    return tuple(
        sorted(
            each.number
            for each in workers
            if each.away_s >= limits.timeout_s
            or (each.is_missed and each.stage is WorkerStage.MEMBER and each.away_s >= limits.suspend_s)
        )
    )


def _plan_change(
    num_members: int, newcomers: Sequence[WorkerView], limits: ElasticLimits, num_starting: int
) -> RoundPlan:
    """Decide whether the round under way, which nobody has left, is to end for newcomers."""
    num_free = max(0, limits.max_ranks - num_members) if limits.max_ranks is not None else None
    invited = newcomers[:num_free]
    numbers = tuple(each.number for each in invited)
    if not invited:
        return RoundPlan(PlanAction.CONTINUE, PlanReason.COMPLETE)
    has_room = num_free is None or len(invited) < num_free
    if num_starting and has_room and max(each.ready_s for each in invited) < JOIN_SETTLE_S:
        return RoundPlan(PlanAction.CONTINUE, PlanReason.SETTLING, workers=numbers)
    return RoundPlan(PlanAction.CHANGE, PlanReason.NEWCOMERS, workers=numbers)
