"""Every code block of README.md, docs/quickstart.md and docs/guides/elastic.md runs as it is printed.

A block of Python begins with a docstring that names its file. A line of a block of shell is a command that runs here,
or stands in ELSEWHERE.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.commands import PROGRAMS, ROOT, run_command
from tests.limits import LONG_S, LONG_TEST_S

PAGES = {
    "README": (ROOT / "README.md").read_text(encoding="utf-8"),
    "quickstart": (ROOT / "docs/quickstart.md").read_text(encoding="utf-8"),
    "elastic": (ROOT / "docs/guides/elastic.md").read_text(encoding="utf-8"),
}
ELSEWHERE = {
    'pip install "./ronde[torch]"',  # tests/jobs/test_wheel.py installs from source and from the wheel
    'pip install "dist/ronde-0.1.0-py3-none-linux_x86_64.whl[torch]"',
    "ronde run -H host1:4,host2:4 python train.py",  # tests/jobs/test_hosts.py starts jobs on several hosts
    "ronde run -np 4 --min-np 2 --max-np 16 --hostfile hosts.txt python train.py",  # test_run_elastic.py changes hosts
    "ronde run -np 4 --min-np 2 --max-np 16 --discover ./hosts.sh python train.py",
    "make train",  # tests/jobs/test_examples.py runs the main job
    "make test",
}
pytestmark = pytest.mark.timeout(LONG_TEST_S)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


@functools.cache
def run(page: str, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user types it in a folder with the scripts of a page."""
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks(PAGES[page], "python"):
            found = re.match(r'"""(\w+\.py): ', block)
            assert found, f"this block does not name its file:\n{block}"
            Path(folder, found[1]).write_text(block, encoding="utf-8")
        # One thread per process: on a busy machine PyTorch's wait for each other, and these models are tiny.
        env = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        return run_command(["bash", "-c", command], cwd=Path(folder), env=env, limit_s=LONG_S)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("python fit.py", "1 ranks found [1.0, -2.0, 0.5]\n"),
        ("ronde run -np 2 python fit.py", "[0] 2 ranks found [1.0, -2.0, 0.5]\n"),
    ],
)
def test_the_example_finds_the_weights(command: str, printed: str) -> None:
    done = run("README", command)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


RUN = {
    ("README", "python train.py"): (0, "epoch 4: loss 0.0"),
    ("README", "ronde run -np 2 python train.py"): (0, "[0] epoch 4: loss 0.0"),
    ("README", "ronde run -np 2 python fit.py"): (0, "[0] 2 ranks found [1.0, -2.0, 0.5]"),
    ("quickstart", "python train.py"): (0, "epoch 10: loss 0."),
    ("quickstart", "ronde run -np 2 python train.py"): (0, "[0] epoch 10: loss 0."),
    ("quickstart", "ronde run -np 2 python crash.py"): (
        1,
        "rank 1 on host localhost failed first: exited with code 1 (ValueError: batch 7 is empty)\n",
    ),
    ("quickstart", "ronde run -np 2 --stall-s 2 --operation-s 5 python hang.py"): (
        1,
        "is at hang.py:11 in <module>: time.sleep(3600)\n",
    ),
    ("elastic", "ronde run -np 4 --min-np 2 python train.py"): (0, "[0] epoch 5: loss 0.0"),
}
"""The exit code of each command, and a part of what it prints."""


@pytest.mark.parametrize(("page", "command"), RUN, ids=" ".join)
def test_a_command_prints_what_the_page_says(page: str, command: str) -> None:
    code, part = RUN[page, command]
    done = run(page, command)
    assert done.returncode == code, done.stderr
    assert part in done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_no_command_is_left_out(page: str) -> None:
    lines = [line.partition(" #")[0].strip() for block in blocks(PAGES[page], "sh") for line in block.splitlines()]
    shown = {line for line in lines if line} - ELSEWHERE
    assert shown == {command for name, command in RUN if name == page}
