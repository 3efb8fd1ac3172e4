"""The connection to the agent of another host: the ssh command that starts it, the process with its pipes, and what
the end of ssh means.

Nothing secret is in the command: the job's key and the environment of ranks go through ssh's standard input.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ronde.errors import ProtocolError
from ronde.exit_codes import describe_exit_code
from ronde.launch.job import Job
from ronde.launch.placement import Host
from ronde.launch.protocol import (
    AgentMessage,
    DriverHeartbeat,
    DriverMessage,
    StopAgent,
    encode_frame,
    make_agent_message_reader,
)
from ronde.launch.timeouts import SSH_EXIT_TIMEOUT_S, SSH_KEEPALIVES
from ronde.net.event_loop import EventLoop, PipeReader
from ronde.text import shorten

NO_DIRECTORY_STATUS = 90
NO_PYTHON_STATUS = 91
SSH_FAILED_STATUS = 255
"""ssh exits with it when it has failed itself, and not the command that it runs."""

_REMOTE_SCRIPT = (
    # Away from the working directory: `python -m` would import the user's files of any name before its own.
    f'cd / && test -d "$1" || exit {NO_DIRECTORY_STATUS}; command -v "$2" >/dev/null || exit {NO_PYTHON_STATUS}; '
    'exec "$2" -m ronde.launch.agent'
)


@dataclass(frozen=True, slots=True)
class HostError:
    """Why a host cannot be used, and what to do about it."""

    reason: str
    last_line: str = ""
    """The last line that ssh or the agent printed."""


_SSH_ERRORS = (
    (r"could not resolve hostname", "its name is not known; check the spelling, or give its address"),
    (
        r"host key verification failed|remote host identification has changed|no .* host key is known",
        "its host key is not trusted here; connect once with `ssh {host}` and compare it, or correct known_hosts",
    ),
    (
        r"permission denied|too many authentication failures|no supported authentication",
        "ssh was not let in; it needs a key without a password (`ssh-copy-id {host}`), another user or --ssh-identity",
    ),
    (r"connection refused", "nobody listens there; is sshd running, and is this its port (--ssh-port)?"),
    (
        r"timed out|no route to host|network is unreachable|not responding|host is down",
        "it does not answer; is it up, and does a firewall let ssh through?",
    ),
    (
        r"connection (?:closed|reset)|kex_exchange_identification|broken pipe",
        "the connection was closed; look at the log of its sshd (MaxStartups, AllowUsers)",
    ),
    (
        r"bad configuration option|unknown option|bad owner or permissions|unsupported option",
        "ssh's own configuration or options are wrong",
    ),
)
"""What ssh prints when it has failed itself, and what to do about it. The first that matches counts."""

_PYTHON_ERRORS = (
    (r"no module named '?ronde\b", "{python} has no ronde, or an old one; install the same version there"),
    (r"no module named", "{python} lacks what ronde needs; install ronde there with its dependencies"),
    (r"syntaxerror|unsupported operand", "{python} is too old; ronde needs 3.10 or newer"),
    (r"permission denied|exec format error|cannot execute", "{python} cannot be run"),
)


def ssh_argv(host: Host, job: Job) -> list[str]:
    """Return the command that starts an agent on this host."""
    options = [
        "BatchMode=yes",
        *job.ssh.options,  # of an option given twice, ssh takes the first
        f"ConnectTimeout={max(1, round(job.ssh.start_s))}",
        f"ServerAliveInterval={max(1, round(job.settings.heartbeat_s / SSH_KEEPALIVES))}",
        f"ServerAliveCountMax={SSH_KEEPALIVES}",
        # A master process started here would outlive the job; one that exists is used.
        "ControlMaster=no",
        "ClearAllForwardings=yes",
        "ForwardX11=no",
    ]
    return [
        "ssh",
        "-T",
        *(["-p", str(job.ssh.port)] if job.ssh.port else []),
        *(["-i", job.ssh.identity] if job.ssh.identity else []),
        *(word for option in options for word in ("-o", option)),
        "--",
        host.name,
        # The user's login shell, whichever it is, only has to start sh.
        shlex.join(["exec", "sh", "-c", _REMOTE_SCRIPT, "ronde", job.cwd, job.python or sys.executable]),
    ]


def make_ssh_error(host: Host, job: Job, status: int, stderr: str) -> HostError:
    """Say what the exit of ssh means, from its exit status and its standard error."""
    last_line, python = _find_line(stderr, "."), job.python or sys.executable
    if status == NO_DIRECTORY_STATUS:
        return make_missing_directory_error(job.cwd)
    if status == NO_PYTHON_STATUS:
        return HostError(f"there is no {python}; say which Python has ronde there (--python)")
    for pattern, advice in _SSH_ERRORS if status == SSH_FAILED_STATUS else _PYTHON_ERRORS:
        line = _find_line(stderr, pattern)
        if line:
            return HostError(f"{advice.format(host=host.name, python=python)} ({line})", last_line)
    printed = f": {last_line}" if last_line else " and printed nothing"
    return HostError(f"its agent has ended ({describe_exit_code(status)}){printed}", last_line)


def make_missing_directory_error(cwd: str) -> HostError:
    return HostError(f"there is no directory {cwd}; every rank starts there, so each host needs it (--cwd)")


def _find_line(stderr: str, pattern: str) -> str:
    """Return the last line that matches."""
    lines = [line.strip() for line in stderr.splitlines() if re.search(pattern, line, re.IGNORECASE) and line.strip()]
    return shorten(lines[-1], 300) if lines else ""


STDERR_TAIL_BYTES = 8192
"""How much of ssh's standard error is kept, from its end."""


