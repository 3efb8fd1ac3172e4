"""The environment of a rank: ronde's own variables, and what other systems read, so that their scripts start unchanged.
Pure; used by the driver.

The driver asks wanted_ports() how many free ports it has to find on each host, makes one Meeting of them with
arrange(), and calls rank_variables() for every rank, with portable(os.environ) as the base on other hosts. An agent on
another host adds from its own environment what only that host knows: own_words().

    ronde              RONDE_*
    torch.distributed  RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK
                       MASTER_ADDR MASTER_PORT
    JAX                JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID (JAX reads the first by itself)
    TensorFlow         TF_CONFIG, when asked for
    Horovod            HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK
                       HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME (scripts read them before hvd.init())
    OpenMP, MKL        OMP_NUM_THREADS, unless the user has set it
    Python             PYTHONUNBUFFERED, PYTHONFAULTHANDLER, unless the user has set them

What every agent is told to start: a rank's command, environment, cores and terminal. Pure. Used by the driver.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ronde.launch.job import Job
from ronde.launch.placement import Placement, bind_cpus, hosts_or_localhost
from ronde.launch.protocol import RankOrder, StartRanks
from ronde.net.addresses import format_address
from ronde.settings import ASSIGNED_BY_LAUNCHER, PREFIX, Settings, describe_settings

if TYPE_CHECKING:  # network imports ZeroMQ, which an agent does without
    from ronde.launch.network import HostFacts

__all__ = [
    "JobEndpoints",
    "count_ports",
    "exportable_variables",
    "login_variables",
    "make_endpoints",
    "make_rank_orders",
    "omp_num_threads",
    "rank_environment",
]

LOGIN_VARIABLES = ("HOME", "LOGNAME", "MAIL", "SHELL", "TMPDIR", "USER")
"""Another host, or another user there, has its own."""

HOST_SPECIFIC_PREFIXES = (
    *("BASH_FUNC_", "DBUS_", "SSH_", "SYSTEMD_", "TMUX", "XDG_RUNTIME_", "XDG_SEAT", "XDG_SESSION_", "XDG_VTNR"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("DISPLAY", "HOSTNAME", "INVOCATION_ID", "JOURNAL_STREAM", "OLDPWD", "PWD", "SHLVL", "STY"),
    *("WAYLAND_DISPLAY", "WINDOWID", "XAUTHORITY"),
)
"""Beginnings of names that mean nothing, or something else, on another host."""

FOREIGN_PREFIXES = ("TORCHELASTIC_",)
"""Left by a torchrun around us: torch would look for that one's store instead of ours."""

NUM_SHARED_PORTS = 2
"""On the host of rank 0: torch's store and JAX's coordinator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEndpoints:
    """Where the ranks of a job meet: the same for all of them."""

    coordinator: str
    """`address:port` of ronde's, hosted by the driver."""
    key: str = field(repr=False)
    torch_store: tuple[str, int]
    """Address and port for torch's store, on the host of rank 0."""
    jax_coordinator: str
    """`address:port` for JAX's coordinator, on the host of rank 0."""
    tf_workers: tuple[str, ...] = ()
    """`address:port` of every rank, for TF_CONFIG; empty without."""


def count_ports(job: Job, placements: Sequence[Placement]) -> tuple[int, ...]:
    """How many free TCP ports are needed on each host that is used."""
    wanted = [0] * placements[0].num_hosts
    wanted[0] = NUM_SHARED_PORTS
    if job.tf_config:
        for seat in placements:
            wanted[seat.host_index] += 1
    return tuple(wanted)


def make_endpoints(
    placements: Sequence[Placement],
    *,
    coordinator: str,
    key: str,
    addresses: Sequence[str],
    ports: Sequence[Sequence[int]],
) -> JobEndpoints:
    """The meeting of these seats; for each host that is used, its address for the others and the ports found there."""
    free = [iter(of_host) for of_host in ports]
    master, jax = next(free[0]), next(free[0])
    chosen = [(addresses[seat.host_index], next(free[seat.host_index], None)) for seat in placements]
    return JobEndpoints(
        coordinator=coordinator,
        key=key,
        torch_store=(addresses[0], master),
        jax_coordinator=format_address(addresses[0], jax),
        tf_workers=tuple(format_address(address, port) for address, port in chosen if port is not None),
    )


def rank_environment(
    job: Job,
    placement: Placement,
    endpoints: JobEndpoints,
    *,
    base: Mapping[str, str],
    num_cores: int,
    address: str = "",
) -> dict[str, str]:
    """The whole environment of one rank.

    `base` is the driver's environment, or portable() of it for another host; `num_cores` the number of cores that the
    rank's host has for us; `address` where other hosts reach this one (empty on a single machine). What `base` says
    about ronde's settings does not count: job.settings, loaded with Settings.load(), has it already.
    """
    given = {name: value for name, value in base.items() if not name.startswith(FOREIGN_PREFIXES)}
    for setting in describe_settings():
        given.pop(setting.env, None)
    given |= _setting_variables(job.settings)
    given |= job.env
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": str(omp_num_threads(num_cores, placement.local_size)),
        **given,
        **_ronde_variables(job, placement, endpoints, address),
        **_torch_variables(job, placement, endpoints),
        **_jax_variables(job, placement, endpoints),
        **_tensorflow_variables(job, placement, endpoints),
        **_horovod_variables(job, placement),
    }


