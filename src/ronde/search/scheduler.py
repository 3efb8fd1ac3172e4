"""Which trial runs on which group of workers, and what becomes of it. No I/O and no clock: events in, actions out. Used
by the search driver.

    STARTING ──ready──► IDLE ──start──► BUSY ──every rank has ended──► IDLE
       ▲                                 │
       └── lost, out of time, worn out ──┘          three starts without a trial: CLOSED

A trial that loses a rank is run again with the same parameters, before any new one, until it has had all its attempts.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ronde.search.protocol import (
    AbandonTrial,
    DriverToWorker,
    Outcome,
    PruneDecision,
    ReportedValue,
    StartTrial,
    TrialEnded,
)
from ronde.search.results import RunningTrial, TrialResult
from ronde.search.study import PlannedTrial
from ronde.text import format_count, format_ranks

END_GRACE_S = 30.0
"""When a rank has failed or pruned a trial, the others get so long to end it, too."""
LAST_RANKS_S = 120.0
"""When rank 0 has returned, the others get so long."""
MAX_STARTS = 3
"""A group that is lost so often without having run a trial is given up."""
MAX_FIRST_FAILURES = 5
"""When so many trials have failed by themselves and none has succeeded, the search ends: the objective is wrong."""


@dataclass(frozen=True, slots=True)
class SendToGroup:
    """Send a message to all ranks of a group."""

    group: int
    message: DriverToWorker


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Start the workers of a group; what is left of the former ones is killed."""

    group: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ShowMessage:
    """Show a line to the user."""

    text: str


Action: TypeAlias = SendToGroup | StartGroup | ShowMessage


class GroupState(enum.Enum):
    STARTING = enum.auto()
    IDLE = enum.auto()
    BUSY = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True)
class _Attempt:
    """A trial on a group."""

    planned: PlannedTrial
    number_of: int
    """This is the trial's attempt of this number, from 1."""
    began_s: float
    values: dict[int, float] = field(default_factory=dict)
    ended: dict[int, TrialEnded] = field(default_factory=dict)
    """By rank, in the order in which they came."""
    is_pruned: bool = False
    deadline_s: float = math.inf
    deadline_reason: str = ""


@dataclass(slots=True)
class _GroupSlot:
    state: GroupState = GroupState.STARTING
    incarnation: int = 1
    ready_ranks: set[int] = field(default_factory=set)
    num_bad_starts: int = 0
    num_trials: int = 0
    """That these workers have run to the end."""
    attempt: _Attempt | None = None


