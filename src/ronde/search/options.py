"""The section `search` of a job file, and the flags of `ronde search`: what a search needs to know, as one value."""

from __future__ import annotations

import shlex
from typing import Any, Literal

import msgspec


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts, environment and the options of ssh are those of the section `run`."""

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
    direction: Literal["minimize", "maximize"] = "minimize"
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    pruner: Literal["none", "median", "asha", "hyperband"] = "none"
    pruner_options: dict[str, Any] = {}
    """Keyword arguments of Optuna's MedianPruner, SuccessiveHalvingPruner or HyperbandPruner."""
    ranks_per_trial: int = 1
    parallel: int = 0
    """How many trials run at a time; 0 for as many as the slots of the hosts, or the cores of this machine, allow."""
    seed: int = 0
    retries: int = 2
    """How often a trial is run again after the loss of a rank."""
    trial_s: float = 0.0
    """A trial that takes longer has failed; 0 for no limit."""
    output: str = "search"
    """Folder of the journal, the tables, the report and the output of trials."""

    def __post_init__(self) -> None:
        if bool(self.objective) == bool(self.command):
            raise ValueError("give either `objective`, as in train:objective, or `command`, as in python train.py")
        if self.command and self.setup:
            raise ValueError("`setup` is for an objective; a command starts an interpreter for each trial")
        if not self.command and (self.metric or self.metric_key):
            raise ValueError("`metric` and `metric_key` are for a command; an objective returns its value")
        for name, minimum in (("ranks_per_trial", 1), ("parallel", 0), ("trials", 0), ("retries", 0), ("trial_s", 0)):
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
