"""One state for all ranks: broadcast_parameters(), objects, and metrics of the whole job."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx

from ronde.comm import objects
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.mxnet.arrays import get_dtype, is_array
from ronde.mxnet.collectives import broadcast
from ronde.training.agreement import check_equal
from ronde.training.metrics import weighted_means, weighted_values


def broadcast_parameters(params: Any, root: int = 0, *, group: Group | None = None, name: str = "") -> None:
    """Give the parameters of the root, a rank of the world, to all ranks. Collective.

    `params` are arrays or parameters by name, a block of gluon, its collect_params(), a trainer, or a module that has
    parameters. A parameter whose shape is not known yet is broadcast when it is initialized, in the first forward pass;
    those are matched by their names, before which `name` is put.
    """
    members = resolve_group(group)
    if isinstance(params, mx.mod.BaseModule):
        _broadcast_module(params, root, members, name)
        return
    arrays: dict[str, list[Any]] = {}
    deferred: dict[str, Any] = {}
    for key, each in sorted(_named_parameters(params).items()):
        if not isinstance(each, mx.gluon.Parameter):
            arrays[key] = [each]
        elif each._data is None and each._deferred_init:
            deferred[key] = each
        else:
            arrays[key] = each.list_data()
    if not arrays and not deferred:
        raise ValueError("broadcast_parameters got no parameters; call it after initialize(), with collect_params()")
    described = [f"{key} {get_dtype(each[0]).name.lower()}{list(each[0].shape)}" for key, each in arrays.items()]
    described += [f"{key} without a shape" for key in deferred]
    check_equal(members, f"broadcast_parameters of {len(described)} parameters", described)
    if members.size == 1:
        return
    for each in arrays.values():  # all of them under way at once
        _broadcast_to_all(each, root, members)
    for key, parameter in deferred.items():
        _broadcast_when_initialized(parameter, root, members, f"{name}{key}")
    for each in arrays.values():
        for array in each:
            array.wait_to_read()


def _named_parameters(params: Any) -> Mapping[str, Any]:
    if isinstance(params, mx.gluon.Trainer):
        return {f"{index:06d}": each for index, each in enumerate(params._params)}
    if isinstance(params, mx.gluon.Block):
        params = params.collect_params()
    if not isinstance(params, dict | mx.gluon.ParameterDict):
        raise ValueError(
            f"broadcast_parameters takes parameters or arrays by name, a block, a trainer or a module, got a "
            f"{type(params).__name__}"
        )
    found = dict(params.items())
    for key, each in found.items():
        if not isinstance(each, mx.gluon.Parameter) and not is_array(each):
            raise ValueError(f"broadcast_parameters: {key!r} is a {type(each).__name__}, and no parameter or array")
    return found


def _broadcast_to_all(arrays: list[Any], root: int, members: Group, name: str | None = None) -> None:
    """Broadcast the first array, and copy it to the others, which are on other contexts."""
    with mx.autograd.pause():
        broadcast(arrays[0], root=root, out=arrays[0], group=members, name=name, wait=False)
        for each in arrays[1:]:
            arrays[0].copyto(each)


def _broadcast_when_initialized(parameter: Any, root: int, members: Group, name: str) -> None:
    """Let a parameter be broadcast when it gets its first values, which is in the middle of a forward pass."""
    initialize: Callable[..., None] = parameter._init_impl

    def initialize_and_broadcast(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(*args, **kwargs)
        _broadcast_to_all(self.list_data(), root, members, f"initial value of {name}")
        del self.__dict__["_init_impl"]

    parameter._init_impl = types.MethodType(initialize_and_broadcast, parameter)


def _broadcast_module(module: Any, root: int, members: Group, name: str) -> None:
    if not module.params_initialized:
        raise ValueError("broadcast_parameters: the module has no parameters yet; call init_params() first")
    arg_params, aux_params = module.get_params()
    broadcast_parameters({**arg_params, **aux_params}, root, group=members, name=name)
    module.set_params(arg_params, aux_params)


def broadcast_object(obj: Any, root: int = 0, *, group: Group | None = None) -> Any:  # any object
    """Return the object of the root, a rank of the world. What the other ranks pass is ignored."""
    return objects.broadcast(obj, root, group=group)


def allgather_object(obj: Any, *, group: Group | None = None) -> list[Any]:
    """Return the objects of all members, in their order."""
    return objects.allgather(obj, group=group)


def average_metrics(
    values: Any, *, count: float | Mapping[str, float] = 1.0, group: Group | None = None
) -> dict[str, float]:
    """Return the means over all ranks, weighted by `count`, the number of samples that this rank's values stand for.

    `values` are numbers or arrays with one element by name, or a metric of mx.metric, whose own number of samples
    counts then. Every rank calls it, even one without a sample: with count=0 its values do not count, and `values` may
    be empty. A metric without any sample is NaN. Every rank gets the same numbers.
    """
    if isinstance(values, mx.metric.EvalMetric):
        mine = {}
        for metric in _single_metrics(values):
            mine.update(weighted_values(dict(metric.get_name_value()), metric.num_inst))
    elif isinstance(values, Mapping):
        numbers = {name: value.asscalar() if is_array(value) else value for name, value in values.items()}
        mine = weighted_values(numbers, count)
    else:
        raise TypeError(
            "average_metrics takes values by name, such as {'loss': loss}, or a metric of mx.metric, got a "
            f"{type(values).__name__}"
        )
    return weighted_means(objects.allgather(mine, group=group))


def _single_metrics(metric: Any) -> list[Any]:
    if isinstance(metric, mx.metric.CompositeEvalMetric):
        return [each for part in metric.metrics for each in _single_metrics(part)]
    return [metric]
