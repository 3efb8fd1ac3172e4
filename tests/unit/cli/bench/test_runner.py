"""Ranks get commands and reply, what goes wrong with them is reported, and none is left behind; implementations are
measured in turn. Ranks are tiny programs here, or fakes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from ronde.cli.bench.allreduce import AllreduceCase, measure_cases
from ronde.cli.bench.runner import (
    TRIAL_STEPS,
    BenchmarkFailed,
    BenchmarkRunner,
    MeasurementBudget,
    PeerProcesses,
    RankPool,
    RondeProcesses,
    describe_lack_of_memory,
)
from ronde.types import Deadline

HELLO = """
import json, os, sys, time
directory, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
replies = open(f"{directory}/from-{rank}", "w")
commands = open(f"{directory}/to-{rank}")
def reply(**fields):
    replies.write(json.dumps(fields) + chr(10))
    replies.flush()
reply(size=size)
"""
ECHO = HELLO + "for line in commands:\n    reply(rank=rank, command=json.loads(line))"
"""It answers forever: `quit` does not end it, the end of its pipe does."""


def pool_of(program: str, size: int = 2, seconds: float = 30) -> RankPool:
    def start(directory: Path) -> PeerProcesses:
        return PeerProcesses([[sys.executable, "-c", program, str(directory), str(r), str(size)] for r in range(size)])

    return RankPool("them", size, start, Deadline(seconds))


def test_replies_come_by_rank() -> None:
    pool = pool_of(HELLO + "reply(rank=rank, command=json.loads(commands.readline()))\ncommands.readline()")
    replies = pool.request("talking", Deadline(30), do="print", what=[1, 2])
    pool.close()
    assert replies == [{"rank": rank, "command": {"do": "print", "what": [1, 2]}} for rank in range(2)]


def test_a_long_answer_arrives_whole() -> None:
    pool = pool_of(HELLO + "commands.readline()\nreply(took=list(range(100_000)))\ncommands.readline()", size=1)
    (reply,) = pool.request("talking", Deadline(30), do="count")
    pool.close()
    assert reply == {"took": list(range(100_000))}


def test_a_rank_that_crashes_is_reported_with_its_last_lines() -> None:
    pool = pool_of(HELLO + "commands.readline()\nif rank == 1: raise SystemExit('out of luck')\ncommands.readline()")
    with pytest.raises(BenchmarkFailed, match=r"them: (rank 1|process 1) ended(.|\n)* while playing(.|\n)*out of luck"):
        pool.request("playing", Deadline(30), do="play")
    pool.close()


def test_an_error_inside_a_rank_is_passed_on() -> None:
    pool = pool_of(HELLO + "commands.readline()\nreply(error='Traceback: no such path')\ncommands.readline()")
    with pytest.raises(BenchmarkFailed, match=r"them: rank [01] failed while preparing:\nTraceback: no such path"):
        pool.request("preparing", Deadline(30), do="prepare")
    pool.close()


def test_ranks_that_do_not_start_are_reported_with_their_last_lines() -> None:
    with pytest.raises(
        BenchmarkFailed, match=r"process 0 ended \(exited with code 1\) while starting\n(.|\n)*no such library"
    ):
        pool_of("raise SystemExit('no such library')")


def test_a_silent_rank_ends_at_the_deadline_and_is_named() -> None:
    pool = pool_of(HELLO + "commands.readline()\nif rank != 1: reply()\ncommands.readline()")
    with pytest.raises(BenchmarkFailed, match=r"them: waiting took over 0 s; no answer from ranks \[.*1\]"):
        pool.request("waiting", Deadline(0.3), do="wait")
    pool.close()


def test_the_wrong_number_of_ranks_is_an_error() -> None:
    with pytest.raises(BenchmarkFailed, match="them started 7 ranks instead of 2"):
        pool_of(HELLO.replace("size=size", "size=7") + "commands.readline()")


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
reply(pids=[os.getpid(), child.pid])
time.sleep(600)
"""
    pool = pool_of(HELLO + stubborn, size=1)
    (reply,) = pool.request("talking", Deadline(30), do="print")
    pool._all_idle = False  # as after a failure: do not wait for them to leave by themselves
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in reply["pids"])


