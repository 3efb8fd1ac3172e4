"""One rank's parameters, optimizer state and objects on all ranks. Called before training, and after a restart.

Optimizer state that only the root has is created from what the root sends, not by taking a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ronde.comm import objects
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.torch.tensors import broadcast_tensors, check_tensor
from ronde.training.agreement import check_equal

NamedTensors: TypeAlias = "nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"


def broadcast_parameters(params: NamedTensors, root: int = 0, *, group: Group | None = None) -> None:
    """Copy the tensors of the root, a rank of the job, into those of all ranks, in place.

    `params` is a module (its parameters and all of its buffers), a state_dict, or pairs such as
    model.named_parameters(). If the ranks' tensors differ in name, dtype or shape, Mismatch names the first that does.
    """
    members = resolve_group(group)
    named = _named_tensors(params)
    for name, tensor in named:
        _check_tensor(name, tensor)
    check_equal(members, "broadcast_parameters", [_describe_tensor(name, tensor) for name, tensor in named])
    tensors = list({id(tensor): tensor for _, tensor in named}.values())
    _broadcast_in_place(members, tensors, root)


def broadcast_object(obj: Any, root: int = 0, *, group: Group | None = None) -> Any:  # any object
    """Return the object of the root, a rank of the job. What the other ranks pass is ignored."""
    return objects.broadcast(obj, root, group=group)


def allgather_object(obj: Any, *, group: Group | None = None) -> list[Any]:
    """Return the objects of all members, in their order."""
    return objects.allgather(obj, group=group)


def broadcast_optimizer_state(optimizer: Optimizer, root: int = 0, *, group: Group | None = None) -> None:
    """Copy the state and options (lr, momentum, …) of the root's optimizer into the optimizers of all ranks.

    Works for any optimizer over the same parameters, before its first step as well as later. State that only others
    than the root have is dropped. Parameters are not touched.
    """
    members = resolve_group(group)
    described = [
        _describe_tensor(f"parameter {number} of group {index}", param)
        for index, options in enumerate(optimizer.param_groups)
        for number, param in enumerate(options["params"])
    ]
    check_equal(members, "broadcast_optimizer_state", [type(optimizer).__name__, *described])
    is_root = members.rank is not None and members.ranks[members.rank] == root
    tensors: list[Tensor] = []
    skeleton = objects.broadcast(_make_skeleton(optimizer, tensors) if is_root else None, root, group=members)
    if is_root:
        _broadcast_in_place(members, tensors, root)
        return
    state, options = _fill_skeleton(skeleton, optimizer, tensors)
    _broadcast_in_place(members, tensors, root)
    optimizer.state = defaultdict(dict, state)
    for mine, given in zip(optimizer.param_groups, options, strict=True):
        mine.update(given)


# --- inside ---------------------------------------------------------------------------------------------------------


def _named_tensors(params: NamedTensors) -> list[tuple[str, Tensor]]:
    if isinstance(params, nn.Module):
        return [*params.named_parameters(), *params.named_buffers()]
    pairs: list[Any] = [params]
    if isinstance(params, Iterable):
        pairs = list(params.items() if isinstance(params, Mapping) else params)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            kind = type(pair).__name__
            got = f"a {kind}" if pair is params else f"something with a {kind} in it"
            raise TypeError(
                "broadcast_parameters takes a module, a state_dict or pairs (name, tensor), "
                f"got {got}; pass model.named_parameters()"
            )
    return pairs


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        kind = type(tensor).__name__
        raise TypeError(f"broadcast_parameters: {name!r} is no tensor but a {kind}; use broadcast_object() for it")
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(
            f"broadcast_parameters: {name!r} is a view that only shows other numbers conjugated or negated; "
            "make it a tensor of its own with resolve_conj().resolve_neg()"
        )
    check_tensor(_as_sendable(tensor), f"broadcast_parameters: {name!r}")


def _describe_tensor(name: str, tensor: Tensor) -> str:
    return f"{name!r}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _broadcast_in_place(members: Group, tensors: list[Tensor], root: int) -> None:
    if tensors:
        memory = [_as_sendable(tensor) for tensor in tensors]
        broadcast_tensors(members, memory, memory, root, name=None, wait=False).wait()


def _as_sendable(tensor: Tensor) -> Tensor:
    """The same memory as a dtype that can be broadcast."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach())
    if tensor.is_floating_point() and tensor.element_size() == 1:  # float8 in all its forms
        return tensor.detach().view(torch.uint8)
    return tensor


