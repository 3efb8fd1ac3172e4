"""A running job as `ronde top` and `ronde stack` show it and other programs read it: its status, the Unix socket where
its driver answers requests about it, and how others find that.

Each job has a socket in a directory that only its user can enter; the kernel tells both sides that the other one is the
same user. Request and reply are a JSON object on a line each: see docs/reference/json.md.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from ronde.coordinator.queries import OnStacks
from ronde.errors import ProtocolError, RondeError, StartFailed
from ronde.exit_codes import describe_exit_code
from ronde.net.event_loop import LoopThread
from ronde.net.unix_server import MAX_SOCKET_PATH_BYTES, UnixLineServer, listening_pid, query_monitor
from ronde.observe.activity import JobActivity, RankActivity
from ronde.observe.stacks import RankStack
from ronde.types import Deadline


class RankStatus(RankActivity, frozen=True, kw_only=True):
    """One rank: its activity, and what the driver knows; None for what it does not know (yet)."""

    local_rank: int = 0
    cpu: float | None = None
    """Share of one core; above 1 with more than one busy thread."""
    memory_bytes: int | None = None
    gpu: float | None = None
    """Share of time in which its GPU was busy."""
    gpu_bytes: int | None = None
    exit_code: int | None = None
    """Below 0: the signal that ended it."""
    number: int | None = None
    """In an elastic job, the number of its worker. One that is in no round has rank -1."""
    name: str = ""
    """Of a process that is no rank, such as a server; it has rank -1."""


class GoneWorker(msgspec.Struct, frozen=True):
    """A worker that was in the round before, and how it ended."""

    number: int
    host: str
    why: str


class RoundRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a round of an elastic job."""

    round: int
    """From 0."""
    elapsed_s: float
    """Since the job began."""
    members: tuple[int, ...]
    """The numbers of its workers, by rank."""
    came: tuple[int, ...] = ()
    """Those that were in no round before; empty for the first round."""
    gone: tuple[GoneWorker, ...] = ()
    plan: str
    """RoundPlan.describe()."""

    def describe(self) -> str:
        """Return the round as a line for the user."""
        without = "; ".join(f"worker {each.number} on host {each.host} {each.why}" for each in self.gone)
        return f"round {self.round}: {self.plan}" + (f"; {without}" if without else "")


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one moment."""

    name: str
    command: tuple[str, ...] = ()
    at: float = 0.0
    """Seconds since 1970."""
    elapsed_s: float = 0.0
    size: int
    round: int = -1
    slowest: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()
    """Of an elastic job, the last ones."""
    plan: str = ""
    """Of an elastic job, what will happen next with its round."""


MAX_ROUNDS_SHOWN = 20


def make_job_status(
    name: str, command: Sequence[str], activity: JobActivity, rank_statuses: Mapping[int, RankStatus], elapsed_s: float
) -> JobStatus:
    """Combine the activity that the coordinator knows with what the driver knows of the processes of ranks."""
    return JobStatus(
        name=name,
        command=tuple(word.encode(errors="backslashreplace").decode() for word in command),  # JSON takes UTF-8 only
        at=time.time(),
        elapsed_s=elapsed_s,
        size=activity.size,
        round=activity.round,
        slowest=activity.slowest,
        ranks=(
            *(_add_activity(rank_statuses[each.rank], each) for each in activity.ranks),
            *_server_statuses(rank_statuses),
        ),
    )


def make_elastic_status(
    name: str,
    command: Sequence[str],
    activity: JobActivity,
    worker_statuses: Mapping[int, RankStatus],
    elapsed_s: float,
    *,
    rounds: Sequence[RoundRecord],
    plan: str,
) -> JobStatus:
    """As make_job_status, for an elastic job, whose processes the driver knows by the numbers of their workers: the
    members of the newest round by rank, then the workers that run and are in no round."""
    members = rounds[-1].members if rounds else ()
    activities = {each.rank: each for each in activity.ranks}
    ranks = []
    for rank, number in enumerate(members):
        known = activities.get(rank, RankActivity(rank=rank, state="starting"))
        ranks.append(_add_activity(msgspec.structs.replace(worker_statuses[number], number=number), known))
    for number, status in worker_statuses.items():
        if number not in members and status.exit_code is None and not status.name:
            why = f"worker {number} is getting ready" if status.pid else f"worker {number} is being started"
            ranks.append(msgspec.structs.replace(status, rank=-1, number=number, state="starting", why=why))
    return JobStatus(
        name=name,
        command=tuple(word.encode(errors="backslashreplace").decode() for word in command),
        at=time.time(),
        elapsed_s=elapsed_s,
        size=len(members),
        round=activity.round,
        slowest=activity.slowest,
        ranks=(*ranks, *_server_statuses(worker_statuses)),
        rounds=tuple(rounds[-MAX_ROUNDS_SHOWN:]),
        plan=plan,
    )


def _server_statuses(statuses: Mapping[int, RankStatus]) -> list[RankStatus]:
    """The processes that are no ranks and run."""
    return [
        msgspec.structs.replace(status, rank=-1, state="running" if status.pid else "starting")
        for status in statuses.values()
        if status.name and status.exit_code is None
    ]


def _add_activity(status: RankStatus, activity: RankActivity) -> RankStatus:
    host, pid = status.host or activity.host, status.pid or activity.pid
    state, why, code = activity.state, activity.why, status.exit_code
    # The coordinator knows which ranks have left the round; only the driver knows how a process has ended.
    if code is not None and state != "lost":
        state, why = ("left" if code == 0 else "lost"), describe_exit_code(code)
    elif code is None and not pid:
        state, why = "starting", "has not been started yet"
    known = msgspec.structs.asdict(activity) | {"host": host, "pid": pid, "state": state, "why": why}
    return msgspec.structs.replace(status, **known)


def make_rank_stacks(stacks: Sequence[RankStack], rank_statuses: Mapping[int, RankStatus]) -> tuple[RankStack, ...]:
    """Return the stacks of all ranks, with the hosts and process ids that the driver knows, by rank."""
    return tuple(
        msgspec.structs.replace(each, host=status.host or each.host, pid=status.pid or each.pid)
        for each in stacks
        for status in [rank_statuses[each.rank]]
    )


SOCKET_SUFFIX = ".sock"
CONNECT_TIMEOUT_S = 2.0
LOCK_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 10.0
STACKS_TIMEOUT_S = 5.0
MAX_STACKS_TIMEOUT_S = 60.0

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_T = TypeVar("_T")


class NoSuchJob(ValueError):
    """No running job has this name; the message lists those that run."""


class MonitorRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ask: Literal["status", "stacks"]
    limit_s: float = STACKS_TIMEOUT_S
    """How long ranks may take to send their stacks."""


class JobStacks(msgspec.Struct, frozen=True):
    """The reply to "stacks"."""

    ranks: tuple[RankStack, ...]


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose driver answers."""

    name: str
    path: Path
    pid: int
    """The driver's; 0 when it is too busy to answer."""


