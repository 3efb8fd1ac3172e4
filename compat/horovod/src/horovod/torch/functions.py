"""Broadcasts of parameters, optimizer state and objects, and the allgather of objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import ronde
import ronde.torch
from horovod.common.exceptions import translate_errors
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.mpi_ops import broadcast_async_, running_group, synchronize
from ronde.training.agreement import check_equal


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Broadcast the root's tensors, in place. Takes a state_dict, or a list of tensors or (name, tensor)."""
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        named = [param if isinstance(param, tuple) else (None, param) for param in params]
    else:
        raise ValueError(
            f"broadcast_parameters takes a dict or a list, got {type(params).__name__}; use model.state_dict()"
        )
    tensors = [(name, value.detach()) for name, value in named if isinstance(value, Tensor)]
    for handle in [broadcast_async_(tensor, root_rank, name) for name, tensor in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Broadcast the root's optimizer state: momenta, counters, learning rates.

    As in Horovod, parameters that train and have no gradient get zeros, except those of sparse embeddings in `model`.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of LBFGS cannot be broadcast: it is made of closures' results")
    with translate_errors():
        ronde.torch.broadcast_optimizer_state(optimizer, root=root_rank, group=running_group())
    if isinstance(optimizer, torch.optim.SparseAdam):
        return
    modules = model.modules() if model is not None else ()
    embeddings = [module for module in modules if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)]
    sparse = {module.weight for module in embeddings if module.sparse}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.requires_grad and param.grad is None and param not in sparse:
            param.grad = torch.zeros_like(param)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object; on the root it is the object itself. All processes give the same name, or none."""
    with translate_errors():
        group = running_group(process_set)
        check_equal(group, "the name of hvd.broadcast_object", [repr(name)])
        return ronde.objects.broadcast(obj, root=root_rank, group=group)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, by rank. All processes give the same name, or none."""
    with translate_errors():
        group = running_group()
        check_equal(group, "the name of hvd.allgather_object", [repr(name)])
        return ronde.objects.allgather(obj, group=group)
