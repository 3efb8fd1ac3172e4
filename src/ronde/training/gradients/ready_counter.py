"""Counts the gradients that become ready in a backward pass. Each Reducer has a counter; its hooks are called by the ML
library for every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial


class ReadyCounter:
    """Counts the gradients that become ready in a backward pass. Nothing in the usual step costs more than a hook of
    each gradient, so hot_calls (native/python/hot_calls.c) has the same class, which is used where that exists.

    Its hooks take no lock: they are called in one thread at a time.
    """

    def __init__(
        self,
        bucket_of: Sequence[int],
        num_buckets: int,
        on_first: Callable[[int | None], object],
        on_second: Callable[[int], object],
        on_full: Callable[[int], object],
    ) -> None:
        """`bucket_of` has the number of each parameter's bucket, or -1. The callbacks get the index of a parameter or,
        on_full, the number of a bucket: on_first at the first gradient of a pass, before it counts (None if it is not
        counted); on_second at each further gradient of a parameter; on_full when the last gradient of a bucket is
        ready."""
        self._bucket_of = list(bucket_of)
        self._num_gradients = [0] * num_buckets
        for bucket in self._bucket_of:
            if bucket >= 0:
                self._num_gradients[bucket] += 1
        self._on_first, self._on_second, self._on_full = on_first, on_second, on_full
        self.begin(False)

    def hook(self, index: int | None) -> Callable[..., None]:
        """What to call, with any arguments, when the gradient of this parameter is ready; None: of a parameter that is
        not counted, but begins a pass all the same."""
        return partial(self._mark_ready, index)

    def begin(self, counts: bool) -> None:
        """A pass may begin. `counts`: call on_full for each full bucket in it."""
        self._counts = counts
        self._reports = True
        self._is_ready = [False] * len(self._bucket_of)
        self._num_missing = self._num_gradients.copy()
        self._ready_order: list[int] = []

    def report_next(self) -> None:
        """Call on_first at the next gradient again."""
        self._reports = True

    def all_ready(self) -> bool:
        """Whether every parameter got a gradient in this pass."""
        return len(self._ready_order) == len(self._bucket_of)

    def ready_order(self) -> list[int]:
        """The parameters whose gradients are ready, the first one first."""
        return self._ready_order.copy()

    def _mark_ready(self, index: int | None, *_: object) -> None:
        if self._reports:
            self._on_first(index)
            self._reports = False
        if index is None:
            return
        if self._is_ready[index]:
            self._on_second(index)
            return
        self._is_ready[index] = True
        self._ready_order.append(index)
        bucket = self._bucket_of[index]
        if self._counts and bucket >= 0:
            self._num_missing[bucket] -= 1
            if not self._num_missing[bucket]:
                self._on_full(bucket)
