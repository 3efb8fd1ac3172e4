"""Tensors as memory that ronde's collectives read and write, and those collectives on tensors without autograd.

Tensors on the CPU are used where they are, without a copy; those on another device through a copy on the host.
collectives.py has the public functions, and differentiable.py their gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from ronde.comm.buffers import Array, Bfloat16View
from ronde.comm.group import Group
from ronde.comm.work import Work, call_when_over
from ronde.types import Deadline, Op

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")

CPU = torch.device("cpu")
HostArray: TypeAlias = "Array | Bfloat16View"
"""What a collective of ronde takes and returns."""


def check_tensor(x: object, what: str) -> Tensor:
    """The tensor, or TypeError if it cannot be exchanged. `what` is the operation, for the message."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: takes a tensor, got {type(x).__name__}; for NumPy arrays and numbers use ronde's own")
    if x.layout is not torch.strided:
        raise TypeError(
            f"{what}: takes a dense tensor, got one with layout {x.layout}; only allreduce takes sparse ones"
        )
    if x.dtype.is_complex:
        raise TypeError(f"{what}: complex numbers cannot be exchanged; pass torch.view_as_real(x), which is a view")
    if x.device.type == "meta":
        raise TypeError(f"{what}: the tensor is on the meta device and has no numbers; move it with to_empty() first")
    return x


def as_host_array(x: Tensor, what: str) -> HostArray:
    """The tensor's memory when it is on the CPU, else a copy on the host."""
    host = check_tensor(x, what)
    # Every operation of PyTorch releases the GIL, and it may take long to get it back: none that is not needed.
    if host.requires_grad:
        host = host.detach()
    if not host.is_cpu:
        host = host.cpu()
    try:
        if host.dtype is torch.bfloat16:
            return Bfloat16View(host.view(torch.int16).numpy())
        array: Array = host.numpy()
        return array
    except (TypeError, RuntimeError) as error:
        if host.is_neg():
            copy: Array = host.resolve_neg().numpy()
            copy.flags.writeable = False  # as `out` it would not be the caller's memory
            return copy
        raise TypeError(f"{what}: numbers of type {x.dtype} cannot be exchanged: {error}") from None


