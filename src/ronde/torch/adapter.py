"""Keeps torch.compile away from what runs in the middle of a step. Used by the distributed optimizer.

Whoever compiles a whole step, backward() included, lets Dynamo look at every Python frame that runs in it, the hooks of
parameters and the end of the pass among them; they talk to other ranks, which is nothing to compile. The decorator
torch.compiler.disable() would import Dynamo, which is large, and cost time in every call, of hooks that are called for
every gradient. So each function is marked as that decorator marks its own: for Dynamo's eyes alone, at no cost.

When a backward pass of PyTorch ends. Used by the distributed optimizer.

Gradients of PyTorch's parameters, for binding.Reducer. Used by the distributed optimizer.

A gradient that autograd hands over is copied to its place in the bucket, and the place becomes p.grad: then gradients
exist once, and what the optimizer reads is what the ranks wrote. Large ones are copied at once, while they are in the
cache, so that their memory is free for the next; small ones together, when their bucket is full: one call for all.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import is_
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.torch.collectives import allreduce_sparse
from ronde.torch.tensors import CPU, ReduceOptions, tensor_view
from ronde.training.adapter import GradientKind, ParameterInfo

__all__ = ["TorchAdapter", "TorchBackwardPass", "disable_dynamo", "find_frame"]


def disable_dynamo(*functions: Callable[..., object]) -> None:
    """Dynamo is to run these, and all that they call, as they are. Before PyTorch 2.7 it may try all the same."""
    frames: Any = eval_frame
    for function in functions:
        marked: Any = function
        marked._torchdynamo_disable = True  # when it is called by what is being compiled
        if hasattr(frames, "set_code_exec_strategy"):  # when it is called by C++, as hooks are
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))


class TorchBackwardPass:
    """The engine behind loss.backward()."""

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call this when the pass that is running has come to its end. What it raises, backward() raises."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "in_compiled_autograd_region", False):
            raise RuntimeError(
                "gradients cannot be combined in a backward pass that is compiled (compiled autograd): such a pass "
                "does not tell its end. Compile the model, or the whole step, without it"
            )
        Variable._execution_engine.queue_callback(callback)  # as FSDP does

    def is_nested(self, on_resume: Callable[[], None]) -> bool:
        """Whether the pass that is ending was started by the backward of a Function (a reentrant checkpoint). Then this
        is called when the pass around it comes to the nodes behind that Function, and can be asked for its end."""
        frame = find_frame(BackwardCFunction.apply)
        if frame is None:
            return False
        _call_before_next_nodes(frame.f_locals["self"], on_resume)
        return True


def find_frame(function: Callable[..., object]) -> FrameType | None:
    """The innermost call of this function that is under way in this thread."""
    code, frame = function.__code__, sys._getframe().f_back
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _call_before_next_nodes(node: Node, call: Callable[[], None]) -> None:
    """Call this before the first of the nodes that get this node's gradients."""
    hooks: list[RemovableHandle] = []

    def once(_grads: object) -> None:
        while hooks:
            hooks.pop().remove()
        call()

    hooks += [behind.register_prehook(once) for behind, _ in node.next_functions if behind is not None]


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

TensorHook: TypeAlias = Callable[[Tensor], object]
GradientCallback: TypeAlias = Callable[..., object]


