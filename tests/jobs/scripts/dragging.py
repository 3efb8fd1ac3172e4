"""A rank of tests/jobs/test_run.py: one step after the other until it is ended, and one rank takes longer for them."""

from __future__ import annotations

import sys
import time

import numpy as np

import ronde

LATE_S = 0.2
"""Much more than a busy machine delays the others."""


def main() -> None:
    ronde.init()
    x = np.ones(1000, np.float32)
    ronde.allreduce(x)
    print("begun", flush=True)
    while True:
        if ronde.rank() == int(sys.argv[1]):
            time.sleep(LATE_S)
        ronde.allreduce(x)
        ronde.mark_step()


if __name__ == "__main__":
    main()
