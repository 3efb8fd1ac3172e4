"""Elastic states of models and optimizers, and arrays that are dealt out. Jobs that lose ranks are in
tests/jobs/test_elastic_tensorflow.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import ronde
import ronde.elastic
from ronde.comm.buffers import Array
from ronde.data import Stream
from ronde.elastic import State
from ronde.keras import DistributedOptimizer, StreamPyDataset, shard
from ronde.keras.callbacks import TrackState
from tests.jobs.keras_checks.common import (
    BACKEND,
    LOSS,
    SHARE,
    assert_close,
    assert_different,
    assert_same_on_all_ranks,
    data,
    error_of,
    mine,
    values,
)
from tests.unit.data.made_data import data_of_all_ranks


def make_model(optimizer: Any) -> tuple[Any, State]:
    """A model with statistics and random numbers, compiled, and its State."""
    keras.utils.set_random_seed(3 + ronde.rank())
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((8,)), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(3, dtype="float32")]
    )
    model.compile(DistributedOptimizer(optimizer, compare_at_step=0), LOSS)
    return model, State(model=model, optimizer=model.optimizer, epoch=0)


def train(model: Any, step: int) -> None:
    rows = slice(step * SHARE, (step + 1) * SHARE)
    model.train_on_batch(mine(data()[0])[rows], mine(data()[1])[rows])


def variables_of(model: Any) -> list[Array]:
    """All but metrics."""
    metrics = {id(each) for each in model.metrics_variables}
    found = [each for each in model.variables if id(each) not in metrics]
    return [each.copy() for each in values([*found, *model.optimizer.variables])]


def check_a_state_is_made_equal_and_returns_to_its_commit() -> None:
    model, state = make_model(keras.optimizers.Adam(0.1))
    state.sync()
    assert_same_on_all_ranks([np.asarray(each) for each in model.get_weights()])
    train(model, 0)
    assert state.has_stepped()
    state.epoch = 4
    state.commit()
    committed = variables_of(model)
    train(model, 1)
    state.end_step()
    state.epoch = 5
    assert_different(variables_of(model), committed)
    state.restore()
    assert_close(variables_of(model), committed, rtol=0.0, atol=0.0)
    assert (state.epoch, state.steps) == (4, 1)


def check_what_a_forward_pass_has_changed_returns_to_the_end_of_the_step() -> None:
    model, state = make_model(keras.optimizers.SGD(0.1, momentum=0.9))
    state.sync()
    train(model, 0)
    state.end_step()
    at_end = variables_of(model)
    model(mine(data()[0])[:SHARE], training=True)
    model.optimizer.learning_rate = 0.5
    assert not state.has_stepped()
    assert_different(variables_of(model), at_end)
    state.undo_step()
    assert_close(variables_of(model), at_end, rtol=0.0, atol=0.0)


def check_accumulated_passes_are_one_step_of_a_state() -> None:
    model, state = make_model(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    state.sync()
    stepped = []
    at_end = variables_of(model)
    for step in range(3):
        train(model, step)
        stepped.append(state.has_stepped())
        if stepped[-1]:
            state.end_step()
            at_end = variables_of(model)
    assert stepped == [False, True, False]
    state.undo_step()
    assert_close(variables_of(model), at_end, rtol=0.0, atol=0.0)


def check_a_skipped_step_of_a_loss_scale_is_a_step_of_a_state() -> None:
    model, state = make_model(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    state.sync()
    x, y = mine(data()[0])[:SHARE], mine(data()[1])[:SHARE]
    model.train_on_batch(np.full_like(x, np.inf), y)
    assert state.has_stepped()
    state.end_step()
    assert not state.has_stepped()


def check_a_state_tells_what_it_lacks() -> None:
    model, _ = make_model("sgd")
    state = State(model=model)
    text = error_of(lambda: ronde.elastic.run(lambda state: None, state))
    assert "add State(optimizer=model.optimizer" in text
    assert "not built" in error_of(lambda: State(model=keras.Sequential([keras.layers.Dense(1)])))
    assert "not clear for which model" in error_of(lambda: State(optimizer=keras.optimizers.SGD(0.1)).sync())


def check_arrays_are_dealt_out_once_for_any_batch() -> None:
    x = np.arange(23)
    for ends, num_batches in (("pad", 5), ("drop", 4), ("uneven", 5)):
        sharded = shard((x, x), global_batch=5, ends=ends, seed=2)
        assert len(sharded) == num_batches
        for epoch in range(2):
            assert sharded.epoch == epoch
            batches = [found for found, _ in sharded]
            gathered = ronde.allgather(np.concatenate(batches)).tolist()
            expected = 20 if ends == "drop" else 23
            assert len(gathered) == len(set(gathered)) == expected, gathered
    sharded = shard((x, x), global_batch=5, seed=2)
    whole = [found.tolist() for found, _ in shard((x, x), global_batch=5, seed=2)]
    for index, (found, _) in enumerate(sharded):
        assert found.tolist() == whole[index]
        if index == 1:
            break
    assert sharded.consumed == 5, "the batch under way does not count"
    resumed = shard((x, x), global_batch=5, seed=2)
    resumed.load_state_dict(sharded.state_dict())
    assert [found.tolist() for found, _ in resumed] == whole[1:]
    assert "one sample for each of" in error_of(lambda: shard((x, x), global_batch=1).global_batch)
    assert "shuffle=False" in error_of(lambda: fit_shuffled(x))


def check_every_epoch_of_fit_has_an_order_of_its_own() -> None:
    x = np.arange(40, dtype="float32")[:, None]
    sharded = shard((x, x), global_batch=8, seed=1)
    seen: list[float] = []
    get_batch = sharded._get_batch

    def record(*position: Any) -> Any:
        batch = get_batch(*position)
        seen.extend(batch[0][:, 0].tolist())
        return batch

    sharded._get_batch = record  # type: ignore[assignment, method-assign]
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=BACKEND != "jax")
    model.fit(sharded, epochs=3, shuffle=False, verbose=0)
    assert sharded.epoch == 3
    share = [seen[-60:][start : start + 20] for start in (0, 20, 40)]  # Keras may look at a batch before
    assert share[0] != share[1] != share[2]


def fit_shuffled(x: Array) -> None:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=BACKEND != "jax")
    rows = np.tile(x[:, None].astype("float32"), (20, 1))
    model.fit(shard((rows, rows), global_batch=4), verbose=0)


def check_fit_counts_batches_and_epochs_in_the_state() -> None:
    model, _ = make_model(keras.optimizers.SGD(0.1))
    x, y = data()
    sharded = shard((x, y), global_batch=SHARE * ronde.size(), seed=1)
    state = State(model=model, optimizer=model.optimizer, data=sharded, epoch=0, batch=0)
    state.sync()
    seen: list[tuple[int, int, int]] = []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((state.epoch, state.batch, sharded.consumed))

    callbacks = [Record(), TrackState(state, commit_every=3)]
    model.fit(sharded, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    batch = SHARE * ronde.size()
    assert seen == [(epoch, index, index * batch) for epoch in range(2) for index in range(4)], seen
    assert (state.steps, state.epoch, state.batch, sharded.epoch) == (8, 2, 0, 2)
    assert "commit_every" in error_of(lambda: TrackState(state, commit_every=0))


def check_fit_takes_a_stream_and_every_epoch_has_all_samples() -> None:
    with data_of_all_ranks([30, 0, 9]) as folder:
        seen: list[int] = []

        def make_pair(sample: dict[str, Any]) -> tuple[Any, Any]:
            seen.append(sample["number"])
            row = np.array([sample["number"]], "float32")
            return row, row

        stream = Stream(folder, global_batch=6, seed=3, transform=make_pair, num_threads=0)
        batches = StreamPyDataset(stream)
        assert len(batches) == 7
        assert batches[3][0].tolist() == batches[3][0].tolist() != batches[4][0].tolist()
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
        model.fit(batches, epochs=1, verbose=0, shuffle=False)
        for epoch in (1, 2):
            assert (stream.epoch, stream.consumed) == (epoch, 0)
            seen.clear()
            model.fit(batches, epochs=1, verbose=0, shuffle=False)
            assert set(ronde.allgather(np.array(seen)).tolist()) == set(range(39))
        assert "no batch 99" in error_of(lambda: batches[99])
