"""A rank of tests/jobs/test_namespaces.py: collectives between two hosts, until one cannot be reached any more."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import ronde
from tests.jobs.scripts.collectives import use_every_collective
from tests.jobs.scripts.control import ControlSocket

MANY = 1 << 22


def be_cut_off(test: ControlSocket, moment: str) -> dict[str, Any]:
    """Be inside of large operations, or wait for what does not come; how it ended."""
    x = np.ones(MANY, np.float32)
    test.send("under way")
    try:
        while moment == "inside":
            ronde.allreduce(x)
        if test.rank:
            ronde.allreduce(x)
        else:
            ronde.allreduce(x, name="of rank 0")
    except ronde.RoundEnded as error:
        at = time.monotonic()
        return {"error": type(error).__name__, "peer": getattr(error, "peer", None), "text": str(error), "ended": at}
    raise AssertionError("nothing ended it")


def main() -> None:
    with ControlSocket() as test:
        ronde.init()
        use_every_collective((1, 1000, MANY))
        test.send("right", place=[ronde.local_rank(), ronde.local_size(), ronde.cross_rank(), ronde.cross_size()])
        wanted = test.receive()
        if wanted["moment"] != "none":
            test.send("ended", **be_cut_off(test, wanted["moment"]))
        began = time.monotonic()
        ronde.shutdown()
        test.send("left", leaving_s=time.monotonic() - began)


if __name__ == "__main__":
    main()
