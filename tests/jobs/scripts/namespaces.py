"""A rank of tests/jobs/test_namespaces.py: collectives between two hosts, until one cannot be reached any more."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import ronde
from tests.jobs.scripts.control import ControlSocket

MANY = 1 << 22


def collectives() -> None:
    """Small and large, by order, by name and planned; all of it right."""
    rank, size = ronde.rank(), ronde.size()
    total = size * (size + 1) / 2
    for count in (1, 1000, MANY):
        x = np.full(count, rank + 1, np.float32)
        for name in (None, f"of {count}"):
            assert (ronde.allreduce(x, name=name) == total).all()
        assert (ronde.broadcast(x, root=size - 1) == size).all()
        assert ronde.allgather(x[:1000])[:: min(count, 1000)].tolist() == [*range(1, size + 1)]
        assert ronde.reduce_scatter(np.full((size, count), 1.0, np.float32)).tolist() == [[size] * count]
    rows, splits = ronde.alltoall(np.full(size, rank))
    assert rows.tolist() == [*range(size)] and splits.tolist() == [1] * size
    got = np.empty(3)
    sent = ronde.send(np.full(3, float(rank)), (rank + 1) % size, wait=False)
    assert (ronde.receive(got, (rank - 1) % size) == (rank - 1) % size).all()
    sent.wait()
    assert ronde.objects.allgather(rank) == [*range(size)]
    with ronde.plan([ronde.Bucket(count=MANY)]) as plan:
        plan.arrays[0][:] = rank + 1
        assert (plan.run(0) == total / size).all()


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
        collectives()
        test.send("right", place=[ronde.local_rank(), ronde.local_size(), ronde.cross_rank(), ronde.cross_size()])
        wanted = test.receive()
        if wanted["moment"] != "none":
            test.send("ended", **be_cut_off(test, wanted["moment"]))
        began = time.monotonic()
        ronde.shutdown()
        test.send("left", leaving_s=time.monotonic() - began)


if __name__ == "__main__":
    main()
