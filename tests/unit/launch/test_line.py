"""The way to an agent: in this process, and through an ssh that is only a script."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ronde.launch.driver.hosts import LocalAgentConnection
from ronde.launch.driver.ssh import AgentConnection, HostError, SshAgentConnection, SshCommand
from ronde.launch.job import SshOptions
from ronde.launch.placement import Host
from ronde.launch.protocol import (
    AgentHello,
    AgentMessage,
    DriverHeartbeat,
    RankExited,
    RankOrder,
    RankOutput,
    StartRanks,
)
from ronde.net.event_loop import EventLoop

HERE = Host("localhost")
LIMIT_S = 20.0


class Ears:
    """Hears everything, and turns the loop until something was heard."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.heard: list[AgentMessage] = []
        self.troubles: list[HostError] = []

    def report(self, line: AgentConnection, message: AgentMessage) -> None:
        self.heard.append(message)

    def gone(self, line: AgentConnection, trouble: HostError) -> None:
        self.troubles.append(trouble)

    def await_heard(self, kind: type[AgentMessage]) -> None:
        self._await(lambda: any(isinstance(message, kind) for message in self.heard))

    def await_gone(self) -> HostError:
        self._await(lambda: bool(self.troubles))
        return self.troubles[0]

    def _await(self, true: Callable[[], bool]) -> None:
        timer = self.loop.call_later(LIMIT_S, lambda: None)
        self.loop.run_until(lambda: true() or not timer.pending)
        assert timer.pending, (self.heard, self.troubles)
        timer.cancel()


@pytest.fixture
def ears() -> Iterator[Ears]:
    ears = Ears()
    yield ears
    ears.loop.close()


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


def open_ssh(ears: Ears) -> SshAgentConnection:
    call = SshCommand(host=Host("b"), options=SshOptions(), python=sys.executable, cwd="/", heartbeat_s=10.0)
    return SshAgentConnection(ears.loop, call, ears.report, ears.gone)


def echo(text: str) -> StartRanks:
    return StartRanks((RankOrder(0, ("/bin/sh", "-c", f"echo {shlex.quote(text)}"), {}, "/"),))


def test_an_agent_in_this_process_works_and_ends(ears: Ears) -> None:
    line = LocalAgentConnection(ears.loop, HERE, ears.report, ears.gone)
    line.send(echo("hi"))
    ears.await_heard(RankExited)
    assert RankOutput(0, "out", b"hi\n") in ears.heard
    line.stop_agent()
    ears.await_gone()
    line.send(echo("too late"))
    line.close()


def test_an_agent_behind_ssh_works_and_ends(ears: Ears, ssh: Path) -> None:
    line = open_ssh(ears)
    ears.await_heard(AgentHello)
    line.send_heartbeat(DriverHeartbeat(60.0))
    line.send(echo("hi"))
    ears.await_heard(RankExited)
    assert RankOutput(0, "out", b"hi\n") in ears.heard
    line.stop_agent()
    assert ears.await_gone().last_line == ""
    line.send(echo("too late"))
    line.send_heartbeat(DriverHeartbeat(60.0))
    line.stop_agent()
    line.close()


def test_what_a_login_shell_prints_before_the_agent_is_not_taken_for_its_words(ears: Ears, ssh: Path) -> None:
    write(ssh, 'while [ "$1" != -- ]; do shift; done; echo Welcome to b; exec sh -c "$3"')
    line = open_ssh(ears)
    ears.await_heard(AgentHello)
    line.close()


def test_orders_larger_than_a_pipe_arrive_whole(ears: Ears, ssh: Path) -> None:
    line = open_ssh(ears)
    large = "x" * 100_000
    line.send(StartRanks(tuple(RankOrder(rank, ("/bin/true",), {"LARGE": large}, "/") for rank in range(20))))
    line.stop_agent()  # also the last word is heard
    ears.await_gone()
    line.close()


def test_the_end_of_ssh_is_told_with_its_reason(ears: Ears, ssh: Path) -> None:
    write(ssh, "echo 'ssh: connect to host b port 22: Connection refused' >&2; exit 255")
    line = open_ssh(ears)
    assert ears.await_gone().kind == "refused"
    line.close()


def test_a_shell_that_only_prints_is_told(ears: Ears, ssh: Path) -> None:
    write(ssh, "echo 'This account is currently not available.'; exit 1")
    line = open_ssh(ears)
    assert "not available" in ears.await_gone().reason
    line.close()


def test_an_agent_that_speaks_another_language_is_told_once(ears: Ears, ssh: Path) -> None:
    write(ssh, r"printf '\0ronde agent\0\0\0\0\4nope\0\0\0\4nope'; exec sleep 1000")
    line = open_ssh(ears)
    assert ears.await_gone().kind == "version"
    assert len(ears.troubles) == 1
    line.close()


def test_who_holds_the_pipes_of_a_dead_ssh_is_not_waited_for(ears: Ears, ssh: Path, tmp_path: Path) -> None:
    write(ssh, f"sleep 1000 & echo $! > {tmp_path}/pid; echo 'Connection closed' >&2; exit 255")
    line = open_ssh(ears)
    try:
        assert ears.await_gone().kind == "closed"
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    line.close()
