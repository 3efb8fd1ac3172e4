"""A rank of an elastic job of `ronde run` with a parameter server, in which rank 1 is killed in its tenth step."""

from __future__ import annotations

import os
import signal

import numpy as np

import ronde
from ronde.ps import SGD, ParameterServer

NUM_SAMPLES = 600

if __name__ == "__main__":
    ronde.init()
    counts, num_steps = np.zeros(NUM_SAMPLES), 0
    server = ParameterServer([counts], SGD(lr=1.0), mode="async")
    for indices in server.samples(NUM_SAMPLES, 5):
        gradient = np.zeros(NUM_SAMPLES)
        gradient[indices] = -1.0
        num_steps += 1
        if ronde.rank() == 1 and num_steps == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        server.step([gradient])
    server.pull()
    print(f"exact: {bool((counts == 1).all())}")
    server.close()
