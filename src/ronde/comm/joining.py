"""Where rank 0 hosts the coordinator and how the others find it: at one address, or at the first free port of a range.
Used by place.

A range is for those who can agree on a host and a few ports but not keep a port free (ranks that another launcher
started). Rank 0 takes the first port it gets; the others knock at all of them until one proves the job's key.

How a rank finds its round: from settings to the other members and the ways to them. Used by the world at its start.

Everything that was opened is in the Place and closed with it; a start that fails leaves nothing behind.

A rank that something else started (mpirun, torchrun, srun, plain python): what the settings leave open and its
surroundings tell. Used by the world's start.

Rank 0 of such a job hosts the coordinator. The key is derived from the user's own secret and the id of the launcher's
job, so ranks on one host, or with a home directory in common, agree on it without being told.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ronde.comm.backends.base import Backend
from ronde.comm.backends.mpi.backend import MpiBackend, settings_from_mpi
from ronde.comm.backends.native import NativeBackend
from ronde.comm.backends.single_rank import SingleRankBackend
from ronde.comm.control_thread import ControlConnection
from ronde.comm.launchers import LauncherEnvironment, coordinator_port_range, detect_launcher, find_launcher_process
from ronde.coordinator.inprocess import InProcessCoordinator
from ronde.coordinator.server import CoordinatorServer
from ronde.errors import ProtocolError, StartFailed
from ronde.net.addresses import (
    candidate_addresses,
    format_address,
    host_identity,
    local_address_for,
    parse_address,
    peer_host,
    resolve_host,
)
from ronde.net.connect import Connection, connect_authenticated, is_closed
from ronde.net.control import ControlClient
from ronde.net.event_loop import EventLoop
from ronde.net.keys import JobKey, derive_job_key, load_user_secret
from ronde.net.listener import ConnectionRequest, Listener
from ronde.net.messages import (
    LIVENESS,
    VERSION,
    Admission,
    AdmissionStatus,
    CoordinatorMessage,
    JoinRefused,
    JoinRound,
    LeaveReason,
    LeaveRound,
    RoundStarted,
    decode_admission,
)
from ronde.observe.stacks import pid_namespace
from ronde.settings import Settings, config_dir
from ronde.types import Deadline, Member, Topology

__all__ = [
    "Groups",
    "JoinedRound",
    "RETRY_INTERVAL_S",
    "complete_settings",
    "connect_to_coordinator",
    "expand_port_range",
    "find_coordinator",
    "host_coordinator",
    "join_round",
    "make_liveness_request",
    "settings_from_launcher",
]

RETRY_INTERVAL_S = 0.02

MAX_PORTS = 1000
FIRST_CONNECT_TIMEOUT_S = 0.2
MAX_CONNECT_TIMEOUT_S = 2.0
"""How long whoever listens at a port of the range may take to answer: longer at every turn, for ours may be busy."""
RETRY_PAUSE_S = 0.02
"""After all ports were tried."""
NOBODY_LISTENS = "nobody listens there"


def expand_port_range(address_range: str) -> list[str]:
    """`host:port` for every port of `host:port` or `host:first-last`."""
    before, dash, last = address_range.rpartition("-")
    if not dash or ":" not in before or "]" in last or ":" in last:
        parse_address(address_range)
        return [address_range]
    host, first_port = parse_address(before)
    last_port = parse_address(format_address(host, 1)[:-1] + last)[1]
    if not 0 <= last_port - first_port < MAX_PORTS:
        raise ValueError(f"address {address_range!r}: the range must go up, and by less than {MAX_PORTS} ports")
    return [format_address(host, port) for port in range(first_port, last_port + 1)]


def host_coordinator(settings: Settings, key: JobKey) -> CoordinatorServer:
    """A running coordinator at the setting's address, or the first port of its range that is free."""
    problem: StartFailed | None = None
    for address in expand_port_range(settings.coordinator):
        host, port = parse_address(address)
        try:
            coordinator = CoordinatorServer(host, port, settings.size, key, settings=settings)
        except StartFailed as error:
            problem = error
            continue
        coordinator.start()
        return coordinator
    assert problem is not None
    raise problem


