"""A command beside busy processes: they are there, and they end with it, however it ends."""

from __future__ import annotations

import datetime
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.limits import PATIENCE_S, SECONDS_S
from tools.busy import entry

BUSY = [sys.executable, str(Path(__file__).resolve().parents[2] / "tools/busy.py")]
LISTS = """
import psutil, sys
parent = psutil.Process().parent()
print(*[child.pid for child in parent.children() if child.pid != psutil.Process().pid], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_command_has_company_and_its_code_is_returned(ending: str, code: int) -> None:
    command = [*BUSY, "-n", "2", sys.executable, "-c", f"{LISTS}{ending}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert (done.returncode, len(pids)) == (code, 2), done
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_it_ends_the_busy_processes(number: signal.Signals) -> None:
    command = [*BUSY, "-n", "2", sys.executable, "-c", f"{LISTS}import time; time.sleep(1000)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as runner:
        assert runner.stdout is not None
        burning = [psutil.Process(int(pid)) for pid in runner.stdout.readline().split()]
        children = psutil.Process(runner.pid).children()
        runner.send_signal(number)
        runner.wait(PATIENCE_S)
        for child in children:
            if child not in burning and number is signal.SIGKILL:
                child.kill()  # the command itself: nobody could tell it
    assert len(burning) == 2
    gone, alive = psutil.wait_procs(children, timeout=SECONDS_S)
    assert not alive, (gone, alive)


def test_the_log_names_what_failed() -> None:
    said = b"ERROR    ronde.comm:x.py:95 log\nFAILED tests/a.py::test_x[2 ranks] - assert 1\nERROR tests/b.py::test_y\n"
    at = datetime.datetime(2026, 11, 16, 14, 0, 0)
    assert entry(at, "abc1234+", 1, 90.0, said) == (
        "2026-11-16 14:00:00  abc1234+  code 1  1.5 min  2 failed  tests/a.py::test_x[2 ranks]  tests/b.py::test_y\n"
    )
    assert (
        entry(at, "abc1234", 0, 60.0, b"all is well\n") == "2026-11-16 14:00:00  abc1234  passed  1.0 min  0 failed\n"
    )
