"""A child process with a process group of its own: spawned, signalled and reaped here. Used for ranks.

The leader of a process group keeps its process id until it is reaped. So until then what is left of the group can be
killed without hitting an unrelated process: reap() kills the group first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
from collections.abc import Collection, Iterator

from ronde.errors import StartFailed
from ronde.launch.agent.orphans import OrphanKiller
from ronde.launch.protocol import RankOrder
from ronde.types import Deadline


class CommandNotExecutable(StartFailed):
    """The command exists but is no program that may be run."""


def spawn(
    order: RankOrder,
    orphan_killer: OrphanKiller,
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    inherited_fds: Collection[int] = (),
) -> ChildProcess:
    """Start the order's command as the leader of a new session and process group. StartFailed says why it cannot be
    started, and what to do."""
    try:
        with _cpu_affinity(order.cpus):
            popen = subprocess.Popen(
                order.argv,
                env={**order.env, **orphan_killer.cookie},
                cwd=order.cwd or None,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=inherited_fds,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        raise describe_spawn_error(error, order) from None
    return ChildProcess(popen, orphan_killer)


class ChildProcess:
    """A running process and all processes that it starts in its group; the orphan killer finds those that left it. Not
    for several threads at once."""

    def __init__(self, popen: subprocess.Popen[bytes], orphan_killer: OrphanKiller) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._orphan_killer = orphan_killer
        self._exit_code: int | None = None
        orphan_killer.watch_group(popen.pid)
        try:
            self.pidfd = os.pidfd_open(popen.pid)
            """Readable when the process has ended: then reap() does not wait. -1 after that."""
        except OSError as error:
            self.pidfd = -1
            self.reap()
            raise StartFailed(f"process {popen.pid} cannot be watched ({error.strerror}); raise ulimit -n") from None

    def signal(self, number: int) -> None:
        """Send a signal to the whole group, unless its leader was reaped."""
        if self._exit_code is None:
            # It ended in between; or all that is left runs as another user.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def wait(self, deadline: Deadline) -> bool:
        """Wait for the end of the process; return whether it came in time."""
        if self._exit_code is not None:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(deadline.remaining_s * 1000))

    def reap(self) -> int:
        """Kill what is left of the group and return the leader's exit code, below 0 for a signal. Idempotent."""
        if self._exit_code is None:
            self.signal(signal.SIGKILL)
            self._orphan_killer.forget_group(self.pid)
            self._exit_code = self._popen.wait()
            self.close()
        return self._exit_code

    def close(self) -> None:
        """Stop watching the process, even if it has not ended. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


@contextlib.contextmanager
def _cpu_affinity(cpus: Collection[int]) -> Iterator[None]:
    # A child inherits the affinity of the thread that starts it; other threads keep theirs.
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


def describe_spawn_error(error: OSError | ValueError, order: RankOrder) -> StartFailed:
    """Make the exception that says why a process could not be started, and what to do."""
    if not isinstance(error, OSError):  # a null byte, or text that cannot be encoded
        return StartFailed(f"its command or its environment cannot be handed to a process: {error}")
    host = f"host {_host_name()}"
    if error.errno in LIMIT_ADVICE:
        return StartFailed(f"{host}: {LIMIT_ADVICE[error.errno]}")
    if order.cwd and error.filename == order.cwd:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be entered ({error.strerror})"
        return StartFailed(f"the working directory {order.cwd} {problem} on {host}; choose one that every host has")
    name = order.argv[0] if order.argv else ""
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
