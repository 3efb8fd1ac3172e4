"""Waits in which signal handlers run in time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ronde.comm.fork_and_signal_safety import SIGNAL_CHECK_S, wait_for


class CountingCondition(threading.Condition):
    """A condition on which nobody is woken: it becomes true while its lock is held."""

    def __init__(self, num_waits: int) -> None:
        super().__init__()
        self.num_waits = num_waits
        self.timeouts: list[float] = []

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:  # type: ignore[override]
        assert timeout is not None
        self.timeouts.append(timeout)
        return bool(predicate())


def test_a_long_wait_is_made_of_short_ones_between_which_handlers_can_run() -> None:
    condition = CountingCondition(3)
    assert wait_for(condition, lambda: len(condition.timeouts) == condition.num_waits, 1000.0)
    assert condition.timeouts == [SIGNAL_CHECK_S] * 3


def test_a_wait_ends_with_its_time() -> None:
    condition = threading.Condition()
    with condition:
        assert not wait_for(condition, lambda: False, 2.5 * SIGNAL_CHECK_S)
        assert not wait_for(condition, lambda: False, -1.0)
        assert wait_for(condition, lambda: True, 0.0)
