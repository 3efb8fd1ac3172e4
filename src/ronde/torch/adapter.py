"""Gradients of PyTorch's parameters, for binding.Reducer. Used by the distributed optimizer.

A gradient that autograd hands over is copied to its place in the bucket, and the place becomes p.grad: then gradients
exist once, and what the optimizer reads is what the ranks wrote. Large ones are copied at once, while they are in the
cache, so that their memory is free for the next; small ones together, when their bucket is full: one call for all.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ronde.binding.adapter import Parameter, State
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.torch.sparse import allreduce_sparse
from ronde.torch.tensors import CPU, over
from ronde.torch.transport import Reduction

__all__ = ["TorchAdapter"]

LARGE_BYTES = 64 * 1024
"""From here on copying takes longer than a call of its own."""

WIRE_TYPES: dict[torch.dtype, tuple[str, int]] = {
    torch.float16: ("float16", 1),
    torch.bfloat16: ("bfloat16", 1),
    torch.float32: ("float32", 1),
    torch.float64: ("float64", 1),
    torch.complex64: ("float32", 2),
    torch.complex128: ("float64", 2),
}
"""The type of the numbers that travel, and how many of them one element is."""

Hook: TypeAlias = Callable[[Tensor], object]
Ready: TypeAlias = Callable[..., object]


class TorchAdapter:
    """The gradients of some parameters, those that train at the moment."""

    def __init__(self, rank: int, *, sparse_as_dense: bool = False) -> None:
        self._rank = rank  # for errors
        self._sparse_as_dense = sparse_as_dense
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._trains: list[bool] = []
        self._parameters: list[Tensor] = []  # of the last description
        self._described: list[Parameter] = []
        self._views: list[Tensor | None] = []
        self._view_of: dict[int, Tensor | None] = {}  # the same by the identity of the parameter
        self._starts: list[int] = []  # where the memory of each place begins: converting a model gives it another
        self._known_places: dict[tuple[int, ...], _Places] = {}
        self._elsewhere: set[int] = set()  # on another device: their places are on the host, and no gradients
        self._hooks: list[RemovableHandle] = []
        self._watching: list[RemovableHandle] = []
        self._lock = threading.Lock()
        self._just_moved = False  # whether the large gradient that came last was not in its place
        self._apart: dict[int, weakref.ref[Tensor]] = {}
        """Results that are in no place, by the identity of their parameters: sparse, or on another device."""

    def add(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """More parameters; they count from the next accord on."""
        for name, tensor in named:
            self._names.append(name)
            self._tensors.append(tensor)

    def describe(self) -> list[Parameter]:
        """What trains now."""
        self._trains = [tensor.requires_grad for tensor in self._tensors]
        named = zip(self._names, self._tensors, self._trains, strict=True)
        living = [(name, tensor) for name, tensor, trains in named if trains]
        self._parameters = [tensor for _, tensor in living]
        self._described = [self._describe(name, tensor) for name, tensor in living]
        return self._described

    def changed(self) -> bool:
        """Whether other parameters train than at the last description."""
        return [tensor.requires_grad for tensor in self._tensors] != self._trains

    def bind(self, memory: Mapping[int, Array], ready: Ready) -> None:
        """From now on gradients belong into this memory."""
        self.close()
        self._views = [
            _view(memory[index], parameter) if index in memory else None
            for index, parameter in enumerate(self._parameters)
        ]
        self._view_of = dict(zip(map(id, self._parameters), self._views, strict=True))
        self._known_places = {}
        self._starts = [0 if view is None else view.data_ptr() for view in self._views]
        self._elsewhere = {index for index, parameter in enumerate(self._parameters) if is_elsewhere(parameter)}
        ready = self._one_by_one(ready)
        for index, parameter in enumerate(self._parameters):
            hook: Hook = partial(self._take_large, index, ready) if self._is_large(index) else partial(ready, index)
            self._hooks.append(_hook(parameter, hook))

    def watch(self, stray: Ready) -> None:
        """Call this for gradients of parameters that the last description did not list."""
        _remove(self._watching)
        listed = set(map(id, self._parameters))
        stray = self._one_by_one(stray)
        self._watching = [_hook(each, stray) for each in self._tensors if id(each) not in listed and _may_train(each)]

    def collect(self, indices: Sequence[int]) -> dict[int, State]:
        """Copy these gradients to their places, all in one call, and let the places be the gradients."""
        places = self._places_of(tuple(indices))
        if list(map(Tensor.data_ptr, places.views)) != places.starts:
            raise self._converted(next(each for each in places.indices if self._has_moved(each)))
        for index in places.large:  # not all at once: the first time none is in its place, and memory would be short
            self._move_large(index)
        grads = [parameter.grad for parameter in places.parameters]
        moving = [
            index for index, grad, view in zip(places.indices, grads, places.views, strict=True) if grad is not view
        ]
        odd = {index: State.NONE for index in places.homeless if self._parameters[index].grad is None}
        if moving and len(moving) == len(grads) and not any(map(is_, grads, repeat(None))):
            self._move(places, grads, odd)
        elif moving:
            self._move_some(moving, odd)
        return odd

    def deliver(self, indices: Sequence[int], absent: Sequence[int]) -> None:
        """What lies in the places are the gradients, for those too that had none here."""
        for index in absent:
            parameter, view = self._parameters[index], self._views[index]
            parameter.grad = torch.empty_like(parameter) if index in self._elsewhere else view
        for index in self._elsewhere.intersection(indices) if self._elsewhere else ():
            grad, view = self._parameters[index].grad, self._views[index]
            if grad is not None and view is not None:
                grad.copy_(view)
                self._apart[id(self._parameters[index])] = weakref.ref(grad)

    def kept(self, came: int | None) -> bool:
        """Whether gradients are still what was delivered."""
        new = None
        if came is not None and self._just_moved and self._is_large(came) and came not in self._elsewhere:
            new = self._parameters[came]  # it lies in its place by now, but was not added to what had been there
        return any(each is not new and self._is_result(each) for each in self._tensors)

    def given(self) -> bool:
        """Whether some gradient was not delivered."""
        training = [each for each in self._tensors if each.requires_grad]
        return any(each.grad is not None and not self._is_result(each) for each in training)

    def scale(self, indices: Sequence[int], factor: float) -> None:
        """Multiply what was collected."""
        views = [view for view in (self._views[index] for index in indices) if view is not None]
        torch._foreach_mul_(views, factor)

    def not_finite(self, indices: Sequence[int]) -> list[int]:
        """Those of what was collected that have an infinity, or something that is not a number."""
        pairs = [(index, self._numbers(index)) for index in indices]
        return [index for index, numbers in pairs if numbers is not None and not bool(numbers.isfinite().all())]

    def sum_sparse(self, index: int, group: Group, scales: tuple[float, float]) -> None:
        """Gather everybody's rows, and add up those of one index."""
        parameter, view = self._parameters[index], self._views[index]
        grad = parameter.grad
        if grad is None or (view is not None and grad.layout is torch.strided):  # a dense one has travelled already
            rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
            grad = torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
        elif grad.layout is torch.strided:
            grad = grad.to_sparse(1)
        total: Tensor = allreduce_sparse(group, grad, Reduction("sum", *scales), name=None, wait=True)
        if view is not None:
            total = (total + view.to(parameter.device).to_sparse(total.sparse_dim())).coalesce()
        parameter.grad = total
        self._apart[id(parameter)] = weakref.ref(total)

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        _remove(self._hooks)
        _remove(self._watching)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _take_large(self, index: int, ready: Ready, parameter: Tensor) -> None:
        """The hook of a large parameter."""
        grad = parameter.grad
        new = self._just_moved = grad is not self._views[index]
        if new and grad is not None and grad.layout is torch.strided:
            self._move(self._places_of((index,)), [grad], {})
        ready(index)

    def _is_large(self, index: int) -> bool:
        """Whether it has a place of its own to which it is copied at once."""
        return self._views[index] is not None and self._parameters[index].nbytes >= LARGE_BYTES

    def _move_large(self, index: int) -> None:
        grad = self._parameters[index].grad
        if grad is not None and grad is not self._views[index] and grad.layout is torch.strided:
            self._move(self._places_of((index,)), [grad], {})

    def _is_result(self, parameter: Tensor) -> bool:
        """Whether its gradient is the one that was delivered last."""
        grad, apart = parameter.grad, self._apart.get(id(parameter))
        if grad is None:
            return False
        return grad is self._view_of.get(id(parameter)) or (apart is not None and grad is apart())

    def _numbers(self, index: int) -> Tensor | None:
        """Of a gradient that was collected, wherever it is."""
        grad, view = self._parameters[index].grad, self._views[index]
        if grad is not None and grad.layout is not torch.strided:
            return grad._values()
        return grad if view is None else view

    def _one_by_one(self, call: Ready) -> Ready:
        """The same for several threads, if there may be: autograd has one for every device."""
        if len({tensor.device for tensor in self._tensors}) == 1:
            return call

        def guarded(*arguments: object) -> None:
            with self._lock:
                call(*arguments)

        return guarded

    def _places_of(self, indices: tuple[int, ...]) -> _Places:
        """All about these parameters in lists, so that what is done in every step is done by a few quick calls."""
        found = self._known_places.get(indices)
        if found is None:
            found = self._known_places[indices] = self._look_up(indices)
        return found

    def _look_up(self, indices: Sequence[int]) -> _Places:
        living = [index for index in indices if self._views[index] is not None]
        return _Places(
            living,
            [self._parameters[index] for index in living],
            [view for view in (self._views[index] for index in living) if view is not None],
            [self._starts[index] for index in living],
            [index for index in indices if self._views[index] is None],
            [index for index in living if self._is_large(index)],
        )

    def _has_moved(self, index: int) -> bool:
        view = self._views[index]
        return view is not None and view.data_ptr() != self._starts[index]

    def _move_some(self, indices: Sequence[int], odd: dict[int, State]) -> None:
        """Copy those gradients that are there; zeros for the others."""
        there = []
        for index in indices:
            grad, view = self._parameters[index].grad, self._views[index]
            if grad is not None:
                there.append((index, grad))
                continue
            odd[index] = State.NONE
            if view is not None:
                view.zero_()
        if there:
            self._move(self._look_up([index for index, _ in there]), [grad for _, grad in there], odd)

    def _move(self, places: _Places, grads: list[Any], odd: dict[int, State]) -> None:
        """Copy gradients to their places. Those that are sparse stay, and are told of."""
        if torch.is_grad_enabled():  # backward(create_graph=True): what has travelled has no graph
            with torch.no_grad():
                return self._move(places, grads, odd)
        if self._elsewhere or not _move_together(places, grads):
            for index, grad in zip(places.indices, grads, strict=True):
                self._move_one(index, grad, odd)

    def _move_one(self, index: int, grad: Tensor, odd: dict[int, State]) -> None:
        """The same when something is not as usual."""
        parameter, view = self._parameters[index], self._views[index]
        assert view is not None
        if parameter.dtype != view.dtype or parameter.shape != view.shape:
            raise self._converted(index)
        if grad.layout is not torch.strided and not self._sparse_as_dense:
            odd[index] = State.SPARSE
            view.zero_()
            return
        view.copy_(grad if grad.layout is torch.strided else grad.to_dense())
        if index not in self._elsewhere:
            parameter.grad = view

    def _converted(self, index: int) -> ValueError:
        parameter = self._parameters[index]
        order = _order(parameter)
        return ValueError(
            f"rank {self._rank}: parameter {self._described[index]} has become {parameter.dtype}"
            f"{list(parameter.shape)}{order and f' ({order})'} on {parameter.device}, with its gradients in other "
            "memory; move and convert the model before training, or call optimizer.reset() afterwards"
        )

    def _describe(self, name: str, tensor: Tensor) -> Parameter:
        if tensor.device.type == "meta" or tensor.dtype not in WIRE_TYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in WIRE_TYPES)
            raise TypeError(
                f"rank {self._rank}: parameter {name!r} is {tensor.dtype} on {tensor.device}; gradients that can be "
                f"combined are {known}, with memory behind them"
            )
        dtype, per_element = WIRE_TYPES[tensor.dtype]
        grad = tensor.grad
        return Parameter(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype,
            count=tensor.numel() * per_element,
            order=_order(tensor),
            sparse=grad is not None and grad.layout is not torch.strided and not self._sparse_as_dense,
        )


