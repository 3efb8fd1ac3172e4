"""Signal handlers and forks in the middle of operations: who may not enter one (a thread that is in the middle of
another, and a forked child of a rank), and a wait in which signal handlers run in time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from ronde.errors import RondeError

SIGNAL_CHECK_S = 0.1
"""A signal handler runs at most this much later in a wait."""


class _ThisThread(threading.local):
    operation = ""
    """The operation in which the calling thread is, in words; empty if it is in none."""


this_thread = _ThisThread()
"""Who enters an operation looks here first: a signal handler or a finalizer of Python can run in the middle of one. It
would wait for the operation that it has interrupted, and find half-changed data, so it is refused."""


class InsideOperation:
    """A context in which the calling thread is in this operation. RondeError if it is in one already."""

    __slots__ = ("_description",)

    def __init__(self, description: str) -> None:
        self._description = description

    def __enter__(self) -> None:
        if this_thread.operation:
            raise reentry_error(self._description)
        this_thread.operation = self._description

    def __exit__(self, *_: object) -> None:
        this_thread.operation = ""


def reentry_error(description: str) -> RondeError:
    return RondeError(
        f"{description}: this thread is in the middle of another operation ({this_thread.operation or 'a callback'}), "
        "so a signal handler, a finalizer or a callback has called this; let it set a flag that your loop looks at, or "
        "call ronde.shutdown()"
    )


def forked_error(pid: int, description: str = "") -> RondeError:
    """The error for a forked child of the process `pid`, which is a rank."""
    what = f"{description}: " if description else ""
    return RondeError(
        f"{what}this process ({os.getpid()}) is a forked child of process {pid}, which is the rank and has made the "
        f"group; a child cannot take part. Call ronde only in process {pid}, or start workers with the method 'spawn' "
        "(multiprocessing.get_context('spawn'))"
    )


def wait_for(condition: threading.Condition, predicate: Callable[[], bool], timeout_s: float) -> bool:
    """As condition.wait_for(), in short waits. A signal that arrives in the moment before a thread of Python begins to
    wait does not interrupt it: its handler, Ctrl-C's too, would run when the wait is over."""
    end_s = time.monotonic() + timeout_s
    while not condition.wait_for(predicate, min(SIGNAL_CHECK_S, max(0.0, end_s - time.monotonic()))):
        if time.monotonic() >= end_s:
            return predicate()
    return True
