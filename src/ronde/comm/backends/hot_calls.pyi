"""native/python/hot_calls.c"""

from collections import deque
from collections.abc import Callable
from typing import Any, final

from ronde.comm.backends.base import RunningCall
from ronde.observe.recorder import Recorder
from ronde.observe.stragglers import ArrivalSampler

ABI: int

@final
class AllreduceCache:
    def __new__(
        cls,
        run: int,
        channel: int,
        algorithm: int,
        timeout_s: float,
        array_type: type,
        empty_like: Callable[..., Any],
        this_thread: object,
        recorder: Recorder,
        running_calls: deque[RunningCall],
        next_sequence: Callable[[], int],
        sampler: ArrivalSampler,
        on_failure: Callable[[bytes, int, bytes], None],
    ) -> AllreduceCache: ...
    def run(self, x: Any, out: Any, op: object, prescale: object, postscale: object, /) -> Any: ...
    def add(
        self,
        x: Any,
        op: object,
        prescale: float,
        postscale: float,
        dtype: int,
        op_number: int,
        signature: int,
        description: bytes,
        /,
    ) -> None: ...
    def counts(self) -> tuple[int, int, int, int]: ...
    def restart(self, next_sequence: Callable[[], int], /) -> None: ...
    def close(self) -> None: ...
