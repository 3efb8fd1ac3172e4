"""The last words of a rank."""

from __future__ import annotations

import subprocess
import sys
import traceback

import pytest

from ronde.launch.output.tail import Tail
from ronde.launch.output.tracebacks import last_traceback


def tail_of(err: bytes, out: bytes = b"") -> str:
    tail = Tail()
    tail.add("err", err)
    tail.add("out", out)
    return tail.text()


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
    story = chained()
    assert tail_of(f"starting\nwarning: x\n{story}".encode()) + "\n" == story


def test_of_two_tracebacks_the_last_is_meant() -> None:
    text = tail_of((chained() + "retrying\n" + chained().replace("bad", "worse")).encode())
    assert "worse value" in text
    assert "bad value" not in text


def test_what_python_says_while_it_ends_is_not_meant() -> None:
    aside = "Exception ignored in: <function A.__del__ at 0x1>\n" + chained().replace("bad value", "in passing")
    text = tail_of((chained() + aside).encode())
    assert "bad value" in text
    assert "in passing" not in text
    assert "Exception ignored" not in text
    assert "in passing" in tail_of(aside.encode())


def test_noise_after_a_traceback_does_not_push_it_out() -> None:
    text = tail_of((chained() + "shutting down\n" * 500).encode())
    assert text.startswith("Traceback")
    assert "RuntimeError: message\nof two lines" in text
    assert text.count("\n") < 100


def test_the_thread_of_a_traceback_is_told() -> None:
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
    err = subprocess.run(command, capture_output=True, timeout=30).stderr
    text = tail_of(err)
    assert end in text.splitlines()[-1]
    assert text.removeprefix("noise\n").startswith(begin)


def test_of_a_crash_only_its_own_thread_is_told() -> None:
    begin = "Fatal Python error: Aborted\n\n"
    own = 'Current thread 0x7f (most recent call first):\n  File "a.py", line 1\n'
    other = 'Thread 0x80 (most recent call first):\n  File "b.py", line 2\n\n'
    for text in (begin + other + own, begin + own + "\n" + other, begin + other + own + "\n" + other):
        assert tail_of((text + "\nExtension modules: numpy (total: 1)\n").encode()) == (begin + own).rstrip("\n")
    assert tail_of((begin + other).encode()) == (begin + other).rstrip("\n"), "nobody knows whose it is"


def test_without_a_traceback_the_last_lines_are_taken() -> None:
    assert tail_of(b"".join(b"line %d\n" % index for index in range(100))).splitlines()[0] == "line 80"


def test_when_nothing_is_on_stderr_stdout_speaks() -> None:
    assert tail_of(b"\n \n", b"only this\n") == "only this"
    assert tail_of(b"this\n", b"not this\n") == "this"
    assert tail_of(b"") == ""


def test_bars_colours_and_garbage_are_made_readable() -> None:
    assert (
        tail_of(b"\r10%\r20%\r\n\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07\xff\x00\n")
        == "20%\nred link\ufffd"
    )


def test_a_traceback_too_long_keeps_its_beginning_and_its_end() -> None:
    frames = "".join(f'  File "a.py", line {index}, in f\n    f()\n' for index in range(500))
    text = tail_of(f"Traceback (most recent call last):\n{frames}RecursionError: deep\n".encode())
    lines = text.splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "RecursionError: deep")
    assert lines[1].startswith("… ")
    assert len(text) < 17_000


def test_memory_is_bounded_and_the_end_kept() -> None:
    tail = Tail()
    for index in range(20_000):
        tail.add("err", b"%d %s\n" % (index, b"x" * 100))
    tail.add("err", b"y" * 10_000_000 + b"\nlast\n")
    assert sum(len(chunk) for chunk in tail._chunks["err"]) <= 2 * 64 * 1024
    assert tail.text().splitlines()[-1] == "last"


def test_no_traceback_is_none() -> None:
    assert last_traceback(["all", "is well", "said: Traceback (most recent call last):"]) is None
