"""native/python/hot_calls.c"""

from collections import deque
from collections.abc import Callable, Sequence
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

@final
class ReadyCounter:
    def __new__(
        cls,
        bucket_of: Sequence[int],
        num_buckets: int,
        on_first: Callable[[int | None], object],
        on_second: Callable[[int], object],
        on_full: Callable[[int], object],
    ) -> ReadyCounter: ...
    def hook(self, index: int | None, /) -> Callable[..., None]: ...
    def begin(self, counts: bool, /) -> None: ...
    def report_next(self) -> None: ...
    def all_ready(self) -> bool: ...
    def ready_order(self) -> list[int]: ...
