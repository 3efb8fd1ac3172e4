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


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Broadcast the root's tensors, in place. Takes a state_dict, or a list of tensors or (name, tensor)."""
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in _named(params)]
    for handle in handles:
        synchronize(handle)


def _named(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str | None, Tensor]]:
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        named = [param if isinstance(param, tuple) else (None, param) for param in params]
    else:
        raise ValueError(
            f"broadcast_parameters takes a dict or a list, got {type(params).__name__}; use model.state_dict()"
        )
    return [(name, value.detach()) for name, value in named if isinstance(value, Tensor)]


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
    if not isinstance(optimizer, torch.optim.SparseAdam):
        _fill_gradients(optimizer, _sparse(model) if model is not None else set())


def _fill_gradients(optimizer: torch.optim.Optimizer, sparse: set[Tensor]) -> None:
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.requires_grad and param.grad is None and param not in sparse:
            param.grad = torch.zeros_like(param)


def _sparse(model: torch.nn.Module) -> set[Tensor]:
    """The parameters whose gradients are sparse."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {module.weight for module in model.modules() if isinstance(module, embeddings) and module.sparse}


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object; on the root it is the object itself."""
    with translate_errors():
        return ronde.objects.broadcast(obj, root=root_rank, group=running_group(process_set))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, by rank."""
    with translate_errors():
        return ronde.objects.allgather(obj, group=running_group())
