"""The backend for groups of one member: every call is over at once, in the caller's thread. Used by a job of one rank,
and for groups of one member in any job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ronde.comm.backends.base import (
    AnnouncedCall,
    CallTiming,
    ChannelSpec,
    CurrentCall,
    IdNotAgreed,
    RunningCall,
)
from ronde.comm.backends.native_library import reduce
from ronde.comm.backends.native_messages import NativeEndpoint, NativeMessageChannel
from ronde.comm.buffers import Array, address_of, aligned_zeros, array_at, as_memory
from ronde.comm.call import AnnouncedOperation, Call, Memory
from ronde.errors import RoundEnded
from ronde.net.messages import ChannelAborted
from ronde.types import CPU, Deadline, DType, Op, OperationKind


class SingleRankBackend:
    name = "single_rank"
    devices: tuple[str, ...] = (CPU,)

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> SingleRankChannel | NativeMessageChannel:
        if not spec.point_to_point:
            return SingleRankChannel(spec)
        (rank,) = spec.members
        return NativeMessageChannel(spec, NativeEndpoint(rank, rank + 1), owns_endpoint=True)

    def open_announced_channel(self, spec: ChannelSpec, deadline: Deadline) -> SingleRankChannel:
        return SingleRankChannel(spec)

    def rank_lost(self, rank: int, why: str) -> None:
        pass

    def channel_aborted(self, abort: ChannelAborted) -> None:
        return None  # no channel of this backend reports it

    def flush(self, deadline: Deadline) -> None:
        pass

    def close(self) -> None:
        pass


class SingleRankChannel:
    """A channel with one member: the result of every collective is the member's own input, scaled."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec
        self._bucket = aligned_zeros(2 * spec.bucket_bytes)
        self._end_reason = ""
        self._agreed: dict[int, Call] = {}
        """By id: the call that it stands for."""

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        if self._end_reason:
            raise RoundEnded(f"{call.description} cannot finish: {self._end_reason}")
        start_ns = time.monotonic_ns()
        if call.kind not in (OperationKind.BARRIER, OperationKind.JOIN):
            _copy_scaled(call)
        return CallTiming(start_ns, start_ns, time.monotonic_ns(), "single_rank")

    def make_allreduce_cache(self, timeout_s: float, record_failure: object, **more: object) -> None:
        return None

    def submit(self, call: Call, deadline: Deadline) -> RunningCall:
        return _EndedCall(call, self.run(call, deadline))

    def agree(self, id: int, name: str, call: Call) -> None:
        self._agreed[id] = msgspec.structs.replace(call, spans=(), owners=None)

    def revoke(self, id: int) -> bool:
        self._agreed.pop(id, None)
        return False

    def announce_many(
        self,
        operations: Sequence[AnnouncedOperation],
        timeout_s: float,
        *,
        will_wait: bool,
        on_wait: Callable[[int, int], object],
        on_ended: Callable[[Sequence[AnnouncedCall]], None],
    ) -> _EndedCalls:
        calls: list[AnnouncedCall | None] = []
        for operation in operations:
            call = self._agreed.get(operation.shared_id)
            if call is None or call.signature_hash != operation.signature.hash:
                calls.append(None)
                continue
            ended = AnnouncedCall(operation)
            ended.timing = self.run(msgspec.structs.replace(call, spans=operation.spans), Deadline(timeout_s))
            calls.append(ended)
        on_ended([call for call in calls if call is not None])
        return _EndedCalls(calls)

    def run_announced(
        self, id: int, call: Call, deadline: Deadline, on_unfinished: Callable[[RunningCall], None]
    ) -> CallTiming | None:
        return self._run_agreed(id, call, deadline)

    def announced_until(self, until_ns: int) -> list[tuple[int, int]]:
        return []

    def not_announced(self, id: int) -> tuple[int, ...]:
        return ()

    def _run_agreed(self, id: int, call: Call, deadline: Deadline) -> CallTiming:
        agreed = self._agreed.get(id)
        if agreed is None or agreed.signature_hash != call.signature_hash:
            raise IdNotAgreed(call.description)
        return self.run(call, deadline)

    def bucket(self) -> Memory:
        return as_memory(self._bucket)

    def current_call(self) -> CurrentCall | None:
        return None

    def rank_lost(self, rank: int, why: str) -> None:
        pass

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        self._end_reason = self._end_reason or why

    def close(self, why: str = "") -> None:
        self.abort(why=why or f"channel {self.spec.id} is closed")


class _EndedCalls:
    """Calls that were over when they were announced."""

    def __init__(self, calls: Sequence[AnnouncedCall | None]) -> None:
        self.calls = calls

    def poll(self) -> bool:
        return True


class _EndedCall(RunningCall):
    """A call that was over when it was submitted."""

    __slots__ = ("_own_timing",)

    def __init__(self, call: Call, timing: CallTiming) -> None:
        super().__init__(call)
        self._own_timing = timing

    def has_ended(self) -> bool:
        return True

    def wait_for_end(self, deadline: Deadline) -> CallTiming:
        return self._own_timing


def _copy_scaled(call: Call) -> None:
    inputs = [array_at(span.input, span.count, call.dtype.numpy) for span in call.spans]
    if call.prescale != 1.0 or call.postscale != 1.0:
        inputs = [scale(array, call.dtype, call.prescale, call.postscale) for array in inputs]
    elif len(inputs) > 1:  # an output may overlap with another input
        inputs = [array.copy() for array in inputs]
    for source, span in zip(inputs, call.spans, strict=True):
        array_at(span.output, span.count, call.dtype.numpy)[:] = source


def scale(array: Array, dtype: DType, prescale: float, postscale: float = 1.0, out: Array | None = None) -> Array:
    """The array, or `out`, with both factors."""
    out = np.empty_like(array) if out is None else out
    addresses = ([address_of(array)], [address_of(out)])
    # Of one input every operation is the sum.
    reduce(dtype, Op.SUM, *addresses, array.size, prescale=prescale, postscale=postscale)
    return out
