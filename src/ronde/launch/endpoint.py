"""Where a driver answers questions about its job, and how others find it. Used by launch/driver on one side, by
`ronde top`, `ronde stack` and a dashboard on the other.

Each job has a Unix socket in a directory that only its user can enter; the kernel tells both sides that the other one
is the same user. A question is a JSON object on a line, and so is the answer: see docs/internals/watching.md.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from ronde.errors import ProtocolError, RondeError, StartFailed
from ronde.launch.status import JobStatus
from ronde.net.desk import PATH_LIMIT, Desk, ask, who_listens
from ronde.observe.stacks import RankStack
from ronde.types import Deadline

__all__ = ["Endpoint", "NoSuchJob", "RunningJob", "ask_stacks", "ask_status", "find_job", "list_jobs", "open_folder"]

SUFFIX = ".sock"
CONNECT_S = 2.0
LOCK_S = 10.0
STATUS_S = 10.0
STACKS_S = 5.0
MOST_STACKS_S = 60.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_T = TypeVar("_T")

logger = logging.getLogger("ronde.launch")


class NoSuchJob(ValueError):
    """No running job has this name; the message lists those that run."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be asked."""

    ask: Literal["status", "stacks"]
    limit_s: float = STACKS_S
    """How long ranks may take to say where they are."""


class Stacks(msgspec.Struct, frozen=True):
    """The answer to "stacks"."""

    ranks: tuple[RankStack, ...]


class Sorry(msgspec.Struct, frozen=True):
    """The answer to what cannot be answered."""

    error: str


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose driver answers."""

    name: str
    path: Path
    pid: int
    """The driver's; 0 when it is too busy to be asked."""


class Endpoint:
    """The driver's side. The functions are called in threads of the endpoint's own, several at a time."""

    def __init__(
        self,
        name: str,
        status: Callable[[], JobStatus],
        stacks: Callable[[float], Sequence[RankStack]],
        *,
        folder: Path | None = None,
    ) -> None:
        """Named after the driver's process when the name is empty. ValueError when another job has the name."""
        self.name = name or str(os.getpid())
        """What `ronde top` takes."""
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a job's name is up to 64 letters, digits, '.', '_' and '-', got {self.name!r}")
        self._status = status
        self._stacks = stacks
        folder = folder or open_folder()
        path = folder / f"{self.name}{SUFFIX}"
        if len(os.fsencode(path)) > PATH_LIMIT:
            raise ValueError(f"{path} is too long for a socket's name; choose a shorter name for the job")
        with _locked(folder):
            for job in _look_around(folder):  # at all, so that what killed drivers left behind is removed
                if job.path == path:
                    raise ValueError(
                        f"a job named {self.name!r} is running already (process {job.pid}); choose another name"
                    )
            self._desk = Desk(path, self._answer)

    def close(self) -> None:
        """Answer no more. Idempotent."""
        self._desk.close()

    def __enter__(self) -> Endpoint:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _answer(self, line: bytes) -> bytes:
        try:
            question = msgspec.json.decode(line, type=Question)
            if question.ask == "status":
                return msgspec.json.encode(self._status())
            limit_s = min(max(0.0, question.limit_s), MOST_STACKS_S)
            return msgspec.json.encode(Stacks(tuple(self._stacks(limit_s))))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return msgspec.json.encode(Sorry(f"not a question: {error}"))
        except Exception as error:  # the edge to the driver: it must not end by a question
            logger.exception("a question about the job could not be answered")
            return msgspec.json.encode(Sorry(f"the driver could not answer: {error!r}"))


def open_folder() -> Path:
    """The directory of this user's jobs, made if need be. StartFailed when others could get at it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    home = Path(runtime) if runtime and os.access(runtime, os.W_OK | os.X_OK) else None
    folder = home / "ronde" if home is not None else Path(tempfile.gettempdir()) / f"ronde-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # not stat(): a link could lead to what belongs to somebody else
    except OSError as error:
        raise StartFailed(f"cannot make {folder} for the job's socket: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StartFailed(
            f"{folder} must be a directory of yours that nobody else can enter; remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def list_jobs(folder: Path | None = None) -> list[RunningJob]:
    """This user's running jobs, by name. What killed drivers left behind is removed."""
    folder = folder or open_folder()
    with _locked(folder):
        return _look_around(folder)


def find_job(name: str = "", folder: Path | None = None) -> RunningJob:
    """The running job of this name; without a name, the only one. NoSuchJob lists those that run."""
    folder = folder or open_folder()
    jobs = list_jobs(folder)
    chosen = [job for job in jobs if job.name == name or not name]
    if len(chosen) == 1:
        return chosen[0]
    running = ", ".join(job.name for job in jobs) or "none"
    if name or not jobs:
        what = f"no job named {name!r} is running" if name else "no job is running"
        raise NoSuchJob(f"{what} for this user on this host (running: {running}; looked in {folder})")
    raise NoSuchJob(f"{len(jobs)} jobs are running, say which: {running}")


def ask_status(job: RunningJob, deadline: Deadline | None = None) -> JobStatus:
    """How the job is. ConnectionError (or another OSError) when it has ended."""
    return _ask(job, Question("status"), JobStatus, deadline or Deadline(STATUS_S))


def ask_stacks(job: RunningJob, limit_s: float = STACKS_S) -> tuple[RankStack, ...]:
    """Where the programs of its ranks are; those that take longer than limit_s are described in words."""
    return _ask(job, Question("stacks", limit_s), Stacks, Deadline(limit_s + STATUS_S)).ranks


def _ask(job: RunningJob, question: Question, kind: type[_T], deadline: Deadline) -> _T:
    data = ask(job.path, msgspec.json.encode(question), deadline)
    try:
        answer = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if "error" in answer:
            raise RondeError(f"job {job.name}: {msgspec.json.decode(answer['error'], type=str)}")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"job {job.name} gave no answer of this version of ronde: {error}") from None


def _look_around(folder: Path) -> list[RunningJob]:
    """Whose drivers listen there; paths where nobody does any more are freed. Under the folder's lock."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        pid = who_listens(path, Deadline(CONNECT_S))
        if pid is None:
            path.unlink(missing_ok=True)
        else:
            found.append(RunningJob(path.name.removesuffix(SUFFIX), path, pid))
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One at a time: who frees a path must not meet one who has just taken it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = Deadline(LOCK_S)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.passed:
                    raise StartFailed(
                        f"another process of ronde holds {folder} for {LOCK_S:g} s; is it stopped?"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)
