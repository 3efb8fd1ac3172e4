"""The agent at the other end of a connection: frames in, frames out, and gone with either."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from ronde.exit_codes import NOT_STARTED_CODE
from ronde.launch.protocol import (
    PREAMBLE,
    AgentError,
    AgentHello,
    AgentMessage,
    AgentStopping,
    DriverHeartbeat,
    DriverMessage,
    RankExit,
    RankOrder,
    RankOutput,
    RankStarted,
    StartRanks,
    StopAgent,
    encode_frame,
    make_agent_message_reader,
)
from ronde.types import Deadline
from tests.limits import promised_s
from tests.unit.launch.agent.watched_agent import PATIENCE_S, ends, python

T = TypeVar("T")

STUBBORN = ("sh", "-c", "trap '' TERM HUP INT; (sleep 300; true) & echo $$ $!; wait")


class RemoteAgent:
    """An agent in a process of its own, as its driver sees it."""

    def __init__(self, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ronde.launch.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **environ},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.orders, self.frames = self.process.stdin, self.process.stdout
        self.reader = make_agent_message_reader()
        self.reports: list[AgentMessage] = []

    def send(self, message: DriverMessage) -> None:
        self.orders.write(encode_frame(message))

    def start(self, *argv: str, env: dict[str, str] | None = None, terminate_s: float = 0.1) -> None:
        order = RankOrder(0, argv, {"PATH": os.environ["PATH"], **(env or {})}, "/")
        self.send(StartRanks((order,), terminate_s=terminate_s))

    def wait_for(self, kind: type[T]) -> T:
        """The first report of this kind."""
        deadline = Deadline(PATIENCE_S)
        while True:
            for report in self.reports:
                if isinstance(report, kind):
                    return report
            assert select.select([self.frames], [], [], deadline.remaining_s)[0], f"no {kind.__name__} came"
            data = os.read(self.frames.fileno(), 1 << 16)
            assert data, f"it ended without {kind.__name__}"
            self.reports += self.reader.feed(data)

    def printed(self) -> bytes:
        return b"".join(report.data for report in self.reports if isinstance(report, RankOutput))

    def stubborn_pids(self) -> list[int]:
        """A rank that ignores signals, and its child."""
        self.start(*STUBBORN)
        self.wait_for(RankOutput)
        return [*map(int, self.printed().split())]


@contextmanager
def a_remote_agent(**environ: str) -> Iterator[RemoteAgent]:
    remote = RemoteAgent(**environ)
    try:
        yield remote
    finally:
        remote.orders.close()
        try:
            remote.process.wait(PATIENCE_S)
        finally:
            remote.process.kill()
            remote.frames.close()


def test_the_user_of_the_host_keeps_his_own_variables() -> None:
    with a_remote_agent(HOME="/home/there", SHELL="/bin/there", SECRET="x") as remote:
        remote.start("/usr/bin/env", env={"SHELL": "/bin/given"})
        remote.wait_for(RankExit)
        variables = remote.printed().decode().split()
        assert "HOME=/home/there" in variables and "SHELL=/bin/given" in variables and "SECRET=x" not in variables


def test_nothing_else_gets_between_the_frames() -> None:
    text = (
        "import os, sys\n"
        "sys.path.insert(0, '')\n"
        "from ronde.launch.agent import agent\n"
        "real = agent.make_hello\n"
        "def hello(): os.write(1, b'noise'); print('noise', flush=True); return real()\n"
        "agent.make_hello = hello\n"
        "agent.main()"
    )
    done = subprocess.run([sys.executable, "-c", text], input=b"", capture_output=True, timeout=PATIENCE_S, check=True)
    assert b"noise" in done.stderr and b"noise" not in done.stdout
    assert done.stdout.startswith(PREAMBLE)


@pytest.mark.parametrize("how", ["quit", "end of orders", "end of reports", "killed", "terminated", "hung up"])
def test_nothing_stays_behind_however_it_ends(how: str) -> None:
    with a_remote_agent() as remote:
        pids = remote.stubborn_pids()
        match how:
            case "quit":
                remote.send(StopAgent())
            case "end of orders":
                remote.orders.close()
            case "end of reports":
                remote.frames.close()  # it notices with its next report: the load, once per second
            case "killed":
                remote.process.kill()
            case "terminated":
                remote.process.terminate()
            case "hung up":
                remote.process.send_signal(signal.SIGHUP)
        assert all(ends(pid, promised_s(5.0)) for pid in (*pids, remote.process.pid))


def test_an_agent_that_is_terminated_lets_its_ranks_end_in_good_order(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    saves = f"trap 'echo saving; read line < {fifo}; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    with a_remote_agent() as remote:
        remote.start("sh", "-c", saves, terminate_s=PATIENCE_S)
        remote.wait_for(RankOutput)
        remote.process.terminate()
        assert remote.wait_for(AgentStopping).reason == "it got SIGTERM"
        remote.start("true")
        assert remote.wait_for(RankExit).exit_code == NOT_STARTED_CODE, "no rank is started any more"
        remote.reports = [report for report in remote.reports if not isinstance(report, RankExit)]
        fifo.write_text("go on\n")
        assert remote.wait_for(RankExit).exit_code == 0
        assert remote.process.wait(PATIENCE_S) == 0
        words = [word for word in remote.printed().split() if word != b"Terminated"]  # what the shell started
        assert words == [b"ready", b"saving", b"saved"]


def test_a_driver_that_sends_nothing_after_its_first_heartbeat_is_given_up() -> None:
    with a_remote_agent() as remote:
        pids = remote.stubborn_pids()
        remote.send(DriverHeartbeat(0.3))
        assert all(ends(pid) for pid in pids)


def test_a_driver_that_goes_on_sending_heartbeats_is_waited_for() -> None:
    with a_remote_agent() as remote:
        remote.wait_for(AgentHello)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 3.5:
            remote.send(DriverHeartbeat(3.0))
            assert remote.process.poll() is None
            select.select([], [], [], 0.1)
        remote.start("true")
        assert remote.wait_for(RankExit).exit_code == 0


def test_orders_that_make_no_sense_are_told_and_end_it() -> None:
    with a_remote_agent() as remote:
        remote.wait_for(AgentHello)
        remote.orders.write(b"\0\0\0\4what")
        assert "did not understand its orders: not a message" in remote.wait_for(AgentError).reason
        assert remote.process.wait(PATIENCE_S) == 0


def test_a_driver_that_does_not_read_makes_ranks_wait_and_loses_nothing() -> None:
    num = 3000
    text = f"import os\nfor n in range({num}): os.write(1, b'%08d' % n * 1250)"
    with a_remote_agent() as remote:
        remote.start(*python(text))
        rank = psutil.Process(remote.wait_for(RankStarted).pid)
        before, now = -1, 0
        while before != now or not now:  # until it waits for a reader; first it has to start
            select.select([], [], [], 0.1)
            before, now = now, rank.io_counters().write_chars
        assert 0 < now < 8_000_000
        assert remote.wait_for(RankExit).exit_code == 0
        assert remote.printed() == b"".join(b"%08d" % n * 1250 for n in range(num))


def test_it_starts_without_what_only_ranks_need() -> None:
    heavy = "{'numpy', 'zmq', 'typer', 'rich', 'cloudpickle', 'asyncio', 'ronde.comm'}"
    text = f"import sys, ronde.launch.agent.agent; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "[]\n"
