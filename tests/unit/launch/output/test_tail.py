"""The last output of a rank, for the report of a job that failed."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import traceback

import pytest

from ronde.launch.output.tail import OutputTail

ERR, OUT = "last lines of standard error:\n", "last lines of standard output:\n"


def tail_of(err: bytes, out: bytes = b"", code: int = 1) -> str:
    tail = OutputTail()
    tail.add("err", err)
    tail.add("out", out)
    return tail.text(code)


def chained() -> str:
    """What Python prints for an exception with a cause and a context."""
    try:
        try:
            int("x")
        except ValueError as error:
            raise KeyError("bad value") from error
    except KeyError as error:
        last = RuntimeError("message\nof two lines")
        last.__context__ = error
        return "".join(traceback.format_exception(last.with_traceback(error.__traceback__)))
    raise AssertionError


def test_a_chain_of_exceptions_is_one_traceback() -> None:
    trace = chained()
    assert tail_of(f"starting\nwarning: x\n{trace}".encode()) + "\n" == trace
    earlier = trace.replace("bad", "better")
    assert tail_of(f"{earlier}retrying\n{trace}".encode()) + "\n" == trace, "the last one is meant"


# --- which traceback explains an exit ---------------------------------------------------------------------------------

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad'
INTERRUPT = TRACE.replace("ValueError: bad", "KeyboardInterrupt")
CRASH = 'Fatal Python error: Aborted\n\nCurrent thread 0x7f (most recent call first):\n  File "a.py", line 1'
LEAK = "/lib/resource_tracker.py:254: UserWarning: 1 leaked semaphore\n  warnings.warn('1 leaked …')"
IGNORED = "Exception ignored in: <function f at 0x1>\n" + TRACE.replace("bad", "in passing")
KILLED, INTERRUPTED, ABORTED = -signal.SIGKILL, -signal.SIGINT, -signal.SIGABRT


@pytest.mark.parametrize(
    ("printed", "after", "codes", "other_codes"),
    [
        (TRACE, "", {0, 1, 7, 255}, {KILLED, INTERRUPTED, ABORTED, 137}),
        (TRACE, "of two lines", {1}, {0, 7, KILLED}),
        (TRACE, "more\n" * 99 + "more", {1}, {7}),
        (TRACE, "more\n" * 101, set(), {1}),
        (INTERRUPT, "", {1, INTERRUPTED, 130}, {KILLED, 137}),
        (CRASH, "", {ABORTED, 128 - ABORTED, 1}, set()),
        (CRASH, "Aborted (core dumped)", {ABORTED, 128 - ABORTED}, set()),
    ],
)
def test_a_traceback_is_the_reason_if_it_fits_the_code_and_little_follows(
    printed: str, after: str, codes: set[int], other_codes: set[int]
) -> None:
    err = f"noise\n{printed}\n{after}".encode()
    for code in codes:
        text = tail_of(err, b"step 1\n", code)
        assert text.startswith(printed) and "step 1" not in text, code
        assert not after or text.endswith(after.splitlines()[-1]), "nothing that was printed last is missing"
    for code in other_codes:
        text = tail_of(err, b"step 1\n", code)
        assert text.startswith(ERR) and text.endswith(OUT + "step 1"), code


@pytest.mark.parametrize("code", [1, 7])
@pytest.mark.parametrize("noise", [LEAK, IGNORED, "[rank0]:[W1116 12:00:00.1 x.cpp:1] Warning: leaked", "\n\n"])
def test_what_python_and_its_libraries_say_at_exit_does_not_count(noise: str, code: int) -> None:
    assert tail_of(f"{TRACE}\n{noise}\n{IGNORED}\n{LEAK}\n".encode(), code=code) == TRACE


def test_what_is_left_out_of_a_long_message_is_marked() -> None:
    lines = [f"line {index}" for index in range(40)]
    after = tail_of("\n".join([TRACE, *lines]).encode()).removeprefix(TRACE + "\n").split("\n")
    assert after == [*lines[:12], "… 16 lines …", *lines[28:]]


def test_the_thread_of_a_traceback_is_shown() -> None:
    text = tail_of(("noise\nException in thread Thread-1:\n" + chained()).encode())
    assert text.startswith("Exception in thread Thread-1:\nTraceback")


@pytest.mark.parametrize(
    ("program", "begin", "end"),
    [
        ("import faulthandler; faulthandler._sigsegv()", "Fatal Python error: Segmentation fault", "in <module>"),
        ("import rich.traceback as t; t.install(); 1/0", "╭──", "ZeroDivisionError: division by zero"),
        ("raise SystemExit('not today')", "not today", "not today"),
        ("if", "  File", "SyntaxError: invalid syntax"),
        pytest.param(
            "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
            "  + Exception Group Traceback",
            "+------------------------------------",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11"),
        ),
    ],
)
def test_ends_of_real_programs_are_found(program: str, begin: str, end: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", f"import sys; print('noise', file=sys.stderr)\n{program}"]
    done = subprocess.run(command, capture_output=True, timeout=30)
    text = tail_of(done.stderr, code=done.returncode)
    assert end in text.splitlines()[-1]
    assert text.removeprefix(ERR).removeprefix("noise\n").startswith(begin)


def test_of_a_crash_only_its_own_thread_is_shown() -> None:
    begin = "Fatal Python error: Aborted\n\n"
    own = 'Current thread 0x7f (most recent call first):\n  File "a.py", line 1\n'
    other = 'Thread 0x80 (most recent call first):\n  File "b.py", line 2\n\n'
    for text in (begin + other + own, begin + own + "\n" + other, begin + other + own + "\n" + other):
        err = (text + "\nExtension modules: numpy (total: 1)\n").encode()
        assert tail_of(err, code=ABORTED) == (begin + own).rstrip("\n")
    assert tail_of((begin + other).encode(), code=ABORTED) == (begin + other).rstrip("\n"), "nobody knows whose it is"


def test_without_a_traceback_the_last_lines_are_taken() -> None:
    lines = b"".join(b"line %d\n" % index for index in range(100))
    last = "\n".join(f"line {index}" for index in range(80, 100))
    assert tail_of(lines, lines) == ERR + last + "\n" + OUT + last
    assert tail_of(lines) == ERR + last
    assert tail_of(b"") == ""


def test_when_nothing_is_on_stderr_stdout_is_shown() -> None:
    assert tail_of(b"\n \n", b"only this\n") == OUT + "only this"
    assert tail_of(b"", f"{TRACE}\n".encode()) == TRACE


def test_bars_colours_and_garbage_are_made_readable() -> None:
    assert (
        tail_of(b"\r10%\r20%\r\n\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07\xff\x00\n")
        == ERR + "20%\nred link\ufffd"
    )


def test_a_traceback_too_long_keeps_its_beginning_and_its_end() -> None:
    frames = "".join(f'  File "a.py", line {index}, in f\n    f()\n' for index in range(500))
    text = tail_of(f"Traceback (most recent call last):\n{frames}RecursionError: deep\n".encode())
    lines = text.splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "RecursionError: deep")
    assert lines[1].startswith("… ")
    assert len(text) < 17_000


def test_only_the_end_is_kept() -> None:
    tail = OutputTail()
    for index in range(20_000):
        tail.add("err", b"%d %s\n" % (index, b"x" * 100))
    tail.add("err", b"y" * 10_000_000 + b"\nlast\n")
    assert len(pickle.dumps(tail)) < 4 * 64 * 1024
    assert tail.text(1).splitlines()[-1] == "last"
