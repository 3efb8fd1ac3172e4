"""Gradients: training is that of one process with the whole batch, in every way; buckets; mistakes."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ronde
import ronde.ps
import ronde.tensorflow as rt
from ronde.comm.world import current_world
from ronde.tensorflow.graph_operations import add_python_node
from ronde.tensorflow.operation_thread import get_ops
from ronde.tensorflow.plan_channels import plan_channels
from ronde.training.graph_operations import GraphOperation
from tests.jobs.tensorflow_checks.checks import check, count_python_ranks, in_graph, make_session

v1 = tf.compat.v1
RATE = 0.125
"""Exact also as the float32 of an optimizer."""
DIFFERENT = r"rank 0: bucket 0 of 1.*: .*'dense/kernel.*rank 1: bucket"
SMALL: dict[str, Any] = {"bucket_mb": 0.0005}
"""Settings with many buckets."""


def initial_weights() -> list[Any]:
    random = np.random.default_rng(3)
    shapes = [(10, 20), (20,), (20, 15), (15,), (15, 3), (3,)]
    return [random.normal(size=shape) * 0.3 for shape in shapes]


def predict(weights: Any, x: Any) -> Any:
    for kernel, bias in zip(weights[0:4:2], weights[1:4:2], strict=True):
        x = tf.tanh(x @ kernel + bias)
    return x @ weights[4] + weights[5]


def batch(step: int, rank: int | None = None) -> tuple[Any, Any]:
    """The samples of a step: those of one rank, or all."""
    random = np.random.default_rng(100 + step)
    x, y = random.normal(size=(8, 10)), random.normal(size=(8, 3))
    rows = slice(None) if rank is None else slice(rank * 4, rank * 4 + 4)
    return x[rows], y[rows]


def loss_of(weights: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((predict(weights, x) - y) ** 2)


def train_alone(num_steps: int) -> list[Any]:
    """The weights of one process that trains on all samples."""
    weights = [tf.Variable(each) for each in initial_weights()]
    for step in range(num_steps):
        with tf.GradientTape() as tape:
            loss = loss_of(weights, *batch(step))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(RATE * gradient)
    return [weight.numpy() for weight in weights]


def assert_trained(weights: Any, num_steps: int) -> None:
    for mine, expected in zip(weights, train_alone(num_steps), strict=True):
        np.testing.assert_allclose(np.asarray(mine), expected, rtol=1e-12, atol=1e-14)


def make_step(weights: Any, rate: float = RATE, **options: Any) -> Callable[[Any, Any], Any]:
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(weights, x, y)
        tape = rt.DistributedGradientTape(tape, **options)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(rate * gradient)
        return rt.allreduce(loss, op="mean")

    return step


@check
def training_is_that_of_one_process_with_the_whole_batch() -> None:
    for options in ({}, SMALL, {"op": "sum"}, {"predivide": 2.0}):
        for convert in (lambda step: step, tf.function):
            weights = [tf.Variable(each) for each in initial_weights()]
            rate = RATE / 2 if options.get("op") == "sum" else RATE
            step = convert(make_step(weights, rate, **options))
            for number in range(4):
                step(*map(tf.constant, batch(number, ronde.rank())))
            assert_trained(weights, 4)


@check
def training_in_a_graph_of_a_session() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        weights = [
            v1.get_variable(f"w{index}", initializer=each * (1.0 if ronde.rank() == 0 else 5.0))
            for index, each in enumerate(initial_weights())
        ]
        x, y = v1.placeholder(tf.float64, [4, 10]), v1.placeholder(tf.float64, [4, 3])
        optimizer = rt.DistributedOptimizer(v1.train.GradientDescentOptimizer(RATE), **SMALL)
        train = optimizer.minimize(loss_of(weights, x, y))
        session.run(v1.global_variables_initializer())
        session.run(rt.broadcast_variables(v1.global_variables(), root=0))
        for number in range(4):
            given, wanted = batch(number, ronde.rank())
            session.run(train, {x: given, y: wanted})
        trained = session.run(weights)
        assert optimizer.variables() == [] and optimizer.get_slot_names() == []
    assert_trained(trained, 4)


@check
def a_loop_inside_of_a_function_trains_too() -> None:
    weights = [tf.Variable(each) for each in initial_weights()]
    step = make_step(weights, **SMALL)
    x, y = (np.stack(each) for each in zip(*(batch(number, ronde.rank()) for number in range(4)), strict=True))

    @in_graph
    def train(x: Any, y: Any) -> Any:
        for number in tf.range(4):
            step(x[number], y[number])

    train(tf.constant(x), tf.constant(y))
    assert_trained(weights, 4)


@check
def a_rank_may_trace_its_step_again_alone() -> None:
    weights = [tf.Variable(each) for each in initial_weights()]
    step = tf.function(make_step(weights, **SMALL))
    for number in range(4):
        x, y = batch(number, ronde.rank())
        if ronde.rank() == 0 and number == 2:  # half of the batch, twice
            x, y = np.concatenate([x, x]), np.concatenate([y, y])
            step.get_concrete_function(tf.TensorSpec([2, 10], tf.float64), tf.TensorSpec([2, 3], tf.float64))
        step(tf.constant(x), tf.constant(y))
    assert_trained(weights, 4)


def count_bytes() -> int:
    """How many bytes of buckets this rank has reduced."""
    return ronde.metrics().of(0, "bucket").bytes


@check
def buckets_in_opposite_orders_do_not_deadlock() -> None:
    me = ronde.rank()
    variables = [tf.Variable(tf.zeros([500 + index])) for index in range(6)]

    @in_graph
    def compute(scale: Any) -> Any:
        gradients: list[Any] = [None] * 6
        last = scale
        for index in range(6) if me == 0 else reversed(range(6)):
            with tf.control_dependencies([last]):
                gradients[index] = tf.ones([500 + index]) * scale * float(index)
            last = gradients[index]
        return rt.reduce_gradients(gradients, variables, settings=rt.GradientSettings(bucket_mb=0.002))

    before = count_bytes()
    for _ in range(5):
        for index, each in enumerate(compute(tf.constant(me + 1.0))):
            assert each.numpy().tolist() == [1.5 * index] * (500 + index)
    assert count_bytes() - before == 5 * 4 * sum(500 + index for index in range(6))


@check
def plans_may_be_opened_in_any_order() -> None:
    variable, may_differ = tf.Variable([0.0, 0.0]), count_python_ranks() < 2

    @in_graph
    def compute(x: Any) -> Any:
        names = ["first", "second"]
        if ronde.rank() and may_differ:
            names.reverse()
        found = {name: rt.reduce_gradients([x * len(name)], [variable], name=name)[0] for name in names}
        return [found["first"], found["second"]]

    for _ in range(3):
        first, second = compute(tf.constant([1.0, 3.0]) * (ronde.rank() + 1.0))
        assert (first.numpy().tolist(), second.numpy().tolist()) == ([7.5, 22.5], [9.0, 27.0])


@check
def plans_in_a_branch_and_outside_are_not_mixed_up() -> None:
    if count_python_ranks() > 1:
        return  # such nodes wait for the other rank, and nothing says which comes first: the branch or what is outside
    me = ronde.rank()
    variables = [tf.Variable(tf.zeros([300])) for _ in range(4)]
    settings = rt.GradientSettings(bucket_mb=0.002)

    def train(x: Any, is_slow: bool, name: str) -> Any:
        ones = tf.ones([500, 500]) * x
        x = x + 0.0 * tf.reduce_sum(ones @ ones @ ones) if is_slow else x
        reduced = rt.reduce_gradients([tf.fill([300], x)] * 4, variables, settings=settings, name=name)
        return tf.stack([each[0] for each in reduced])

    for name in ("", "branches"):

        @in_graph
        def compute(x: Any, name: str = name) -> Any:
            first = train(x, me == 0, name)
            second = train(x * 10.0, me == 1, name)
            third = tf.cond(x > 0.0, lambda: train(x * 100.0, me == 1, name), lambda: tf.zeros([4]))
            return tf.stack([first, second, third])

        for _ in range(3):
            found = compute(tf.constant(me + 1.0)).numpy().tolist()
            assert found == [[1.5] * 4, [15.0] * 4, [150.0] * 4], (name, found)


@check
def reduced_gradients_have_gradients() -> None:
    me = ronde.rank()
    v, other = tf.Variable(3.0), tf.Variable([1.0, 2.0])

    def compute(codec: str | None = None, op: str = "mean") -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = (me + 1.0) * v**3 + tf.reduce_sum(other)
            tape = rt.DistributedGradientTape(inner, codec=codec, op=op)
            gradient, _ = tape.gradient(loss, [v, other])
            penalty = gradient**2 + v
        return outer.gradient(penalty, v)

    # The mean gradient is 1.5 * 3 v² = 40.5; the mean of 2 * 40.5 goes back to (me + 1) * 6 v.
    for convert in (lambda function: function, tf.function):
        for codec in (None, "bfloat16"):
            np.testing.assert_allclose(convert(compute)(codec).numpy(), 81.0 * 18.0 * (me + 1.0) + 1.0, rtol=0.02)
        assert float(convert(compute)()) == 81.0 * 18.0 * (me + 1.0) + 1.0
        with pytest.raises(NotImplementedError, match="reduced with op='adasum' have no gradients"):
            convert(compute)(None, "adasum")


@check
def what_has_no_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="compare_at_step has no effect on gradients of TensorFlow"):
        rt.DistributedGradientTape(tf.GradientTape(), compare_at_step=1)
    with pytest.raises(ValueError, match="got no variables: a model that is not built"):
        rt.broadcast_variables([])


@check
def graphs_are_freed() -> None:
    if count_python_ranks():
        return  # TensorFlow keeps what tf.custom_gradient has added to a graph
    variable = tf.Variable([1.0])

    def compute(x: Any) -> Any:
        add_python_node(lambda array: [array], [x], [tf.float32], [x.shape])
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = rt.allreduce(x)
        return rt.reduce_gradients([x * 2.0], [variable]), tape.gradient(total, x)

    function = tf.function(compute)
    function(tf.ones([1]))
    graph = weakref.ref(function.get_concrete_function(tf.TensorSpec([1])).graph)
    del function
    gc.collect()
    assert graph() is None


@check
def gradients_that_travel_together_are_known_by_their_places() -> None:
    """Names of layers count what a process has built before, so they may differ between ranks."""
    variables = [tf.Variable([0.0], name=f"dense_{ronde.rank() + number}/kernel") for number in range(3)]
    names = [each.name for each in variables]

    def compute(sets: Any) -> Any:
        settings = rt.GradientSettings(together=sets)
        return rt.reduce_gradients([tf.ones([1])] * 3, variables, settings=settings)

    for convert in (lambda function: function, tf.function):
        assert [float(each[0]) for each in convert(compute)((names[:2], names[2:]))] == [1.0] * 3
        with pytest.raises((ronde.Mismatch, tf.errors.OpError), match="asked for different things"):
            convert(compute)((names[:2],) if ronde.rank() else (names[1:],))


class Trained(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    """What a user saves: a model with its training step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable([1.0])

    @tf.function(input_signature=[tf.TensorSpec([1])])  # type: ignore[untyped-decorator]
    def step(self, x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = self.weight * x
        [gradient] = rt.DistributedGradientTape(tape).gradient(loss, [self.weight])
        self.weight.assign_sub(gradient)

    @tf.function(input_signature=[tf.TensorSpec([1])])  # type: ignore[untyped-decorator]
    def predict(self, x: Any) -> Any:
        return self.weight * x


@check
def a_module_with_its_training_step_can_be_saved() -> None:
    module = Trained()
    module.step(tf.constant([2.0 * ronde.rank()]))
    assert module.weight.numpy().tolist() == [0.0]
    module.weight.assign([3.0])
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        loaded = tf.saved_model.load(folder)
        assert loaded.predict(tf.constant([2.0])).numpy().tolist() == [6.0]


@check
def a_jacobian_is_that_of_the_rank() -> None:
    weight = tf.Variable([2.0, 3.0])
    with tf.GradientTape(persistent=True) as tape:
        y = weight * (1.0 + ronde.rank())
        rows = tf.reshape(weight, [1, 2])
        tape.watch(rows)
        products = rows * (1.0 + ronde.rank())
    distributed = rt.DistributedGradientTape(tape)
    expected = np.eye(2) * (1.0 + ronde.rank())
    np.testing.assert_array_equal(distributed.jacobian(y, weight), expected)
    np.testing.assert_array_equal(distributed.batch_jacobian(products, rows), [expected])
    assert distributed.gradient(y, weight).numpy().tolist() == [1.5, 1.5]


class Owner:
    """Of a plan."""


@check
def a_channel_is_closed_when_its_owner_is_gone_on_all_ranks_and_opened_again_when_needed() -> None:
    variable, owners = tf.Variable([1.0]), {"first": Owner()}
    plan_channels.set_owner(owners["first"], "owned.1")

    def make(name: str) -> Any:
        function = tf.function(lambda x: rt.reduce_gradients([x], [variable], name=name)[0])
        return function.get_concrete_function(tf.TensorSpec([1]))

    reduce_first, group = make("owned.1"), current_world().group.id
    x = tf.constant([2.0 * ronde.rank()])
    assert reduce_first(x).numpy().tolist() == [1.0]
    channel = plan_channels.find(f"{group}.owned.1")
    for index, gone in ((10, -1), (11, 0), (12, 1)):  # the rank whose owner goes before this one is opened
        if gone == ronde.rank():
            owners.clear()
        assert make(f"owned.{index}")(x).numpy().tolist() == [1.0]
        assert (plan_channels.find(f"{group}.owned.1") is channel) == (gone != 1)
    assert plan_channels.find(f"{group}.owned.10") is not None, "only its name begins alike"
    assert reduce_first(x).numpy().tolist() == [1.0]


@check
def slices_that_are_not_finite_are_found_in_every_graph() -> None:
    settings = rt.GradientSettings(check_finite=True)
    variable = tf.Variable(tf.zeros([4, 2]))

    def compute(values: Any, variable: Any = variable) -> Any:
        slices = tf.IndexedSlices(values, tf.constant([1]), tf.constant([4, 2]))
        return rt.reduce_gradients([slices], [variable], settings=settings)[0].values

    wrong = np.array([[np.nan, 1.0]], np.float32)
    for convert in (lambda function: function, tf.function):
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not finite"):
            convert(compute)(tf.constant(wrong))
    with tf.Graph().as_default(), make_session() as session:
        values = compute(tf.constant(wrong), v1.get_variable("v", [4, 2]))
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not finite"):
            session.run(values)


@check
def slices_are_gathered_or_made_dense() -> None:
    me = ronde.rank()
    table, bias = tf.Variable(tf.ones([6, 2])), tf.Variable([1.0])

    def compute(settings: Any) -> Any:
        def run(indices: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, indices) * (me + 1.0)) * bias[0]
            return rt.reduce_gradients(tape.gradient(loss, [table, bias]), [table, bias], settings=settings)

        return run

    indices = tf.constant([0, 1, 1] if me == 0 else [5])
    expected = np.zeros((6, 2), np.float32)
    expected[:2], expected[1], expected[5] = 0.5, 1.0, 1.0
    for convert in (lambda function: function, tf.function):
        gathered, mean = convert(compute(rt.GradientSettings()))(indices)
        assert isinstance(gathered, tf.IndexedSlices) and mean.numpy().tolist() == [(6.0 + 4.0) / 2]
        assert gathered.values.shape[0] == 4
        assert np.array_equal(tf.convert_to_tensor(gathered).numpy(), expected)
        dense, _ = convert(compute(rt.GradientSettings(sparse_as_dense=True)))(indices)
        assert np.array_equal(dense.numpy(), expected)


