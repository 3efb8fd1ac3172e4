"""A worker of tests/jobs/test_elastic.py: NumPy training in which the gradient of sample i is 1 at i and 0 elsewhere.
With learning rate 1 and the sum over ranks, a weight counts how often its sample was used.

TEST_FAULTS is a list of [worker, point, position, what]: at this point of its program, when training has come to this
position, the worker kills, stops or terminates itself, raises an error, wants a change of the round, or waits: for a
word of the test, or until a newcomer is ready. Points are, in the order of a step: compute, reducing, stepped, ended;
of a change: leaving, joining, opening, reset, syncing; and at the end: finishing, barrier.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ronde
from ronde.comm import joining
from ronde.comm import world as world_module
from ronde.comm.buffers import Array
from ronde.elastic import State, StatePart, register_part
from tests.jobs.scripts.control import ControlSocket, until

NUM_SAMPLES = 60
GLOBAL_BATCH = 6
COMMIT_EVERY = 3
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}


class Weights:
    """The model and its optimizer."""

    def __init__(self) -> None:
        self.values = np.zeros(NUM_SAMPLES)
        self.num_steps = 0

    def step(self, gradient: Array) -> None:
        self.values += gradient
        self.num_steps += 1


class WeightsPart(StatePart):
    """A step cannot be undone, as that of an optimizer."""

    def __init__(self, weights: Weights, state: State) -> None:
        self._weights = weights
        self._num_steps = 0

    def commit(self) -> Array:
        return self._weights.values.copy()

    def restore(self, committed: Array) -> None:
        self._weights.values[:] = committed

    def end_step(self) -> None:
        self._num_steps = self._weights.num_steps

    def undo_step(self) -> None:
        pass

    def has_stepped(self) -> bool:
        return self._weights.num_steps != self._num_steps

    def reset(self) -> None:
        pass

    def sync(self, givers: Sequence[int]) -> None:
        self._weights.values[:] = -1.0 if ronde.rank() not in givers else self._weights.values
        ronde.broadcast(self._weights.values, root=givers[0], out=self._weights.values)
        reach("syncing")


register_part(Weights, WeightsPart)


class Faults:
    def __init__(self, test: ControlSocket) -> None:
        self.test = test
        self.position = 0
        self._left = [fault for fault in json.loads(os.environ["TEST_FAULTS"]) if fault[0] == test.rank]

    def reach(self, point: str) -> None:
        """This point of the program is reached: do what the test wants there."""
        for fault in self._left:
            if fault[1:3] == [point, self.position]:
                self._left.remove(fault)
                self.test.send("reached", point=point)
                if fault[3] == "wait":
                    self.test.receive()
                elif fault[3] == "await change":
                    until(lambda: world_module.current_world().change_wanted, "a newcomer")
                elif fault[3] == "raise":
                    raise ValueError("a mistake of the user")
                elif fault[3] == "lose":
                    world_module.current_world().group.barrier()  # the last one, through which the others come
                    lost = ronde.PeerLost(rank=ronde.rank(), peer=1, why="so the test says")
                    world_module.current_world()._open_channels.channels[0].record_failure(point, lost)
                    raise lost
                elif fault[3] == "change":
                    world_module.current_world().change_wanted = True
                else:
                    os.kill(os.getpid(), SIGNALS[fault[3]])
                return


_faults: list[Faults] = []


def reach(point: str) -> None:
    for faults in _faults:
        faults.reach(point)


def patch(module: Any, name: str, point: str) -> None:
    """Reach the point before each call of a function."""
    original = getattr(module, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        reach(point)
        return original(*args, **kwargs)

    setattr(module, name, patched)


def train(state: State, faults: Faults, sizes: list[int], resources: list[int]) -> str:
    sizes.append(ronde.size())
    resources.append(len([*Path("/proc/self/fd").iterdir()]) + threading.active_count())
    padding = int(os.environ.get("TEST_PADDING", "0"))  # so that an operation takes longer than the way to its fault
    while state.position < NUM_SAMPLES:
        faults.position = state.position
        end = min(state.position + GLOBAL_BATCH, NUM_SAMPLES)
        reach("compute")
        gradient = np.zeros(NUM_SAMPLES + padding)
        gradient[range(state.position, end)[ronde.rank() :: ronde.size()]] = 1.0
        work = ronde.allreduce(gradient, wait=False)
        reach("reducing")
        state.weights.step(work.wait()[:NUM_SAMPLES])
        state.position = end
        reach("stepped")
        if os.environ.get("TEST_METRICS"):
            ronde.allreduce(np.ones(1))  # a collective of the user between optimizer.step() and the end of the step
        if state.steps % COMMIT_EVERY == COMMIT_EVERY - 1:
            state.commit()
        else:
            state.end_step()
        reach("ended")
    reach("finishing")
    return "trained"


def main() -> None:
    with ControlSocket() as test:
        faults = Faults(test)
        ronde.init(**json.loads(os.environ.get("TEST_SETTINGS", "{}")))
        world = world_module.current_world()
        test.send("initialized", rank=ronde.rank(), size=ronde.size(), is_candidate=world.is_candidate)
        _faults.append(faults)
        patch(world_module.World, "close", "leaving")
        patch(world_module.World, "finish", "barrier")
        patch(joining, "find_coordinator", "joining")
        patch(joining, "make_backend", "opening")
        state = State(weights=Weights(), position=0)
        state.register_reset_callbacks([lambda: reach("reset")])
        sizes: list[int] = []
        resources: list[int] = []
        result = ronde.elastic.run(train, state, faults, sizes, resources)
        counts = state.weights.values.tolist()
        test.send(
            "done", result=result, counts=counts, steps=state.steps, sizes=sizes, resources=resources, rank=ronde.rank()
        )


if __name__ == "__main__":
    main()
