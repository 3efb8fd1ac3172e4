"""Ranks that call a function instead of a script: ronde.run(). From a program or a notebook.

The function travels by value (cloudpickle) on a pipe of each rank's own, and results come back the same way. Both ends
are processes of this job, started by its agents; launch/callee is the other one.
"""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast

import cloudpickle

from ronde.errors import JobFailed
from ronde.launch.driver.driver import HUNG_UP, INTERRUPTED, TERMINATED, Driver, JobResult
from ronde.launch.driver.failure_report import StopRequest
from ronde.launch.job import Job, SshOptions
from ronde.launch.output.printer import Printer, standard_output_options
from ronde.launch.output.terminal import open_standard_streams
from ronde.launch.placement import Host, parse_hosts, place_ranks
from ronde.settings import ASSIGNED_BY_LAUNCHER, PREFIX, Settings

__all__ = ["FUNCTION_RANK_COMMAND", "RankTraceback", "unpickle_results", "pickle_call", "run", "run_function_job"]

T = TypeVar("T")

FUNCTION_RANK_COMMAND = (
    "",  # the agent's own Python
    "-c",
    # Not -m: that looks into the working directory first, where the user may have files of any name.
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); from ronde.launch.function_rank import main; sys.exit(main())",
)
"""Job.command of ranks that make a call."""

_SIGNALS = {INTERRUPTED: signal.SIGINT, TERMINATED: signal.SIGTERM, HUNG_UP: signal.SIGHUP}


class RankTraceback(Exception):
    """Where in a rank an error came from: shown as its cause."""


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | Sequence[Host | str] = "",
    env: Mapping[str, str] | None = None,
    ssh: SshOptions | None = None,
    python: str = "",
    **settings: Any,  # see Settings
) -> list[T]:
    """Call fn(*args, **kwargs) on `np` ranks, and return what it returned, by rank.

        def train(rate):
            ronde.init()
            ...
            return loss

        losses = ronde.run(train, args=(0.1,), np=4)

    The function may be a closure, a lambda, or one of a script or notebook: it travels by value. `hosts` as in
    `ronde run -H`; without them the ranks are processes of this machine. np defaults to all slots. `env` is for every
    rank; `python` has ronde on other hosts, by default at the path of this one. Further keywords are settings.

    When a rank fails, its own exception is raised here, with its traceback as the cause; JobFailed, when it has none to
    raise (it was killed, it exited, its host was lost). Ctrl-C ends the job, and is a KeyboardInterrupt.
    """
    where = _parse_hosts_argument(hosts)
    job = Job(
        command=FUNCTION_RANK_COMMAND,
        num_ranks=_choose_num_ranks(np, where),
        hosts=where,
        ssh=ssh or SshOptions(),
        python=python,
        env=_check_variables(env or {}),
        settings=_load_settings(settings),
        pickled_call=pickle_call(fn, args, kwargs or {}),
    )
    return cast("list[T]", run_function_job(job))


def pickle_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A call for Job.call. What cannot be pickled is the caller's mistake, and named."""
    if not callable(fn):
        raise TypeError(f"run() takes a function, got {type(fn).__name__}")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise TypeError(f"args must be a list or tuple of arguments, as in args=(0.1,); got {type(args).__name__}")
    packed = BytesIO()
    # Before the standard library comes what the caller's script is to find first; what comes after it is installed.
    library = str(Path(os.__file__).parent)
    cut = sys.path.index(library) if library in sys.path else 0
    pickle.dump((sys.argv, sys.path[:cut], sys.path[cut:]), packed)
    try:
        cloudpickle.dump((fn, tuple(args), dict(kwargs)), packed)
    except Exception as error:  # whatever a __reduce__ raises
        raise TypeError(f"the function or its arguments cannot be sent to other processes: {error}") from error
    return packed.getvalue()


