"""One rank of a job in which something goes wrong: `python -m tests.jobs.jax_checks.faults CASE FOLDER`. What it sees
is written into a file of the folder, named after its rank."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ronde
import ronde.jax as rj
from ronde.elastic import State, run
from tests.limits import RANK_S, promised_s

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
LOSS_S = 1.0
"""Within which the others learn of a lost rank."""


def write(text: str) -> None:
    (FOLDER / f"rank-{ronde.rank()}").write_text(text)


def describe(error: BaseException) -> str:
    found = rj.find_error(error)
    return f"{type(error).__name__} {type(found).__name__}: {found}"


def await_file(name: str) -> None:
    deadline = time.monotonic() + RANK_S
    while not (FOLDER / name).exists():
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.01)


def lose_a_rank_in_a_step() -> None:
    """Rank 1 dies in the middle of a step, when rank 0 waits for its gradients."""
    optimizer = optax.chain(rj.average_gradients(), optax.sgd(0.1))
    params = jnp.ones(2000)
    state = optimizer.init(params)

    def die(x: Any) -> Any:
        (FOLDER / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
        return x

    def step(params: Any, state: Any, is_last: bool) -> Any:
        gradients = jax.grad(lambda p: (p**2).sum())(params)
        if is_last and ronde.rank() == 1:
            gradients = jax.pure_callback(die, jax.ShapeDtypeStruct(params.shape, params.dtype), gradients)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, static_argnums=2)
    for _ in range(5):
        params, state = compiled(params, state, False)
    try:
        jax.block_until_ready(compiled(params, state, True))
    except jax.errors.JaxRuntimeError as error:
        elapsed_s = time.time() - float((FOLDER / "killed").read_text())
        allowed_s = promised_s(LOSS_S)
        late = "" if elapsed_s < allowed_s else f" after {elapsed_s:.2f} s, where {allowed_s:.2f} s are allowed"
        write(describe(error) + late)


def time_out() -> None:
    add = jax.jit(lambda: rj.allreduce(jnp.ones(2), name="alone"))
    if ronde.rank() == 0:
        try:
            jax.block_until_ready(add())
        except jax.errors.JaxRuntimeError as error:
            write(describe(error))
    else:
        await_file("rank-0")
        write("waited")


def end_while_programs_run(calls_shutdown: bool) -> None:
    """Only rank 0 waits for its programs."""
    add = jax.jit(lambda x: rj.allreduce(x, op="mean", name="last") + 1.0)
    x, rank = jnp.zeros(50_000), ronde.rank()
    for _ in range(30):
        x = add(x)
    if rank == 0:
        write(str(np.asarray(x)[0]))
    if not calls_shutdown:
        sys.exit()


def begin_rounds() -> None:
    """Compiled programs work in the next round, and their errors are those of that round."""
    add = jax.jit(lambda x: rj.allreduce(x, name="rounds"))
    for _ in range(3):
        assert np.asarray(add(jnp.ones(2))).tolist() == [2.0, 2.0]
    group = ronde.add_group([0, 1])
    in_group = jax.jit(lambda x: rj.allreduce(x, group=group))
    assert np.asarray(in_group(jnp.ones(1))).tolist() == [2.0]
    ronde.shutdown()
    ronde.init()
    assert np.asarray(add(jnp.ones(2))).tolist() == [2.0, 2.0]
    try:
        jax.block_until_ready(in_group(jnp.ones(1)))
    except jax.errors.JaxRuntimeError as error:
        write(describe(error))


def go_on_after_a_loss(donates: bool = False) -> None:
    """Elastic: rank 1 of 3 dies in the middle of a step. The next round begins with that step, or with the commit
    before if the step has given its memory away. An allgather is compiled again for two ranks."""
    optimizer = optax.chain(rj.average_gradients(), optax.sgd(0.1))
    params = {"w": jnp.ones(2000)}
    state = State(params=params, opt_state=optimizer.init(params), step=0)

    def die_once(step: Any) -> Any:
        if ronde.rank() == 1 and step == 3 and not (FOLDER / "killed").exists():
            (FOLDER / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step

    def train_step(params: Any, opt_state: Any, step: Any) -> Any:
        step = jax.pure_callback(die_once, jax.ShapeDtypeStruct((), jnp.float32), step)
        gradients = {"w": jnp.ones(2000) + 0.0 * step}
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        rows = rj.allgather(step.reshape(1), name="steps")
        return optax.apply_updates(params, updates), opt_state, rows

    compiled = jax.jit(train_step, donate_argnums=(0, 1) if donates else ())

    def train(state: Any) -> None:
        while state.step < 6:
            state.params, state.opt_state, rows = compiled(state.params, state.opt_state, jnp.float32(state.step))
            assert np.asarray(rows).tolist() == [float(state.step)] * ronde.size()
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
            else:
                state.end_step()

    run(train, state)
    write(f"{state.step} steps, {float(state.params['w'][0]):.1f}")


def give_memory_away_and_go_on() -> None:
    go_on_after_a_loss(donates=True)


CASES: dict[str, Callable[[], None]] = {
    "step": lose_a_rank_in_a_step,
    "timeout": time_out,
    "shutdown": functools.partial(end_while_programs_run, calls_shutdown=True),
    "exit": functools.partial(end_while_programs_run, calls_shutdown=False),
    "rounds": begin_rounds,
    "elastic": go_on_after_a_loss,
    "donated": give_memory_away_and_go_on,
}
ronde.init()
CASES[CASE]()
ronde.shutdown()
