"""Ranks that call a function instead of a script: ronde.run(). From a program or a notebook.

The function travels by value (cloudpickle), together with the places where modules are found, on a pipe of each rank's
own; results come back the same way. Both ends are processes of this job, started by its agents.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from typing import Any, BinaryIO, TypeVar, cast

import cloudpickle

from ronde.errors import JobFailed
from ronde.launch.driver import Driver, Outcome
from ronde.launch.hosts import parse_hosts
from ronde.launch.job import Host, Job, Ssh
from ronde.launch.output.options import Place, PrintOptions, Target
from ronde.launch.output.printer import Printer
from ronde.launch.placement import place
from ronde.settings import OF_THE_JOB, PREFIX, Settings

__all__ = ["Answer", "pack_call", "run", "run_job"]

T = TypeVar("T")

CALLEE = "ronde.launch.callee"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank's function came to."""

    value: Any = None
    error: BaseException | None = None
    """What it raised; None also when that could not be pickled."""
    trace: str = ""
    """Its traceback as text; empty when it returned."""


class RankTraceback(Exception):  # noqa: N818  # shown as the cause of the error, and says whose traceback it is
    """Where in a rank an error came from."""


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | Sequence[Host] = "",
    env: Mapping[str, str] | None = None,
    ssh: Ssh | None = None,
    **settings: Any,  # noqa: ANN401  # see Settings
) -> list[T]:
    """Call fn(*args, **kwargs) on `np` ranks, and return what it returned, by rank.

    `hosts` as in `ronde run -H`; without them the ranks are processes of this machine. np defaults to all slots. When a
    rank fails, its own exception is raised here, with its traceback. What ranks print is shown with their numbers.
    """
    where = parse_hosts(hosts) if isinstance(hosts, str) and hosts else tuple(hosts)
    num_ranks = np if np is not None else sum(host.slots for host in where) or 1
    place(where, num_ranks)  # says what is wrong before anything is pickled
    job = Job(
        command=(sys.executable, "-m", CALLEE),
        num_ranks=num_ranks,
        hosts=where,
        ssh=ssh or Ssh(),
        env=dict(env or {}),
        settings=Settings.load(settings, _own_settings()),
        call=pack_call(fn, args, kwargs or {}),
    )
    return cast("list[T]", run_job(job))


def pack_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A call for Job.call. What cannot be pickled is the caller's mistake, and named."""
    if not callable(fn):
        raise TypeError(f"run() takes a function, got {type(fn).__name__}")
    try:
        call = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:  # whatever a __reduce__ raises
        raise TypeError(f"the function or its arguments cannot be sent to other processes: {error}") from error
    return cast("bytes", cloudpickle.dumps(([*sys.path], call)))


def run_job(job: Job) -> list[Any]:
    """Run a job whose ranks call a function: its results by rank, or the error of the rank that failed first."""
    target = _target()
    options = PrintOptions(place=Place.of(target) if _is_real(target) else Place(shared=True))
    with contextlib.closing(Printer(target, num_ranks=job.num_ranks, options=options)) as screen:
        outcome = Driver(job, screen).run()
    answers = {rank: _read(data) for rank, data in outcome.results.items()}
    _raise_failure(outcome, answers)
    return [answers[rank].value for rank in range(job.num_ranks)]


def _raise_failure(outcome: Outcome, answers: Mapping[int, Answer]) -> None:
    culprit = outcome.culprit
    answer = answers.get(culprit) if culprit is not None else None
    if answer is not None and answer.trace:
        cause = RankTraceback(f"\n\nin rank {culprit}:\n{answer.trace}")
        raise (answer.error or JobFailed(outcome.summary, code=outcome.code)) from cause
    if outcome.code != 0 or outcome.summary:
        raise JobFailed(outcome.summary, code=outcome.code)
    silent = [rank for rank in outcome.codes if rank not in answers]
    if silent:
        raise JobFailed(f"rank {silent[0]} ended before its function had returned", code=1)


def _read(data: bytes) -> Answer:
    try:
        answer = cloudpickle.loads(data)
    except Exception as error:  # whatever a class raises that cannot be made here
        return Answer(error=None, trace=f"its result cannot be unpickled here: {error!r}\n")
    assert isinstance(answer, Answer)
    return answer


def _own_settings() -> dict[str, str]:
    """The environment without what an outer job says about its own rank."""
    of_the_job = {PREFIX + name.upper() for name in OF_THE_JOB}
    return {name: text for name, text in os.environ.items() if name not in of_the_job}


# --- where output goes ---------------------------------------------------------------------------------------------


def _target() -> Target:
    return Target(_binary(sys.stdout), _binary(sys.stderr))


def _binary(stream: Any) -> BinaryIO:  # noqa: ANN401  # a text stream, perhaps a notebook's
    buffer = getattr(stream, "buffer", None)
    return cast("BinaryIO", buffer if buffer is not None else _TextSink(stream))


def _is_real(target: Target) -> bool:
    """Whether both are files of the system; a notebook's are not."""
    try:
        return all(file.fileno() >= 0 for file in target)
    except (OSError, ValueError):
        return False


class _TextSink(RawIOBase):
    """Bytes for a stream that takes text only, such as a notebook's."""

    def __init__(self, stream: Any) -> None:  # noqa: ANN401
        self._stream = stream

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:  # noqa: ANN401  # bytes of any kind
        """All of it."""
        self._stream.write(bytes(data).decode(errors="replace"))
        return len(data)

    def flush(self) -> None:
        """What was written."""
        self._stream.flush()

