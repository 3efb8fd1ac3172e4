"""A worker of tests/jobs/test_elastic_tensorflow.py: two optimizers of Keras, used one after the other. A worker that
comes later uses the second one first."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ronde
import ronde.keras as rk
from ronde.comm.world import current_world
from ronde.elastic import State, run
from tests.jobs.scripts.control import until

WORKER = int(os.environ.get("RONDE_WORKER", "-1"))
FOLDER = Path(sys.argv[1])
FAULTS: dict[str, str] = json.loads(os.environ["TEST_FAULTS"])
"""By worker and step: kill, or wait until there are 3 ranks or will be."""
NUM_STEPS, NUM_FIRST = 12, 4


def make_model() -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(rk.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
    return model


def happen() -> None:
    what = FAULTS.pop(f"{WORKER} {state.num_steps}", "")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "await 3 ranks":
        until(lambda: ronde.size() == 3 or current_world().change_wanted, "somebody who wants to join")


ronde.init()
first, second = make_model(), make_model()
state = State(first=first, second=second, a=first.optimizer, b=second.optimizer, num_steps=0, sizes=[])
x = np.ones((4, 2), "float32")


@run
def train(state: Any) -> None:
    state.sizes = [*state.sizes, ronde.size()]
    while state.num_steps < NUM_STEPS:
        happen()
        (first if state.num_steps < NUM_FIRST else second).train_on_batch(x, x[:, :1])
        state.num_steps += 1
        state.commit()


train(state)
third = make_model()  # its name is not that of the others
third.train_on_batch(x, x[:, :1])
names = [each.optimizer.gradient_reduction.name for each in (first, second, third)]
iterations = [int(each.optimizer.iterations) for each in (first, second, third)]
result = {"names": names, "iterations": iterations, "sizes": state.sizes}
(FOLDER / f"worker-{WORKER}.json").write_text(json.dumps(result))
ronde.shutdown()
