"""ronde.run without processes: what is sent, how an outcome becomes results or an error. Real ranks: tests/jobs."""

from __future__ import annotations

import errno
import io
import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pytest

import ronde
from ronde.errors import JobFailed
from ronde.launch.driver.driver import INTERRUPTED, TERMINATED
from ronde.launch.driver.failure_report import JobResult, StopRequest
from ronde.launch.function import RankTraceback, _raise_signal, pickle_call, unpickle_results
from ronde.launch.function_rank import _pickle_error
from ronde.launch.output.printer import standard_output_options
from ronde.launch.output.terminal import open_standard_streams

LOCK = threading.Lock()
TRACE = "Traceback …\nOdd: no\n"


def returned(value: object) -> bytes:
    return pickle.dumps("") + bytes(cloudpickle.dumps(value))


def raised(error: object) -> bytes:
    return pickle.dumps(TRACE) + bytes(cloudpickle.dumps(error))


def failed(result: bytes | None, *, code: int = 1) -> JobResult:
    """Rank 1 of 2 has failed."""
    results = {0: returned(0)} | ({1: result} if result is not None else {})
    return JobResult(code, "rank 1 on host a failed first", 1, return_values=results)


def test_results_come_by_rank() -> None:
    results = {2: returned("c"), 0: returned("a"), 1: returned(None)}
    assert unpickle_results(JobResult(0, "", return_values=results), 3) == ["a", None, "c"]


def test_the_failing_ranks_own_error_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="no") as caught:
        unpickle_results(failed(raised(KeyError("no"))), 2)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "in rank 1:\nTraceback …\nOdd: no" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "reply",
    [raised(None), raised(SystemExit(3)), raised(KeyboardInterrupt()), pickle.dumps(TRACE) + b"cnowhere\nOdd\n."],
    ids=["no pickle", "exit", "interrupt", "class of nowhere"],
)
def test_what_cannot_be_raised_here_is_a_failed_job_that_says_it(reply: bytes) -> None:
    with pytest.raises(JobFailed, match="rank 1 on host a failed first\nrank 1 raised Odd: no") as caught:
        unpickle_results(failed(reply, code=3), 2)
    assert caught.value.code == 3
    assert "Traceback …" in str(caught.value.__cause__)


def test_a_rank_without_an_answer_is_a_failed_job() -> None:
    with pytest.raises(JobFailed, match="rank 1 on host a failed first") as caught:
        unpickle_results(failed(None, code=137), 2)
    assert caught.value.code == 137
    with pytest.raises(JobFailed, match="rank 1 exited before its function had returned"):
        unpickle_results(JobResult(0, "", return_values={0: returned(1)}), 2)


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


def test_paths_before_the_standard_library_are_told_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    library = str(Path(io.__file__).parent)
    monkeypatch.setattr(sys, "path", ["/script", "/mine", library, "/installed"])
    monkeypatch.setattr(sys, "argv", ["script.py", "--fast"])
    scene = pickle.load(io.BytesIO(pickle_call(print, (), {})))
    assert scene == (["script.py", "--fast"], ["/script", "/mine"], [library, "/installed"])


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


def test_a_signal_that_the_driver_took_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", taken.append)
    _raise_signal(TERMINATED)
    with pytest.raises(KeyboardInterrupt):
        _raise_signal(INTERRUPTED)
    _raise_signal(StopRequest(143, "somebody called stop()"))
    assert taken == [signal.SIGTERM, signal.SIGINT]