@check
def nothing_stays_nothing() -> None:
    variables = [tf.Variable([1.0]), tf.Variable([2.0]), tf.Variable(tf.zeros([0]))]
    for convert in (lambda function: function, tf.function):
        function = convert(lambda: rt.reduce_gradients([None, tf.constant([3.0]), tf.zeros([0])], variables, name="n"))
        first, second, empty = function()
        assert first is None and second.numpy().tolist() == [3.0] and empty.shape == [0]
        assert convert(lambda: rt.reduce_gradients([None], variables[:1], name="none"))() == [None]


@check
def codecs_and_adasum() -> None:
    me = ronde.rank()
    random = np.random.default_rng(me)
    arrays = [random.normal(size=40), random.normal(size=(3, 4))]
    variables = [tf.Variable(each) for each in arrays]
    adasum = rt.GradientSettings(op="adasum")
    wholes = [np.stack(ronde.objects.allgather(each)) for each in arrays]
    for convert in (lambda function: function, tf.function):
        for codec, tolerance in (("float16", 2e-3), ("bfloat16", 2e-2)):
            reduced = convert(lambda codec=codec: rt.reduce_gradients(arrays, variables, codec=codec, name=codec))()
            for each, whole in zip(reduced, wholes, strict=True):
                assert each.dtype == tf.float64
                np.testing.assert_allclose(each.numpy(), whole.mean(0), rtol=tolerance, atol=tolerance)
        reduced = convert(lambda: rt.reduce_gradients(arrays, variables, settings=adasum, name="adasum"))()
        expected = ronde.allreduce(arrays, op="adasum")
        for each, wanted in zip(reduced, expected, strict=True):
            np.testing.assert_allclose(each.numpy(), wanted, rtol=1e-12)
    with pytest.raises(ValueError, match="codec must be one of none, float16, bfloat16"):
        rt.reduce_gradients(arrays, variables, codec="int8")


