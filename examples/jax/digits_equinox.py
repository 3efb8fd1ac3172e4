"""digits_equinox.py: Equinox on two ranks, in an elastic job: ranks may come and go.

ronde run -np 2 --min-np 1 python examples/jax/digits_equinox.py
"""

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import ronde
import ronde.jax
from ronde.elastic import State, run

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
options = parser.parse_args()

ronde.init()
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))  # the same on every rank
x, y = digits.data[order].astype(np.float32) / 16, digits.target[order]

model = eqx.nn.MLP(64, 10, 256, 1, key=jax.random.key(0))
optimizer = optax.chain(ronde.jax.average_gradients(), optax.adam(2e-3))
state = State(
    model=model,
    opt_state=optimizer.init(eqx.filter(model, eqx.is_inexact_array)),
    data=ronde.jax.shard((x[:1500], y[:1500]), global_batch=64, seed=1, ends="drop"),
)


def compute_loss(model: eqx.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


@eqx.filter_jit
def train_step(model: eqx.Module, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
    loss, gradients = eqx.filter_value_and_grad(compute_loss)(model, x, y)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss


def train(state: State) -> None:
    while state.data.epoch < options.epochs:
        losses = []
        for batch in state.data:
            state.model, state.opt_state, loss = train_step(state.model, state.opt_state, *batch)
            losses.append(loss)
        state.commit()
        means = ronde.jax.average_metrics({"loss": jnp.stack(losses).mean()} if losses else {}, count=len(losses))
        if ronde.rank() == 0:
            print(f"epoch {state.data.epoch} with {ronde.size()} rank(s): loss {means['loss']:.3f}")


run(train, state)
x_test, y_test = x[1500 + ronde.rank() :: ronde.size()], y[1500 + ronde.rank() :: ronde.size()]
accuracy = (jax.vmap(state.model)(x_test).argmax(axis=1) == y_test).mean()
scores = ronde.jax.average_metrics({"accuracy": accuracy}, count=len(x_test))
if ronde.rank() == 0:
    print(f"test accuracy with {ronde.size()} rank(s): {100 * scores['accuracy']:.1f}%")
ronde.shutdown()
