"""A rank of tests/conformance/runner.py: runs the behaviours that the test names, one after the other."""

from __future__ import annotations

import os
import sys
import traceback

if os.environ.get("TEST_EXTENSION") == "missing":
    sys.modules["ronde.comm.backends.hot_calls"] = None  # type: ignore[assignment]  # importing it raises ImportError

import ronde
from ronde.comm.world import current_world
from tests.conformance.cases import Case, all_cases
from tests.jobs.scripts.control import ControlSocket


def run(case: Case, rank: int) -> str:
    """What went wrong, or nothing. The rank thinks that it is on the host of all, on its own, or on one of two."""
    host = {"one": "", "apart": f"host-{rank}", "two": f"host-{rank % 2}"}[os.environ["TEST_HOSTS"]]
    try:
        ronde.init(host=host)
        case.body(current_world())
        if case.spoils:
            ronde.shutdown()
    except Exception:  # the edge of the process: the test shows it
        traceback.print_exc()  # also there, in case that another rank hangs
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    with ControlSocket(timeout_s=None) as test:  # it serves all tests of the session
        while True:
            test.send("ended", error=run(all_cases()[test.receive()["case"]], test.rank))
