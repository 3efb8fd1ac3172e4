"""Ranks get commands and reply, what goes wrong with them is reported, and none is left behind; implementations are
measured in turn. Ranks are tiny programs here, or fakes."""

from __future__ import annotations

import sys
from io import StringIO
from typing import Any, cast

import psutil
import pytest
from rich.console import Console

from ronde.cli.bench.allreduce import AllreduceCase, BenchmarkResult, measure_cases
from ronde.cli.bench.runner import (
    TRIAL_STEPS,
    BenchmarkFailed,
    BenchmarkRunner,
    MeasurementBudget,
    RankPool,
)
from ronde.cli.bench.table import BenchmarkDisplay
from ronde.types import Deadline

HELLO = """
import json, os, sys, time
rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
replies = open(f"{directory}/from-{rank}", "w")
commands = open(f"{directory}/to-{rank}")
def reply(**fields):
    replies.write(json.dumps(fields) + chr(10))
    replies.flush()
reply(size=size)
"""


def pool_of(program: str, size: int = 2) -> RankPool:
    commands = [[sys.executable, "-c", program, str(rank), str(size)] for rank in range(size)]
    return RankPool("them", size, commands, Deadline(30))


def test_replies_come_by_rank_and_whole_however_long() -> None:
    pool = pool_of(HELLO + "reply(got=json.loads(commands.readline()), much=[rank] * 100_000)\ncommands.readline()")
    replies = pool.request("talking", Deadline(30), do="print", what=[1, 2])
    pool.close()
    assert replies == [{"got": {"do": "print", "what": [1, 2]}, "much": [rank] * 100_000} for rank in range(2)]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "if rank == 1: raise SystemExit('out of luck')\ncommands.readline()",
            r"them: (rank 1|process 1) ended(.|\n)* while playing(.|\n)*out of luck",
        ),
        ("reply(error='no such path')\ncommands.readline()", r"them: rank [01] failed while playing:\nno such path"),
        ("if rank != 1: reply()\ncommands.readline()", r"them: playing took over 1 s; no answer from ranks \[.*1\]"),
    ],
    ids=["crashes", "has an error", "is silent"],
)
def test_a_rank_that_fails_is_named_with_its_reason(program: str, message: str) -> None:
    pool = pool_of(f"{HELLO}commands.readline()\n{program}")
    with pytest.raises(BenchmarkFailed, match=message):
        pool.request("playing", Deadline(1 if "took over" in message else 30), do="play")
    pool.close()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit('no such library')", r"process \d ended \(exited with code 1\) while st(.|\n)*such library"),
        (HELLO.replace("size=size", "size=7") + "commands.readline()", "them started 7 ranks instead of 2"),
    ],
)
def test_ranks_that_do_not_start_well_are_an_error(program: str, message: str) -> None:
    with pytest.raises(BenchmarkFailed, match=message):
        pool_of(program)


def test_a_program_that_does_not_exist_leaves_nothing_behind() -> None:
    with pytest.raises(FileNotFoundError):
        RankPool("them", 1, [["no-such-program-anywhere"]], Deadline(30))


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


class FakePool:
    """Ranks that always take the same time."""

    size = 2

    def __init__(self, name: str, requests: list[tuple[str, dict[str, Any]]], took_ns: int, fails: str) -> None:
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

    def __init__(self, took_ns: dict[str, int], fails: str = "", paths: tuple[str, ...] = ("array",)) -> None:
        """`fails` is a pool and what it fails to do."""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        failing, _, action = fails.partition(" ")
        self.pools = [FakePool(name, self.requests, ns, action * (name == failing)) for name, ns in took_ns.items()]
        self.output = StringIO()
        display: BenchmarkDisplay[BenchmarkResult] = BenchmarkDisplay(Console(file=self.output, width=200), str, None)
        runner = BenchmarkRunner(MeasurementBudget(rounds=3, seconds=15e-6), display)
        runner.pools.extend(cast("list[RankPool]", self.pools))
        cases = [AllreduceCase(pool, path, (1024,)) for pool in runner.pools for path in paths]
        with display:
            self.results = measure_cases(runner, "allreduce", 4096, cases)
        self.rounds = [(name, command["num_steps"]) for name, command in self.requests if "num_steps" in command]


def test_all_take_turns_and_each_turn_begins_with_another() -> None:
    rounds = Measurement({"ronde": 1000, "gloo": 1000, "mpich": 1000}).rounds[3:]  # the first three are trials
    order = ["ronde", "gloo", "mpich", "gloo", "mpich", "ronde", "mpich", "ronde", "gloo"]
    assert [name for name, _ in rounds] == order


def test_a_round_has_as_many_steps_as_fit_its_time_or_exactly_those_asked_for() -> None:
    rounds = Measurement({"ronde": 1000, "gloo": 500}).rounds
    assert rounds[:4] == [("ronde", TRIAL_STEPS), ("gloo", TRIAL_STEPS), ("ronde", 5), ("gloo", 10)]
    assert [MeasurementBudget(steps=2).steps_per_round(step_s) for step_s in (1e-9, 100.0)] == [2, 2]


def test_memory_is_released_once_per_pool_after_the_last_round() -> None:
    requests = Measurement({"ronde": 1000}, paths=("array", "bucket")).requests
    assert [command["do"] for _, command in requests].count("release") == 1
    assert requests[-1] == ("ronde", {"do": "release"})


def test_a_peer_that_fails_is_left_out_with_a_note_and_the_others_go_on() -> None:
    measured = Measurement({"ronde": 1000, "gloo": 1000}, fails="gloo time")
    assert [result.impl for result in measured.results] == ["ronde"]
    note = "note: gloo is left out from here on: gloo: rank 1 ended while running array\n"
    assert measured.output.getvalue() == note
    assert [pool.closed for pool in measured.pools] == [False, True]


def test_a_failure_of_ronde_ends_the_benchmark() -> None:
    with pytest.raises(BenchmarkFailed):
        Measurement({"ronde": 1000, "gloo": 1000}, fails="ronde prepare_allreduce")


def test_work_that_does_not_fit_into_memory_is_left_out_with_a_note() -> None:
    output = StringIO()
    display: BenchmarkDisplay[BenchmarkResult] = BenchmarkDisplay(Console(file=output, width=200), str, None)
    with display:
        assert [display.fits_in_memory("1T", num_bytes) for num_bytes in (1, 1 << 40)] == [True, False]
    assert output.getvalue().startswith("note: 1T is left out: it needs about 1024.0 GiB of memory, ")
