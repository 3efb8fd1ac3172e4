"""One rank of a job of checks: `python -m tests.jobs.jax_checks [WORD …]`, all of them or those with a word in their
names. It has two devices, and XLA one thread."""

from __future__ import annotations

import sys
import traceback

import ronde
from tests.jobs.jax_checks import program_checks, training_checks

ronde.init()
for module in (program_checks, training_checks):
    for name, body in sorted(vars(module).items()):
        if not name.startswith("check_") or not all(word in name for word in sys.argv[1:]):
            continue
        try:
            body()
            ronde.barrier()
        except Exception:
            traceback.print_exc()
            sys.exit(f"{name} failed on rank {ronde.rank()}")
        print(f"passed {name}", flush=True)
ronde.shutdown()
