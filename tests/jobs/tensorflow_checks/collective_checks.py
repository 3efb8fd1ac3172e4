"""The collectives: what only TensorFlow has, names, the order of operations, and errors. What all frameworks have in
common is in tests/conformance/frameworks."""

from __future__ import annotations

import logging
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import ronde
import ronde.tensorflow as rt
from ronde.tensorflow import op_library
from ronde.training import native_self_test
from tests.jobs.tensorflow_checks.checks import check, count_python_ranks, each_way, in_graph, make_session


@check
def lists_of_several_dtypes_and_slices() -> None:
    me = ronde.rank()

    def compute(x: Any) -> Any:
        slices = tf.IndexedSlices(tf.reshape(x, [1, 3]) * 2.0, tf.constant([me]), tf.constant([4, 3]))
        reduced = rt.allreduce([x, tf.constant([1, 2]), slices, x * 2.0], op="mean", name="mixed")
        return [reduced[0], reduced[1], tf.convert_to_tensor(reduced[2]), reduced[3]]

    for way, results in each_way(compute, np.array([1.0, 2.0, 3.0], np.float32) * (me + 1)):
        assert results[0].tolist() == [1.5, 3.0, 4.5] and results[3].tolist() == [3.0, 6.0, 9.0], way
        assert results[1].tolist() == [1, 2], way
        assert results[2].tolist() == [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [0.0] * 3, [0.0] * 3], way


