"""An elastic training of one weight, which every batch makes smaller by exactly 1. Worker 1 kills itself at batch 5."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import tensorflow as tf

import horovod.tensorflow as hvd

WORKER = int(os.environ.get("RONDE_WORKER", "0"))
LOG = Path(sys.argv[1])


def note(event: str) -> None:
    with LOG.open("a") as file:
        found = {"event": event, "worker": WORKER, "batch": state.batch, "weight": float(weight.numpy())}
        file.write(json.dumps(found) + "\n")


@tf.function  # type: ignore[untyped-decorator]
def step() -> None:
    with tf.GradientTape() as tape:
        loss = weight * 1.0
    (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
    weight.assign_sub(gradient)


@hvd.elastic.run
def train(state: hvd.elastic.TensorFlowState) -> None:
    note("train")
    while state.batch < 10:
        if state.batch == 5 and WORKER == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        state.batch += 1
        if state.batch % 2 == 0:
            state.commit()


hvd.init()
weight = tf.Variable(0.0)
state = hvd.elastic.TensorFlowState([weight], batch=0)
train(state)
note("end")
