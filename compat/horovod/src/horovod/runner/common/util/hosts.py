"""Hosts, slots, and the placement of ranks on them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ronde.launch.placement import Host, place_ranks, read_hostfile

_HOST = re.compile(r"(?P<name>[\w.-]+):(?P<slots>[0-9]+)")


@dataclass(frozen=True)
class HostInfo:
    """A host and how many processes it takes."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Parse `name:slots`."""
        found = _HOST.fullmatch(host_string.strip())
        if found is None:
            raise ValueError(f"a host is written name:slots, as in server1:4, got {host_string!r}")
        return HostInfo(found["name"], int(found["slots"]))


@dataclass
class SlotInfo:
    """Host and ranks of one process."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Return the text that Horovod's rendezvous server sends for this process."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, numbers))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Hosts of `server1:2,server2:4`."""
    return [HostInfo.from_string(host) for host in hosts_string.split(",")]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Names in order, and slots by name."""
    found = parse_hosts(hosts)
    return [host.hostname for host in found], {host.hostname: host.slots for host in found}


def parse_host_files(filename: str | Path) -> str:
    """A hostfile as `server1:2,server2:4`. Comments and blank lines are fine."""
    return ",".join(f"{host.name}:{host.slots}" for host in read_hostfile(filename))


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Place processes host by host: at least min_num_proc, and at most max_num_proc or all slots."""
    num_slots = sum(host.slots for host in hosts)
    if num_slots < min_num_proc:
        raise ValueError(f"{min_num_proc} processes were asked for, but there are only {num_slots} slots")
    size = num_slots if max_num_proc is None else min(num_slots, max_num_proc)
    placements = place_ranks([Host(host.hostname, host.slots) for host in hosts if host.slots], size)
    names = [host.hostname for host in hosts if host.slots]
    return [
        SlotInfo(
            hostname=names[placement.host_index],
            rank=placement.rank,
            local_rank=placement.local_rank,
            cross_rank=placement.cross_rank,
            size=size,
            local_size=placement.local_size,
            cross_size=placement.cross_size,
        )
        for placement in placements
    ]
