"""ronde.search.run(), and what `ronde search` has in common with it: SearchOptions, which are also the section `search`
of a job file, and the way from them to a SearchDriver and its result."""

from __future__ import annotations

import difflib
import inspect
import operator
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec

from ronde.launch.agent.cgroup_limits import effective_cpu_count
from ronde.launch.function import FUNCTION_RANK_COMMAND, make_function_job, pickle_call
from ronde.launch.job import Job, SshOptions
from ronde.launch.placement import Host
from ronde.search.driver import MakeGroup, SearchDriver
from ronde.search.journal import OPTUNA_LOCK_SUFFIX, lock_journal
from ronde.search.results import SearchResult, SearchStatus
from ronde.search.script_group import MetricReader, ScriptGroup
from ronde.search.space import parse_space
from ronde.search.study import (
    JOURNAL_NAME,
    Direction,
    PrunerName,
    SamplerName,
    SearchStudy,
    StudyOptions,
    check_num_trials,
    check_points,
    make_pruner,
)
from ronde.search.trial_output import OUTPUT_FOLDER
from ronde.search.worker import run_worker
from ronde.search.worker_group import GroupEvent, GroupPlacement, TrialGroup, WorkerGroup, make_group_job, place_groups

TABLES = ("trials.csv", "trials.json", "report.html")
"""What a search writes to its folder, beside the journal and the output of trials."""


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a search needs to know. Hosts, environment and the options of ssh are those of the section `run`."""

    space: dict[str, Any]
    """What is searched, by the name of each parameter: its ends, or its choices (space.py)."""
    objective: str = ""
    """`module:function` that is called with a Trial and returns its value."""
    setup: str = ""
    """`module:function` that every worker calls once; what it returns is the second argument of the objective."""
    command: str | list[str] = ""
    """Instead of an objective: a command that takes the parameters as flags, or where it says {name}."""
    metric: str = ""
    """Of a command: a regular expression for the lines that it prints; its first group is the value."""
    metric_key: str = ""
    """Of a command that prints JSON objects: the key of the value."""
    trials: int = 0
    """How many; 0 for all points of a space that has a number of them."""
    points: list[dict[str, Any]] = []
    """Points that are tried first."""
    direction: Direction = "minimize"
    sampler: SamplerName = "tpe"
    pruner: PrunerName = "none"
    pruner_options: dict[str, Any] = {}
    """Keyword arguments of Optuna's MedianPruner, SuccessiveHalvingPruner or HyperbandPruner."""
    ranks_per_trial: int = 1
    parallel: int = 0
    """How many trials run at a time; 0 for as many as the slots of the hosts, or the cores of this machine, allow."""
    seed: int = 0
    retries: int = 2
    """How often a trial is run again after the loss of a rank."""
    trials_per_worker: int = 0
    """Workers of an objective are replaced after so many trials, if it leaks memory; 0 for never."""
    trial_s: float = 0.0
    """A trial that takes longer has failed; 0 for no limit."""
    output: str = "search"
    """Folder of the journal, the tables, the report and the output of trials."""

    def __post_init__(self) -> None:
        if bool(self.objective) == bool(self.command):
            raise ValueError("give either `objective`, as in train:objective, or `command`, as in python train.py")
        if self.command and self.setup:
            raise ValueError("`setup` is for an objective; a command starts an interpreter for each trial")
        if self.command and self.trials_per_worker:
            raise ValueError("`trials_per_worker` is for an objective; a command starts an interpreter for each trial")
        if not self.command and (self.metric or self.metric_key):
            raise ValueError("`metric` and `metric_key` are for a command; an objective returns its value")
        for name, allowed in (("direction", Direction), ("sampler", SamplerName), ("pruner", PrunerName)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {', '.join(get_args(allowed))}, got {getattr(self, name)!r}")
        for name in ("ranks_per_trial", "parallel", "trials", "retries", "trials_per_worker", "trial_s"):
            minimum = 1 if name == "ranks_per_trial" else 0
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {getattr(self, name)}")

    def split_command(self) -> tuple[str, ...]:
        """Return the words of the command. ValueError for a quotation that does not end."""
        if not isinstance(self.command, str):
            return tuple(self.command)
        try:
            return tuple(shlex.split(self.command))
        except ValueError as error:
            raise ValueError(f"command: {error} in {self.command!r}") from None


def run(
    objective: Callable[..., Any],
    space: Mapping[str, Any],
    *,
    trials: int = 0,
    ranks_per_trial: int = 1,
    parallel: int | None = None,
    setup: Callable[[], Any] | None = None,
    points: Sequence[Mapping[str, Any]] = (),
    direction: Direction = "minimize",
    sampler: SamplerName = "tpe",
    pruner: PrunerName = "none",
    pruner_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    retries: int = 2,
    trials_per_worker: int = 0,
    trial_s: float = 0.0,
    folder: str | os.PathLike[str] | None = None,
    hosts: str | Sequence[Host | str] = "",
    env: Mapping[str, str] | None = None,
    ssh: SshOptions | None = None,
    python: str = "",
    on_status: Callable[[SearchStatus], None] | None = None,
    **settings: Any,  # see Settings
) -> SearchResult:
    """Search for the parameters with the best value of objective(trial), on warm workers, and return all trials.

        result = ronde.search.run(objective, {"lr": {"low": 1e-4, "high": 0.1, "log": True}}, trials=40)

    A parameter of the space has ends and perhaps a `step`, `log` or `type`, or is a list of choices. `parallel` trials
    of `ranks_per_trial` ranks each run at a time, by default as many as the slots of the hosts, or the cores of this
    machine, allow. Each worker calls `setup` once, and what it returns is the second argument of the objective.
    `points` are tried first. A trial that loses a rank is run again, at most `retries` times; one that takes longer
    than `trial_s` has failed. Workers are replaced after `trials_per_worker` trials, if that is not 0. With a `folder`
    the search goes on where a former one has ended or was killed, and what the trials print is kept there. `hosts`,
    `env`, `ssh`, `python` and settings are as in ronde.run(). `on_status` is called about twice a second.
    """
    if not callable(objective):
        raise TypeError(f"run() takes a function, got {type(objective).__name__}")
    counts = {"trials": trials, "ranks_per_trial": ranks_per_trial, "retries": retries, "parallel": parallel or 0}
    for name, value in {**counts, "trials_per_worker": trials_per_worker, "seed": seed}.items():
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be a whole number, got {value!r}") from None
    options = SearchOptions(
        space=dict(space),
        objective=f"{objective.__module__}:{getattr(objective, '__qualname__', type(objective).__name__)}",
        trials=trials,
        points=[dict(point) for point in points],
        direction=direction,
        sampler=sampler,
        pruner=pruner,
        pruner_options=dict(pruner_options or {}),
        ranks_per_trial=ranks_per_trial,
        parallel=parallel or 0,
        seed=seed,
        retries=retries,
        trials_per_worker=trials_per_worker,
        trial_s=trial_s,
    )
    try:
        job = make_function_job(hosts=hosts, env=env, ssh=ssh, python=python, settings=settings)
    except TypeError as error:
        near = [difflib.get_close_matches(name, inspect.signature(run).parameters, n=1) for name in settings]
        if not any(near):
            raise
        raise TypeError(f"{error}; did you mean {next(filter(None, near))[0]}?") from None
    with ExitStack() as opened:
        if folder is None:
            kept = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ronde-search-")))
        else:
            kept = Path(folder)
        result = search(
            options, job, kept, function=objective, setup=setup, on_status=on_status, is_kept=folder is not None
        )
    return msgspec.structs.replace(result, folder="") if folder is None else result


def search(
    options: SearchOptions,
    job: Job,
    folder: Path,
    *,
    function: Callable[..., Any] | None = None,
    setup: Callable[[], Any] | None = None,
    on_status: Callable[[SearchStatus], None] | None = None,
    is_kept: bool = True,
) -> SearchResult:
    """Run a search, or what is left of one, in this folder. `job` has what all groups have in common: hosts, ssh,
    environment, settings. `function` and `setup` stand in the place of the names in the options. `is_kept` is whether
    the caller keeps the folder, so that an error may name it."""
    space = parse_space(options.space)
    num_trials, note = check_num_trials(space, options.trials, len(options.points), options.sampler)
    num_groups = choose_num_groups(options, job.hosts, num_trials)
    placements = place_groups(job.hosts, num_groups, options.ranks_per_trial)
    make_group = _make_script_groups(options, job, placements, folder)
    if make_group is None:
        make_group = _make_worker_groups(
            job, placements, folder, function or options.objective, setup or options.setup or None
        )
    study_options = StudyOptions(
        direction=options.direction,
        sampler=options.sampler,
        pruner=options.pruner,
        pruner_options=options.pruner_options,
        seed=options.seed,
        what=options.objective or " ".join(options.split_command()),
    )
    with ExitStack() as opened:
        study = SearchStudy(folder, space, study_options, options.points)
        opened.callback(study.close)
        driver = SearchDriver(
            study,
            make_group,
            folder=folder,
            num_trials=num_trials,
            num_groups=num_groups,
            ranks_per_group=1 if options.command else options.ranks_per_trial,
            retries=options.retries,
            trials_per_worker=options.trials_per_worker,
            trial_s=options.trial_s,
            on_status=on_status,
            note=note,
            is_kept=is_kept,
        )
        result = driver.run()
    result.write_tables(folder)
    return result


def check_options(options: SearchOptions) -> None:
    """ValueError if the space, a point, the metric, the pruner or the number of trials is wrong. Nothing is started."""
    space = parse_space(options.space)
    check_points(space, options.points)
    check_num_trials(space, options.trials, len(options.points), options.sampler)
    make_pruner(options.pruner, options.pruner_options)
    if options.command:
        options.split_command()
        MetricReader(options.metric, options.metric_key)


def choose_num_groups(options: SearchOptions, hosts: Sequence[Host], num_trials: int) -> int:
    """Return how many trials run at a time. ValueError if not even one fits."""
    if options.parallel:
        return options.parallel
    num_slots = sum(host.slots for host in hosts) or effective_cpu_count(len(os.sched_getaffinity(0)))
    if hosts and num_slots < options.ranks_per_trial:
        raise ValueError(f"a trial has {options.ranks_per_trial} ranks, and the hosts have only {num_slots} slots")
    return max(1, min(num_slots // options.ranks_per_trial, num_trials))


def remove_search(folder: Path) -> None:
    """Remove what a search has written to this folder, and nothing else. RondeError if one is running there."""
    journal = folder / JOURNAL_NAME
    if not journal.exists():
        return
    with lock_journal(journal):
        shutil.rmtree(folder / OUTPUT_FOLDER, ignore_errors=True)
        locks = [path.name for path in folder.glob(f"{JOURNAL_NAME}{OPTUNA_LOCK_SUFFIX}*")]
        for name in (*TABLES, *locks, JOURNAL_NAME):  # the journal last: it says that this is a search
            (folder / name).unlink(missing_ok=True)


def _make_worker_groups(
    job: Job,
    placements: Sequence[GroupPlacement],
    folder: Path,
    objective: Callable[..., Any] | str,
    setup: Callable[[], Any] | str | None,
) -> MakeGroup:
    def make_group(index: int, post: Callable[[GroupEvent], None]) -> TrialGroup:
        placement = placements[index]
        call = pickle_call(run_worker, (objective, setup, placement.slots, job.settings.operation_s), {})
        own = replace(job, command=FUNCTION_RANK_COMMAND, pickled_call=call, has_messages=True)
        return WorkerGroup(index, make_group_job(own, placement), folder, post)

    return make_group


def _make_script_groups(
    options: SearchOptions, job: Job, placements: Sequence[GroupPlacement], folder: Path
) -> MakeGroup | None:
    """Return what makes groups for a command; None if the search has an objective."""
    if not options.command:
        return None
    command = options.split_command()
    if not command:
        raise ValueError("the command is empty")

    def make_reader() -> MetricReader:
        return MetricReader(options.metric, options.metric_key)

    make_reader()  # a mistake in the metric is seen before anything is started

    def make_group(index: int, post: Callable[[GroupEvent], None]) -> TrialGroup:
        own = make_group_job(replace(job, command=command), placements[index])
        return ScriptGroup(index, own, folder, post, slot=placements[index].slots[0], make_reader=make_reader)

    return make_group
