"""Datasets that are dealt out, variables in a State, and metrics of all ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import ronde
import ronde.tensorflow as rt
from ronde.data import Stream
from ronde.elastic import State
from tests.jobs.tensorflow_checks.checks import check, in_graph
from tests.unit.data.made_data import data_of_all_ranks


def gather(batches: list[Any]) -> list[int]:
    """The elements of all ranks."""
    mine = np.concatenate([np.asarray(each) for each in batches]) if batches else np.zeros(0, np.int64)
    return sorted(ronde.allgather(mine).tolist())


@check
def every_element_is_dealt_out_once_in_each_epoch() -> None:
    tf.random.set_seed(ronde.rank())  # which has no effect
    for length, is_known in ((24, True), (23, True), (23, False)):
        source = tf.data.Dataset.range(length)
        source = source if is_known else source.filter(lambda element: element >= 0)
        for shuffle in (0, 7, length):
            data = rt.shard(source, global_batch=6, shuffle=shuffle, seed=3)
            orders = []
            for epoch in range(2):
                assert data.epoch == epoch
                batches = [batch.numpy() for batch in data]
                assert len(set(ronde.allgather(np.array([len(batches)])).tolist())) == 1
                assert gather(batches) == list(range(length))
                orders.append([batch.tolist() for batch in batches])
            assert (orders[0] != orders[1]) == bool(shuffle)


@check
def the_last_elements_are_dealt_out_as_the_policy_says() -> None:
    source = tf.data.Dataset.range(9)  # one element is left over
    padded = [batch.numpy() for batch in rt.shard(source, global_batch=4)]
    assert len(padded) == 3 and gather(padded) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]
    dropped = [batch.numpy() for batch in rt.shard(source, global_batch=4, ends="drop")]
    assert len(dropped) == 2 and gather(dropped) == list(range(8))
    total = 0.0
    for batch in rt.shard(source, per_rank_batch=2, ends="uneven"):
        total = float(rt.allreduce(tf.reduce_sum(batch), name="uneven"))
    rt.join()
    assert total == (8 if ronde.rank() == 0 else 4 + 5 + 6 + 7)


class Sample(NamedTuple):
    image: Any
    label: Any


@check
def elements_keep_their_structure() -> None:
    x = np.arange(8)
    structures: list[Any] = [x, (x,), (x, x), {"a": x}, ({"a": (x,)}, x), Sample(x, x)]
    for structure in structures:
        source = tf.data.Dataset.from_tensor_slices(structure)
        batches = list(rt.shard(source, global_batch=4))
        assert len(batches) == 2
        for batch in batches:
            tf.nest.assert_same_structure(batch, structure)
            assert type(batch) is type(next(iter(source.batch(2))))


@check
def elements_of_any_structure_are_mapped_by_their_rank_only() -> None:
    source = tf.data.Dataset.from_tensor_slices({"a": np.arange(8), "b": np.arange(16).reshape(8, 2)})
    data = rt.shard(source, global_batch=4, map=lambda each: (each["a"] * 10, each))
    batches = list(data)
    assert gather([tens for tens, _ in batches]) == list(range(0, 80, 10))
    assert batches[0][1]["b"].shape == (2, 2)


@check
def a_position_is_valid_for_another_number_of_ranks() -> None:
    source = tf.data.Dataset.range(20)
    data = rt.shard(source, global_batch=4, shuffle=20, seed=1)
    seen = []
    for batch in data:
        seen.append(batch.numpy())
        if len(seen) == 3:
            break
    assert (data.epoch, data.consumed) == (0, 8), "the batch under way does not count"
    state = data.state_dict()
    alone = rt.shard(source, global_batch=4, shuffle=20, seed=1, group=ronde_of_one())
    alone.load_state_dict(state)
    rest = [batch.numpy() for batch in alone]
    assert len(rest) == 3
    assert sorted([*gather(seen[:2]), *np.concatenate(rest).tolist()]) == list(range(20))
    with pytest.raises(ValueError, match="the saved order had seed=1, here 2"):
        rt.shard(source, global_batch=4, shuffle=20, seed=2).load_state_dict(state)


@check
def a_checkpoint_behind_a_step_goes_on_with_the_next_batch() -> None:
    data = rt.shard(tf.data.Dataset.range(20), global_batch=4)
    weight = tf.Variable(0.0)
    positions = []

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step() -> None:
        weight.assign_sub(rt.reduce_gradients([tf.constant(1.0)], [weight])[0])

    for _ in data:
        before = data.state_dict()
        step()
        positions.append((before["consumed"], data.state_dict()["consumed"], data.consumed))
    assert positions == [(4 * index, 4 * index + 4, 4 * index) for index in range(5)]
    assert data.state_dict()["epoch"] == 1


def ronde_of_one() -> Any:
    """A group of this rank only."""
    return [ronde.add_group([rank]) for rank in range(ronde.size())][ronde.rank()]


@check
def mistakes_with_data_are_told() -> None:
    source = tf.data.Dataset.range(20)
    for make, told in (
        (lambda: rt.shard(source.shuffle(5), global_batch=4), "leave its shuffle"),
        (lambda: rt.shard(source.shuffle(5, reshuffle_each_iteration=False), global_batch=4), "leave its shuffle"),
        (lambda: rt.shard(source.repeat(), global_batch=4), "has no end"),
        (lambda: rt.shard(source, global_batch=4, per_rank_batch=2), "either global_batch or"),
        (lambda: rt.shard(source, global_batch=4, ends="none"), "ends must be one of"),
        (lambda: rt.shard(source.filter(lambda _: True), global_batch=4, shuffle=True), "pass the size of the buffer"),
        (lambda: list(rt.shard(source, global_batch=40, ends="drop")), "less than one global batch"),
        (lambda: list(rt.shard(source, global_batch=1)), "one sample for each of 2 ranks"),
    ):
        with pytest.raises(ValueError, match=told):
            make()


@check
def variables_of_a_state_return_to_the_step_end_and_to_the_commit() -> None:
    weight, count = tf.Variable([float(ronde.rank())]), tf.Variable(0)
    data = rt.shard(tf.data.Dataset.range(8), global_batch=2)
    state = State(variables=[weight, count], data=data)
    state.sync()
    assert weight.numpy() == [0.0]

    @in_graph
    def step() -> None:
        count.assign_add(1)
        (gradient,) = rt.reduce_gradients([tf.ones([1])], [weight])
        weight.assign_add(gradient)

    for index, _ in enumerate(data):
        step()
        assert state.has_stepped()
        if index == 1:
            state.commit()
    assert (state.steps, data.epoch) == (4, 1)
    count.assign(9)
    assert not state.has_stepped()
    state.undo_step()
    assert (weight.numpy().tolist(), int(count), data.epoch, data.consumed) == ([4.0], 4, 1, 0)
    state.restore()
    assert (weight.numpy().tolist(), int(count), data.epoch, data.consumed) == ([2.0], 2, 0, 4)


@check
def metrics_of_keras_are_averaged_for_a_summary() -> None:
    mean = tf.keras.metrics.Mean()
    mean.update_state([1.0, 3.0] if ronde.rank() == 0 else [5.0])
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    accuracy.update_state([0, 1], [[1.0, 0.0], [1.0, 0.0]])
    found = rt.average_metrics({"loss": mean, "accuracy": accuracy}, count=2 if ronde.rank() == 0 else 1)
    assert found == {"loss": 3.0, "accuracy": 0.5}
    if ronde.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            writer = tf.summary.create_file_writer(folder)
            with writer.as_default():
                for name, value in found.items():
                    tf.summary.write(name, value, step=1)  # scalar() needs TensorBoard
            writer.close()
            (file,) = Path(folder).iterdir()
            written = [
                (value.tag, float(tf.make_ndarray(value.tensor)))
                for event in tf.data.TFRecordDataset(str(file))
                for value in tf.compat.v1.Event.FromString(event.numpy()).summary.value
            ]
        assert written == [("loss", 3.0), ("accuracy", 0.5)]


@check
def a_stream_is_a_dataset_that_goes_on_where_the_stream_is() -> None:
    with data_of_all_ranks([9, 0, 14]) as folder:
        stream = Stream(folder, global_batch=4, seed=1)
        dataset = rt.stream_dataset(stream)
        assert dataset.element_spec["number"].shape.as_list() == [None]
        assert dataset.element_spec["__key__"].dtype == tf.string
        for _ in range(2):
            plain = Stream(folder, global_batch=4, seed=1)
            plain.set_epoch(stream.epoch)
            batches = [batch["number"].numpy() for batch in dataset]
            assert [batch.tolist() for batch in batches] == [batch["number"].tolist() for batch in plain]
            assert set(gather(batches)) == set(range(23))
            stream.set_epoch(stream.epoch + 1)
        stream.load_state_dict({**stream.state_dict(), "consumed": 20})
        assert len(list(dataset)) == 1
