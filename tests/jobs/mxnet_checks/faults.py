"""One rank of a job in which something goes wrong: `python -m tests.jobs.mxnet_checks.faults CASE FOLDER`. What it sees
is written into a file of the folder, named after its rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon

import ronde
import ronde.mxnet as rm
from tests.jobs.mxnet_checks.checks import error_of, slow_zeros
from tests.jobs.scripts.control import until

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])


def write(text: str) -> None:
    (FOLDER / f"rank-{ronde.rank()}").write_text(text)


def kill_self() -> None:
    (FOLDER / "killed").write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def write_error(error: Exception) -> None:
    """The error, and how long after the death of the other rank it came."""
    elapsed_s = time.monotonic() - float((FOLDER / "killed").read_text())
    write(f"{elapsed_s:.3f} {type(error).__name__}: {error}")


def lose_a_rank_in_an_operation() -> None:
    for name in (None, "loss"):
        rm.allreduce(mx.nd.ones((3,)), name=name, wait=False).wait_to_read()
    if ronde.rank() == 1:
        until((FOLDER / "called").exists, "the other rank has called")
        kill_self()
    results = [rm.allreduce(slow_zeros() + 1.0, name=name, wait=False) for name in (None, "loss", None, "other")]
    (FOLDER / "called").touch()
    errors = [error_of(lambda each=each: each) for each in results]  # type: ignore[misc]  # of one array
    assert len({type(each) for each in errors}) == 1
    write_error(errors[0])


def lose_a_rank_in_a_step() -> None:
    net = gluon.nn.Dense(50, in_units=100)
    net.initialize(mx.init.One())
    trainer = rm.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, bucket_mb=0.001, overlap=True)

    def step() -> Any:
        with autograd.record():
            loss = net(mx.nd.ones((4, 100))).sum()
        loss.backward()
        trainer.step(4)
        return net.weight.data()

    for _ in range(3):
        step().wait_to_read()
    if ronde.rank() == 1:
        kill_self()
    write_error(error_of(step))


def time_out() -> None:
    """A rank that does not come is named; when it comes, it learns that the others have given up."""
    if ronde.rank() == 0:
        write(str(error_of(lambda: rm.allreduce(mx.nd.ones((2,)), name="alone", wait=False))))
    else:
        until((FOLDER / "rank-0").exists, "the other rank has timed out")
        write(str(error_of(lambda: rm.allreduce(mx.nd.ones((2,)), name="alone", wait=False))))
    assert rm.allreduce(mx.nd.ones((2,)), name="after", wait=False).asnumpy().tolist() == [2.0, 2.0]


def stop_for_a_while() -> None:
    """A rank that stands still for a moment delays the others, and nothing more."""
    pids = ronde.objects.allgather(os.getpid())
    results = []
    for turn in range(20):
        results.append(rm.allreduce(mx.nd.full((1000,), turn), wait=False))
        if turn == 5 and ronde.rank() == 0:
            os.kill(pids[1], signal.SIGSTOP)
        if turn == 15 and ronde.rank() == 0:
            os.kill(pids[1], signal.SIGCONT)
    assert [float(each.asnumpy().max()) for each in results] == [2.0 * turn for turn in range(20)]
    write("all arrived")


def leave_operations_under_way() -> None:
    """A script may end without waiting for what it has called, and without the others ever coming to it."""
    rm.allreduce(mx.nd.ones((2,)), wait=False)
    if ronde.rank() == 0:
        rm.allreduce(mx.nd.ones((2,)), name="never", wait=False)
        rm.allreduce(mx.nd.ones((2,)), wait=False)
    write("ended")


CASES = {
    "operation": lose_a_rank_in_an_operation,
    "step": lose_a_rank_in_a_step,
    "timeout": time_out,
    "stop": stop_for_a_while,
    "leave": leave_operations_under_way,
}

ronde.init()
CASES[CASE]()
if CASE in ("timeout", "stop"):
    ronde.shutdown()
