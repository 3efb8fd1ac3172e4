"""The ranks of tests of `ronde run`: the first argument names what a rank does."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.limits import RANK_S

SLOW_STEP_S = 0.2
"""How much longer the slow rank takes for a step: much more than a busy machine delays the others."""
NUM_LINES = 60_000
LONG_LINE_BYTES = 50_000_000


# --- how ranks end -------------------------------------------------------------------------------------------------


def end(how: str) -> None:
    """Rank 1 ends in this way while the others wait for it in an allreduce."""
    others = list[int]()
    atexit.register(_outlive, others)  # before ronde's own, so that it is called after it
    import numpy as np

    import ronde

    ronde.init()
    pids = ronde.allgather(np.array([os.getpid()])).tolist()
    if ronde.rank() == 1:
        others += [pid for pid in pids if how == "late" and pid != os.getpid()]
        _end_as(how)
    ronde.allreduce(np.ones(3))
    print("nobody comes here")


def _end_as(how: str) -> None:
    if how in ("raise", "late"):
        raise RuntimeError("boom")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        ctypes.string_at(0)
    sys.exit(int(how))


def _outlive(pids: list[int]) -> None:
    """Wait until these processes have ended, so that this one is the last."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([fd], [], [], RANK_S)


def stay(manner: str = "polite", folder: str = "") -> None:
    """Start a child, and do not end until asked; a `deaf` rank does not end when asked, either. Does not use ronde. A
    file in the folder, named by the rank, tells that it is ready."""
    if manner == "deaf":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # and so does the child
    subprocess.Popen(["sleep", "1000"])
    print("ready", os.environ["RANK"], flush=True)
    if folder:
        Path(folder, os.environ["RANK"]).touch()
    signal.pause()


# --- what ranks do -------------------------------------------------------------------------------------------------


def add() -> None:
    """A small and a large allreduce; then see that the job's key is on no command line."""
    import numpy as np

    import ronde

    ronde.init()
    total = ronde.size() * (ronde.size() + 1) / 2
    for count in (1, 1 << 20):
        assert (ronde.allreduce(np.full(count, ronde.rank() + 1.0)) == total).all()
    key = os.environ["RONDE_KEY"].encode()
    commands = [_read(path / "cmdline") for path in Path("/proc").glob("[0-9]*")]
    assert len(commands) > 2 and not any(key in command for command in commands)
    place = (ronde.local_rank(), ronde.local_size(), ronde.cross_rank(), os.environ["MASTER_ADDR"])
    print("placed", ronde.rank(), *place, flush=True)
    ronde.shutdown()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def step(slow_rank: str = "-1") -> None:
    """One step after the other until something ends it; one rank takes longer for them."""
    import numpy as np

    import ronde

    ronde.init()
    x = np.ones(1 << 16, np.float32)
    ronde.allreduce(x)
    print("begun", flush=True)
    while True:
        if ronde.rank() == int(slow_rank):
            time.sleep(SLOW_STEP_S)
        ronde.allreduce(x)
        ronde.mark_step()


def write() -> None:
    """Write printed() as fast as possible. Does not use ronde."""
    for fd, data in enumerate(printed(int(os.environ["RANK"])), start=1):
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]


def printed(rank: int) -> tuple[bytes, bytes]:
    """All that a rank writes to its standard output and to its standard error."""
    if rank == 0:  # one line
        return b"x" * LONG_LINE_BYTES + b"\n", b""
    if rank == 1:  # all bytes there are
        chance = random.Random(rank)
        return chance.randbytes(2_000_000), chance.randbytes(500_000)
    lines = [b"%d of rank %d %s" % (number, rank, b"." * (number % 100)) for number in range(NUM_LINES)]
    return b"\n".join(lines) + b"\n", b"\n".join(lines[::10]) + b"\nrank %d does not end its line" % rank


ACTIONS: dict[str, Callable[..., None]] = {"add": add, "end": end, "stay": stay, "step": step, "write": write}

if __name__ == "__main__":
    ACTIONS[sys.argv[1]](*sys.argv[2:])
