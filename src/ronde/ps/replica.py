"""What every replica of a part has, whatever the part is made of: gradients that are staged, and its place in the log.

Gradients are kept until the log says that they count. A replica without values waits for a copy of another server; what
the log says meanwhile is kept. Used by PartReplica (tensors) and TableReplica (rows). Without I/O.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ronde.ps.commit_log.log_state import Update
from ronde.ps.partition import Array, Part

CLIP_EPSILON = 1e-6
"""As PyTorch's clip_grad_norm_ has it."""


class PartOptimizer(Protocol):
    """What a server needs of an optimizer (ronde.ps.optimizers)."""

    @property
    def num_states(self) -> int:
        """How many arrays it keeps for each part, each as large as the part."""

    def update(
        self, part: Part, values: Array, gradient: Array, states: Array, out: Array, step: int, lr: float | None
    ) -> None:
        """Write the values after one step to `out`, which may be `values`; change `states`, one row for each, in place.
        The gradient is not changed: it may be on its way to another server. Steps are counted from 1. `lr` is the
        learning rate of the worker, if it has given one."""


class ReadEvent(NamedTuple):
    """A read of a worker, for a replica that has no values yet."""

    worker: int
    oldest_version: int


class Replica(abc.ABC):
    """One part on one server."""

    def __init__(self) -> None:
        self.position = 0
        """Of the log, up to which updates are in the values."""
        self.applied: dict[int, int] = {}
        """By worker, its last step that is in the values."""
        self.staged: dict[tuple[int, int], Array] = {}
        """By worker and step, the gradients that are not applied, as they came."""
        self._pending: deque[tuple[int, Update | ReadEvent]] = deque()
        """Updates and reads that wait for the values, with their positions."""
        self._copied_position = 0
        """Of the log, up to which reads were in the copy that another server has sent."""

    @property
    @abc.abstractmethod
    def is_loaded(self) -> bool:
        """Whether it has values."""

    @abc.abstractmethod
    def squared_norm(self, contributions: Sequence[tuple[int, int]]) -> float:
        """Of the mean of staged gradients."""

    @abc.abstractmethod
    def _remember_read(self, worker: int, oldest_version: int) -> None:
        """The worker has read the values as they are now. No worker has last read an older version than this one."""

    @abc.abstractmethod
    def make_copy(self) -> Array:
        """All that another server needs to be a replica, in one array."""

    @abc.abstractmethod
    def make_state(self) -> Array:
        """Values and states of the optimizer in one array, for a worker."""

    @abc.abstractmethod
    def _apply(self, update: Update) -> None:
        """Apply an update, and forget what was staged for it."""

    @abc.abstractmethod
    def _load(self, copy: Array) -> None:
        """Take what make_copy() or make_state() has made."""

    def stage(self, worker: int, step: int, gradient: Array) -> None:
        """Keep gradients until they are committed. Those that are applied are not needed again."""
        if step > self.applied.get(worker, 0):
            self.staged[worker, step] = gradient

    def drop_staged(self, worker: int, step: int) -> None:
        """Drop the gradients of later steps than this: the worker is gone."""
        for key in [key for key in self.staged if key[0] == worker and key[1] > step]:
            del self.staged[key]

    def update(self, position: int, update: Update) -> None:
        """Apply an update of the log, or keep it until the values are there."""
        if not self.is_loaded:
            self._pending.append((position, update))
            return
        if position <= self.position:  # it is in the copy that another server has sent
            return
        self._apply(update)
        for worker, step in update.contributions:
            self.applied[worker] = step
        self.position = position

    def remember_read(self, position: int, worker: int, oldest_version: int) -> None:
        """The log says that the worker reads the values. No worker has last read an older version than this one."""
        if not self.is_loaded:
            self._pending.append((position, ReadEvent(worker, oldest_version)))
        elif position > self._copied_position:
            self._remember_read(worker, oldest_version)

    def load_copy(self, copy: Array, position: int, applied: dict[int, int]) -> None:
        """Take the copy of another server, and apply what the log has behind it."""
        self._load(copy)
        self.position, self.applied = position, dict(applied)
        for key in [key for key in self.staged if key[1] <= self.applied.get(key[0], 0)]:
            del self.staged[key]
        self._copied_position = position
        while self._pending:
            at, event = self._pending.popleft()
            if isinstance(event, Update):
                self.update(at, event)
            else:
                self.remember_read(at, *event)


def clip(gradient: Array, norm: float, clip_norm: float) -> Array:
    """The gradient, scaled down if the global norm is above the limit. 0 is no limit."""
    if not clip_norm or norm <= clip_norm:
        return gradient
    clipped: Array = gradient * np.asarray(clip_norm / (norm + CLIP_EPSILON), gradient.dtype)
    return clipped


def compensate_delay(gradient: Array, strength: float, values: Array, values_read: Array) -> Array:
    """The gradient as it would be at the values of now, to first order, with g * g in place of the Hessian matrix
    (DC-ASGD, Zheng et al., 2017): g + strength * g * g * (values - values_read)."""
    change: Array = values - values_read
    change *= gradient
    change *= gradient
    change *= np.asarray(strength, gradient.dtype)
    change += gradient
    return change