class MonitorServer:
    """Serves requests about one job at a Unix socket."""

    def __init__(
        self,
        name: str,
        status: Callable[[], JobStatus],
        stacks: Callable[[float, OnStacks], None],
        *,
        thread: LoopThread | None = None,
        jobs_dir: Path | None = None,
    ) -> None:
        """ValueError when another job has the name. `status` and `stacks` are called in the loop of `thread` (default:
        one of the server's own) and must not wait: `stacks` gets a time limit and a function for the result, which any
        thread may call."""
        if not _JOB_NAME.fullmatch(name):
            raise ValueError(f"a job's name is up to 64 letters, digits, '.', '_' and '-', got {name!r}")
        self._status = status
        self._stacks = stacks
        jobs_dir = jobs_dir or open_jobs_dir()
        path = jobs_dir / f"{name}{SOCKET_SUFFIX}"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"{path} is too long for a socket's name; choose a shorter name for the job")
        with _locked_jobs(jobs_dir) as jobs:
            for job in jobs:
                if job.path == path:
                    raise ValueError(
                        f"a job named {name!r} is running already (process {job.pid}); choose another name"
                    )
            self._socket_server = UnixLineServer(path, self._handle_request, thread=thread)

    def close(self) -> None:
        self._socket_server.close()

    def __enter__(self) -> MonitorServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle_request(self, line: bytes, reply: Callable[[bytes], None]) -> None:
        try:
            request = msgspec.json.decode(line, type=MonitorRequest)
            if request.ask == "status":
                return reply(msgspec.json.encode(self._status()))
            timeout_s = min(max(0.0, request.limit_s), MAX_STACKS_TIMEOUT_S)
            self._stacks(timeout_s, lambda stacks: reply(msgspec.json.encode(JobStacks(stacks))))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reply(msgspec.json.encode({"error": f"not a question: {error}"}))
        except Exception as error:  # a mistake in a reply must not end the driver
            logging.getLogger("ronde.launch").exception("a request about the job could not be answered")
            reply(msgspec.json.encode({"error": f"the driver could not answer: {error!r}"}))


