"""Training with NumPy alone: an adapter and a backward pass without an ML library, to see what the Reducer does."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import World
from ronde.training.gradients.adapter import BucketMemory, GradientKind, ParameterInfo
from ronde.training.gradients.compression import Codec
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.gradients.reducer import Reducer
from ronde.training.gradients.steps import TrainingStep
from ronde.training.sync_check import checksum
from tests.conformance.ranks import run_threads

ONE_EACH = GradientSettings(bucket_mb=1e-5)
"""Every gradient has a bucket of its own."""


@dataclass(eq=False)
class Weight:
    """A parameter: its gradient is an array, a row index (sparse) or None."""

    name: str
    count: int = 4
    dtype: str = "float32"
    trains: bool = True
    grad: Array | dict[int, float] | None = None
    value: Array = field(default_factory=lambda: np.zeros(2))


class ArrayAdapter:
    """The adapter. Gradients end as views of the buckets, as a library's would."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = list(weights)
        self.copied: list[tuple[str, ...]] = []
        self._trained: list[Weight] = []
        self._memories: dict[int, BucketMemory] = {}
        self.kept: set[str] = set()
        """The names of weights whose results the user has kept: their memory may not be written."""
        self._results_outside: dict[str, object] = {}
        self.on_ready: Callable[[int], object] = lambda index: None
        self.on_new_parameter: Callable[[], object] = lambda: None
        self.num_sparse_allreduces = 0

    def describe_parameters(self) -> list[ParameterInfo]:
        self._trained = [weight for weight in self.weights if weight.trains]
        return [
            ParameterInfo(each.name, (each.count,), each.dtype, each.count, sparse=isinstance(each.grad, dict))
            for each in self._trained
        ]

    def parameters_changed(self, *, all_ready: bool) -> bool:
        return [weight for weight in self.weights if weight.trains] != self._trained

    def bind_buckets(self, buckets: Sequence[BucketMemory], on_ready: Sequence[Callable[..., object]]) -> None:
        self._memories = {index: memory for memory in buckets for index in memory.arrays}
        self.on_ready = lambda index: on_ready[index]()
        self.on_new_parameter = lambda: None

    def watch_new_parameters(self, on_gradient: Callable[[], object]) -> None:
        self.on_new_parameter = on_gradient

    def copy_to_buckets(self, indices: Sequence[int]) -> dict[int, GradientKind]:
        odd = {}
        self.copied.append(tuple(self._trained[index].name for index in indices))
        for memory in {id(each): each for index in indices if (each := self._memories.get(index))}.values():
            memory.uses_spare = any(self._trained[index].name in self.kept for index in memory.arrays)
        for index in indices:
            grad, place = self._trained[index].grad, self._place(index)
            if grad is None:
                odd[index] = GradientKind.NONE
            if place is None or grad is place:
                continue
            place[:] = 0
            if isinstance(grad, dict):
                odd[index] = GradientKind.SPARSE
            elif grad is not None:
                place[:] = grad
                if not self._memories[index].uses_spare:
                    self._trained[index].grad = place
        return odd

    def _place(self, index: int) -> Array | None:
        memory = self._memories.get(index)
        return None if memory is None else (memory.spare_arrays if memory.uses_spare else memory.arrays)[index]

    def assign_results(self, indices: Sequence[int], absent: Sequence[int]) -> None:
        for index in indices:
            place = self._place(index)
            assert place is not None
            if self._memories[index].uses_spare:
                self._trained[index].grad = self._results_outside[self._trained[index].name] = place.copy()
            elif index in absent:
                self._trained[index].grad = place

    def still_has_result(self, ready_index: int | None) -> bool:
        return any(map(self._is_result, self.weights))

    def has_unreduced_gradient(self) -> bool:
        training = [weight for weight in self.weights if weight.trains]
        return any(weight.grad is not None and not self._is_result(weight) for weight in training)

    def _is_result(self, weight: Weight) -> bool:
        places = {self._trained[index].name: memory.arrays[index] for index, memory in self._memories.items()}
        return weight.grad is not None and (
            weight.grad is places.get(weight.name) or weight.grad is self._results_outside.get(weight.name)
        )

    def scale(self, indices: Sequence[int], factor: float) -> None:
        for index in indices:
            place = self._place(index)
            assert place is not None
            place *= factor

    def take_gradients(self) -> dict[str, Any]:
        taken = {weight.name: weight.grad for weight in self.weights}
        for weight in self.weights:
            weight.grad = None
        return taken

    def put_back_gradients(self, taken: Any, factor: float) -> None:
        for weight in self.weights:
            weight.grad = taken[weight.name]
            if isinstance(weight.grad, dict):
                weight.grad = {row: value * factor for row, value in weight.grad.items()}
            elif weight.grad is not None:
                weight.grad *= factor

    def find_non_finite(self, indices: Sequence[int]) -> list[int]:
        grads = {index: self._trained[index].grad for index in indices}
        return [index for index, grad in grads.items() if isinstance(grad, np.ndarray) and not np.isfinite(grad).all()]

    def checksum_parameters(self, skipped: Container[str]) -> list[tuple[str, int]]:
        return [
            (weight.name, checksum(weight.value.view(np.uint8)))
            for weight in self.weights
            if weight.name not in skipped
        ]

    def allreduce_sparse(self, index: int, group: Group, scales: tuple[float, float]) -> None:
        self.num_sparse_allreduces += 1
        weight, rows = self._trained[index], np.zeros(self._trained[index].count)
        if isinstance(weight.grad, dict):
            rows[list(weight.grad)] = list(weight.grad.values())
        rows = group.allreduce(rows * scales[0]) * scales[1]
        weight.grad = self._results_outside[weight.name] = {int(row): float(rows[row]) for row in np.flatnonzero(rows)}

    def close(self) -> None:
        self.on_ready = lambda index: None
        self.on_new_parameter = lambda: None


