"""The environment of a rank, and the order with which an agent starts it. Pure; used by the driver.

A rank gets ronde's own variables, and those that other systems read, so that their scripts start unchanged:

    ronde              RONDE_*
    torch.distributed  RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK
                       MASTER_ADDR MASTER_PORT
    JAX                JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID (JAX reads the first by itself)
    TensorFlow         TF_CONFIG, when asked for
    Horovod            HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK
                       HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME (scripts read them before hvd.init())
    OpenMP, MKL        OMP_NUM_THREADS, unless the user has set it
    Python             PYTHONUNBUFFERED, PYTHONFAULTHANDLER, unless the user has set them
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ronde.launch.job import Job
from ronde.launch.placement import Placement, bind_cpus
from ronde.launch.protocol import RankOrder, StartRanks
from ronde.net.addresses import format_address
from ronde.settings import ASSIGNED_BY_LAUNCHER, PREFIX, Settings, describe_settings

if TYPE_CHECKING:  # network imports ZeroMQ, which an agent does without
    from ronde.launch.network import HostFacts, JobNetwork

LOGIN_VARIABLES = ("HOME", "LOGNAME", "MAIL", "SHELL", "TMPDIR", "USER")
"""Every host, and every user, has their own."""

HOST_SPECIFIC_PREFIXES = (
    *("BASH_FUNC_", "DBUS_", "SSH_", "SYSTEMD_", "TMUX", "XDG_RUNTIME_", "XDG_SEAT", "XDG_SESSION_", "XDG_VTNR"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("DISPLAY", "HOSTNAME", "INVOCATION_ID", "JOURNAL_STREAM", "OLDPWD", "PWD", "SHLVL", "STY"),
    *("WAYLAND_DISPLAY", "WINDOWID", "XAUTHORITY"),
)
"""Beginnings of the names of variables that mean nothing, or something else, on another host."""

FOREIGN_PREFIXES = ("TORCHELASTIC_",)
"""Left by a torchrun that started the driver: torch would look for its store instead of ours."""

NUM_SHARED_PORTS = 2
"""Ports on the host of rank 0: torch's store and JAX's coordinator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEndpoints:
    """Addresses where the ranks of a job meet, the same for all of them."""

    coordinator: str
    """`address:port` of the driver's coordinator."""
    key: str = field(repr=False)
    torch_store: tuple[str, int]
    """Address and port for torch's store, on the host of rank 0."""
    jax_coordinator: str
    """`address:port` for JAX's coordinator, on the host of rank 0."""
    tf_workers: tuple[str, ...] = ()
    """`address:port` of every rank, for TF_CONFIG; empty without."""


def count_ports(job: Job) -> tuple[int, ...]:
    """Return how many free TCP ports the job needs on each host that it uses."""
    counts = [0] * len(job.used_hosts)
    counts[0] = NUM_SHARED_PORTS
    if job.tf_config:
        for placement in job.placements:
            counts[placement.host_index] += 1
    return tuple(counts)


def make_endpoints(job: Job, network: JobNetwork, *, coordinator: str, key: str) -> JobEndpoints:
    """Distribute the free ports that were found on each host; `coordinator` is the address of the driver's own."""
    addresses = network.addresses
    free_ports = [iter(facts.free_ports) for facts in network.host_facts]
    torch_port, jax_port = next(free_ports[0]), next(free_ports[0])
    return JobEndpoints(
        coordinator=coordinator,
        key=key,
        torch_store=(addresses[0], torch_port),
        jax_coordinator=format_address(addresses[0], jax_port),
        tf_workers=tuple(
            format_address(addresses[placement.host_index], next(free_ports[placement.host_index]))
            for placement in (job.placements if job.tf_config else ())
        ),
    )


def rank_environment(
    job: Job, placement: Placement, endpoints: JobEndpoints, host_facts: HostFacts, *, base: Mapping[str, str]
) -> dict[str, str]:
    """Make the whole environment of one rank.

    `base` is the driver's environment, or exportable_variables() of it for another host. Its RONDE_* settings do not
    count: they are in job.settings already.
    """
    given = {name: value for name, value in base.items() if not name.startswith(FOREIGN_PREFIXES)}
    for setting in describe_settings():
        given.pop(setting.env, None)
    given |= _setting_variables(job.settings)
    given |= job.env
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": str(omp_num_threads(host_facts.effective_cpu_count, placement.local_size)),
        **given,
        **_ronde_variables(job, placement, endpoints, host_facts.address),
        **_torch_variables(job, placement, endpoints),
        **_jax_variables(job, placement, endpoints),
        **_tensorflow_variables(job, placement, endpoints),
        **_horovod_variables(job, placement),
    }


def omp_num_threads(num_cpus: int, local_size: int) -> int:
    """Return how many threads a rank should compute with: its share of the CPUs that its host may use."""
    return max(1, num_cpus // local_size)


def exportable_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make sense on another host."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(HOST_SPECIFIC_PREFIXES) and name not in (*LOGIN_VARIABLES, "_")
    }


def login_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that only an agent's own environment has. The variables of its ranks override them."""
    return {name: environ[name] for name in LOGIN_VARIABLES if name in environ}


def _setting_variables(settings: Settings) -> dict[str, str]:
    """Return the settings that differ from their defaults."""
    return {
        setting.env: str(getattr(settings, setting.name))
        for setting in describe_settings()
        if setting.name not in ASSIGNED_BY_LAUNCHER and getattr(settings, setting.name) != setting.default
    }


def _ronde_variables(job: Job, placement: Placement, endpoints: JobEndpoints, address: str) -> dict[str, str]:
    # The key is nowhere but in the environment, which is private to its user.
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
        "HOSTNAME": placement.host.name,
    }
    return {"HOROVOD_" + name: value for name, value in variables.items()}


def make_rank_orders(
    job: Job, network: JobNetwork, endpoints: JobEndpoints, *, environ: Mapping[str, str], tty_fds: Collection[int]
) -> dict[int, StartRanks]:
    """Make the message for the agent of each host, by host index. `environ` is the driver's environment; `tty_fds` are
    those of its standard streams that are terminals: if output and error are, rank 0 may draw progress bars."""
    orders: dict[int, list[RankOrder]] = {}
    exportable = exportable_variables(environ)
    for placement in job.placements:
        facts = network.host_facts[placement.host_index]
        has_terminal = placement.rank == job.debug_rank
        order = RankOrder(
            rank=placement.rank,
            argv=job.command,
            env=rank_environment(job, placement, endpoints, facts, base=environ if facts.is_local else exportable),
            cwd=job.cwd,
            cpus=bind_cpus(facts.cpus, placement.local_rank, placement.local_size) if job.bind == "core" else (),
            tty=has_terminal,
            stdin_pipe=has_terminal and 0 not in tty_fds,
            output_ptys={1, 2} <= set(tty_fds) and placement.rank == 0 and job.debug_rank is None,
        )
        orders.setdefault(placement.host_index, []).append(order)
    return {index: StartRanks(tuple(of_host), job.pickled_call) for index, of_host in orders.items()}
