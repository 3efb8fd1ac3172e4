"""One state for all ranks: broadcast_variables(), and objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ronde.comm import objects
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.tensorflow.collectives import as_array
from ronde.tensorflow.graph_operations import add_broadcasts
from ronde.tensorflow.tracing import operation_name, without_autograph
from ronde.training.agreement import check_equal
from ronde.training.graph_operations import GraphOperation


@without_autograph
def broadcast_variables(variables: Sequence[Any], root: int = 0, *, group: Group | None = None) -> Any:
    """Give the values that the variables have on the root, a rank of the world, to those of all ranks. Collective.

    They are variables of TensorFlow or of Keras: all ranks pass the same ones in the same order. Eagerly, it returns
    when that is done. In a graph of a session it returns the node that does it.
    """
    members, given = resolve_group(group), list(variables)
    if tf.executing_eagerly():
        _broadcast_eagerly(members, given, root)
        return None
    base = operation_name("broadcast_variables", None)
    if not given:
        return tf.no_op()
    operations = [GraphOperation("broadcast", f"{base}.{index}", members.id, root=root) for index in range(len(given))]
    values = add_broadcasts(operations, [tf.convert_to_tensor(variable) for variable in given])
    return tf.group(*[variable.assign(value) for variable, value in zip(given, values, strict=True)])


def _broadcast_eagerly(members: Group, variables: list[Any], root: int) -> None:
    if not variables:
        raise ValueError(
            "broadcast_variables got no variables: a model that is not built has none yet; call it on a batch, or give "
            "it an Input layer"
        )
    tensors = [tf.convert_to_tensor(variable) for variable in variables]
    described = [f"{each.dtype.name}{each.shape.as_list()}" for each in tensors]
    check_equal(members, f"broadcast_variables of {len(variables)} variables", described)
    works = [members.broadcast(as_array(each), root=root, wait=False) for each in tensors]
    is_root = members.rank is not None and members.ranks[members.rank] == root
    for variable, work in zip(variables, works, strict=True):
        value = work.wait()
        if not is_root:
            variable.assign(value)


def broadcast_object(obj: Any, root: int = 0, *, group: Group | None = None) -> Any:  # any object
    """Return the object of the root, a rank of the world. What the other ranks pass is ignored."""
    return objects.broadcast(obj, root, group=group)


def allgather_object(obj: Any, *, group: Group | None = None) -> list[Any]:
    """Return the objects of all members, in their order."""
    return objects.allgather(obj, group=group)