@check
def gradients_are_those_of_the_sum_of_all_losses() -> None:
    me = ronde.rank()

    def loss_of(v: Any) -> Any:
        exchanged, _ = rt.alltoall(v, splits=[1, 0] if me == 0 else [0, 1])
        return (
            tf.reduce_sum(rt.allreduce(v, op="mean", postscale=3.0)) * (me + 1.0)
            + tf.reduce_sum(rt.allgather(v[: me + 1]) * [2.0])
            + tf.reduce_sum(rt.broadcast(v, root=1))
            + tf.reduce_sum(rt.reduce_scatter(v, op="mean", prescale=4.0))
            + tf.reduce_sum(exchanged)
        )

    def compute(v: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(v)
            loss = loss_of(v)
        return tape.gradient(loss, v)

    # allreduce: mean of 1 and 2, times 3; allgather: 2 on each of two ranks, for the rows given; broadcast: only the
    # root; reduce_scatter: 4 / 2; alltoall: the rows that were sent.
    expected = [4.5 + 4.0 + 2.0 + 1.0, 4.5 + 2.0] if me == 0 else [4.5 + 4.0 + 2.0 + 2.0 + 1.0, 4.5 + 4.0 + 2.0 + 2.0]
    for way, results in each_way(compute, np.array([1.0, 2.0], np.float32)):
        assert results[0].tolist() == expected, (way, results[0])
    with tf.Graph().as_default(), make_session() as session:
        v = tf.constant([1.0, 2.0])
        assert session.run(tf.gradients(loss_of(v), v))[0].tolist() == expected


@check
def two_hundred_operations_with_one_thread() -> None:
    assert tf.config.threading.get_inter_op_parallelism_threads() == 1
    me, may_differ = ronde.rank(), count_python_ranks() < 2
    v = tf.constant([1.0 + me])

    def compute(x: Any) -> Any:
        order = reversed(range(200)) if me and may_differ else range(200)
        found = {number: rt.allreduce(x * float(number), name=f"operation {number}") for number in order}
        return tf.add_n([found[number] for number in range(200)])

    @in_graph
    def compute_gradient(x: Any) -> Any:  # 200 operations in the backward pass, too
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = compute(x)
        return tape.gradient(y, x)

    converted = tf.function(compute)
    for _ in range(3):
        assert converted(v).numpy().tolist() == [3.0 * 199 * 100]
        assert compute_gradient(v).numpy().tolist() == [2.0 * 199 * 100]
    if not may_differ:
        return  # in a session there is no order: such nodes need a thread each
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        x = tf.constant([1.0 + me])
        y = compute(x)
        nodes = [y, tf.gradients(y, x)[0]]
        for _ in range(3):
            total, gradient = session.run(nodes)
            assert total.tolist() == [3.0 * 199 * 100] and gradient.tolist() == [2.0 * 199 * 100]


@check
def a_loop_uses_a_name_again_and_again() -> None:
    @in_graph
    def compute(x: Any) -> Any:
        for _ in tf.range(20):
            x = rt.allreduce(x, op="mean") + 1.0
        return x

    assert compute(tf.constant([float(ronde.rank())])).numpy().tolist() == [20.5]

    @in_graph
    def at_once(x: Any) -> Any:
        return [rt.allreduce(x, name="the same") for _ in range(5)]

    assert [each.numpy().tolist() for each in at_once(tf.constant([1.0]))] == [[2.0]] * 5


@check
def turns_branches_and_calls_are_not_mixed_up() -> None:
    me, count = ronde.rank(), 12
    expected = [2.0 * index for index in range(count)]

    def slowly(index: Any) -> Any:
        """The number. Every second one takes long: on one rank the even ones, on the other the odd ones."""
        size = tf.where(tf.equal(index % 2, me), 500, 1)
        ones = tf.ones([size, size])
        return tf.cast(index, tf.float32) + 0.0 * tf.reduce_sum(ones @ ones)

    def loop(parallel_iterations: int) -> Any:
        def turn(index: Any, found: Any) -> Any:
            return index + 1, found.write(index, rt.allreduce(slowly(index)))

        begin = [0, tf.TensorArray(tf.float32, count)]
        _, found = tf.while_loop(lambda index, _: index < count, turn, begin, parallel_iterations=parallel_iterations)
        return found.stack()

    def branches() -> Any:
        xs = [slowly(tf.constant(index)) for index in range(count)]
        return tf.stack([tf.cond(x >= 0.0, lambda x=x: rt.allreduce(x), lambda: -1.0) for x in xs])

    def calls() -> Any:
        call = tf.function(lambda x: rt.allreduce(x), input_signature=[tf.TensorSpec([])])
        return tf.stack([call(slowly(tf.constant(index))) for index in range(count)])

    for compute in (lambda: loop(10), branches, calls):
        assert tf.function(compute)().numpy().tolist() == expected
    with tf.Graph().as_default(), make_session() as session:
        for compute in (lambda: loop(1), branches):
            assert session.run(compute()).tolist() == expected
        with pytest.raises(ValueError, match="pass parallel_iterations=1 to tf"):
            loop(10)
        with pytest.raises(ValueError, match=r"leave @tf\.function away there"):
            calls()


@check
def one_helper_outside_in_branches_and_in_functions_is_not_mixed_up() -> None:
    if count_python_ranks() > 1:
        return  # such nodes wait for the other rank, and nothing says which comes first: the branch or what is outside
    me = ronde.rank()

    def slowly(x: Any, is_slow: bool) -> Any:
        ones = tf.ones([500, 500]) * x
        return x + 0.0 * tf.reduce_sum(ones @ ones @ ones) if is_slow else x

    def average(x: Any, is_slow: bool, name: str | None) -> Any:
        return rt.allreduce(slowly(x, is_slow), op="mean", name=name)

    for name in (None, "given"):
        inner: Any = tf.function(lambda x, name=name: average(x, me == 1, name))

        @in_graph
        def compute(x: Any, name: str | None = name, inner: Any = inner) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                first = average(x, me == 0, name)
                second = tf.cond(x > 0.0, lambda: average(x * 10.0, me == 1, name), lambda: x)
                third = tf.cond(x > 0.0, lambda: average(x * 100.0, me == 0, name), lambda: x)
                fourth = inner(x * 1000.0)
                _, fifth = tf.while_loop(
                    lambda turn, _: turn < 2,
                    lambda turn, x: (turn + 1, average(x * 100.0, me == 1, name)),
                    [0, x],
                )
                total = first + 2.0 * second + 3.0 * third + 4.0 * fourth + 5.0 * fifth
            return [first, second, third, fourth, fifth, tape.gradient(total, x)]

        if name is None and me == 0:  # so that it is not traced inside of the other
            inner.get_concrete_function(tf.TensorSpec([]))
        for _ in range(2):
            found = [float(each) for each in compute(tf.constant(me + 1.0))]
            assert found == [1.5, 15.0, 150.0, 1500.0, 15000.0, 1.0 + 20.0 + 300.0 + 4000.0 + 50000.0], (name, found)


@check
def slices_of_whole_numbers_are_reduced_as_dense_tensors_are() -> None:
    me = ronde.rank()

    def compute(values: Any) -> Any:
        slices = tf.IndexedSlices(values, tf.constant([me, 2, 2]), tf.constant([4, 2]))
        dense = tf.convert_to_tensor(slices)
        found = []
        for options in ({"op": "mean"}, {"prescale": 0.5}, {"postscale": 2.5, "prescale": -1.5, "op": "mean"}):
            reduced = rt.allreduce(slices, **options)
            assert reduced.values.dtype == values.dtype
            found += [tf.convert_to_tensor(reduced), rt.allreduce(dense, **options)]
        return found

    values = np.array([[11, -3], [5, 6], [8, -13]], np.int32) + me
    for way, results in each_way(compute, values):
        for ours, dense in zip(results[0::2], results[1::2], strict=True):
            assert ours.dtype == np.int32 and ours.tolist() == dense.tolist(), way
    assert [each.tolist()[2] for each in results[0::2]] == [[14, -6], [13, -5], [-50, 20]]


@check
def a_rank_may_trace_functions_that_others_do_not() -> None:
    me = ronde.rank()

    def evaluate(x: Any) -> Any:  # adds operations whose names TensorFlow counts
        return rt.allreduce(x * 2.0, op="mean")

    @in_graph
    def step(x: Any) -> Any:
        return rt.allreduce(x) + evaluate(x)

    for number in range(4):
        if me == 0:  # traced, and never run
            tf.function(lambda x: rt.allreduce(x) + evaluate(x)).get_concrete_function(tf.TensorSpec([number + 1]))
        assert step(tf.ones([3]) * (me + 1.0)).numpy().tolist() == [6.0] * 3
        if number == 2:  # another shape: all trace again
            assert step(tf.ones([2]) * (me + 1.0)).numpy().tolist() == [6.0] * 2


@check
def a_rank_may_add_to_the_graph_of_its_session_between_steps() -> None:
    me = ronde.rank()
    with tf.Graph().as_default(), make_session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [None])
        loss = rt.allreduce(x, op="mean")
        train = tf.gradients(rt.allreduce(x * x), x)[0]
        for number in range(3):
            if me == 0:  # for evaluation and logging, which rank 0 alone does: added, and never run
                tf.gradients(rt.allreduce(x * float(number)), x)
                tf.identity(rt.allgather(x), name="loss")
            mean, gradient = session.run([loss, train], {x: [me + 1.0] * (3 - number)})  # the last batches are smaller
            assert mean.tolist() == [1.5] * (3 - number) and gradient.tolist() == [4.0 * (me + 1.0)] * (3 - number)


