"""How far workers may be apart: the clocks of workers, and when one may begin its next step. Without I/O.

The clock of a worker is the number of its pushes that are committed. Before a step it reads the parameters, and the
read waits as long as the worker is more steps ahead of the slowest than the mode allows. So a read is where a worker
waits, and a push never is.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import msgspec


class Mode(enum.Enum):
    """How synchronous training is."""

    SYNC = "sync"
    """One update for each step of all workers together, from the mean of their gradients. As allreduce."""
    BOUNDED = "bounded"
    """Every push is an update, and no worker is more than `staleness` steps ahead of the slowest (SSP)."""
    DYNAMIC = "dynamic"
    """As bounded. The bound is moved by measured speeds, and is never above `staleness`."""
    ASYNC = "async"
    """Every push is an update, and nobody waits."""


def parse_mode(mode: str) -> Mode:
    """The mode a caller means by its name."""
    try:
        return Mode(mode)
    except ValueError:
        raise ValueError(f"mode must be one of {', '.join(each.value for each in Mode)}, got {mode!r}") from None


SMOOTHING = 0.2
"""The weight of the newest step in a worker's mean step time."""


RATIO_TOLERANCE = 0.1
"""Speeds are measured, so a worker that is 3.1 times as fast counts as 3 times as fast."""


class StalenessSettings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Mode and bound, equal on all members."""

    mode: Mode = Mode.SYNC
    staleness: int = 0
    """The bound of BOUNDED, and the largest one of DYNAMIC. The others have none."""


class Clocks:
    """The clocks of the workers that are there, and the bound. Deterministic: time comes with the events."""

    def __init__(self, settings: StalenessSettings, workers: Iterable[int]) -> None:
        if settings.staleness < 0:
            raise ValueError(f"staleness must be 0 or more, got {settings.staleness}")
        self.mode = settings.mode
        self._max_bound = settings.staleness
        self.clocks = dict.fromkeys(workers, 0)
        """By worker, how many of its pushes are committed; more, if others had more samples in an epoch."""
        self._last_push_s: dict[int, float] = {}
        self._step_times_s: dict[int, float] = {}
        """By worker, the mean time between two pushes, as far as it did not wait for others in between."""
        self._waiting_since_s: dict[int, float] = {}

    @property
    def slowest(self) -> int:
        """The least clock of the workers that are there."""
        return min(self.clocks.values(), default=0)

    @property
    def bound(self) -> float:
        """How many steps a worker may be ahead of the slowest when it begins one."""
        if self.mode is Mode.ASYNC:
            return math.inf
        if self.mode is Mode.SYNC:
            return 0
        if self.mode is Mode.BOUNDED:
            return self._max_bound
        return self._dynamic_bound()

    def _dynamic_bound(self) -> int:
        """As many steps as the fastest worker does in one step of the slowest, so that it need not wait for that step
        to end; but not more than allowed. Until all have been measured, 0."""
        times_s = [self._step_times_s.get(worker, 0.0) for worker in self.clocks]
        if not times_s or min(times_s) <= 0.0:
            return 0
        ratio = max(times_s) / min(times_s) - RATIO_TOLERANCE
        return min(self._max_bound, max(0, math.ceil(ratio) - 1))

    def may_begin(self, worker: int) -> bool:
        """Whether the worker may read for its next step now."""
        return worker in self.clocks and self.clocks[worker] - self.slowest <= self.bound

    def push(self, worker: int, now_s: float) -> None:
        """A push of the worker is committed."""
        self.clocks[worker] += 1
        since_s = self._last_push_s.get(worker)
        if since_s is not None:
            step_s = max(0.0, now_s - since_s)
            mean_s = self._step_times_s.get(worker, step_s)
            self._step_times_s[worker] = mean_s + SMOOTHING * (step_s - mean_s)
        self._last_push_s[worker] = now_s

    def begin_wait(self, worker: int, now_s: float) -> None:
        """A read of the worker waits for others, or is about to be answered."""
        self._waiting_since_s[worker] = now_s

    def end_wait(self, worker: int, now_s: float) -> None:
        """The read is answered. The time in between is not counted as time of its step."""
        waited_s = max(0.0, now_s - self._waiting_since_s.pop(worker, now_s))
        if worker in self._last_push_s:
            self._last_push_s[worker] += waited_s

    def align(self) -> None:
        """All workers have come as far as the first of them."""
        first = max(self.clocks.values(), default=0)
        self.clocks = dict.fromkeys(self.clocks, first)

    def add(self, worker: int) -> None:
        """Another worker is there, and has come as far as the slowest."""
        self.clocks[worker] = self.slowest

    def remove(self, worker: int) -> None:
        """The worker has left or is lost. Nobody waits for it any more. Idempotent."""
        for by_worker in (self.clocks, self._last_push_s, self._step_times_s, self._waiting_since_s):
            by_worker.pop(worker, None)