class TrialScheduler:
    """The trials and groups of a search. Every method returns what is to be done."""

    def __init__(
        self,
        *,
        num_groups: int,
        ranks_per_group: int,
        num_trials: int,
        num_ended: int,
        interrupted: Sequence[PlannedTrial],
        ask: Callable[[], PlannedTrial | None],
        tell: Callable[[TrialResult], None],
        should_prune: Callable[[int, Mapping[int, float]], bool],
        make_start: Callable[[PlannedTrial, int], StartTrial],
        has_pruner: bool,
        retries: int,
        trials_per_worker: int = 0,
        trial_s: float = 0.0,
        has_success: bool = False,
    ) -> None:
        """`interrupted` are run first. `ask` returns a new trial; `tell` records how one has ended, before the next is
        asked for; `should_prune` returns whether one is to be pruned; `make_start` makes the message for a trial and
        its attempt. `num_ended` trials have ended before, and `has_success` if one of them has not failed. After
        `trials_per_worker` trials the workers of a group are replaced; 0 for never."""
        self._groups = [_GroupSlot() for _ in range(num_groups)]
        self._ranks_per_group = ranks_per_group
        self._num_trials = num_trials
        self._num_ended = num_ended
        self._queue: deque[tuple[PlannedTrial, int]] = deque((planned, 1) for planned in interrupted)
        self._ask = ask
        self._tell = tell
        self._should_prune = should_prune
        self._make_start = make_start
        self._has_pruner = has_pruner
        self._retries = retries
        self._trials_per_worker = trials_per_worker or math.inf
        self._trial_s = trial_s or math.inf
        self._has_success = has_success
        self._num_failed = 0
        self._was_ready = False  # a group, once
        self.is_exhausted = False
        """Whether the space has no more points."""
        self.failure = ""
        """Why the search cannot go on; empty while it can."""

    @property
    def is_done(self) -> bool:
        """Whether nothing runs and nothing is left to run, or the search cannot go on."""
        if self.failure:
            return True
        return not self._queue and not self._num_running and (self.is_exhausted or self._num_new == 0)

    @property
    def num_ready_groups(self) -> int:
        return sum(slot.state in (GroupState.IDLE, GroupState.BUSY) for slot in self._groups)

    def begin(self) -> list[Action]:
        """Have all groups started that there are trials for."""
        wanted = len(self._queue) + self._num_new
        for slot in self._groups[max(wanted, 0) :]:
            slot.state = GroupState.CLOSED
        return [StartGroup(index, slot.incarnation) for index, slot in self._open_groups()]

    def handle_ready(self, group: int, incarnation: int, rank: int, now_s: float) -> list[Action]:
        """A rank of a group waits for its first trial."""
        slot = self._groups[group]
        if slot.incarnation != incarnation or slot.state is not GroupState.STARTING:
            return []
        slot.ready_ranks.add(rank)
        if len(slot.ready_ranks) < self._ranks_per_group:
            return []
        slot.state = GroupState.IDLE
        self._was_ready = True
        return self._assign(now_s)

    def handle_report(self, group: int, incarnation: int, report: ReportedValue) -> list[Action]:
        """Rank 0 has reported a value: decide, once for all ranks."""
        attempt = self._find_attempt(group, incarnation, report)
        if attempt is None:
            return []
        attempt.values[report.step] = report.value
        if not self._has_pruner:
            return []
        attempt.is_pruned = attempt.is_pruned or self._should_prune(report.number, attempt.values)
        return [SendToGroup(group, PruneDecision(report.number, report.attempt, report.step, attempt.is_pruned))]

    def handle_ended(self, group: int, incarnation: int, rank: int, ended: TrialEnded, now_s: float) -> list[Action]:
        """The objective has returned or raised in a rank."""
        attempt = self._find_attempt(group, incarnation, ended)
        if attempt is None or rank in attempt.ended:
            return []
        attempt.ended[rank] = ended
        if len(attempt.ended) == self._ranks_per_group:
            self._finish(group, *decide_outcome(attempt.ended), now_s)
            slot = self._groups[group]
            slot.num_trials += 1
            if slot.num_trials >= self._trials_per_worker:
                return [*self._restart(group, "its workers have run all their trials"), *self._assign(now_s)]
            slot.state = GroupState.IDLE
            return self._assign(now_s)
        if ended.outcome is Outcome.COMPLETE and rank != 0:
            return []  # rank 0 may go on to evaluate, and to report
        within_s = LAST_RANKS_S if ended.outcome is Outcome.COMPLETE else END_GRACE_S
        if now_s + within_s < attempt.deadline_s:
            missing = format_ranks({*range(self._ranks_per_group)} - attempt.ended.keys())
            attempt.deadline_s = now_s + within_s
            attempt.deadline_reason = f"{missing} did not end the trial within {within_s:g} s of rank {rank}"
        reason = f"rank {rank} has ended the trial ({ended.reason or ended.outcome.value})"
        return [SendToGroup(group, AbandonTrial(ended.number, ended.attempt, reason))]

    def handle_lost(self, group: int, incarnation: int, reason: str, now_s: float) -> list[Action]:
        """The workers of a group are gone."""
        slot = self._groups[group]
        if slot.incarnation != incarnation or slot.state is GroupState.CLOSED:
            return []
        actions: list[Action] = []
        if slot.attempt is not None:
            actions += self._retry_or_fail(group, slot.attempt, reason, now_s)
        elif slot.state is GroupState.STARTING:
            slot.num_bad_starts += 1
            actions.append(ShowMessage(f"worker group {group} has not started: {reason}"))
        else:
            actions.append(ShowMessage(f"worker group {group} is started again: {reason}"))
        return [*actions, *self._restart(group, reason), *self._assign(now_s)]

    def handle_worker_failed(self, reason: str) -> list[Action]:
        """The objective or the setup does not work in a worker: at all, or if others were ready before, only there and
        now. Then its group is lost when the worker exits, and started again."""
        if not self._was_ready:
            self.failure = self.failure or f"the workers cannot begin: {reason}"
            return []
        return [ShowMessage(f"a worker cannot begin: {reason}")]

    def handle_time(self, now_s: float) -> list[Action]:
        """End what takes too long."""
        actions: list[Action] = []
        for index, slot in self._open_groups():
            attempt = slot.attempt
            if attempt is None or now_s < attempt.deadline_s:
                continue
            known = {**attempt.ended}
            is_pruned = bool(known) and decide_outcome(known)[0] is Outcome.PRUNED
            outcome = (Outcome.PRUNED, None, "") if is_pruned else (Outcome.FAILED, None, attempt.deadline_reason)
            self._finish(index, *outcome, now_s)
            actions += self._restart(index, "its trial took too long")
        return [*actions, *self._assign(now_s)]

    def next_deadline_s(self) -> float:
        """Return when handle_time() has something to do."""
        return min((slot.attempt.deadline_s for slot in self._groups if slot.attempt is not None), default=math.inf)

    def running(self, now_s: float) -> list[RunningTrial]:
        """Return the trials that are under way, by group."""
        found = []
        for index, slot in enumerate(self._groups):
            if slot.attempt is not None:
                planned, values = slot.attempt.planned, slot.attempt.values
                step = max(values, default=None)
                value = None if step is None else values[step]
                seconds = now_s - slot.attempt.began_s
                found.append(
                    RunningTrial(planned.number, index, slot.attempt.number_of, planned.params, seconds, step, value)
                )
        return found

    # --- inside --------------------------------------------------------------------------------------------------

    @property
    def _num_running(self) -> int:
        return sum(slot.attempt is not None for slot in self._groups)

    @property
    def _num_new(self) -> int:
        """How many trials have still to be asked for."""
        return max(0, self._num_trials - self._num_ended - self._num_running - len(self._queue))

    def _open_groups(self) -> Iterable[tuple[int, _GroupSlot]]:
        return [(index, slot) for index, slot in enumerate(self._groups) if slot.state is not GroupState.CLOSED]

    def _find_attempt(self, group: int, incarnation: int, message: ReportedValue | TrialEnded) -> _Attempt | None:
        """Return the attempt that a message is about; None if that is over."""
        slot = self._groups[group]
        attempt = slot.attempt
        if attempt is None or slot.incarnation != incarnation:
            return None
        is_current = (attempt.planned.number, attempt.number_of) == (message.number, message.attempt)
        return attempt if is_current else None

    def _assign(self, now_s: float) -> list[Action]:
        """Give idle groups something to do."""
        actions: list[Action] = []
        for index, slot in self._open_groups():
            if slot.state is not GroupState.IDLE or self.failure:
                continue
            following = self._next_trial()
            if following is None:
                break
            planned, number_of = following
            slot.state, slot.num_bad_starts = GroupState.BUSY, 0
            slot.attempt = _Attempt(planned, number_of, now_s)
            slot.attempt.deadline_s = now_s + self._trial_s
            slot.attempt.deadline_reason = f"it took longer than {self._trial_s:g} s (trial_s)"
            actions.append(SendToGroup(index, self._make_start(planned, number_of)))
        return actions

    def _next_trial(self) -> tuple[PlannedTrial, int] | None:
        if self._queue:
            return self._queue.popleft()
        if self.is_exhausted or self._num_new == 0:
            return None
        planned = self._ask()
        self.is_exhausted = planned is None
        return None if planned is None else (planned, 1)

    def _finish(self, group: int, outcome: Outcome, value: float | None, reason: str, now_s: float) -> None:
        slot = self._groups[group]
        attempt = slot.attempt
        assert attempt is not None
        slot.attempt = None
        if outcome is Outcome.PRUNED and attempt.values:
            value = attempt.values[max(attempt.values)]
        self._num_ended += 1
        self._num_failed += outcome is Outcome.FAILED
        self._has_success = self._has_success or outcome is not Outcome.FAILED
        result = TrialResult(
            number=attempt.planned.number,
            outcome=outcome,
            value=value,
            params=attempt.planned.params,
            reason=reason,
            attempts=attempt.number_of,
            seconds=now_s - attempt.began_s,
            reported=dict(sorted(attempt.values.items())),
        )
        if not self._has_success and self._num_failed >= MAX_FIRST_FAILURES:
            failed = format_count(self._num_failed, "trial")
            self.failure = f"the first {failed} have all failed; the last: {reason}"
        self._tell(result)

    def _retry_or_fail(self, group: int, attempt: _Attempt, reason: str, now_s: float) -> list[Action]:
        number, number_of = attempt.planned.number, attempt.number_of
        if number_of > self._retries:
            times = f" (attempt {number_of} of {number_of})" if number_of > 1 else ""
            self._finish(group, Outcome.FAILED, None, f"{reason}{times}", now_s)
            return []
        self._groups[group].attempt = None
        self._queue.appendleft((attempt.planned, number_of + 1))
        return [ShowMessage(f"trial {number} is run again (attempt {number_of + 1}): {reason}")]

    def _restart(self, group: int, reason: str) -> list[Action]:
        slot = self._groups[group]
        slot.ready_ranks.clear()
        slot.num_trials = 0
        slot.incarnation += 1
        has_work = self._queue or (self._num_new and not self.is_exhausted)
        if slot.num_bad_starts >= MAX_STARTS or not has_work:
            slot.state = GroupState.CLOSED
            if has_work and not self._open_groups():
                self.failure = f"no group of workers can be started; the last: {reason}"
            return []
        slot.state = GroupState.STARTING
        return [StartGroup(group, slot.incarnation)]


def decide_outcome(ended: Mapping[int, TrialEnded]) -> tuple[Outcome, float | None, str]:
    """Return the outcome of a trial, its value and the reason of a failure, from what its ranks have said, in the order
    in which they came. What one rank fails with because another has left is no reason of its own, and does not count
    against a trial that was pruned."""
    own = [(rank, each) for rank, each in ended.items() if each.outcome is Outcome.FAILED and not each.is_consequence]
    failed = own or [(rank, each) for rank, each in ended.items() if each.outcome is Outcome.FAILED]
    is_pruned = any(each.outcome is Outcome.PRUNED for each in ended.values())
    if own or (failed and not is_pruned):
        rank, first = failed[0]
        return Outcome.FAILED, None, first.reason if len(ended) == 1 else f"rank {rank}: {first.reason}"
    if is_pruned:
        return Outcome.PRUNED, None, ""
    return Outcome.COMPLETE, ended[0].value, ""
