"""Tensors as memory that the collectives read and write, and back. Used by everything here that sends a tensor.

Tensors on the CPU are used where they are, without a copy; those on another device travel through a copy on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ronde.comm.buffers import Array, Bfloat16View
from ronde.comm.work import Work
from ronde.types import Deadline

__all__ = ["CPU", "Given", "Landing", "TensorWork", "as_array", "as_tensor", "check_tensor", "over"]

CPU = torch.device("cpu")
Given: TypeAlias = "Array | Bfloat16View"
"""What a collective of ronde takes and gives."""


def check_tensor(x: object, what: str) -> Tensor:
    """The tensor, or an error that says what to pass instead. `what` is the operation's name."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: takes a tensor, got {type(x).__name__}; for NumPy arrays and numbers use ronde's own")
    if x.layout is not torch.strided:
        raise TypeError(
            f"{what}: takes a dense tensor, got one with layout {x.layout}; only allreduce takes sparse ones"
        )
    if x.dtype.is_complex:
        raise TypeError(f"{what}: complex numbers do not travel as such; pass torch.view_as_real(x), which is a view")
    if x.device.type == "meta":
        raise TypeError(f"{what}: the tensor is on the meta device and has no numbers; move it with to_empty() first")
    return x


def as_array(x: Tensor, what: str) -> Given:
    """The tensor's memory when it is on the CPU, else a copy on the host."""
    host = check_tensor(x, what)
    # PyTorch's own operations let go of the interpreter's lock, and another thread may take it for long: none unasked.
    if host.requires_grad:
        host = host.detach()
    if not host.is_cpu:
        host = host.cpu()
    try:
        return _memory(host)
    except (TypeError, RuntimeError) as error:
        if host.is_neg():
            copy: Array = host.resolve_neg().numpy()
            copy.flags.writeable = False  # as `out` it would not be the caller's memory
            return copy
        raise TypeError(f"{what}: numbers of type {x.dtype} cannot travel: {error}") from None


def _memory(host: Tensor) -> Given:
    if host.dtype is torch.bfloat16:
        return Bfloat16View(host.view(torch.int16).numpy())
    array: Array = host.numpy()
    return array


def as_tensor(result: Given, device: torch.device) -> Tensor:
    """What a collective gave, as a tensor over the same memory (or moved to its device)."""
    if isinstance(result, Bfloat16View):
        tensor = torch.from_numpy(result.bits.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(result)
    return tensor if device.type == "cpu" else tensor.to(device)


def over(memory: Array, dtype: str) -> Tensor:
    """The memory of a bucket or of a wire, which shows bfloat16 as bits, as a flat tensor of its dtype."""
    return as_tensor(Bfloat16View(memory) if dtype == "bfloat16" else memory, CPU)


class Landing:
    """Where a result goes: the caller's `out`, or a new tensor on the device of what was given."""

    __slots__ = ("_device", "_out", "array")

    def __init__(self, out: Tensor | None, x: Tensor, given: Given, what: str) -> None:
        self._out = out
        self._device = x.device
        self.array: Given | None = None
        """To be passed as `out` of ronde's collective."""
        if out is not None:
            self.array = given if out is x else as_array(out, f"{what}: out")

    def finish(self, result: Given) -> Tensor:
        """The tensor for the caller, after the operation."""
        out = self._out
        if out is None:
            return as_tensor(result, self._device)
        if out.device.type != "cpu":
            with torch.no_grad():
                out.copy_(as_tensor(result, torch.device("cpu")))
            return out
        try:
            # Autograd did not see the write: it must, or a backward could use numbers that are no longer there.
            torch.autograd.graph.increment_version(out)
        except RuntimeError:
            if not out.is_inference():  # of which nobody counts versions
                raise
        return out


class TensorWork:
    """Tensors under way: as ronde.Work, and its result is a tensor, or what the call would have returned."""

    def __init__(self, works: Sequence[Work], finish: Callable[[list[Any]], Any], name: str | None) -> None:
        self.name = name or ""
        """The name it was given; empty for an operation matched by program order."""
        self._works = tuple(works)
        self._finish: Callable[[list[Any]], Any] | None = finish
        self._result: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> Any:  # a tensor, a list of them, or a pair
        """The result, or the error it ended in; any number of times, from any thread."""
        deadline = None if timeout_s is None else Deadline(timeout_s)
        results = [work.wait(None if deadline is None else deadline.left_s) for work in self._works]
        with self._lock:
            if self._finish is not None:
                self._result = self._finish(results)
                self._finish = None
        return self._result

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return all(work.done() for work in self._works)

    def result(self) -> Any:  # as wait()
        """The result of an operation that is over, without waiting."""
        if not self.done():
            raise ValueError(f"{self.name or 'the operation'} is still under way; wait() for it")
        return self.wait()

    def then(self, convert: Callable[[Any], Any]) -> TensorWork:
        """The same work with another form of its result. Take one of the two, not both."""
        finish = self._finish
        assert finish is not None, "nobody has waited for it yet"
        return TensorWork(self._works, lambda results: convert(finish(results)), self.name)

    def __repr__(self) -> str:
        """For debugging."""
        return f"<TensorWork {self.name or 'unnamed'}: {'over' if self.done() else 'under way'}>"
