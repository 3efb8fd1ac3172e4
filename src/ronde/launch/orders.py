"""What every agent is told to start: a rank's command, environment, cores and terminal. Pure. Used by the driver."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ronde.launch.cores import share_of_cores
from ronde.launch.crew import Site
from ronde.launch.job import Job
from ronde.launch.messages import Launch, RankOrder
from ronde.launch.placement import Seat
from ronde.launch.variables import Meeting, portable, rank_variables

__all__ = ["make_orders"]


def make_orders(
    job: Job,
    seats: Sequence[Seat],
    meeting: Meeting,
    sites: Sequence[Site],
    *,
    environ: Mapping[str, str],
    terminals: Collection[int],
) -> dict[int, Launch]:
    """One Launch per host. `environ` is the driver's, and what belongs to its machine alone goes no further;
    `terminals` says which of its standard streams are terminals: with output and errors, rank 0 may draw as on one."""
    orders: dict[int, list[RankOrder]] = {}
    bases = {True: environ, False: portable(environ)}
    for seat in seats:
        site = sites[seat.host_index]
        env = rank_variables(
            job, seat, meeting, base=bases[site.is_here], num_cores=len(site.cpus), address=site.address
        )
        order = RankOrder(
            rank=seat.rank,
            argv=job.command,
            env=env,
            cwd=job.cwd,
            cpus=share_of_cores(site.cpus, seat.local_rank, seat.local_size) if job.bind == "core" else (),
            terminal=seat.rank == job.debug_rank,
            piped=seat.rank == job.debug_rank and 0 not in terminals,
            progress={1, 2} <= set(terminals) and seat.rank == 0 and job.debug_rank is None,
        )
        orders.setdefault(seat.host_index, []).append(order)
    return {index: Launch(tuple(of_host), job.call) for index, of_host in orders.items()}
