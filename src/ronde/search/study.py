"""The study of a search, which only its driver has: which points were tried, what came of them, which point is next,
and whether a trial is worth going on with. Optuna samples, prunes and keeps the records.

A trial is written to the journal twice: with all its parameters when it is asked for, and with all it has reported when
it is over. So a driver that is killed leaves every trial whole, or running and to be run again under its own number;
and values that a lost attempt has reported count for nothing.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import optuna
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from ronde.search.journal import StudyJournal, open_journal
from ronde.search.protocol import Outcome
from ronde.search.results import TrialResult
from ronde.search.space import (
    Parameters,
    Space,
    count_points,
    describe_distribution,
    iterate_points,
    parse_point,
    point_key,
)
from ronde.text import format_count

JOURNAL_NAME = "journal.log"
STUDY_NAME = "ronde"
FACTS = "ronde"
"""The user attribute of a study with what it searches, and of a trial with what Optuna has no field for."""
MAX_SAMPLES = 100
"""How often the sampler may return a point that was tried."""
MAX_LISTED_POINTS = 100_000
"""Of a space of so many points, one that was not tried is found by going through all of them."""

MIN_IMPORTANCE_TRIALS = 10
"""With fewer complete trials, the importance of a parameter says nothing."""

Direction: TypeAlias = Literal["minimize", "maximize"]
SamplerName: TypeAlias = Literal["tpe", "random", "grid"]
PrunerName: TypeAlias = Literal["none", "median", "asha", "hyperband"]

_PRUNERS: dict[str, type[optuna.pruners.BasePruner]] = {
    "median": optuna.pruners.MedianPruner,
    "asha": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
}
_STATES = {
    TrialState.COMPLETE: Outcome.COMPLETE,
    TrialState.PRUNED: Outcome.PRUNED,
    TrialState.FAIL: Outcome.FAILED,
}


class StudyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a study is about."""

    direction: Direction = "minimize"
    sampler: SamplerName = "tpe"
    pruner: PrunerName = "none"
    pruner_options: Mapping[str, Any] = {}
    """Keyword arguments of Optuna's pruner."""
    seed: int = 0
    what: str = ""
    """The objective or command, by name: a study goes on only with the same."""


class PlannedTrial(msgspec.Struct, frozen=True):
    """A trial that is to be run."""

    number: int
    params: Parameters


