"""The variables of a Keras model or optimizer on all ranks: copied from one rank, or compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.training.agreement import check_equal
from ronde.training.sync_check import checksum, compare_checksums

BROADCAST_BYTES = 32 << 20
"""Variables are copied from the root in pieces of about this size: copies of all of them at once may not fit."""


def broadcast_parameters(variables: Any, root: int = 0, *, group: Group | None = None) -> None:
    """Copy the variables of the root, a rank of the world, into those of all ranks. Collective.

    `variables` is a model, an optimizer that is built, or a list of Keras variables. Of a model its weights are copied;
    metrics and the states of random generators stay as they are, so that ranks drop out different units. If the ranks'
    variables differ in number, dtype or shape, Mismatch names the first that does.
    """
    members = resolve_group(group)
    found = variables_of(variables)
    # Names are not compared: those that Keras makes count the layers that this process has made before.
    check_equal(members, "broadcast_parameters", [f"{each.dtype}{list(each.shape)}" for each in found])
    if members.size == 1 or not found:
        return
    pending: list[tuple[Any, Array]] = []
    for variable in found:
        pending.append((variable, np.asarray(keras.ops.convert_to_numpy(variable.value))))
        if sum(array.nbytes for _, array in pending) >= BROADCAST_BYTES:
            _broadcast_together(members, pending, root)
            pending = []
    _broadcast_together(members, pending, root)


def _broadcast_together(members: Group, pairs: Sequence[tuple[Any, Array]], root: int) -> None:
    """Broadcast the values of some variables, by one operation."""
    if not pairs:
        return
    received = members.broadcast(np.concatenate([bytes_of(array) for _, array in pairs]), root=root)
    position = 0
    for variable, array in pairs:
        taken = received[position : position + array.nbytes]
        position += array.nbytes
        variable.assign(taken.view(array.dtype).reshape(array.shape))


def check_in_sync(variables: Any, *, group: Group | None = None) -> None:
    """Compare variables across ranks, bit by bit; collective. OutOfSync names the first that differs, and the ranks
    that differ from the others.

    `variables` is a model, of which the trainable weights are compared, an optimizer, or a list of Keras variables.
    """
    found = variables.trainable_variables if isinstance(variables, keras.Model) else variables_of(variables)
    arrays = [keras.ops.convert_to_numpy(each.value) for each in found]
    compare_checksums(resolve_group(group), checksum_arrays(found, arrays))


def checksum_arrays(variables: Sequence[Any], arrays: Sequence[Array]) -> list[tuple[str, int]]:
    """A checksum for the value of each variable, with its name."""
    return [
        (f"{index}: {common_name(variable)}", checksum(bytes_of(array)))
        for index, (variable, array) in enumerate(zip(variables, arrays, strict=True))
    ]


def variables_of(source: Any) -> list[Any]:
    """The variables that ranks have in common."""
    if isinstance(source, keras.Model | keras.layers.Layer):
        if not source.weights and not source.built:
            raise ValueError("the model is not built, so it has no weights yet; call it on a batch first")
        return list(source.weights)
    if isinstance(source, keras.optimizers.Optimizer):
        return list(source.variables)
    if not isinstance(source, Iterable):
        raise TypeError(f"a model, an optimizer or a list of variables is needed, got a {type(source).__name__}")
    return list(source)


def common_name(variable: Any) -> str:
    """The layer and the name of a variable, as all ranks see them: without the numbers of layers, which count what this
    process has made before, and without the models around, which a model that was loaded from a file does not have in
    its paths."""
    path = re.sub(r"_\d+(?=/|$)", "", str(getattr(variable, "path", variable.name)))
    return "/".join(path.split("/")[-2:])


def bytes_of(array: Array) -> Array:
    """The bytes of an array, as a flat array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