@check
def tapes_keep_their_form_and_local_variables() -> None:
    mine, shared = tf.Variable([2.0]), tf.Variable([3.0])
    scale = ronde.rank() + 1.0

    def compute() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = scale * tf.reduce_sum(mine * shared)
        assert isinstance(tape, tf.GradientTape)
        distributed = rt.DistributedGradientTape(tape, local_variables=[mine])
        assert isinstance(distributed, tf.GradientTape)
        found = distributed.gradient(loss, {"mine": mine, "shared": (shared,)})
        alone = distributed.gradient(loss, shared)
        raw = rt.DistributedGradientTape(tape, local_variables=[mine], scale_local=False).gradient(loss, [mine])
        return found, alone, raw

    for convert in (lambda function: function, tf.function):
        found, alone, raw = convert(compute)()
        assert found["mine"].numpy().tolist() == [1.5 * scale] and found["shared"][0].numpy().tolist() == [3.0]
        assert alone.numpy().tolist() == [3.0] and raw[0].numpy().tolist() == [3.0 * scale]
    with pytest.raises(TypeError, match=r"use ronde\.keras\.DistributedOptimizer"):
        rt.DistributedOptimizer(tf.keras.optimizers.SGD())


@check
def different_plans_are_an_error_that_names_them() -> None:
    me = ronde.rank()
    cases: dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]] = {
        "shapes": lambda: ([tf.ones([2 + me])], {}),
        "number": lambda: ([tf.ones([2])] * (1 + me), {}),
        "settings": lambda: ([tf.ones([2])], {"op": "mean" if me else "sum"}),
        "missing": lambda: ([tf.ones([2]), None] if me else [None, tf.ones([2])], {}),
    }
    for name, make in cases.items():
        gradients, options = make()
        variables = [
            tf.Variable(tf.zeros([2] if each is None else each.shape), name=f"dense_{n}/kernel")
            for n, each in enumerate(gradients)
        ]
        settings = rt.GradientSettings(**options)

        def compute(gradients: Any, variables: Any = variables, settings: Any = settings, name: str = name) -> Any:
            return rt.reduce_gradients(gradients, variables, settings=settings, name=f"differ.{name}")

        for _ in range(2):
            with pytest.raises(tf.errors.OpError, match=DIFFERENT) as caught:
                tf.function(compute)(gradients)
            assert isinstance(rt.find_error(caught.value), ronde.Mismatch)
            with pytest.raises(ronde.Mismatch, match=DIFFERENT) as told:
                compute(gradients)
            assert name != "missing" or "rank 0: bucket 0 of 1 without 'dense_0/kernel:0'" in str(told.value)
    variables = [tf.Variable(tf.zeros([4, 2])), tf.Variable(tf.zeros([4, 2]))]
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([me]), tf.constant([4, 2]))
    others: list[Any] = [slices, None] if me else [None, slices]
    alone = r"rank 0: bucket 0 of 1 without 'Variable:0'"
    with pytest.raises(ronde.Mismatch, match=alone):
        rt.reduce_gradients(others, variables)

    @in_graph
    def reduce_other_slices() -> Any:
        return [each.values for each in rt.reduce_gradients(others, variables) if each is not None]

    @in_graph
    def reduce_slices_otherwise() -> Any:
        settings = rt.GradientSettings(op="mean" if me else "sum")
        return rt.reduce_gradients([slices], variables[:1], settings=settings)[0].values

    with pytest.raises(tf.errors.OpError, match=alone):
        reduce_other_slices()
    with pytest.raises(tf.errors.OpError, match=r"rank 0: .*\bsum of .*rank 1: .*\bmean of"):
        reduce_slices_otherwise()


