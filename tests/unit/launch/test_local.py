"""Processes as ranks: each knows its place, its end is seen and told, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ronde.coordinator.server import CoordinatorServer
from ronde.launch.local import LocalJob, start_local
from ronde.settings import Settings
from ronde.types import Deadline
from tests.unit.launch.agents import PATIENCE_S, ends

A_RANK = """
import os, sys
from ronde.comm.joining import connect_to_coordinator
from ronde.net.control import ControlClient
from ronde.net.keys import JobKey
from ronde.net.messages import VERSION, LeaveConfirmed, JoinRound, LeaveRound, RankLost, RoundStarted
from ronde.settings import Settings
from ronde.types import Deadline, Member

here = Settings.load()
key = JobKey(here.key)
line, control = connect_to_coordinator(
    here.coordinator, key, here.rank, round=0, deadline=Deadline(30), heartbeat_s=here.heartbeat_s
)
client = ControlClient(control, key, here.rank)
client.send(JoinRound(VERSION, 0, here.size, Member(here.rank, "here", os.getpid(), "")))

def hear(kind):
    while True:
        for message in client.poll(30):
            if isinstance(message, kind):
                return message

assert len(hear(RoundStarted).members) == here.size
"""


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@contextmanager
def captured(
    text: str, num_ranks: int, path: Path, **options: object
) -> Iterator[tuple[LocalJob, Callable[[int], str]]]:
    """A job whose ranks print to a file each, and a function that waits for all and reads a rank's."""
    paths = [path / f"rank{rank}" for rank in range(num_ranks)]
    files = [each.open("wb") for each in paths]
    try:
        with start_local(python(text), num_ranks, stdout=files, **options) as job:  # type: ignore[arg-type]

            def printed(rank: int) -> str:
                job.wait(Deadline(PATIENCE_S))
                return paths[rank].read_text()

            yield job, printed
    finally:
        for file in files:
            file.close()


def test_every_process_knows_its_place_and_shares_the_key(tmp_path: Path) -> None:
    text = (
        "from ronde.settings import Settings; s = Settings.load(); print(s.rank, s.size, s.coordinator_hosted, s.key)"
    )
    with captured(text, 3, tmp_path) as (job, printed):
        told = [printed(rank).split() for rank in range(3)]
        assert job.wait(Deadline(1)) == [0, 0, 0]
    assert [place[:3] for place in told] == [[str(rank), "3", "True"] for rank in range(3)]
    assert len({place[3] for place in told}) == 1 and len(told[0][3]) == 64


def test_settings_and_variables_reach_the_ranks(tmp_path: Path) -> None:
    text = "import os; from ronde.settings import Settings; print(Settings.load().stall_s, os.environ['MINE'])"
    with captured(text, 1, tmp_path, settings=Settings(stall_s=7.5), env={"MINE": "x"}) as (_, printed):
        assert printed(0).split() == ["7.5", "x"]


def test_the_key_is_on_no_command_line(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    text = f"import pathlib, signal; pathlib.Path({str(ready)!r}).write_text('now'); signal.pause()"
    with start_local(python(text), 1) as job:
        assert ready.read_text() == "now"
        key = psutil.Process(job.pids[0]).environ()["RONDE_KEY"]
        assert not any(key in word for word in psutil.Process(job.pids[0]).cmdline())


def test_exit_codes_are_told_by_rank() -> None:
    with start_local(python("import os; os._exit(int(os.environ['RONDE_RANK']) * 3)"), 3) as job:
        assert job.wait(Deadline(PATIENCE_S)) == [0, 3, 6]


def test_a_wait_that_is_too_short_names_who_still_runs() -> None:
    text = "import os, signal\nif os.environ['RONDE_RANK'] != '1': signal.pause()"
    with start_local(python(text), 3) as job:
        assert ends(job.pids[1])
        with pytest.raises(TimeoutError, match="of the job still running after 0 s"):
            job.wait(Deadline(0))


def test_every_end_is_told_to_the_coordinator_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, str] = {}
    monkeypatch.setattr(CoordinatorServer, "rank_exited", lambda self, rank, why: told.update({rank: why}))
    text = "import os, signal\nif os.environ['RONDE_RANK'] == '0': os._exit(3)\nsignal.raise_signal(signal.SIGKILL)"
    with start_local(python(text), 2) as job:
        assert job.wait(Deadline(PATIENCE_S)) == [3, -9]
    assert told == {0: "exited with code 3", 1: "killed by signal 9"}


def test_a_killed_rank_is_known_to_the_others_with_the_signal(tmp_path: Path) -> None:
    text = f"{A_RANK}\nprint(hear(RankLost) if here.rank == 0 else os.kill(os.getpid(), 9))"
    with captured(text, 2, tmp_path) as (job, printed):
        assert printed(0).strip() == "RankLost(rank=1, reason='killed by signal 9')"
        assert job.wait(Deadline(1)) == [0, -9]


def test_ranks_that_say_goodbye_end_well(tmp_path: Path) -> None:
    text = f"{A_RANK}\nclient.send(LeaveRound(True)); hear(LeaveConfirmed)"
    with captured(text, 2, tmp_path) as (job, printed):
        assert job.wait(Deadline(PATIENCE_S)) == [0, 0], printed(0) + printed(1)


def test_the_end_of_the_job_is_the_end_of_what_its_ranks_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    os.mkfifo(started)
    text = (
        "import pathlib, signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\n"
        "signal.pause()"
    )
    with start_local(python(text), 1) as job:
        grandchild = int(started.read_text())
        assert not ends(grandchild, 0)
    assert ends(grandchild)
    assert all(ends(pid, 0) for pid in job.pids)


def test_a_rank_that_does_not_want_to_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ronde.launch.local.TERMINATE_S", 0.1)
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    text = (
        "import pathlib, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(ready)!r}).write_text('now')\n"
        "while True: signal.pause()"
    )
    with start_local(python(text), 1) as job:
        assert ready.read_text() == "now"
        job.terminate()
        assert job.wait(Deadline(0)) == [-signal.SIGKILL]


def test_ranks_die_with_a_launcher_that_is_killed() -> None:
    launcher = (
        "import signal, sys\n"
        "from ronde.launch.local import start_local\n"
        "a_rank = 'import os, signal; os.write(1, b\"%d\\\\n\" % os.getpid()); signal.pause()'\n"
        "job = start_local([sys.executable, '-c', a_rank], 2)\n"
        "signal.pause()"
    )
    with subprocess.Popen(python(launcher), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        process.kill()
    assert all(ends(pid) for pid in pids)


@pytest.mark.parametrize(
    ("argv", "num_ranks", "words"),
    [
        (["no-such-command-here"], 2, "there is no command 'no-such-command-here'"),
        ([], 2, "there is no command ''"),
        (["true"], 0, "num_ranks must be at least 1, got 0"),
    ],
)
def test_a_job_that_cannot_start_says_why(argv: list[str], num_ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        start_local(argv, num_ranks)


def test_a_start_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalJob.add

    def add(self: LocalJob, *rest: object) -> None:
        if len(self.pids) == 1:
            raise OSError("no more processes")
        real(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalJob, "add", add)
    with pytest.raises(OSError, match="no more processes"):
        start_local(python("import signal; signal.pause()"), 3)
