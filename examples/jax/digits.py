"""digits.py: plain JAX with optax on two ranks.

    ronde run -np 2 python examples/jax/digits.py

With --checkpoints FOLDER it goes on from the latest checkpoint there.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import ronde
import ronde.jax

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--checkpoints", help="a folder for checkpoints, one for each epoch")
options = parser.parse_args()

ronde.init()
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))  # the same on every rank
x, y = digits.data[order].astype(np.float32) / 16, digits.target[order]
data = ronde.jax.shard((x[:1500], y[:1500]), global_batch=64, seed=1, ends="drop")
rank, size = ronde.rank(), ronde.size()
x_test, y_test = x[1500 + rank :: size], y[1500 + rank :: size]  # one rank may have more


def make_params(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (64, 256)) / 8,
        "b1": jnp.zeros(256),
        "w2": jax.random.normal(second, (256, 10)) / 16,
        "b2": jnp.zeros(10),
    }


def predict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def compute_loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()


optimizer = optax.chain(ronde.jax.average_gradients(), optax.adam(2e-3))
params = ronde.jax.broadcast_parameters(make_params(jax.random.key(rank)))
state = optimizer.init(params)


@jax.jit
def train_step(params: dict[str, jax.Array], state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, gradients = jax.value_and_grad(compute_loss)(params, x, y)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


checkpoints = ronde.jax.Checkpoints(options.checkpoints) if options.checkpoints else None
if checkpoints and (restored := checkpoints.restore({"params": params, "state": state})):
    params, state = restored.tree["params"], restored.tree["state"]
    data.set_epoch(restored.step)
    if rank == 0:
        print(f"going on after epoch {restored.step}")

while data.epoch < options.epochs:
    losses = []
    for batch in data:
        params, state, loss = train_step(params, state, *batch)
        losses.append(loss)
    means = ronde.jax.average_metrics({"loss": jnp.stack(losses).mean()})
    if rank == 0:
        print(f"epoch {data.epoch}: loss {means['loss']:.3f}")
    if checkpoints:
        checkpoints.save(data.epoch, {"params": params, "state": state})

accuracy = (predict(params, x_test).argmax(axis=1) == y_test).mean()
scores = ronde.jax.average_metrics({"accuracy": accuracy}, count=len(x_test))
if rank == 0:
    print(f"test accuracy with {size} rank(s): {100 * scores['accuracy']:.1f}%")
ronde.shutdown()
