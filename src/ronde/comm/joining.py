"""How a rank joins its round: from settings to the other members and the connections to them. Used by the world.

Settings that are not given come from the launcher that started the process (mpirun, torchrun, srun, …). Rank 0 of such
a job hosts the coordinator, at one address or at the first free port of a range; the others try all of its ports until
one proves the job's key. That key is derived from the user's secret and the id of the launcher's job, so ranks on one
host, or with a home directory in common, have the same. A start that fails leaves nothing open.

In an elastic job a process connects under its number as a worker, and learns its rank when the round starts. If it
comes when a round is under way, it is a candidate: it gets a round of its own until it is ready to be in the next one.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec

from ronde.comm.backends.base import Backend
from ronde.comm.backends.mpi.backend import MpiBackend, settings_from_mpi
from ronde.comm.backends.native import NativeBackend
from ronde.comm.backends.native_library import ABI, load_library
from ronde.comm.backends.single_rank import SingleRankBackend
from ronde.comm.control_thread import JoinedRound
from ronde.comm.launchers import LauncherEnvironment, coordinator_port_range, detect_launcher, find_launcher_process
from ronde.coordinator.inprocess import InProcessCoordinator
from ronde.coordinator.server import CoordinatorServer
from ronde.errors import JobFinished, LeftBehind, ProtocolError, StartFailed, StateLost
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
from ronde.net.control_connection import ControlClient
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
    RankHeartbeat,
    RankHeartbeatReply,
    RefusalKind,
    RoundStarted,
    WorkerMessage,
    decode_admission,
)
from ronde.net.open_files import check_open_files, explain_open_files, raise_open_files_limit
from ronde.observe.stacks import pid_namespace
from ronde.settings import Settings, config_dir, describe_settings
from ronde.text import escape_surrogates
from ronde.types import Deadline, Member, Topology
from ronde.version import __version__

Groups = tuple[tuple[int, ...], ...]

MAX_PORTS = 1000
RETRY_INTERVAL_S = 0.02
"""Pause before the coordinator is asked for admission again, or all ports of a range are tried again."""
FIRST_CONNECT_TIMEOUT_S = 0.2
MAX_CONNECT_TIMEOUT_S = 2.0
"""How long one port of a range may take to answer: twice as long each time, as the coordinator may be busy."""
MAX_PORT_WAIT_S = 10.0
"""How long rank 0 waits until the coordinator of the round before, which another process hosted, has left the port."""
JOIN_RETRY_S = 0.5
"""How often JoinRound is sent until the round starts."""
ANSWER_GRACE_S = 2.0
"""How much longer than start_s a rank waits for the coordinator, which knows the missing ranks and began later."""

logger = logging.getLogger("ronde.comm")


# --- settings that the launcher implies ------------------------------------------------------------------------------


def complete_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from arguments and RONDE_* variables; rank, size, coordinator and key also from another launcher."""
    settings = Settings.load(given)
    if settings.backend == "mpi":
        return settings_from_mpi(settings)
    if Settings.given_names(given) & {"rank", "size"}:  # a rank from here and a size from there would not fit
        return settings
    launcher = detect_launcher()
    return settings if launcher is None or launcher.size == 1 else settings_from_launcher(settings, launcher)


def settings_from_launcher(settings: Settings, launcher: LauncherEnvironment) -> Settings:
    """The settings with rank and size of the launcher, and with a coordinator and a key if they have none."""
    settings = settings.replace(rank=launcher.rank, size=launcher.size)
    if not settings.coordinator and not launcher.host:
        try:
            return settings_from_mpi(settings)
        except StartFailed as error:
            raise StartFailed(
                f"{launcher.launcher} started {launcher.size} ranks on several hosts, and rank {launcher.rank} cannot "
                f"find rank 0 ({error}). Without mpi4py, give all ranks RONDE_COORDINATOR=<host of rank 0>:<port>, and "
                "RONDE_KEY unless they have a home directory in common"
            ) from None
    job = launcher.job
    if not job:
        # On several hosts the launcher is another process on each; but then the coordinator is given.
        unique = find_launcher_process(launcher.rank_variable) if launcher.is_one_host else settings.coordinator
        job = f"{launcher.launcher} {unique}"
    key = settings.key or derive_job_key(load_user_secret(config_dir()), job)
    coordinator = settings.coordinator
    if not coordinator:
        host = launcher.host
        if not launcher.is_one_host:
            # On the machine of rank 0 its name often stands for the loopback (in /etc/hosts), which others cannot
            # reach: there it is another address of the machine.
            found, _ = resolve_host(host, 0)[0]
            if ipaddress.ip_address(found.partition("%")[0]).is_loopback:
                host = candidate_addresses()[0]
        coordinator = coordinator_port_range(host, launcher.port, job, launcher.other_ports)
    return settings.replace(coordinator=coordinator, key=key)


