"""Horovod's DistributedTrainer for gluon and DistributedOptimizer for modules.

As in Horovod on CPUs, gradients are summed over the ranks, and the trainer or optimizer divides by their number when it
updates. Other than there, a parameter on several contexts gets the sum of all of its gradients.
"""

from __future__ import annotations

import warnings
from typing import Any

import ronde.mxnet
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import split_list
from horovod.mxnet.compression import Compression, CompressorWire
from horovod.mxnet.mpi_ops import running_group
from ronde.mxnet.gradients import GradientReducer, WireCodec, make_wire_codec
from ronde.mxnet.trainer import ReducingOptimizer
from ronde.training.gradients.gradient_settings import GradientSettings


def _make_reducer(
    compression: Any, predivide: float, names: list[str], num_groups: int, prefix: str, process_set: ProcessSet
) -> GradientReducer:
    together = tuple(tuple(part) for part in split_list(names, num_groups) if part) if num_groups > 0 else ()
    codec: WireCodec | None
    if compression is None or compression is Compression.none:
        codec = None
    elif compression is Compression.fp16 or isinstance(compression, str | dict):
        codec = make_wire_codec("fp16" if compression is Compression.fp16 else compression)
    else:
        codec = CompressorWire(compression)
    group = None if process_set is global_process_set else running_group(process_set)
    settings = GradientSettings(op="sum", together=together)
    return GradientReducer(settings, group, codec, prefix, (1.0 / predivide, 1.0))


class DistributedOptimizer(ReducingOptimizer):
    """An optimizer of MXNet that sums the gradients over the ranks before it updates."""

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.__dict__["_given_rescale"] = optimizer.rescale_grad  # other attributes are those of the optimizer
        optimizer.rescale_grad *= gradient_predivide_factor / running_group(process_set).size
        super().__init__(optimizer, _make_reducer(None, gradient_predivide_factor, [], 0, "", process_set))


class DistributedTrainer(ronde.mxnet.DistributedTrainer):
    """A trainer of gluon that sums the gradients over the ranks before it updates."""

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        assert prefix is None or isinstance(prefix, str)
        if isinstance(optimizer, ReducingOptimizer):
            rescale = optimizer.__dict__.get("_given_rescale", optimizer.rescale_grad)
            optimizer = optimizer._optimizer
            optimizer.rescale_grad = rescale  # the trainer divides by the number of ranks, once
            warnings.warn("DistributedTrainer takes the optimizer that DistributedOptimizer was given", stacklevel=2)
        given = list(params.values()) if hasattr(params, "values") else list(params)
        names = [param.name for param in given if param.grad_req != "null"] if num_groups > 0 else []
        reducer = _make_reducer(compression, gradient_predivide_factor, names, num_groups, prefix or "", process_set)
        group = None if process_set is global_process_set else running_group(process_set)
        self._init_distributed(params, optimizer, optimizer_params, reducer, group)
        self._scale *= gradient_predivide_factor / running_group(process_set).size
