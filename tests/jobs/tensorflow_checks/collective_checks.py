"""The collectives: every kind, dtype and way against NumPy; gradients; names; errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import ronde
import ronde.tensorflow as rt
from ronde.tensorflow.op_library import load_op_library
from tests.jobs.tensorflow_checks.checks import check, each_way, in_graph, make_session

DTYPES = [
    *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.bool),
]


def numbers(rank: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Small whole numbers, which every dtype holds exactly."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 3 + rank * 5) % 7).reshape(shape).astype(dtype.as_numpy_dtype)


@check
def every_collective_with_every_dtype_in_every_way() -> None:
    me, size = ronde.rank(), ronde.size()
    for dtype in DTYPES:
        op = "bit_or" if dtype == tf.bool else "sum"

        xs = [numbers(rank, (5, 2), dtype) for rank in range(size)]
        rows = [numbers(rank, (rank + 2, 2), dtype) for rank in range(size)]
        total = np.logical_or(*xs) if dtype == tf.bool else sum(x.astype(np.float64) for x in xs)
        most = np.logical_or(*xs) if dtype == tf.bool else np.maximum(*(x.astype(np.float64) for x in xs))
        share = slice(0, 3) if me == 0 else slice(3, 5)
        exchanged = np.concatenate([x[:1] if me == 0 else x[1:4] for x in xs])
        expected = [total, most, np.concatenate(rows), xs[1], total[share], exchanged, [1, 1] if me == 0 else [3, 3]]

        def compute(x: Any, uneven: Any, op: str = op) -> Any:
            exchanged, received = rt.alltoall(x, splits=[1, 3])
            return [
                rt.allreduce(x, op=op),
                rt.allreduce([x, x[:1]], op="max")[0],
                rt.allgather(uneven),
                rt.broadcast(x, root=1),
                rt.reduce_scatter(x, op=op),
                exchanged,
                received,
            ]

        for way, results in each_way(compute, xs[me], rows[me]):
            for kind, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                assert np.array_equal(result.astype(np.float64), np.asarray(wanted, np.float64)), (dtype, way, kind)
            assert all(result.dtype == dtype.as_numpy_dtype for result in results[:6]), (dtype, way)
    assert size == 2


@check
def means_and_scales_have_double_precision() -> None:
    factor = 1.0 + 2.0**-40

    def compute(x: Any) -> Any:
        return [
            rt.allreduce(x, op="mean", prescale=factor, postscale=2.0),
            rt.reduce_scatter(x, op="mean", prescale=factor),
        ]

    for way, (reduced, share) in each_way(compute, np.ones(2, np.float64)):
        assert reduced.tolist() == [2.0 * factor] * 2 and share.tolist() == [factor], way


@check
def scalars_and_tensors_without_elements() -> None:
    def compute(x: Any, empty: Any) -> Any:
        return [rt.allreduce(x), rt.allgather(x), rt.broadcast(x, root=1), rt.allreduce(empty), rt.allgather(empty)]

    for way, results in each_way(compute, np.float32(ronde.rank() + 1.0), np.zeros((0, 3), np.float32)):
        assert [each.tolist() for each in results[:3]] == [3.0, [1.0, 2.0], 2.0], way
        assert [each.shape for each in results[3:]] == [(0, 3), (0, 3)], way


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
def gradients_of_gradients() -> None:
    def compute(v: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(v)
            with tf.GradientTape() as inner:
                inner.watch(v)
                loss = tf.reduce_sum(rt.allreduce(v * v))
            first = inner.gradient(loss, v)
        return outer.gradient(first, v)

    for way, results in each_way(compute, np.array([3.0], np.float32)):
        assert results[0].tolist() == [4.0], way


@check
def two_hundred_operations_with_one_thread() -> None:
    assert tf.config.threading.get_inter_op_parallelism_threads() == 1
    me = ronde.rank()

    @in_graph
    def compute(x: Any) -> Any:
        # With kernels the order of the graphs may differ, too.
        order = reversed(range(200)) if me and load_op_library() is not None else range(200)
        found = {number: rt.allreduce(x * float(number), name=f"operation {number}") for number in order}
        return tf.add_n([found[number] for number in range(200)])

    for _ in range(3):
        assert compute(tf.constant([1.0 + me])).numpy().tolist() == [3.0 * 199 * 100]


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
