"""Gradients of PyTorch's parameters for training/reducer, and the end of a backward pass for training/steps.

A gradient that autograd makes is copied to its memory in the bucket, and a view of that memory becomes p.grad:
gradients exist once, and what the optimizer reads is what the ranks wrote. Large ones are copied at once, while they
are in the cache, so that their memory is free for the next; small ones when their bucket is full, many in one call.

The memory is used again in the next step, unless somebody has kept a gradient, or anything that shares its memory:
then this rank's gradients of that bucket travel in the spare memory, and p.grad gets copies
(docs/decisions/0011-kept-gradients.md).

What runs in every step has no loop over parameters in Python: lists of parameters and views are made once per bucket,
and are handed to map() and to torch._foreach_*.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import compress, repeat
from operator import attrgetter, is_, ne
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import msgspec
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
from ronde.torch.sync_check import checksum_tensor
from ronde.torch.tensors import CPU, ReduceOptions, tensor_view
from ronde.training.gradients.adapter import BucketMemory, GradientKind, ParameterInfo

LARGE_BYTES = 64 * 1024
"""From this size on, copying a gradient takes longer than the call that copies it."""

NUM_COPIED_TOGETHER = 128
"""So many small gradients, with the objects that they are in C++ and in Python, are in the cache together."""

WIRE_TYPES: dict[torch.dtype, tuple[str, int]] = {
    torch.float16: ("float16", 1),
    torch.bfloat16: ("bfloat16", 1),
    torch.float32: ("float32", 1),
    torch.float64: ("float64", 1),
    torch.complex64: ("float32", 2),
    torch.complex128: ("float64", 2),
}
"""The dtype in which gradients of a parameter are reduced, and how many numbers of it one element is."""

GradientCallback: TypeAlias = Callable[..., object]
_grad_of = attrgetter("grad")
_requires_grad_of = attrgetter("requires_grad")


class TorchAdapter:
    """The gradients of some parameters of a model, as a FrameworkAdapter."""

    def __init__(self, rank: int, *, sparse_as_dense: bool = False) -> None:
        self._rank = rank
        self._sparse_as_dense = sparse_as_dense
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._requires_grad: list[bool] = []  # of all tensors, when they were last described
        self._frozen: list[Tensor] = []  # those that did not train then
        self._parameters: list[Tensor] = []  # those that were described last
        self._parameter_infos: list[ParameterInfo] = []
        self._views: list[Tensor | None] = []  # by index, the memory in the bucket
        self._view_by_id: dict[int, Tensor | None] = {}  # the same by the identity of the parameter
        self._buckets: dict[tuple[int, ...], _BucketTensors] = {}  # by the indices of their parameters
        self._bucket_of: list[_BucketTensors | None] = []  # by index
        self._large_references: dict[int, _References] = {}  # by index, to the views of large gradients
        self._on_device: set[int] = set()  # parameters that are not on the CPU: their views cannot be their gradients
        self._results_outside_buckets: dict[int, weakref.ref[Tensor]] = {}
        """Results that are no views, by the identity of their parameters: sparse ones, those on another device, and
        copies."""
        self._hooks: list[RemovableHandle] = []
        self._new_parameter_hooks: list[RemovableHandle] = []
        self._lock = threading.Lock()
        self._last_was_copied = False  # whether the large gradient that came last was not in its view

    def add_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Add parameters. They count from the next describe_parameters() on."""
        for name, tensor in named:
            self._names.append(name)
            self._tensors.append(tensor)

    # --- FrameworkAdapter ------------------------------------------------------------------------------------------

    def describe_parameters(self) -> list[ParameterInfo]:
        self._requires_grad = list(map(_requires_grad_of, self._tensors))
        trained = list(compress(zip(self._names, self._tensors, strict=True), self._requires_grad))
        self._parameters = [tensor for _, tensor in trained]
        self._frozen = [tensor for tensor in self._tensors if not tensor.requires_grad]
        self._parameter_infos = [self._describe_parameter(name, tensor) for name, tensor in trained]
        return self._parameter_infos

    def parameters_changed(self, *, all_ready: bool) -> bool:
        if all_ready and len(self._tensors) == len(self._requires_grad):  # as nearly always
            return any(map(_requires_grad_of, self._frozen))
        return list(map(_requires_grad_of, self._tensors)) != self._requires_grad

    def bind_buckets(self, buckets: Sequence[BucketMemory], on_ready: Sequence[GradientCallback]) -> None:
        self.close()
        if buckets:  # results of before, which have not been cleared, are still results
            self._results_outside_buckets = {
                id(tensor): weakref.ref(tensor.grad)
                for tensor in self._tensors
                if tensor.grad is not None and self._is_result(tensor)
            }
        arrays = {index: array for memory in buckets for index, array in memory.arrays.items()}
        self._views = [
            _view_like(arrays[index], parameter) if index in arrays else None
            for index, parameter in enumerate(self._parameters)
        ]
        self._view_by_id = dict(zip(map(id, self._parameters), self._views, strict=True))
        self._on_device = {index for index, parameter in enumerate(self._parameters) if is_on_device(parameter)}
        self._buckets = {}
        self._bucket_of = [None] * len(self._parameters)
        for memory in buckets:
            bucket = self._buckets[tuple(memory.arrays)] = self._make_bucket(memory)
            for index in memory.arrays:
                self._bucket_of[index] = bucket
        self._large_references = {}
        for bucket in self._buckets.values() if can_count_references() else ():
            bucket.small_references = _References(bucket.small.views)
            for position, index in enumerate(bucket.large.indices):
                self._large_references[index] = _References(bucket.large.views[position : position + 1])
        for index, (parameter, hook) in enumerate(zip(self._parameters, map(self._with_lock, on_ready), strict=True)):
            on_gradient = partial(self._on_large_gradient, index, hook) if self._is_large(index) else hook
            self._hooks.append(_add_gradient_hook(parameter, on_gradient))

    def watch_new_parameters(self, on_gradient: GradientCallback) -> None:
        _remove_hooks(self._new_parameter_hooks)
        described = set(map(id, self._parameters))
        on_gradient = self._with_lock(on_gradient)
        self._new_parameter_hooks = [
            _add_gradient_hook(tensor, on_gradient)
            for tensor in self._tensors
            if id(tensor) not in described
            and (tensor.is_floating_point() or tensor.is_complex())
            and not tensor.is_inference()
        ]

    def copy_to_buckets(self, indices: Sequence[int]) -> dict[int, GradientKind]:
        if torch.is_grad_enabled():  # backward(create_graph=True): a reduced gradient has no graph
            with torch.no_grad():
                return self.copy_to_buckets(indices)
        kinds: dict[int, GradientKind] = {}
        bucket = self._buckets.get(tuple(indices))
        if bucket is None:
            for index in indices:
                self._copy_one_of_any_bucket(index, kinds)
            return kinds
        large, small = bucket.large, bucket.small
        if any(map(ne, map(Tensor.data_ptr, bucket.views), bucket.addresses)):
            moved = map(ne, map(Tensor.data_ptr, bucket.views), bucket.addresses)
            for index in list(compress((*large.indices, *small.indices), moved)):
                self._renew_view(bucket, index)
        in_place = all(map(is_, map(_grad_of, large.parameters), large.views))
        if in_place and all(map(is_, map(_grad_of, small.parameters), small.views)):
            bucket.memory.uses_spare = False
            return kinds
        bucket.memory.uses_spare = self._must_use_spare(bucket)
        if bucket.memory.uses_spare:
            for index in (*large.indices, *small.indices):
                self._copy_to_spare(index, kinds)
            return kinds
        if not in_place:
            for index in large.indices:  # one by one: the memory of each is freed before the next is copied
                self._copy_one(index, self._parameters[index].grad, kinds)
        if self._on_device or not all(map(_copy_together, bucket.small_parts)):
            for index in small.indices:
                self._copy_one(index, self._parameters[index].grad, kinds)
        return kinds

    def assign_results(self, indices: Sequence[int], absent: Sequence[int]) -> None:
        for index in absent:
            parameter, bucket = self._parameters[index], self._bucket_of[index]
            if index in self._on_device:
                parameter.grad = torch.empty_like(parameter)
            elif bucket is not None and not bucket.memory.uses_spare:
                parameter.grad = self._views[index]
        for index in self._on_device.intersection(indices) if self._on_device else ():
            grad, view = self._parameters[index].grad, self._current_view(index)
            if grad is not None and view is not None:
                grad.copy_(view)
                self._results_outside_buckets[id(self._parameters[index])] = weakref.ref(grad)
        for bucket in self._buckets.values():
            if bucket.memory.uses_spare:
                self._assign_copies(bucket, set(indices))

    def still_has_result(self, ready_index: int | None) -> bool:
        ready = None if ready_index is None else self._parameters[ready_index]
        is_new = False
        if ready_index is not None and self._last_was_copied and self._is_large(ready_index):
            # It is in its view by now, but was not added to what had been there.
            is_new = ready_index not in self._on_device
        others = [tensor.grad for tensor in self._tensors if tensor is not ready and self._is_result(tensor)]
        if others:
            # If all were set to zero, the one that is ready was, too, before a gradient was added to it.
            return any(bool(_numbers_of(grad).any()) for grad in others if grad is not None)
        return ready is not None and not is_new and self._is_result(ready)

    def has_unreduced_gradient(self) -> bool:
        trained = (tensor for tensor in self._tensors if tensor.requires_grad)
        return any(tensor.grad is not None and not self._is_result(tensor) for tensor in trained)

    def scale(self, indices: Sequence[int], factor: float) -> None:
        torch._foreach_mul_([view for view in map(self._current_view, indices) if view is not None], factor)

    def take_gradients(self) -> list[Tensor | None]:
        taken = list(map(_grad_of, self._tensors))
        for tensor in self._tensors:
            tensor.grad = None
        return taken

    def put_back_gradients(self, taken: Any, factor: float) -> None:  # what take_gradients() returned
        for tensor, grad in zip(self._tensors, taken, strict=False):  # others may have been added since
            tensor.grad = grad
        if factor != 1.0:
            with torch.no_grad():
                torch._foreach_mul_([_numbers_of(grad) for grad in taken if grad is not None], factor)

    def find_non_finite(self, indices: Sequence[int]) -> list[int]:
        found: dict[int, Tensor] = {}
        for index in indices:
            grad, numbers = self._parameters[index].grad, self._current_view(index)
            if grad is not None and grad.layout is not torch.strided:
                numbers = grad._values()
            elif numbers is None:
                numbers = grad
            if numbers is not None and numbers.numel():
                found[index] = numbers
        if not found or all(map(torch.isfinite, torch._foreach_norm(list(found.values()), float("inf")))):
            return []
        return [index for index, numbers in found.items() if not bool(numbers.isfinite().all())]

    def checksum_parameters(self, skipped: Container[str]) -> list[tuple[str, int]]:
        named = zip(self._names, self._tensors, strict=True)
        compared = [(name, tensor) for name, tensor in named if name not in skipped and _has_plain_memory(tensor)]
        return [(name, checksum_tensor(tensor)) for name, tensor in compared]

    def allreduce_sparse(self, index: int, group: Group, scales: tuple[float, float]) -> None:
        parameter, view = self._parameters[index], self._current_view(index)
        grad = parameter.grad
        if grad is None or (view is not None and grad.layout is torch.strided):  # a dense one was in the bucket
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
        _remove_hooks(self._hooks)
        _remove_hooks(self._new_parameter_hooks)

    # --- copying ---------------------------------------------------------------------------------------------------

    def _on_large_gradient(self, index: int, on_ready: GradientCallback, parameter: Tensor) -> None:
        """The hook of a large parameter."""
        grad = parameter.grad
        self._last_was_copied = False
        if grad is not self._views[index] and grad is not None and grad.layout is torch.strided:
            references = self._large_references.get(index)
            self._last_was_copied = references is not None and references.are_ours() and not self._is_result(parameter)
            if self._last_was_copied:
                with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                    self._copy_one(index, grad, {})
        on_ready()

    def _is_large(self, index: int) -> bool:
        return self._views[index] is not None and self._parameters[index].nbytes >= LARGE_BYTES

    def _make_bucket(self, memory: BucketMemory) -> _BucketTensors:
        large = self._select_views([index for index in memory.arrays if self._is_large(index)])
        small = self._select_views([index for index in memory.arrays if not self._is_large(index)])
        return _BucketTensors(memory, large, small)

    def _select_views(self, indices: list[int]) -> _BucketViews:
        views = [view for index in indices if (view := self._views[index]) is not None]
        return _BucketViews(indices, [self._parameters[index] for index in indices], views)

    def _renew_view(self, bucket: _BucketTensors, index: int) -> None:
        """Make another view of a gradient's memory: its view has got other memory, by p.grad.data = something, which
        stays the gradient, or because the model was converted. ValueError if the parameter was converted, too."""
        parameter, known = self._parameters[index], self._parameter_infos[index]
        now = self._describe_parameter(known.name, parameter)
        is_same = msgspec.structs.replace(now, sparse=known.sparse) == known
        if not is_same or is_on_device(parameter) != (index in self._on_device):
            raise self._conversion_error(index)
        references, position = self._large_references.get(index), 0
        if references is None:
            references, position = bucket.small_references, bucket.small.indices.index(index)
        assert references is not None  # else nobody but us has ever had the view
        # With the same storage, by which it is known what users have kept.
        view = self._views[index] = self._view_by_id[id(parameter)] = _view_of(references.storages[position], parameter)
        references.tensors[position] = view
        bucket.replace_view(index, view)

    def _copy_one_of_any_bucket(self, index: int, kinds: dict[int, GradientKind]) -> None:
        """Copy a gradient when the buckets are new, so that nobody has kept anything of them, or find that it is in no
        bucket."""
        bucket, grad = self._bucket_of[index], self._parameters[index].grad
        if bucket is None:
            if grad is None:
                kinds[index] = GradientKind.NONE
        elif can_count_references():
            self._copy_one(index, grad, kinds)
        else:
            bucket.memory.uses_spare = True
            self._copy_to_spare(index, kinds)

    def _copy_one(self, index: int, grad: Tensor | None, kinds: dict[int, GradientKind]) -> None:
        """Copy a gradient to its view, which becomes the gradient; record it if it is missing or sparse."""
        parameter, view = self._parameters[index], self._views[index]
        assert view is not None
        if grad is view:
            return
        if grad is None or (grad.layout is not torch.strided and not self._sparse_as_dense):
            kinds[index] = GradientKind.NONE if grad is None else GradientKind.SPARSE
            view.zero_()
            return
        try:
            view.copy_(grad if grad.layout is torch.strided else grad.to_dense())
            if index not in self._on_device:
                parameter.grad = view
        except (RuntimeError, TypeError):
            if parameter.dtype != view.dtype or parameter.shape != view.shape:
                raise self._conversion_error(index) from None
            raise

    # --- what users have kept --------------------------------------------------------------------------------------

    def _must_use_spare(self, bucket: _BucketTensors) -> bool:
        """Whether a gradient is to be written to memory of the bucket that somebody else has. A gradient that still is
        its view may change: as in PyTorch, whoever has kept it without clearing it shares it."""
        if not can_count_references():
            return True
        if bucket.memory.uses_spare and any(map(self._is_copy, bucket.parameters)):
            return True  # gradients were added to the copies of before, which stay gradients
        for index in bucket.large.indices:
            if self._parameters[index].grad is not self._views[index] and not self._large_references[index].are_ours():
                return True
        assert bucket.small_references is not None
        if bucket.small_references.are_ours():  # as nearly always
            return False
        kept = compress(bucket.small.indices, bucket.small_references.find_others())
        return any(self._parameters[index].grad is not self._views[index] for index in kept)

    def _copy_to_spare(self, index: int, kinds: dict[int, GradientKind]) -> None:
        """Copy a gradient to its spare memory; record it if it is missing or sparse. It stays what it is."""
        parameter, view = self._parameters[index], self._spare_view(index)
        grad = parameter.grad
        if grad is None or (grad.layout is not torch.strided and not self._sparse_as_dense):
            kinds[index] = GradientKind.NONE if grad is None else GradientKind.SPARSE
            view.zero_()
            return
        if parameter.dtype != view.dtype or parameter.shape != view.shape:
            raise self._conversion_error(index)
        view.copy_(grad if grad.layout is torch.strided else grad.to_dense())

    def _assign_copies(self, bucket: _BucketTensors, indices: set[int]) -> None:
        """Make copies of the results in the spare memory the gradients. Where the gradient is a result that was not
        cleared, it stays the same tensor."""
        with torch.no_grad():
            for index in indices.intersection(bucket.memory.arrays).difference(self._on_device):
                parameter, view = self._parameters[index], self._spare_view(index)
                if self._is_result(parameter) and parameter.grad is not None:
                    parameter.grad.copy_(view)
                else:
                    parameter.grad = view.clone()
                    self._results_outside_buckets[id(parameter)] = weakref.ref(parameter.grad)

    def _spare_view(self, index: int) -> Tensor:
        bucket = self._bucket_of[index]
        assert bucket is not None
        if index not in bucket.spare_views:
            bucket.spare_views[index] = _view_like(bucket.memory.spare_arrays[index], self._parameters[index])
        return bucket.spare_views[index]

    def _current_view(self, index: int) -> Tensor | None:
        """The memory of a gradient in this step."""
        bucket = self._bucket_of[index]
        if bucket is not None and bucket.memory.uses_spare:
            return self._spare_view(index)
        return self._views[index]

    # --- inside ----------------------------------------------------------------------------------------------------

    def _is_result(self, parameter: Tensor) -> bool:
        """Whether its gradient is the result that was assigned last."""
        grad = parameter.grad
        return grad is not None and (grad is self._view_by_id.get(id(parameter)) or self._is_copy(parameter))

    def _is_copy(self, parameter: Tensor) -> bool:
        """Whether its gradient is the result that was assigned last, and outside of the bucket's memory."""
        outside = self._results_outside_buckets.get(id(parameter))
        return outside is not None and parameter.grad is not None and parameter.grad is outside()

    def _with_lock(self, callback: GradientCallback) -> GradientCallback:
        """The callback for several threads, if there may be: autograd has one for every device."""
        if len({tensor.device for tensor in self._tensors}) == 1:
            return callback

        def locked(*arguments: object) -> None:
            with self._lock:
                callback(*arguments)

        return locked

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
    indices: list[int]
    parameters: list[Tensor]
    views: list[Tensor]

    def cut(self, start: int, end: int) -> _BucketViews:
        return _BucketViews(self.indices[start:end], self.parameters[start:end], self.views[start:end])


