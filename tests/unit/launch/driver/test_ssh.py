"""How ssh is called, what its end means, and the connection to an agent through an ssh that is only a script."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ronde.launch.driver.ssh import (
    NO_DIRECTORY_STATUS,
    NO_PYTHON_STATUS,
    HostError,
    SshAgentConnection,
    make_ssh_error,
    ssh_argv,
)
from ronde.launch.job import Job, SshOptions
from ronde.launch.placement import Host
from ronde.launch.protocol import AgentHello, AgentMessage, DriverHeartbeat, RankExit, RankOrder, RankOutput, StartRanks
from ronde.net.event_loop import EventLoop
from tests.unit.launch.agent.watched_agent import PATIENCE_S

NODE = Host("me@node7")


def job(*, ssh: SshOptions | None = None, cwd: str = "/data/my job", python: str = "/opt/python3") -> Job:
    return Job(command=("true",), num_ranks=1, ssh=ssh or SshOptions(), cwd=cwd, python=python)


def test_the_user_s_options_win_but_for_questions_that_nobody_could_answer() -> None:
    plain = ssh_argv(NODE, job())
    assert plain[0] == "ssh" and plain[-3:-1] == ["--", "me@node7"] and "-p" not in plain and "-i" not in plain
    chosen = SshOptions(port=2022, identity="/keys/id", options=("BatchMode=no", "ConnectTimeout=99"))
    words = ssh_argv(NODE, job(ssh=chosen))
    assert words[words.index("-p") + 1] == "2022" and words[words.index("-i") + 1] == "/keys/id"
    given = [word for before, word in itertools.pairwise(words) if before == "-o"]
    assert {"ControlMaster=no", "ServerAliveInterval=3"} <= set(given), "nothing is left to a master"
    assert given.index("BatchMode=yes") < given.index("BatchMode=no"), "the first counts"
    assert given.index("ConnectTimeout=99") < given.index("ConnectTimeout=20")


def run_remotely(cwd: Path, python: str) -> int:
    """What a login shell does with the command."""
    command = ["sh", "-c", ssh_argv(NODE, job(cwd=str(cwd), python=python))[-1]]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30).returncode


def test_the_remote_command_survives_any_name(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s a "$HOME" `dir`'
    odd.mkdir()
    python = odd / "python"
    python.write_text(f'#!/bin/sh\nprintf \'%s\\n\' "$PWD" "$@" > {shlex.quote(str(tmp_path / "said"))}\nexit 7\n')
    python.chmod(0o755)
    assert run_remotely(odd, str(python)) == 7
    # Not in the working directory, whose files `python -m` would import.
    assert (tmp_path / "said").read_text().split() == ["/", "-m", "ronde.launch.agent"]


def test_a_missing_directory_and_a_missing_python_have_a_status_of_their_own(tmp_path: Path) -> None:
    assert run_remotely(tmp_path / "none", sys.executable) == NO_DIRECTORY_STATUS
    assert run_remotely(tmp_path, "no-such-python") == NO_PYTHON_STATUS


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (255, "ssh: Could not resolve hostname node7: Name or service not known", "check the spelling"),
        (255, "ssh: connect to host node7 port 22: Connection refused", "--ssh-port"),
        (255, "ssh: connect to host node7 port 22: Connection timed out", "firewall"),
        (255, "ssh: connect to host node7 port 22: No route to host", "firewall"),
        (255, "me@node7: Permission denied (publickey,password).", "ssh-copy-id me@node7"),
        (255, "Received disconnect: Too many authentication failures", "--ssh-identity"),
        (255, "Host key verification failed.", "known_hosts"),
        (255, "kex_exchange_identification: Connection closed by remote host", "sshd"),
        (255, "command-line: line 0: Bad configuration option: nonsense", "options are wrong"),
        (255, "Timeout, server node7 not responding.", "not responding"),
        (1, "/opt/python3: No module named ronde", "install the same version"),
        (1, "ModuleNotFoundError: No module named 'ronde'", "install the same version"),
        (1, "ModuleNotFoundError: No module named 'msgspec'", "dependencies"),
        (1, '  File "x.py"\nSyntaxError: invalid syntax', "too old"),
        (126, "sh: 1: exec: /opt/python3: Permission denied", "cannot be run"),
        (NO_PYTHON_STATUS, "", "there is no /opt/python3"),
        (NO_DIRECTORY_STATUS, "", "there is no directory /data/my job"),
        (-15, "", "killed by signal 15"),
        (3, "", "(exited with code 3) and printed nothing"),
        (3, "one\ntwo\n\n", "(exited with code 3): two"),
        (1, "OSError: Connection refused", "its agent has ended"),  # not the words of ssh
    ],
)
def test_the_reason_is_found_in_what_ssh_says(status: int, said: str, words: str) -> None:
    assert words in make_ssh_error(NODE, job(), status, said).reason


def test_the_line_that_tells_is_shown_and_not_the_noise_around_it() -> None:
    said = "Warning: Permanently added 'node7'\nme@node7: Permission denied (publickey).\nbye\n"
    error = make_ssh_error(NODE, job(), 255, said)
    assert error.reason.endswith("(me@node7: Permission denied (publickey).)") and error.last_line == "bye"


# --- the connection ---------------------------------------------------------------------------------------------


class Received:
    """All that came over a connection; turns the loop until something has."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.messages: list[AgentMessage] = []
        self.errors: list[HostError] = []

    def wait_for(self, kind: type[AgentMessage]) -> None:
        self._wait(lambda: any(isinstance(message, kind) for message in self.messages))

    def wait_for_end(self) -> HostError:
        self._wait(lambda: bool(self.errors))
        return self.errors[0]

    def _wait(self, true: Callable[[], bool]) -> None:
        timer = self.loop.call_later(PATIENCE_S, lambda: None)
        self.loop.run_until(lambda: true() or not timer.pending)
        assert timer.pending, (self.messages, self.errors)
        timer.cancel()


