"""One rank of a job of checks: `python -m tests.jobs.mxnet_checks`."""

from __future__ import annotations

import ronde

ronde.init()

from tests.jobs.mxnet_checks import collective_checks, training_checks  # noqa: E402, F401 - they register
from tests.jobs.mxnet_checks.checks import run_checks  # noqa: E402

run_checks()
ronde.shutdown()
