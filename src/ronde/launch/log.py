"""What ronde's own modules log in the driver's process, as lines on the screen: on a terminal they would otherwise be
written into progress bars, or into a debugger's window. Used by the driver."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ronde.launch.loop import Loop

__all__ = ["noted"]


@contextmanager
def noted(loop: Loop, note: Callable[[str], None]) -> Iterator[None]:
    """For as long as it lasts, warnings of all threads become calls in the loop; the last of them, at its end. Programs
    that handle the log themselves go on doing so."""
    logger = logging.getLogger("ronde")
    if logger.hasHandlers():
        yield
        return
    waiting: deque[str] = deque()

    def tell() -> None:
        while waiting:
            note(waiting.popleft())

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waiting.append(self.format(record))
            loop.soon(tell)

    handler = Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        tell()