class _Places(NamedTuple):
    """The places of some parameters."""

    indices: list[int]
    parameters: list[Tensor]
    views: list[Tensor]
    starts: list[int]
    homeless: list[int]
    """Those that have none."""
    large: list[int]


def _move_together(places: _Places, grads: list[Any]) -> bool:
    """The usual case in one call; False when something is not as usual."""
    try:
        torch._foreach_copy_(places.views, grads)
        for parameter, view in zip(places.parameters, places.views, strict=True):
            parameter.grad = view
    except (RuntimeError, TypeError):  # sparse, or no longer of the type it was
        return False
    return True


def is_elsewhere(parameter: Tensor) -> bool:
    """Whether its gradients cannot lie in the memory of the host."""
    return parameter.device != CPU


def _hook(parameter: Tensor, call: Ready) -> RemovableHandle:
    """Call this when a gradient has come."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # or PyTorch gives no hook; one that is frozen keeps it for when it trains
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(call)
    parameter.requires_grad_(trains)
    return handle


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _may_train(tensor: Tensor) -> bool:
    """Whether it could be asked to."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_inference()


def _view(memory: Array, parameter: Tensor) -> Tensor:
    """The memory as a tensor like the parameter; in its order of elements, too, which optimizers like."""
    flat = over(memory, WIRE_TYPES[parameter.dtype][0])
    if flat.dtype != parameter.dtype:
        flat = flat.view(parameter.dtype)  # complex
    if _is_packed(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def _order(tensor: Tensor) -> str:
    """How its elements lie in memory, when not row by row."""
    if tensor.is_contiguous() or not _is_packed(tensor):
        return ""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()]):
        return "channels last"
    return f"strides {tuple(tensor.stride())}"


def _is_packed(tensor: Tensor) -> bool:
    """Whether its elements fill one piece of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
