"""A rank of tests/jobs/test_run.py: rank 1 ends, in the way that the first argument says, while the others wait for it
in an allreduce."""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import sys

import numpy as np

import ronde
from tests.limits import RANK_S


def outlive(pids: list[int]) -> None:
    """Be the last to go: the others have heard of our end, and gone, before our process has ended."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([fd], [], [], RANK_S)


def end(how: str) -> None:
    if how in ("raise", "late"):
        raise RuntimeError("boom")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        ctypes.string_at(0)
    sys.exit(int(how))


def main() -> None:
    how, others = sys.argv[1], list[int]()
    atexit.register(outlive, others)  # before ronde's own, so that it is called after it
    ronde.init()
    rank = ronde.rank()
    pids = ronde.allgather(np.array([os.getpid()])).tolist()
    if rank == 1:
        others += [pid for pid in pids if how == "late" and pid != os.getpid()]
        end(how)
    ronde.allreduce(np.ones(3))
    print("nobody comes here")


if __name__ == "__main__":
    main()
