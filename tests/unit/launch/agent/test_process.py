"""Process groups: started where and how they should, signalled and reaped as a whole; and why a start fails."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ronde.errors import StartFailed
from ronde.launch.agent.orphans import OrphanKiller
from ronde.launch.agent.process import ChildProcess, CommandNotExecutable, describe_spawn_error, spawn
from ronde.types import Deadline
from tests.unit.launch.agent.watched_agent import PATIENCE_S, ends, order, python


@pytest.fixture
def orphan_killer() -> Iterator[OrphanKiller]:
    made = OrphanKiller()
    yield made
    made.close()


def begin(
    orphan_killer: OrphanKiller, *argv: str, stdout: int = subprocess.DEVNULL, cwd: str = "", cpus: tuple[int, ...] = ()
) -> ChildProcess:
    return spawn(order(argv, cwd=cwd, cpus=cpus), orphan_killer, stdin=subprocess.DEVNULL, stdout=stdout, stderr=2)


def read_line(fd: int) -> str:
    with os.fdopen(fd) as file:
        return file.readline()


def finish(process: ChildProcess) -> int:
    assert process.wait(Deadline(PATIENCE_S))
    return process.reap()


def test_a_process_leads_a_session_and_a_group_of_its_own(orphan_killer: OrphanKiller) -> None:
    process = begin(orphan_killer, "sleep", "300")
    assert os.getpgid(process.pid) == os.getsid(process.pid) == process.pid
    assert not process.wait(Deadline(0))
    process.signal(signal.SIGKILL)
    assert finish(process) == -9


def test_a_signal_reaches_what_a_process_started(orphan_killer: OrphanKiller) -> None:
    reading, writing = os.pipe()
    process = begin(orphan_killer, "sh", "-c", "sleep 300 & echo $!; wait", stdout=writing)
    os.close(writing)
    child = int(read_line(reading))
    process.signal(signal.SIGTERM)
    assert finish(process) == -signal.SIGTERM
    assert ends(child)


def test_a_process_gets_its_cores_and_we_keep_ours(orphan_killer: OrphanKiller) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    reading, writing = os.pipe()
    text = "import os; print(*os.sched_getaffinity(0))"
    process = begin(orphan_killer, *python(text), stdout=writing, cpus=(core,))
    os.close(writing)
    assert read_line(reading).split() == [str(core)]
    finish(process)
    assert os.sched_getaffinity(0) == before


def test_cores_that_are_not_there_are_named(orphan_killer: OrphanKiller) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(StartFailed, match=r"cannot be bound to core 100000: host \S+ lets us use 0"):
        begin(orphan_killer, "true", cpus=(100_000,))
    assert os.sched_getaffinity(0) == before


def test_a_command_that_cannot_start_says_why_and_what_to_do(orphan_killer: OrphanKiller, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print()")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\0\1\2\3")
    garbage.chmod(0o755)
    nowhere = str(tmp_path / "nowhere")
    for argv, cwd, kind, words in (
        (("no-such-command",), "", StartFailed, "there is no command 'no-such-command' on host .* check PATH"),
        (
            (str(script),),
            "",
            CommandNotExecutable,
            r"train.py' may not be executed .* start it with python, or chmod \+x",
        ),
        ((str(garbage),), "", CommandNotExecutable, "garbage' is no program for host"),
        (("true",), nowhere, StartFailed, f"the working directory {nowhere} does not exist on host .* every host has"),
        (("true",), str(script), StartFailed, r"train.py cannot be entered \(Not a directory\)"),
        (("true", "\0"), "", StartFailed, "cannot be handed to a process: embedded null byte"),
        (("true", "x" * 10_000_000), "", StartFailed, "larger than the system allows"),
    ):
        with pytest.raises(StartFailed, match=words) as caught:
            begin(orphan_killer, *argv, cwd=cwd)
        assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EAGAIN, r"no more processes may be started; raise the limit \(ulimit -u\)"),
        (errno.EMFILE, r"no more files may be open; raise the limit \(ulimit -n\)"),
        (errno.ENOMEM, "there is no memory for another process"),
        (errno.EIO, "'train' could not be started on host .*: Input/output error"),
    ],
)
def test_what_the_system_lacks_is_told(number: int, words: str) -> None:
    failed = describe_spawn_error(OSError(number, os.strerror(number)), order(("train",)))
    assert re.search(words, str(failed))
