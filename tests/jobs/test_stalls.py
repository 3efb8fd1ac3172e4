"""A rank does not come to an operation: that is reported once, with who is missing, since when, and the line where the
missing rank is; to the log of the coordinator and to every rank.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from ronde.settings import Settings
from tests.jobs.kit import LocalRanks, RondeRun, hosted_by_rank_0, start_ranks
from tests.jobs.scripts import stalls
from tests.limits import promised_s

STALL_S = 1.0
SETTINGS = Settings(stall_s=STALL_S)
LATE = 2
OTHERS = [0, 1]
OPERATIONS = (
    "allreduce sum float32[3]",
    "allreduce 'gradient' sum float32[3]",
    "bucket 0: ",
    "allreduce 'repeated' sum float32[3]",
)
"""How the reports call them: in program order, by name, planned, and by a name that the members announce in shared
memory."""


def line_of(how: str) -> str:
    """The place in the script where a rank is late in this way."""
    lines = Path(stalls.__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# the line where it is {how}"))
    return f"stalls.py:{number} in {how}: "


def do(job: LocalRanks, ranks: list[int], **wanted: int) -> None:
    """Let these ranks start an operation, or wait for reports."""
    job.send(ranks, **wanted)
    job.receive_all(ranks, "done")


def finish(job: LocalRanks) -> dict[int, dict[str, Any]]:
    """Let the late rank come; what the others say in the end."""
    job.send([LATE], come=True)
    job.send(OTHERS)
    over = job.receive_all(OTHERS, "over")
    assert job.wait() == [0, 0, 0], job.printed()
    for message in over.values():
        assert message["totals"] == [9.0, 9.0, 3.0, 9.0], "the late rank came, and all went well"
        reported = [report["op"] for report in message["reports"]]
        assert len(reported) == len(OPERATIONS) and all(map(str.startswith, reported, OPERATIONS)), reported
    return over


@pytest.mark.parametrize(
    ("how", "host"), [("asleep", "launcher"), ("asleep", "rank 0"), ("busy", "launcher"), ("stopped", "launcher")]
)
def test_a_late_rank_is_reported_once_with_the_line_where_it_is(
    how: str, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    with start_ranks("stalls", 3, settings=SETTINGS) as job:
        settings = {} if host == "launcher" else hosted_by_rank_0()
        job.send(range(3), late=LATE, how="asleep" if how == "stopped" else how, settings=settings)
        job.receive(LATE, "late")
        if how == "stopped":
            os.kill(job.pids[LATE], signal.SIGSTOP)
            os.waitid(os.P_PID, job.pids[LATE], os.WSTOPPED | os.WNOWAIT)
        for number in range(len(OPERATIONS)):  # when the last one is reported, those before it are late for long
            do(job, OTHERS, start=number)
            do(job, OTHERS, reports=number + 1)
        if how == "stopped":
            os.kill(job.pids[LATE], signal.SIGCONT)
        over = finish(job)
        pid, log = job.pids[LATE], job.output(0) if host == "rank 0" else caplog.text
    where = "does not answer; its process is stopped" if how == "stopped" else f"is at {line_of(how)}"
    for message in over.values():
        for report, operation, began in zip(message["reports"], OPERATIONS, message["began"], strict=True):
            text = report["report"]
            assert text.startswith(operation)
            assert (report["missing"], report["group"]) == ([LATE], 0)
            assert re.search(rf"has waited [1-9][0-9.]* s for rank {LATE} \(rank", text), text
            assert re.search(rf"rank {LATE} on host {gethostname()}, pid {pid}, {re.escape(where)}", text), text
            assert report["waited_s"] >= STALL_S
            assert abs(report["since"] - began) < promised_s(STALL_S / 2), "since when"
            assert log.count(text) == 1, log


def test_who_comes_to_a_reported_operation_does_not_make_it_new() -> None:
    with start_ranks("stalls", 3, settings=SETTINGS) as job:
        job.send(range(3), late=LATE, how="asleep", settings={})
        job.receive(LATE, "late")
        do(job, [0], start=0)
        do(job, OTHERS, reports=1)
        do(job, [1], start=0)
        for number in (1, 2):
            do(job, OTHERS, start=number)
            do(job, OTHERS, reports=number + 1)
        do(job, [0], start=3)
        do(job, OTHERS, reports=4)
        do(job, [1], start=3)
        for message in finish(job).values():
            assert [report["missing"] for report in message["reports"]] == [[1, LATE], [LATE], [LATE], [1, LATE]]


HANGS = """import ronde, numpy, signal
ronde.init()
if ronde.rank() == 1: signal.pause()
ronde.allreduce(numpy.ones(3), name="grad.3")"""


def test_the_report_calls_the_host_as_the_users_of_the_launcher_do() -> None:
    with RondeRun("-np", "2", "--stall-s", "0.3", sys.executable, "-c", HANGS) as job:
        printed = job.read_errors_until(" is at ")
        job.signal(signal.SIGTERM)
        job.result()
    assert re.search(
        r"allreduce 'grad.3' sum float64\[3\] \(group 0\) has waited [\d.]+ s for rank 1 \(rank 0 is there\)\n"
        r".*  rank 1 on host localhost, pid \d+, is at ",
        printed,
    ), printed
