"""A channel whose calls end when and how the test says."""

from __future__ import annotations

import threading

import numpy as np

from ronde.comm.backends.base import CallTiming, ChannelSpec, CurrentCall, RunningCall
from ronde.comm.call import Call, CallOptions, get_signature
from ronde.types import Deadline, DType, OperationKind

TIMING = CallTiming(1, 2, 3)
SIGNATURE = get_signature(OperationKind.ALLREDUCE, DType.FLOAT32, ((2,),), CallOptions())


class ScriptedRunningCall(RunningCall):
    """One call: under way until the test ends it."""

    def __init__(self, call: Call, timing: CallTiming = TIMING) -> None:
        super().__init__(call)
        self.submitted = call
        self.num_waits = 0
        self._ended = threading.Event()
        self._own_timing = timing
        self._own_error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        self._own_error = error
        self._ended.set()

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait_for_end(self, deadline: Deadline) -> CallTiming | None:
        self.num_waits += 1
        if not self._ended.wait(deadline.remaining_s):
            return None
        if self._own_error is not None:
            raise self._own_error
        return self._own_timing


class ScriptedChannel:
    """Keeps what it was asked for."""

    def __init__(self, members: tuple[int, ...] = (0, 1)) -> None:
        self.spec = ChannelSpec(id="0.ordered", members=members, member_index=0)
        self.running_calls: list[ScriptedRunningCall] = []
        self.timing = TIMING
        """Of the next call."""
        self.refusal: Exception | None = None
        self.reported_call: CurrentCall | None = None
        self.aborted: list[tuple[int, str]] = []
        self.closed = 0

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        if self.refusal is not None:
            raise self.refusal
        return self.timing

    def submit(self, call: Call, deadline: Deadline) -> ScriptedRunningCall:
        if self.refusal is not None:
            raise self.refusal
        self.running_calls.append(ScriptedRunningCall(call, self.timing))
        return self.running_calls[-1]

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.zeros(self.spec.bucket_bytes, np.uint8)

    def current_call(self) -> CurrentCall | None:
        return self.reported_call

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        self.aborted.append((lost_rank, why))

    def close(self) -> None:
        self.closed += 1