def open_jobs_dir() -> Path:
    """Return the directory of this user's jobs, and make it if need be. StartFailed when others could enter it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    home = Path(runtime) if runtime and os.access(runtime, os.W_OK | os.X_OK) else None
    jobs_dir = home / "ronde" if home is not None else Path(tempfile.gettempdir()) / f"ronde-{os.getuid()}"
    try:
        jobs_dir.mkdir(mode=0o700, exist_ok=True)
        found = jobs_dir.lstat()  # not stat(): a link could lead to what belongs to somebody else
    except OSError as error:
        raise StartFailed(f"cannot make {jobs_dir} for the job's socket: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StartFailed(
            f"{jobs_dir} must be a directory of yours that nobody else can enter; remove it, or set XDG_RUNTIME_DIR"
        )
    return jobs_dir


def find_job(name: str = "", jobs_dir: Path | None = None) -> RunningJob:
    """Return the running job of this name; without a name, the only one of this user."""
    jobs_dir = jobs_dir or open_jobs_dir()
    with _locked_jobs(jobs_dir) as jobs:
        chosen = [job for job in jobs if job.name == name or not name]
    if len(chosen) == 1:
        return chosen[0]
    running = ", ".join(job.name for job in jobs) or "none"
    if name or not jobs:
        what = f"no job named {name!r} is running" if name else "no job is running"
        raise NoSuchJob(f"{what} for this user on this host (running: {running}; looked in {jobs_dir})")
    raise NoSuchJob(f"{len(jobs)} jobs are running, say which: {running}")


def query_status(job: RunningJob, deadline: Deadline | None = None) -> JobStatus:
    """ConnectionError (or another OSError) when the job has ended."""
    return _query_job(job, MonitorRequest("status"), JobStatus, deadline or Deadline(STATUS_TIMEOUT_S))


def query_stacks(job: RunningJob, timeout_s: float = STACKS_TIMEOUT_S) -> tuple[RankStack, ...]:
    """Return the stacks of all ranks; one that takes longer than timeout_s has a reason instead."""
    return _query_job(job, MonitorRequest("stacks", timeout_s), JobStacks, Deadline(timeout_s + STATUS_TIMEOUT_S)).ranks


def _query_job(job: RunningJob, request: MonitorRequest, reply_type: type[_T], deadline: Deadline) -> _T:
    data = query_monitor(job.path, msgspec.json.encode(request), deadline)
    try:
        reply = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if "error" in reply:
            raise RondeError(f"job {job.name}: {msgspec.json.decode(reply['error'], type=str)}")
        return msgspec.json.decode(data, type=reply_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"job {job.name} gave no answer of this version of ronde: {error}") from None


@contextmanager
def _locked_jobs(jobs_dir: Path) -> Iterator[list[RunningJob]]:
    """Yield the jobs whose drivers listen there, by name, and remove the sockets of killed ones. One process at a time:
    a socket that is removed must not be one that was just made."""
    fd = os.open(jobs_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = Deadline(LOCK_TIMEOUT_S)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.expired:
                    raise StartFailed(
                        f"another process of ronde holds {jobs_dir} for {LOCK_TIMEOUT_S:g} s; is it stopped?"
                    ) from None
                time.sleep(0.01)
        jobs = []
        for path in sorted(jobs_dir.glob(f"*{SOCKET_SUFFIX}")):
            pid = listening_pid(path, Deadline(CONNECT_TIMEOUT_S))
            if pid is None:
                path.unlink(missing_ok=True)
            else:
                jobs.append(RunningJob(path.name.removesuffix(SOCKET_SUFFIX), path, pid))
        yield jobs
    finally:
        os.close(fd)