class SshAgentConnection:
    """The connection to an agent that ssh starts on another host. As an Agent it takes messages with handle() and calls
    `on_report` with those of the agent; and `on_lost` once, when the agent has ended."""

    def __init__(
        self,
        loop: EventLoop,
        host: Host,
        job: Job,
        on_report: Callable[[AgentMessage], None],
        on_lost: Callable[[HostError], None],
    ) -> None:
        self.on_report = on_report
        """May be replaced before ranks are started."""
        self.closed = False
        self._loop = loop
        self._host = host
        self._job = job
        self._on_lost = on_lost
        self._frame_reader = make_agent_message_reader()
        self._stderr_tail = b""
        self._unsent = bytearray()
        # Held by whoever writes to ssh: the loop's thread, or the one that sends heartbeats.
        self._write_lock = threading.Lock()
        self._stopping = False
        self._process = subprocess.Popen(
            ssh_argv(host, job),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},  # make_ssh_error reads its messages
            start_new_session=True,  # Ctrl-C is for the driver alone
        )
        pipes = [pipe for pipe in (self._process.stdin, self._process.stdout, self._process.stderr) if pipe is not None]
        self._in, out, err = (os.dup(pipe.fileno()) for pipe in pipes)
        for pipe in pipes:
            pipe.close()
        os.set_blocking(self._in, False)
        self._stdout = PipeReader(loop, out, self._handle_data, lambda: None)
        self._stderr = PipeReader(loop, err, self._handle_stderr, lambda: None)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._handle_exit)

    def handle(self, message: DriverMessage) -> None:
        """Send a message. Never waits; after the end of the connection the message is dropped."""
        if self._in < 0:
            return
        with self._write_lock:
            was_waiting = bool(self._unsent)
            self._unsent += encode_frame(message)
            if not was_waiting:
                self._write()
                if self._unsent:
                    self._loop.add_writer(self._in, self._handle_writable)

    def send_heartbeat(self, message: DriverHeartbeat) -> None:
        """Other threads may call this method, and no other one."""
        with self._write_lock:
            if not self._unsent and self._in >= 0:
                try:
                    # So few bytes go into a pipe as a whole or not at all.
                    os.write(self._in, encode_frame(message))
                except (BlockingIOError, BrokenPipeError):  # there is enough to read, or nobody who reads
                    pass

    def stop_agent(self) -> None:
        """Let the agent kill its ranks and end: then the connection is closed."""
        self.handle(StopAgent())
        self._stopping = True
        if not self._unsent:
            self._close_stdin()

    def close(self) -> None:
        """End ssh; call nothing any more. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._close_stdin()
        self._stdout.close()
        self._stderr.close()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(SSH_EXIT_TIMEOUT_S)

    def _close_stdin(self) -> None:
        """The agent takes the end of its input for StopAgent."""
        with self._write_lock:
            if self._in >= 0:
                self._loop.remove_writer(self._in)
                os.close(self._in)
                self._in = -1

    def _write(self) -> None:
        """Write as much as ssh takes now."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # ssh has ended, which _handle_exit is about to see
            self._unsent.clear()

    def _handle_writable(self) -> None:
        with self._write_lock:
            self._write()
            if not self._unsent:
                self._loop.remove_writer(self._in)
        if not self._unsent and self._stopping:
            self._close_stdin()

    def _handle_data(self, data: bytes) -> None:
        try:
            messages = self._frame_reader.feed(data)
        except ProtocolError as error:
            return self._close_with_error(HostError(f"its agent is of another version of ronde ({error})"))
        for message in messages:
            if not self.closed:
                self.on_report(message)

    def _handle_stderr(self, data: bytes) -> None:
        self._stderr_tail = (self._stderr_tail + data)[-STDERR_TAIL_BYTES:]

    def _handle_exit(self) -> None:
        # Read what ssh left in its pipes. Their end is not waited for: a process that ssh left behind may hold them.
        self._stdout.read_remaining()
        self._stderr.read_remaining()
        if not self.closed:
            stderr = (self._stderr_tail or self._frame_reader.text_before_preamble).decode(errors="replace")
            self._close_with_error(make_ssh_error(self._host, self._job, self._process.wait(), stderr))

    def _close_with_error(self, error: HostError) -> None:
        self.close()
        self._on_lost(error)
