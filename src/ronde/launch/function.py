"""ronde.run(): ranks that call a function instead of running a script, from a program or a notebook.

The function travels by value (cloudpickle) on a pipe of each rank's own, and results come back the same way. Both ends
are processes of this job, started by its agents; function_rank is the other end.
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
from typing import Any, NoReturn, TypeVar, cast

import cloudpickle

from ronde.errors import JobFailed
from ronde.launch.driver.driver import INTERRUPTED, SIGNAL_REQUESTS, Driver
from ronde.launch.driver.failure_report import JobResult, StopRequest
from ronde.launch.job import Job, SshOptions, load_settings, make_elastic_limits
from ronde.launch.output.printer import Printer, standard_output_options
from ronde.launch.output.terminal import open_standard_streams
from ronde.launch.placement import Host, parse_hosts

T = TypeVar("T")

FUNCTION_RANK_COMMAND = (
    "",  # the agent's own Python
    "-c",
    # Not -m: that looks into the working directory first, where the user may have files of any name.
    "import sys; sys.path[:1] == [''] and sys.path.pop(0)\n"
    "from ronde.launch.function_rank import main; sys.exit(main())",
)
"""Job.command of ranks that call a function."""


class RankTraceback(Exception):
    """The traceback of a rank's error in that rank: the cause of the error that is raised here."""


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    reset_limit: int | None = None,
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

    With min_np or max_np the number of ranks may change (ronde.elastic): the job goes on as long as there are min_np
    ranks, ranks that were lost are started again, further ones join, up to max_np, where the hosts have slots; it fails
    when ranks were lost more than reset_limit times. The result is that of the ranks of the last round.

    When a rank fails, its own exception is raised here, with its traceback as the cause; JobFailed, when it has none to
    raise (it was killed, it exited, its host was lost). Ctrl-C ends the job, and is a KeyboardInterrupt.
    """
    parsed_hosts = _parse_hosts_argument(hosts)
    try:
        num_ranks = sum(host.slots for host in parsed_hosts) or 1 if np is None else operator.index(np)
    except TypeError:
        raise TypeError(f"np must be a whole number, got {np!r}") from None
    _check_env(env)
    if "num_ranks" in settings:  # its name everywhere else
        raise TypeError("unknown setting num_ranks; the number of ranks is np, as in ronde.run(fn, np=4)")
    is_elastic = min_np is not None or max_np is not None
    loaded = load_settings(settings, os.environ, is_elastic=is_elastic)
    limits = None
    if is_elastic:
        limits = make_elastic_limits(loaded, num_ranks, min_np=min_np, max_np=max_np, reset_limit=reset_limit)
    elif reset_limit is not None:
        raise ValueError("reset_limit is for jobs whose number of ranks changes: give min_np, too")
    job = Job(
        command=FUNCTION_RANK_COMMAND,
        num_ranks=num_ranks,
        hosts=parsed_hosts,
        ssh=ssh or SshOptions(),
        python=python,
        env=dict(env or {}),
        settings=loaded,
        limits=limits,
        pickled_call=pickle_call(fn, args, kwargs or {}),
    )
    streams = open_standard_streams()
    options = standard_output_options(streams, os.environ)
    with contextlib.closing(Printer(streams, num_ranks=num_ranks, options=options)) as printer:
        result = Driver(job, printer).run()
    if result.stop_request is not None:
        _raise_signal(result.stop_request)
    return cast("list[T]", unpickle_results(result, len(result.return_values) if is_elastic else num_ranks))


def make_function_job(
    *,
    hosts: str | Sequence[Host | str] = "",
    env: Mapping[str, str] | None = None,
    ssh: SshOptions | None = None,
    python: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Job:
    """Make a job of one rank with no command yet, from arguments as those of run(). For programs that start several
    jobs alike, each with ranks and a call of its own."""
    _check_env(env)
    return Job(
        command=(),
        num_ranks=1,
        hosts=_parse_hosts_argument(hosts),
        ssh=ssh or SshOptions(),
        python=python,
        env=dict(env or {}),
        settings=load_settings(settings or {}, os.environ),
    )


def _parse_hosts_argument(hosts: str | Sequence[Host | str]) -> tuple[Host, ...]:
    listed = [hosts] if isinstance(hosts, str) and hosts else hosts
    return tuple(host for each in listed for host in ([each] if isinstance(each, Host) else parse_hosts(each)))


def _check_env(env: Mapping[str, str] | None) -> None:
    for name, text in (env or {}).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"env must have texts, as in env={{'A': '1'}}; got {name!r}: {text!r}")


def pickle_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a call for Job.pickled_call. TypeError names what cannot be pickled."""
    if not callable(fn):
        raise TypeError(f"run() takes a function, got {type(fn).__name__}")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise TypeError(f"args must be a list or tuple of arguments, as in args=(0.1,); got {type(args).__name__}")
    packed = BytesIO()
    # Paths before the standard library are the script's own; those after it are installed packages.
    library = str(Path(os.__file__).parent)
    cut = sys.path.index(library) if library in sys.path else 0
    pickle.dump((sys.argv, sys.path[:cut], sys.path[cut:]), packed)
    try:
        cloudpickle.dump((fn, tuple(args), dict(kwargs)), packed)
    except Exception as error:  # whatever a __reduce__ raises
        raise TypeError(f"the function or its arguments cannot be sent to other processes: {error}") from error
    return packed.getvalue()


def unpickle_results(result: JobResult, num_ranks: int) -> list[Any]:
    """Return what the functions of all ranks have returned, or raise the failure of the job."""
    if result.exit_code != 0:
        _raise_failure(result)
    values = []
    for rank in range(num_ranks):
        if rank not in result.return_values:
            raise JobFailed(f"rank {rank} exited before its function had returned", code=1)
        reply = BytesIO(result.return_values.pop(rank))
        pickle.load(reply)  # the traceback, empty
        try:
            values.append(pickle.load(reply))
        except Exception as error:  # whatever a class raises that is different here
            raise TypeError(f"what rank {rank} returned cannot be unpickled here: {error!r}") from error
    return values


def _raise_failure(result: JobResult) -> NoReturn:
    first_failed = result.first_failed_rank
    reply = BytesIO(result.return_values.get(-1 if first_failed is None else first_failed, pickle.dumps("")))
    trace: str = pickle.load(reply)  # empty if the function has returned
    if not trace:
        raise JobFailed(result.summary, code=result.exit_code)
    error = None
    with contextlib.suppress(Exception):  # whatever a class raises that is different here
        error = pickle.load(reply)
    cause = RankTraceback(f"\n\nin rank {first_failed}:\n{trace}")
    if isinstance(error, Exception):
        raise error from cause
    # An error that cannot be unpickled here, or one (SystemExit) that would end this process, too.
    last = trace.rstrip().rpartition("\n")[2]
    raise JobFailed(f"{result.summary}\nrank {first_failed} raised {last}", code=result.exit_code) from cause


def _raise_signal(stop_request: StopRequest) -> None:
    """Raise the signal that the driver has handled in place of this process, now that the job is over."""
    for number, request in SIGNAL_REQUESTS.items():
        if stop_request == request:
            signal.raise_signal(number)
    if stop_request == INTERRUPTED:  # also where another handler takes Ctrl-C: there are no results
        raise KeyboardInterrupt
