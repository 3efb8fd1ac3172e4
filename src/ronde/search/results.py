"""What came of a search: the trials, the best of them, tables for other programs, and what a live table shows."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ronde.search.protocol import Outcome, ParameterValue
from ronde.text import format_count


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """One trial that has ended."""

    number: int
    outcome: Outcome
    value: float | None = None
    """What the objective has returned; of a pruned trial, what it has reported last; None of a failed one."""
    params: dict[str, ParameterValue]
    reason: str = ""
    """Why it failed."""
    attempts: int = 1
    """How often it was begun: more than once if ranks were lost."""
    seconds: float = 0.0
    """How long the last attempt took."""
    reported: dict[int, float] = {}
    """Intermediate values, by step."""


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """All trials of a search, by number, and what they show."""

    direction: str
    trials: list[TrialResult]
    importances: dict[str, float] = {}
    """How much each parameter matters, as shares of 1; empty while too few trials are complete to tell."""
    note: str = ""
    """Why there are fewer trials than were asked for."""
    folder: str = ""
    """Where the journal, the tables and the output of trials are; empty if nothing was kept."""

    @property
    def best(self) -> TrialResult:
        """The complete trial with the best value. ValueError if there is none."""
        complete = [trial for trial in self.trials if trial.outcome is Outcome.COMPLETE and trial.value is not None]
        if not complete:
            failed = [trial for trial in self.trials if trial.outcome is Outcome.FAILED]
            why = f"; trial {failed[-1].number} has failed: {failed[-1].reason}" if failed else ""
            raise ValueError(f"of {format_count(len(self.trials), 'trial')}, none is complete{why}")
        return find_best(complete, self.direction)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        complete = any(trial.outcome is Outcome.COMPLETE for trial in self.trials)
        counts = {outcome.value: sum(trial.outcome is outcome for trial in self.trials) for outcome in Outcome}
        found: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return {**found, "best": msgspec.to_builtins(self.best, str_keys=True) if complete else None, "counts": counts}

    def to_csv(self) -> str:
        """Return a table with a row for each trial. The column of a parameter that has the name of another column is
        `params.NAME`."""
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.params))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        before, behind = ("number", "outcome", "value"), ("seconds", "attempts", "reason")
        columns = [f"params.{name}" if name in (*before, *behind) else name for name in names]
        writer.writerow([*before, *columns, *behind])
        for trial in self.trials:
            values = [trial.params.get(name) for name in names]
            value = "" if trial.value is None else trial.value
            ends = [f"{trial.seconds:.3f}", trial.attempts, trial.reason]
            writer.writerow([trial.number, trial.outcome.value, value, *values, *ends])
        return text.getvalue()

    def write_tables(self, folder: Path) -> None:
        """Write trials.csv and trials.json. A file appears whole or not at all."""
        write_whole(folder / "trials.csv", self.to_csv())
        write_whole(folder / "trials.json", msgspec.json.format(msgspec.json.encode(self.to_dict())).decode())


class RunningTrial(msgspec.Struct, frozen=True):
    """A trial that is under way, for the live table."""

    number: int
    group: int
    attempt: int
    params: dict[str, ParameterValue]
    seconds: float
    step: int | None = None
    value: float | None = None


class SearchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far a search is."""

    num_trials: int
    """How many there will be."""
    seconds: float
    """Since this driver has begun."""
    ended: list[TrialResult]
    running: list[RunningTrial]
    best: TrialResult | None
    num_ready_groups: int
    num_groups: int
    messages: list[str] = []
    """What has happened since the last status: losses, failures."""


def find_best(trials: list[TrialResult], direction: str) -> TrialResult:
    """Return the complete trial with the best value; of equal ones the first."""
    sign = -1.0 if direction == "maximize" else 1.0
    return min(trials, key=lambda trial: sign * (trial.value or 0.0))


def format_params(params: Mapping[str, ParameterValue]) -> str:
    """Write parameters for people: lr=0.0123 layers=2."""
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in params.items()
    )


def format_value(value: ParameterValue) -> str:
    """Write a parameter as scripts read it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
