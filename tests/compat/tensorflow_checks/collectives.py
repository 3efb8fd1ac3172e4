"""Collectives on tensors: eager, in tf.function and in graphs of sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
from tests.compat.tensorflow_checks.registry import assert_each_way, check, raises


def mine(rank: int | None = None) -> Any:
    """Other numbers on each rank."""
    return np.arange(6, dtype=np.float32).reshape(3, 2) + (hvd.rank() if rank is None else rank)


@check
def allreduce_reduces_by_each_op() -> None:
    both = [mine(0), mine(1)]
    expected = {
        hvd.Average: (both[0] + both[1]) / 2,
        hvd.Sum: both[0] + both[1],
        hvd.Min: both[0],
        hvd.Max: both[1],
        hvd.Product: both[0] * both[1],
    }
    for op, result in expected.items():
        assert_each_way(lambda x, op=op: hvd.allreduce(x, op=op), [mine()], [result])
    assert_each_way(lambda x: hvd.allreduce(x, average=False), [mine()], [both[0] + both[1]])
    with raises(ValueError, "op or average"):
        hvd.allreduce(mine(), average=True, op=hvd.Sum)


@check
def an_allreduce_is_scaled_and_compressed() -> None:
    total = mine(0) + mine(1)
    assert_each_way(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), [mine()], [2 * total])
    assert_each_way(lambda x: hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.5), [mine()], [total / 2])
    assert_each_way(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), [mine()], [total / 2])
    half = hvd.allreduce(tf.constant([1 + 2**-20]), compression=hvd.Compression.fp16)
    assert half.dtype == tf.float32 and half.numpy() == [1.0]


@check
def sparse_and_dense_tensors_are_reduced_together() -> None:
    def reduce(values: Any, dense: Any) -> list[Any]:
        sparse = tf.IndexedSlices(values, tf.constant([0, 2]), tf.constant([5, 2]))
        first, second = hvd.grouped_allreduce([sparse, dense], op=hvd.Average)
        return [first.values, first.indices, second]

    rows = [mine(rank)[:2] / 2 for rank in range(2)]
    assert_each_way(reduce, [mine()[:2], mine()], [np.concatenate(rows), [0, 2, 0, 2], (mine(0) + mine(1)) / 2])
    whole = hvd.allreduce(tf.IndexedSlices(tf.constant([1 + hvd.rank()]), tf.constant([0])), op=hvd.Average)
    np.testing.assert_array_equal(whole.values, [0.5, 1.0])
    slices = tf.IndexedSlices(mine(), tf.constant([0, 1, 2]), tf.constant([5, 2]))
    for options in ({"op": hvd.Max}, {"op": hvd.Adasum}, {"prescale_factor": 2.0}):
        with raises(NotImplementedError):
            hvd.allreduce(slices, **options)
    assert hvd.grouped_allreduce([]) == []


@check
def rows_are_gathered_scattered_and_exchanged() -> None:
    rank = hvd.rank()
    assert_each_way(lambda x: hvd.allgather(x), [mine()[: 1 + rank]], [np.concatenate([mine(0)[:1], mine(1)[:2]])])
    assert_each_way(
        lambda x: hvd.grouped_allgather([x, x[:1]]),
        [mine()],
        [np.concatenate([mine(0), mine(1)]), np.concatenate([mine(0)[:1], mine(1)[:1]])],
    )
    total = mine(0) + mine(1)
    share = total[:2] if rank == 0 else total[2:]  # 3 rows: the first rank has one more
    assert_each_way(lambda x: hvd.reducescatter(x, op=hvd.Sum), [mine()], [share])
    assert_each_way(lambda x: hvd.grouped_reducescatter([x]), [mine()], [share / 2])
    got = np.concatenate([mine(0)[:1], mine(1)[:1]] if rank == 0 else [mine(0)[1:], mine(1)[1:]])
    assert_each_way(
        lambda x: hvd.alltoall(x, splits=tf.constant([1, 2])), [mine()], [got, [1, 1] if rank == 0 else [2, 2]]
    )
    assert not isinstance(hvd.alltoall(tf.zeros([2])), tuple)
    with raises(NotImplementedError):
        hvd.reducescatter(mine(), op=hvd.Max)


@check
def the_roots_values_are_broadcast() -> None:
    assert_each_way(lambda x: hvd.broadcast(x, root_rank=1), [mine()], [mine(1)])
    variable, other = tf.Variable(mine()), tf.Variable([hvd.rank()])
    read, _ = hvd.broadcast_([variable, other], root_rank=1)
    np.testing.assert_array_equal(read, mine(1))
    np.testing.assert_array_equal(variable, mine(1))
    assert other.numpy() == [1]
    variable.assign(mine())
    hvd.broadcast_variables([variable], root_rank=1)
    np.testing.assert_array_equal(variable, mine(1))
    with raises(RuntimeError, "broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=mine())
        hook = hvd.BroadcastGlobalVariablesHook(1)
        hook.begin()
        session.run(tf.compat.v1.global_variables_initializer())
        hook.after_create_session(session, None)
        np.testing.assert_array_equal(session.run(weight), mine(1))


@check
def objects_go_to_all_ranks() -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1) == {"rank": 1}
    assert hvd.broadcast_object_fn(root_rank=0)(hvd.rank()) == 0
    assert hvd.allgather_object("a" * hvd.rank()) == ["", "a"]


@check
def ranks_and_sizes_are_operations() -> None:
    assert_each_way(
        lambda x: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()],
        [np.zeros(1)],
        [hvd.rank(), 2, hvd.local_rank(), 2],
    )


@check
def a_process_set_is_a_world_of_its_own() -> None:
    alone = hvd.add_process_set([1])
    assert alone.process_set_id is not None
    if hvd.rank() == 1:
        assert hvd.allreduce(tf.constant(3.0), op=hvd.Sum, process_set=alone).numpy() == 3.0
        assert hvd.allgather_object(5, process_set=alone) == [5]
        assert hvd.size_op(alone.process_set_id).numpy() == 1
    assert hvd.process_set_included_op(alone.process_set_id).numpy() == hvd.rank()
    both = hvd.allreduce(tf.constant(3.0), op=hvd.Sum)
    assert both.numpy() == 6.0
    assert hvd.remove_process_set(alone)
    with raises(ValueError, "not in use"):
        hvd.allreduce(tf.constant(3.0), process_set=alone)


@check
def a_rank_without_data_joins() -> None:
    if hvd.rank() == 1:
        assert hvd.allreduce(tf.constant([4.0])).numpy() == [2.0]
    assert hvd.join().numpy() in (0, 1)


@check
def operations_of_a_graph_match_by_name_in_any_order() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def reduce(x: Any) -> Any:
        names = ["first", "second"] if hvd.rank() == 0 else ["second", "first"]
        found = {name: hvd.allreduce(x * (1.0 if name == "first" else 10.0), name=name) for name in names}
        return found["first"], found["second"]

    first, second = reduce(tf.constant([1.0 + hvd.rank()]))
    assert (first.numpy(), second.numpy()) == ([1.5], [15.0])

    @tf.function  # type: ignore[untyped-decorator]
    def twice(x: Any) -> Any:  # a name may be given twice in a graph
        return hvd.allreduce(x, name="same"), hvd.allreduce(10.0 * x, name="same")

    first, second = twice(tf.constant([1.0 + hvd.rank()]))
    assert (first.numpy(), second.numpy()) == ([1.5], [15.0])


@check
def a_rank_may_trace_a_function_more_often() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def mean(x: Any) -> Any:
        return hvd.allreduce(x)

    for step in range(3):
        assert mean(tf.constant([hvd.rank() + step, 1.0])).numpy()[0] == 0.5 + step
        if hvd.rank() == 0:

            @tf.function  # type: ignore[untyped-decorator]
            def own(x: Any) -> Any:
                return tf.reduce_sum(x * 2.0)

            assert own(tf.ones([step + 1])).numpy() == 2.0 * (step + 1)


@check
def mistakes_are_tensorflows_errors_and_horovods() -> None:
    different = tf.zeros([2 + hvd.rank()])
    with raises(tf.errors.FailedPreconditionError, "rank 1"):
        hvd.allreduce(different)
    with raises(hvd.HorovodInternalError, "rank 1"):
        hvd.allreduce(different)
    with raises(tf.errors.FailedPreconditionError, "rank 1"):
        tf.function(lambda x: hvd.allreduce(x, name="different"))(different)
    for kind in (tf.errors.InvalidArgumentError, ValueError):
        with raises(kind):
            hvd.alltoall(tf.zeros([4]), splits=tf.constant([3, 3]))
    with raises(ValueError, "op"):
        hvd.allreduce(tf.zeros([2]), op=17)


@check
def one_helper_outside_and_in_a_branch_is_not_mixed_up() -> None:
    weight = tf.Variable([0.0])

    def reduce(x: tf.Tensor, is_slow: bool) -> tf.Tensor:
        ones = tf.ones([500, 500]) * x
        x = x + 0.0 * tf.reduce_sum(ones @ ones @ ones) if is_slow else x
        with tf.GradientTape() as tape:
            loss = weight[0] * x
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
        return hvd.allreduce(x, op=hvd.Sum) + tf.convert_to_tensor(gradient)[0]

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def compute(x: tf.Tensor) -> tf.Tensor:
        outside = reduce(x, hvd.rank() == 0)
        inside = tf.cond(x > 0.0, lambda: reduce(x * 10.0, hvd.rank() == 1), lambda: x)
        return tf.stack([outside, inside])

    for _ in range(3):
        assert compute(tf.constant(hvd.rank() + 1.0)).numpy().tolist() == [4.5, 45.0]