# --- joining ---------------------------------------------------------------------------------------------------------


@functools.cache
def worker_identity() -> str:
    """Return the identity of this process among all processes of the job: it stays the same from round to round."""
    return secrets.token_hex(8)


os.register_at_fork(after_in_child=worker_identity.cache_clear)  # a child is another worker than its parent


def join_round(
    settings: Settings,
    groups: Groups,
    round: int,
    *,
    ready: bool = False,
    has_state: bool = True,
    address: str = "",
    hosting: ExitStack | None = None,
    progress: int = -1,
) -> JoinedRound:
    """Join the round that the complete settings describe. `round` counts the rounds of this process, from 0.

    A worker of an elastic job is `ready` when it has built what it trains. Before that it gets a round of its own, if
    the job's is under way; then it has no state (`has_state`) until it has got that of the others. From the round
    before it may have the address of the coordinator, and what closes the one that it hosts. `progress` is that of
    JoinRound.
    """
    if settings.size == 1 and not settings.coordinator_hosted:  # a launcher shows even a job of one
        return _join_alone(settings, groups)
    for name in ("coordinator", "key"):
        if not getattr(settings, name):
            raise ValueError(
                f"a job of {settings.size} ranks needs {name} (RONDE_{name.upper()}); "
                "start the ranks with `ronde run`, or give it to every one of them"
            )
    deadline = Deadline(settings.elastic_timeout_s if settings.elastic or ready else settings.start_s)
    hosting = hosting if hosting is not None else ExitStack()
    while True:
        try:
            return _join_among(
                *(settings, groups, round, deadline),
                ready=ready,
                has_state=has_state,
                address=address,
                hosting=hosting,
                progress=progress,
            )
        except _BegunWithout:
            continue
        except _BecomesCandidate as candidate:
            joined_round = _join_alone(settings.replace(timeline=""), ())  # the file is that of the job
            joined_round.candidate = (candidate.rank, candidate.size)
            return joined_round


def _join_alone(settings: Settings, groups: Groups) -> JoinedRound:
    """A round of this process alone."""
    member = Member(0, settings.host or host_identity(), os.getpid(), "", worker=worker_identity())
    coordinator = InProcessCoordinator((member,), groups, settings)
    return JoinedRound(settings, Topology((member,), 0), coordinator.client(0), SingleRankBackend())


