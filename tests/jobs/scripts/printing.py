"""A rank of tests/jobs/test_run_output.py: prints what its number says, as fast as it can. Does not use ronde."""

from __future__ import annotations

import os
import random

NUM_LINES = 60_000
LONG_BYTES = 50_000_000


def printed(rank: int) -> tuple[bytes, bytes]:
    """All that a rank writes to its standard output and to its standard error."""
    if rank == 0:  # one line
        return b"x" * LONG_BYTES + b"\n", b""
    if rank == 1:  # all bytes there are
        chance = random.Random(rank)
        return chance.randbytes(2_000_000), chance.randbytes(500_000)
    lines = [b"%d of rank %d %s" % (number, rank, b"." * (number % 100)) for number in range(NUM_LINES)]
    return b"\n".join(lines) + b"\n", b"\n".join(lines[::10]) + b"\nrank %d does not end its line" % rank


def main() -> None:
    for fd, data in enumerate(printed(int(os.environ["RANK"])), start=1):
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]


if __name__ == "__main__":
    main()
