"""Signals as calls in a loop. Used by the driver."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ronde.launch.loop import Loop

__all__ = ["listening"]


@contextmanager
def listening(loop: Loop, calls: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """For as long as it lasts, each of these signals becomes a call in the loop. What was ignored (nohup) stays so;
    outside of the main thread nothing changes, as signals are not for others to take."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number, call in calls.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda *_, call=call: loop.soon(call))
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was set by code that is not Python's, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