def exportable_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment makes sense on another host."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(HOST_SPECIFIC_PREFIXES) and name not in (*LOGIN_VARIABLES, "_")
    }


def login_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What an agent's own environment says that nobody else could: to be put below the variables of its ranks."""
    return {name: environ[name] for name in LOGIN_VARIABLES if name in environ}


def _setting_variables(settings: Settings) -> dict[str, str]:
    """The settings that differ from their defaults, as variables."""
    return {
        setting.env: str(getattr(settings, setting.name))
        for setting in describe_settings()
        if setting.name not in ASSIGNED_BY_LAUNCHER and getattr(settings, setting.name) != setting.default
    }


def _ronde_variables(job: Job, placement: Placement, endpoints: JobEndpoints, address: str) -> dict[str, str]:
    """The key travels only here: an environment is private to its user."""
    variables = {
        "RANK": str(placement.rank),
        "SIZE": str(job.num_ranks),
        "COORDINATOR": endpoints.coordinator,
        "COORDINATOR_HOSTED": "1",
        "KEY": endpoints.key,
    }
    if address:
        variables["ADDRESS"] = address
    return {PREFIX + name: value for name, value in variables.items()}


def _torch_variables(job: Job, placement: Placement, endpoints: JobEndpoints) -> dict[str, str]:
    return {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(job.num_ranks),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_WORLD_SIZE": str(placement.local_size),
        "GROUP_RANK": str(placement.host_index),
        "GROUP_WORLD_SIZE": str(placement.num_hosts),
        "NODE_RANK": str(placement.host_index),
        "MASTER_ADDR": endpoints.torch_store[0],
        "MASTER_PORT": str(endpoints.torch_store[1]),
    }


def _jax_variables(job: Job, placement: Placement, endpoints: JobEndpoints) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_ADDRESS": endpoints.jax_coordinator,
        "JAX_NUM_PROCESSES": str(job.num_ranks),
        "JAX_PROCESS_ID": str(placement.rank),
    }


def _tensorflow_variables(job: Job, placement: Placement, endpoints: JobEndpoints) -> dict[str, str]:
    if not job.tf_config:
        return {}
    task = {"type": "worker", "index": placement.rank}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": list(endpoints.tf_workers)}, "task": task})}


def _horovod_variables(job: Job, placement: Placement) -> dict[str, str]:
    variables = {
        "RANK": str(placement.rank),
        "SIZE": str(job.num_ranks),
        "LOCAL_RANK": str(placement.local_rank),
        "LOCAL_SIZE": str(placement.local_size),
        "CROSS_RANK": str(placement.cross_rank),
        "CROSS_SIZE": str(placement.cross_size),
        "HOSTNAME": hosts_or_localhost(job.hosts, job.num_ranks)[placement.host_index].name,
    }
    return {"HOROVOD_" + name: value for name, value in variables.items()}


def make_rank_orders(
    job: Job,
    placements: Sequence[Placement],
    endpoints: JobEndpoints,
    host_facts: Sequence[HostFacts],
    *,
    environ: Mapping[str, str],
    tty_fds: Collection[int],
) -> dict[int, StartRanks]:
    """One Launch per host. `environ` is the driver's, and what belongs to its machine alone goes no further;
    `terminals` says which of its standard streams are terminals: with output and errors, rank 0 may draw as on one."""
    orders: dict[int, list[RankOrder]] = {}
    bases = {True: environ, False: exportable_variables(environ)}
    for seat in placements:
        site = host_facts[seat.host_index]
        env = rank_environment(
            job, seat, endpoints, base=bases[site.is_local], num_cores=len(site.cpus), address=site.address
        )
        order = RankOrder(
            rank=seat.rank,
            argv=job.command,
            env=env,
            cwd=job.cwd,
            cpus=bind_cpus(site.cpus, seat.local_rank, seat.local_size) if job.bind == "core" else (),
            tty=seat.rank == job.debug_rank,
            stdin_pipe=seat.rank == job.debug_rank and 0 not in tty_fds,
            output_ptys={1, 2} <= set(tty_fds) and seat.rank == 0 and job.debug_rank is None,
        )
        orders.setdefault(seat.host_index, []).append(order)
    return {index: StartRanks(tuple(of_host), job.pickled_call) for index, of_host in orders.items()}


def omp_num_threads(num_cores: int, local_size: int) -> int:
    """How many threads a rank should compute with: its part of the host's cores."""
    return max(1, num_cores // local_size)
