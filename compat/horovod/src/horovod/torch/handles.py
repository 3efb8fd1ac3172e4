"""Numbers for operations under way, as poll() and synchronize() take them."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from horovod.common.exceptions import translated
from ronde.torch.tensors import TensorWork

__all__ = ["Handles"]


class _Flight(NamedTuple):
    """One operation, and what makes its result of ronde's."""

    work: TensorWork
    finish: Callable[[Any], Any]


class Handles:
    """One counter for all operations of a process, from 1; hvd.shutdown() sets it back."""

    def __init__(self) -> None:
        self._flights: dict[int, _Flight] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._nameless: dict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)

    def name(self, what: str, group: int) -> str:
        """For an operation without a name. Counted for each kind of operation and each group: members need to agree on
        the order of those only, whatever else some of them do."""
        with self._lock:
            return f"{what}.noname.{next(self._nameless[what, group])}"

    def put(self, work: TensorWork, finish: Callable[[Any], Any]) -> int:
        """An operation is under way; its number."""
        with self._lock:
            number = next(self._numbers)
            self._flights[number] = _Flight(work, finish)
        return number

    def poll(self, number: int) -> bool:
        """Whether synchronize() would return at once."""
        flight = self._flights.get(number)
        if flight is None:
            raise ValueError(f"handle {number} was not created, or was synchronized before")
        return flight.work.done()

    def synchronize(self, number: int) -> Any:  # a tensor, a list of them, or a pair
        """The result. A number that is not under way gives None, as it does in Horovod."""
        flight = self._flights.pop(number, None)
        if flight is None:
            return None
        with translated():
            return flight.finish(flight.work.wait())

    def joined(self) -> None:
        """All processes have joined: some have had operations that others had not, so all count anew."""
        with self._lock:
            self._nameless.clear()

    def forget(self) -> None:
        """hvd.init(): what was under way in an older round is not to be had any more."""
        self._flights.clear()

    def reset(self) -> None:
        """hvd.shutdown(): count from 1 again."""
        with self._lock:
            self._flights.clear()
            self._nameless.clear()
            self._numbers = itertools.count(1)
