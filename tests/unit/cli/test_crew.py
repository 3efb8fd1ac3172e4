"""A crew talks to its ranks, says what went wrong with them, and leaves none behind. Ranks are tiny programs here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ronde.cli.bench.runner import BenchmarkFailed, PeerProcesses, RankPool
from ronde.types import Deadline

HELLO = """
import json, os, sys, time
directory, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
answers = open(f"{directory}/from-{rank}", "w")
commands = open(f"{directory}/to-{rank}")
def say(**answer):
    answers.write(json.dumps(answer) + chr(10))
    answers.flush()
say(size=size)
"""
ECHO = HELLO + "for line in commands:\n    say(rank=rank, heard=json.loads(line))"
"""It answers forever: `quit` does not end it, the end of its pipe does."""

Start = Callable[[Path], PeerProcesses]


def ranks(program: str, size: int) -> Start:
    def start(directory: Path) -> PeerProcesses:
        return PeerProcesses([[sys.executable, "-c", program, str(directory), str(r), str(size)] for r in range(size)])

    return start


def crew(program: str, size: int = 2, seconds: float = 30) -> RankPool:
    return RankPool("them", size, ranks(program, size), Deadline(seconds))


def test_every_rank_answers_in_its_place() -> None:
    them = crew(HELLO + "say(rank=rank, heard=json.loads(commands.readline()))\ncommands.readline()")
    answers = them.ask("talking", Deadline(30), do="tell", what=[1, 2])
    them.close()
    assert answers == [{"rank": rank, "heard": {"do": "tell", "what": [1, 2]}} for rank in range(2)]


def test_a_long_answer_arrives_whole() -> None:
    them = crew(HELLO + "commands.readline()\nsay(took=list(range(100_000)))\ncommands.readline()", size=1)
    (answer,) = them.ask("talking", Deadline(30), do="count")
    them.close()
    assert answer == {"took": list(range(100_000))}


def test_a_rank_that_crashes_is_reported_with_its_last_words() -> None:
    them = crew(HELLO + "commands.readline()\nif rank == 1: raise SystemExit('out of luck')\ncommands.readline()")
    with pytest.raises(BenchmarkFailed, match=r"them: (rank 1|process 1) ended(.|\n)* while playing(.|\n)*out of luck"):
        them.ask("playing", Deadline(30), do="play")
    them.close()


def test_an_error_inside_a_rank_is_passed_on() -> None:
    them = crew(HELLO + "commands.readline()\nsay(error='Traceback: no such path')\ncommands.readline()")
    with pytest.raises(BenchmarkFailed, match=r"them: rank [01] failed while preparing:\nTraceback: no such path"):
        them.ask("preparing", Deadline(30), do="prepare")
    them.close()


def test_ranks_that_do_not_start_are_reported_with_their_last_words() -> None:
    with pytest.raises(
        BenchmarkFailed, match=r"process 0 ended \(exited with code 1\) while starting\n(.|\n)*no such library"
    ):
        crew("raise SystemExit('no such library')")


def test_a_silent_rank_ends_at_the_deadline_and_is_named() -> None:
    them = crew(HELLO + "commands.readline()\nif rank != 1: say()\ncommands.readline()")
    with pytest.raises(BenchmarkFailed, match=r"them: waiting took over 0 s; no answer from ranks \[.*1\]"):
        them.ask("waiting", Deadline(0.3), do="wait")
    them.close()


def test_the_wrong_number_of_ranks_is_an_error() -> None:
    with pytest.raises(BenchmarkFailed, match="them started 7 ranks instead of 2"):
        crew(HELLO.replace("size=size", "size=7") + "commands.readline()")


def test_a_program_that_does_not_exist_leaves_nothing_behind() -> None:
    with pytest.raises(FileNotFoundError):
        RankPool("them", 1, lambda directory: PeerProcesses([["no-such-program-anywhere"]]), Deadline(30))


@pytest.mark.slow
def test_ranks_that_do_not_want_to_leave_are_ended_with_all_they_started() -> None:
    stubborn = """
import signal, subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
commands.readline()
say(pids=[os.getpid(), child.pid])
time.sleep(600)
"""
    them = crew(HELLO + stubborn, size=1)
    (answer,) = them.ask("talking", Deadline(30), do="tell")
    them._healthy = False  # as after a failure: do not wait for them to leave by themselves
    them.close()
    assert not any(psutil.pid_exists(pid) for pid in answer["pids"])


@pytest.mark.slow
def test_ranks_end_by_themselves_when_the_other_end_of_their_pipes_is_gone() -> None:
    parent = f"""
import os, sys
from pathlib import Path
from ronde.cli.bench.runner import RankPool
from ronde.cli.bench.runner import PeerProcesses
from ronde.types import Deadline
program = {ECHO!r}
start = lambda d: PeerProcesses([[sys.executable, "-c", program, str(d), str(r), "2"] for r in range(2)])
crew = RankPool("them", 2, start, Deadline(30))
print(*[p.pid for p in crew._started._running], crew._directory.name, flush=True)
os.kill(os.getpid(), 9)
"""
    killed = PeerProcesses(
        [[sys.executable, "-c", parent]], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    killed.wait(Deadline(30))
    *pids, directory = killed.tail().splitlines()[-1].split()
    killed.close()
    orphans = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(orphans, timeout=20)
    for path in Path(directory).iterdir():
        path.unlink()
    Path(directory).rmdir()
    assert alive == []
