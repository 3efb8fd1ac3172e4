"""Training with JAX: gradients, parameters, checkpoints, data and metrics."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ronde
import ronde.jax as rj
import ronde.ps
from ronde.errors import CheckpointError, OutOfSync

ROWS = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)


def make_parameters() -> dict[str, Any]:
    return {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}


def compute_loss(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params["w"] + params["b"] - 1.0) ** 2)


def train(optimizer: Any, rows: Any, num_steps: int = 4) -> Any:
    params = make_parameters()
    state = optimizer.init(params)

    def train_step(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(compute_loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(train_step)

    for number in range(num_steps):
        part = len(rows) // num_steps
        params, state = step(params, state, rows[number * part : (number + 1) * part])
    return params


def check_training_is_that_of_one_process_with_all_the_data() -> None:
    mine = ROWS.reshape(4, 2, 4, 4)[:, ronde.rank()].reshape(-1, 4)
    alone = train(optax.adam(0.1), ROWS)
    for codec, tolerance in ((None, 1e-5), ("bfloat16", 0.05), ("float16", 0.01)):
        together = train(optax.chain(rj.average_gradients(codec=codec), optax.adam(0.1)), mine)
        for name in alone:
            np.testing.assert_allclose(together[name], alone[name], rtol=tolerance, atol=tolerance)
        rj.check_in_sync(together)
    summed = train(optax.chain(rj.average_gradients(op="sum"), optax.scale(-0.1)), mine)
    averaged = train(optax.chain(rj.average_gradients(predivide=2.0), optax.scale(-0.2)), mine)
    np.testing.assert_allclose(summed["w"], averaged["w"], rtol=1e-5)


def check_a_step_may_be_in_a_program_twice() -> None:
    """Neither step needs the other, and each rank comes to another one first. Parameters are compared in one."""
    optimizer = optax.chain(rj.average_gradients(name="twice"), optax.sgd(0.1))

    def train_step(params: Any, num_rounds: Any, factor: float) -> Any:
        slow = jax.lax.fori_loop(0, num_rounds, lambda _, y: jnp.tanh(y @ y) * 0.0 + y, jnp.ones((200, 200)))
        gradients = jax.grad(lambda p: (p * (ronde.rank() + 1.0) * slow[0, 0] * factor).sum())(params)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    step = jax.jit(train_step)
    rounds, params = (1, 50) if ronde.rank() else (50, 1), jnp.zeros(3)
    twice = jax.jit(lambda params, first, second: step(step(params, first, 1.0), second, 3.0))
    for _ in range(4):
        params = twice(params, *rounds)
    np.testing.assert_allclose(params, np.full(3, -0.1 * 1.5 * 4 * 4), rtol=1e-5)


def check_gradients_of_other_shapes_and_types_under_the_same_name() -> None:
    """As many bytes, so they would fit into the memory of those before."""
    average = rj.average_gradients(name="other shapes", compare_at_step=0)
    compute = jax.jit(lambda gradients: average.update(gradients, ())[0])
    kinds: list[Any] = [((6,), jnp.float32), ((2, 3), jnp.float32), ((12,), jnp.bfloat16), ((12,), jnp.float16)]
    for shape, dtype in kinds * 2:
        for number in range(3):
            found = np.asarray(compute(jnp.full(shape, 4.0 * number + 2 * ronde.rank(), dtype)), np.float32)
            assert (found == 4.0 * number + 1.0).all(), (shape, dtype, number, found)


def check_an_optimizer_that_is_gone_on_one_rank_only_may_be_made_again() -> None:
    def make_function(name: str) -> Any:
        average = rj.average_gradients(name=name)
        return jax.jit(lambda gradients: average.update(gradients, ())[0])

    def use(function: Any, num_rows: int) -> None:
        for number in range(3):
            found = np.asarray(function(jnp.full(num_rows, 4.0 * number + 2 * ronde.rank())))
            assert (found == 4.0 * number + 1.0).all(), (number, found)

    for is_kept in (bool(ronde.rank()), False):
        first = make_function("gone")
        use(first, 5)
        kept = first if is_kept else None
        del first
        gc.collect()
        use(make_function("meanwhile"), 7)
        use(make_function("gone"), 5)
        del kept


def check_a_program_goes_on_in_the_next_round() -> None:
    """Of two operations one opens its plan first, when the other has copied its gradients."""
    first, second = (rj.average_gradients(name=name, compare_at_step=0) for name in ("next round", "beside"))
    compute = jax.jit(lambda x: (first.update(x, ())[0], second.update(x * 2.0, ())[0]))
    for _ in range(3):
        for number in range(4):
            found, doubled = map(np.asarray, compute(jnp.full(6000, 4.0 * number + 2 * ronde.rank())))
            assert (found == 4.0 * number + 1.0).all() and (doubled == 8.0 * number + 2.0).all(), (
                number,
                found,
                doubled,
            )
        ronde.shutdown()
        ronde.init()


def check_optimizers_of_one_name_in_different_programs_count_their_own_steps() -> None:
    """Rank 1 traces a program once more than rank 0. Both compare the parameters in the same step."""

    def make_step() -> Any:
        optimizer = optax.chain(rj.average_gradients(name="shared", compare_at_step=3), optax.sgd(0.1))

        def train_step(params: Any, x: Any) -> Any:
            gradients = jax.grad(lambda p: (p * x.sum()).sum())(params)
            updates, _ = optimizer.update(gradients, optimizer.init(params), params)
            return optax.apply_updates(params, updates)

        return jax.jit(train_step)

    first, second = make_step(), make_step()
    params = jnp.zeros(3)
    for step, num_rows in ((first, 2), (first, 2), (second, 2), (first, 2 + ronde.rank()), (second, 2), (second, 2)):
        params = step(params, jnp.full(num_rows, 2.0 / num_rows))
    np.testing.assert_allclose(params, np.full(3, -1.2), rtol=1e-5)


def check_value_and_grad() -> None:
    params, mine = make_parameters(), jnp.asarray(ROWS[ronde.rank() :: 2])
    for compute in (rj.value_and_grad(compute_loss), jax.jit(rj.value_and_grad(compute_loss))):
        value, gradients = compute(params, mine)
        own, _ = jax.value_and_grad(compute_loss)(params, mine)
        wanted = jax.grad(compute_loss)(params, jnp.asarray(ROWS))
        np.testing.assert_allclose(value, own, rtol=1e-6)
        np.testing.assert_allclose(gradients["w"], wanted["w"], rtol=1e-5)
    both = rj.value_and_grad(lambda x, y: ((x * y).sum(), 7), argnums=(0, 1), has_aux=True)
    (value, extra), (by_x, by_y) = both(jnp.ones(2), jnp.full(2, ronde.rank() + 1.0))
    assert (float(value), extra) == (2.0 * (ronde.rank() + 1), 7)
    assert np.asarray(by_x).tolist() == [1.5, 1.5] and np.asarray(by_y).tolist() == [1.0, 1.0]


def check_parameters_that_differ_are_found_in_the_second_step() -> None:
    params = {"w": jnp.full((4, 3), ronde.rank() + 1.0), "b": jnp.zeros(3)}
    compute = jax.jit(rj.value_and_grad(compute_loss, name="differ"))
    jax.block_until_ready(compute(params, ROWS))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(compute(params, ROWS))
    found = rj.find_error(caught.value)
    assert isinstance(found, OutOfSync) and "['w']" in str(found), repr(found)


def check_parameters_are_those_of_the_root() -> None:
    rank = ronde.rank()
    tree = {
        "array": jnp.full(3, float(rank)),
        "half": jnp.full(2, rank, jnp.bfloat16),
        "numpy": np.full(2, rank),
        "key": jax.random.key(rank),
        "number": rank,
        "function": jnp.sin,
    }
    found = rj.broadcast_parameters(tree, root=1)
    assert np.asarray(found["array"]).tolist() == [1.0] * 3 and found["half"].dtype == jnp.bfloat16
    assert found["numpy"].tolist() == [1, 1] and found["number"] == 1 and found["function"] is jnp.sin
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(jax.random.key(1)).tolist()
    model = equinox.nn.MLP(2, 1, 8, 2, key=jax.random.key(rank))
    rj.check_in_sync(rj.broadcast_parameters(model))
    with pytest.raises(OutOfSync):
        rj.check_in_sync(model)
    with pytest.raises(ronde.Mismatch, match="broadcast_parameters"):
        rj.broadcast_parameters(jnp.ones(2 + rank))


def check_checkpoints_of_any_tree() -> None:
    folder = rj.broadcast_object(tempfile.mkdtemp(prefix="ronde-jax-") if ronde.rank() == 0 else None)
    model = equinox.nn.MLP(2, 1, 8, 2, key=jax.random.key(3))
    optimizer = optax.adam(0.1)
    tree = {
        "model": model,
        "state": optimizer.init(equinox.filter(model, equinox.is_array)),
        "half": jnp.ones(2, jnp.bfloat16) * 3,
        "key": jax.random.key(5),
        "epoch": 4,
    }
    saved = rj.Checkpoints(folder, keep=2)
    assert saved.restore(tree) is None
    for step in (1, 2, 3):
        saved.save(step, {**tree, "epoch": step})
    ronde.barrier()
    other = jax.tree.map(lambda leaf: leaf * 0 if equinox.is_inexact_array(leaf) else leaf, tree)
    restored = saved.restore({**other, "key": jax.random.key(0)})
    assert restored is not None and restored.step == 3 and restored.tree["epoch"] == 3
    assert np.asarray(restored.tree["half"]).astype(float).tolist() == [3.0, 3.0]
    assert jax.random.key_data(restored.tree["key"]).tolist() == jax.random.key_data(jax.random.key(5)).tolist()
    x = jnp.ones(2)
    assert np.asarray(restored.tree["model"](x)).tolist() == np.asarray(model(x)).tolist()
    assert saved.steps() == [2, 3]
    with pytest.raises(CheckpointError, match=r"\['half'\] is bfloat16\[2\] in it, and float32\[2\] here"):
        saved.restore({**tree, "half": jnp.ones(2)})
    with pytest.raises(CheckpointError, match="which the tree has not"):
        saved.restore({"half": tree["half"]})
    ronde.barrier()
    saved.clear()
    if ronde.rank() == 0:
        Path(folder).rmdir()


def check_data_and_metrics() -> None:
    data = rj.shard({"x": np.arange(10), "y": jnp.arange(10.0)}, global_batch=4, seed=1, ends="drop")
    seen: list[int] = []
    for batch in data:
        assert batch["x"].shape == (2,) and batch["x"].tolist() == np.asarray(batch["y"]).tolist()
        seen += batch["x"].tolist()
    everything = [row for rows in rj.allgather_object(seen) for row in rows]
    assert len(everything) == len(set(everything)) == 8 and data.epoch == 1 and len(data) == 2
    with pytest.raises(ValueError, match="equally many rows"):
        rj.shard((np.ones(3), np.ones(4)), global_batch=2)
    found = rj.average_metrics({"loss": jnp.asarray(float(ronde.rank()))}, count=1 + 2 * ronde.rank())
    assert found == {"loss": 0.75}


def check_a_parameter_server_in_sync_mode_trains_as_the_mean_of_all_gradients_does() -> None:
    mine = ROWS.reshape(4, 2, 4, 4)[:, ronde.rank()]
    optimizer = rj.AsyncOptimizer(make_parameters(), ronde.ps.SGD(lr=0.1), mode="sync")
    alone, params = train(optax.sgd(0.1), ROWS), optimizer.params
    gradients_of = jax.jit(jax.grad(compute_loss))
    for rows in mine:
        params = optimizer.step(gradients_of(params, rows))
    for name in alone:
        np.testing.assert_allclose(params[name], alone[name], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="must have the structure of the parameters"):
        optimizer.step({"w": params["w"]})
    optimizer.close()


def check_asynchronous_training_learns_with_every_sample_used_once() -> None:
    start = jax.tree.map(lambda leaf: leaf + ronde.rank(), make_parameters())  # those of rank 0 count
    optimizer = rj.AsyncOptimizer(start, ronde.ps.SGD(lr=0.05), mode="async")
    np.testing.assert_array_equal(optimizer.params["w"], make_parameters()["w"])
    gradients_of, num_used = jax.jit(jax.grad(compute_loss)), 0
    for epoch in range(30):
        for indices in optimizer.samples(len(ROWS), 4, epoch=epoch):
            optimizer.step(gradients_of(optimizer.params, ROWS[indices]))
            num_used += len(indices)
    ronde.barrier()
    assert compute_loss(optimizer.pull(), ROWS) < 0.2
    assert sum(ronde.objects.allgather(num_used)) == 30 * len(ROWS)
    optimizer.close()