@check
def a_rank_without_data_joins_the_steps_of_the_others() -> None:
    variables = [tf.Variable(tf.zeros([300])), tf.Variable(tf.zeros([400]))]
    settings = rt.GradientSettings(bucket_mb=0.001)

    @in_graph
    def step(x: Any) -> Any:
        return rt.reduce_gradients([tf.ones([300]) * x, tf.ones([400]) * x], variables, settings=settings, name="join")

    for turn in range(2):
        for _ in range(2 if ronde.rank() else 4):
            found = step(tf.constant(2.0))
        assert int(rt.join()) == 0
        assert [float(each[0]) for each in found] == [2.0 if ronde.rank() else 1.0] * 2, turn


@check
def variables_objects_and_metrics_of_the_root() -> None:
    me = ronde.rank()
    variables = [tf.Variable([1.0 + me, 2.0]), tf.Variable(5 + me), tf.Variable(me == 1)]
    rt.broadcast_variables(variables, root=1)
    assert [each.numpy().tolist() for each in variables] == [[2.0, 2.0], 6, True]
    with pytest.raises(ronde.Mismatch, match=r"broadcast_variables of . variables: the ranks differ"):
        rt.broadcast_variables(variables[: 1 + me])
    assert rt.broadcast_object({"epoch": me}) == {"epoch": 0}
    assert rt.allgather_object(me) == [0, 1]
    assert rt.average_metrics({"loss": tf.constant(1.0 + 3 * me)}, count=3 - 2 * me) == {"loss": (3.0 + 4.0) / 4}


