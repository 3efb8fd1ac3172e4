"""ronde.run without processes: what is sent, how an outcome becomes results or an error. Real ranks: tests/jobs."""

from __future__ import annotations

import errno
import io
import pickle
import sys
import threading
from typing import Any

import numpy
import pytest

import ronde
from ronde.errors import JobFailed
from ronde.launch.driver.failure_report import JobResult
from ronde.launch.function import pickle_call, unpickle_results
from ronde.launch.function_rank import _pickle_error
from ronde.launch.output.printer import standard_output_options
from ronde.launch.output.terminal import open_standard_streams

LOCK = threading.Lock()


def test_an_error_that_cannot_be_made_here_keeps_its_traceback() -> None:
    reply = pickle.dumps("Traceback …\nOdd: no\n") + b"cnowhere\nOdd\n."
    with pytest.raises(JobFailed, match="rank 1 failed first\nrank 1 raised Odd: no") as caught:
        unpickle_results(JobResult(3, "rank 1 failed first", 1, return_values={1: reply}), 2)
    assert caught.value.code == 3
    assert "in rank 1:\nTraceback …\nOdd: no" in str(caught.value.__cause__)


def test_a_result_that_cannot_be_made_here_is_named() -> None:
    with pytest.raises(TypeError, match=r"what rank 0 returned cannot be unpickled here: ModuleNotFound.*nowhere"):
        unpickle_results(JobResult(0, "", return_values={0: pickle.dumps("") + b"cnowhere\nThing\n."}), 1)


@pytest.mark.parametrize(
    ("fn", "args", "words"),
    [
        (3, (), "run() takes a function, got int"),
        (print, 3, "args must be a list or tuple of arguments, as in args=(0.1,); got int"),
        (print, "abc", "got str"),
        (print, (LOCK,), "cannot be sent to other processes"),
        (LOCK.acquire, (), "cannot be sent to other processes"),
    ],
)
def test_what_cannot_be_called_elsewhere_is_the_callers_mistake(fn: Any, args: Any, words: str) -> None:
    with pytest.raises(TypeError) as caught:
        pickle_call(fn, args, {})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"np": 4, "hosts": ["a:1", "b:2"]}, ValueError, "1 slot short"),
        ({"np": numpy.int64(3), "hosts": "a"}, ValueError, "3 ranks, but only 1 slot"),
        ({"np": 1, "colour": "red"}, TypeError, "unknown setting colour"),
        ({"np": "2"}, TypeError, "np must be a whole number, got '2'"),
        ({"np": 2.0}, TypeError, "np must be a whole number, got 2.0"),
        (
            {"num_ranks": 2},
            TypeError,
            "unknown setting num_ranks; the number of ranks is np, as in ronde.run(fn, np=4)",
        ),
        ({"env": {"A": 1}}, TypeError, "env must have texts, as in env={'A': '1'}; got 'A': 1"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_starts(
    arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as caught:
        ronde.run(print, **arguments)
    assert words in str(caught.value)


class Odd(Exception):  # pickle makes it anew with the wrong words
    def __init__(self, left: int, right: int = 0) -> None:
        super().__init__(f"{left}-{right}")
        self.left = left


class Stubborn(Odd):  # pickle cannot make it at all
    def __init__(self, left: int, right: int) -> None:
        super().__init__(left, right)


class Full(OSError):  # has more to it than its args
    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOSPC, "no space", path)


class Lacking(ImportError):
    def __init__(self, part: str) -> None:
        super().__init__(f"no {part}", name=part)


class Closed(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


OWN = ("errno", "filename", "name")
"""What builtin exceptions keep in no dictionary."""


@pytest.mark.parametrize(
    "error",
    [KeyError("no"), FileNotFoundError(2, "no", "/x"), Odd(1, 2), Stubborn(1, 2), Full("/x"), Lacking("x"), Closed()],
)
def test_an_error_comes_back_as_it_was(error: Exception) -> None:
    back = pickle.loads(_pickle_error(error))
    assert (type(back), str(back), back.args, vars(back)) == (type(error), str(error), error.args, vars(error))
    assert [getattr(back, each, None) for each in OWN] == [getattr(error, each, None) for each in OWN]


def test_streams_that_take_text_only_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    target = open_standard_streams()
    assert standard_output_options(target, {}).terminal_info.same_file
    for part in (b"\xc3", b"\xa4\n"):  # one letter in two parts
        target.out.write(part)
        target.err.write(part)
    target.err.flush()
    assert out.getvalue() == "ä\n"
