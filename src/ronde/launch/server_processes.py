"""The server processes of a job (`ronde run --servers 2`): their numbers, names and hosts. Pure; used by the driver.

A server process is no rank: it runs ronde.ps.server_process in place of the user's script, and meets the workers at a
coordinator of its own. It is on a host that is kept for servers (`-H ps1:2+servers`), if there is one, and otherwise on
the hosts of the ranks, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ronde.launch.dmlc import helper_names
from ronde.launch.job import Job
from ronde.settings import FIRST_SERVER


class ServerNames(Mapping[int, str]):
    """The names of server processes by number, also of those that are started later."""

    def __getitem__(self, number: int) -> str:
        if number < FIRST_SERVER:
            raise KeyError(number)
        return f"server {number - FIRST_SERVER}"

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


def process_names(job: Job) -> Mapping[int, str]:
    """The names of the processes of a job that are no ranks, by number."""
    return ServerNames() if job.servers else helper_names(job)


def place_servers(job: Job) -> tuple[int, ...]:
    """By server of a job whose number of ranks is fixed, the index of its host."""
    names = [host.name for host in job.used_hosts]
    slots = [names.index(host.name) for host in job.hosts if host.for_servers for _ in range(host.slots)]
    num_hosts = 1 + max(placement.host_index for placement in job.placements)
    return tuple(slots[index] if slots else index % num_hosts for index in range(job.servers or 0))
