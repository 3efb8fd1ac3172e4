"""A rank of tests/jobs/test_joining.py: it joins with the settings that the test gives it, adds up arrays, and reports
the sums that are wrong, or the error."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np

import ronde
from tests.jobs.scripts.control import ControlSocket

COUNT = 1_500_000
"""6 MB: more than one slot of 4 MiB, and less than one of 8."""


def count_wrong_sums() -> int:
    total = ronde.size() * (ronde.size() + 1) / 2
    num_wrong = 0
    for count in (1, 1000, 5000, 16000, COUNT):
        x = np.full(count, ronde.rank() + 1, np.float32)
        num_wrong += sum(int(np.count_nonzero(ronde.allreduce(x, name=name) != total)) for name in (None, "x"))
    return num_wrong


def main() -> None:
    with ControlSocket() as test:
        wanted = test.receive()
        if "free_files" in wanted:
            limit = len(list(Path("/proc/self/fd").iterdir())) - 1 + wanted["free_files"]
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, max(limit, wanted["hard_limit"])))
        ended: dict[str, object] = {}
        try:
            ronde.init(**wanted["settings"])
            if wanted.get("pause"):
                test.send("joined")
                test.receive()
            ended = {"num_wrong": count_wrong_sums(), "limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
            ronde.shutdown()
        except (ronde.RondeError, ValueError) as error:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            ended = {"error": type(error).__name__, "text": str(error), "limit": limit}
        test.send("ended", **ended)


if __name__ == "__main__":
    main()