def run_function_job(job: Job) -> list[Any]:
    """Run a job whose ranks call a function: its results by rank, or the error of the rank that failed first."""
    target = open_standard_streams()
    options = standard_output_options(target, os.environ)
    with contextlib.closing(Printer(target, num_ranks=job.num_ranks, options=options)) as screen:
        outcome = Driver(job, screen).run()
    if outcome.stop_request is not None:
        _raise_signal(outcome.stop_request)
    return unpickle_results(outcome, job.num_ranks)


def unpickle_results(result: JobResult, num_ranks: int) -> list[Any]:
    """What the ranks of such a job returned; or raise what it has come to."""
    if result.exit_code != 0:
        _raise_failure(result)
    silent = [rank for rank in range(num_ranks) if rank not in result.return_values]
    if silent:
        raise JobFailed(f"rank {silent[0]} exited before its function had returned", code=1)
    return [_unpickle_value(rank, result.return_values.pop(rank)) for rank in range(num_ranks)]


def _raise_failure(result: JobResult) -> None:
    culprit = result.first_failed_rank
    trace, error = _unpickle_error(result.return_values[culprit]) if culprit in result.return_values else ("", None)
    if not trace:
        raise JobFailed(result.summary, code=result.exit_code)
    cause = RankTraceback(f"\n\nin rank {culprit}:\n{trace}")
    if isinstance(error, Exception):
        raise error from cause
    # One that cannot be brought here; or one that would end this process, which has done nothing to deserve it.
    last = trace.rstrip().rpartition("\n")[2]
    raise JobFailed(f"{result.summary}\nrank {culprit} raised {last}", code=result.exit_code) from cause


def _unpickle_error(data: bytes) -> tuple[str, BaseException | None]:
    """The traceback, empty if the function has returned; and the error, unless it cannot be made here."""
    source = BytesIO(data)
    trace: str = pickle.load(source)
    try:
        return trace, pickle.load(source) if trace else None
    except Exception:  # whatever a class raises that is not the same here
        return trace, None


def _unpickle_value(rank: int, data: bytes) -> Any:  # whatever the function returned
    source = BytesIO(data)
    pickle.load(source)
    try:
        return pickle.load(source)
    except Exception as error:  # whatever a class raises that is not the same here
        raise TypeError(f"what rank {rank} returned cannot be unpickled here: {error!r}") from error


def _raise_signal(stop_request: StopRequest) -> None:
    """The driver has taken a signal that was for this process: now that the job is over, it gets it."""
    if stop_request in _SIGNALS:
        signal.raise_signal(_SIGNALS[stop_request])
    if stop_request == INTERRUPTED:  # also where Ctrl-C is handled otherwise: nobody waits for the results any more
        raise KeyboardInterrupt


def _parse_hosts_argument(given: str | Sequence[Host | str]) -> tuple[Host, ...]:
    if isinstance(given, str):
        return parse_hosts(given) if given else ()
    return tuple(host for each in given for host in ([each] if isinstance(each, Host) else parse_hosts(each)))


def _choose_num_ranks(np: Any, hosts: Sequence[Host]) -> int:
    """As many as asked for, or as there are slots. Says what is wrong before anything is pickled."""
    try:
        num_ranks = sum(host.slots for host in hosts) or 1 if np is None else operator.index(np)
    except TypeError:
        raise TypeError(f"np must be a whole number, got {np!r}") from None
    place_ranks(hosts, num_ranks)
    return num_ranks


def _check_variables(env: Mapping[str, str]) -> dict[str, str]:
    for name, text in env.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"env must have texts, as in env={{'A': '1'}}; got {name!r}: {text!r}")
    return dict(env)


def _load_settings(given: Mapping[str, Any]) -> Settings:
    """These, over the environment without what an outer job says about its own rank."""
    if "num_ranks" in given:  # as it is called everywhere else
        raise TypeError("unknown setting num_ranks; the number of ranks is np, as in ronde.run(fn, np=4)")
    of_the_job = {PREFIX + name.upper() for name in ASSIGNED_BY_LAUNCHER}
    return Settings.load(given, {name: text for name, text in os.environ.items() if name not in of_the_job})