@pytest.fixture
def received() -> Iterator[Received]:
    received = Received()
    yield received
    received.loop.close()


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the place of ssh; it runs the remote command here, unless a test writes another."""
    path = tmp_path / "ssh"
    write(path, 'while [ "$1" != -- ]; do shift; done; exec sh -c "$3"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return path


def write(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def open_ssh(received: Received) -> SshAgentConnection:
    here = job(cwd="/", python=sys.executable)
    return SshAgentConnection(received.loop, Host("b"), here, received.messages.append, received.errors.append)


def echo(text: str) -> StartRanks:
    return StartRanks((RankOrder(0, ("/bin/sh", "-c", f"echo {shlex.quote(text)}"), {}, "/"),))


def test_an_agent_works_and_ends(received: Received, ssh: Path) -> None:
    connection = open_ssh(received)
    received.wait_for(AgentHello)
    connection.send_heartbeat(DriverHeartbeat(60.0))
    connection.handle(echo("hi"))
    received.wait_for(RankExit)
    assert RankOutput(0, "out", b"hi\n") in received.messages
    connection.stop_agent()
    assert received.wait_for_end().last_line == "" and connection.closed
    connection.handle(echo("too late"))
    connection.send_heartbeat(DriverHeartbeat(60.0))
    connection.close()


def test_orders_larger_than_a_pipe_arrive_whole_also_from_a_shell_that_prints(received: Received, ssh: Path) -> None:
    write(ssh, 'while [ "$1" != -- ]; do shift; done; echo Welcome to b; exec sh -c "$3"')
    connection = open_ssh(received)
    received.wait_for(AgentHello)
    large = "x" * 100_000
    connection.handle(StartRanks(tuple(RankOrder(rank, ("/bin/true",), {"LARGE": large}, "/") for rank in range(20))))
    connection.stop_agent()  # also the last word is heard
    received.wait_for_end()
    connection.close()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'ssh: connect to host b port 22: Connection refused' >&2; exit 255", "nobody listens there"),
        ("echo 'This account is currently not available.'; exit 1", "not available."),
        (r"printf '\0ronde agent\0\0\0\0\4nope\0\0\0\4nope'; exec sleep 1000", "agent is of another version of ronde"),
        ("sleep 1000 & echo $! > pid; echo 'Connection closed' >&2; exit 255", "the connection was closed"),
    ],
    ids=["refused", "shell", "version", "who holds the pipes of a dead ssh is not waited for"],
)
def test_the_end_is_told_once_with_its_reason(
    received: Received, ssh: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.chdir(ssh.parent)
    write(ssh, script)
    connection = open_ssh(received)
    assert reason in received.wait_for_end().reason
    assert len(received.errors) == 1
    connection.close()
    if Path("pid").exists():
        os.kill(int(Path("pid").read_text()), signal.SIGKILL)