@check
def keras_variables_have_gradients_too() -> None:
    layer = tf.keras.layers.Dense(2)
    layer.build([None, 3])
    rt.broadcast_variables(layer.trainable_variables)
    gradients = [tf.ones(each.shape) * (ronde.rank() + 1.0) for each in layer.trainable_variables]
    for convert in (lambda function: function, tf.function):
        reduced = convert(lambda: rt.reduce_gradients(gradients, layer.trainable_variables, name="keras"))()
        assert all(np.array_equal(each.numpy(), np.full(each.shape, 1.5, np.float32)) for each in reduced)


@check
def a_parameter_server_in_sync_mode_trains_as_one_process_with_the_whole_batch() -> None:
    for convert in (lambda step: step, tf.function):
        scale = 1.0 if ronde.rank() == 0 else 5.0  # the weights of rank 0 count
        weights = [tf.Variable(each * scale) for each in initial_weights()]
        optimizer = rt.AsyncOptimizer(weights, ronde.ps.SGD(lr=RATE), mode="sync")

        def step(x: Any, y: Any, weights: Any = weights, optimizer: Any = optimizer) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(weights, x, y)
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        train = convert(step)
        for number in range(4):
            train(*map(tf.constant, batch(number, ronde.rank())))
        assert_trained(weights, 4)
        with pytest.raises(ValueError, match="was not among the variables"):
            optimizer.apply_gradients([(tf.ones(1), tf.Variable([1.0]))])
        optimizer.close()


