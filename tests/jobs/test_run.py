"""`ronde run` as its users see it: the exit code, the summary, every way to end it, what is wrong with a request, and
what can be learned of a running job. Whatever happens, nothing is left behind: see Running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ronde.types import Deadline
from tests.jobs.running import PATIENCE_S, RONDE, SECONDS_S, Running, Terminal, ask, end, run, script

# --- how it ends ---------------------------------------------------------------------------------------------------

BOOM = ["Traceback (most recent call last):", "RuntimeError: boom"]


@pytest.mark.parametrize(
    ("how", "code", "reason", "last_words"),
    [
        ("raise", 1, "exited with code 1 (RuntimeError: boom)", BOOM),
        ("late", 1, "exited with code 1 (RuntimeError: boom)", BOOM),
        ("kill", 137, "killed by signal 9 (SIGKILL)", []),
        ("crash", 139, "killed by signal 11 (SIGSEGV)", ["Fatal Python error: Segmentation fault", "in string_at"]),
        ("3", 3, "exited with code 3 (exited without shutdown)", []),
    ],
)
def test_the_first_that_failed_is_named_with_its_last_words_and_not_its_peers(
    how: str, code: int, reason: str, last_words: list[str]
) -> None:
    done = run("-np", "3", *script("ending", how))
    assert (done.code, done.out) == (code, ""), done
    first, *said, last = done.summary
    assert first == f"rank 1 on host localhost failed first: {reason}"
    assert last == "2 other ranks ended in consequence"
    assert all(line.startswith("  | ") for line in said)
    for line in last_words:
        assert any(line in each for each in said), said
    assert bool(said) == bool(last_words)
    assert not any("PeerLost" in line for line in said)
    assert "PeerLost: rank 2 lost rank 1 during allreduce" in done.err, "it is on the screen, under its number"


def test_a_rank_that_leaves_the_others_alone_is_named_though_its_code_is_0() -> None:
    done = run("-np", "2", *script("ending", "0"))
    assert done.code == 1
    assert done.summary[0] == "rank 0 on host localhost failed first: exited with code 1"
    assert done.summary[-1] == (
        "before that, rank 1 on host localhost had left the others: exited with code 0 (exited without shutdown)"
    )


def test_a_rank_that_ends_well_before_others_is_no_failure() -> None:
    done = run("-np", "3", "sh", "-c", "test $RANK = 0 || sleep 0.2; echo $RANK")
    assert (done.code, done.err, sorted(done.out.splitlines())) == (0, "", ["[0] 0", "[1] 1", "[2] 2"])


def test_who_does_not_end_after_a_failure_is_told_and_then_killed() -> None:
    staying = f"test $RANK != 0 || exit 4; exec {sys.executable} -m tests.jobs.scripts.staying deaf"
    done = run("-np", "3", "--grace", "1.5", "--terminate", "0.1", "sh", "-c", staying)
    assert done.code == 4
    assert done.err.splitlines() == [
        "[ronde] ending ranks 1, 2, still running 1.5 s after the first failure",
        "[ronde] killing ranks 1, 2",
        "rank 0 on host localhost failed first: exited with code 4",
        "2 other ranks ended in consequence",
    ]


@pytest.mark.parametrize(
    ("manner", "numbers", "code", "why"),
    [
        ("polite", [signal.SIGINT], 130, "interrupted by Ctrl-C"),
        ("deaf", [signal.SIGINT], 130, "interrupted by Ctrl-C"),
        ("deaf", [signal.SIGINT, signal.SIGINT], 130, "interrupted by Ctrl-C"),
        ("polite", [signal.SIGTERM], 143, "ended by SIGTERM"),
        ("deaf", [signal.SIGTERM, signal.SIGTERM], 143, "ended by SIGTERM"),
        ("polite", [signal.SIGHUP], 129, "ended by SIGHUP: the terminal was closed"),
    ],
)
def test_a_signal_ends_all_ranks_and_their_children(
    manner: str, numbers: list[signal.Signals], code: int, why: str
) -> None:
    with Running("-np", "2", "--no-fold", *script("staying", manner)) as job:
        job.out(2)
        before = time.monotonic()
        for number in numbers:
            job.signal(number)
            if manner == "deaf":
                job.err_until("[ronde] ")
        done = job.result()
        assert time.monotonic() - before < SECONDS_S
    assert (done.code, done.summary) == (code, [why])


def test_a_killed_driver_takes_all_with_it_and_the_next_job_may_have_its_name() -> None:
    with Running("-np", "2", "--no-fold", "--name", "killed", *script("staying", "deaf")) as job:
        job.out(2)
        job.signal(signal.SIGKILL)
        job.result()
    assert run("-np", "1", "--name", "killed", "true").code == 0


def test_ctrl_c_is_heard_before_there_are_ranks(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    os.mkfifo(hosts)
    with Running("--hostfile", str(hosts), "true") as job, hosts.open("w"):  # open: it is being read
        job.signal(signal.SIGINT)
        assert job.result() == (130, "", "")


# --- readers that go away, or stop ---------------------------------------------------------------------------------

CHATTER = ("sh", "-c", "while echo something; do :; done")


def test_a_reader_that_leaves_ends_the_job() -> None:
    with Running("-np", "2", *CHATTER) as job:
        job.out()
        assert job.driver.stdout is not None
        job.driver.stdout.close()
        said = job.err_until("cannot write to standard output")
        assert job.driver.wait(PATIENCE_S) == 141, said


@pytest.mark.parametrize(("number", "code", "merged"), [(signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)])
def test_a_reader_that_stops_does_not_keep_the_job_from_ending(
    number: signal.Signals, code: int, merged: bool
) -> None:
    with Running("-np", "2", "--no-fold", *CHATTER, merged=merged) as job:
        job.out()
        await_silence(job)
        job.signal(number)
        assert job.driver.wait(SECONDS_S) == code


def await_silence(job: Running) -> None:
    """Until nobody reads from anybody: every rank waits for the driver, and the driver for us."""
    deadline = Deadline(PATIENCE_S)
    before = -1.0
    while (now := sum(sum(each.cpu_times()[:2]) for each in job.processes())) != before:
        assert not deadline.passed
        before = now
        time.sleep(0.2)
