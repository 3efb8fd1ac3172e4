"""A process with a process group of its own: started, signalled and reaped here, and nowhere else. Used by
launch/rank (the agent's ranks) and launch/local.

The leader of a group keeps its number until it is reaped, so that is when what it left behind can be ended without
hitting a stranger: reap() kills the group first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TypeAlias

from ronde.errors import StartFailed
from ronde.launch.agent.orphans import OrphanKiller
from ronde.types import Deadline

__all__ = ["ChildProcess", "CommandNotExecutable", "ProcessSpec", "StdioTarget", "describe_spawn_error", "spawn"]

StdioTarget: TypeAlias = "int | IO[bytes] | IO[str] | None"
"""What a standard stream becomes, as subprocess takes it; None leaves it as ours is."""


class CommandNotExecutable(StartFailed):
    """The command is there, and is no program that may be run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """What to run, where."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """All of its environment."""
    cwd: str | None = None
    """None: where this process is."""
    cpus: Collection[int] = ()
    """Cores it may use; empty for all."""


def spawn(
    spec: ProcessSpec,
    orphan_killer: OrphanKiller,
    *,
    stdin: StdioTarget,
    stdout: StdioTarget,
    stderr: StdioTarget,
    inherited_fds: Collection[int] = (),
) -> ChildProcess:
    """Start it as the leader of a new session and process group. StartFailed says what to do when that fails."""
    try:
        with _cpu_affinity(spec.cpus):
            popen = subprocess.Popen(
                spec.argv,
                env={**spec.env, **orphan_killer.cookie},
                cwd=spec.cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=inherited_fds,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        raise describe_spawn_error(error, spec) from None
    return ChildProcess(popen, orphan_killer)


class ChildProcess:
    """A running process, and all that it starts and that stays in its group; the guard knows of the rest. Not for
    several threads at once."""

    def __init__(self, popen: subprocess.Popen[bytes], orphan_killer: OrphanKiller) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._orphan_killer = orphan_killer
        self._exit_code: int | None = None
        orphan_killer.watch_group(popen.pid)
        try:
            self.pidfd = os.pidfd_open(popen.pid)
            """Readable when the process has ended: then reap() does not wait. -1 afterwards."""
        except OSError as error:
            self.pidfd = -1
            self.reap()
            raise StartFailed(f"process {popen.pid} cannot be watched ({error.strerror}); raise ulimit -n") from None

    def signal(self, number: int) -> None:
        """Send it to the whole group, as long as its leader is not reaped."""
        if self._exit_code is None:
            # Ended in between; or all that is left runs as another user.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def wait(self, deadline: Deadline) -> bool:
        """Wait for its end; whether it came in time."""
        if self._exit_code is not None:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(deadline.remaining_s * 1000))

    def reap(self) -> int:
        """Kill what is left of the group and return the leader's exit code; a signal counts below 0. Idempotent."""
        if self._exit_code is None:
            self.signal(signal.SIGKILL)
            self._orphan_killer.forget_group(self.pid)
            self._exit_code = self._popen.wait()
            self.close()
        return self._exit_code

    def close(self) -> None:
        """Stop watching it; for one that does not even end when it is killed. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


@contextlib.contextmanager
def _cpu_affinity(cpus: Collection[int]) -> Iterator[None]:
    """A child inherits the cores of the thread that starts it; other threads are not touched, so nobody races."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError, OverflowError):
        wanted, allowed = (", ".join(map(str, sorted(each))) for each in (cpus, before))
        raise StartFailed(
            f"it cannot be bound to core {wanted}: host {_host_name()} lets us use {allowed}; run without core binding"
        ) from None
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


LIMIT_ADVICE = {
    errno.E2BIG: "its arguments and its environment are larger than the system allows; pass large values by file",
    errno.EAGAIN: "no more processes may be started; raise the limit (ulimit -u), or start fewer ranks",
    errno.ENOMEM: "there is no memory for another process; start fewer ranks, or use a larger host",
    errno.EMFILE: "no more files may be open; raise the limit (ulimit -n), or start fewer ranks",
    errno.ENFILE: "no more files may be open on the whole host; raise fs.file-max, or start fewer ranks",
}


def describe_spawn_error(error: OSError | ValueError, spec: ProcessSpec) -> StartFailed:
    """Why a process could not be started, and what to do."""
    if not isinstance(error, OSError):  # a null byte, or text that is no text
        return StartFailed(f"its command or its environment cannot be handed to a process: {error}")
    host = f"host {_host_name()}"
    if error.errno in LIMIT_ADVICE:
        return StartFailed(f"{host}: {LIMIT_ADVICE[error.errno]}")
    if spec.cwd is not None and error.filename == spec.cwd:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be entered ({error.strerror})"
        return StartFailed(f"the working directory {spec.cwd} {problem} on {host}; choose one that every host has")
    name = spec.argv[0] if spec.argv else ""
    if isinstance(error, FileNotFoundError):
        return StartFailed(
            f"there is no command {name!r} on {host}; give its full path, or check PATH there "
            "(if it is a script, the interpreter in its first line may be missing)"
        )
    if isinstance(error, PermissionError):
        return CommandNotExecutable(
            f"{name!r} may not be executed on {host}; is it a script? start it with python, or chmod +x it"
        )
    if error.errno == errno.ENOEXEC:
        return CommandNotExecutable(
            f"{name!r} is no program for {host}; is it a script? start it with python, or begin it with #!"
        )
    return StartFailed(f"{name!r} could not be started on {host}: {error.strerror or error}")


def _host_name() -> str:
    return os.uname().nodename
