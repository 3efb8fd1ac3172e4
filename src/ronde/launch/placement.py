"""Which rank sits where. Pure; used by the driver before it starts anything, and by launch/config to check a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ronde.launch.hosts import format_hosts
from ronde.launch.job import Host

__all__ = ["Seat", "hosts_or_here", "place"]


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one rank."""

    rank: int
    host_index: int
    """Which of the hosts, from 0. Hosts that are used come first."""
    local_rank: int
    """Its number among the ranks of its host."""
    local_size: int
    cross_rank: int
    """Its number among the ranks that have the same local rank on their hosts."""
    cross_size: int
    num_hosts: int
    """How many hosts are used."""


def hosts_or_here(hosts: Sequence[Host], num_ranks: int) -> tuple[Host, ...]:
    """The hosts of a job that may name none: then it is this machine, with as many slots as needed."""
    return tuple(hosts) or (Host("localhost", num_ranks),)


def place(hosts: Sequence[Host], num_ranks: int) -> tuple[Seat, ...]:
    """A seat for every rank: hosts are filled in their order. No hosts: this machine. ValueError says by how much the
    slots are short."""
    if num_ranks < 1:
        raise ValueError(f"a job needs at least 1 rank, got {num_ranks}")
    hosts = hosts_or_here(hosts, num_ranks)
    num_slots = sum(host.slots for host in hosts)
    if num_ranks > num_slots:
        short = num_ranks - num_slots
        raise ValueError(
            f"{num_ranks} ranks, but only {num_slots} slot{'s' * (num_slots != 1)} ({format_hosts(hosts)}): "
            f"{short} slot{'s' * (short != 1)} short; add hosts or slots, or start fewer ranks"
        )
    local_sizes = _fill(hosts, num_ranks)
    seats: list[Seat] = []
    for host_index, local_size in enumerate(local_sizes):
        for local_rank in range(local_size):
            mates = [index for index, size in enumerate(local_sizes) if size > local_rank]
            seats.append(
                Seat(
                    rank=len(seats),
                    host_index=host_index,
                    local_rank=local_rank,
                    local_size=local_size,
                    cross_rank=mates.index(host_index),
                    cross_size=len(mates),
                    num_hosts=len(local_sizes),
                )
            )
    return tuple(seats)


def _fill(hosts: Sequence[Host], num_ranks: int) -> list[int]:
    """How many ranks each host gets; only hosts that get some."""
    sizes = []
    left = num_ranks
    for host in hosts:
        if left:
            sizes.append(min(host.slots, left))
            left -= sizes[-1]
    return sizes
