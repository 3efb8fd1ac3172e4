"""The environment of a rank, and the order with which an agent starts it. Pure; used by the driver.

A rank gets ronde's own variables, and those that other systems read, so that their scripts start unchanged:

    ronde              RONDE_*
    torch.distributed  RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE NODE_RANK
                       MASTER_ADDR MASTER_PORT
    JAX                JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID (JAX reads the first by itself)
    TensorFlow         TF_CONFIG, unless the user has set it; with chief and ps, if the job has servers of TensorFlow
    Horovod            HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK
                       HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME (scripts read them before hvd.init())
    MXNet              DMLC_ROLE DMLC_PS_ROOT_URI DMLC_PS_ROOT_PORT DMLC_NUM_WORKER DMLC_NUM_SERVER DMLC_NODE_HOST, if
                       the job has a scheduler and servers (dmlc)
    OpenMP, MKL        OMP_NUM_THREADS, unless the user has set it
    Python             PYTHONUNBUFFERED, PYTHONFAULTHANDLER, unless the user has set them
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ronde.launch.dmlc import make_dmlc_variables
from ronde.launch.job import Job
from ronde.launch.placement import Placement, bind_cpus
from ronde.launch.protocol import SERVER_COMMAND, PortCounts, RankOrder, StartRanks
from ronde.launch.server_processes import make_helpers
from ronde.net.addresses import format_address
from ronde.settings import ASSIGNED_BY_LAUNCHER, describe_settings

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
"""Ports on the host of rank 0: torch's store and JAX's coordinator. A scheduler of MXNet's kvstore takes one more."""

MAX_TF_CONFIG_RANKS = 1024
"""Every rank gets the addresses of all, and Linux takes at most 128 KB for a variable. With more ranks, only
`tf_config=True` gives them a TF_CONFIG."""

TF_CONFIG_LAUNCHER = "ronde"
"""The value of "launcher" in a TF_CONFIG of ours; TensorFlow ignores it."""


def count_ports(job: Job, environ: Mapping[str, str]) -> tuple[PortCounts, ...]:
    """Return how many TCP ports the job needs on each host that it uses: the shared ones on the first, and one reserved
    for each rank that gets a TF_CONFIG. `environ` is the driver's environment."""
    reserved = [0] * len(job.used_hosts)
    if makes_tf_config(job, environ):
        for host_index in _hosts_of_tf_tasks(job):
            reserved[host_index] += 1
    num_shared = NUM_SHARED_PORTS + (job.dmlc_servers is not None)
    return tuple(PortCounts(0 if index else num_shared, count) for index, count in enumerate(reserved))


def _hosts_of_tf_tasks(job: Job) -> list[int]:
    """By process that is in TF_CONFIG, the index of its host: the ranks, and then servers of TensorFlow."""
    ranks = [placement.host_index for placement in job.placements]
    return [*ranks, *(helper.host_index for helper in make_helpers(job) if job.has_tf_servers)]


def makes_tf_config(job: Job, environ: Mapping[str, str]) -> bool:
    """Return whether ranks get a TF_CONFIG made for them. One that the user has set is left as it is. A job of one rank
    gets none by default: TensorFlow's strategies do without it there, and MirroredStrategy in a v1 graph only so."""
    if "TF_CONFIG" in job.env or ("TF_CONFIG" in environ and not _is_own_tf_config(environ["TF_CONFIG"])):
        return False
    if job.tf_config is None:
        return job.limits is None and 1 < job.num_ranks <= MAX_TF_CONFIG_RANKS
    return job.tf_config


