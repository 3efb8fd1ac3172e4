"""An elastic training of one weight, which every batch makes smaller by exactly 1. Worker 1 kills itself at batch 5.
The weight is a variable, or with the word "keras" that of a model, which an optimizer of Keras changes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

import horovod.tensorflow as hvd

WORKER = int(os.environ.get("RONDE_WORKER", "0"))
LOG = Path(sys.argv[1])
IS_KERAS = sys.argv[2:] == ["keras"]


def note(event: str) -> None:
    with LOG.open("a") as file:
        found = {"event": event, "worker": WORKER, "batch": state.batch, "weight": float(get_weight())}
        file.write(json.dumps(found) + "\n")


def get_weight() -> Any:
    return tf.reshape(tf.convert_to_tensor(variables[0]), [])


@tf.function  # type: ignore[untyped-decorator]
def step() -> None:
    with tf.GradientTape() as tape:
        loss = get_weight() * 1.0
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
    if IS_KERAS:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    else:
        variables[0].assign_sub(gradients[0])


@hvd.elastic.run
def train(state: Any) -> None:
    note("train")
    while state.batch < 10:
        if state.batch == 5 and WORKER == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        state.batch += 1
        if state.batch % 2 == 0:
            state.commit()


hvd.init()
state: Any
if IS_KERAS:
    dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = tf.keras.Sequential([tf.keras.layers.InputLayer((1,)), dense])
    optimizer = tf.keras.optimizers.SGD(1.0)
    variables = model.trainable_variables
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
else:
    variables = [tf.Variable(0.0)]
    state = hvd.elastic.TensorFlowState(variables, batch=0)
train(state)
note("end")