@dataclass
class ArrayBackwardPass:
    """The backward pass: gradients come in the order given, then the callbacks."""

    end_callbacks: list[Callable[[], None]] = field(default_factory=list)
    resume_callbacks: list[Callable[[], None]] = field(default_factory=list)
    nested: bool = False

    def on_end(self, callback: Callable[[], None]) -> None:
        self.end_callbacks.append(callback)

    def is_nested(self, on_resume: Callable[[], None]) -> bool:
        if self.nested:
            self.resume_callbacks.append(on_resume)
        return self.nested

    def run(self, arrays: ArrayAdapter, grads: Mapping[str, Array | dict[int, float]], *, nested: bool = False) -> None:
        """One pass: gradients are added to those that are there."""
        self.run_jointly([(arrays, grads)], nested=nested)

    def run_jointly(
        self,
        parts: Iterable[tuple[ArrayAdapter, Mapping[str, Array | dict[int, float]]]],
        *,
        nested: bool = False,
        error: Exception | None = None,
    ) -> None:
        """One pass for several adapters, one after the other. The error, or one that a callback raises, ends it: as in
        autograd, callbacks that were not called are dropped."""
        self.nested = nested
        try:
            while self.resume_callbacks and not nested:
                self.resume_callbacks.pop()()
            for arrays, grads in parts:
                for name, grad in grads.items():
                    _add_gradient(arrays, name, grad)
            if error is not None:
                raise error
            self.run_end_callbacks()
        except BaseException:
            self.end_callbacks.clear()
            raise

    def run_end_callbacks(self) -> None:
        while self.end_callbacks:
            self.end_callbacks.pop(0)()


def _add_gradient(arrays: ArrayAdapter, name: str, grad: Array | dict[int, float]) -> None:
    weight = next(weight for weight in arrays.weights if weight.name == name)
    if isinstance(weight.grad, np.ndarray) and not isinstance(grad, dict):
        weight.grad += grad
    elif isinstance(weight.grad, dict) and isinstance(grad, dict):
        weight.grad.update({row: weight.grad.get(row, 0.0) + value for row, value in grad.items()})
    else:
        weight.grad = dict(grad) if isinstance(grad, dict) else np.array(grad, weight.dtype)
    if weight in arrays._trained:
        arrays.on_ready(arrays._trained.index(weight))
    else:
        arrays.on_new_parameter()


class ArrayTraining:
    """One reducer with all around it, on one rank."""

    def __init__(
        self,
        group: Group,
        weights: Sequence[Weight],
        settings: GradientSettings | None = None,
        *,
        passes: int = 1,
        codec: Codec | None = None,
        overlap: bool = True,
        backward_pass: ArrayBackwardPass | None = None,
    ) -> None:
        self.weights = {weight.name: weight for weight in weights}
        self.adapter = ArrayAdapter(weights)
        self.backward_pass = backward_pass or ArrayBackwardPass()
        self.step = TrainingStep(self.backward_pass, passes, gradient_version=lambda: None)
        settings = settings or GradientSettings()
        self.reducer = Reducer(
            self.adapter, group, settings, on_pass_started=self.step.pass_started, codec=codec, overlap=overlap
        )
        self.step.add_reducer(self.reducer)

    def backward(self, **grads: float | list[float] | dict[int, float]) -> None:
        """A pass in which these gradients come, in this order; a number fills all elements."""
        self.backward_pass.run(self.adapter, self._as_arrays(grads))

    def backward_nested(self, **grads: float) -> None:
        """The same as part of another pass, which goes on."""
        self.backward_pass.run(self.adapter, self._as_arrays(grads), nested=True)

    def _as_arrays(self, grads: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: grad if isinstance(grad, dict) else np.full(self.weights[name].count, grad, self.weights[name].dtype)
            for name, grad in grads.items()
        }

    def take_step(self) -> None:
        """As the optimizer's step() does."""
        self.step.synchronize()
        self.step.step_done()

    def clear(self) -> None:
        for weight in self.adapter.weights:
            weight.grad = None
        self.step.gradients_cleared()

    def grads(self, names: str) -> list[object]:
        """What gradients are now: the value of all elements, a list, a dictionary or None."""
        found: list[object] = []
        for name in names:
            grad = self.weights[name].grad
            values = grad.tolist() if isinstance(grad, np.ndarray) else None
            found.append(grad if values is None else values[0] if len(set(values)) == 1 else values)
        return found


def backward_jointly(*parts: tuple[ArrayTraining, Mapping[str, Any]], error: Exception | None = None) -> None:
    """A pass in which gradients of several trainings come, in this order, and which may end in an error. The trainings
    have one backward_pass."""
    arrays = [(training.adapter, training._as_arrays(grads)) for training, grads in parts]
    parts[0][0].backward_pass.run_jointly(arrays, error=error)


def run_training(
    size: int,
    body: Callable[[ArrayTraining, World], object],
    given: Iterable[str | Weight],
    settings: GradientSettings | None = None,
    **options: Any,
) -> list[Any]:
    """Run the body on so many ranks, each with a training of its own of these weights; what it returned on each."""

    def run(world: World) -> object:
        weights = [replace(each) if isinstance(each, Weight) else Weight(each) for each in given]
        training = ArrayTraining(world.group, weights, settings, **options)
        result = body(training, world)
        training.step.close()
        return result

    return run_threads(size, run)
