"""A channel whose calls end when and how the test says."""

from __future__ import annotations

import threading

import numpy as np

from ronde.comm.backends.base import CallTiming, ChannelSpec, CurrentCall
from ronde.comm.call import Call
from ronde.errors import OperationTimeout
from ronde.types import Deadline

OUTCOME = CallTiming(1, 2, 3)


class ScriptedRunningCall:
    """One call: under way until ended."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.num_waits = 0
        self._over = threading.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, deadline: Deadline) -> CallTiming:
        self.num_waits += 1
        if not self._over.wait(deadline.remaining_s):
            raise OperationTimeout("not yet")
        if self._error is not None:
            raise self._error
        return OUTCOME


class ScriptedChannel:
    """Keeps what it was asked for."""

    def __init__(self, members: tuple[int, ...] = (0, 1)) -> None:
        self.spec = ChannelSpec(id="0.ordered", members=members, member_index=0)
        self.running_calls: list[ScriptedRunningCall] = []
        self.refusal: Exception | None = None
        self.reported_call: CurrentCall | None = None
        self.aborted: list[tuple[int, str]] = []
        self.closed = 0

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        if self.refusal is not None:
            raise self.refusal
        return OUTCOME

    def submit(self, call: Call, deadline: Deadline) -> ScriptedRunningCall:
        if self.refusal is not None:
            raise self.refusal
        self.running_calls.append(ScriptedRunningCall(call))
        return self.running_calls[-1]

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.zeros(self.spec.bucket_bytes, np.uint8)

    def current_call(self) -> CurrentCall | None:
        return self.reported_call

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        self.aborted.append((lost_rank, why))

    def close(self) -> None:
        self.closed += 1