class SearchStudy:
    """The study in a folder, open. Everything happens in one thread."""

    def __init__(
        self, folder: Path, space: Space, options: StudyOptions, points: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """`points` are tried first. ValueError if the folder has the study of another space, direction or objective."""
        self.space = space
        self.options = options
        self._points = check_points(space, points)
        pruner = make_pruner(options.pruner, options.pruner_options)
        self._journal: StudyJournal = open_journal(folder / JOURNAL_NAME)
        try:
            with _quiet_optuna():
                self._storage = JournalStorage(self._journal)
                self._remove_unused_study()
                if not self._storage.get_all_studies():
                    optuna.create_study(storage=self._storage, study_name=STUDY_NAME, direction=options.direction)
                self._study = optuna.load_study(storage=self._storage, study_name=STUDY_NAME, pruner=pruner)
            self._study_id = self._storage.get_study_id_from_name(STUDY_NAME)
            self._check_facts(folder)
        except BaseException:
            self._journal.close()
            raise
        trials = self._study.get_trials(deepcopy=False)
        self._taken = {point_key(trial.params) for trial in trials}
        self._random = random.Random(f"{options.seed}/{len(trials)}")
        self._proposals = Proposals(space, options, trials, seed=self._random.randrange(2**31))
        self._stale_rungs: dict[int, set[str]] = {}
        """By trial, system attributes that a lost attempt has left."""

    def close(self) -> None:
        """Let another driver open the study. Idempotent."""
        self._journal.close()

    def interrupted(self) -> list[PlannedTrial]:
        """Return the trials that were running when a former driver ended. They are to be run again."""
        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING))
        return [PlannedTrial(trial.number, dict(trial.params)) for trial in running]

    def ask(self) -> PlannedTrial | None:
        """Return a new trial, with parameters that no other trial has; None if the space has no more of them."""
        params = self._choose_point()
        if params is None:
            return None
        self._taken.add(point_key(params))
        template = create_trial(state=TrialState.RUNNING, params=params, distributions=self.space)
        trial_id = self._storage.create_new_trial(self._study_id, template_trial=template)
        number = self._storage.get_trial_number_from_id(trial_id)
        self._proposals.add(number, template)
        return PlannedTrial(number, params)

    def begin_attempt(self, number: int) -> None:
        """Forget what a former attempt of this trial has told the pruner."""
        attributes = self._storage.get_trial(self._trial_id(number)).system_attrs
        if attributes:
            self._stale_rungs[number] = set(attributes)

    def should_prune(self, number: int, values: Mapping[int, float]) -> bool:
        """Return whether a running trial is to be pruned, from what this attempt has reported, by step."""
        if self.options.pruner == "none":
            return False
        trial_id = self._trial_id(number)
        trial = copy.copy(self._storage.get_trial(trial_id))
        stale = self._stale_rungs.get(number, set())
        trial.intermediate_values = dict(values)
        trial.system_attrs = {name: value for name, value in trial.system_attrs.items() if name not in stale}
        is_pruned = self._study.pruner.prune(self._study, trial)
        if stale:  # successive halving has written to those rungs again that this attempt has come to
            attributes, last = self._storage.get_trial(trial_id).system_attrs, values[max(values)]
            stale.difference_update([name for name in stale if attributes[name] == last])
        return bool(is_pruned)

    def tell(self, result: TrialResult) -> None:
        """Record how a trial has ended, in one write."""
        trial_id = self._trial_id(result.number)
        facts = {"reason": result.reason, "attempts": result.attempts, "seconds": round(result.seconds, 3)}
        with self._journal.batch():
            self._storage.set_trial_user_attr(trial_id, FACTS, facts)
            _record_end(self._storage, trial_id, result)
        self._proposals.tell(result)

    def results(self) -> list[TrialResult]:
        """Return all trials that have ended, by number."""
        return [_make_result(trial) for trial in self._study.get_trials(deepcopy=False) if trial.state in _STATES]

    def importances(self) -> dict[str, float]:
        """Return how much each parameter matters for the value, the largest first; empty while too few trials are
        complete to tell."""
        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        varying = [name for name in self.space if len({repr(trial.params[name]) for trial in complete}) > 1]
        if len(complete) < MIN_IMPORTANCE_TRIALS or not varying or len({trial.value for trial in complete}) < 2:
            return {}
        with _quiet_optuna():
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            found = optuna.importance.get_param_importances(self._study, evaluator=evaluator, params=varying)
        return {name: float(share) for name, share in found.items()}

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _choose_point(self) -> Parameters | None:
        for point in self._points:
            if point_key(point) not in self._taken:
                return point
        count = count_points(self.space)
        if self.options.sampler == "grid":
            return next((point for point in iterate_points(self.space) if point_key(point) not in self._taken), None)
        if count is None or len(self._taken) < count:
            for _ in range(MAX_SAMPLES):
                point = self._proposals.sample()
                if point_key(point) not in self._taken:
                    return point
        if count is not None and count <= MAX_LISTED_POINTS:
            left = [point for point in iterate_points(self.space) if point_key(point) not in self._taken]
            return self._random.choice(left) if left else None
        return None

    def _remove_unused_study(self) -> None:
        """Remove a study without trials: a mistake in the objective, mended since, is no reason to refuse."""
        for study in self._storage.get_all_studies():
            if not self._storage.get_n_trials(study._study_id):
                self._storage.delete_study(study._study_id)

    def _check_facts(self, folder: Path) -> None:
        """Compare what the study was made for with what it is opened for; write it down, if it is new."""
        space = {name: distribution_to_json(distribution) for name, distribution in self.space.items()}
        facts = {"space": space, "direction": self.options.direction, "what": self.options.what}
        written = self._study.user_attrs.get(FACTS)
        known = {**(written or facts), "direction": self._study.direction.name.lower()}
        for name, fact in facts.items():
            if known.get(name) != fact:
                what = "objective" if name == "what" else name
                is_space = name == "space"
                shown = _describe_change(known["space"], space) if is_space else json.dumps(known.get(name))
                raise ValueError(
                    f"{folder} has a search with another {what}: {shown}; choose another folder, or replace the search "
                    "(--overwrite)"
                )
        if written is None:
            self._study.set_user_attr(FACTS, facts)