@check
def gradients_survive_what_a_rank_traces_more() -> None:
    me = ronde.rank()

    def gradient_of(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = rt.allreduce(x * x, op="mean") + rt.allgather(x)[:1]
        return tape.gradient(y, x)

    step = tf.function(gradient_of, input_signature=[tf.TensorSpec([1])])
    for number in range(3):
        if me == 0:
            tf.function(lambda x: gradient_of(x) + gradient_of(x * 2.0)).get_concrete_function(tf.TensorSpec([1]))
            tf.function(gradient_of).get_concrete_function(tf.TensorSpec([number + 2]))
        expected = 2.0 * (me + 1.0) + (2.0 if me == 0 else 0.0)
        assert step(tf.constant([me + 1.0])).numpy().tolist() == [expected], number


@check
def what_communicates_is_not_compiled_with_xla() -> None:
    me = ronde.rank()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ronde.tensorflow").addHandler(handler)
    weight = tf.Variable([1.0, 2.0])

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def forward(x: Any) -> Any:
        return tf.reduce_sum(weight * x)

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = forward(x)
        (gradient,) = rt.DistributedGradientTape(tape).gradient(loss, [weight])
        for _ in tf.range(2):
            weight.assign_sub(gradient)
        return rt.allreduce(loss)

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def calls_another(x: Any) -> Any:
        return tf.function(lambda y: rt.allreduce(y))(x) * 2.0

    try:
        for _ in range(2):
            train(tf.constant([1.0 + me, 1.0]))
        assert weight.numpy().tolist() == [1.0 - 4 * 1.5, 2.0 - 4 * 1.0]
        for count in (1, 2):
            assert calls_another(tf.ones([count])).numpy().tolist() == [4.0] * count
        rank_0_says = [
            "jit_compile=True of the tf.function 'train'",
            "jit_compile=True of the tf.function 'calls_another'",
        ]
        assert [message.partition(" is switched off")[0] for message in messages] == (rank_0_says if me == 0 else [])
        # What does not communicate is still compiled.
        assert "HloModule" in forward.experimental_get_compiler_ir(tf.ones([2]))(stage="hlo")
    finally:
        logging.getLogger("ronde.tensorflow").removeHandler(handler)


@check
def turns_of_a_loop_in_the_graph_of_a_session_run_in_order() -> None:
    """TensorFlow would run several turns at once, and their operations have one name."""
    me = ronde.rank() + 1.0
    tf.compat.v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph, make_session() as session:

            def turn(i: Any) -> Any:
                def wait(j: Any, x: Any) -> Any:
                    return j + 1, tf.matmul(x, x)

                # On rank 0 the even turns take long, on rank 1 the odd ones.
                num_waits = tf.where(tf.equal(i % 2, ronde.rank()), 200, 0)
                slow = tf.while_loop(lambda j, x: j < num_waits, wait, (0, tf.eye(40)))[1]
                return rt.allreduce(tf.cast(i, tf.float32) * me + 0.0 * tf.reduce_sum(slow))

            ys = tf.map_fn(turn, tf.range(8), fn_output_signature=tf.float32, parallel_iterations=8)
            assert session.run(ys).tolist() == [3.0 * i for i in range(8)]
        enters = [node for node in graph.get_operations() if node.type == "Enter"]
        frames = {node.get_attr("frame_name"): node.get_attr("parallel_iterations") for node in enters}
        assert sorted(frames.values()) == [1, 10], "the loop inside of a turn, which does not communicate, may do so"
    finally:
        tf.compat.v1.enable_control_flow_v2()


@check
def a_self_test_that_is_killed_is_run_again_and_one_that_crashes_is_not() -> None:
    def test_ends_with(status: int) -> str:
        done = subprocess.CompletedProcess([], status, stdout="passed\n", stderr="the end")
        with mock.patch.object(subprocess, "run", return_value=done):
            return op_library.find_problem("auto", "native")

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(native_self_test, "cache_dir", lambda: Path(folder)),
    ):
        assert (
            test_ends_with(-signal.SIGKILL) == "the self-test ronde.tensorflow.self_test ended with status -9: the end"
        )
        assert "status -11" in test_ends_with(-signal.SIGSEGV)
        assert "status -11" in test_ends_with(0), "kept"
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(native_self_test, "cache_dir", lambda: Path(folder)),
    ):
        assert test_ends_with(0) == test_ends_with(-signal.SIGSEGV) == ""


