"""The workers of an elastic job as its coordinator knows them: who may connect, who is ready for the next round,
and who was lost and never comes back. Without I/O. PendingRound is the counterpart for a job whose ranks are fixed.

A worker is known by its number, which no other process of the job has. It becomes a member of a round, with a rank, and
may leave it to be in the next one. plan_round() of round_planning decides what
happens; this module keeps what it has to know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ronde.coordinator.joining import find_difference
from ronde.coordinator.round_planning import (
    QUIET_S,
    ElasticLimits,
    Membership,
    PlanAction,
    PlanReason,
    RoundHistory,
    RoundPlan,
    WorkerStage,
    WorkerView,
    next_change_s,
    plan_round,
)
from ronde.net.handshake import ConnectionRequest
from ronde.net.messages import (
    VERSION,
    Admission,
    AdmissionStatus,
    JoinRefused,
    JoinRound,
    LeaveReason,
    RefusalKind,
)
from ronde.observe.stacks import GONE, RUNNING
from ronde.types import Member

PLAN_INTERVAL_NS = 10**9
"""The plan is made anew so often even if nothing happens."""
MAX_TICK_NS = 2 * PLAN_INTERVAL_NS
"""The most that counts as time between two looks at the clock: in a longer time the coordinator itself was stopped, and
could not have heard anybody."""
BEGUN_TEXT = "the first round has begun without this worker"
STATE_LOST_TEXT = "all ranks that had the state of training are lost, and the job begins again"


@dataclass(slots=True)
class _Worker:
    number: int
    identity: str
    heard_ns: int
    is_ready: bool
    """Whether it has built what it trains: ConnectionRequest.ready."""
    rank: int | None = None
    """Its rank in the newest round; None for a newcomer."""
    is_member: bool = False
    """Whether it is in the newest round now."""
    is_newcomer: bool = False
    """Whether it has come to the job with the newest round, in which others had the state of training."""
    member: Member | None = None
    """Its process and addresses, from its newest JoinRound."""
    join: JoinRound | None = None
    """Its request to be in the next round."""
    joined_ns: int = 0
    is_missed: bool = False
    """Whether another member has left the round because this one did not come to an operation in time."""


class ElasticRounds:
    """tick() gives the time for all that follows. Workers that are not known, or are lost, are ignored by what happens
    to them: it is late."""

    def __init__(self, limits: ElasticLimits, process_state: Callable[[Member], str]) -> None:
        self.limits = limits
        self.members: tuple[int, ...] = ()
        """The numbers of the workers of the newest round by rank, also of those that have left it."""
        self.failure = ""
        """Why there will be no further round."""
        self._plan = RoundPlan(PlanAction.WAIT, PlanReason.TOO_FEW, num_needed=limits.start_ranks)
        self._process_state = process_state
        self._workers: dict[int, _Worker] = {}
        self._lost: dict[int, str] = {}
        """By number, the workers that never come back, and why."""
        self._preempted: tuple[int, ...] = ()
        self._unreachable: tuple[int, ...] = ()
        self._finished: tuple[int, ...] = ()
        """Workers of the newest round that have finished training."""
        self._shut_down: set[int] = set()
        """Workers that have left the newest round by shutdown(), and may call init() again."""
        self._num_rounds = 0
        self._num_resets = 0
        self._num_starting = 0
        self._is_finished = False
        self._is_first = True
        """Whether the next round is the first one, or all members have left the one before by shutdown()."""
        self._has_loss = False
        """Whether a member of the newest round was lost."""
        self._has_lost_newcomer = False
        """Whether a newcomer of the newest round was lost."""
        self._error = ""
        """The error of its script because of which a member of the newest round has failed that is no newcomer."""
        self._newcomer_error = ""
        """The same of a newcomer, which may be on a bad host. The survivors do the step again without newcomers, and
        show whether it is the step that fails. So it counts only when there are too few of them for that."""
        self._num_errors = 0
        """Rounds that were ended by such an error since training has made progress."""
        self._best_progress = -1
        """The farthest that training had come when a round was ended by such an error."""
        self._reference: JoinRound | None = None
        """The request of a member: what must be equal on all ranks."""
        self._clock_ns: int | None = None
        self._now_ns = 0
        """The time in which the coordinator was not stopped."""
        self._no_round_since_ns = 0
        self._round_over_since_ns = 0
        """Since when the newest round has lacked a member."""
        self._next_plan_ns = 0
        """On the clock of tick()."""
        self._has_changed = True

    @classmethod
    def from_round(
        cls,
        limits: ElasticLimits,
        process_state: Callable[[Member], str],
        members: tuple[Member, ...],
        lost: Mapping[int, str],
        present: Collection[int],
    ) -> ElasticRounds:
        """The same in a job that began with fixed ranks and whose first round loses its members. Ranks that are neither
        present nor lost have left by shutdown()."""
        made = cls(limits, process_state)
        made.members = tuple(member.rank for member in members)
        made._num_rounds, made._is_first, made._has_loss = 1, False, bool(lost)
        made._lost.update(lost)
        for member in members:
            if member.rank in present:
                worker = _Worker(member.rank, member.worker, 0, True, member.rank, is_member=True, member=member)
                made._workers[member.rank] = worker
        return made

    # --- what the core asks ----------------------------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        return Membership(
            self._plan,
            self.members,
            self._num_rounds,
            self._num_resets,
            self._is_finished,
            self._preempted,
            self._unreachable,
            self._finished,
        )

    @property
    def is_over(self) -> bool:
        """Whether the job is finished and no worker is about to come back to hear of it."""
        return self._is_finished and not self.must_tell_end

    @property
    def must_tell_end(self) -> bool:
        """Whether the job is finished, and a worker is about to come back to hear of it."""
        return self._is_finished and any(worker.rank is not None for worker in self._workers.values())

    @property
    def state_is_lost(self) -> bool:
        """Whether nobody has the state of training any more: the next round begins as the first one did."""
        may_have_it = any(
            each.rank is not None and (each.join is None or each.join.has_state) for each in self._workers.values()
        )
        return not (may_have_it or self._is_first or self._is_finished)

    def rank_of(self, number: int) -> int | None:
        """The rank of a worker in the newest round; None if it is not in it, or has left it for good."""
        worker = self._workers.get(number)
        return worker.rank if worker is not None else None

    def is_known(self, request: ConnectionRequest) -> bool:
        """Whether the process that connects is the one that has this number already."""
        worker = self._workers.get(request.rank)
        return worker is not None and worker.identity == request.worker

    def is_joining(self, number: int) -> bool:
        worker = self._workers.get(number)
        return worker is not None and worker.join is not None

    @property
    def joining(self) -> tuple[int, ...]:
        """The numbers of the workers that have asked to be in the next round."""
        return tuple(sorted(worker.number for worker in self._workers.values() if worker.join is not None))

    # --- what the queries ask: JoiningRanks, by the ranks of the newest round -----------------------------------------

    @property
    def size(self) -> int:
        return len(self.members) or self.limits.start_ranks

    @property
    def joins(self) -> dict[int, JoinRound]:
        numbers = self.members or range(self.size)
        workers = ((rank, self._workers.get(number)) for rank, number in enumerate(numbers))
        return {rank: worker.join for rank, worker in workers if worker is not None and worker.join is not None}

    @property
    def exit_reasons(self) -> dict[int, str]:
        numbers = self.members or range(self.size)
        return {rank: self._lost[number] for rank, number in enumerate(numbers) if number in self._lost}

    def describe_start(self) -> str:
        return f"is in init(): {self._plan.describe()}"

    # --- connections -----------------------------------------------------------------------------------------------

    def find_refusal(self, request: ConnectionRequest) -> Admission | None:
        """The reply to a worker that connects and may not be in the next round, now or ever; None if it may be."""
        number = request.rank
        if number < 0:
            return refusal(f"{number} cannot be the number of a worker; check RONDE_WORKER")
        if number in self._lost:
            return refusal(self._describe_lost(number), RefusalKind.LEFT_BEHIND)
        if self._is_finished:
            if number in self._workers and not self._workers[number].is_member:
                self.dismiss(number)  # it has heard of it now, and ends
            return refusal("the job is finished", RefusalKind.FINISHED)
        if self.failure:
            return refusal(self.failure)
        known = self._workers.get(number)
        if known is not None and known.identity != request.worker and known.rank is not None:
            return refusal(f"another process already is worker {number} of this job; give each its own RONDE_WORKER")
        if self.state_is_lost and request.ready and self.rank_of(number) is None:
            return refusal(STATE_LOST_TEXT, RefusalKind.STATE_LOST)
        if self._is_first or self.state_is_lost or request.ready or self.rank_of(number) is not None:
            return None
        if number in self._shut_down:
            return Admission(AdmissionStatus.RETRY, reason="the others have not left the round before")
        rank = max(1, sum(worker.rank is not None for worker in self._workers.values()))
        return Admission(AdmissionStatus.CANDIDATE, rank=rank, size=rank + 1)

    def admitted(self, request: ConnectionRequest) -> None:
        worker = self._workers.get(request.rank)
        if worker is None or worker.rank is None:
            worker = _Worker(request.rank, request.worker, self._now_ns, request.ready)
            self._workers[request.rank] = worker
        worker.heard_ns, worker.join = self._now_ns, None

    def join(self, number: int, join: JoinRound) -> JoinRefused | None:
        """A worker asks to be in the next round, perhaps again. Returns the refusal if it cannot be, alone."""
        join = msgspec.structs.replace(join, size=0)  # it is that of the round before for a worker that comes back
        worker = self._workers.get(number)
        refused = self._find_join_refusal(number, worker, join)
        if refused is not None or worker is None:
            self.dismiss(number)
            return refused or JoinRefused(f"worker {number} has to connect again")
        if worker.join is None:
            worker.joined_ns = self._now_ns
            self._has_changed = True
        worker.join, worker.member = join, join.member
        return None

    def _find_join_refusal(self, number: int, worker: _Worker | None, join: JoinRound) -> JoinRefused | None:
        if number in self._lost:
            return JoinRefused(self._describe_lost(number), RefusalKind.LEFT_BEHIND)
        if self._is_finished:
            return JoinRefused("the job is finished", RefusalKind.FINISHED)
        if self.failure:
            return JoinRefused(self.failure)
        if join.groups:
            return JoinRefused(
                "groups cannot be given to init() in an elastic job, whose ranks change; make them with new_group() in "
                "each round"
            )
        if join.version != VERSION:
            return JoinRefused(
                f"worker {number} speaks version {join.version} of the protocol, the coordinator {VERSION}; "
                "install one ronde"
            )
        if worker is None or worker.rank is not None or self._is_first:
            return None
        if self.state_is_lost:
            return JoinRefused(STATE_LOST_TEXT, RefusalKind.STATE_LOST) if worker.is_ready else None
        if not worker.is_ready:
            return JoinRefused(BEGUN_TEXT, RefusalKind.BEGUN)
        difference = find_difference({0: self._reference, 1: join}) if self._reference is not None else None
        if difference is not None:
            others, own = difference.values[0], difference.values[1]
            return JoinRefused(
                f"worker {number} differs from the members in {difference.what}: it has {own}, they have {others}; "
                f"{difference.hint}"
            )
        return None

    def _describe_lost(self, number: int) -> str:
        return f"worker {number} is no longer in the job ({self._lost[number]}); the others have gone on without it"

    # --- what happens to workers -----------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """The time of all that follows. Called before every event."""
        if self._clock_ns is not None:
            self._now_ns += min(max(0, now_ns - self._clock_ns), MAX_TICK_NS)
        self._clock_ns = now_ns

    def set_num_starting(self, count: int) -> None:
        """So many processes were started and have not asked to be in a round yet."""
        self._num_starting, self._has_changed = count, True

    def request_plan(self) -> None:
        """Something has happened to the connection or the process of a worker."""
        self._has_changed = True

    def heard(self, number: int) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            worker.heard_ns = self._now_ns

    def left(self, number: int, reason: LeaveReason, why: str, *, is_own_error: bool = False) -> None:
        """A worker has left the round, or does not want to be in the next one any more. `is_own_error`: because of an
        error of its script."""
        worker = self._workers.get(number)
        if worker is None:
            return
        self._has_changed = True
        if is_own_error and worker.is_member:
            self._note_error(why, [worker])
        if reason is LeaveReason.FINISHED:
            self._is_finished = True
        if reason is LeaveReason.REJOINING:
            worker.is_member, worker.join = False, None
        elif reason is LeaveReason.PREEMPTED:
            del self._workers[number]
            self._lost[number] = why
            self._preempted = (*self._preempted, number)
        elif not reason.is_orderly:
            self.exited(number, why)
        else:
            del self._workers[number]
            if worker.is_member and reason is not LeaveReason.FINISHED:
                self._shut_down.add(number)
                is_last = not any(other.rank is not None for other in self._workers.values())
                self._is_first = is_last

    def missed(self, ranks: Collection[int], why: str) -> None:
        """A member has left the round because these ranks did not come to an operation in time. Those that hang are not
        waited for as long as others. It is taken for an error of their scripts: the next round may come to the same
        point."""
        workers = [self._workers.get(self.members[rank]) for rank in ranks if 0 <= rank < len(self.members)]
        missing = [worker for worker in workers if worker is not None]
        for worker in missing:
            worker.is_missed = worker.is_member
        self._note_error(why, missing)

    def _note_error(self, why: str, workers: Sequence[_Worker]) -> None:
        if workers and all(worker.is_newcomer for worker in workers):
            self._newcomer_error = why
        else:
            self._error = why

    def training_finished(self, number: int) -> None:
        """A worker has finished training, and may do something else before it leaves the round."""
        if number not in self._finished:
            self._finished = (*self._finished, number)
            self._has_changed = True

    def exited(self, number: int, why: str) -> None:
        """The worker is lost: its process has ended, or nobody can reach it. It never comes back."""
        worker = self._workers.pop(number, None)
        if worker is not None and (worker.rank is not None or worker.join is not None):
            self._lost[number] = why
            self._has_loss = self._has_loss or worker.rank is not None
            self._has_lost_newcomer = self._has_lost_newcomer or worker.is_newcomer
            self._has_changed = True

    def cut_off(self, number: int, why: str) -> None:
        """The worker is lost because of the network, and its process may live."""
        self._unreachable = (*self._unreachable, number)
        self.exited(number, why)

    def dismiss(self, number: int) -> None:
        """Forget a worker that was refused. It may connect again, unless the job is finished."""
        worker = self._workers.pop(number, None)
        if worker is not None:
            self._has_changed = True
            if self._is_finished and worker.rank is not None:
                self.training_finished(number)

    # --- the next round --------------------------------------------------------------------------------------------

    def find_gone(self) -> list[int]:
        """The workers outside of the round that have been silent and whose process is seen not to exist. A silent one
        whose process is seen running counts as heard: it may hold the interpreter's lock for long."""
        gone = []
        for worker in self._workers.values():
            if worker.member is not None and self._now_ns - worker.heard_ns >= QUIET_S * 1e9:
                state = self._process_state(worker.member)
                if state == RUNNING:
                    worker.heard_ns = self._now_ns
                elif state == GONE and not worker.is_member:
                    gone.append(worker.number)
        return gone

    def is_plan_due(self) -> bool:
        return not self.failure and (self._has_changed or (self._clock_ns or 0) >= self._next_plan_ns)

    @property
    def next_due_ns(self) -> int:
        """When is_plan_due() is true although nothing has happened."""
        return self._next_plan_ns

    def make_plan(self, connected: Collection[int], late: Collection[int]) -> RoundPlan:
        """Decide what happens now. `connected`: the numbers of workers with an open liveness connection; `late`: the
        members, by rank, that others have waited for."""
        self._has_changed = False
        num_members = sum(worker.is_member for worker in self._workers.values())
        if num_members:
            self._no_round_since_ns = self._now_ns
        if num_members == len(self.members):
            self._round_over_since_ns = self._now_ns
        waited_s = (self._now_ns - self._no_round_since_ns) / 1e9
        views = [view for worker in self._workers.values() if (view := self._view(worker, connected, late)) is not None]
        num_errors, _ = self._count_errors()
        history = RoundHistory(
            is_first=self._is_first,
            num_members=len(self.members),
            has_loss=self._has_loss,
            num_resets=self._num_resets,
            is_finished=self._is_finished,
            state_is_lost=self.state_is_lost,
            num_errors=num_errors,
            last_error=self._error or self._newcomer_error,
            has_lost_newcomer=self._has_lost_newcomer,
        )
        plan = plan_round(views, self.limits, history, num_starting=self._num_starting, waited_s=waited_s)
        if plan.action is PlanAction.START and self._is_first:
            difference = find_difference({number: self._join_of(number) for number in plan.members})
            if difference is not None:
                plan = RoundPlan(PlanAction.FAIL, PlanReason.DISAGREEMENT, detail=difference.describe())
        if plan.action is PlanAction.FAIL:
            self.failure = plan.describe()
        next_s = next_change_s(views, self.limits, waited_s=waited_s)
        self._next_plan_ns = (self._clock_ns or 0) + int(min(PLAN_INTERVAL_NS, next_s * 1e9 + 1))
        self._plan = plan
        return plan

    def start_round(self, plan: RoundPlan) -> tuple[Member, ...]:
        """The round of the plan starts. Returns its members."""
        self._reference = self._join_of(plan.members[0])
        self._num_errors, self._best_progress = self._count_errors()
        self._error = self._newcomer_error = ""
        begins = all(self._workers[number].rank is None for number in plan.members)
        members = []
        for rank, number in enumerate(plan.members):
            worker = self._workers[number]
            member = dataclasses.replace(self._join_of(number).member, rank=rank)
            worker.is_newcomer = worker.rank is None and not begins
            worker.rank, worker.is_member, worker.member, worker.join = rank, True, member, None
            worker.is_ready, worker.is_missed = True, False
            members.append(member)
        self.members = plan.members
        self._num_rounds += 1
        self._num_resets += self._has_loss
        self._has_loss = self._has_lost_newcomer = self._is_first = False
        self._shut_down.clear()
        self._finished = ()
        self._has_changed = True
        return tuple(members)

    def _count_errors(self) -> tuple[int, int]:
        """Return how many rounds were ended by an error of the script, the newest one included, since training has made
        progress, and how far it has come. Both stay as they are while the survivors do not say how far they are."""
        survivors = [worker for worker in self._workers.values() if worker.rank is not None]
        progress = max((worker.join.progress for worker in survivors if worker.join is not None), default=-1)
        error = self._error or (self._newcomer_error if len(survivors) < self.limits.min_ranks else "")
        if not error or progress < 0:
            return self._num_errors, self._best_progress
        if progress > self._best_progress:
            return 1, progress
        return self._num_errors + 1, self._best_progress

    @property
    def unready(self) -> tuple[int, ...]:
        """The workers that were in init() when the first round began without them."""
        return tuple(sorted(each.number for each in self._workers.values() if each.join and not each.is_ready))

    @property
    def outdated(self) -> tuple[int, ...]:
        """The workers that would have got their state from others that are lost now. They have loaded no checkpoint, so
        they cannot begin again."""
        if not self.state_is_lost:
            return ()
        return tuple(sorted(each.number for each in self._workers.values() if each.join and each.is_ready))

    def _view(self, worker: _Worker, connected: Collection[int], late: Collection[int]) -> WorkerView | None:
        """Return None for a newcomer that has not asked to be in the next round yet."""
        ready_s = 0.0
        if worker.is_member:
            stage = WorkerStage.MEMBER
        elif worker.join is not None and worker.number in connected:
            stage = WorkerStage.READY
            ready_s = (self._now_ns - worker.joined_ns) / 1e9
        elif worker.rank is not None:
            stage = WorkerStage.REJOINING
        else:
            return None
        return WorkerView(
            worker.number,
            stage,
            worker.rank,
            silent_s=(self._now_ns - worker.heard_ns) / 1e9,
            is_awaited=worker.is_member and worker.rank in late,
            ready_s=ready_s,
            away_s=0.0 if stage is WorkerStage.READY else (self._now_ns - self._round_over_since_ns) / 1e9,
            is_missed=worker.is_missed,
        )

    def _join_of(self, number: int) -> JoinRound:
        join = self._workers[number].join
        assert join is not None, "a round starts only with workers that have asked for it"
        return join


def refusal(reason: str, kind: RefusalKind = RefusalKind.FAILED) -> Admission:
    return Admission(AdmissionStatus.REFUSED, reason=reason, refusal_kind=kind)
