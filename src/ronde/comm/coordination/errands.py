"""What other threads want the coordinator's thread to do: told in passing, or asked for with an answer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ronde.types import Deadline

__all__ = ["Errands"]

ANSWER_S = 10.0
"""The thread answers within milliseconds, unless the host is overloaded."""
LOOK_S = 0.1

T = TypeVar("T")


class Errands:
    """Calls that wait for their thread. Every call gets the time at which it is made."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._calls: queue.SimpleQueue[Callable[[int], None]] = queue.SimpleQueue()

    def put(self, call: Callable[[int], None], *, wake: bool = True) -> None:
        """Let the thread do this. From every thread."""
        self._calls.put(call)
        if wake:
            self._wake()

    def run_all(self, now_ns: int) -> None:
        """Do all that waits. For the thread itself."""
        while not self._calls.empty():
            self._calls.get()(now_ns)

    def ask(self, question: Callable[[int], T], runs: Callable[[], bool]) -> T:
        """What the thread answers. When it does not run (any more), nobody else touches its state, and the question is
        answered here."""
        answer = _Answer(question)
        self.put(answer.find)
        deadline = Deadline(ANSWER_S)
        while not answer.found.wait(LOOK_S):
            if not runs():
                return question(time.monotonic_ns())
            if deadline.passed:
                raise TimeoutError(f"the coordinator did not answer within {ANSWER_S:g} s; its host is very busy")
        return answer.get()


class _Answer(Generic[T]):
    """On its way from one thread to another."""

    def __init__(self, question: Callable[[int], T]) -> None:
        self.found = threading.Event()
        self._question = question
        self._values: list[T] = []
        self._error: Exception | None = None

    def find(self, now_ns: int) -> None:
        try:
            self._values.append(self._question(now_ns))
        except Exception as error:  # the edge between threads: who asked must learn of it, and nobody else
            self._error = error
        self.found.set()

    def get(self) -> T:
        if self._error is not None:
            raise self._error
        return self._values[0]
