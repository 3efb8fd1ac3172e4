"""The mpi backend: the job's own MPI library (through mpi4py) moves the data. Chosen with `backend = "mpi"`.

Programs are started by that library's own mpiexec: `mpiexec -n 4 python train.py`. Rank and size come from MPI; ronde's
control plane (names, groups, stall reports) runs beside it as with every backend, see settings_from_mpi().

    requests            loading MPI, waiting for its requests with a deadline and an abort
    failure_detection   notices between the members: who waits, left or aborted, and which waits that ends
    matching            comparing what the members ask for
    reduction           element types and operators that MPI does not have
    collectives         the data of each kind of call
    channel             one channel: calls in order
"""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ronde.comm.backends.base import ChannelSpec
from ronde.comm.backends.mpi.channel import MpiChannel
from ronde.comm.backends.mpi.failure_detection import NoticeExchange
from ronde.comm.backends.mpi.requests import MAX_IDLE_SLEEP_S, MpiRequest, abandon, load_mpi, wait_all
from ronde.errors import PeerLost, StartFailed
from ronde.net.addresses import candidate_addresses, find_free_port, format_address, host_identity, local_address_for
from ronde.net.keys import new_job_key
from ronde.settings import Settings
from ronde.text import format_ranks
from ronde.types import Deadline, Topology

if TYPE_CHECKING:
    from mpi4py import MPI

ROW_BYTES = 512
"""Size of what each rank sends at the start: names and addresses."""

_MEMBERS_CHECK = struct.Struct("<I")
"""A checksum of the channel's members."""


class MpiBackend:
    """Opens channels among the ranks of an MPI communicator, the world by default. Collective among all its ranks."""

    name = "mpi"

    def __init__(self, topology: Topology, settings: Settings, comm: MPI.Intracomm | None = None) -> None:
        load_mpi()
        from mpi4py import MPI

        given = MPI.COMM_WORLD if comm is None else comm
        if (given.Get_rank(), given.Get_size()) != (topology.rank, topology.size):
            raise StartFailed(
                f"MPI says rank {given.Get_rank()} of {given.Get_size()}, the job says rank {topology.rank} of "
                f"{topology.size}; start the program with the mpiexec of the MPI library that mpi4py uses"
            )
        self._rank = topology.rank
        self._lost: dict[int, str] = {}
        self._lock = threading.Lock()
        self._closed_channels: list[NoticeExchange] = []
        self._shutdown_s = settings.shutdown_s
        self._closed = self._broken = False
        # A communicator of its own, so that it never receives what the program itself sends over MPI.
        deadline = Deadline(settings.start_s)
        self._comm, request = given.Idup()
        _wait_or_abandon([request], lambda: _check_start_deadline(deadline, topology.rank, topology.size))

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> MpiChannel:
        """Wait for all members, then make a communicator of them."""
        self._free_closed_channels()
        check = _MEMBERS_CHECK.pack(zlib.crc32(repr(spec.members).encode()))
        if any(answer != check for answer in self._exchange_members(spec, check, deadline)):
            raise ValueError(f"channel {spec.id} was opened for different members, here {format_ranks(spec.members)}")
        # This call blocks, but not for long: all members are about to make it.
        group = self._comm.Get_group().Incl(list(spec.members))
        comm = self._comm.Create_group(group, self._tag(spec))
        group.Free()
        return MpiChannel(spec, comm, self._closed_channels.append)

    def rank_lost(self, rank: int, why: str) -> None:
        with self._lock:
            self._lost.setdefault(rank, why)

    def close(self) -> None:
        from mpi4py import MPI

        with self._lock:
            if self._closed:
                return
            self._closed = True
        if MPI.Is_finalized():
            return
        deadline = Deadline(self._shutdown_s)
        while not self._free_closed_channels() and not deadline.expired:
            time.sleep(MAX_IDLE_SLEEP_S)
        if not self._broken and not self._lost:
            self._comm.Free()

    def _free_closed_channels(self) -> bool:
        """Free the communicators of channels that all members have closed. Whether none is left."""
        with self._lock:
            self._closed_channels[:] = [notices for notices in self._closed_channels if not notices.free()]
            return not self._closed_channels

    def _exchange_members(self, spec: ChannelSpec, members_check: bytes, deadline: Deadline) -> list[bytes]:
        """The checksums of all members, in their order. Each sends to each, so that each can name who is missing."""
        tag = self._tag(spec)
        answers = [bytearray(_MEMBERS_CHECK.size) for _ in spec.members]
        incoming = [self._comm.Irecv(answer, rank, tag) for rank, answer in zip(spec.members, answers, strict=True)]
        outgoing = [self._comm.Isend(members_check, rank, tag) for rank in spec.members]
        try:
            wait_all(incoming + outgoing, lambda: self._check_members(spec, incoming, deadline))
        except BaseException:
            self._broken = True
            for request in incoming:  # or they would receive the messages of a later attempt
                if not request.Test():
                    request.Cancel()
            abandon(incoming + outgoing, None)
            raise
        return [bytes(answer) for answer in answers]

    def _check_members(self, spec: ChannelSpec, incoming: Sequence[MpiRequest], deadline: Deadline) -> None:
        if not self._lost and not deadline.expired:
            return
        opening = f"opening channel {spec.id}"
        missing = [rank for rank, request in zip(spec.members, incoming, strict=True) if not request.Test()]
        for rank in missing:
            if rank in self._lost:
                raise PeerLost(rank=self._rank, peer=rank, op=opening, why=self._lost[rank])
        if missing and deadline.expired:
            raise StartFailed(f"{opening}: {format_ranks(missing)} did not come within {deadline.timeout_s:g} s")

    def _tag(self, spec: ChannelSpec) -> int:
        from mpi4py import MPI

        limit = self._comm.Get_attr(MPI.TAG_UB)
        return zlib.crc32(spec.id.encode()) % (int(limit or 32767) + 1)