@check
def asynchronous_training_uses_every_sample_once() -> None:
    count = tf.Variable(np.zeros(20, np.float32))
    optimizer = rt.AsyncOptimizer([count], ronde.ps.SGD(lr=1.0), mode="async")
    for indices in optimizer.samples(20, 3):
        optimizer.apply_gradients([(tf.IndexedSlices(-tf.ones(len(indices)), indices, [20]), count)])
    ronde.barrier()
    optimizer.pull()
    assert count.numpy().tolist() == [1.0] * 20
    optimizer.close()


@check  # the last: join() needs the channels of all plans
def a_step_that_begins_in_the_middle_of_another_is_an_error() -> None:
    if count_python_ranks():
        return  # there a step is one node
    variable, ops = tf.Variable([1.0]), get_ops()
    whole = tf.function(lambda x: rt.reduce_gradients([x], [variable], name="abandoned"))
    assert whole(tf.constant([1.0 + ronde.rank()]))[0].numpy().tolist() == [1.5]

    @in_graph
    def half(x: Any) -> Any:  # the first of two buckets
        operation = GraphOperation("bucket", "abandoned").encode()
        started = ops.ronde_start_bucket(
            inputs=[x], operation=operation, plan="0.abandoned", bucket=0, num_buckets=2, count=1, signature=7,
            description="the first half", op=0, scales="1.0 1.0",
        )  # fmt: skip
        return ops.ronde_finish_bucket(inputs=started.outputs, run=started.run)[0]

    assert half(tf.constant([1.0])).numpy().tolist() == [2.0]
    ronde.barrier()  # the next step ends the channel, and the other rank might still be in this one
    with pytest.raises(tf.errors.UnknownError, match="the training step before was abandoned") as caught:
        whole(tf.constant([1.0]))
    assert isinstance(rt.find_error(caught.value), ronde.RondeError)
    assert rt.allreduce(tf.ones([1])).numpy().tolist() == [2.0], "other channels go on"
