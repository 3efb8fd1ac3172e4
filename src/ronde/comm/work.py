"""The handle of an operation under way. Made by groups, plans and the engine; used by everybody who does not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ronde.comm.channel import RunningCall
from ronde.errors import OperationTimeout, RondeError
from ronde.types import Deadline

__all__ = ["Work"]


class Work:
    """One operation under way. It keeps the memory it works on alive.

    wait() may be called any number of times and from any thread; it gives the same result or error each time.
    """

    __slots__ = ("_done", "_error", "_finish", "_result", "_running_calls", "_timeout_s", "name")

    def __init__(
        self, running_calls: tuple[RunningCall, ...] | None, finish: Callable[[], Any], timeout_s: float, name: str = ""
    ) -> None:
        self.name = name
        """The name it was given; empty for an operation matched by program order."""
        self._running_calls = running_calls
        self._finish: Callable[[], Any] | None = finish
        self._timeout_s = timeout_s
        self._done = False
        self._error: Exception | None = None
        self._result: Any = None

    def wait(self, timeout_s: float | None = None) -> Any:  # arrays, lists of them, or None
        """The result, or the error it ended in. OperationTimeout when timeout_s is over; the work goes on then.

        Without timeout_s it waits as long as an operation may take (the setting operation_s).
        """
        if not self._done:
            flights, finish = self._running_calls, self._finish
            if flights is not None and finish is not None and all([flight.succeeded for flight in flights]):
                self._result = finish()  # somebody else on board has waited already: the most frequent case
                self._end(None)
            else:
                self._complete(Deadline(self._timeout_s if timeout_s is None else timeout_s))
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        """Whether wait() would return at once."""
        flights = self._running_calls
        return self._done or (flights is not None and all(flight.done() for flight in flights))

    def result(self) -> Any:  # as wait()
        """The result of an operation that is over, without waiting."""
        if not self.done():
            raise ValueError(f"{self.name or 'the operation'} is still under way; wait() for it")
        return self.wait()

    def _complete(self, deadline: Deadline) -> None:
        try:
            for flight in self._wait_for_start(deadline):
                flight.wait(deadline)
        except OperationTimeout as error:
            if not self.done():
                raise
            self._end(error)
        except (RondeError, ValueError, TypeError) as error:
            self._end(error)
        else:
            finish = self._finish
            if finish is not None:  # None when another thread was faster
                self._result = finish()
                self._end(None)

    def _wait_for_start(self, deadline: Deadline) -> tuple[RunningCall, ...]:
        """The flights this work is on."""
        assert self._running_calls is not None
        return self._running_calls

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._done = True
        self._finish = None

    def __repr__(self) -> str:
        """For debugging."""
        return f"<Work {self.name or 'unnamed'}: {'over' if self.done() else 'under way'}>"