def find_coordinator(
    address_range: str, settings: Settings, key: JobKey, *, round: int, deadline: Deadline
) -> tuple[Connection, str]:
    """The lifeline to the coordinator, and `host:port` of its control server."""
    addresses = expand_port_range(address_range)
    if len(addresses) == 1:
        return connect_to_coordinator(
            addresses[0], key, settings.rank, round=round, deadline=deadline, heartbeat_s=settings.heartbeat_s
        )
    resolve_host(*parse_address(addresses[0]))  # an unknown name will not get known by knocking
    caller = make_liveness_request(settings.rank, round)
    problems: dict[str, str] = {}
    knock_s = FIRST_CONNECT_TIMEOUT_S
    while not deadline.expired:
        for address in addresses:
            found = _connect_once(
                address, key, caller, Deadline(min(knock_s, deadline.remaining_s)), settings.heartbeat_s
            )
            if not isinstance(found, str):
                return found
            if found != NOBODY_LISTENS:  # whoever was there tells more than that it has gone since
                problems[address] = found
        knock_s = min(2 * knock_s, MAX_CONNECT_TIMEOUT_S)
        time.sleep(min(RETRY_PAUSE_S, deadline.remaining_s))
    told = set(problems.values()) or {NOBODY_LISTENS}
    raise StartFailed(
        f"rank {settings.rank} did not find the coordinator of rank 0 at {address_range} within {deadline.timeout_s:g} s "
        f"({'; '.join(sorted(told))}); is rank 0 running there, and do all ranks have the same RONDE_KEY, or a home "
        "directory in common?"
    )


class _NobodyListens(Exception):
    """Do not knock here again for now."""


def _connect_once(
    address: str, key: JobKey, request: ConnectionRequest, deadline: Deadline, heartbeat_s: float
) -> tuple[Connection, str] | str:
    """As call_coordinator, or in words why it is not to be had here now."""

    def leave() -> None:
        raise _NobodyListens

    try:
        line, greeting = connect_authenticated(
            address, key, request, deadline, heartbeat_s=heartbeat_s, before_retry=leave
        )
    except _NobodyListens:
        return NOBODY_LISTENS
    except StartFailed as error:  # a stranger's port, or another job's
        return str(error)
    admission = _read_admission(line, greeting)
    if admission.status is AdmissionStatus.RETRY:
        return admission.reason
    return line, format_address(peer_host(line), admission.control_port)


def _read_admission(connection: Connection, reply: bytes) -> Admission:
    """Return the coordinator's admission; closes the connection unless it is ADMITTED, and raises if it is REFUSED."""
    try:
        admission = decode_admission(reply)
        if admission.status is AdmissionStatus.REFUSED:
            raise StartFailed(admission.reason)
        if admission.status is AdmissionStatus.RETRY:
            connection.close()
    except ProtocolError:
        connection.close()
        raise StartFailed("what answers at the coordinator's address is no coordinator of this version") from None
    except BaseException:
        connection.close()
        raise
    return admission


Groups = tuple[tuple[int, ...], ...]

JOIN_RETRY_S = 0.5


@dataclass
class JoinedRound:
    """Where this rank stands in its round."""

    settings: Settings
    topology: Topology
    control: ControlConnection
    backend: Backend
    liveness_fd: int = -1
    """Descriptor whose end means that the coordinator is gone; the control client watches it."""
    coordinator_rank: int = -1
    """The rank that hosts the coordinator; -1 when a launcher does."""
    loop: EventLoop = field(default_factory=EventLoop)
    """For the control thread, which closes it. The listener's handshakes run in it."""
    resources: ExitStack = field(default_factory=ExitStack)
    """Closes all of this."""


def join_round(settings: Settings, groups: Groups, round: int) -> JoinedRound:
    """Join the round that the complete settings tell of. `round` counts the rounds of this process, from 0."""
    if settings.size == 1 and not settings.coordinator_hosted:  # a launcher wants to see even a job of one
        return join_single(settings, groups)
    loop = EventLoop()
    with ExitStack() as opened:
        opened.callback(loop.close)
        joined = _join_with_others(settings, groups, round, loop, opened)
        joined.resources = opened.pop_all()
        return joined


