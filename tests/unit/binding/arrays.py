"""Training with NumPy alone: an adapter and a backward pass without an ML library, to see what the Reducer does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ronde.binding.adapter import Parameter, State
from ronde.binding.codec import Codec
from ronde.binding.gradients import GradientSettings
from ronde.binding.passes import Passes
from ronde.binding.reducer import Reducer
from ronde.comm.buffers import Array
from ronde.comm.group import Group

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


def weights(*names: str) -> list[Weight]:
    return [Weight(name) for name in names]


class Arrays:
    """The adapter. Gradients end as views of the buckets, as a library's would."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = list(weights)
        self.collected: list[tuple[str, ...]] = []
        self._living: list[Weight] = []
        self._places: dict[int, Array] = {}
        self._sums: dict[str, object] = {}
        self.ready: Callable[[int], object] = lambda index: None
        self.stray: Callable[[], object] = lambda: None
        self.num_sparse_sums = 0

    def describe(self) -> list[Parameter]:
        self._living = [weight for weight in self.weights if weight.trains]
        return [
            Parameter(each.name, (each.count,), each.dtype, each.count, sparse=isinstance(each.grad, dict))
            for each in self._living
        ]

    def changed(self) -> bool:
        return [weight for weight in self.weights if weight.trains] != self._living

    def bind(self, memory: Mapping[int, Array], ready: Callable[[int], object]) -> None:
        self._places = dict(memory)
        self.ready = ready
        self.stray = lambda: None

    def watch(self, stray: Callable[[], object]) -> None:
        self.stray = stray

    def collect(self, indices: Sequence[int]) -> dict[int, State]:
        odd = {}
        self.collected.append(tuple(self._living[index].name for index in indices))
        for index in indices:
            grad, place = self._living[index].grad, self._places.get(index)
            if grad is None:
                odd[index] = State.NONE
            if place is None or grad is place:
                continue
            place[:] = 0
            if isinstance(grad, dict):
                odd[index] = State.SPARSE
            elif grad is not None:
                place[:] = grad
                self._living[index].grad = place
        return odd

    def deliver(self, indices: Sequence[int], absent: Sequence[int]) -> None:
        for index in absent:
            self._living[index].grad = self._places[index]

    def kept(self, came: int | None) -> bool:
        return any(map(self._is_result, self.weights))

    def given(self) -> bool:
        training = [weight for weight in self.weights if weight.trains]
        return any(weight.grad is not None and not self._is_result(weight) for weight in training)

    def _is_result(self, weight: Weight) -> bool:
        places = {self._living[index].name: place for index, place in self._places.items()}
        return weight.grad is not None and weight.grad is places.get(weight.name, self._sums.get(weight.name))

    def scale(self, indices: Sequence[int], factor: float) -> None:
        for index in indices:
            self._places[index] *= factor

    def not_finite(self, indices: Sequence[int]) -> list[int]:
        grads = {index: self._living[index].grad for index in indices}
        numbers = {
            index: list(grad.values()) if isinstance(grad, dict) else self._places.get(index, grad)
            for index, grad in grads.items()
        }
        return [index for index, each in numbers.items() if each is not None and not np.isfinite(each).all()]

    def sum_sparse(self, index: int, group: Group, scales: tuple[float, float]) -> None:
        self.num_sparse_sums += 1
        weight, place = self._living[index], self._places.get(index)
        rows = np.zeros(weight.count)
        if isinstance(weight.grad, dict):
            rows[list(weight.grad)] = list(weight.grad.values())
        elif weight.grad is not None and place is None:
            rows[:] = weight.grad
        rows = group.allreduce(rows * scales[0]) * scales[1]
        rows += 0.0 if place is None else place
        weight.grad = self._sums[weight.name] = {int(row): float(rows[row]) for row in np.flatnonzero(rows)}

    def close(self) -> None:
        self.ready = lambda index: None
        self.stray = lambda: None


@dataclass
class Tape:
    """The backward pass: gradients come in the order given, then the callbacks."""

    ends: list[Callable[[], None]] = field(default_factory=list)
    going_on: list[Callable[[], None]] = field(default_factory=list)
    inside: bool = False

    def at_end(self, callback: Callable[[], None]) -> None:
        self.ends.append(callback)

    def nested(self, goes_on: Callable[[], None]) -> bool:
        if self.inside:
            self.going_on.append(goes_on)
        return self.inside

    def run(self, arrays: Arrays, grads: Mapping[str, Array | dict[int, float]], *, inside: bool = False) -> None:
        """One pass: gradients are added to those that are there."""
        self.inside = inside
        while self.going_on and not inside:
            self.going_on.pop()()
        for name, grad in grads.items():
            weight = next(weight for weight in arrays.weights if weight.name == name)
            if isinstance(weight.grad, np.ndarray) and not isinstance(grad, dict):
                weight.grad += grad
            elif isinstance(weight.grad, dict) and isinstance(grad, dict):
                weight.grad.update({row: weight.grad.get(row, 0.0) + value for row, value in grad.items()})
            else:
                weight.grad = dict(grad) if isinstance(grad, dict) else np.array(grad, weight.dtype)
            if weight in arrays._living:
                arrays.ready(arrays._living.index(weight))
            else:
                arrays.stray()
        self.end()

    def end(self) -> None:
        while self.ends:
            self.ends.pop(0)()


class Training:
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
    ) -> None:
        self.arrays = Arrays(weights)
        self.tape = Tape()
        self.num_changes = 0  # that somebody made to gradients outside of a pass
        self.passes = Passes(self.tape, passes, mark=lambda: self.num_changes)
        settings = settings or GradientSettings()
        self.reducer = Reducer(self.arrays, group, settings, begin=self.passes.begin, codec=codec, overlap=overlap)
        self.passes.add(self.reducer)

    def backward(self, **grads: float | list[float] | dict[int, float]) -> None:
        """A pass in which these gradients come, in this order; a number fills all elements."""
        self._run(grads, inside=False)

    def backward_inside(self, **grads: float) -> None:
        """The same as part of another pass, which goes on."""
        self._run(grads, inside=True)

    def _run(self, grads: Mapping[str, float | list[float] | dict[int, float]], *, inside: bool) -> None:
        by_name = {weight.name: weight for weight in self.arrays.weights}
        self.tape.run(
            self.arrays,
            {
                name: grad
                if isinstance(grad, dict)
                else np.broadcast_to(np.array(grad, by_name[name].dtype), by_name[name].count)
                for name, grad in grads.items()
            },
            inside=inside,
        )

    def clear(self) -> None:
        for weight in self.arrays.weights:
            weight.grad = None
        self.passes.cleared()

    def grad(self, name: str) -> object:
        """What a gradient is now: the value of all elements, a list, a dictionary or None."""
        grad = next(weight.grad for weight in self.arrays.weights if weight.name == name)
        if isinstance(grad, np.ndarray):
            values = grad.tolist()
            return values[0] if len(set(values)) == 1 else values
        return grad
