"""Carries out a search: owns the study, the groups of workers and their events. Used by run() and `ronde search`.

Everything happens in the thread that calls SearchDriver.run(); the drivers of groups, which are jobs, have threads
that only post events. The TrialScheduler decides what is done about an event.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ronde.errors import JobFailed
from ronde.search.protocol import Outcome, ReportedValue, StartTrial, TrialEnded, WorkerFailed, WorkerReady
from ronde.search.results import SearchResult, SearchStatus, TrialResult, find_best, format_params
from ronde.search.scheduler import Action, SendToGroup, ShowMessage, StartGroup, TrialScheduler
from ronde.search.study import PlannedTrial, SearchStudy
from ronde.search.trial_output import OUTPUT_FOLDER
from ronde.search.worker_group import GroupEvent, GroupLost, TrialGroup

STATUS_INTERVAL_S = 0.5

logger = logging.getLogger("ronde.search")

MakeGroup = Callable[[int, Callable[[GroupEvent], None]], TrialGroup]


class SearchDriver:
    """One search. run() it, once."""

    def __init__(
        self,
        study: SearchStudy,
        make_group: MakeGroup,
        *,
        folder: Path,
        num_trials: int,
        num_groups: int,
        ranks_per_group: int,
        retries: int,
        trials_per_worker: int,
        trial_s: float,
        on_status: Callable[[SearchStatus], None] | None = None,
        note: str = "",
        is_kept: bool = True,
    ) -> None:
        """`make_group` gets the number of a group and what to post events with. `on_status` is called about twice a
        second, and whenever a trial has ended. `note` is why there are fewer trials than were asked for.
        `is_kept` is whether the folder is there after the search."""
        self._study = study
        self._folder = folder
        self._num_trials = num_trials
        self._on_status = on_status
        self._note = note
        self._is_kept = is_kept
        self._events: queue.SimpleQueue[GroupEvent] = queue.SimpleQueue()
        self._groups: Sequence[TrialGroup] = [make_group(index, self._events.put) for index in range(num_groups)]
        self._messages: list[str] = []
        self._ended = study.results()
        self._began_s = time.monotonic()
        self._scheduler = TrialScheduler(
            num_groups=num_groups,
            ranks_per_group=ranks_per_group,
            num_trials=num_trials,
            num_ended=len(self._ended),
            interrupted=study.interrupted(),
            ask=study.ask,
            tell=self._tell,
            should_prune=study.should_prune,
            make_start=self._make_start,
            has_pruner=study.options.pruner != "none",
            retries=retries,
            trials_per_worker=trials_per_worker,
            trial_s=trial_s,
            has_success=any(trial.outcome is not Outcome.FAILED for trial in self._ended),
        )

    def run(self) -> SearchResult:
        """Run all trials that are left. JobFailed when no worker can be started, or the objective does not work; then,
        and after Ctrl-C, trials that were running are run again the next time."""
        scheduler = self._scheduler
        with ExitStack() as opened:
            for group in self._groups:
                opened.callback(group.close)
            opened.callback(self._stop_groups)
            opened.enter_context(_log_to_stderr())
            if not scheduler.is_done:
                self._carry_out(scheduler.begin())
            due_s = 0.0
            while not scheduler.is_done:
                now_s = time.monotonic()
                if now_s >= due_s:
                    self._show_status(now_s)
                    due_s = now_s + STATUS_INTERVAL_S
                timeout_s = min(due_s, scheduler.next_deadline_s()) - now_s
                try:
                    self._handle(self._events.get(timeout=max(timeout_s, 0.001)))
                except queue.Empty:
                    self._carry_out(scheduler.handle_time(time.monotonic()))
            self._show_status(time.monotonic())
        if scheduler.failure:
            printed = f"is in {self._folder / OUTPUT_FOLDER}" if self._is_kept else "is kept with folder='…'"
            raise JobFailed(f"{scheduler.failure}; what the trials printed {printed}")
        return self._make_result()

    def _stop_groups(self) -> None:
        is_interrupted = bool(self._scheduler.failure) or not self._scheduler.is_done
        for group in self._groups:
            group.stop(now=is_interrupted)

    def _make_start(self, planned: PlannedTrial, attempt: int) -> StartTrial:
        self._study.begin_attempt(planned.number)
        options = self._study.options
        digest = hashlib.sha256(f"{options.seed}/{planned.number}".encode()).digest()
        seed = int.from_bytes(digest[:4], "big") >> 1
        return StartTrial(planned.number, attempt, planned.params, seed, options.pruner != "none")

    def _handle(self, event: GroupEvent) -> None:
        scheduler, now_s = self._scheduler, time.monotonic()
        if isinstance(event, GroupLost):
            return self._carry_out(scheduler.handle_lost(event.group, event.incarnation, event.reason, now_s))
        match event.message:
            case WorkerReady():
                self._carry_out(scheduler.handle_ready(event.group, event.incarnation, event.rank, now_s))
            case ReportedValue():
                self._carry_out(scheduler.handle_report(event.group, event.incarnation, event.message))
            case TrialEnded():
                self._carry_out(
                    scheduler.handle_ended(event.group, event.incarnation, event.rank, event.message, now_s)
                )
            case WorkerFailed(reason):
                self._carry_out(scheduler.handle_worker_failed(reason))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendToGroup(group, message):
                    self._groups[group].send(message)
                case StartGroup(group, incarnation):
                    self._groups[group].start(incarnation)
                case ShowMessage(text):
                    self._show_message(text)

    def _tell(self, result: TrialResult) -> None:
        self._study.tell(result)
        self._ended.append(result)
        if result.outcome is Outcome.FAILED:
            text = f"trial {result.number} has failed ({format_params(result.params)}): {result.reason}"
            self._show_message(text)

    def _show_message(self, text: str) -> None:
        """Put a line into the next status; where nobody looks at that, into the log."""
        if self._on_status is None:
            logger.warning("%s", text)
        else:
            self._messages.append(text)

    def _show_status(self, now_s: float) -> None:
        if self._on_status is None:
            return
        messages, self._messages = self._messages, []
        complete = [trial for trial in self._ended if trial.outcome is Outcome.COMPLETE]
        scheduler = self._scheduler
        self._on_status(
            SearchStatus(
                num_trials=self._num_trials,
                seconds=now_s - self._began_s,
                ended=list(self._ended),
                running=scheduler.running(now_s),
                best=find_best(complete, self._study.options.direction) if complete else None,
                num_ready_groups=scheduler.num_ready_groups,
                num_groups=len(self._groups),
                messages=messages,
            )
        )

    def _make_result(self) -> SearchResult:
        trials = self._study.results()
        note = self._note
        if not note and len(trials) < self._num_trials:
            note = f"no point was found that was not tried before: the search has ended after {len(trials)} trials"
        return SearchResult(
            direction=self._study.options.direction,
            trials=trials,
            importances=self._study.importances(),
            note=note,
            folder=str(self._folder),
        )


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Within this context the warnings that ronde logs go to standard error, unless the program has log handlers of its
    own. Otherwise each driver of a group would take those of all of them."""
    parent = logging.getLogger("ronde")
    if parent.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    parent.addHandler(handler)
    try:
        yield
    finally:
        parent.removeHandler(handler)