class TorchAdapter:
    """The gradients of some parameters, those that train at the moment."""

    def __init__(self, rank: int, *, sparse_as_dense: bool = False) -> None:
        self._rank = rank  # for errors
        self._sparse_as_dense = sparse_as_dense
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._requires_grad: list[bool] = []
        self._parameters: list[Tensor] = []  # of the last description
        self._parameter_infos: list[ParameterInfo] = []
        self._views: list[Tensor | None] = []
        self._view_by_id: dict[int, Tensor | None] = {}  # the same by the identity of the parameter
        self._view_addresses: list[
            int
        ] = []  # where the memory of each place begins: converting a model gives it another
        self._views_by_indices: dict[tuple[int, ...], _BucketViews] = {}
        self._on_device: set[int] = set()  # on another device: their places are on the host, and no gradients
        self._hooks: list[RemovableHandle] = []
        self._new_parameter_hooks: list[RemovableHandle] = []
        self._lock = threading.Lock()
        self._last_was_copied = False  # whether the large gradient that came last was not in its place
        self._results_outside_buckets: dict[int, weakref.ref[Tensor]] = {}
        """Results that are in no place, by the identity of their parameters: sparse, or on another device."""

    def add_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """More parameters; they count from the next accord on."""
        for name, tensor in named:
            self._names.append(name)
            self._tensors.append(tensor)

    def describe_parameters(self) -> list[ParameterInfo]:
        """What trains now."""
        self._requires_grad = [tensor.requires_grad for tensor in self._tensors]
        named = zip(self._names, self._tensors, self._requires_grad, strict=True)
        living = [(name, tensor) for name, tensor, trains in named if trains]
        self._parameters = [tensor for _, tensor in living]
        self._parameter_infos = [self._describe_parameter(name, tensor) for name, tensor in living]
        return self._parameter_infos

    def parameters_changed(self) -> bool:
        """Whether other parameters train than at the last description."""
        return [tensor.requires_grad for tensor in self._tensors] != self._requires_grad

    def bind_buckets(self, bucket_views: Mapping[int, Array], on_ready: GradientCallback) -> None:
        """From now on gradients belong into this memory."""
        self.close()
        self._views = [
            _view_like(bucket_views[index], parameter) if index in bucket_views else None
            for index, parameter in enumerate(self._parameters)
        ]
        self._view_by_id = dict(zip(map(id, self._parameters), self._views, strict=True))
        self._views_by_indices = {}
        self._view_addresses = [0 if view is None else view.data_ptr() for view in self._views]
        self._on_device = {index for index, parameter in enumerate(self._parameters) if is_on_device(parameter)}
        on_ready = self._with_lock(on_ready)
        for index, parameter in enumerate(self._parameters):
            hook: TensorHook = (
                partial(self._on_large_gradient, index, on_ready) if self._is_large(index) else partial(on_ready, index)
            )
            self._hooks.append(_add_gradient_hook(parameter, hook))

    def watch_new_parameters(self, on_gradient: GradientCallback) -> None:
        """Call this for gradients of parameters that the last description did not list."""
        _remove_hooks(self._new_parameter_hooks)
        listed = set(map(id, self._parameters))
        on_gradient = self._with_lock(on_gradient)
        self._new_parameter_hooks = [
            _add_gradient_hook(each, on_gradient)
            for each in self._tensors
            if id(each) not in listed and _may_train(each)
        ]

    def copy_to_buckets(self, indices: Sequence[int]) -> dict[int, GradientKind]:
        """Copy these gradients to their places, all in one call, and let the places be the gradients."""
        places = self._views_of(tuple(indices))
        if list(map(Tensor.data_ptr, places.views)) != places.addresses:
            raise self._conversion_error(next(each for each in places.indices if self._memory_changed(each)))
        for index in places.large:  # not all at once: the first time none is in its place, and memory would be short
            self._copy_large(index)
        grads = [parameter.grad for parameter in places.parameters]
        moving = [
            index for index, grad, view in zip(places.indices, grads, places.views, strict=True) if grad is not view
        ]
        odd = {index: GradientKind.NONE for index in places.without_bucket if self._parameters[index].grad is None}
        if moving and len(moving) == len(grads) and not any(map(is_, grads, repeat(None))):
            self._copy_gradients(places, grads, odd)
        elif moving:
            self._copy_present(moving, odd)
        return odd

    def assign_results(self, indices: Sequence[int], absent: Sequence[int]) -> None:
        """What lies in the places are the gradients, for those too that had none here."""
        for index in absent:
            parameter, view = self._parameters[index], self._views[index]
            parameter.grad = torch.empty_like(parameter) if index in self._on_device else view
        for index in self._on_device.intersection(indices) if self._on_device else ():
            grad, view = self._parameters[index].grad, self._views[index]
            if grad is not None and view is not None:
                grad.copy_(view)
                self._results_outside_buckets[id(self._parameters[index])] = weakref.ref(grad)

    def still_has_result(self, ready_index: int | None) -> bool:
        """Whether gradients are still what was delivered."""
        new = None
        if (
            ready_index is not None
            and self._last_was_copied
            and self._is_large(ready_index)
            and ready_index not in self._on_device
        ):
            new = self._parameters[ready_index]  # it lies in its place by now, but was not added to what had been there
        return any(each is not new and self._is_result(each) for each in self._tensors)

    def has_unreduced_gradient(self) -> bool:
        """Whether some gradient was not delivered."""
        training = [each for each in self._tensors if each.requires_grad]
        return any(each.grad is not None and not self._is_result(each) for each in training)

    def scale(self, indices: Sequence[int], factor: float) -> None:
        """Multiply what was collected."""
        views = [view for view in (self._views[index] for index in indices) if view is not None]
        torch._foreach_mul_(views, factor)

    def find_non_finite(self, indices: Sequence[int]) -> list[int]:
        """Those of what was collected that have an infinity, or something that is not a number."""
        pairs = [(index, self._gradient_values(index)) for index in indices]
        return [index for index, numbers in pairs if numbers is not None and not bool(numbers.isfinite().all())]

    def allreduce_sparse(self, index: int, group: Group, scales: tuple[float, float]) -> None:
        """Gather everybody's rows, and add up those of one index."""
        parameter, view = self._parameters[index], self._views[index]
        grad = parameter.grad
        if grad is None or (view is not None and grad.layout is torch.strided):  # a dense one has travelled already
            rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
            grad = torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
        elif grad.layout is torch.strided:
            grad = grad.to_sparse(1)
        total: Tensor = allreduce_sparse(group, grad, ReduceOptions("sum", *scales), name=None, wait=True)
        if view is not None:
            total = (total + view.to(parameter.device).to_sparse(total.sparse_dim())).coalesce()
        parameter.grad = total
        self._results_outside_buckets[id(parameter)] = weakref.ref(total)

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        _remove_hooks(self._hooks)
        _remove_hooks(self._new_parameter_hooks)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _on_large_gradient(self, index: int, on_ready: GradientCallback, parameter: Tensor) -> None:
        """The hook of a large parameter."""
        grad = parameter.grad
        new = self._last_was_copied = grad is not self._views[index]
        if new and grad is not None and grad.layout is torch.strided:
            self._copy_gradients(self._views_of((index,)), [grad], {})
        on_ready(index)

    def _is_large(self, index: int) -> bool:
        """Whether it has a place of its own to which it is copied at once."""
        return self._views[index] is not None and self._parameters[index].nbytes >= LARGE_BYTES

    def _copy_large(self, index: int) -> None:
        grad = self._parameters[index].grad
        if grad is not None and grad is not self._views[index] and grad.layout is torch.strided:
            self._copy_gradients(self._views_of((index,)), [grad], {})

    def _is_result(self, parameter: Tensor) -> bool:
        """Whether its gradient is the one that was delivered last."""
        grad, apart = parameter.grad, self._results_outside_buckets.get(id(parameter))
        if grad is None:
            return False
        return grad is self._view_by_id.get(id(parameter)) or (apart is not None and grad is apart())

    def _gradient_values(self, index: int) -> Tensor | None:
        """Of a gradient that was collected, wherever it is."""
        grad, view = self._parameters[index].grad, self._views[index]
        if grad is not None and grad.layout is not torch.strided:
            return grad._values()
        return grad if view is None else view

    def _with_lock(self, callback: GradientCallback) -> GradientCallback:
        """The same for several threads, if there may be: autograd has one for every device."""
        if len({tensor.device for tensor in self._tensors}) == 1:
            return callback

        def guarded(*arguments: object) -> None:
            with self._lock:
                callback(*arguments)

        return guarded

    def _views_of(self, indices: tuple[int, ...]) -> _BucketViews:
        """All about these parameters in lists, so that what is done in every step is done by a few quick calls."""
        found = self._views_by_indices.get(indices)
        if found is None:
            found = self._views_by_indices[indices] = self._make_views(indices)
        return found

    def _make_views(self, indices: Sequence[int]) -> _BucketViews:
        living = [index for index in indices if self._views[index] is not None]
        return _BucketViews(
            living,
            [self._parameters[index] for index in living],
            [view for view in (self._views[index] for index in living) if view is not None],
            [self._view_addresses[index] for index in living],
            [index for index in indices if self._views[index] is None],
            [index for index in living if self._is_large(index)],
        )

    def _memory_changed(self, index: int) -> bool:
        view = self._views[index]
        return view is not None and view.data_ptr() != self._view_addresses[index]

    def _copy_present(self, indices: Sequence[int], kinds: dict[int, GradientKind]) -> None:
        """Copy those gradients that are there; zeros for the others."""
        there = []
        for index in indices:
            grad, view = self._parameters[index].grad, self._views[index]
            if grad is not None:
                there.append((index, grad))
                continue
            kinds[index] = GradientKind.NONE
            if view is not None:
                view.zero_()
        if there:
            self._copy_gradients(self._make_views([index for index, _ in there]), [grad for _, grad in there], kinds)

    def _copy_gradients(self, bucket_views: _BucketViews, grads: list[Any], kinds: dict[int, GradientKind]) -> None:
        """Copy gradients to their places. Those that are sparse stay, and are told of."""
        if torch.is_grad_enabled():  # backward(create_graph=True): what has travelled has no graph
            with torch.no_grad():
                return self._copy_gradients(bucket_views, grads, kinds)
        if self._on_device or not _copy_together(bucket_views, grads):
            for index, grad in zip(bucket_views.indices, grads, strict=True):
                self._copy_one(index, grad, kinds)

    def _copy_one(self, index: int, grad: Tensor, kinds: dict[int, GradientKind]) -> None:
        """The same when something is not as usual."""
        parameter, view = self._parameters[index], self._views[index]
        assert view is not None
        if parameter.dtype != view.dtype or parameter.shape != view.shape:
            raise self._conversion_error(index)
        if grad.layout is not torch.strided and not self._sparse_as_dense:
            kinds[index] = GradientKind.SPARSE
            view.zero_()
            return
        view.copy_(grad if grad.layout is torch.strided else grad.to_dense())
        if index not in self._on_device:
            parameter.grad = view

    def _conversion_error(self, index: int) -> ValueError:
        parameter = self._parameters[index]
        order = _memory_order(parameter)
        return ValueError(
            f"rank {self._rank}: parameter {self._parameter_infos[index]} has become {parameter.dtype}"
            f"{list(parameter.shape)}{order and f' ({order})'} on {parameter.device}, with its gradients in other "
            "memory; move and convert the model before training, or call optimizer.reset() afterwards"
        )

    def _describe_parameter(self, name: str, tensor: Tensor) -> ParameterInfo:
        if tensor.device.type == "meta" or tensor.dtype not in WIRE_TYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in WIRE_TYPES)
            raise TypeError(
                f"rank {self._rank}: parameter {name!r} is {tensor.dtype} on {tensor.device}; gradients that can be "
                f"combined are {known}, with memory behind them"
            )
        dtype, per_element = WIRE_TYPES[tensor.dtype]
        grad = tensor.grad
        return ParameterInfo(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype,
            count=tensor.numel() * per_element,
            memory_order=_memory_order(tensor),
            sparse=grad is not None and grad.layout is not torch.strided and not self._sparse_as_dense,
        )


