"""Backends and coordinators that do what the test says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ronde.comm.backends.base import CallTiming, ChannelSpec, CurrentCall, RunningCall
from ronde.comm.buffers import address_of, as_memory
from ronde.comm.call import Call, CallOptions, Memory, Span, get_signature
from ronde.comm.channel import Channel
from ronde.comm.control_thread import ControlConnection, ControlThread, JoinedRound
from ronde.comm.named_operations import NamedOperations
from ronde.comm.open_channels import OpenChannels
from ronde.comm.operations import AllreduceWork
from ronde.comm.work import Work
from ronde.net.event_loop import EventLoop
from ronde.net.messages import AgreedOperation, CoordinatorMessage, RunOperations, WorkerMessage
from ronde.observe.recorder import Recorder
from ronde.settings import Settings
from ronde.types import Deadline, DType, Member, OperationKind, Topology
from tests.conformance.threads_backend import ThreadsBackend
from tests.limits import PATIENCE_S

M = TypeVar("M")
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

    def make_allreduce_cache(self, timeout_s: float, record_failure: object, **more: object) -> None:
        return None

    def submit(self, call: Call, deadline: Deadline) -> ScriptedRunningCall:
        if self.refusal is not None:
            raise self.refusal
        self.running_calls.append(ScriptedRunningCall(call, self.timing))
        return self.running_calls[-1]

    def bucket(self) -> Memory:
        return as_memory(np.zeros(2 * self.spec.bucket_bytes, np.uint8))

    def current_call(self) -> CurrentCall | None:
        return self.reported_call

    def rank_lost(self, rank: int, why: str) -> None:
        self.aborted.append((rank, why))

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        self.aborted.append((lost_rank, why))

    def close(self, why: str = "") -> None:
        self.closed += 1


class ScriptedControl:
    """The coordinator is the test: it sends messages and waits for what the control thread sends."""

    def __init__(self) -> None:
        self.said: list[WorkerMessage] = []
        self._changed = threading.Condition()
        self._loop: EventLoop | None = None
        self._on_message: Callable[[CoordinatorMessage], None] | None = None
        self._on_lost: Callable[[str], None] = lambda why: None

    def lose_messages(self, why: str) -> None:
        """Its connection has lost messages."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._loop is not None, PATIENCE_S)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(lambda: self._on_lost(why))

    def tell(self, *messages: CoordinatorMessage) -> None:
        def deliver() -> None:
            assert self._on_message is not None
            for message in messages:
                self._on_message(message)

        with self._changed:
            assert self._changed.wait_for(lambda: self._loop is not None, PATIENCE_S)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(deliver)

    def expect(self, kind: type[M], which: Callable[[M], bool] = lambda message: True) -> M:
        """Wait until the control thread has sent a message of this kind, and take it."""
        with self._changed:

            def found() -> M | None:
                return next((m for m in self.said if isinstance(m, kind) and which(m)), None)

            sent = self._changed.wait_for(lambda: found() is not None, PATIENCE_S)
            assert sent, f"no {kind.__name__} among {self.said}"
            message = found()
            assert message is not None
            self.said.remove(message)  # type: ignore[arg-type]  # it came from there
            return message

    def send(self, message: WorkerMessage) -> None:
        with self._changed:
            self.said.append(message)
            self._changed.notify_all()

    def start_receiving(
        self, loop: EventLoop, on_message: Callable[[CoordinatorMessage], None], on_lost: Callable[[str], None]
    ) -> None:
        with self._changed:
            self._loop, self._on_message, self._on_lost = loop, on_message, on_lost
            self._changed.notify_all()


def make_control_thread(
    settings: Settings,
    control: ControlConnection,
    recorder: Recorder,
    liveness_fd: int,
    coordinator_rank: int,
    loop: EventLoop,
    *,
    is_elastic: bool = False,
    on_change_wanted: Callable[[], None] = lambda: None,
) -> tuple[OpenChannels, ControlThread]:
    """Of rank 0, in a round of three without channels."""
    topology, backend = Topology(tuple(Member(rank, "here", 1, "") for rank in range(3)), 0), ThreadsBackend()
    open_channels = OpenChannels(0, 3, backend, recorder, settings)
    joined_round = JoinedRound(settings, topology, control, backend, liveness_fd, coordinator_rank, loop)
    joined_round.is_elastic = is_elastic
    return open_channels, ControlThread(joined_round, open_channels, recorder, on_change_wanted)


class ScriptedRound:
    """A control thread with one group of three ranks on a scripted channel."""

    def __init__(
        self, coordinator_rank: int = -1, *, watched: bool = False, is_elastic: bool = False, suspend_s: float = 30.0
    ) -> None:
        self.control = ScriptedControl()
        self.change_wanted = threading.Event()
        self.recorder = Recorder(0)
        self.loop = EventLoop()
        self.liveness, self.coordinator_end = socket.socketpair()
        settings = Settings(stall_s=0.0, suspend_s=suspend_s, coordinator_hosted=watched)
        self.open_channels, self.control_thread = make_control_thread(
            settings,
            self.control,
            self.recorder,
            self.liveness.fileno(),
            coordinator_rank,
            self.loop,
            is_elastic=is_elastic,
            on_change_wanted=self.change_wanted.set,
        )
        self.channel = ScriptedChannel(members=(0, 1, 2))
        channel = Channel(self.channel, 0, self.recorder, 10.0)
        self.open_channels.add(channel)
        self.named = NamedOperations(0, channel, self.control_thread.waits)
        self.open_channels.add_named_operations(self.named)
        self.control_thread.start()

    def hang_up(self) -> None:
        """The coordinator's process ends."""
        self.coordinator_end.close()

    def close(self) -> None:
        self.control_thread.stop(Deadline(PATIENCE_S))
        self.liveness.close()
        self.coordinator_end.close()

    def announce(self, name: str, count: int = 3) -> Work:
        signature = get_signature(OperationKind.ALLREDUCE, DType.FLOAT32, ((count,),), CallOptions())
        x = np.ones(count, np.float32)
        span = Span(address_of(x), address_of(x), count)
        work = AllreduceWork(signature, name, (span,), x, x)
        self.named.announce(work, 10.0)
        return work

    def run(self, *works: Work, id: int = 1, stragglers: tuple[tuple[int, int], ...] = ()) -> None:
        """The coordinator says that all have announced these, as one batch. They have started when this returns."""
        agreed = tuple(AgreedOperation(id + index, work.name) for index, work in enumerate(works))
        self.control.tell(RunOperations(0, agreed, stragglers))
        self.control_thread.waits.wait_for_start(works[0], Deadline(10))

    def finish(self, *works: Work) -> None:
        for running_call in self.channel.running_calls:
            running_call.end()
        for work in works:
            work.wait()