@check
def numbers_of_ranks_are_read_when_a_graph_runs() -> None:
    def compute() -> Any:
        return [rt.rank_op(), rt.size_op(), rt.local_rank_op(), rt.local_size_op()]

    for way, results in each_way(compute):
        assert [int(each) for each in results] == [ronde.rank(), 2, ronde.rank(), 2], way


@check
def groups_of_some_ranks() -> None:
    both, alone = ronde.add_group([0, 1]), ronde.add_group([1])

    def compute(x: Any) -> Any:
        results = [rt.allreduce(x, group=both), rt.size_op(group=both)]
        return [*results, rt.allreduce(x, group=alone)] if ronde.rank() == 1 else results

    for way, results in each_way(compute, np.array([ronde.rank() + 1.0], np.float32)):
        assert results[0].tolist() == [3.0] and int(results[1]) == 2, way
        assert ronde.rank() == 0 or results[2].tolist() == [2.0], way
    if ronde.rank() == 0:
        with pytest.raises(ValueError, match="rank 0 is not a member of group"):
            rt.allreduce(tf.ones([1]), group=alone)
        with pytest.raises(tf.errors.OpError, match="rank 0 is not a member of group"):
            tf.function(lambda: rt.allreduce(tf.ones([1]), group=alone))()


@check
def barriers_and_joins_in_graphs() -> None:
    @in_graph
    def wait() -> Any:
        rt.barrier()
        return tf.constant(1)

    assert wait().numpy() == 1
    step = tf.function(lambda x: rt.allreduce(x, name="joined"))
    assert step(tf.ones([2])).numpy().tolist() == [2.0, 2.0]
    if ronde.rank() == 0:
        assert step(tf.ones([2])).numpy().tolist() == [1.0, 1.0]
        assert int(rt.join()) in (0, 1)
    else:
        assert int(tf.function(lambda: rt.join())()) in (0, 1)


