"""A rank of tests/jobs/test_hosts.py: does what its argument says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import ronde


def add() -> None:
    """One collective of each size; then look whether anybody can see the job's key."""
    ronde.init()
    total = ronde.size() * (ronde.size() + 1) / 2
    for count in (1, 1 << 20):
        assert (ronde.allreduce(np.full(count, ronde.rank() + 1.0)) == total).all()
    key = os.environ["RONDE_KEY"].encode()
    commands = [read(path / "cmdline") for path in Path("/proc").glob("[0-9]*")]
    assert len(commands) > 2 and not any(key in command for command in commands)
    words = (ronde.local_rank(), ronde.local_size(), ronde.cross_rank(), os.environ["MASTER_ADDR"])
    print("placed", ronde.rank(), *words, flush=True)
    ronde.shutdown()


def read(path: Path) -> bytes:
    """A file of a process, which may be gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def stay() -> None:
    """Start a child, and never end by oneself; no ronde."""
    with subprocess.Popen(["sleep", "1000"]):
        print("here", os.environ["RANK"], flush=True)


def dance() -> None:
    """Be inside of collectives until something ends it."""
    ronde.init()
    print("here", ronde.rank(), flush=True)
    while True:
        ronde.allreduce(np.ones(1 << 16))


if __name__ == "__main__":
    {"add": add, "stay": stay, "dance": dance}[sys.argv[1]]()
