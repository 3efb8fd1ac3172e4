"""One rank of a job of checks: `python -m tests.jobs.tensorflow_checks`."""

from __future__ import annotations

import tensorflow as tf

import ronde

tf.config.threading.set_inter_op_parallelism_threads(1)  # the strictest case
tf.config.threading.set_intra_op_parallelism_threads(1)
ronde.init()

from tests.jobs.tensorflow_checks import collective_checks, data_checks, gradient_checks  # noqa: E402, F401 - after the threads are set
from tests.jobs.tensorflow_checks.checks import run_checks  # noqa: E402

run_checks()
ronde.shutdown()
