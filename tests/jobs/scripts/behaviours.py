"""A rank of tests/conformance/runner.py: runs the behaviours that the test names, one after the other."""

from __future__ import annotations

import os
import sys
import traceback

if os.environ.get("TEST_EXTENSION") == "missing":
    sys.modules["ronde.comm.backends.hot_calls"] = None  # type: ignore[assignment]  # importing it raises ImportError

import ronde
from ronde.comm.world import current_world
from tests.conformance.cases import all_cases
from tests.conformance.frameworks.collective_cases import CASES
from tests.conformance.frameworks.framework import load_framework
from tests.jobs.scripts.control import ControlSocket


def run(rank: int, case: str, framework: str, mode: str) -> str:
    """What went wrong, or nothing. The rank thinks that it is on the host of all, on its own, or on one of two."""
    host = {"one": "", "apart": f"host-{rank}", "two": f"host-{rank % 2}"}[os.environ["TEST_HOSTS"]]
    try:
        ronde.init(host=host)
        if framework:
            CASES[case].body(load_framework(framework, mode))
        else:
            behaviour = all_cases()[case]
            behaviour.body(current_world())
            if behaviour.spoils:
                ronde.shutdown()
    except Exception:  # the edge of the process: the test shows it
        traceback.print_exc()  # also there, in case that another rank hangs
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    with ControlSocket(timeout_s=None) as test:  # it serves all tests of the session
        while True:
            asked = test.receive()
            test.send("ended", error=run(test.rank, asked["case"], asked["framework"], asked["mode"]))
