"""Objectives of searches in tests, and a driver of a search that is killed inside a write to its journal:

python -m tests.jobs.scripts.search_objectives FOLDER [NUM_WRITES]
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import ronde
from ronde.search import Trial, TrialPruned

NUM_TRIALS = 40
NUM_STEPS = 4
SPACE = {"x": {"low": 0.0, "high": 1.0}, "kind": ["a", "b", "c"]}


def chaos(trial: Trial) -> float:
    """Two ranks whose reports go to a pruner. Ranks of some trials are killed in their first attempt."""
    ronde.init()
    x = trial.params["x"]
    assert isinstance(x, float)
    value = 0.0
    for step in range(NUM_STEPS):
        if trial.attempt == 1 and trial.number % 13 == 5 and step == 0 and ronde.rank() == trial.number % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        mean = float(ronde.allreduce(np.array([x + ronde.rank()]), op="mean")[0])
        value = (mean - 0.8) ** 2 + 1.0 / (step + 1)
        trial.report(value if ronde.rank() == 0 else float("inf"), step)  # that of rank 0 counts
        if trial.should_prune():
            print(f"pruned at step {step}")
            raise TrialPruned
    return value


def run_chaos(folder: str) -> ronde.search.SearchResult:
    return ronde.search.run(
        chaos,
        SPACE,
        trials=NUM_TRIALS,
        ranks_per_trial=2,
        parallel=2,
        pruner="median",
        pruner_options={"n_startup_trials": 3},
        folder=folder,
    )


@functools.cache
def load_data() -> list[int]:
    return [os.getpid()]


def probe(trial: Trial, data: list[int]) -> float:
    """Says what a trial finds in its process, and leaves it in disorder."""
    found = {"pid": data[0], "random": random.random(), "numpy": np.random.rand(), "cwd": str(Path.cwd())}
    found["variable"] = os.environ.get("OF_A_TRIAL")
    found["handler"] = str(signal.getsignal(signal.SIGALRM))
    found["timer"] = signal.getitimer(signal.ITIMER_REAL)[0]
    print(json.dumps(found))
    random.seed(99)
    os.chdir("/")
    os.environ["OF_A_TRIAL"] = "1"
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("the alarm of another trial"))
    signal.setitimer(signal.ITIMER_REAL, 3600.0)
    return float(trial.number)


def wait_for_file(trial: Trial) -> float:
    """Returns when the test has removed a file."""
    folder = Path(os.environ["TEST_FOLDER"])
    (folder / f"begun-{trial.number}").touch()
    while (folder / "wait").exists():
        time.sleep(0.05)
    return 0.0


class SilentError(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def moody(trial: Trial) -> Any:
    """Ends in the way that its parameter says."""
    match trial.params["how"]:
        case "nan":
            return float("nan")
        case "text":
            return "good"
        case "error":
            raise KeyError("no such layer")
        case "exit":
            sys.exit("enough")
        case "cancelled":
            raise asyncio.CancelledError  # no Exception, but a BaseException
        case "silent":
            raise SilentError
        case "fork":
            if not os.fork():
                sys.exit("this is a child, and its end is not that of the trial")
        case "prune as in Optuna":
            import optuna

            raise optuna.TrialPruned
        case "suggest as in Optuna":
            return trial.suggest_float("x", 0, 1)  # type: ignore[attr-defined]
        case "report nan":
            trial.report(float("nan"), 0)
        case "late":
            trial.report(1.0, np.int64(3))  # type: ignore[arg-type]
            trial.report(1.0, 2)
    return 1.0


def unequal(trial: Trial) -> float:
    """Its ranks do different things."""
    ronde.init()
    how, rank = trial.params["how"], ronde.rank()
    if how == "rank 1 raises" and rank == 1:
        raise RuntimeError("rank 1 does not like it")
    if how == "other steps":
        trial.report(0.0, 1 + rank)
    ronde.barrier()
    if how == "rank 0 returns early" and rank == 0:
        return 1.0
    if how == "rank 0 returns early":
        trial.report(0.0, 0)
    return 2.0


def main() -> None:
    folder, *more = sys.argv[1:]
    if more:
        _kill_inside_write(int(more[0]))
    run_chaos(folder)


def _kill_inside_write(num_writes: int) -> None:
    """Let this process be killed when half of a record is written, by Optuna, with its lock held."""
    from optuna.storages.journal import JournalFileBackend

    append, writes = JournalFileBackend.append_logs, [0]

    def append_logs(self: JournalFileBackend, logs: list[dict[str, Any]]) -> None:
        writes[0] += 1
        if writes[0] < num_writes:
            return append(self, logs)
        self._lock.acquire()
        text = "".join(json.dumps(log) + "\n" for log in logs)
        with open(self._file_path, "a") as file:  # noqa: PTH123  # as Optuna does
            file.write(text[: len(text) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    JournalFileBackend.append_logs = append_logs  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
