"""`ronde run --debug RANK`: a debugger has the terminal in one rank, while the others wait for it and still print."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands import run_command
from tests.jobs.kit import RONDE, Terminal
from tests.limits import PATIENCE_S

QUIT = "rank 1 on host localhost failed first: exited with code 1 (BdbQuit"
SCRIPT = """
import os, sys
import numpy as np
import ronde
ronde.init()
x = ronde.rank() * 21
if ronde.rank() == 1:
    breakpoint()
else:
    print("waiting", flush=True)
total = ronde.allreduce(np.array([x]))[0]
if ronde.rank() == 1:
    print("sum", total, sys.stdin.isatty(), *os.get_terminal_size(1))
ronde.shutdown()
"""


def debug(script: str, folder: Path) -> list[str]:
    """The command that runs a script with a debugger in rank 1."""
    path = folder / "train.py"
    path.write_text(script)
    flags = ("-np", "2", "--debug", "1", "--no-color", "--operation-s", "0.5")
    return [RONDE, "run", *flags, sys.executable, str(path)]


def test_pdb_has_the_terminal_and_gives_it_back(tmp_path: Path) -> None:
    with Terminal(debug(SCRIPT, tmp_path), rows=30, columns=101) as terminal:
        terminal.read_until("(Pdb)")
        terminal.read_until("waiting")
        assert terminal.modes() != terminal.before
        terminal.type("p x * 2\r")
        terminal.read_until("42")
        terminal.type("c\r")
        terminal.read_until("sum 21 True 101 30")
        assert terminal.process.wait(PATIENCE_S) == 0, terminal.shown
        assert terminal.modes() == terminal.before
        assert "[0] waiting" in terminal.shown


LOOP = """
import numpy as np
import ronde
ronde.init()
turns, busy = 0, ronde.rank() == 1
if busy:
    breakpoint()
while busy:
    turns += 1
    if turns == 1:
        print("turning")
total = ronde.allreduce(np.array([turns]))[0]
print("somebody turned", total > 0)
ronde.shutdown()
"""


def test_ctrl_c_is_for_the_debugger_and_nobody_gives_up_meanwhile(tmp_path: Path) -> None:
    with Terminal(debug(LOOP, tmp_path)) as terminal:
        terminal.read_until("(Pdb)")
        terminal.type("import time; time.sleep(1); print('slept')\r")  # longer than an operation may take
        terminal.read_until("\nslept")
        terminal.type("p ronde.rank(), ronde.size()\r")
        terminal.read_until("(1, 2)")
        terminal.type("c\r")
        terminal.read_until("turning")
        terminal.type("\x03")
        terminal.read_until("Program interrupted")
        terminal.read_until("(Pdb)")
        terminal.type("busy = False\r")
        terminal.type("c\r")
        assert terminal.result() == 0, terminal.shown
        assert terminal.modes() == terminal.before
    assert "somebody turned True" in terminal.shown


def test_who_quits_the_debugger_ends_the_job_and_has_his_terminal_back(tmp_path: Path) -> None:
    with Terminal(debug(LOOP, tmp_path)) as terminal:
        terminal.read_until("(Pdb)")
        terminal.type("q\r")
        assert terminal.result() == 1, terminal.shown
        assert terminal.modes() == terminal.before
    assert QUIT in terminal.shown


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [("", 1, "BdbQuit"), ("p x * 2\n", 1, "(Pdb) 42"), ("p x * 2", 1, "(Pdb) 42"), ("c\n", 0, "sum 21 False")],
    ids=["nothing", "a line", "half a line", "to the end"],
)
def test_what_is_piped_is_typed_and_its_end_ends_the_debugger(
    tmp_path: Path, typed: str, code: int, words: str
) -> None:
    done = run_command(debug(SCRIPT, tmp_path), input=typed)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout
    assert (QUIT in done.stderr) == (code == 1)


def test_a_driver_that_is_told_to_end_gives_the_terminal_back(tmp_path: Path) -> None:
    with Terminal(debug(LOOP, tmp_path)) as terminal:
        terminal.read_until("(Pdb)")
        ranks = psutil.Process(terminal.process.pid).children(recursive=True)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.result() == 143, terminal.shown
        assert terminal.modes() == terminal.before
        assert psutil.wait_procs(ranks, timeout=PATIENCE_S)[1] == []