class _BucketTensors:
    """The gradients of one bucket as tensors."""

    def __init__(self, memory: BucketMemory, large: _BucketViews, small: _BucketViews) -> None:
        self.memory = memory
        self.large = large
        self.small = small
        self.small_parts = [
            small.cut(start, start + NUM_COPIED_TOGETHER) for start in range(0, len(small.indices), NUM_COPIED_TOGETHER)
        ]
        self.small_references: _References | None = None
        self.parameters = [*large.parameters, *small.parameters]
        self.views = [*large.views, *small.views]
        self.addresses = [view.data_ptr() for view in self.views]  # converting a model gives a view another
        self.spare_views: dict[int, Tensor] = {}  # by index, made when they are needed

    def replace_view(self, index: int, view: Tensor) -> None:
        """Use another view of the same memory for the gradient of this parameter."""
        position = [*self.large.indices, *self.small.indices].index(index)
        self.views[position] = view
        for views in (self.large, self.small, *self.small_parts):
            if index in views.indices:
                views.views[views.indices.index(index)] = view


class _References:
    """Tells whether others have references to some tensors, or to their memory.

    What shares the memory of a tensor (a view, detach(), numpy()) refers to its storage. Others may also have the
    tensor itself, in Python (g = p.grad) or in C++ (q.grad = p.grad, a graph), or the object of the storage. So four
    numbers are compared with what they were at first. Callers must have the tensors in no variable of their own.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        """Nobody else has the tensors now."""
        self.tensors = tensors
        self.storages: list[Any] = [tensor.untyped_storage() for tensor in tensors]
        self._storage_addresses = [storage._cdata for storage in self.storages]
        self._counts_at_first = self._count()

    def are_ours(self) -> bool:
        """Whether nobody else has references."""
        return self._count() == self._counts_at_first

    def find_others(self) -> list[bool]:
        """For each tensor, whether somebody else has references."""
        now, before = zip(*self._count(), strict=True), zip(*self._counts_at_first, strict=True)
        return list(map(ne, now, before))

    def _count(self) -> list[list[int]]:
        functions: Any = torch._C
        methods: Any = Tensor
        return [
            list(map(sys.getrefcount, self.tensors)),
            list(map(methods._use_count, self.tensors)),
            list(map(sys.getrefcount, self.storages)),
            list(map(functions._storage_Use_Count, self._storage_addresses)),
        ]


_WAYS_TO_KEEP: tuple[Callable[[Tensor, Tensor], object], ...] = (
    lambda grad, other: grad,
    lambda grad, other: grad.detach(),
    lambda grad, other: grad[:1],
    lambda grad, other: grad.numpy(),
    lambda grad, other: grad.untyped_storage(),
    lambda grad, other: grad * other,  # in its graph
    lambda grad, other: setattr(other, "grad", grad),
)
"""What a user may do to keep a gradient, or its memory; `other` is a parameter."""


@cache
def can_count_references() -> bool:
    """Whether _References sees every way to keep a gradient. The functions of PyTorch that it uses are private, and
    older versions do not have all of them; then p.grad never is memory of a bucket."""
    grads, other = [torch.zeros(2)], torch.zeros(2, requires_grad=True)
    try:
        references = _References(grads)
    except AttributeError:
        return False
    with torch.enable_grad():
        for keep in _WAYS_TO_KEEP:
            kept = keep(grads[0], other)
            if references.are_ours():
                return False
            del kept
            other.grad = None
            if not references.are_ours():
                return False
    return True


def _copy_together(bucket_views: _BucketViews) -> bool:
    """Copy gradients to their views, which become the gradients, in one call. False if something is not as usual: a
    gradient is missing or sparse, or a parameter no longer has the dtype that it had."""
    grads: list[Any] = list(map(_grad_of, bucket_views.parameters))
    try:
        torch._foreach_copy_(bucket_views.views, grads)
        deque(map(setattr, bucket_views.parameters, repeat("grad"), bucket_views.views), maxlen=0)
    except (RuntimeError, TypeError):
        return False
    return True


def _numbers_of(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad._values()


def is_on_device(parameter: Tensor) -> bool:
    """Whether its gradients cannot be in the memory of the host."""
    return parameter.device != CPU


def _add_gradient_hook(parameter: Tensor, callback: GradientCallback) -> RemovableHandle:
    """Call this with the parameter whenever its gradient was accumulated."""
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # or PyTorch refuses the hook; a frozen one keeps it
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(callback)
    parameter.requires_grad_(trains)
    return handle


def _remove_hooks(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _view_like(memory: Array, parameter: Tensor) -> Tensor:
    """The memory as a tensor of the parameter's shape and, as optimizers like it, of its order of elements. It has a
    storage of its own, and no base: then nobody can get at the memory without a reference to one of the two."""
    return _view_of(tensor_view(memory, WIRE_TYPES[parameter.dtype][0]).untyped_storage(), parameter)


def _view_of(storage: torch.UntypedStorage, parameter: Tensor) -> Tensor:
    packed = parameter if _is_packed(parameter) else torch.empty(parameter.shape, device="meta")
    return torch.empty(0, dtype=parameter.dtype).set_(storage, 0, parameter.shape, packed.stride())


def _memory_order(tensor: Tensor) -> str:
    """Describe the order of its elements in memory; empty when it is row by row."""
    if tensor.is_contiguous() or not _is_packed(tensor):
        return ""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()]):
        return "channels last"
    return f"strides {tuple(tensor.stride())}"


def _has_plain_memory(tensor: Tensor) -> bool:
    """Whether its numbers are in memory as it shows them. A frozen parameter may be sparse, for example."""
    is_plain = tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_quantized
    kind: Any = type(tensor)
    wraps_others = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return is_plain and not (wraps_others or tensor.is_conj() or tensor.is_neg())


def _is_packed(tensor: Tensor) -> bool:
    """Whether its elements fill one piece of memory, each once, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


