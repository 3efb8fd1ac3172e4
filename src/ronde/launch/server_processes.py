"""The server processes of a job (`ronde run --servers 2`): their numbers, names and hosts. Pure; used by the driver.

A server process is no rank: it runs ronde.ps.server_process in place of the user's script, and meets the workers at a
coordinator of its own. It is on a host that is kept for servers (`-H ps1:2+servers`), if there is one, and otherwise on
the hosts of the ranks, one after the other.

With `--servers 2 --tf-config` they are servers of TensorFlow's ParameterServerStrategy: they run the user's script, as
the tasks `ps` of a TF_CONFIG in which rank 0 is the chief and the other ranks are workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ronde.launch.dmlc import HelperProcess, make_dmlc_processes
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
    return ServerNames() if job.num_servers else {each.number: each.name for each in make_helpers(job)}


def make_helpers(job: Job) -> tuple[HelperProcess, ...]:
    """The processes of a job that run its command and are no ranks: those of MXNet's kvstore, and TensorFlow's servers.
    They are numbered behind the ranks."""
    if not job.has_tf_servers:
        return make_dmlc_processes(job)
    return tuple(
        HelperProcess(job.num_ranks + index, f"server {index}", "ps", host_index)
        for index, host_index in enumerate(place_servers(job))
    )


def place_servers(job: Job) -> tuple[int, ...]:
    """By server of a job whose number of ranks is fixed, the index of its host."""
    names = [host.name for host in job.used_hosts]
    slots = [names.index(host.name) for host in job.hosts if host.for_servers for _ in range(host.slots)]
    num_hosts = 1 + max(placement.host_index for placement in job.placements)
    return tuple(slots[index] if slots else index % num_hosts for index in range(job.servers or 0))