def settings_from_mpi(settings: Settings) -> Settings:
    """The settings with rank and size from MPI, and, unless a coordinator is given, with a key and an address where
    rank 0 will host one. Collective among all ranks of the world."""
    load_mpi()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    if settings.size not in (1, size):
        raise StartFailed(
            f"MPI says that there are {size} ranks, the settings say {settings.size}; start the program with the "
            "mpiexec of the MPI library that mpi4py uses"
        )
    if size == 1 or settings.coordinator:
        return settings.replace(rank=rank, size=size)
    deadline = Deadline(settings.start_s)

    def check() -> None:
        _check_start_deadline(deadline, rank, size)

    rows = bytearray(ROW_BYTES * size)
    own_row = _encode_row(settings.host or host_identity(), candidate_addresses()[0])
    _wait_or_abandon([world.Iallgather(own_row, rows)], check)
    hosts = [_decode_row(rows[start : start + ROW_BYTES]) for start in range(0, len(rows), ROW_BYTES)]
    chosen = bytearray(ROW_BYTES)
    if rank == 0:
        address = _own_address(hosts)
        chosen[:] = _encode_row(format_address(address, find_free_port(address)), settings.key or new_job_key())
    _wait_or_abandon([world.Ibcast(chosen, 0)], check)
    coordinator, key = _decode_row(chosen)
    return settings.replace(rank=rank, size=size, coordinator=coordinator, key=key)


def _own_address(hosts: Sequence[Sequence[str]]) -> str:
    """The address of rank 0 for the others: the loopback when all are on one host, else the one that this host uses to
    reach the first other one."""
    own_host, _ = hosts[0]
    others = [address for host, address in hosts if host != own_host]
    return local_address_for(others[0]) if others else "127.0.0.1"


def _encode_row(*texts: str) -> bytes:
    data = "\n".join(texts).encode()
    if len(data) > ROW_BYTES:
        raise StartFailed(f"{texts[0]!r} is too long a name for a host: {len(data)} bytes of {ROW_BYTES}")
    return data.ljust(ROW_BYTES, b"\0")


def _decode_row(data: bytes | bytearray) -> list[str]:
    return data.rstrip(b"\0").decode().split("\n")


def _check_start_deadline(deadline: Deadline, rank: int, size: int) -> None:
    if deadline.expired:
        raise StartFailed(
            f"rank {rank} waited {deadline.timeout_s:g} s for all {size} ranks of mpiexec; does every one of them call "
            "ronde.init()?"
        )


def _wait_or_abandon(requests: Sequence[MpiRequest], check: Callable[[], None]) -> None:
    try:
        wait_all(requests, check)
    except BaseException:
        abandon(requests, None)
        raise
