"""A worker of tests/jobs/test_run_elastic.py: the training of scripts/elastic, started by `ronde run` or srun.

TEST_EVENTS is a list of [who, position, what]: `who` is "worker 1", a process of its own, or "rank 0", whoever that is
then; when training has come to this position, it kills or stops itself, waits until it knows that the round is to
change (unless it is one of so many ranks already), waits for a file, or writes one that `ronde run` watches. Before
training the position is -1, and behind it the number of samples. At its end a worker prints its rank and the sizes of
the rounds that it was in.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np

import ronde
from ronde.comm import world as world_module
from ronde.elastic import State
from tests.jobs.scripts.control import until
from tests.jobs.scripts.elastic import GLOBAL_BATCH, NUM_SAMPLES, Weights


def act(state: State, position: int, seen: set[int]) -> None:
    """Do what the test wants here, once in the life of a process."""
    me = (f"worker {os.environ.get('RONDE_WORKER', '?')}", f"rank {ronde.rank()}")
    for index, (who, at, what) in enumerate(json.loads(os.environ["TEST_EVENTS"])):
        if who in me and at == position and index not in seen:
            seen.add(index)
            word, _, rest = what.partition(" ")
            if word == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif word == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                print("it has woken up", flush=True)
            elif word == "raise":
                raise ValueError(rest)
            elif word == "await":  # also true when this process was told to leave
                until(lambda: world_module.current_world().change_wanted, "a change")
            elif word == "grow":
                if ronde.size() < int(rest):
                    until(lambda: world_module.current_world().change_wanted, "another rank")
            elif word == "file":
                until(Path(os.environ["TEST_FOLDER"], rest).exists, rest)
            elif word == "save":
                np.savez(checkpoint_path(), weights=state.weights.values, position=position)
            elif word == "write":
                name, _, text = rest.partition(" ")
                path = Path(os.environ["TEST_FOLDER"], name)
                new = path.with_suffix(".new")
                new.write_text(text.replace(",", "\n") + "\n")
                new.rename(path)
            elif word == "print":
                print(rest, flush=True)


def train(state: State, sizes: list[int], seen: set[int]) -> None:
    sizes.append(ronde.size())
    while state.position < NUM_SAMPLES:
        act(state, state.position, seen)
        end = min(state.position + GLOBAL_BATCH, NUM_SAMPLES)
        gradient = np.zeros(NUM_SAMPLES)
        gradient[range(state.position, end)[ronde.rank() :: ronde.size()]] = 1.0
        state.weights.step(ronde.allreduce(gradient))
        state.position = end
        state.end_step()


def checkpoint_path() -> Path:
    return Path(os.environ["TEST_FOLDER"], "checkpoint.npz")


def main() -> list[int]:
    ronde.init()
    state, sizes, seen = State(weights=Weights(), position=0), list[int](), set[int]()
    if ronde.rank() == 0 and checkpoint_path().exists():
        with np.load(checkpoint_path()) as saved:
            state.weights.values, state.position = saved["weights"], int(saved["position"])
        print(f"restored at {state.position}", flush=True)
    act(state, -1, seen)
    ronde.elastic.run(train, state, sizes, seen)
    act(state, NUM_SAMPLES, seen)
    if sizes:  # otherwise it came when all was done
        assert state.weights.values.tolist() == [1.0] * NUM_SAMPLES, state.weights.values
        print(f"done as rank {ronde.rank()} of {sizes}", flush=True)
    return sizes


if __name__ == "__main__":
    main()
