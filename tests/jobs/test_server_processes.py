"""Server processes of `ronde run --servers`: killed and replaced, beside workers that are, and no sample is lost."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.jobs.kit import RondeRun, ask, script
from tests.limits import LONG_S, promised_s

FIRST = 1_000_000


def servers_of(job: RondeRun) -> list[psutil.Process]:
    """The server processes that run, the oldest first."""
    found = [each for each in job.processes() if "ronde.ps.server_process" in " ".join(each.cmdline())]
    return sorted(found, key=lambda process: process.create_time())


def read_until(job: RondeRun, text: str) -> str:
    """The lines on standard output, up to the first that holds the text."""
    seen = ""
    while text not in seen:
        seen += job.read_lines()[0] + "\n"
    return seen


def check_exact(output: str, num_workers: int, limit_s: float) -> None:
    assert output.count("exact: True") == num_workers and "exact: False" not in output, output
    assert max(map(float, re.findall(r"longest step ([\d.]+) s", output))) < limit_s, output


def test_killed_server_processes_are_replaced_one_after_the_other() -> None:
    """In a job whose number of ranks is fixed. Workers wait for a second at most, and `ronde top` shows the servers."""
    command = ["-np", "2", "--servers", "2", "--no-fold", "--name", "servers", *script("server_processes")]
    with RondeRun(*command) as job:
        seen = "".join(read_until(job, "servers") for _ in range(2))
        assert seen.count(f"of 2, servers ({FIRST}, {FIRST + 1})") == 2, seen
        status = json.loads(ask("top", "servers", "--json").out)
        assert [each["name"] for each in status["ranks"]] == ["", "", "server 0", "server 1"], status
        servers_of(job)[0].send_signal(signal.SIGKILL)
        seen = read_until(job, f"servers ({FIRST + 1}, {FIRST + 2})")
        servers_of(job)[0].send_signal(signal.SIGKILL)  # its parts are on the new one
        result = job.result(LONG_S)
    assert result.code == 0, result
    check_exact(seen + result.out, 2, promised_s(1.0))
    for index in (0, 1):
        assert f"server {index} on host localhost killed by signal 9 (SIGKILL); another one is started" in result.err


@pytest.mark.parametrize("mode", ["bounded", "async"])
def test_workers_and_servers_that_are_killed_are_replaced_while_others_train(tmp_path: Path, mode: str) -> None:
    """In an elastic job. What is started in the place of a lost worker trains with the others."""
    options = ["-np", "2", "--min-np", "1", "--servers", "2", "--no-fold"]
    with RondeRun(*options, *script("server_processes", "--mode", mode, "--came", str(tmp_path / "came"))) as job:
        seen = read_until(job, "worker 2 is rank")
        servers_of(job)[0].send_signal(signal.SIGKILL)
        seen += read_until(job, f"servers ({FIRST + 1}, {FIRST + 2})")
        servers_of(job)[0].send_signal(signal.SIGKILL)
        result = job.result(LONG_S)
    assert result.code == 0, result
    assert "worker 1 is lost" in result.err, result.err
    check_exact(seen + result.out, 2, promised_s(2.0))