def join_single(settings: Settings, groups: Groups) -> JoinedRound:
    """A job of one: no sockets, nobody to wait for."""
    member = Member(0, settings.host or host_identity(), os.getpid(), "")
    control = InProcessCoordinator((member,), groups, settings).client(0)
    return JoinedRound(settings, Topology((member,), 0), control, SingleRankBackend())


def _join_with_others(
    settings: Settings, groups: Groups, round: int, loop: EventLoop, resources: ExitStack
) -> JoinedRound:
    _check_settings(settings)
    deadline = Deadline(settings.start_s)
    key = JobKey(settings.key)
    hosts_it = settings.rank == 0 and not settings.coordinator_hosted
    meeting = settings.coordinator
    if hosts_it:
        coordinator = host_coordinator(settings, key)
        resources.callback(coordinator.close)
        meeting = coordinator.address
    line, control_address = find_coordinator(meeting, settings, key, round=round, deadline=deadline)
    resources.callback(line.close)
    control = ControlClient(control_address, key, settings.rank)
    resources.callback(_close_control, control, line)
    here = settings.address or local_address_for(parse_address(control_address)[0])
    door = Listener(key, unix=True, tcp_host=here, loop=loop, heartbeat_s=settings.heartbeat_s)
    resources.callback(door.close)
    tcp_doors = (format_address(here, door.tcp_port),)
    member = Member(settings.rank, settings.host or host_identity(), os.getpid(), door.unix_name, tcp_doors)
    join = JoinRound(VERSION, round, settings.size, member, groups, pid_namespace())
    members = _request_join(loop, control, line.fileno(), join, deadline)
    topology = Topology(members, settings.rank)
    backend = _make_backend(settings, topology, door, key)
    resources.callback(backend.close)
    coordinator_rank = -1 if settings.coordinator_hosted else 0
    return JoinedRound(settings, topology, control, backend, line.fileno(), coordinator_rank, loop)


def _check_settings(settings: Settings) -> None:
    for name in ("coordinator", "key"):
        if not getattr(settings, name):
            raise ValueError(
                f"a job of {settings.size} ranks needs {name} (RONDE_{name.upper()}); "
                "start the ranks with `ronde run`, or give it to every one of them"
            )


def _close_control(control: ControlClient, connection: Connection) -> None:
    """Send what was said last; but when the coordinator is gone, do not wait for it to listen."""
    if is_closed(connection):
        control.close(0.0)
    else:
        control.close()


def _request_join(
    loop: EventLoop, control: ControlClient, liveness_fd: int, join: JoinRound, deadline: Deadline
) -> tuple[Member, ...]:
    """Ask to be a member until the round starts, and return its members. Messages that follow stay in the queue."""
    answers: list[RoundStarted | JoinRefused] = []
    closed: list[bool] = []

    def on_message(message: CoordinatorMessage) -> None:
        if isinstance(message, RoundStarted | JoinRefused):
            answers.append(message)
            control.stop_receiving()

    def on_closed() -> None:
        loop.remove_reader(liveness_fd)
        closed.append(True)

    control.start_receiving(loop, on_message)
    loop.add_reader(liveness_fd, on_closed)
    try:
        while not answers:
            if closed:
                raise StartFailed("the coordinator hung up before the round began; look at its output")
            if deadline.expired:
                late = "it waited too long for the round to begin"
                control.send(LeaveRound(LeaveReason.FAILED, late))
                raise StartFailed(
                    f"rank {join.member.rank} heard nothing from the coordinator within {deadline.timeout_s:g} s; "
                    "look at its output, or give more time with start_s (RONDE_START_S)"
                )
            control.send(join)  # again and again: that is harmless, and a lost message is not
            _run_loop(loop, lambda: bool(answers or closed), min(JOIN_RETRY_S, deadline.remaining_s))
            if closed:  # the reason may still be on its way
                _run_loop(loop, lambda: bool(answers), min(JOIN_RETRY_S, deadline.remaining_s))
    finally:
        control.stop_receiving()
        loop.remove_reader(liveness_fd)
    if isinstance(answers[0], JoinRefused):
        raise StartFailed(answers[0].reason)
    return answers[0].members


