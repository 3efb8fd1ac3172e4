"""`ronde run --debug RANK`: a debugger has the terminal in one rank, while the others wait for it and still print."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import termios
from pathlib import Path

from ronde.launch.terminal import resize
from ronde.types import Deadline

PATIENCE_S = 40.0

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


class Terminal:
    """A terminal of its own for a command, and somebody who types."""

    def __init__(self, command: list[str], rows: int, columns: int) -> None:
        self._fd, theirs = os.openpty()
        resize(theirs, rows, columns)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)
        os.close(self._theirs)

    def read_until(self, text: str) -> None:
        deadline = Deadline(PATIENCE_S)
        while text not in self.shown:
            ready, _, _ = select.select([self._fd], [], [], deadline.left_s)
            assert ready, f"waited for {text!r}, saw {self.shown!r}"
            self.shown += os.read(self._fd, 4096).decode()

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def modes(self) -> list[object]:
        return termios.tcgetattr(self._theirs)


def test_pdb_has_the_terminal_and_gives_it_back(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "ronde.cli.main", "run", "-np", "2", "--debug", "1", "--no-color"]
    with Terminal([*run, sys.executable, str(script)], rows=30, columns=101) as terminal:
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