def _join_among(
    settings: Settings,
    groups: Groups,
    round: int,
    deadline: Deadline,
    *,
    ready: bool,
    has_state: bool,
    address: str,
    hosting: ExitStack,
    progress: int,
) -> JoinedRound:
    """A round of several processes, as join_round() has it."""
    is_elastic, key = settings.elastic or ready, JobKey(settings.key)
    number = settings.worker if settings.elastic and settings.worker >= 0 else settings.rank
    with explain_open_files(f"rank {settings.rank} cannot join"), ExitStack() as opened:
        opened.callback(hosting.close)
        raise_open_files_limit()
        check_open_files()
        loop = EventLoop()
        opened.callback(loop.close)
        own_address = ""
        if not address and settings.rank == 0 and not settings.coordinator_hosted:
            hosted = host_coordinator(settings, key, Deadline(min(MAX_PORT_WAIT_S, settings.start_s) if round else 0.0))
            hosting.callback(hosted.close)
            own_address = hosted.address
        heartbeat_s = settings.heartbeat_s
        liveness, control_address, sender = find_coordinator(
            address or own_address or settings.coordinator,
            key,
            number,
            deadline=deadline,
            # A coordinator that was there before is waited for as long as any other host.
            reach_s=(heartbeat_s if address else settings.start_s) if is_elastic else None,
            heartbeat_s=heartbeat_s,
            ready=ready,
        )
        opened.callback(liveness.close)
        control = ControlClient(control_address, key, sender, heartbeat_s=heartbeat_s)
        # What is queued is sent, unless the coordinator is gone and would never receive it.
        opened.callback(lambda: control.close(0.0) if is_closed(liveness) else control.close())
        host = settings.address or local_address_for(parse_address(control_address)[0])
        listener = Listener(key, unix=True, tcp_host=host, loop=loop, heartbeat_s=heartbeat_s)
        opened.callback(listener.close)
        tcp_addresses = (format_address(host, listener.tcp_port),)
        host_id = settings.host or host_identity()
        member = Member(
            -1 if is_elastic else settings.rank,
            host_id,
            os.getpid(),
            listener.unix_name,
            tcp_addresses,
            pid_namespace(),
            worker=worker_identity(),
        )
        size = 0 if is_elastic else settings.size
        join = JoinRound(VERSION, size, member, groups, describe_compatibility(settings), has_state, progress)
        who = f"worker {number}" if is_elastic else f"rank {settings.rank}"
        started = _request_join(loop, control, liveness.fileno(), join, deadline, who=who, is_elastic=is_elastic)
        settings = _follow_coordinator(settings, started)
        rank = settings.rank
        if is_elastic:
            rank = next(each.rank for each in started.members if each.worker == member.worker)
        topology = Topology(started.members, rank, round=started.round)
        control.round = started.round
        listener.start_round(topology)
        backend = make_backend(topology, settings, listener, key, loop, control.send)
        opened.callback(backend.close)
        return JoinedRound(
            settings,
            topology,
            control,
            backend,
            liveness.fileno(),
            -1 if settings.coordinator_hosted else 0,
            loop,
            opened.pop_all(),
            key.mac(b"objects", msgspec.msgpack.encode((topology.round, topology.members))),
            format_address(peer_host(liveness), liveness.getpeername()[1]),
            hosting,
            is_elastic,
        )


