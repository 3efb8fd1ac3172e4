"""Mean and variance over the members of a group, for batch normalization: ronde.training.moments with tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ronde.comm.group import Group
from ronde.tensorflow.collectives import allreduce
from ronde.tensorflow.graph_operations import without_autograph
from ronde.training.moments import backpropagate, unweigh, weigh


def combine_moments(count: Any, mean: Any, variance: Any, group: Group | None) -> Any:
    """Mean and variance of all members, of each member's number of values, mean and variance; collective."""

    @without_autograph
    def combine(count: Any, mean: Any, variance: Any) -> Any:
        exact = [tf.cast(each, tf.float64) for each in (count, mean, variance)]
        total_count, total_mean, total_variance = unweigh(allreduce(tf.stack(weigh(*exact)), group=group), tf.maximum)

        @without_autograph
        def backward(*grads: Any) -> Any:
            summed = allreduce(tf.cast(tf.stack(grads), tf.float64), group=group)
            own = backpropagate(exact[:2], (total_count, total_mean), tf.unstack(summed))
            return None, *(tf.cast(each, mean.dtype) for each in own)

        return (tf.cast(total_mean, mean.dtype), tf.cast(total_variance, mean.dtype)), backward

    return tf.custom_gradient(combine)(count, mean, variance)
