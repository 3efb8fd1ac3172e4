"""The limit of open files (descriptors) of a process: raised when a rank or a coordinator starts, and explained when it
is reached. Sockets, shared memory and event loops all count as open files."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import zmq

from ronde.errors import StartFailed

MAX_RAISED_LIMIT = 1 << 20
"""The limit is not raised above this. Some containers allow a thousand times as many, and there are programs that close
every possible descriptor when they start: started by a rank, they would take minutes."""
NUM_NEEDED_TO_START = 64
"""A rank opens fewer than this many files before it opens channels."""

_SHORTAGE = (errno.EMFILE, errno.ENFILE)


def raise_open_files_limit() -> None:
    """Raise the limit of this process as far as its user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_RAISED_LIMIT if hard == resource.RLIM_INFINITY else min(hard, MAX_RAISED_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_open_files_error(error: int | None) -> bool:
    """Return whether this errno means that no more files can be opened."""
    return error in _SHORTAGE


def make_open_files_error(what: str) -> StartFailed:
    """Return the error of somebody (`what`, with a verb) who needs a file and cannot open it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        num_open = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208  # one is the listing itself
    except OSError:  # it cannot be opened either
        num_open = limit
    return StartFailed(
        f"{what}: too many open files ({num_open} are open in this process, its limit is {limit}); close some, or "
        "raise the limit (`ulimit -n`)"
    )


@contextmanager
def explain_open_files(what: str) -> Iterator[None]:
    """Turn the operating system's error about too many open files into StartFailed, which says what to do."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        if not is_open_files_error(error.errno):
            raise
        raise make_open_files_error(what) from error


def check_open_files(num_needed: int = NUM_NEEDED_TO_START) -> None:
    """Raise OSError unless so many files can be opened now. ZeroMQ ends the process when it cannot open its own."""
    with ExitStack() as opened:
        for _ in range(num_needed):
            opened.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))
