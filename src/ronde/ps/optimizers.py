"""The optimizers of a parameter server: it takes their steps, on its parts, where the state of an optimizer stays.

They follow PyTorch's optimizers of the same names, with the same options, and give the same numbers. `lr` is a number,
or a function of the number of updates (from 1) for a schedule; all servers call it alike. An optimizer of your own is a
subclass of Optimizer whose compute() is a pure function of its arguments: a part's replicas both call it, and have to
come to the same values.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np

from ronde.comm.backends.native_library import OptimizerFlag, OptimizerKind, OptimizerRule, update_parameters
from ronde.ps.partition import Array, Part

LearningRate: TypeAlias = float | Callable[[int], float]


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Random numbers that each worker adds to its gradients (annealed gradient noise, Neelakantan et al., 2015): normal
    ones with the variance eta / step ** gamma. They depend on nothing but the seed, the worker and the step."""

    eta: float = 0.01
    gamma: float = 0.55
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.eta >= 0 and math.isfinite(self.eta) and math.isfinite(self.gamma)):
            raise ValueError(f"eta must be 0 or more and gamma a number, got {self.eta} and {self.gamma}")

    def add_to(self, gradient: Array, worker: int, step: int, part: int) -> None:
        """Add the noise of one part, in place. Steps are counted from 1."""
        generator = np.random.Generator(np.random.Philox(key=[self.seed, worker], counter=[0, part, step, 0]))
        deviation = math.sqrt(self.eta / step**self.gamma)
        noise = generator.standard_normal(gradient.size, dtype=gradient.dtype.type)
        gradient += noise * np.asarray(deviation, gradient.dtype)


class Optimizer(abc.ABC):
    """What a server does with a gradient. A subclass of your own writes compute() and says how many states it has."""

    num_states: int = 0
    """How many arrays are kept for each parameter, of its shape and dtype. They are zeros at first."""
    needs_whole_tensors: bool = False
    """Whether compute() has to get whole tensors, and not pieces of large ones."""

    @abc.abstractmethod
    def compute(self, values: Array, gradient: Array, states: Array, step: int) -> Array:
        """Return the values after one step, for one tensor or a piece of it, flattened. `states` has one row for each
        state, which is changed in place; the others are not changed. Steps are counted from 1."""

    def update(
        self,
        part: Part,
        values: Array,
        gradient: Array,
        states: Array,
        out: Array,
        step: int,
        lr: float | None = None,
    ) -> None:
        # As compute(), for all slices of a part, and into memory that is there. Called by servers.
        bounds = part.bounds
        for start, stop in itertools.pairwise(bounds):
            piece = slice(start, stop)
            new = self.compute(values[piece], gradient[piece], states[:, piece], step)
            if np.shape(new) != (stop - start,):  # it would be spread over all of them
                raise ValueError(
                    f"compute() of {type(self).__name__} must return an array of the shape {(stop - start,)}, as that "
                    f"of its values; it returned one of {np.shape(new)}"
                )
            out[piece] = new