# --- the backward pass ------------------------------------------------------------------------------------------------


class TorchBackwardPass:
    """The autograd engine, as a BackwardPass."""

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call this at the end of the running pass. What it raises, backward() raises, and drops the callbacks behind
        it."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "in_compiled_autograd_region", False):
            raise RuntimeError(
                "gradients cannot be combined in a backward pass that is compiled (compiled autograd): such a pass "
                "does not report its end. Compile the model, or the whole step, without it"
            )
        Variable._execution_engine.queue_callback(callback)  # as FSDP does

    def is_nested(self, on_resume: Callable[[], None]) -> bool:
        """Whether the pass that is ending was started by the backward of a Function (a reentrant checkpoint). Then
        on_resume is called when the outer pass comes to the nodes behind that Function, where on_end() is its end."""
        frame = find_frame(BackwardCFunction.apply)
        if frame is None:
            return False
        hooks: list[RemovableHandle] = []

        def resume_once(_grads: object) -> None:
            _remove_hooks(hooks)
            on_resume()

        node: Node = frame.f_locals["self"]
        hooks += [after.register_prehook(resume_once) for after, _ in node.next_functions if after is not None]
        return True


def find_frame(function: Callable[..., object]) -> FrameType | None:
    """The innermost running call of this function in this thread."""
    code, frame = function.__code__, sys._getframe().f_back
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def disable_dynamo(*functions: Callable[..., object]) -> None:
    """Keep torch.compile away from these functions and all that they call. Before PyTorch 2.7 it may try all the same.

    Who compiles a whole step, backward() included, lets Dynamo look at every Python frame in it, the hooks of
    parameters and the end of the pass among them, which cannot be compiled. The decorator torch.compiler.disable()
    would import Dynamo, which is large, and add time to every call. So each function is marked as that decorator marks
    its own.
    """
    frames: Any = eval_frame
    for function in functions:
        marked: Any = function
        marked._torchdynamo_disable = True  # when it is called by what is being compiled
        if hasattr(frames, "set_code_exec_strategy"):  # when it is called by C++, as hooks are
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