@dataclass(frozen=True)
class _TensorPlaceholder:
    """Stands for a tensor in a skeleton. The tensor itself is broadcast after it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_param_device: bool
    """Whether it is on the device of its parameter, or on the CPU, as step counters are."""


class _RankLocal:
    """Stands for something that every rank has its own of, such as a group."""


_Skeleton: TypeAlias = tuple[list[tuple[Any, Any]], list[dict[str, Any]]]
"""An optimizer's state and options with placeholders for tensors. The key of a parameter's state is its number; other
keys stay as they are."""


def _make_skeleton(optimizer: Optimizer, sent: list[Tensor]) -> _Skeleton:
    """The root's skeleton. The tensors are appended to `sent`, in the order of their placeholders."""
    numbers = {id(param): number for number, param in enumerate(_params(optimizer))}
    state: list[tuple[Any, Any]] = []
    states: Mapping[Any, Any] = optimizer.state  # torch says tensors only, but some optimizers keep other keys too
    for key, value in states.items():
        if not isinstance(key, Tensor):
            state.append((key, _replace_tensors(value, None, sent)))
        elif id(key) in numbers:  # what belongs to no parameter of this optimizer any more is not sent
            state.append((numbers[id(key)], _replace_tensors(value, key, sent)))
    options = [
        {key: _replace_tensors(value, None, sent) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return state, options


def _fill_skeleton(
    skeleton: _Skeleton, optimizer: Optimizer, received: list[Tensor]
) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Another rank's state and options. Its tensors, old ones where they fit, are appended to `received`."""
    params, state = _params(optimizer), {}
    for key, value in skeleton[0]:
        param = params[key] if isinstance(key, int) else None
        owner = key if param is None else param
        state[owner] = _restore_tensors(value, param, optimizer.state.get(owner), received)
    options = [
        {key: _restore_tensors(value, None, mine.get(key), received) for key, value in given.items()}
        for given, mine in zip(skeleton[1], optimizer.param_groups, strict=True)
    ]
    return state, options


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _replace_tensors(value: Any, param: Tensor | None, sent: list[Tensor]) -> Any:  # any state
    """The value with placeholders for its tensors, which are appended to `sent`."""
    if isinstance(value, Tensor):
        sent.append(value)
        with_param = param is not None and value.device == param.device and param.device.type != "cpu"
        return _TensorPlaceholder(tuple(value.shape), value.dtype, with_param)
    if isinstance(value, Group):
        return _RankLocal()
    if isinstance(value, Mapping):
        return {key: _replace_tensors(each, param, sent) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace_tensors(each, param, sent) for each in value)
    return value


def _restore_tensors(value: Any, param: Tensor | None, mine: Any, received: list[Tensor]) -> Any:
    """The value with tensors for its placeholders; `mine` is what this rank has there now."""
    if isinstance(value, _TensorPlaceholder):
        fits = isinstance(mine, Tensor) and tuple(mine.shape) == value.shape and mine.dtype is value.dtype
        device = param.device if value.on_param_device and param is not None else "cpu"
        tensor = mine if fits else torch.empty(value.shape, dtype=value.dtype, device=device)
        received.append(tensor)
        return tensor
    if isinstance(value, _RankLocal):
        return mine
    if isinstance(value, dict):
        old = mine if isinstance(mine, Mapping) else {}
        return {key: _restore_tensors(each, param, old.get(key), received) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_restore_tensors(each, param, None, received) for each in value)
    return value
