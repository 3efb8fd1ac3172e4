"""How ssh is called for a host, and what its end means in words. Pure; the process itself is in line. Used by line.

Nothing secret is in the command: the job's key and the environment of ranks go through its standard input.

The way from the driver to the agent of one host: in the driver's own process, or through ssh. Used by crew.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Protocol, TypeAlias

from ronde.errors import ProtocolError
from ronde.launch.job import SshOptions
from ronde.launch.placement import Host
from ronde.launch.protocol import (
    AgentMessage,
    DriverHeartbeat,
    DriverMessage,
    StopAgent,
    encode_frame,
    make_agent_message_reader,
)
from ronde.net.event_loop import EventLoop
from ronde.text import shorten

__all__ = [
    "AgentConnection",
    "HostError",
    "OnAgentLost",
    "OnAgentMessage",
    "SshAgentConnection",
    "SshCommand",
    "make_missing_directory_error",
]

NO_DIRECTORY_STATUS = 90
NO_PYTHON_STATUS = 91
SSH_FAILED_STATUS = 255
"""ssh's own status, when it was not the command that failed."""

_REMOTE_SCRIPT = (
    # Away from the working directory: `python -m` would import the user's files of any name before its own.
    f'cd / && test -d "$1" || exit {NO_DIRECTORY_STATUS}; command -v "$2" >/dev/null || exit {NO_PYTHON_STATUS}; '
    'exec "$2" -m ronde.launch.agent'
)


@dataclass(frozen=True, slots=True)
class HostError:
    """Why a host cannot be used."""

    kind: str
    """One word, for programs."""
    reason: str
    """For people, with what to do."""
    last_line: str = ""
    """The last line of what ssh or the agent said."""


@dataclass(frozen=True, slots=True)
class _SshErrorPattern:
    kind: str
    pattern: str
    advice: str


_SSH_ERRORS = (
    _SshErrorPattern(
        "name", r"could not resolve hostname", "its name is not known; check the spelling, or give its address"
    ),
    _SshErrorPattern(
        "host key",
        r"host key verification failed|remote host identification has changed|no .* host key is known",
        "its host key is not trusted here; connect once with `ssh {host}` and compare it, or correct known_hosts",
    ),
    _SshErrorPattern(
        "auth",
        r"permission denied|too many authentication failures|no supported authentication",
        "ssh was not let in; it needs a key without a password (`ssh-copy-id {host}`), another user or --ssh-identity",
    ),
    _SshErrorPattern(
        "refused", r"connection refused", "nobody listens there; is sshd running, and is this its port (--ssh-port)?"
    ),
    _SshErrorPattern(
        "unreachable",
        r"timed out|no route to host|network is unreachable|not responding|host is down",
        "it does not answer; is it up, and does a firewall let ssh through?",
    ),
    _SshErrorPattern(
        "closed",
        r"connection (?:closed|reset)|kex_exchange_identification|broken pipe",
        "the connection was closed; look at the log of its sshd (MaxStartups, AllowUsers)",
    ),
    _SshErrorPattern(
        "ssh",
        r"bad configuration option|unknown option|bad owner or permissions|unsupported option",
        "ssh's own configuration or options are wrong",
    ),
)
"""Looked through in this order, when ssh itself has failed."""

