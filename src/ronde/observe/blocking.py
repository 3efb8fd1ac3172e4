"""When callers were blocked in a channel, to tell which part of an operation they waited for and which they computed
through. Used by comm/lane for operations that run in the background.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Blocks"]

KEPT = 16
"""An operation is looked at soon after it is over: older times are not asked for."""
SHORTEST_NS = 10_000
"""Asking for what is over takes a few microseconds, too; nobody was blocked then."""


class Blocks:
    """The last times in which callers were blocked. Any thread may add."""

    def __init__(self) -> None:
        self._times: deque[tuple[int, int]] = deque(maxlen=KEPT)

    def add(self, begin_ns: int, end_ns: int) -> None:
        """A caller was blocked from then to then."""
        if end_ns - begin_ns >= SHORTEST_NS:
            self._times.append((begin_ns, end_ns))

    def within(self, begin_ns: int, end_ns: int) -> int:
        """How long callers were blocked between these two moments. Two callers at once count as one."""
        total = 0
        for since_ns, until_ns in sorted(self._times.copy()):  # the copy is one step for other threads
            since_ns, until_ns = max(since_ns, begin_ns), min(until_ns, end_ns)
            if until_ns > since_ns:
                total += until_ns - since_ns
                begin_ns = until_ns
        return total
