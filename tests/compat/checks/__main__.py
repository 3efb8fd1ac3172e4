"""A rank: runs all checks and prints how each went. After the first that fails the ranks are no longer together."""

from __future__ import annotations

import json
import traceback
import warnings

import torch

import horovod.torch as hvd
from tests.compat.checks import CHECKS


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # `average`
    hvd.init(process_sets="dynamic")
    for name, body in CHECKS.items():
        try:
            body()
            hvd.barrier()
        except BaseException:
            print(json.dumps({"check": name, "trace": traceback.format_exc()}), flush=True)
            raise
        print(json.dumps({"check": name, "trace": ""}), flush=True)
    hvd.shutdown()


main()
