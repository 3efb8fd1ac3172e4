"""What each rank of tests/jobs/test_mpi.py does to see the public functions work under mpiexec.

`python -m tests.jobs.mpi_job collectives` uses everything once, in two rounds; `… fails` lets the last rank fail while
the others wait for it, and exits with 0 on those that are told so; `… killed N` lets rank N be killed.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import ronde
from ronde.errors import RoundEnded
from tests.limits import OPERATION_S


def collectives() -> None:
    """Every collective, by order and by name, through the public functions."""
    rank, size = ronde.rank(), ronde.size()
    everybody = range(size)
    x = np.full(5, rank + 1.0, np.float32)
    total = sum(rank + 1 for rank in everybody)
    assert (ronde.allreduce(x) == total).all()
    assert (ronde.allreduce(x, name="w", op="mean") == total / size).all()
    works = [ronde.allreduce(x * index, name=f"w{index}", wait=False) for index in range(5)]
    assert all((work.wait() == total * index).all() for index, work in enumerate(works))
    assert ronde.allgather(np.arange(rank)).tolist() == [n for other in everybody for n in range(other)]
    assert (ronde.broadcast(x, root=size - 1) == size).all()
    assert (ronde.reduce_scatter(np.ones((size + 1, 3))) == size).all()
    rows, splits = ronde.alltoall(np.full(size, rank))
    assert rows.tolist() == list(everybody) and splits.tolist() == [1] * size
    ronde.barrier()
    exchange(rank, size)
    group = ronde.add_group([0, size - 1])
    if group.included:
        assert (group.allreduce(np.ones(1)) == 2).all()
    ronde.remove_group(group)
    with ronde.plan([ronde.Bucket(count=1000), ronde.Bucket(count=3)]) as plan:
        plan.arrays[0][:] = rank
        plan.run(0)
        assert (plan.arrays[0] == sum(everybody) / size).all()
    for _ in range(rank):
        ronde.allreduce(x)
    assert ronde.join() == size - 1


def exchange(rank: int, size: int) -> None:
    """Messages in a ring, and Python objects."""
    got = np.empty(3)
    sent = ronde.send(np.full(3, float(rank)), (rank + 1) % size, wait=False)
    ronde.receive(got, (rank - 1) % size)
    sent.wait()
    assert (got == (rank - 1) % size).all()
    assert ronde.objects.broadcast({"rank": rank}, root=1) == {"rank": 1}
    assert ronde.objects.allgather("x" * rank) == ["x" * other for other in range(size)]


def fails() -> None:
    """The last rank ends with an error; whoever waits for it is told why."""
    if ronde.rank() == ronde.size() - 1:
        raise ArithmeticError("the last rank gives up")
    try:
        ronde.allreduce(np.ones(3))
    except RoundEnded as error:
        sys.stderr.write(f"told: {error}\n")
    else:
        raise AssertionError("nobody told this rank")


def killed() -> None:
    """A rank, given by its number, is killed; the others say what they are told, if they live to hear of it."""
    victim = int(sys.argv[2])
    if ronde.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ronde.allreduce(np.ones(3))
    except RoundEnded as error:
        os.write(2, f"told: {error}\n".encode())  # as one piece: all ranks write to one file


def main() -> None:
    """Two rounds in one process: what the first leaves must not disturb the second."""
    what = {"collectives": collectives, "fails": fails, "killed": killed}[sys.argv[1]]
    for _ in range(2 if what is collectives else 1):
        ronde.init(start_s=OPERATION_S, operation_s=OPERATION_S)
        what()
        ronde.shutdown()


if __name__ == "__main__":
    main()
