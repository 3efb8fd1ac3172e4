"""A rank of tests/jobs/test_joining.py: it joins with the settings that the test gives it, adds up arrays, and reports
the sums that are wrong, or the error."""

from __future__ import annotations

import resource

import numpy as np

import ronde
from tests.jobs.scripts.control import ControlSocket

COUNT = 1_500_000
"""6 MB: more than one slot of 4 MiB, and less than one of 8."""


def count_wrong_sums() -> int:
    x = np.full(COUNT, ronde.rank() + 1, np.float32)
    total = ronde.size() * (ronde.size() + 1) / 2
    return sum(int(np.count_nonzero(ronde.allreduce(x, name=name) != total)) for name in (None, "x"))


def main() -> None:
    with ControlSocket() as test:
        wanted = test.receive()
        if limits := wanted.get("open_files"):
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        try:
            ronde.init(**wanted["settings"])
            ended = {"num_wrong": count_wrong_sums(), "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)}
            ronde.shutdown()
        except (ronde.RondeError, ValueError) as error:
            ended = {"error": type(error).__name__, "text": str(error)}
        test.send("ended", **ended)


if __name__ == "__main__":
    main()
