"""How long tests wait before they call something a failure. The only home of these numbers.

All of them are for a machine that is busy with other things: nobody waits for as long as they say unless something is
wrong. They are in order, so that whoever knows most about a failure is the first to report it: an operation of a rank,
then the rank, then the test, then pytest, which ends the whole run. tests/unit/test_limits.py checks the order.
"""

from __future__ import annotations

import os
from pathlib import Path

SECONDS_S = 40.0
"""What "within seconds" may take: ranks that were told to end, a caller that is turned away."""
CLOSING_S = 20.0
"""What is just closing after a test (a thread that was told to end, a child about to be reaped) gets this long."""
OPERATION_S = 60.0
"""`operation_s` and `start_s` of ranks whose time limits are not the point of the test."""
RANK_S = 90.0
"""How long a rank waits for something that has to come to pass inside of the job."""
PATIENCE_S = 120.0
"""How long a test waits for one thing: a word of a rank, the end of a short job."""
TEST_S = 400.0
"""pytest's limit for a test that starts processes and waits for several things."""
LONG_S = 600.0
"""How long a test waits for ranks that import PyTorch or TensorFlow, for dozens of ranks, or for many checks."""
LONG_TEST_S = 1900.0
"""pytest's limit for a test with up to three such waits."""
BUILD_S = 900.0
"""A build from source, or an environment with all dependencies."""
BUILD_TEST_S = 2000.0
"""pytest's limit for a test that does both."""


MAX_SLOWDOWN = 4.0
"""How many times longer a promise may take on a busy machine. Promises are of a second or less, and what breaks one
costs more than four: the heartbeat, `shutdown_s` (5 s), `start_s`, `operation_s`. So a broken one is always seen."""


def promised_s(seconds: float) -> float:
    """How long something may take now that ronde promises its users within so many seconds on a quiet machine: as many
    times longer as there are processes per core that want to run, but at most MAX_SLOWDOWN times. What is no promise to
    users has PATIENCE_S."""
    runnable, _, _ = Path("/proc/loadavg").read_text().split()[3].partition("/")
    per_core = max(os.getloadavg()[0], float(runnable)) / len(os.sched_getaffinity(0))
    return seconds * min(max(1.0, per_core), MAX_SLOWDOWN)
