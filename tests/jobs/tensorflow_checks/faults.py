"""One rank of a job in which something goes wrong: `python -m tests.jobs.tensorflow_checks.faults CASE FOLDER`. What it
sees is written into a file of the folder, named after its rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

import ronde
import ronde.tensorflow as rt
from tests.jobs.tensorflow_checks.checks import in_graph
from tests.limits import RANK_S

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])


def write(text: str) -> None:
    (FOLDER / f"rank-{ronde.rank()}").write_text(text)


def describe(error: BaseException) -> str:
    found = rt.find_error(error)
    return f"{type(error).__name__} {type(found).__name__}: {found}"


def await_file(name: str) -> None:
    deadline = time.monotonic() + RANK_S
    while not (FOLDER / name).exists():
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.01)


def kill_self_at(step: Any) -> Any:
    if ronde.rank() == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step


def lose_a_rank_in_a_step() -> None:
    variables = [tf.Variable(tf.zeros([2000])) for _ in range(4)]
    settings = rt.GradientSettings(bucket_mb=0.005)

    @in_graph
    def train(step: Any) -> Any:
        gradients = [tf.ones([2000])] * 3
        with tf.control_dependencies(gradients):
            step = tf.numpy_function(kill_self_at, [step], tf.int32)
        gradients.append(tf.ones([2000]) * tf.cast(step, tf.float32))
        return rt.reduce_gradients(gradients, variables, settings=settings)

    for step in range(3):
        train(tf.constant(step))
    try:
        train(tf.constant(3))
    except tf.errors.OpError as error:
        write(describe(error))


def lose_a_rank_in_an_operation() -> None:
    @in_graph
    def compute(step: Any) -> Any:
        step = tf.numpy_function(kill_self_at, [step], tf.int32)
        return rt.allreduce(tf.cast(step, tf.float32), name="loss")

    for step in range(3):
        compute(tf.constant(step))
    try:
        compute(tf.constant(3))
    except tf.errors.OpError as error:
        write(describe(error))


def time_out() -> None:
    texts, variable = [], tf.Variable([0.0, 0.0])
    if ronde.rank() == 0:
        for function in (
            lambda: rt.allreduce(tf.ones([2]), name="alone"),
            lambda: rt.reduce_gradients([tf.ones([2])], [variable], name="alone"),
        ):
            try:
                tf.function(function)()
            except tf.errors.OpError as error:
                texts.append(describe(error))
        write("\n".join(texts))
    else:
        await_file("rank-0")
        write("waited")


ronde.init()
{"step": lose_a_rank_in_a_step, "operation": lose_a_rank_in_an_operation, "timeout": time_out}[CASE]()
ronde.shutdown()
