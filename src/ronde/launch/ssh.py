"""How ssh is called for a host, and what its end means in words. Pure; the process itself is in line. Used by line.

Nothing secret is in the command: the job's key and the environment of ranks go through its standard input.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from ronde.launch.job import Host, Ssh
from ronde.observe.events import shorten

__all__ = ["SshCall", "Trouble", "no_directory"]

NO_DIRECTORY = 90
NO_PYTHON = 91
SSH_FAILED = 255
"""ssh's own status, when it was not the command that failed."""

_SCRIPT = (
    # Away from the working directory: `python -m` would import the user's files of any name before its own.
    f'cd / && test -d "$1" || exit {NO_DIRECTORY}; command -v "$2" >/dev/null || exit {NO_PYTHON}; '
    'exec "$2" -m ronde.launch.remote'
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a host cannot be used."""

    kind: str
    """One word, for programs."""
    why: str
    """For people, with what to do."""
    said: str = ""
    """The last line of what ssh or the agent said."""


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: str
    pattern: str
    advice: str


_OF_SSH = (
    _Rule("name", r"could not resolve hostname", "its name is not known; check the spelling, or give its address"),
    _Rule(
        "host key",
        r"host key verification failed|remote host identification has changed|no .* host key is known",
        "its host key is not trusted here; connect once with `ssh {host}` and compare it, or correct known_hosts",
    ),
    _Rule(
        "auth",
        r"permission denied|too many authentication failures|no supported authentication",
        "ssh was not let in; it needs a key without a password (`ssh-copy-id {host}`), another user or --ssh-identity",
    ),
    _Rule(
        "refused", r"connection refused", "nobody listens there; is sshd running, and is this its port (--ssh-port)?"
    ),
    _Rule(
        "unreachable",
        r"timed out|no route to host|network is unreachable|not responding|host is down",
        "it does not answer; is it up, and does a firewall let ssh through?",
    ),
    _Rule(
        "closed",
        r"connection (?:closed|reset)|kex_exchange_identification|broken pipe",
        "the connection was closed; look at the log of its sshd (MaxStartups, AllowUsers)",
    ),
    _Rule(
        "ssh",
        r"bad configuration option|unknown option|bad owner or permissions|unsupported option",
        "ssh's own configuration or options are wrong",
    ),
)
"""Looked through in this order, when ssh itself has failed."""

_OF_PYTHON = (
    _Rule(
        "ronde", r"no module named '?ronde\b", "{python} has no ronde, or an old one; install the same version there"
    ),
    _Rule("ronde", r"no module named", "{python} lacks what ronde needs; install ronde there with its dependencies"),
    _Rule("python", r"syntaxerror|unsupported operand", "{python} is too old; ronde needs 3.10 or newer"),
    _Rule("python", r"permission denied|exec format error|cannot execute", "{python} cannot be run"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SshCall:
    """One host, and what is needed to start an agent there."""

    host: Host
    ssh: Ssh
    python: str
    """Which has ronde there."""
    cwd: str
    """Has to exist there."""
    heartbeat_s: float
    """A host that is silent for so long is lost."""

    def command(self) -> list[str]:
        """The words to run."""
        ours = [
            f"ConnectTimeout={max(1, round(self.ssh.start_s))}",
            f"ServerAliveInterval={max(1, round(self.heartbeat_s / 3))}",
            "ServerAliveCountMax=3",
            # A master made here would stay behind when the job is over; one that exists is welcome.
            "ControlMaster=no",
            "ClearAllForwardings=yes",
            "ForwardX11=no",
        ]
        # Of an option given twice, ssh takes the first.
        options = ["BatchMode=yes", *self.ssh.options, *ours]
        return [
            "ssh",
            "-T",
            *(["-p", str(self.ssh.port)] if self.ssh.port else []),
            *(["-i", self.ssh.identity] if self.ssh.identity else []),
            *(word for option in options for word in ("-o", option)),
            "--",
            self.host.name,
            # Whatever the user's login shell is, it only has to start sh.
            shlex.join(["exec", "sh", "-c", _SCRIPT, "ronde", self.cwd, self.python]),
        ]

    def explain(self, status: int, said: str) -> Trouble:
        """What the end of ssh means: its exit status, and its standard error."""
        last = _telling_line(said, ".")
        if status == NO_DIRECTORY:
            return no_directory(self.cwd)
        if status == NO_PYTHON:
            return Trouble("python", f"there is no {self.python}; say which Python has ronde there (--python)")
        for rule in _OF_SSH if status == SSH_FAILED else _OF_PYTHON:
            line = _telling_line(said, rule.pattern)
            if line:
                return Trouble(
                    rule.kind, f"{rule.advice.format(host=self.host.name, python=self.python)} ({line})", last
                )
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return Trouble("ended", f"its agent {how}{f': {last}' if last else ' and said nothing'}", last)


def no_directory(cwd: str) -> Trouble:
    """Ranks could not start there."""
    return Trouble("cwd", f"there is no directory {cwd}; every rank starts there, so each host needs it (--cwd)")


def _telling_line(said: str, pattern: str) -> str:
    """The last line that says it."""
    lines = [line.strip() for line in said.splitlines() if re.search(pattern, line, re.IGNORECASE) and line.strip()]
    return shorten(lines[-1], 300) if lines else ""
