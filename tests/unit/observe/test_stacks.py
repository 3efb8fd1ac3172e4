"""Stacks: the line of the user's code is found, and processes that do not reply have a state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ronde.observe
from ronde.observe.stacks import MAX_STACK_CHARS, RankStack, dump_stacks, group_stacks, process_state
from tests.limits import PATIENCE_S

Ask = Callable[[], tuple[str, str]]

RONDE = Path(ronde.observe.__file__).parents[1]


def dumped_from_another_thread() -> tuple[str, str]:
    with ThreadPoolExecutor(1, thread_name_prefix="dumper") as pool:
        return pool.submit(dump_stacks).result(30)  # here


def function_in(file: str) -> Callable[[Ask], tuple[str, str]]:
    """A function that calls its argument, and that Python takes to be from the file."""
    names: dict[str, Callable[[Ask], tuple[str, str]]] = {}
    exec(compile("def wait(call):\n    return call()", file, "exec"), names)
    return names["wait"]


@pytest.fixture
def ask() -> Ask:
    """As dumped_from_another_thread, but no line of it is the user's."""
    names: dict[str, Ask] = {}
    code = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from ronde.observe.stacks import dump_stacks\n"
        "def ask():\n"
        "    with ThreadPoolExecutor(1) as pool:\n"
        "        return pool.submit(dump_stacks).result(30)\n"
    )
    exec(compile(code, f"{sysconfig.get_path('stdlib')}/asking.py", "exec"), names)
    return names["ask"]


def test_the_users_line_is_found_while_it_waits_in_the_standard_library() -> None:
    line, stack = dumped_from_another_thread()
    assert line.startswith("test_stacks.py:")
    assert line.endswith(" in dumped_from_another_thread: return pool.submit(dump_stacks).result(30)  # here")
    assert stack.startswith("main thread:\n")
    assert f'File "{__file__}"' in stack
    assert "dumper" not in stack


@pytest.mark.parametrize(
    "file",
    [
        str(RONDE / "comm" / "collectives.py"),
        f"{sysconfig.get_path('stdlib')}/queue.py",
        f"{sysconfig.get_path('purelib')}/torch/optim.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "<frozen importlib._bootstrap>",
    ],
    ids=["ronde", "standard library", "site-packages", "dist-packages", "frozen"],
)
def test_library_frames_inside_the_users_are_passed_over(ask: Ask, file: str) -> None:
    line, stack = function_in(file)(ask)
    assert line.endswith("passed_over: line, stack = function_in(file)(ask)")
    assert f'File "{file}", line 2, in wait' in stack


@pytest.mark.parametrize("file", ["<string>", "<stdin>", "/home/me/train.py"])
def test_code_of_a_script_or_a_prompt_is_the_users(ask: Ask, file: str) -> None:
    line, _ = function_in(file)(ask)
    assert line == f"{Path(file).name}:2 in wait"


def test_other_threads_but_those_of_ronde_are_in_the_stack_by_name() -> None:
    entered, leave = threading.Barrier(3), threading.Event()

    def loading() -> None:
        entered.wait(30)
        leave.wait(30)

    threads = [threading.Thread(target=loading, name=name) for name in ("ronde-control", "loader\n\udc80")]
    for thread in threads:
        thread.start()
    try:
        entered.wait(30)
        line, stack = dump_stacks()
    finally:
        leave.set()
        for thread in threads:
            thread.join()
    assert line.endswith("line, stack = dump_stacks()"), "it works from the main thread, too"
    assert r"thread loader\n\udc80:" in stack and "ronde-control" not in stack
    assert "in loading" in stack
    stack.encode()


def test_endless_recursion_gives_a_stack_one_can_send() -> None:
    def deeper(depth: int) -> tuple[str, str]:
        return deeper(depth - 1) if depth else dumped_from_another_thread()

    line, stack = deeper(500)
    assert "in dumped_from_another_thread" in line
    assert len(stack) <= MAX_STACK_CHARS


COLLECT_LOCALS = """
import gc, threading
from ronde.observe.stacks import dump_stacks

class Garbage:
    def __init__(self):
        self.own, self.local = self, threading.local()
        self.local.x = 1

gc.set_threshold(1)
for _ in range(300):
    Garbage()
    dump_stacks()
assert gc.isenabled()
"""


def test_garbage_of_threads_does_not_stop_the_process() -> None:
    subprocess.run([sys.executable, "-c", COLLECT_LOCALS], check=True, timeout=PATIENCE_S)


def test_an_installed_program_is_better_than_a_line_of_the_standard_library(tmp_path: Path) -> None:
    program = tmp_path / "site-packages" / "tool.py"
    program.parent.mkdir()
    program.write_text(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from ronde.observe.stacks import dump_stacks\n"
        "with ThreadPoolExecutor(1) as pool:\n"
        "    print(pool.submit(dump_stacks).result(30)[0])\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "tool.py:4 in <module>: print(pool.submit(dump_stacks).result(30)[0])"


# --- processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process that waits, with a name made to mislead whoever reads its state carelessly."""
    code = "open('/proc/self/comm', 'w').write(') Z (x'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_the_state_of_a_process_is_known_from_start_to_end(child: subprocess.Popen[str]) -> None:
    assert process_state(os.getpid()) == "running"
    deadline = time.monotonic() + 30
    while process_state(child.pid) != "sleeping":
        assert time.monotonic() < deadline
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert process_state(child.pid) == "stopped"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid) == "gone", "it is not reaped yet"
    child.wait()
    assert process_state(child.pid) == "gone"


def test_ranks_at_the_same_place_are_shown_together() -> None:
    def at(rank: int, line: str = "", why: str = "") -> RankStack:
        return RankStack(rank=rank, line=line, stack=f"stack of {line}", why=why)

    grouped = group_stacks([at(0, "a"), at(1, why="does not answer"), at(2, "b"), at(3, "a"), at(4, "b"), at(5, "b")])
    assert [(ranks, first.line or first.why) for ranks, first in grouped] == [
        ((2, 4, 5), "b"),
        ((0, 3), "a"),
        ((1,), "does not answer"),
    ]
