"""A rank of tests/jobs/test_torch_optimizer.py: runs the checks that the test names, up to the first that fails."""

from __future__ import annotations

import time
import traceback
from typing import Any

import torch

import ronde
from tests.jobs.scripts.control import ControlSocket
from tests.jobs.torch_checks import (
    changes,
    kept,
    mistakes,
    models,
    optimizers,
    start,
    steps,
    training,
    uneven,
    usual_steps,
    wires,
)
from tests.jobs.torch_checks.checks import CHECKS

MODULES = (training, start, optimizers, models, changes, kept, steps, usual_steps, uneven, wires, mistakes)


def main() -> None:
    """Tell of each check how it ended."""
    torch.set_num_threads(1)
    with ControlSocket() as test:
        wanted = test.receive()["checks"]
        ronde.init()
        results: dict[str, dict[str, Any]] = {}
        for name in wanted:
            began = time.monotonic()
            try:
                value = CHECKS[name].body()
            except BaseException:  # what pytest.raises() raises is no Exception
                results[name] = {"failed": traceback.format_exc()[-3000:]}
                test.send("over", results=results)
                raise SystemExit(1) from None
            results[name] = {"value": value, "took_s": time.monotonic() - began}
        test.send("over", results=results)
        ronde.shutdown()


if __name__ == "__main__":
    main()
