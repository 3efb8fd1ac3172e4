"""What a job is: its command, its hosts, its environment. Made by the command line, a YAML file or ronde.run; carried
out by the driver. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ronde.coordinator.round_planning import ElasticLimits
from ronde.errors import StartFailed
from ronde.launch.placement import Host, Placement, place_ranks
from ronde.settings import ASSIGNED_BY_LAUNCHER, PREFIX, Settings

ELASTIC_HEARTBEAT_S = 2.5
"""The default of heartbeat_s in an elastic job, where the others go on without a host that is lost."""

CpuBinding: TypeAlias = Literal["none", "core"]


def working_directory() -> str:
    """Return the working directory of this process. StartFailed when it was deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise StartFailed("the working directory does not exist any more; change to one that does") from None


def load_settings(
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any] | None = None,
    *,
    is_elastic: bool = False,
) -> Settings:
    """Load the settings of a job. If this process is a rank of an outer job, that one's variables do not count."""
    outer_job_variables = {PREFIX + name.upper() for name in ASSIGNED_BY_LAUNCHER}
    defaults = {"heartbeat_s": ELASTIC_HEARTBEAT_S} if is_elastic else {}
    environ = {name: environ[name] for name in environ if name not in outer_job_variables}
    return Settings.load(given, environ, {**defaults, **(file or {})})


def make_elastic_limits(
    settings: Settings, num_ranks: int, *, min_np: int | None, max_np: int | None, reset_limit: int | None = None
) -> ElasticLimits:
    """Return the limits of an elastic job that starts with `num_ranks`, which by default is also the least and the most
    that it has. ValueError if they cannot be."""
    return ElasticLimits(
        start_ranks=num_ranks,
        min_ranks=num_ranks if min_np is None else min_np,
        max_ranks=num_ranks if max_np is None else max_np,
        reset_limit=reset_limit,
        timeout_s=settings.elastic_timeout_s,
        suspend_s=settings.suspend_s,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SshOptions:
    """How other hosts are reached, for ronde.run(). What is left empty is left to ssh's own configuration."""

    port: int = 0
    identity: str = ""
    """File of the private key."""
    options: tuple[str, ...] = ()
    """Further `-o` options, such as `StrictHostKeyChecking=no`."""
    start_s: float = 20.0
    """How long a host may take to answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything about a run that its user decides. ValueError when the hosts have too few slots."""

    command: tuple[str, ...]
    num_ranks: int
    hosts: tuple[Host, ...] = ()
    """Empty: this machine, with as many slots as ranks."""
    ssh: SshOptions = field(default_factory=SshOptions)
    python: str = ""
    """Python that has ronde on the other hosts; empty: the path of this one."""
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of the environment of `ronde run`, for every rank."""
    cwd: str = field(default_factory=working_directory)
    """Working directory of every rank, on every host."""
    settings: Settings = field(default_factory=Settings)
    """What differs from the defaults reaches the ranks."""
    tf_config: bool | None = None
    """Whether every rank gets a TF_CONFIG, unless the user has set one. None: if it can help (environment.py)."""
    dmlc_servers: int | None = None
    """How many servers of MXNet's distributed kvstore are started, with a scheduler (dmlc.py); None: no
    scheduler either."""
    servers: int | None = None
    """How many server processes of parameter servers are started; 0: servers are in ranks. None: as 0. With tf_config
    they are servers of TensorFlow's ParameterServerStrategy (server_processes)."""
    bind: CpuBinding = "none"
    """Whether a rank is bound to cores of its own."""
    debug_rank: int | None = None
    """This rank gets the terminal, and no operation times out."""
    pickled_call: bytes = b""
    """The pickled function of ronde.run; the command is function.FUNCTION_RANK_COMMAND then."""
    has_messages: bool = False
    """Whether the program that runs the job and its ranks exchange messages (Driver.send, rank_messages.py)."""
    jobs_per_host: int = 1
    """How many such jobs run on each host at a time: so many times fewer threads has each rank."""
    name: str = ""
    """For `ronde top NAME`; empty: the driver's process id."""
    grace_s: float = 10.0
    """After the first rank has failed, how long the others get to exit by themselves."""
    terminate_s: float = 5.0
    """Between SIGTERM and SIGKILL."""
    limits: ElasticLimits | None = None
    """Of an elastic job; None when the number of ranks is fixed."""
    cooldown_s: tuple[float, float] = (1.0, 60.0)
    """In an elastic job, the shortest and the longest time for which a slot or host that has failed is left alone."""
    is_service: bool = False
    """In an elastic job: its processes form no rounds. Each that ends, for whatever reason, is started again, until the
    job is told to end."""
    restarts: int = 0
    """How often a job of a fixed number of ranks is started again after a failure."""
    placements: tuple[Placement, ...] = field(init=False, repr=False, compare=False)
    """Which rank runs where, by rank. Empty in an elastic job: its hosts come from a HostSource."""

    def __post_init__(self) -> None:
        self._check_servers()
        if self.limits is not None:
            if self.debug_rank is not None or self.tf_config or self.restarts:
                raise ValueError("debug, tf_config and restarts are for jobs whose number of ranks is fixed")
            if self.dmlc_servers is not None:
                raise ValueError("dmlc is for jobs whose number of ranks is fixed")
            object.__setattr__(self, "placements", ())
        else:
            object.__setattr__(self, "placements", place_ranks(self.hosts, self.num_ranks))

    @property
    def has_tf_servers(self) -> bool:
        """Whether the servers are those of TensorFlow, which run the command of the job."""
        return bool(self.servers and self.tf_config)

    @property
    def num_servers(self) -> int:
        """How many server processes of ronde.ps there are."""
        return 0 if self.has_tf_servers else self.servers or 0

    def _check_servers(self) -> None:
        kept = [host for host in self.hosts if host.for_servers]
        num_slots = sum(host.slots for host in kept)
        if kept and not self.servers:
            raise ValueError("hosts are kept for servers, and there are no server processes; give --servers, too")
        if kept and self.limits is not None:
            raise ValueError("hosts can be kept for servers only in jobs whose number of ranks is fixed")
        if kept and self.servers and self.servers > num_slots:
            raise ValueError(
                f"{self.servers} servers, but the hosts that are kept for them have {num_slots} slots; add slots, or "
                "start fewer servers"
            )
        if self.has_tf_servers and self.num_ranks < 2:
            raise ValueError(
                "servers with tf_config are for ParameterServerStrategy, which needs a chief (rank 0) and at least one "
                f"worker: start 2 ranks or more, got {self.num_ranks}"
            )
        if self.servers and self.dmlc_servers is not None:
            raise ValueError("servers and dmlc exclude each other: give one of them")

    @property
    def used_hosts(self) -> tuple[Host, ...]:
        """The hosts that get ranks, and then those that get only server processes, by host index."""
        ranked = tuple(placement.host for placement in self.placements if placement.local_rank == 0)
        names = {host.name for host in ranked}
        return (*ranked, *(host for host in self.hosts if host.for_servers and host.name not in names))
