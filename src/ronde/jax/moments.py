"""Mean and variance over the members of a group, for batch normalization: ronde.training.moments with arrays of JAX.

JAX has 32 bits for its numbers, so variances are not the difference of two sums: the means come first, in an operation
of their own, and then the squares around the mean of all members.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ronde.comm.group import Group
from ronde.jax.program_operations import backward_name, bind_operation, operation_name, resolve_group
from ronde.training.graph_operations import GraphOperation
from ronde.training.moments import backpropagate

OPERATION_NAME = "ronde.jax.moments"


def combine_moments(count: Any, mean: Any, variance: Any, group: Group | None) -> Any:
    """Mean and variance of all members, of each member's number of values, mean and variance; collective."""
    members = resolve_group(group).id
    name = operation_name("moments", OPERATION_NAME)

    def add_up(stacked: Any, name: str) -> Any:
        [total] = bind_operation(GraphOperation("allreduce", name, members), [stacked])
        return total

    def forward(count: Any, mean: Any, variance: Any) -> Any:
        sums = add_up(jnp.stack([count, count * mean]), f"{name}.means")
        total_count = jnp.maximum(sums[0], 1.0)
        total_mean = sums[1] / total_count
        squares = add_up(count * (variance + jnp.square(mean - total_mean)), f"{name}.squares")
        return (total_mean, squares / total_count), ((count, mean), (total_count, total_mean))

    def backward(kept: Any, grads: Any) -> Any:
        own, combined = kept
        summed = add_up(jnp.stack(grads), backward_name(name))
        return jnp.zeros_like(own[0]), *backpropagate(own, combined, summed)

    combine = jax.custom_vjp(lambda *own: forward(*own)[0])
    combine.defvjp(forward, backward)
    return combine(count, mean, variance)