def _is_own_tf_config(text: str) -> bool:
    """Whether a driver has made it: then it is that of an outer job, of which this process is a rank."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("launcher") == TF_CONFIG_LAUNCHER


def make_rank_orders(
    job: Job,
    network: JobNetwork,
    *,
    coordinator: str,
    key: str,
    environ: Mapping[str, str],
    tty_fds: Collection[int],
    server_coordinator: str = "",
) -> dict[int, StartRanks]:
    """Make the message for the agent of each host, by host index. `coordinator` is the address of the driver's own;
    `environ` is the driver's environment; `tty_fds` are those of its standard streams that are terminals: if output and
    error are, rank 0 may draw progress bars. `server_coordinator` is the address of that of server processes."""
    addresses = network.addresses
    free_ports = {index: iter(facts.free_ports) for index, facts in network.host_facts.items()}
    size = str(job.num_ranks)
    job_variables = {
        **_coordinator_variables(coordinator, key),
        **_server_variables(job, server_coordinator),
        **_size_variables(job.num_ranks),
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": str(next(free_ports[0])),
        "JAX_COORDINATOR_ADDRESS": format_address(addresses[0], next(free_ports[0])),
        "JAX_NUM_PROCESSES": size,
    }
    dmlc_port = next(free_ports[0]) if job.dmlc_servers is not None else 0
    helpers = make_helpers(job)
    tf_addresses = [
        format_address(addresses[host_index], next(free_ports[host_index]))
        for host_index in (_hosts_of_tf_tasks(job) if makes_tf_config(job, environ) else ())
    ]
    given = {is_local: _given_variables(job, environ, is_local=is_local) for is_local in (True, False)}
    orders: dict[int, list[RankOrder]] = {}
    for placement in job.placements:
        facts = network.host_facts[placement.host_index]
        env = {**job_variables, "JAX_PROCESS_ID": str(placement.rank)}
        if tf_addresses:
            env["TF_CONFIG"] = _make_tf_config(job, tf_addresses, placement.rank)
        if dmlc_port:
            env.update(make_dmlc_variables(job, network, dmlc_port, "worker", placement.host_index))
        order = _make_order(job, placement, facts, given=given[facts.is_local], env=env, tty_fds=tty_fds)
        orders.setdefault(placement.host_index, []).append(order)
    for helper in helpers:
        facts = network.host_facts[helper.host_index]
        env = {**_common_variables(facts, local_size=1), **given[facts.is_local]}
        if dmlc_port:
            env.update(make_dmlc_variables(job, network, dmlc_port, helper.role, helper.host_index))
        if tf_addresses and job.has_tf_servers:
            env["TF_CONFIG"] = _make_tf_config(job, tf_addresses, helper.number)
        order = RankOrder(rank=helper.number, argv=job.command, env=env, cwd=job.cwd)
        orders.setdefault(helper.host_index, []).append(order)
    return {index: StartRanks(tuple(of_host), job.pickled_call, job.terminate_s) for index, of_host in orders.items()}


def _make_tf_config(job: Job, addresses: Sequence[str], number: int) -> str:
    """The TF_CONFIG of one process, from the addresses of all of them: the ranks, and then TensorFlow's servers."""
    cluster = {"worker": addresses[: job.num_ranks]}
    if job.has_tf_servers:
        workers = addresses[1 : job.num_ranks]
        cluster = {"chief": addresses[:1], "worker": workers, "ps": addresses[job.num_ranks :]}
    kinds = [(kind, index) for kind, tasks in cluster.items() for index in range(len(tasks))]
    task = dict(zip(("type", "index"), kinds[number], strict=True))
    return json.dumps({"cluster": cluster, "task": task, "launcher": TF_CONFIG_LAUNCHER})


def make_worker_order(
    job: Job,
    number: int,
    placement: Placement,
    size: int,
    facts: HostFacts,
    *,
    coordinator: str,
    key: str,
    environ: Mapping[str, str],
    tty_fds: Collection[int],
    server_coordinator: str = "",
) -> RankOrder:
    """Make the order for a worker of an elastic job, whose rank in it is the worker's number. `placement` and `size`
    are what the worker would get if a round began now. There are no variables for systems whose processes meet at an
    address of rank 0: here any rank may be lost."""
    env = {
        **_coordinator_variables(coordinator, key),
        **_server_variables(job, server_coordinator),
        **_size_variables(size),
        "RONDE_ELASTIC": "1",
        "RONDE_WORKER": str(number),
        "RONDE_SLOT": str(placement.local_rank),
    }
    given = _given_variables(job, environ, is_local=facts.is_local)
    order = _make_order(job, placement, facts, given=given, env=env, tty_fds=tty_fds)
    return msgspec.structs.replace(order, rank=number, output_ptys=order.output_ptys and number == 0)


def make_server_order(
    job: Job, number: int, facts: HostFacts, *, coordinator: str, key: str, environ: Mapping[str, str]
) -> RankOrder:
    """Make the order for a server process; `coordinator` is that of server processes."""
    env = {
        **_common_variables(facts, local_size=1),
        **_given_variables(job, environ, is_local=facts.is_local),
        **_coordinator_variables(coordinator, key),
        **_server_variables(job, coordinator),
        "RONDE_WORKER": str(number),
    }
    if facts.address:
        env["RONDE_ADDRESS"] = facts.address
    return RankOrder(rank=number, argv=SERVER_COMMAND, env=env, cwd=job.cwd)