def _describe_change(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say in which parameter a space differs from another, both with Optuna's JSON of each parameter."""
    for name in {**was, **now}:
        old, new = (
            describe_distribution(json_to_distribution(space[name])) if name in space else "not there"
            for space in (was, now)
        )
        if was.get(name) != now.get(name):
            return f"{name} was {old}, and is {new}"
    return "the parameters are in another order"


class Proposals:
    """Asks Optuna's sampler for points, in a copy of the study in memory: a point that was tried before leaves no trace
    in the journal."""

    def __init__(self, space: Space, options: StudyOptions, trials: Sequence[FrozenTrial], *, seed: int) -> None:
        self._space = space
        is_tpe = options.sampler == "tpe"
        sampler = optuna.samplers.TPESampler(seed=seed) if is_tpe else optuna.samplers.RandomSampler(seed)
        self._storage = optuna.storages.InMemoryStorage()
        with _quiet_optuna():
            self._study = optuna.create_study(
                storage=self._storage, study_name=STUDY_NAME, sampler=sampler, direction=options.direction
            )
        self._study_id = self._storage.get_study_id_from_name(STUDY_NAME)
        self._ids: dict[int, int] = {}
        """By the number of a trial, its id here."""
        for trial in trials:
            self.add(trial.number, trial)

    def sample(self) -> Parameters:
        with _quiet_optuna():
            trial = self._study.ask(self._space)
            point = {name: trial.params[name] for name in self._space}
            self._study.tell(trial, state=TrialState.FAIL)  # which samplers leave out
        return point

    def add(self, number: int, trial: FrozenTrial) -> None:
        self._ids[number] = self._storage.create_new_trial(self._study_id, template_trial=trial)

    def tell(self, result: TrialResult) -> None:
        _record_end(self._storage, self._ids[result.number], result)


def _record_end(storage: optuna.storages.BaseStorage, trial_id: int, result: TrialResult) -> None:
    state = next(state for state, outcome in _STATES.items() if outcome is result.outcome)
    for step, value in result.reported.items():
        storage.set_trial_intermediate_value(trial_id, step, value)
    values = None if result.value is None or state is TrialState.FAIL else (result.value,)
    storage.set_trial_state_values(trial_id, state, values)


def _make_result(trial: FrozenTrial) -> TrialResult:
    facts = trial.user_attrs.get(FACTS, {})
    return TrialResult(
        number=trial.number,
        outcome=_STATES[trial.state],
        value=None if trial.values is None else trial.values[0],
        params=dict(trial.params),
        reason=facts.get("reason", ""),
        attempts=facts.get("attempts", 1),
        seconds=facts.get("seconds", 0.0),
        reported=dict(sorted(trial.intermediate_values.items())),
    )


def make_pruner(name: PrunerName, options: Mapping[str, Any]) -> optuna.pruners.BasePruner:
    """Return Optuna's pruner. ValueError if it does not have these options."""
    if name == "none":
        if options:
            raise ValueError("there are options for a pruner, and no pruner; choose median, asha or hyperband")
        return optuna.pruners.NopPruner()
    try:
        return _PRUNERS[name](**options)
    except (TypeError, ValueError) as error:
        text = " ".join(str(error).split()).replace(f"{_PRUNERS[name].__name__}.__init__()", "the pruner")
        raise ValueError(f"pruner_options of {name}: {text}") from None


def check_points(space: Space, points: Sequence[Mapping[str, Any]]) -> list[Parameters]:
    """Return the points that the user has written. ValueError if one is not in the space, or there twice."""
    parsed = [parse_point(space, point) for point in points]
    num_equal = len(parsed) - len({point_key(point) for point in parsed})
    if num_equal:
        raise ValueError(f"{format_count(num_equal, 'point')} of {len(parsed)} are there twice")
    return parsed


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Let Optuna log only warnings, and not warn that a feature may change."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def check_num_trials(space: Space, num_trials: int, num_points: int, sampler: SamplerName) -> tuple[int, str]:
    """Return how many trials a search has, and a sentence if they are fewer than was asked for; 0 asks for all points
    of the space, or for those that were given. ValueError if there is no number."""
    count = count_points(space)
    if sampler == "grid" and count is None:
        raise ValueError("a grid needs choices, whole numbers or steps: a float without a step has no end of values")
    if num_trials < 0:
        raise ValueError(f"trials must be at least 1, got {num_trials}")
    if num_trials == 0:
        num_trials = num_points or count or 0
        if num_trials == 0:
            raise ValueError("give the number of trials: the space has no end of points")
    if count is not None and count < num_trials:
        points, trials = format_count(count, "point"), format_count(count, "trial")
        return count, f"the space has only {points}: the search ends after {trials} instead of {num_trials}"
    return num_trials, ""
