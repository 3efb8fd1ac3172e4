"""Mean and variance over the members of a group, for batch normalization: ronde.training.moments with arrays of JAX.
The sums are made on the host, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.jax.gradients import call_on_host
from ronde.training.moments import backpropagate, unweigh, weigh

OPERATION_NAME = "ronde.jax.moments"
"""One for all: calls of the host are made in the order of the program, by a thread of JAX."""


def combine_moments(count: Any, mean: Any, variance: Any, group: Group | None) -> Any:
    """Mean and variance of all members, of each member's number of values, mean and variance; collective."""

    def allreduce(stacked: Array) -> Array:
        total = np.empty_like(stacked)
        resolve_group(group).allreduce(stacked, out=total, name=OPERATION_NAME)
        return total

    def reduce_forward(stacked: Array) -> Array:
        total = allreduce(np.stack(weigh(*np.asarray(stacked, np.float64))))
        return np.stack(unweigh(total, np.maximum)).astype(stacked.dtype)

    def reduce_backward(stacked: Array) -> Array:
        return allreduce(np.asarray(stacked, np.float64)).astype(stacked.dtype)

    def forward(count: Any, mean: Any, variance: Any) -> Any:
        stacked = jnp.stack([count, mean, variance])
        total_count, total_mean, total_variance = call_on_host(reduce_forward, stacked)
        return (total_mean, total_variance), ((count, mean), (total_count, total_mean))

    def backward(kept: Any, grads: Any) -> Any:
        own, combined = kept
        summed = call_on_host(reduce_backward, jnp.stack(grads))
        return jnp.zeros_like(own[0]), *backpropagate(own, combined, summed)

    combine = jax.custom_vjp(lambda *own: forward(*own)[0])
    combine.defvjp(forward, backward)
    return combine(count, mean, variance)