def _make_order(
    job: Job,
    placement: Placement,
    facts: HostFacts,
    *,
    given: Mapping[str, str],
    env: Mapping[str, str],
    tty_fds: Collection[int],
) -> RankOrder:
    """`given` is what the user has set; `env` is stronger."""
    env = {
        **_common_variables(facts, placement.local_size * job.jobs_per_host),
        **given,
        **env,
        **_placement_variables(placement),
    }
    if facts.address:
        env["RONDE_ADDRESS"] = facts.address
    has_terminal = placement.rank == job.debug_rank
    return RankOrder(
        rank=placement.rank,
        argv=job.command,
        env=env,
        cwd=job.cwd,
        cpus=bind_cpus(facts.cpus, placement.local_rank, placement.local_size) if job.bind == "core" else (),
        tty=has_terminal,
        stdin_pipe=has_terminal and 0 not in tty_fds,
        output_ptys={1, 2} <= set(tty_fds) and placement.rank == 0 and job.debug_rank is None,
        message_pipes=job.has_messages,
    )


def _common_variables(facts: HostFacts, local_size: int) -> dict[str, str]:
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": str(max(1, facts.effective_cpu_count // local_size)),
    }


def _coordinator_variables(coordinator: str, key: str) -> dict[str, str]:
    return {
        "RONDE_COORDINATOR": coordinator,
        "RONDE_COORDINATOR_HOSTED": "1",
        "RONDE_KEY": key,  # nowhere but in the environment, which is private to its user
    }


def _server_variables(job: Job, coordinator: str) -> dict[str, str]:
    """Where workers and server processes meet, if the job has a coordinator for them."""
    return {"RONDE_SERVERS": str(job.num_servers), "RONDE_SERVER_COORDINATOR": coordinator} if coordinator else {}


def _size_variables(size: int) -> dict[str, str]:
    return dict.fromkeys(("RONDE_SIZE", "WORLD_SIZE", "HOROVOD_SIZE"), str(size))


def _given_variables(job: Job, environ: Mapping[str, str], *, is_local: bool) -> dict[str, str]:
    """Return what the user has set, without what makes no sense on another host. RONDE_* settings in the environment
    do not count: they are in job.settings already. Nor does the TF_CONFIG of an outer job."""
    excluded = FOREIGN_PREFIXES if is_local else (*FOREIGN_PREFIXES, *HOST_SPECIFIC_PREFIXES)
    excluded_names = {setting.env for setting in describe_settings()}
    if not is_local:
        excluded_names |= {*LOGIN_VARIABLES, "_"}
    if _is_own_tf_config(environ.get("TF_CONFIG", "")):
        excluded_names.add("TF_CONFIG")
    variables = {
        name: value for name, value in environ.items() if not name.startswith(excluded) and name not in excluded_names
    }
    for setting in describe_settings():
        value = getattr(job.settings, setting.name)
        if setting.name not in ASSIGNED_BY_LAUNCHER and value != setting.default:
            variables[setting.env] = str(value)
    return {**variables, **job.env}


def _placement_variables(placement: Placement) -> dict[str, str]:
    numbers = {
        "RONDE_RANK": placement.rank,
        "RANK": placement.rank,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_WORLD_SIZE": placement.local_size,
        "GROUP_RANK": placement.host_index,
        "GROUP_WORLD_SIZE": placement.num_hosts,
        "NODE_RANK": placement.host_index,
        "HOROVOD_RANK": placement.rank,
        "HOROVOD_LOCAL_RANK": placement.local_rank,
        "HOROVOD_LOCAL_SIZE": placement.local_size,
        "HOROVOD_CROSS_RANK": placement.cross_rank,
        "HOROVOD_CROSS_SIZE": placement.cross_size,
    }
    return {**{name: str(number) for name, number in numbers.items()}, "HOROVOD_HOSTNAME": placement.host.name}


def login_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that only an agent's own environment has. The variables of its ranks override them."""
    return {name: environ[name] for name in LOGIN_VARIABLES if name in environ}


def assigned_threads() -> int:
    """Return with how many threads this rank should compute: as many as its launcher, or the user, has set for OpenMP;
    without a launcher, one for each core that it may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isascii() and given.isdigit() and int(given) else len(os.sched_getaffinity(0))


class KeptVariables:
    """The environment variables of this process as they are when this object is made. Used by ranks that run one piece
    of work after another."""

    def __init__(self) -> None:
        self._variables = dict(os.environ)

    def restore(self) -> None:
        """Set and remove what has been changed since."""
        if os.environ != self._variables:
            for name in os.environ.keys() - self._variables.keys():
                del os.environ[name]
            os.environ.update(self._variables)