def _run_loop(loop: EventLoop, condition: Callable[[], bool], timeout_s: float) -> None:
    """Run the loop until the condition is true or the time is over."""
    timer = loop.call_later(timeout_s, lambda: None)
    loop.run_until(lambda: condition() or not timer.pending)
    timer.cancel()


def _make_backend(settings: Settings, topology: Topology, listener: Listener, key: JobKey) -> Backend:
    if settings.backend == "mpi":
        return MpiBackend(topology, settings)
    return NativeBackend(topology, listener, key, settings)


def complete_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from arguments and RONDE_* variables; the place that both leave open, from whoever started us."""
    settings = Settings.load(given)
    if settings.backend == "mpi":
        return settings_from_mpi(settings)
    if Settings.given_names(given) & {"rank", "size"}:  # half from here and half from there would fit by luck only
        return settings
    around = detect_launcher()
    return settings if around is None or around.size == 1 else settings_from_launcher(settings, around)


def settings_from_launcher(
    settings: Settings, launcher: LauncherEnvironment, *, from_mpi: Callable[[Settings], Settings] = settings_from_mpi
) -> Settings:
    """The place that the surroundings tell of. A coordinator or key in the settings stays."""
    settings = settings.replace(rank=launcher.rank, size=launcher.size)
    if not settings.coordinator and not launcher.host:
        return _settings_from_mpi(settings, launcher, from_mpi)
    job = launcher.job
    if not job:
        # On several hosts the launcher is another process on each; but then the user has told where to meet.
        job = f"{launcher.launcher} {find_launcher_process(launcher.rank_variable) if launcher.is_one_host else settings.coordinator}"
    key = settings.key or derive_job_key(load_user_secret(config_dir()), job)
    coordinator = settings.coordinator
    if not coordinator:
        host = launcher.host if launcher.is_one_host else _reachable_host(launcher.host)
        coordinator = coordinator_port_range(host, launcher.port, job)
    return settings.replace(coordinator=coordinator, key=key)


def _settings_from_mpi(
    settings: Settings, launcher: LauncherEnvironment, from_mpi: Callable[[Settings], Settings]
) -> Settings:
    try:
        return from_mpi(settings)
    except StartFailed as error:
        raise StartFailed(
            f"{launcher.launcher} started {launcher.size} ranks on several hosts, and rank {launcher.rank} cannot find rank "
            f"0 ({error}). Without mpi4py, give all ranks RONDE_COORDINATOR=<host of rank 0>:<port>, and RONDE_KEY "
            "unless they have a home directory in common"
        ) from None


def _reachable_host(host: str) -> str:
    """The host of rank 0. On that machine itself its name often stands for the loopback (in /etc/hosts), where nobody
    else can come: then an address that others can reach."""
    found, _ = resolve_host(host, 0)[0]
    return candidate_addresses()[0] if ipaddress.ip_address(found.partition("%")[0]).is_loopback else host


def make_liveness_request(rank: int, round: int) -> ConnectionRequest:
    """How a rank introduces itself. The note is unique to this attempt to join: a retry with the same note comes from
    the same process, whose former connection then no longer counts."""
    return ConnectionRequest(LIVENESS, rank, detail=f"{round} {secrets.token_hex(8)}")


def connect_to_coordinator(
    address: str, key: JobKey, rank: int, *, round: int, deadline: Deadline, heartbeat_s: float
) -> tuple[Connection, str]:
    """The lifeline to the coordinator, and `host:port` of its control server."""
    caller = make_liveness_request(rank, round)
    while True:
        line, greeting = connect_authenticated(address, key, caller, deadline, heartbeat_s=heartbeat_s)
        admission = _read_admission(line, greeting)
        if admission.status is AdmissionStatus.ADMITTED:
            return line, format_address(peer_host(line), admission.control_port)
        if deadline.expired:
            raise StartFailed(f"rank {rank} was not let in within {deadline.timeout_s:g} s: {admission.reason}")
        time.sleep(min(RETRY_INTERVAL_S, deadline.remaining_s))
