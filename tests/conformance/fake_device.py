"""A device whose memory, streams and collectives behave as those of a GPU do, on the CPU: it proves the contract of
docs/internals/devices.md.

A stream is a thread that does one thing after the other. A collective waits for its streams and then for the other
members, on a stream of its own; the host waits for nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue

import numpy as np

from ronde.comm.backends.base import BackendChannel, CallTiming, ChannelSpec, CurrentCall, RunningCall
from ronde.comm.buffers import Array, address_of
from ronde.comm.call import Call, Memory
from ronde.errors import RoundEnded
from ronde.net.messages import ChannelAborted
from ronde.types import CPU, Deadline
from tests.conformance.threads_backend import ThreadsBackend
from tests.limits import OPERATION_S

KIND = "fake"
CHECK_S = 0.01


class FakeDevice(AbstractContextManager["FakeDevice"]):
    """Streams and memory of one rank."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._queues: dict[int, SimpleQueue[Callable[[], object] | None]] = {}
        self._threads: list[threading.Thread] = []

    def new_stream(self) -> int:
        number = next(self._numbers)
        queue = self._queues[number] = SimpleQueue()

        def run() -> None:
            while (work := queue.get()) is not None:
                work()

        self._threads.append(threading.Thread(target=run, name=f"stream-{number}", daemon=True))
        self._threads[-1].start()
        return number

    def put(self, stream: int, work: Callable[[], object]) -> None:
        """Do this after what was put on the stream before. The caller does not wait."""
        self._queues[stream].put(work)

    def synchronize(self, stream: int) -> None:
        """Wait until all that was put on the stream is done."""
        done = threading.Event()
        self.put(stream, done.set)
        assert done.wait(OPERATION_S), "the stream hangs"

    def memory(self, array: Array, stream: int | None) -> Memory:
        """Memory of the device with these elements, which the host may look at in tests."""
        return Memory(address_of(array), array.shape, array.dtype.name, f"{KIND}:0", stream, owner=array)

    def __exit__(self, *_: object) -> None:
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join(OPERATION_S)
            assert not thread.is_alive(), "a stream hangs"


class FakeDeviceBackend:
    """Calls on memory of the device go to channels of their own; all others to those for the CPU."""

    name = "fake"
    devices: tuple[str, ...] = (CPU, KIND)

    def __init__(self, cpu: ThreadsBackend) -> None:
        self.device = FakeDevice()
        self._cpu = cpu

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> BackendChannel:
        cpu_channel = self._cpu.open_channel(spec, deadline)
        if spec.point_to_point:
            return cpu_channel
        device_spec = dataclasses.replace(spec, id=f"{spec.id}.{KIND}")
        return FakeDeviceChannel(spec, cpu_channel, self._cpu.open_channel(device_spec, deadline), self.device)

    def open_announced_channel(self, spec: ChannelSpec, deadline: Deadline) -> None:
        return None

    def rank_lost(self, rank: int, why: str) -> None:
        self._cpu.rank_lost(rank, why)

    def channel_aborted(self, abort: ChannelAborted) -> None:
        self._cpu.channel_aborted(abort)

    def flush(self, deadline: Deadline) -> None:
        pass

    def close(self) -> None:
        pass


class FakeDeviceChannel:
    def __init__(
        self, spec: ChannelSpec, cpu_channel: BackendChannel, inner: BackendChannel, device: FakeDevice
    ) -> None:
        self.spec = spec
        self.is_closed = False
        self.device = device
        self._cpu_channel = cpu_channel
        self._inner = inner
        self._stream = device.new_stream()
        self.make_allreduce_cache = cpu_channel.make_allreduce_cache  # only for arrays, so only for the CPU
        self.bucket = cpu_channel.bucket

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        return (
            self._cpu_channel.run(call, deadline) if call.device == CPU else self.submit(call, deadline).wait(deadline)
        )

    def submit(self, call: Call, deadline: Deadline) -> RunningCall:
        if call.device == CPU:
            return self._cpu_channel.submit(call, deadline)
        if self.is_closed:
            raise RoundEnded(f"{call.description}: the channel is closed")
        ready = []
        for stream in call.streams:
            ready.append(threading.Event())
            self.device.put(stream, ready[-1].set)
        running_call = FakeDeviceCall(self, call)
        self.device.put(self._stream, lambda: running_call.execute(self._inner, ready, deadline))
        return running_call

    def current_call(self) -> CurrentCall | None:
        return self._inner.current_call() or self._cpu_channel.current_call()

    def rank_lost(self, rank: int, why: str) -> None:
        self.abort(lost_rank=rank, why=why)

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        self._cpu_channel.abort(lost_rank=lost_rank, why=why)
        self._inner.abort(lost_rank=lost_rank, why=why)

    def close(self, why: str = "") -> None:
        self.is_closed = True
        self._cpu_channel.close(why)
        self._inner.close(why)


class FakeDeviceCall(RunningCall):
    def __init__(self, channel: FakeDeviceChannel, call: Call) -> None:
        super().__init__(call)
        self._channel = channel
        self._outcome: CallTiming | Exception | None = None
        self._ended = threading.Event()

    def execute(self, inner: BackendChannel, ready: list[threading.Event], deadline: Deadline) -> None:
        """On the stream of the channel. The call, and so the owner of its memory, is kept until its end."""
        call = self.call
        assert call is not None
        try:
            for event in ready:
                while not event.wait(CHECK_S):
                    if self._channel.is_closed:
                        raise RoundEnded(f"{call.description}: the channel is closed")
            self._outcome = inner.run(call, deadline)
        except Exception as error:  # the host learns of it when it asks
            self._outcome = error
        self._ended.set()

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait_for_end(self, deadline: Deadline) -> CallTiming | None:
        if not self._ended.wait(deadline.remaining_s):
            return None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def wait_on_stream(self, stream: int, deadline: Deadline) -> None:
        if self.has_ended():
            self.wait(deadline)
        self._channel.device.put(stream, self._ended.wait)


def device_of(backend: object) -> FakeDevice:
    assert isinstance(backend, FakeDeviceBackend)
    return backend.device


def filled(shape: int, value: float) -> Array:
    return np.full(shape, value, np.float32)
