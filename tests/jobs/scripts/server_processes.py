"""A worker of tests/jobs/test_server_processes.py: trains parameters that count how often each sample was used.

It goes on until the servers with which it began are gone and others are in their places, and, with --dies in an elastic
job, until another one has come for it. With --stopped it goes on until there are two servers again,
after one of them was stopped and is behind the other one. With --checkpoint it goes on with a checkpoint, if there is
one, and makes another one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np

import ronde
from ronde.ps import Optimizer, ParameterServer, load_checkpoint
from ronde.ps.partition import Array

NUM_SAMPLES = 600
NUM_TENSORS = 4
TENSOR_SIZE = 10_000
"""So that there are several parts."""
NUM_EPOCHS_AHEAD = 3
"""The last epoch of all workers is one that none of them can have begun when the first has seen enough."""


class Counting(Optimizer):
    """An optimizer of the user's own: it reaches the servers by its code, because they do not run this script."""

    num_states = 1

    def compute(self, values: Array, gradient: Array, states: Array, step: int) -> Array:
        states[0] += gradient
        return values + gradient


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="async")
    parser.add_argument("--folder", type=Path, required=True, help="in which workers tell each other of the end")
    parser.add_argument("--dies", action="store_true", help="worker 1 kills itself")
    parser.add_argument("--epochs", type=int, default=0)
    parser.add_argument("--stopped", action="store_true")
    parser.add_argument("--suspect-s", type=float, default=10.0)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    came, last_epoch = options.folder / "came", options.folder / f"last-epoch-{options.epochs}"
    ronde.init()
    parameters = [np.zeros(TENSOR_SIZE) for _ in range(NUM_TENSORS)]
    state = load_checkpoint(options.checkpoint) if options.checkpoint and options.checkpoint.exists() else None
    server = ParameterServer(
        parameters, Counting(), mode=options.mode, staleness=2, state=state, suspect_s=options.suspect_s
    )
    number = int(os.environ.get("RONDE_WORKER", ronde.rank()))
    first, shown = {*server.servers}, server.servers
    print(f"worker {number} is rank {ronde.rank()} of {ronde.size()}, servers {server.servers}", flush=True)
    if number > 1:
        came.touch()
    num_steps, longest_s, was_stopped = 0, 0.0, False
    for epoch in itertools.count():
        for indices in server.samples(NUM_SAMPLES, 10, epoch=epoch):
            gradient = np.zeros(TENSOR_SIZE)
            gradient[indices] = 1.0
            num_steps += 1
            if options.dies and number == 1 and num_steps == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            begun_s = time.monotonic()
            server.step([gradient] * NUM_TENSORS)
            longest_s = max(longest_s, time.monotonic() - begun_s)
            values = [*server.parameters.values()]
            assert all((values[0] == each).all() for each in values), "versions are mixed"
            if server.servers != shown:
                shown = server.servers
                was_stopped = was_stopped or len(shown) == 1
                print(f"servers {shown}", flush=True)
        if options.epochs:
            is_done = epoch + 1 >= options.epochs
        elif options.stopped:
            is_done = len(shown) == 2 and was_stopped
        else:
            is_done = len(shown) == 2 and not first & {*shown} and (not options.dies or came.exists())
        if is_done:
            with contextlib.suppress(FileExistsError):  # another worker has come to the same before
                last_epoch.symlink_to(str(epoch if options.epochs else epoch + NUM_EPOCHS_AHEAD))
        if last_epoch.is_symlink() and epoch >= int(last_epoch.readlink().name):
            break
    server.pull()
    counts = parameters[0][:NUM_SAMPLES]
    is_exact = all((each == parameters[0]).all() for each in parameters) and (counts == counts[0]).all()
    is_exact = bool(is_exact) and counts[0] >= epoch + 1 and not parameters[0][NUM_SAMPLES:].any()
    print(f"exact: {is_exact}, longest step {longest_s:.3f} s", flush=True)
    if options.checkpoint:
        ronde.barrier()  # all have trained
        if ronde.rank() == 0:
            saved = load_checkpoint(server.save(options.checkpoint))
            values, states = saved["parameters"]["3"], saved["optimizer"]["3"]
            is_exact = bool((values == states[0]).all() and (values[:NUM_SAMPLES] == values[0]).all())
            print(f"saved version {saved['version']}, each sample {values[0]:g} times: {is_exact}", flush=True)
    server.close()


if __name__ == "__main__":
    main()