@check
def members_that_differ_get_the_error_that_says_so() -> None:
    uneven = tf.ones([2 + ronde.rank()])
    for _ in range(2):
        with pytest.raises(ronde.Mismatch, match=r"rank 0: .*\[2\]; rank 1: .*\[3\]"):
            rt.allreduce(uneven)
        with pytest.raises(ronde.Mismatch, match=r"rank 0 gave \(2,\); rank 1 gave \(3,\)"):
            rt.allreduce(uneven, name="uneven")
    for number in range(2):
        function = tf.function(lambda number=number: rt.allreduce(uneven, name=f"uneven {number}"))
        with pytest.raises(tf.errors.OpError, match=r"rank 0 gave \(2,\); rank 1 gave \(3,\)") as caught:
            function()
        assert isinstance(rt.find_error(caught.value), ronde.Mismatch)
    assert rt.find_error(ValueError("another")) is None
    assert rt.allreduce(tf.ones([1])).numpy().tolist() == [2.0]


@check
def wrong_arguments_are_refused() -> None:
    runs: list[Callable[[Callable[[], Any]], Any]] = [lambda f: f(), lambda f: tf.function(f)()]
    for run in runs:
        with pytest.raises(TypeError, match="dtype string is not supported"):
            run(lambda: rt.allreduce(tf.constant("text")))
        with pytest.raises(ValueError, match="the list of tensors is empty"):
            run(lambda: rt.allgather([]))
        with pytest.raises(ValueError, match="root must be a member"):
            run(lambda: rt.broadcast(tf.ones([1]), root=7))


@check
def operations_in_turns_that_run_at_once_are_refused_and_others_are_not() -> None:
    rows, size = tf.reshape(tf.range(6.0), [3, 2]), float(ronde.size())

    def make_jacobian(**options: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(rows)
            total = rt.allreduce(rows * 2.0)[0]
        return tape.jacobian(total, rows, **options)

    with pytest.raises(ValueError, match=r"use tf\.map_fn, or call the operation on the whole tensor"):
        tf.vectorized_map(rt.allreduce, rows)
    with pytest.raises(ValueError, match="setting experimental_use_pfor to False"):  # says TensorFlow
        make_jacobian()
    assert np.array_equal(tf.map_fn(rt.allreduce, rows), rows * size)
    expected = np.zeros([2, 3, 2])
    expected[0, 0, 0] = expected[1, 0, 1] = 2.0 * size
    assert np.array_equal(make_jacobian(experimental_use_pfor=False), expected)


@check
def the_gradient_of_an_eager_operation_can_be_computed_in_a_function() -> None:
    x = tf.ones([2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = rt.allreduce(x)
    gradient = in_graph(lambda: tape.gradient(total, x))()
    assert np.array_equal(gradient, np.full([2], ronde.size()))