class _BecomesCandidate(Exception):
    """The coordinator's answer CANDIDATE."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank = rank
        self.size = size


class _BegunWithout(Exception):
    """The first round of the elastic job has begun without this worker, which is to connect again."""


REFUSALS: dict[RefusalKind, type[Exception]] = {
    RefusalKind.FAILED: StartFailed,
    RefusalKind.FINISHED: JobFinished,
    RefusalKind.LEFT_BEHIND: LeftBehind,
    RefusalKind.BEGUN: _BegunWithout,
    RefusalKind.STATE_LOST: StateLost,
}


def _follow_coordinator(settings: Settings, started: RoundStarted) -> Settings:
    """The settings of a rank with the timeline of the coordinator, which alone writes one. Warn about another one."""
    own = escape_surrogates(settings.timeline)
    if own and own != started.timeline:
        logger.warning(
            "timeline=%r has no effect: the coordinator writes the timeline, and was given %s. Give it to %s, or call "
            "ronde.start_timeline()",
            own,
            repr(started.timeline) if started.timeline else "none",
            "`ronde run` (--timeline)" if settings.coordinator_hosted else "rank 0, which hosts the coordinator",
        )
    return settings.replace(timeline=started.timeline)


def make_backend(
    topology: Topology,
    settings: Settings,
    listener: Listener,
    key: JobKey,
    loop: EventLoop,
    send: Callable[[WorkerMessage], None],
) -> Backend:
    """Return the backend that the setting `backend` names. `send` gives a message to the coordinator, in the loop. A
    round of one rank has the SingleRankBackend."""
    if settings.backend == "mpi":
        return MpiBackend(topology, settings)
    return NativeBackend(topology, listener, key, settings, loop, send)


def describe_compatibility(settings: Settings) -> dict[str, str]:
    """Return what must be equal on all ranks, by name, as text: ranks that differ in it would compute wrong numbers or
    wait for each other. CPU features and kernels are not in it: all kernels give the same bits."""
    names = [setting.name for setting in describe_settings() if setting.equal_on_all_ranks]
    return {
        "the version of ronde": __version__,
        "the native library": f"ABI {ABI}, {load_library().rd_version().decode()}",
        "the byte order": sys.byteorder,
        **{name: str(getattr(settings, name)) for name in names},
    }


def _request_join(
    loop: EventLoop,
    control: ControlClient,
    liveness_fd: int,
    join: JoinRound,
    deadline: Deadline,
    *,
    who: str,
    is_elastic: bool,
) -> RoundStarted:
    """Ask to be a member until the round starts. Messages that follow stay in the queue. In an elastic job the
    coordinator decides how long the round may wait for others: while it answers, the deadline is put off."""
    answers: list[RoundStarted | JoinRefused] = []
    closed: list[bool] = []
    problems: list[str] = []

    def on_message(message: CoordinatorMessage) -> None:
        nonlocal deadline
        if isinstance(message, RoundStarted | JoinRefused):
            answers.append(message)
            control.stop_receiving()
        elif is_elastic and isinstance(message, RankHeartbeatReply):
            deadline = Deadline(deadline.timeout_s)

    def on_closed() -> None:
        loop.remove_reader(liveness_fd)
        closed.append(True)

    control.start_receiving(loop, on_message, problems.append)
    loop.add_reader(liveness_fd, on_closed)
    try:
        while not answers:
            if closed:
                raise StartFailed("the coordinator hung up before the round began; look at its output")
            if problems:  # its answer may be among what was lost
                raise StartFailed(f"{who} could not join: {problems[0]}; check the network")
            if deadline.expired:
                _run_loop(loop, lambda: bool(answers or closed), ANSWER_GRACE_S)
                if answers or closed:
                    continue
                control.send(LeaveRound(LeaveReason.FAILED, "it waited too long for the round to begin"))
                setting = "elastic_timeout_s" if is_elastic else "start_s"
                raise StartFailed(
                    f"{who} got no answer from the coordinator within {deadline.timeout_s:g} s; "
                    f"look at its output, or give more time with {setting} (RONDE_{setting.upper()})"
                )
            control.send(join)  # again and again: that is harmless, and a lost message is not
            control.send(RankHeartbeat(time.monotonic_ns()))  # the reply to it shows whether an answer was lost
            _run_loop(loop, lambda: bool(answers or closed or problems), min(JOIN_RETRY_S, deadline.remaining_s))
            if closed:  # the reason may still be on its way
                _run_loop(loop, lambda: bool(answers), min(JOIN_RETRY_S, deadline.remaining_s))
    finally:
        control.stop_receiving()
        loop.remove_reader(liveness_fd)
    answer = answers[0]
    if isinstance(answer, JoinRefused):
        raise REFUSALS[answer.kind](answer.reason)
    return answer


def _run_loop(loop: EventLoop, condition: Callable[[], bool], timeout_s: float) -> None:
    """Run the loop until the condition is true or the time is over."""
    timer = loop.call_later(timeout_s, lambda: None)
    loop.run_until(lambda: condition() or not timer.pending)
    timer.cancel()


# --- hosting and finding the coordinator -----------------------------------------------------------------------------


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


def host_coordinator(settings: Settings, key: JobKey, deadline: Deadline) -> CoordinatorServer:
    """A running coordinator at the address of the settings, or at the first free port of their range. If none is free,
    it is tried again until the deadline."""
    problem: StartFailed | None = None
    while True:
        for address in expand_port_range(settings.coordinator):
            host, port = parse_address(address)
            try:
                coordinator = CoordinatorServer(host, port, settings.size, key, settings=settings)
            except StartFailed as error:
                problem = error
                continue
            try:
                coordinator.start()
            except BaseException:
                coordinator.close()
                raise
            return coordinator
        assert problem is not None
        if deadline.expired:
            raise problem
        time.sleep(min(RETRY_INTERVAL_S, deadline.remaining_s))


def find_coordinator(
    address_range: str,
    key: JobKey,
    rank: int,
    *,
    deadline: Deadline,
    heartbeat_s: float,
    reach_s: float | None = None,
    worker: str = "",
    ready: bool = False,
) -> tuple[Connection, str, str]:
    """The liveness connection to the coordinator, which is or will be there, `host:port` of its control server, and the
    name that the control connection is to have.

    In an elastic job `rank` is the number of the worker. The coordinator may let it wait until the deadline; if
    `reach_s` is given, it has to be reached in that time.
    """
    addresses = expand_port_range(address_range)
    is_range = len(addresses) > 1
    if is_range:
        resolve_host(*parse_address(addresses[0]))  # an unknown name fails at once
    # The detail is unique to this attempt: a second connection with the same detail is a retry of the same process,
    # which replaces the first.
    detail = secrets.token_hex(8)
    request = ConnectionRequest(LIVENESS, rank, detail=detail, worker=worker or worker_identity(), ready=ready)
    problems: dict[str, str] = {}
    reach_deadline = deadline if reach_s is None else Deadline(min(reach_s, deadline.remaining_s))
    timeout_s = FIRST_CONNECT_TIMEOUT_S

    def before_retry() -> None:
        if is_range:
            raise _NobodyListens

    while True:
        for address in addresses:
            limit = Deadline(min(timeout_s, reach_deadline.remaining_s)) if is_range else reach_deadline
            try:
                connection, reply = connect_authenticated(
                    address, key, request, limit, heartbeat_s=heartbeat_s, before_retry=before_retry
                )
            except _NobodyListens:
                continue  # an earlier problem with this port says more
            except StartFailed as error:
                if reach_deadline.expired and address in problems:
                    continue  # there was no time left for this attempt: what was answered before says more
                if not is_range:
                    raise
                problems[address] = str(error)  # another program's port, or another job's
                continue
            admission = _read_admission(connection, reply)
            if admission.status is AdmissionStatus.ADMITTED:
                control_address = format_address(peer_host(connection), admission.control_port)
                return connection, control_address, admission.sender
            problems[address] = admission.reason
            if reach_s is not None:  # it was reached: only the deadline ends the wait for its next answer
                reach_deadline = Deadline(min(reach_s, deadline.remaining_s))
        if reach_deadline.expired:
            break
        timeout_s = min(2 * timeout_s, MAX_CONNECT_TIMEOUT_S)
        time.sleep(min(RETRY_INTERVAL_S, deadline.remaining_s))
    reasons = "; ".join(sorted(set(problems.values()))) or "nobody listens there"
    if not is_range:
        raise StartFailed(f"rank {rank} was not let in within {deadline.timeout_s:g} s: {reasons}")
    raise StartFailed(
        f"rank {rank} did not find the coordinator of rank 0 at {address_range} within "
        f"{reach_s or deadline.timeout_s:g} s ({reasons}); is rank 0 running there, and do all ranks have the same "
        "RONDE_KEY, or a home directory in common?"
    )


class _NobodyListens(Exception):
    """No process listens on this port."""


def _read_admission(connection: Connection, reply: bytes) -> Admission:
    """Return the coordinator's admission, which is ADMITTED or RETRY. Closes the connection unless it is ADMITTED."""
    try:
        admission = decode_admission(reply)
    except ProtocolError as error:
        connection.close()
        raise StartFailed(
            f"what answers at the coordinator's address is no coordinator of this version ({error}); install the same "
            "ronde on all hosts"
        ) from None
    if admission.status is not AdmissionStatus.ADMITTED:
        connection.close()
    if admission.status is AdmissionStatus.CANDIDATE:
        raise _BecomesCandidate(admission.rank, admission.size)
    if admission.status is AdmissionStatus.REFUSED:
        raise REFUSALS[admission.refusal_kind](admission.reason)
    return admission
