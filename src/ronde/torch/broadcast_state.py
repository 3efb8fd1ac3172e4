"""One rank's parameters, optimizer state and objects on all ranks. Called before training, and after a restart; in
elastic training, at the start of a round, with several ranks that hold the same and share the work.

Optimizer state that only the root has is created from what the root sends, not by taking a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ronde.comm import objects
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.torch.tensors import OutputTensor, as_host_array, broadcast_tensors, check_tensor
from ronde.training.agreement import check_equal

SYNC_TAG = 0x726F6E64
"""The tag of messages with a giver's tensors."""
NamedTensors: TypeAlias = "nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"


def broadcast_parameters(params: NamedTensors, root: int = 0, *, group: Group | None = None) -> None:
    """Copy the tensors of the root, a rank of the world, into those of all ranks, in place.

    `params` is a module (its parameters and all of its buffers), a state_dict, or pairs such as
    model.named_parameters(). If the ranks' tensors differ in name, dtype or shape, Mismatch names the first that does.
    """
    sync_parameters(params, (root,), resolve_group(group))


def broadcast_object(obj: Any, root: int = 0, *, group: Group | None = None) -> Any:  # any object
    """Return the object of the root, a rank of the world. What the other ranks pass is ignored."""
    return objects.broadcast(obj, root, group=group)


def allgather_object(obj: Any, *, group: Group | None = None) -> list[Any]:
    """Return the objects of all members, in their order."""
    return objects.allgather(obj, group=group)


def broadcast_optimizer_state(optimizer: Optimizer, root: int = 0, *, group: Group | None = None) -> None:
    """Copy the state and options (lr, momentum, …) of the root's optimizer into the optimizers of all ranks.

    Works for any optimizer over the same parameters, before its first step as well as later. State that only others
    than the root have is dropped. Parameters are not touched.
    """
    sync_optimizer_state(optimizer, (root,), resolve_group(group))


# --- several givers -------------------------------------------------------------------------------------------------


def sync_parameters(params: NamedTensors, givers: Sequence[int], members: Group) -> None:
    """Copy the tensors of the givers, ranks of the world with the same parameters, into those of all other members.
    Tensors that are no parameters, such as buffers, come from the first giver: those of others may differ. Collective.
    """
    named = _named_tensors(params)
    for name, tensor in named:
        _check_tensor(name, tensor)
    check_equal(members, "broadcast_parameters", [_describe_tensor(name, tensor) for name, tensor in named])
    tensors = list({id(tensor): tensor for _, tensor in named}.values())
    sizes = [tensor.nbytes if isinstance(tensor, nn.Parameter) else 0 for tensor in tensors]
    shared = zip(assign_givers(sizes, givers), sizes, strict=True)
    _sync_tensors(tensors, [giver if size else givers[0] for giver, size in shared], givers, members)


def sync_optimizer_state(optimizer: Optimizer, givers: Sequence[int], members: Group) -> None:
    """Copy state and options of the givers' optimizers, which hold the same, into those of all other members.
    Collective."""
    described = [
        _describe_tensor(f"parameter {number} of group {index}", param)
        for index, options in enumerate(optimizer.param_groups)
        for number, param in enumerate(options["params"])
    ]
    check_equal(members, "broadcast_optimizer_state", [type(optimizer).__name__, *described])
    root, is_giver = givers[0], _own_rank(members) in givers
    tensors: list[Tensor] = []
    skeleton = make_skeleton(optimizer, tensors) if is_giver else None
    skeleton = objects.broadcast(skeleton, root, group=members)
    state, options = (None, None) if is_giver else fill_skeleton(skeleton, optimizer, tensors)
    _sync_tensors(tensors, assign_givers([tensor.nbytes for tensor in tensors], givers), givers, members)
    if state is not None and options is not None:
        set_state(optimizer, state, options)


def assign_givers(sizes: Sequence[int], givers: Sequence[int]) -> list[int]:
    """For tensors of so many bytes, the giver that sends each: all of them send about equally much."""
    loads = dict.fromkeys(givers, 0)
    assigned = [givers[0]] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        giver = assigned[index] = min(loads, key=loads.__getitem__)
        loads[giver] += sizes[index]
    return assigned


def _sync_tensors(tensors: Sequence[Tensor], senders: Sequence[int], givers: Sequence[int], members: Group) -> None:
    """Copy tensors of the givers, each from the giver that is its sender, into those of the members that are no givers,
    all at once. If these are few, the tensors are sent directly to them, so that the givers receive nothing."""
    takers = [rank for rank in members.ranks if rank not in givers]
    memory = [(_as_sendable(tensor), sender) for tensor, sender in zip(tensors, senders, strict=True) if tensor.numel()]
    if not takers or not memory:
        return
    own_rank, what = _own_rank(members), "the state of a giver"
    works: list[Any] = []
    if len(givers) == 1 or len(takers) > len(givers):
        for giver in givers:
            sent = [tensor for tensor, sender in memory if sender == giver]
            received = [torch.empty_like(each) for each in sent] if own_rank in givers and own_rank != giver else sent
            works.append(broadcast_tensors(members, sent, received, giver, name=None, wait=False))
        for work in works:
            work.wait()
    elif own_rank in givers:
        arrays = [as_host_array(tensor, what) for tensor, sender in memory if sender == own_rank]
        works = [members.send(array, taker, tag=SYNC_TAG, wait=False) for array in arrays for taker in takers]
        for work in works:
            work.wait()
    else:
        outputs = [OutputTensor(tensor, tensor, as_host_array(tensor, what), what) for tensor, _ in memory]
        for output, (_, sender) in zip(outputs, memory, strict=True):
            works.append(members.receive(output.array, sender, tag=SYNC_TAG, wait=False))
        for output, work in zip(outputs, works, strict=True):
            output.finish(work.wait())


def _own_rank(members: Group) -> int | None:
    return None if members.rank is None else members.ranks[members.rank]


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


Skeleton: TypeAlias = tuple[list[tuple[Any, Any]], list[dict[str, Any]]]
"""An optimizer's state and options with placeholders for tensors. The key of a parameter's state is its number; other
keys stay as they are."""


def make_skeleton(optimizer: Optimizer, sent: list[Tensor]) -> Skeleton:
    """The skeleton of an optimizer. The tensors are appended to `sent`, in the order of their placeholders."""
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


def fill_skeleton(
    skeleton: Skeleton, optimizer: Optimizer, received: list[Tensor]
) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """State and options for an optimizer over the same parameters. Their tensors, old ones where they fit, are appended
    to `received`: their numbers are to be filled in."""
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


def set_state(optimizer: Optimizer, state: dict[Any, Any], options: Sequence[dict[str, Any]]) -> None:
    """Let an optimizer have the state and options that fill_skeleton() made."""
    optimizer.state = defaultdict(dict, state)
    for mine, given in zip(optimizer.param_groups, options, strict=True):
        mine.update(given)


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