@pytest.mark.slow
def test_ranks_end_by_themselves_when_the_other_end_of_their_pipes_is_gone() -> None:
    parent = f"""
import os, sys
from pathlib import Path
from ronde.cli.bench.runner import PeerProcesses, RankPool
from ronde.types import Deadline
program = {ECHO!r}
start = lambda d: PeerProcesses([[sys.executable, "-c", program, str(d), str(r), "2"] for r in range(2)])
pool = RankPool("them", 2, start, Deadline(30))
print(*[p.pid for p in pool._processes._processes], pool._directory.name, flush=True)
os.kill(os.getpid(), 9)
"""
    killed = PeerProcesses(
        [[sys.executable, "-c", parent]], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    killed.wait(Deadline(30))
    *pids, directory = killed.output_tail().splitlines()[-1].split()
    killed.close()
    orphans = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(orphans, timeout=20)
    for path in Path(directory).iterdir():
        path.unlink()
    Path(directory).rmdir()
    assert alive == []


def test_ranks_of_ronde_that_fail_are_reported_with_the_summary_of_their_job() -> None:
    def start(directory: Path) -> RondeProcesses:
        return RondeProcesses((sys.executable, "-c", "import os; raise SystemExit('no ' + 'luck')"), 2)

    with pytest.raises(BenchmarkFailed, match=r"ronde: all ranks ended while starting\n(.|\n)*no luck"):
        RankPool("ronde", 2, start, Deadline(30))


# --- measuring in turn ------------------------------------------------------------------------------------------------


class FakePool:
    """Ranks that always take the same time."""

    size = 2

    def __init__(
        self, name: str, requests: list[tuple[str, dict[str, Any]]], took_ns: int = 1000, fails: str = ""
    ) -> None:
        self.name = name
        self.requests = requests
        self.took_ns = took_ns
        self.fails = fails
        self.closed = False

    def request(self, action: str, deadline: Deadline, **command: Any) -> list[dict[str, Any]]:  # as RankPool
        self.requests.append((self.name, command))
        if command["do"] == self.fails:
            raise BenchmarkFailed(f"{self.name}: rank 1 ended while {action}")
        return [{"took_ns": [self.took_ns] * command["num_steps"]} if "num_steps" in command else {}, {}]

    def close(self) -> None:
        self.closed = True


class Measurement:
    """What came of measuring some pools."""

    def __init__(
        self, *took_ns: tuple[str, int], fails: tuple[str, str] = ("", ""), paths: tuple[str, ...] = ("array",)
    ) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.notes: list[str] = []
        self.pools = [
            FakePool(name, self.requests, took, fails[1] if name == fails[0] else "") for name, took in took_ns
        ]
        runner = BenchmarkRunner(MeasurementBudget(rounds=3, seconds=15e-6), self.notes.append, lambda text: None)
        runner.pools.extend(cast("list[RankPool]", self.pools))
        cases = [AllreduceCase(pool, path, (1024,)) for pool in runner.pools for path in paths]
        self.results = measure_cases(runner, "allreduce", 4096, cases)

    def rounds(self) -> list[tuple[str, int]]:
        return [(name, command["num_steps"]) for name, command in self.requests if "num_steps" in command]


def test_all_take_turns_and_each_turn_begins_with_another() -> None:
    measured = Measurement(("ronde", 1000), ("gloo", 1000), ("mpich", 1000))
    names = [name for name, _ in measured.rounds()][3:]  # the first three are trials
    assert names == ["ronde", "gloo", "mpich", "gloo", "mpich", "ronde", "mpich", "ronde", "gloo"]


def test_a_round_has_as_many_steps_as_fit_its_time() -> None:
    measured = Measurement(("ronde", 1000), ("gloo", 500))
    assert measured.rounds()[:4] == [("ronde", TRIAL_STEPS), ("gloo", TRIAL_STEPS), ("ronde", 5), ("gloo", 10)]


def test_a_round_has_exactly_the_steps_that_were_asked_for() -> None:
    assert [MeasurementBudget(steps=2).steps_per_round(step_s) for step_s in (1e-9, 100.0)] == [2, 2]


def test_memory_is_released_once_per_pool_after_the_last_round() -> None:
    measured = Measurement(("ronde", 1000), paths=("array", "bucket"))
    assert [command["do"] for _, command in measured.requests].count("release") == 1
    assert measured.requests[-1] == ("ronde", {"do": "release"})


def test_a_peer_that_fails_is_left_out_with_a_note_and_the_others_go_on() -> None:
    measured = Measurement(("ronde", 1000), ("gloo", 1000), fails=("gloo", "time_allreduce"))
    assert [result.impl for result in measured.results] == ["ronde"]
    assert measured.notes == ["gloo is left out from here on: gloo: rank 1 ended while running array"]
    assert [pool.closed for pool in measured.pools] == [False, True]


def test_a_failure_of_ronde_ends_the_benchmark() -> None:
    with pytest.raises(BenchmarkFailed):
        Measurement(("ronde", 1000), ("gloo", 1000), fails=("ronde", "prepare_allreduce"))


def test_work_that_does_not_fit_into_memory_is_refused() -> None:
    assert "needs about 1024.0 GiB of memory" in describe_lack_of_memory(1 << 40)
    assert describe_lack_of_memory(1) == ""
