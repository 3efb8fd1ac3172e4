"""A rank: runs all checks and prints how each went. After the first that fails the ranks are no longer together."""

from __future__ import annotations

import json
import traceback
import warnings

import tensorflow as tf

import horovod.tensorflow as hvd
import ronde

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

from tests.compat.tensorflow_checks import (  # noqa: E402, F401
    collectives,
    data_service,
    gradients,
    keras_training,
    names,
    old_scripts,
    states,
)
from tests.compat.tensorflow_checks.registry import CHECKS  # noqa: E402


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # `average`
    hvd.init(process_sets="dynamic")
    for name, body in CHECKS.items():
        try:
            body()
            ronde.barrier()
        except BaseException:
            print(json.dumps({"check": name, "trace": traceback.format_exc()}), flush=True)
            raise
        print(json.dumps({"check": name, "trace": ""}), flush=True)
    hvd.shutdown()


main()
