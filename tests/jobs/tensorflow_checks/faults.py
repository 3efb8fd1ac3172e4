"""One rank of a job in which something goes wrong: `python -m tests.jobs.tensorflow_checks.faults CASE FOLDER`. What it
sees is written into a file of the folder, named after its rank."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ronde
import ronde.tensorflow as rt
from ronde.elastic import State, run
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
    """The second time is as the first one, and gradients can be reduced when the other rank comes."""
    variable = tf.Variable([0.0, 0.0])
    add = tf.function(lambda: rt.allreduce(tf.ones([2]), name="alone"))
    reduce = tf.function(lambda: rt.reduce_gradients([tf.ones([2])], [variable], name="alone"))
    if ronde.rank() == 0:
        write("\n".join(map(error_of, (add, add, reduce, reduce))))
        await_file("rank-1")
    else:
        await_file("rank-0")
        others = tf.function(lambda: rt.reduce_gradients([tf.ones([2])], [variable], name="others"))
        write(error_of(others))
    assert reduce()[0].numpy().tolist() == [1.0, 1.0]


def error_of(function: Callable[[], Any]) -> str:
    try:
        return f"no error, but {function()}"
    except tf.errors.OpError as error:
        return describe(error)


# --- rounds ----------------------------------------------------------------------------------------------------------


def call_in_threads(function: Callable[[], Any], num_threads: int) -> list[str]:
    """The errors of calls at the same time."""
    errors: list[str] = []
    threads = [threading.Thread(target=lambda: errors.append(error_of(function))) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def keep_no_results(x: Any) -> None:
    """While an operation waits, the results of others are not kept."""
    wait = tf.function(lambda: rt.allreduce(x, name="waits"))
    scatter = tf.function(lambda x: rt.reduce_scatter(x, name="large")[0])
    scatter(tf.ones([1_000_000]))
    thread = threading.Thread(target=wait)
    if ronde.rank() == 0:
        thread.start()
    before = resident_mb()
    for _ in range(60):
        scatter(tf.ones([1_000_000]))
    assert resident_mb() - before < 60, "60 results of 2 MB, and as many arguments of 4 MB, are not kept"
    if ronde.rank() == 1:
        thread.start()
    thread.join()


def resident_mb() -> float:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * resource.getpagesize() / 1e6


def begin_rounds() -> None:
    """What was run twice at once, or abandoned, ends with an error on both ranks; in a new round it works again. A
    group of an earlier round is not taken for one of this round."""
    me, texts = ronde.rank() + 1.0, []
    variables = [tf.Variable(tf.zeros([2000])) for _ in range(4)]
    settings = rt.GradientSettings(bucket_mb=0.005)
    add = tf.function(lambda: rt.allreduce(tf.constant([me]), name="at once"))

    @in_graph
    def train(is_bad: Any, name: str) -> Any:
        gradients = [tf.fill([2000], me) for _ in variables]
        with tf.control_dependencies(gradients):
            gradients[0] = gradients[0] + tf.numpy_function(fail_if, [is_bad], tf.float32)
        return rt.reduce_gradients(gradients, variables, settings=settings, name=name)

    def step(name: str, is_bad: bool = False) -> float:
        return float(train(tf.constant(is_bad), name)[0][0])

    keep_no_results(tf.constant([me]))
    group = ronde.add_group([0])
    add_in_group = tf.function(lambda: rt.allreduce(tf.constant([me]), group=group))
    if ronde.rank() == 0:
        assert add_in_group().numpy().tolist() == [1.0]
    else:
        assert "rank 1 is not a member" in error_of(add_in_group)
    for function in (add, lambda: step("at once")):
        for _ in range(3):
            function()
        ronde.barrier()  # rank 1 is out of the last one, too
        # The second one comes while the first waits for rank 1, which comes when both have failed.
        if ronde.rank() == 0:
            texts += call_in_threads(function, 2)
        ronde.barrier()
        texts += [error_of(function)] if ronde.rank() == 1 else []
    assert step("abandoned") == 1.5
    texts.append(error_of(lambda: step("abandoned", ronde.rank() == 0)) if ronde.rank() == 0 else "")
    texts += [error_of(lambda: step("abandoned")) for _ in range(2)]
    ronde.shutdown()
    ronde.init()
    assert step("abandoned") == step("at once") == 1.5
    assert add().numpy().tolist() == [3.0]
    assert ronde.add_group([0, 1]).id == group.id
    texts.append(error_of(add_in_group))
    with pytest.raises(ValueError, match="of an earlier round"):
        tf.function(lambda: rt.allreduce(tf.constant([me]), group=group))()
    write("\n".join(texts))


def fail_if(is_bad: Any) -> Any:
    if is_bad:
        raise ValueError("the data are bad")
    return np.float32(0)


def kill_self_once(step: Any) -> Any:
    if ronde.rank() == 1 and step == 3 and not (FOLDER / "killed").exists():
        (FOLDER / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return step


def go_on_after_a_loss() -> None:
    """Elastic: rank 1 of 3 dies when the others have started some buckets of a step, and not all. The next round
    begins with that step."""
    weights = [tf.Variable(tf.zeros([2000])) for _ in range(4)]
    settings = rt.GradientSettings(bucket_mb=0.005)

    @in_graph
    def train_step(step: Any) -> None:
        gradients = [tf.ones([2000])] * 3
        with tf.control_dependencies(gradients):
            step = tf.numpy_function(kill_self_once, [step], tf.int32)
        # Of the first variable, which is in the last bucket: it comes when rank 1 is there.
        gradients.insert(0, tf.ones([2000]) + 0.0 * rt.allreduce(tf.cast(step, tf.float32), name="last"))
        reduced = rt.reduce_gradients(gradients, weights, settings=settings)
        for weight, gradient in zip(weights, reduced, strict=True):
            weight.assign_sub(gradient)

    state = State(step=0)

    def train(state: Any) -> None:
        while state.step < 6:
            train_step(tf.constant(state.step))
            state.step += 1
            state.commit()

    run(train, state)
    write(f"{state.step} steps")


ronde.init()
{
    "step": lose_a_rank_in_a_step,
    "operation": lose_a_rank_in_an_operation,
    "timeout": time_out,
    "rounds": begin_rounds,
    "elastic": go_on_after_a_loss,
}[CASE]()
ronde.shutdown()