def as_tensor(result: HostArray, device: torch.device) -> Tensor:
    """The result of a collective as a tensor over the same memory, or copied to its device."""
    if isinstance(result, Bfloat16View):
        tensor = torch.from_numpy(result.bits.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(result)
    return tensor if device.type == "cpu" else tensor.to(device)


def tensor_view(memory: Array, dtype: str) -> Tensor:
    """A flat array of numbers of this dtype, in which bfloat16 is uint16, as a tensor over the same memory."""
    return as_tensor(Bfloat16View(memory) if dtype == "bfloat16" else memory, CPU)


class OutputTensor:
    """The tensor of a result: the caller's `out`, or a new one on the device of the input."""

    __slots__ = ("_device", "_out", "array")

    def __init__(self, out: Tensor | None, x: Tensor, given: HostArray, what: str) -> None:
        self._out = out
        self._device = x.device
        self.array: HostArray | None = None
        """The `out` of ronde's collective."""
        if out is not None:
            self.array = given if out is x else as_host_array(out, f"{what}: out")

    def finish(self, result: HostArray) -> Tensor:
        """The tensor for the caller, after the operation."""
        out = self._out
        if out is None:
            return as_tensor(result, self._device)
        if out.device.type != "cpu":
            with torch.no_grad():
                out.copy_(as_tensor(result, CPU))
            return out
        try:
            # Autograd has to know of the write, or a backward pass could use numbers that were overwritten.
            torch.autograd.graph.increment_version(out)
        except RuntimeError:
            if not out.is_inference():  # it has no version counter
                raise
        return out


class TensorWork:
    """The handle of an operation on tensors that is under way. It is used as ronde.Work is, but no stream can wait."""

    def __init__(self, works: Sequence[Work], finish: Callable[[list[Any]], Any], name: str | None) -> None:
        self.name = name or ""
        """The name it was given; empty for an operation matched by program order."""
        self._works = tuple(works)
        self._finish: Callable[[list[Any]], Any] | None = finish
        self._result: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> Any:  # a tensor, a list of them, or a pair
        """Wait and return the result, or raise the error. It may be called again, and from any thread."""
        deadline = None if timeout_s is None else Deadline(timeout_s)
        results = [work.wait(None if deadline is None else deadline.remaining_s) for work in self._works]
        with self._lock:
            if self._finish is not None:
                self._result = self._finish(results)
                self._finish = None
        return self._result

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return all(work.done() for work in self._works)

    def result(self) -> Any:  # as wait()
        """The result of an operation that is done(); ValueError before that."""
        if not self.done():
            raise ValueError(f"{self.name or 'the operation'} is still under way; wait() for it")
        return self.wait()

    def exception(self) -> Exception | None:
        """The error of an operation that is done(), or None; ValueError before that."""
        errors = (work.exception() for work in self._works)
        return next((error for error in errors if error is not None), None)

    def then(self, function: Callable[[TensorWork], T]) -> Future[T]:
        """Call function(self) once when the operation is over, as Work.then does; return a future of its result."""
        return call_when_over(self._works, lambda: function(self))

    def future(self) -> Future[Any]:
        """Return a concurrent.futures.Future of the result or the error."""
        return self.then(TensorWork.wait)

    def convert(self, convert: Callable[[Any], Any]) -> TensorWork:
        # This work with its result converted. Only one of the two may be waited for.
        finish = self._finish
        assert finish is not None, "wait() was called before convert()"
        return TensorWork(self._works, lambda results: convert(finish(results)), self.name)

    def __repr__(self) -> str:
        return f"<TensorWork {self.name or 'unnamed'}: {'over' if self.done() else 'under way'}>"


class ReduceOptions(NamedTuple):
    """The reduction postscale * op(prescale * x)."""

    op: str | Op = "sum"
    prescale: float = 1.0
    postscale: float = 1.0


def allreduce_tensor(
    group: Group, x: Tensor, out: Tensor | None, options: ReduceOptions, *, name: str | None, wait: bool
) -> Any:  # a tensor, or its TensorWork
    """The reduction of one tensor, which is the most frequent case."""
    given = as_host_array(x, "allreduce")
    output = OutputTensor(out, x, given, "allreduce")
    op, prescale, postscale = options
    outcome = group.allreduce(
        given, op=op, out=output.array, name=name, prescale=prescale, postscale=postscale, wait=wait
    )
    if wait:
        return output.finish(outcome)
    return TensorWork([outcome], lambda results: output.finish(results[0]), name)


def allreduce_tensors(
    group: Group,
    xs: Sequence[Tensor],
    outs: Sequence[Tensor | None],
    options: ReduceOptions,
    *,
    name: str | None,
    wait: bool,
) -> Any:  # a list of tensors, or its TensorWork
    """The reductions of some tensors as a list. Those of one dtype are one operation."""
    given = [as_host_array(x, "allreduce") for x in xs]
    outputs = [OutputTensor(out, x, array, "allreduce") for out, x, array in zip(outs, xs, given, strict=True)]
    by_dtype: dict[str, list[int]] = {}
    for index, x in enumerate(xs):
        by_dtype.setdefault(str(x.dtype).removeprefix("torch."), []).append(index)
    outcomes = []
    for dtype, indices in by_dtype.items():
        dtype_outs = [outputs[index].array for index in indices]
        outcomes.append(
            group.allreduce(
                [given[index] for index in indices],
                out=None if outs[indices[0]] is None else dtype_outs,
                name=f"{name}.{dtype}" if name and len(by_dtype) > 1 else name,
                wait=wait,
                **options._asdict(),
            )
        )

    def finish(results: list[list[HostArray]]) -> list[Tensor]:
        tensors: dict[int, Tensor] = {}
        for indices, result in zip(by_dtype.values(), results, strict=True):
            tensors.update((index, outputs[index].finish(array)) for index, array in zip(indices, result, strict=True))
        return [tensors[index] for index in range(len(xs))]

    return _result_or_work(outcomes, finish, name, wait)


def allgather_tensors(group: Group, xs: Sequence[Tensor], *, name: str | None, wait: bool) -> Any:
    """All members' rows of each tensor, as a list."""
    return _start_each("allgather", group.allgather, xs, None, name, wait)


def broadcast_tensors(
    group: Group, xs: Sequence[Tensor], outs: Sequence[Tensor | None], root: int, *, name: str | None, wait: bool
) -> Any:
    """The root's tensors, as a list."""
    return _start_each("broadcast", group.broadcast, xs, outs, name, wait, root=root)


def reduce_scatter_tensors(
    group: Group, xs: Sequence[Tensor], options: ReduceOptions, *, name: str | None, wait: bool
) -> Any:
    """This member's rows of the reduction of each tensor, as a list."""
    return _start_each("reduce_scatter", group.reduce_scatter, xs, None, name, wait, **options._asdict())


def reduce_tensors(
    group: Group,
    xs: Sequence[Tensor],
    outs: Sequence[Tensor | None],
    root: int,
    options: ReduceOptions,
    *,
    name: str | None,
    wait: bool,
) -> Any:
    """The reductions of the tensors on the root as a list, and None for each elsewhere."""
    return _start_each("reduce", group.reduce, xs, outs, name, wait, root=root, **options._asdict())


def gather_tensors(group: Group, xs: Sequence[Tensor], root: int, *, name: str | None, wait: bool) -> Any:
    """All members' rows of each tensor on the root as a list, and None for each elsewhere."""
    return _start_each("gather", group.gather, xs, None, name, wait, root=root)


def scatter_tensors(group: Group, xs: Sequence[Tensor], root: int, splits: Any, *, name: str | None, wait: bool) -> Any:
    """This member's rows of each of the root's tensors, as a list."""
    if isinstance(splits, Tensor):
        splits = splits.tolist()
    return _start_each("scatter", group.scatter, xs, None, name, wait, root=root, splits=splits)


def alltoall_tensor(group: Group, x: Tensor, splits: Any, *, name: str | None, wait: bool) -> Any:
    """The received rows, and how many came from each member (int64)."""
    if isinstance(splits, Tensor):
        splits = splits.tolist()
    outcome = group.alltoall(as_host_array(x, "alltoall"), splits=splits, name=name, wait=wait)

    def finish(results: list[tuple[HostArray, Any]]) -> tuple[Tensor, Tensor]:
        rows, received = results[0]
        return as_tensor(rows, x.device), torch.from_numpy(received)

    return _result_or_work([outcome], finish, name, wait)


def _start_each(
    what: str,
    start: Callable[..., Any],
    xs: Sequence[Tensor],
    outs: Sequence[Tensor | None] | None,
    name: str | None,
    wait: bool,
    **options: Any,
) -> Any:
    """Start one operation of ronde per tensor. `outs` is None if the operation has no `out`."""
    outputs, outcomes = [], []
    for index, (x, each_name) in enumerate(zip(xs, operation_names(name, len(xs)), strict=True)):
        given = as_host_array(x, what)
        output = OutputTensor(None if outs is None else outs[index], x, given, what)
        outputs.append(output)
        if outs is not None:
            options["out"] = output.array
        outcomes.append(start(given, name=each_name, wait=wait, **options))

    def finish(results: list[HostArray | None]) -> list[Tensor | None]:
        given = zip(outputs, results, strict=True)
        return [None if result is None else output.finish(result) for output, result in given]

    return _result_or_work(outcomes, finish, name, wait)


def operation_names(name: str | None, count: int) -> list[str | None]:
    """A name for each of the operations of one call."""
    return [f"{name}.{index}" if name and count > 1 else name for index in range(count)]


def _result_or_work(outcomes: list[Any], finish: Callable[[list[Any]], Any], name: str | None, wait: bool) -> Any:
    return finish(outcomes) if wait else TensorWork(outcomes, finish, name)
