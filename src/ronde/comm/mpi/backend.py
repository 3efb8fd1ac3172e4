"""The mpi backend: the job's own MPI library (through mpi4py) moves the data. Chosen with `backend = "mpi"`.

Programs are started by that library's own mpiexec: `mpiexec -n 4 python train.py`. MPI says who is who; ronde's control
plane (names, groups, stall reports) runs beside it as with every backend, see mpi_settings().

    requests         loading MPI, waiting for its requests with a deadline and an abort
    notices          what members tell each other beside their calls
    standing         who left, who gave up, and which waits that ends
    header           comparing what the members ask for
    arithmetic       element types and operations that MPI does not have
    moves            the data of each kind of call
    channel          one channel: calls in order
"""

from __future__ import annotations

import dataclasses
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ronde.comm.backend import ChannelSpec
from ronde.comm.mpi.channel import MpiChannel
from ronde.comm.mpi.notices import NoticeBoard
from ronde.comm.mpi.requests import PATIENT_S, Request, abandon, complete, load_mpi
from ronde.errors import PeerLost, StartFailed
from ronde.net.addresses import candidates, facing, format_address, free_port, host_identity
from ronde.net.keys import new_key
from ronde.observe.events import name_ranks
from ronde.settings import Settings
from ronde.types import Deadline, Topology

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiBackend", "mpi_settings"]

ROW_BYTES = 512
"""Room for what ranks tell each other at the start: names and addresses."""

_HELLO = struct.Struct("<I")
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
        self._retired: list[NoticeBoard] = []
        self._shutdown_s = settings.shutdown_s
        self._closed = self._broken = False
        # A communicator of our own: what the program itself sends over MPI is never mixed up with ours.
        deadline = Deadline(settings.start_s)
        self._comm, request = given.Idup()
        _wait([request], lambda: _check_start(deadline, topology.rank, topology.size))

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> MpiChannel:
        """Wait for all members, then make a communicator of them."""
        self._free_retired()
        hello = _HELLO.pack(zlib.crc32(repr(spec.members).encode()))
        if any(answer != hello for answer in self._exchange(spec, hello, deadline)):
            raise ValueError(f"channel {spec.id} was opened for different members, here {name_ranks(spec.members)}")
        # This call blocks, but not for long: all members are on their way into it.
        group = self._comm.Get_group().Incl(list(spec.members))
        comm = self._comm.Create_group(group, self._tag(spec))
        group.Free()
        return MpiChannel(spec, comm, self._retired.append)

    def lost(self, rank: int, why: str) -> None:
        """A rank is gone: waits inside open_channel that need it end with PeerLost."""
        with self._lock:
            self._lost.setdefault(rank, why)

    def close(self) -> None:
        """Free everything. Idempotent; channels were closed before."""
        from mpi4py import MPI

        with self._lock:
            if self._closed:
                return
            self._closed = True
        if MPI.Is_finalized():
            return
        deadline = Deadline(self._shutdown_s)
        while not self._free_retired() and not deadline.passed:
            time.sleep(PATIENT_S)
        if not self._broken and not self._lost:
            self._comm.Free()

    def _free_retired(self) -> bool:
        """Free what closed channels left, as far as all their members closed them. Whether nothing is left."""
        with self._lock:
            self._retired[:] = [board for board in self._retired if not board.free()]
            return not self._retired

    def _exchange(self, spec: ChannelSpec, hello: bytes, deadline: Deadline) -> list[bytes]:
        """Everybody's hello, in the order of the members. Each tells each, so that each can name who is missing."""
        tag = self._tag(spec)
        answers = [bytearray(_HELLO.size) for _ in spec.members]
        incoming = [self._comm.Irecv(answer, rank, tag) for rank, answer in zip(spec.members, answers, strict=True)]
        outgoing = [self._comm.Isend(hello, rank, tag) for rank in spec.members]
        try:
            complete(incoming + outgoing, lambda: self._check_members(spec, incoming, deadline))
        except BaseException:
            self._broken = True
            for request in incoming:  # another try must find the messages that are meant for it
                if not request.Test():
                    request.Cancel()
            abandon(incoming + outgoing, None)
            raise
        return [bytes(answer) for answer in answers]

    def _check_members(self, spec: ChannelSpec, incoming: Sequence[Request], deadline: Deadline) -> None:
        if not self._lost and not deadline.passed:
            return
        opening = f"opening channel {spec.id}"
        missing = [rank for rank, request in zip(spec.members, incoming, strict=True) if not request.Test()]
        for rank in missing:
            if rank in self._lost:
                raise PeerLost(rank=self._rank, peer=rank, op=opening, why=self._lost[rank])
        if missing and deadline.passed:
            raise StartFailed(f"{opening}: {name_ranks(missing)} did not come within {deadline.seconds:g} s")

    def _tag(self, spec: ChannelSpec) -> int:
        from mpi4py import MPI

        limit = self._comm.Get_attr(MPI.TAG_UB)
        return zlib.crc32(spec.id.encode()) % (int(limit or 32767) + 1)


def mpi_settings(settings: Settings) -> Settings:
    """Settings completed by what MPI knows: rank and size, and, unless a coordinator is given, from rank 0 a key and an
    address where it will host one. Collective among all ranks of the world."""
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
        return dataclasses.replace(settings, rank=rank, size=size)
    deadline = Deadline(settings.start_s)

    def check() -> None:
        _check_start(deadline, rank, size)

    places = bytearray(ROW_BYTES * size)
    _wait([world.Iallgather(_row(settings.host or host_identity(), candidates()[0]), places)], check)
    hosts = [_unrow(places[start : start + ROW_BYTES]) for start in range(0, len(places), ROW_BYTES)]
    chosen = bytearray(ROW_BYTES)
    if rank == 0:
        address = _own_address(hosts)
        chosen[:] = _row(format_address(address, free_port(address)), settings.key or new_key())
    _wait([world.Ibcast(chosen, 0)], check)
    coordinator, key = _unrow(chosen)
    return dataclasses.replace(settings, rank=rank, size=size, coordinator=coordinator, key=key)


def _own_address(hosts: Sequence[Sequence[str]]) -> str:
    """Where the others reach me, the first one: all are here, or by the way to the first one that is not."""
    mine, _ = hosts[0]
    elsewhere = [address for host, address in hosts if host != mine]
    return facing(elsewhere[0]) if elsewhere else "127.0.0.1"


def _row(*texts: str) -> bytes:
    data = "\n".join(texts).encode()
    if len(data) > ROW_BYTES:
        raise StartFailed(f"{texts[0]!r} is too long a name for a host: {len(data)} bytes of {ROW_BYTES}")
    return data.ljust(ROW_BYTES, b"\0")


def _unrow(data: bytes | bytearray) -> list[str]:
    return data.rstrip(b"\0").decode().split("\n")


def _check_start(deadline: Deadline, rank: int, size: int) -> None:
    if deadline.passed:
        raise StartFailed(
            f"rank {rank} waited {deadline.seconds:g} s for all {size} ranks of mpiexec; does every one of them call "
            "ronde.init()?"
        )


def _wait(requests: Sequence[Request], check: Callable[[], None]) -> None:
    try:
        complete(requests, check)
    except BaseException:
        abandon(requests, None)
        raise
