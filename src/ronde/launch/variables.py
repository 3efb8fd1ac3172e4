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
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ronde.launch.cores import num_threads
from ronde.launch.job import Job
from ronde.launch.placement import Seat, hosts_or_here
from ronde.net.addresses import format_address
from ronde.settings import OF_THE_JOB, PREFIX, Settings

__all__ = ["Meeting", "arrange", "own_words", "portable", "rank_variables", "wanted_ports"]

OF_A_PERSON_HERE = ("HOME", "LOGNAME", "MAIL", "SHELL", "TMPDIR", "USER")
"""Another host, or another user there, has its own."""

OF_ONE_HOST = (
    *("BASH_FUNC_", "DBUS_", "SSH_", "SYSTEMD_", "TMUX", "XDG_RUNTIME_", "XDG_SEAT", "XDG_SESSION_", "XDG_VTNR"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("DISPLAY", "HOSTNAME", "INVOCATION_ID", "JOURNAL_STREAM", "OLDPWD", "PWD", "SHLVL", "STY"),
    *("WAYLAND_DISPLAY", "WINDOWID", "XAUTHORITY"),
)
"""Beginnings of names that mean nothing, or something else, on another host."""

FOREIGN = ("TORCHELASTIC_",)
"""Left by a torchrun around us: torch would look for that one's store instead of ours."""

NUM_SHARED_PORTS = 2
"""On the host of rank 0: torch's store and JAX's coordinator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where the ranks of a job meet: the same for all of them."""

    coordinator: str
    """`address:port` of ronde's, hosted by the driver."""
    key: str = field(repr=False)
    master: tuple[str, int]
    """Address and port for torch's store, on the host of rank 0."""
    jax: str
    """`address:port` for JAX's coordinator, on the host of rank 0."""
    workers: tuple[str, ...] = ()
    """`address:port` of every rank, for TF_CONFIG; empty without."""


def wanted_ports(job: Job, seats: Sequence[Seat]) -> tuple[int, ...]:
    """How many free TCP ports are needed on each host that is used."""
    wanted = [0] * seats[0].num_hosts
    wanted[0] = NUM_SHARED_PORTS
    if job.tf_config:
        for seat in seats:
            wanted[seat.host_index] += 1
    return tuple(wanted)


def arrange(
    seats: Sequence[Seat], *, coordinator: str, key: str, addresses: Sequence[str], ports: Sequence[Sequence[int]]
) -> Meeting:
    """The meeting of these seats; for each host that is used, its address for the others and the ports found there."""
    free = [iter(of_host) for of_host in ports]
    master, jax = next(free[0]), next(free[0])
    chosen = [(addresses[seat.host_index], next(free[seat.host_index], None)) for seat in seats]
    return Meeting(
        coordinator=coordinator,
        key=key,
        master=(addresses[0], master),
        jax=format_address(addresses[0], jax),
        workers=tuple(format_address(address, port) for address, port in chosen if port is not None),
    )


def rank_variables(
    job: Job, seat: Seat, meeting: Meeting, *, base: Mapping[str, str], num_cores: int, address: str = ""
) -> dict[str, str]:
    """The whole environment of one rank.

    `base` is the driver's environment, or portable() of it for another host; `num_cores` the number of cores that the
    rank's host has for us; `address` where other hosts reach this one (empty on a single machine). What `base` says
    about ronde's settings does not count: job.settings, loaded with Settings.load(), has it already.
    """
    given = {name: value for name, value in base.items() if not name.startswith(FOREIGN)}
    for setting in dataclasses.fields(Settings):
        given.pop(PREFIX + setting.name.upper(), None)
    given |= _exported(job.settings)
    given |= job.env
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": str(num_threads(num_cores, seat.local_size)),
        **given,
        **_for_ronde(job, seat, meeting, address),
        **_for_torch(job, seat, meeting),
        **_for_jax(job, seat, meeting),
        **_for_tensorflow(job, seat, meeting),
        **_for_horovod(job, seat),
    }


def portable(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment makes sense on another host."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(OF_ONE_HOST) and name not in (*OF_A_PERSON_HERE, "_")
    }


def own_words(environ: Mapping[str, str]) -> dict[str, str]:
    """What an agent's own environment says that nobody else could: to be put below the variables of its ranks."""
    return {name: environ[name] for name in OF_A_PERSON_HERE if name in environ}


def _exported(settings: Settings) -> dict[str, str]:
    """The settings that differ from their defaults, as variables."""
    return {
        PREFIX + setting.name.upper(): str(getattr(settings, setting.name))
        for setting in dataclasses.fields(settings)
        if setting.name not in OF_THE_JOB and getattr(settings, setting.name) != setting.default
    }


def _for_ronde(job: Job, seat: Seat, meeting: Meeting, address: str) -> dict[str, str]:
    """The key travels only here: an environment is private to its user."""
    variables = {
        "RANK": str(seat.rank),
        "SIZE": str(job.num_ranks),
        "COORDINATOR": meeting.coordinator,
        "COORDINATOR_HOSTED": "1",
        "KEY": meeting.key,
    }
    if address:
        variables["ADDRESS"] = address
    return {PREFIX + name: value for name, value in variables.items()}


def _for_torch(job: Job, seat: Seat, meeting: Meeting) -> dict[str, str]:
    return {
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(job.num_ranks),
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(seat.local_size),
        "GROUP_RANK": str(seat.host_index),
        "GROUP_WORLD_SIZE": str(seat.num_hosts),
        "NODE_RANK": str(seat.host_index),
        "MASTER_ADDR": meeting.master[0],
        "MASTER_PORT": str(meeting.master[1]),
    }


def _for_jax(job: Job, seat: Seat, meeting: Meeting) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_ADDRESS": meeting.jax,
        "JAX_NUM_PROCESSES": str(job.num_ranks),
        "JAX_PROCESS_ID": str(seat.rank),
    }


def _for_tensorflow(job: Job, seat: Seat, meeting: Meeting) -> dict[str, str]:
    if not job.tf_config:
        return {}
    task = {"type": "worker", "index": seat.rank}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": list(meeting.workers)}, "task": task})}


def _for_horovod(job: Job, seat: Seat) -> dict[str, str]:
    variables = {
        "RANK": str(seat.rank),
        "SIZE": str(job.num_ranks),
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_SIZE": str(seat.local_size),
        "CROSS_RANK": str(seat.cross_rank),
        "CROSS_SIZE": str(seat.cross_size),
        "HOSTNAME": hosts_or_here(job.hosts, job.num_ranks)[seat.host_index].name,
    }
    return {"HOROVOD_" + name: value for name, value in variables.items()}