@dataclass(frozen=True, kw_only=True)
class _NativeOptimizer(Optimizer):
    """An optimizer whose rule the native library has. Options of a group of tensors replace those of all."""

    lr: LearningRate
    weight_decay: float = 0.0
    groups: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By group of tensors, options that differ there: {1: {"weight_decay": 0.0}}."""

    _is_elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.lr) and not (math.isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"lr must be 0 or more, got {self.lr!r}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay must be 0 or more, got {self.weight_decay!r}")
        for group, options in self.groups.items():
            changed = dataclasses.replace(self, groups={}, **dict(options))  # raises if there is no such option
            if changed.num_states > self.num_states:
                raise ValueError(
                    f"group {group} needs more state than the others; give its options to all, and 0 there"
                )

    @property
    def needs_whole_tensors(self) -> bool:  # type: ignore[override]  # a constant of each class
        return not self._is_elementwise

    @abc.abstractmethod
    def make_rule(self) -> OptimizerRule: ...

    def for_group(self, group: int) -> _NativeOptimizer:
        """The optimizer with the options of a group of tensors."""
        options = self.groups.get(group)
        return self if options is None else dataclasses.replace(self, groups={}, **dict(options))

    def lr_at(self, step: int) -> float:
        """The learning rate of a step."""
        return float(self.lr(step)) if callable(self.lr) else self.lr

    def compute(self, values: Array, gradient: Array, states: Array, step: int) -> Array:
        out = np.empty_like(values)
        rows = [np.ascontiguousarray(row) for row in states]
        update_parameters(self.make_rule(), values, gradient, rows, out, step=step, lr=self.lr_at(step))
        for row, new in zip(states, rows, strict=True):
            row[...] = new
        return out

    def update(
        self,
        part: Part,
        values: Array,
        gradient: Array,
        states: Array,
        out: Array,
        step: int,
        lr: float | None = None,
    ) -> None:
        own = self.for_group(part.group)
        rule = own.make_rule()
        if lr is None:
            lr = own.lr_at(step)
        bounds = (0, part.size) if self._is_elementwise else part.bounds
        for start, stop in itertools.pairwise(bounds):
            piece = slice(start, stop)
            rows = [row[piece] for row in states]
            update_parameters(rule, values[piece], gradient[piece], rows, out[piece], step=step, lr=lr)


@dataclass(frozen=True, kw_only=True)
class SGD(_NativeOptimizer):
    """Stochastic gradient descent, as torch.optim.SGD."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("nesterov needs a momentum, and no dampening")

    @property
    def num_states(self) -> int:  # type: ignore[override]  # follows from the options
        return int(self.momentum != 0)

    def make_rule(self) -> OptimizerRule:
        flags = OptimizerFlag.NESTEROV if self.nesterov else OptimizerFlag.NONE
        return OptimizerRule(OptimizerKind.SGD, self.weight_decay, self.momentum, self.dampening, flags=flags)


@dataclass(frozen=True, kw_only=True)
class Adam(_NativeOptimizer):
    """As torch.optim.Adam."""

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    _kind: ClassVar[OptimizerKind] = OptimizerKind.ADAM
    _flags: ClassVar[OptimizerFlag] = OptimizerFlag.NONE

    @property
    def num_states(self) -> int:  # type: ignore[override]  # a constant of the class
        return 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be from 0 to below 1, got {self.betas!r}")

    def make_rule(self) -> OptimizerRule:
        return OptimizerRule(self._kind, self.weight_decay, *self.betas, self.eps, self._flags)


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """As torch.optim.AdamW: the weight decay is not part of the gradient."""

    weight_decay: float = 1e-2

    _flags: ClassVar[OptimizerFlag] = OptimizerFlag.DECOUPLED_DECAY


@dataclass(frozen=True, kw_only=True)
class LAMB(Adam):
    """Adam whose step is scaled by the norm of each tensor (You et al., 2020). Tensors are not cut into pieces."""

    eps: float = 1e-6

    _kind: ClassVar[OptimizerKind] = OptimizerKind.LAMB
    _is_elementwise: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Adagrad(_NativeOptimizer):
    """As torch.optim.Adagrad."""

    lr: LearningRate = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10

    @property
    def num_states(self) -> int:  # type: ignore[override]  # a constant of the class
        return 1

    def make_rule(self) -> OptimizerRule:
        return OptimizerRule(OptimizerKind.ADAGRAD, self.weight_decay, first=self.lr_decay, epsilon=self.eps)


@dataclass(frozen=True, kw_only=True)
class RMSProp(_NativeOptimizer):
    """As torch.optim.RMSprop."""

    lr: LearningRate = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    @property
    def num_states(self) -> int:  # type: ignore[override]  # follows from the options
        return 1 + int(self.momentum != 0) + int(self.centered)

    def make_rule(self) -> OptimizerRule:
        flags = OptimizerFlag.CENTERED if self.centered else OptimizerFlag.NONE
        return OptimizerRule(OptimizerKind.RMSPROP, self.weight_decay, self.momentum, self.alpha, self.eps, flags)
