"""A worker of tests/jobs/test_elastic_tensorflow.py: trains in one tf.function while workers are killed and come, and
counts how often each sample was used."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

import ronde
import ronde.tensorflow as rt
from ronde.comm.world import current_world
from ronde.elastic import State, run
from tests.jobs.scripts.control import until

WORKER = int(os.environ.get("RONDE_WORKER", "-1"))
LENGTH, GLOBAL_BATCH, NUM_EPOCHS = 60, 6, 3
FAULTS: dict[str, str] = json.loads(os.environ["TEST_FAULTS"])
"""By worker, place and step, as in "1 graph 7": kill, terminate, or wait until there are 3 ranks or will be."""
FOLDER = Path(sys.argv[1])

tf.config.threading.set_inter_op_parallelism_threads(1)
ronde.init()
counts = tf.Variable(tf.zeros([LENGTH]))
"""How often each sample was used."""
others = [tf.Variable(tf.zeros([500])) for _ in range(4)]
"""For further buckets; all numbers are the number of steps."""
num_forward = tf.Variable(0)
"""Changed by a forward pass, and not by gradients."""
samples = tf.data.Dataset.range(LENGTH).filter(lambda sample: sample >= 0)  # whose length is not known
data = rt.shard(samples, global_batch=GLOBAL_BATCH, shuffle=LENGTH, seed=3)
state = State(variables=[counts, *others, num_forward], data=data)
num_traces = 0
sizes: list[int] = []


def at(place: str, step: int) -> None:
    """This worker is at this place now."""
    what = FAULTS.pop(f"{WORKER} {place} {step}", "")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "await 3 ranks":
        until(lambda: ronde.size() == 3 or current_world().change_wanted, "somebody who wants to join")
    elif what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


def fault_in_graph(value: Any, place: str) -> Any:
    def happen(given: Any) -> Any:
        at(place, state.steps)
        return given

    with tf.control_dependencies([value]):
        result = tf.numpy_function(happen, [value], value.dtype)
    result.set_shape(value.shape)
    return result


@tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])  # type: ignore[untyped-decorator]
def step(batch: Any) -> Any:
    global num_traces
    num_traces += 1
    num_forward.assign_add(1)
    variables = [counts, *others]
    with tf.GradientTape() as tape:
        used = tf.reduce_sum(tf.gather(counts, batch))
        loss = used + sum(tf.reduce_sum(each) / tf.cast(rt.size_op(), tf.float32) for each in others)
    gradients = tape.gradient(loss, variables)
    gradients[0] = tf.convert_to_tensor(gradients[0])
    gradients[2] = fault_in_graph(gradients[2], "graph")
    settings = rt.GradientSettings(op="sum", bucket_mb=0.003)
    reduced = rt.reduce_gradients(gradients, variables, settings=settings)
    reduced[3] = fault_in_graph(reduced[3], "update")
    for variable, gradient in zip(variables, reduced, strict=True):
        variable.assign_add(gradient)
    return rt.allreduce(tf.cast(rt.rank_op(), tf.float32), op="mean", name="ranks"), rt.size_op()


@run
def train(state: Any) -> None:
    sizes.append(ronde.size())
    while data.epoch < NUM_EPOCHS:
        for batch in data:
            at("forward", state.steps)
            mean, size = step(batch)
            assert int(size) == ronde.size()
            assert float(mean) == (ronde.size() - 1) / 2
            at("after", state.steps)
        state.commit()


train(state)
result = {
    "counts": sorted(set(counts.numpy().tolist())),
    "others": sorted({number for each in others for number in each.numpy().tolist()}),
    "forward": int(num_forward.numpy()),
    "steps": state.steps,
    "sizes": sizes,
    "traces": num_traces,
}
(FOLDER / f"worker-{WORKER}.json").write_text(json.dumps(result))
ronde.shutdown()
