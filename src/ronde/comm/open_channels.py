"""All open channels of this rank, with the named operations of its groups. The world makes one OpenChannels; groups and
mailboxes open and close channels here, and the control thread aborts what involves a lost rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container
from typing import Any, TypeVar

from ronde.comm.backends.base import Backend, ChannelSpec
from ronde.comm.backends.single_rank import SingleRankBackend
from ronde.comm.call import kind_of_device
from ronde.comm.channel import AnnouncedChannel, Channel
from ronde.comm.fork_and_signal_safety import InsideOperation
from ronde.comm.named_operations import NamedOperations
from ronde.errors import PeerLost, RondeError, RoundEnded
from ronde.observe.events import ChannelClosed, ChannelOpened
from ronde.observe.recorder import Recorder
from ronde.settings import Settings
from ronde.types import CPU, Deadline

_Opened = TypeVar("_Opened")


class OpenChannels:
    """Opens and closes the channels of this rank, and aborts them, with the named operations of their groups, when a
    member is lost or the round is over. Safe from any thread."""

    def __init__(self, rank: int, size: int, backend: Backend, recorder: Recorder, settings: Settings) -> None:
        self.operation_timeout_s = settings.operation_s
        self.message_buffer_bytes = settings.message_buffer_bytes
        self.open_timeout_s = settings.start_s
        """How long opening a channel may take: at first start_s, from the end of the start on operation_s."""
        self.channels: tuple[Channel, ...] = ()
        self.closed_error: RondeError | None = None
        """Why the round is over for this rank, if it is."""
        self.named_operations: dict[int, NamedOperations] = {}
        self._rank = rank
        self._size = size
        self._backend = backend
        self.recorder = recorder
        self._sample_arrivals = settings.coordinator_hosted
        self._lock = threading.RLock()  # reentrant: a signal handler that calls shutdown() may interrupt its owner
        self._lost: dict[int, str] = {}
        self._devices: dict[str, str] = {}
        """By kind, the device that this rank uses."""
        self._opening: deque[None] = deque()
        """One entry for each channel that is being opened."""
        self._opening_stopped = False

    def error_for(self, members: Container[int]) -> RondeError | None:
        """Why these ranks cannot do anything together any more, the first reason there was; None when they can."""
        for rank, why in self._lost.items():
            if rank in members:
                return PeerLost(rank=self._rank, peer=rank, why=why)
        return self.closed_error

    def open(self, group: int, suffix: str, members: tuple[int, ...], **options: Any) -> Channel:
        """Open a channel together with the other members. The options are those of ChannelSpec."""
        spec = self._make_spec(group, suffix, members, **options)
        opened = self._open(spec, self._backend_for(members).open_channel)
        channel = Channel(opened, group, self.recorder, self.operation_timeout_s, sample_arrivals=self._sample_arrivals)
        self._add_opened(channel, spec)
        return channel

    def open_announced(self, group: int, members: tuple[int, ...]) -> AnnouncedChannel | None:
        """Open the channel of a group's operations that are announced in shared memory, together with the other
        members; None, on all of them, if they share none."""
        spec = self._make_spec(group, "announced", members)
        opened = self._open(spec, self._backend_for(members).open_announced_channel)
        if opened is None:
            return None
        channel = AnnouncedChannel(
            opened, group, self.recorder, self.operation_timeout_s, sample_arrivals=self._sample_arrivals
        )
        self._add_opened(channel, spec)
        return channel

    def _backend_for(self, members: tuple[int, ...]) -> Backend:
        is_cpu_only = self._backend.devices == (CPU,)
        return SingleRankBackend() if len(members) == 1 and is_cpu_only else self._backend

    def check_device(self, device: str, what: str) -> None:
        """TypeError if no operation can use memory of this device. A rank uses one device of a kind."""
        kind = kind_of_device(device)
        if self._devices.setdefault(kind, device) != device:
            raise TypeError(
                f"{what}: the memory is on {device}, and this rank has used {self._devices[kind]} before; "
                "use one device in each rank"
            )
        if kind not in self._backend.devices:
            del self._devices[kind]
            taken = " and ".join(self._backend.devices)
            raise TypeError(
                f"{what}: the memory is on {device}, and the backend {self._backend.name!r} takes only that of {taken};"
                " copy it to the CPU first, or choose a backend for that device with the setting backend "
                "(RONDE_BACKEND)"
            )

    def _make_spec(self, group: int, suffix: str, members: tuple[int, ...], **options: Any) -> ChannelSpec:
        index = members.index(self._rank)
        return ChannelSpec(id=f"{group}.{suffix}", members=members, member_index=index, **options)

    def _open(self, spec: ChannelSpec, open: Callable[[ChannelSpec, Deadline], _Opened]) -> _Opened:
        if self.closed_error is not None:
            raise self.closed_error
        self._opening.append(None)
        try:
            with InsideOperation(f"opening channel {spec.id}"):
                return open(spec, Deadline(self.open_timeout_s))
        except RondeError as error:
            raise (self.closed_error or error) from None
        finally:
            self._opening.pop()

    def _add_opened(self, channel: Channel, spec: ChannelSpec) -> None:
        self.add(channel)
        if self._opening_stopped:  # meanwhile, by another thread or a signal handler, which did not know this channel
            self.close(channel)
            raise self.closed_error or RoundEnded(f"channel {spec.id} is closed")
        event = ChannelOpened(at_ns=time.monotonic_ns(), rank=self._rank, channel=spec.id, members=spec.members)
        self.recorder.record_event(event)

    def close(self, channel: Channel, why: str = "") -> None:
        """Close a channel; what is under way ends with RoundEnded, for this reason. Idempotent."""
        with self._lock:
            if channel not in self.channels:
                return
            self.channels = tuple(each for each in self.channels if each is not channel)
        channel.close(why)
        event = ChannelClosed(at_ns=time.monotonic_ns(), rank=self._rank, channel=channel.backend_channel.spec.id)
        self.recorder.record_event(event)

    def add(self, channel: Channel) -> None:
        """Add an open channel. What needs a member that is lost already ends at once."""
        with self._lock:
            self.channels = (*self.channels, channel)
            lost = {rank: why for rank, why in self._lost.items() if rank in channel.members}
            closed_error = self.error_for(())
        for rank, why in lost.items():
            channel.rank_lost(PeerLost(rank=self._rank, peer=rank, why=why))
        if closed_error is not None:
            channel.abort(closed_error)

    def add_named_operations(self, named_operations: NamedOperations) -> None:
        """Add a group's named operations. They are aborted at once if a member is lost already."""
        with self._lock:
            self.named_operations = {**self.named_operations, named_operations.group: named_operations}
            error = self.error_for(named_operations.channel.members)
        if error is not None:
            named_operations.abort(error)

    def remove_named_operations(self, group: int) -> None:
        with self._lock:
            self.named_operations = {id: named for id, named in self.named_operations.items() if id != group}

    def abort_for(self, rank: int, why: str) -> None:
        """End all that involves a lost rank: the collectives and named operations of groups of which it is a member,
        and the messages to it and from it. What is added from now on sees the loss by itself."""
        with self._lock:
            self._lost.setdefault(rank, why)
        self._backend.rank_lost(rank, why)
        error = PeerLost(rank=self._rank, peer=rank, why=why)
        for channel in self.channels:
            if rank in channel.members:
                channel.rank_lost(error)
        for named in self.named_operations.values():
            if rank in named.channel.members:
                named.abort(error)

    def abort_all(self, error: RondeError) -> None:
        """Abort all channels and named operations, because the round is over. The first error counts."""
        with self._lock:
            if self.closed_error is not None:
                return
            self.closed_error = error
        self._end_openings(str(error))
        for channel in self.channels:
            channel.abort(error)
        for named in self.named_operations.values():
            named.abort(error)

    def stop_opening(self, error: RondeError) -> None:
        """This rank leaves the round: open nothing any more, and end with the error what is being opened. What is open
        stays so, to be closed in good order."""
        with self._lock:
            self._opening_stopped = True
            self.closed_error = self.closed_error or error
        if self._opening:
            self._end_openings(str(error))

    def refuse_in_child(self, error: RondeError) -> None:
        """This process is a forked child: everything raises the error, and nothing reaches the backend."""
        self._lock = threading.RLock()  # a thread of the parent may have held it
        for channel in self.channels:
            channel.refuse_in_child(error)
        for named in self.named_operations.values():
            named.refuse_in_child(error)
        self.closed_error, self.channels, self.named_operations = error, (), {}

    def _end_openings(self, why: str) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                self._backend.rank_lost(rank, why)
