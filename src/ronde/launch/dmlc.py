"""The processes of MXNet's own distributed kvstore, for scripts that use `mx.kv.create("dist_sync")`: a scheduler and
servers beside the ranks, which are the workers. Pure; used by the driver, with `ronde run --dmlc`.

All of them run the command of the job and differ in their DMLC_* variables. In a scheduler or server, `import mxnet`
does not return: it serves until all workers have ended, and exits.

They are numbered behind the ranks: the scheduler first, which is on the first host, and then the servers, which are
spread over the hosts as the ranks are. They are no members of the round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ronde.launch.job import Job

if TYPE_CHECKING:
    from ronde.launch.network import JobNetwork


class HelperProcess(NamedTuple):
    """A process of the job that is no rank."""

    number: int
    """By which agents and the driver know it: none of a rank."""
    name: str
    """As the user sees it."""
    role: str
    host_index: int


def make_dmlc_processes(job: Job) -> tuple[HelperProcess, ...]:
    """Return the scheduler and the servers that a job has besides its ranks; nothing if it has none."""
    if job.dmlc_servers is None:
        return ()
    first = job.num_ranks
    servers = [
        HelperProcess(first + 1 + index, f"server {index}", "server", job.placements[index % job.num_ranks].host_index)
        for index in range(job.dmlc_servers)
    ]
    return (HelperProcess(first, "the scheduler", "scheduler", 0), *servers)


def make_dmlc_variables(job: Job, network: JobNetwork, port: int, role: str, host_index: int) -> Mapping[str, str]:
    """Return the variables of one process; `port` is that of the scheduler. Each says at which address it is itself,
    because a host may have several."""
    return {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": network.addresses[0],
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(job.num_ranks),
        "DMLC_NUM_SERVER": str(job.dmlc_servers),
        "DMLC_NODE_HOST": network.addresses[host_index],
    }
