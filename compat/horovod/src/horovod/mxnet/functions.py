"""Broadcasts of parameters and objects, and the allgather of objects."""

from __future__ import annotations

from typing import Any

import mxnet as mx

import ronde
import ronde.mxnet
from horovod.common.exceptions import translate_errors
from horovod.mxnet.mpi_ops import mxnet_errors, running_group, size
from ronde.training.agreement import check_equal


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Broadcast the root's parameters, in place. Takes a dict of arrays or parameters, or a ParameterDict. Parameters
    whose shape is not known yet are broadcast when they are initialized."""
    if size() == 1:
        return
    assert prefix is None or isinstance(prefix, str)
    if not isinstance(params, dict | mx.gluon.ParameterDict):
        raise ValueError(f"broadcast_parameters takes a dict or a ParameterDict, got {type(params).__name__}")
    if not params:
        return
    with mxnet_errors():
        ronde.mxnet.broadcast_parameters(params, root_rank, group=running_group(), name=prefix or "")


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object; on the root it is the object itself. All processes give the same name, or none."""
    with translate_errors():
        group = running_group()
        check_equal(group, "the name of hvd.broadcast_object", [repr(name)])
        return ronde.objects.broadcast(obj, root=root_rank, group=group)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, by rank. All processes give the same name, or none."""
    with translate_errors():
        group = running_group()
        check_equal(group, "the name of hvd.allgather_object", [repr(name)])
        return ronde.objects.allgather(obj, group=group)