class _BucketViews(NamedTuple):
    """The places of some parameters."""

    indices: list[int]
    parameters: list[Tensor]
    views: list[Tensor]
    addresses: list[int]
    without_bucket: list[int]
    """Those that have none."""
    large: list[int]


def _copy_together(bucket_views: _BucketViews, grads: list[Any]) -> bool:
    """The usual case in one call; False when something is not as usual."""
    try:
        torch._foreach_copy_(bucket_views.views, grads)
        for parameter, view in zip(bucket_views.parameters, bucket_views.views, strict=True):
            parameter.grad = view
    except (RuntimeError, TypeError):  # sparse, or no longer of the type it was
        return False
    return True


def is_on_device(parameter: Tensor) -> bool:
    """Whether its gradients cannot lie in the memory of the host."""
    return parameter.device != CPU


def _add_gradient_hook(parameter: Tensor, callback: GradientCallback) -> RemovableHandle:
    """Call this when a gradient has come."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # or PyTorch gives no hook; one that is frozen keeps it for when it trains
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(callback)
    parameter.requires_grad_(trains)
    return handle


def _remove_hooks(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _may_train(tensor: Tensor) -> bool:
    """Whether it could be asked to."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_inference()


def _view_like(memory: Array, parameter: Tensor) -> Tensor:
    """The memory as a tensor like the parameter; in its order of elements, too, which optimizers like."""
    flat = tensor_view(memory, WIRE_TYPES[parameter.dtype][0])
    if flat.dtype != parameter.dtype:
        flat = flat.view(parameter.dtype)  # complex
    if _is_packed(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def _memory_order(tensor: Tensor) -> str:
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
