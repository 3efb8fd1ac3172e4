"""Broadcasts of variables and objects, and the allgather of objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import ronde
import ronde.tensorflow
from horovod.common.exceptions import translate_errors
from horovod.common.process_sets import ProcessSet, global_process_set, group_of
from horovod.tensorflow.errors import tensorflow_errors
from horovod.tensorflow.util import _executing_eagerly, without_autograph
from ronde.training.agreement import check_equal


@without_autograph
def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Give the root's values to the variables of all ranks. In a graph, return the operation that does so."""
    group = group_of(process_set)
    given = list(variables)
    with tensorflow_errors():
        if not given and _executing_eagerly():  # such as those of an optimizer without a state
            check_equal(group, "broadcast_variables of 0 variables", [])
            return None
        return ronde.tensorflow.broadcast_variables(given, root_rank, group=group)


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that gives the root's values to all global variables of the graph."""
    if _executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() is for graphs: eager variables belong to no graph. Use "
            "hvd.broadcast_variables(model.variables, root_rank=0)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object; on the root it is the object itself. All processes give the same name, or none. It needs no
    session."""
    with translate_errors():
        group = group_of(process_set)
        check_equal(group, "the name of hvd.broadcast_object", [repr(name)])
        return ronde.objects.broadcast(obj, root=root_rank, group=group)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """broadcast_object() as a function of the object."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all members, by rank. All processes give the same name, or none."""
    with translate_errors():
        group = group_of(process_set)
        check_equal(group, "the name of hvd.allgather_object", [repr(name)])
        return ronde.objects.allgather(obj, group=group)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # TensorFlow has no types
    """Broadcasts all global variables from the root when a session of tf.compat.v1.train begins."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None
        self.device = device

    def begin(self) -> None:
        """Add the operation to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self.bcast_op)