_PYTHON_ERRORS = (
    _SshErrorPattern(
        "ronde", r"no module named '?ronde\b", "{python} has no ronde, or an old one; install the same version there"
    ),
    _SshErrorPattern(
        "ronde", r"no module named", "{python} lacks what ronde needs; install ronde there with its dependencies"
    ),
    _SshErrorPattern("python", r"syntaxerror|unsupported operand", "{python} is too old; ronde needs 3.10 or newer"),
    _SshErrorPattern("python", r"permission denied|exec format error|cannot execute", "{python} cannot be run"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SshCommand:
    """One host, and what is needed to start an agent there."""

    host: Host
    options: SshOptions
    python: str
    """Which has ronde there."""
    cwd: str
    """Has to exist there."""
    heartbeat_s: float
    """A host that is silent for so long is lost."""

    def argv(self) -> list[str]:
        """The words to run."""
        ours = [
            f"ConnectTimeout={max(1, round(self.options.start_s))}",
            f"ServerAliveInterval={max(1, round(self.heartbeat_s / 3))}",
            "ServerAliveCountMax=3",
            # A master made here would stay behind when the job is over; one that exists is welcome.
            "ControlMaster=no",
            "ClearAllForwardings=yes",
            "ForwardX11=no",
        ]
        # Of an option given twice, ssh takes the first.
        options = ["BatchMode=yes", *self.options.options, *ours]
        return [
            "ssh",
            "-T",
            *(["-p", str(self.options.port)] if self.options.port else []),
            *(["-i", self.options.identity] if self.options.identity else []),
            *(word for option in options for word in ("-o", option)),
            "--",
            self.host.name,
            # Whatever the user's login shell is, it only has to start sh.
            shlex.join(["exec", "sh", "-c", _REMOTE_SCRIPT, "ronde", self.cwd, self.python]),
        ]

    def make_host_error(self, status: int, stderr: str) -> HostError:
        """What the end of ssh means: its exit status, and its standard error."""
        last = _find_line(stderr, ".")
        if status == NO_DIRECTORY_STATUS:
            return make_missing_directory_error(self.cwd)
        if status == NO_PYTHON_STATUS:
            return HostError("python", f"there is no {self.python}; say which Python has ronde there (--python)")
        for rule in _SSH_ERRORS if status == SSH_FAILED_STATUS else _PYTHON_ERRORS:
            line = _find_line(stderr, rule.pattern)
            if line:
                return HostError(
                    rule.kind, f"{rule.advice.format(host=self.host.name, python=self.python)} ({line})", last
                )
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return HostError("ended", f"its agent {how}{f': {last}' if last else ' and said nothing'}", last)


def make_missing_directory_error(cwd: str) -> HostError:
    """Ranks could not start there."""
    return HostError("cwd", f"there is no directory {cwd}; every rank starts there, so each host needs it (--cwd)")


def _find_line(stderr: str, pattern: str) -> str:
    """The last line that says it."""
    lines = [line.strip() for line in stderr.splitlines() if re.search(pattern, line, re.IGNORECASE) and line.strip()]
    return shorten(lines[-1], 300) if lines else ""


READ_BYTES = 1 << 18
STDERR_TAIL_BYTES = 8192
"""So much of what ssh says is kept, from its end."""
REAP_TIMEOUT_S = 5.0
"""A killed process ends at once, unless the kernel is busy for it."""


class AgentConnection(Protocol):
    """What the driver needs of an agent, wherever it is."""

    host: Host

    def send(self, message: DriverMessage) -> None:
        """Tell the agent. Never waits; after the end of the line it is forgotten."""

    def send_heartbeat(self, message: DriverHeartbeat) -> None:
        """Tell it that the driver lives. The one method for other threads."""

    def set_reading_paused(self, paused: bool) -> None:
        """Leave what the agent says where it is, or go on: its ranks wait then, and nothing is lost."""

    def stop_agent(self) -> None:
        """Kill what runs there and end: `gone` is called when that is done, and nothing afterwards."""

    def close(self) -> None:
        """Be ended when this returns, and call nobody. Idempotent."""


OnAgentMessage: TypeAlias = Callable[[AgentConnection, AgentMessage], None]
OnAgentLost: TypeAlias = Callable[[AgentConnection, HostError], None]


class SshAgentConnection:
    """To an agent at the other end of an ssh connection."""

    def __init__(self, loop: EventLoop, command: SshCommand, on_message: OnAgentMessage, on_lost: OnAgentLost) -> None:
        self.host = command.host
        self._loop = loop
        self._command = command
        self._on_message = on_message
        self._on_lost = on_lost
        self._frame_reader = make_agent_message_reader()
        self._stderr_tail = b""
        self._unsent = bytearray()
        self._write_lock = threading.Lock()
        """Who holds it may write to ssh."""
        self._stopping = False
        self._closed = False
        self._paused = False
        self._process = subprocess.Popen(
            command.argv(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "LC_ALL": "C"},  # its words are read by explain()
            start_new_session=True,  # Ctrl-C is for the driver to hear
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._in, self._out, self._err = (_set_nonblocking(pipe) for pipe in self._pipes)
        loop.add_reader(self._out, self._read)
        loop.add_reader(self._err, self._read_stderr)
        loop.add_reader(self._pidfd, self._reap)

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        return process.stdin, process.stdout, process.stderr

    def send(self, message: DriverMessage) -> None:
        """See AgentLine."""
        if self._in < 0:
            return
        with self._write_lock:
            waits = bool(self._unsent)
            self._unsent += encode_frame(message)
            if not waits:
                self._write()
                if self._unsent:
                    self._loop.add_writer(self._in, self._handle_writable)

    def send_heartbeat(self, message: DriverHeartbeat) -> None:
        """See AgentLine."""
        with self._write_lock:
            if not self._unsent and self._in >= 0:
                try:
                    # So few bytes go into a pipe as a whole or not at all.
                    os.write(self._in, encode_frame(message))
                except (BlockingIOError, BrokenPipeError):  # it hears enough, or nothing any more
                    pass

    def set_reading_paused(self, paused: bool) -> None:
        """See AgentLine. The agent's own buffers fill up, and it pauses its ranks."""
        if self._closed or paused == self._paused:
            return
        self._paused = paused
        if paused:
            self._loop.remove_reader(self._out)
        else:
            self._loop.add_reader(self._out, self._read)

    def stop_agent(self) -> None:
        """See AgentLine."""
        self.send(StopAgent())
        self._stopping = True
        if not self._unsent:
            self._close_stdin()

    def close(self) -> None:
        """See AgentLine."""
        if self._closed:
            return
        self._closed = True
        self._close_stdin()
        for fd in (self._out, self._err, self._pidfd):
            self._loop.remove_reader(fd)
        os.close(self._pidfd)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(REAP_TIMEOUT_S)
        for pipe in self._pipes:
            pipe.close()

    def _close_stdin(self) -> None:
        """The agent takes the end of its input for Quit."""
        with self._write_lock:
            if self._in >= 0:
                self._loop.remove_writer(self._in)
                self._in = -1
                self._pipes[0].close()

    def _write(self) -> None:
        """As much as goes without waiting."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # ssh has ended, and that is about to be heard
            self._unsent.clear()

    def _handle_writable(self) -> None:
        with self._write_lock:
            self._write()
            if not self._unsent:
                self._loop.remove_writer(self._in)
        if not self._unsent and self._stopping:
            self._close_stdin()

    def _read(self) -> None:
        data = _read_available(self._out)
        if data:
            self._handle_data(data)
        elif data == b"":
            self._loop.remove_reader(self._out)  # ssh is about to end, which says more

    def _handle_data(self, data: bytes) -> None:
        try:
            messages = self._frame_reader.feed(data)
        except ProtocolError as error:
            return self._close_with_error(
                HostError("version", f"it does not speak the language of this ronde ({error})")
            )
        for message in messages:
            if not self._closed:
                self._on_message(self, message)

    def _read_stderr(self) -> None:
        data = _read_available(self._err)
        if data:
            self._stderr_tail = (self._stderr_tail + data)[-STDERR_TAIL_BYTES:]
        elif data == b"":
            self._loop.remove_reader(self._err)

    def _reap(self) -> None:
        """ssh has ended: hear what it left in its pipes, then say so."""
        # A process that ssh left in the background may hold the pipes: so their end is not waited for.
        while not self._closed and (data := _read_available(self._out)):
            self._handle_data(data)
        if self._closed:
            return
        while data := _read_available(self._err):
            self._stderr_tail = (self._stderr_tail + data)[-STDERR_TAIL_BYTES:]
        said = (self._stderr_tail or self._frame_reader.text_before_preamble).decode(errors="replace")
        self._close_with_error(self._command.make_host_error(self._process.wait(), said))

    def _close_with_error(self, error: HostError) -> None:
        self.close()
        self._on_lost(self, error)


def _set_nonblocking(pipe: IO[bytes]) -> int:
    os.set_blocking(pipe.fileno(), False)
    return pipe.fileno()


def _read_available(fd: int) -> bytes | None:
    """What is there; nothing at its end, None when there is nothing yet."""
    try:
        return os.read(fd, READ_BYTES)
    except BlockingIOError:
        return None
