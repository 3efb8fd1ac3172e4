"""What most checks need: a small model, its data, and whether ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

import ronde
from ronde.comm.buffers import Array
from ronde.keras import DistributedOptimizer

BACKEND = keras.backend.backend()
NUM_STEPS = 4
SHARE = 8
"""Samples of a rank in a step."""
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data(num_steps: int = NUM_STEPS) -> tuple[Array, Array]:
    """The samples of all ranks, step by step."""
    source = np.random.default_rng(5)
    rows = num_steps * SHARE * ronde.size()
    return source.normal(size=(rows, 8)).astype("float32"), source.integers(0, 3, rows)


def mine(x: Array) -> Array:
    """This rank's samples of every step."""
    shares = x.reshape(-1, ronde.size(), SHARE, *x.shape[1:])
    return np.ascontiguousarray(shares[:, ronde.rank()]).reshape(-1, *x.shape[1:])


def perceptron(seed: int = 3) -> Any:
    """The same small model on every rank that has the same seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3, dtype="float32")]
    )


def fit(model: Any, optimizer: Any, *, epochs: int = 1, callbacks: Iterable[Any] = (), **options: Any) -> Any:
    """Train a model with this rank's samples; returns the history."""
    model.compile(optimizer, LOSS, **options)
    return fit_on(model, SHARE, mine, epochs=epochs, callbacks=callbacks)


def fit_alone(model: Any, optimizer: Any, *, epochs: int = 1) -> Any:
    """Train a model with the samples of all ranks, without ronde. With TensorFlow eagerly: a graph takes seconds."""
    model.compile(optimizer, LOSS, run_eagerly=BACKEND == "tensorflow")
    return fit_on(model, SHARE * ronde.size(), lambda x: x, epochs=epochs)


def fit_on(model: Any, batch_size: int, share: Callable[[Array], Array], **options: Any) -> Any:
    x, y = data()
    given = {**options, "callbacks": list(options.get("callbacks", ()))}
    return model.fit(share(x), share(y), batch_size=batch_size, shuffle=False, verbose=0, **given)


def assert_learns_like_one_process(make: Callable[[], Any], *, epochs: int = 2) -> Any:
    """All ranks learn what one process learns from the samples of all; returns the model."""
    ours, alone = perceptron(), perceptron()
    fit(ours, DistributedOptimizer(make()), epochs=epochs)
    fit_alone(alone, make(), epochs=epochs)
    assert_close(weights(ours), weights(alone))
    assert_same_on_all_ranks(weights(ours))
    return ours


def weights(model: Any) -> list[Array]:
    return [np.asarray(each) for each in model.get_weights()]


def values(variables: Iterable[Any]) -> list[Array]:
    return [np.asarray(keras.ops.convert_to_numpy(each.value)) for each in variables]


def assert_close(ours: Iterable[Array], theirs: Iterable[Array], *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=f"array {index}")


def assert_different(ours: Iterable[Array], theirs: Iterable[Array]) -> None:
    assert any((one != other).any() for one, other in zip(ours, theirs, strict=True))


def assert_same_on_all_ranks(arrays: Iterable[Array]) -> None:
    """Bit by bit."""
    for index, array in enumerate(arrays):
        gathered = ronde.allgather(array[None])
        assert (gathered == gathered[0]).all(), f"array {index} differs between ranks: {gathered}"


def error_of(function: Callable[[], Any]) -> str:
    """The text of the error that a call must raise, with that of its causes."""
    try:
        function()
    except Exception as error:
        texts = []
        found: BaseException | None = error
        while found is not None:
            texts.append(f"{type(found).__name__}: {found}")
            found = found.__cause__ or found.__context__
        return "\n".join(texts)
    raise AssertionError("no error was raised")
