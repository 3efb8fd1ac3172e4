"""Search for hyper-parameters on warm workers. Needs `pip install ronde[search]`.

    import ronde.search

    def objective(trial):
        for epoch in range(10):
            loss = train(trial.params["lr"])
            trial.report(loss, epoch)
            if trial.should_prune():
                raise ronde.search.TrialPruned
        return loss

    result = ronde.search.run(objective, {"lr": {"low": 1e-4, "high": 0.1, "log": True}}, trials=40, pruner="median")
    print(result.best.params)

A trial is a group of ranks: `ronde.init()` inside of the objective joins the others of its trial. `ronde search
job.yaml` does the same from a file, and also with scripts that read the parameters as flags.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ronde.search.protocol import Outcome
    from ronde.search.results import RunningTrial, SearchResult, SearchStatus, TrialResult
    from ronde.search.run_search import run
    from ronde.search.trial import Trial, TrialPruned

__all__ = [
    "Outcome",
    "RunningTrial",
    "SearchResult",
    "SearchStatus",
    "Trial",
    "TrialPruned",
    "TrialResult",
    "run",
]

_MODULES = {
    **dict.fromkeys(("RunningTrial", "SearchResult", "SearchStatus", "TrialResult"), "results"),
    **dict.fromkeys(("Trial", "TrialPruned"), "trial"),
    "Outcome": "protocol",
    "run": "run_search",
}


def __getattr__(name: str) -> object:
    """Load a name when it is used: a worker has no use for Optuna, which takes a second to import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"ronde.search.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ModuleNotFoundError("Optuna is not installed; run: pip install 'ronde[search]'", name="optuna") from None
    value: object = getattr(module, name)
    globals()[name] = value
    return value
