"""Signals as calls in a loop. Used by the driver."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ronde.launch.loop import Loop

__all__ = ["REPEAT_S", "RepeatFilter", "listening"]

REPEAT_S: Mapping[signal.Signals, float] = {signal.SIGTERM: 1.0, signal.SIGHUP: 1.0, signal.SIGINT: 0.1}
"""The same signal again within this time is the same request, not a second one. `timeout` sends SIGTERM to its command
and at once to the command's process group; service managers do the like. For Ctrl-C it is shorter than a person needs
to press the keys twice. Signals that are not listed always count."""


class RepeatFilter:
    """Decides whether a signal is a request of its own or the repeat of one."""

    def __init__(self, limits: Mapping[signal.Signals, float] = REPEAT_S) -> None:
        self._limits = limits
        self._counted_s: dict[signal.Signals, float] = {}

    def counts(self, number: signal.Signals, now_s: float) -> bool:
        """Whether a signal that comes at this time (of a monotonic clock) is a request. Repeats do not extend the time
        in which they are taken for repeats: whoever goes on asking is heard."""
        before_s = self._counted_s.get(number)
        if before_s is not None and now_s - before_s < self._limits.get(number, 0.0):
            return False
        self._counted_s[number] = now_s
        return True


@contextmanager
def listening(loop: Loop, calls: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """For as long as it lasts, each of these signals becomes a call in the loop, its repeats (REPEAT_S) none. What was
    ignored (nohup) stays so; outside of the main thread nothing changes, as signals are not for others to take."""
    before = {}
    repeats = RepeatFilter()

    def take(number: int, _frame: object) -> None:
        if repeats.counts(signal.Signals(number), time.monotonic()):
            loop.soon(calls[signal.Signals(number)])

    if threading.current_thread() is threading.main_thread():
        for number in calls:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was set by code that is not Python's, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
