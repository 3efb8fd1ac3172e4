"""Every collective case, for every framework, in each of its modes. `-k tensorflow-graph` runs one mode, `-k gradient`
some cases.

numpy, torch         ronde's own functions, and those of ronde.torch
tensorflow           eager, in tf.function and in graphs of sessions, with native kernels
tensorflow-python    the same operations through Python on all ranks
tensorflow-mixed     native kernels on rank 0, Python on the others
jax                  outside and inside of jit, with native handlers
jax-python, -mixed   as those of TensorFlow
mxnet                blocking, and in MXNet's engine
mxnet-python         asynchronous operations through Python on all ranks
mxnet-mixed          in MXNet's engine on rank 0, through Python on the others
tensorflow-2.20      an older TensorFlow with the same library of kernels; `make test-all` makes its environment

The modes of a framework share its processes, because importing it takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.commands import ROOT
from tests.conformance.frameworks.collective_cases import CASES
from tests.conformance.frameworks.framework import MODES, WITHOUT_GRADIENTS, WITHOUT_TENSORS
from tests.conformance.runner import ProcessRanks
from tests.limits import LONG_TEST_S
from tests.services import needs

TENSORFLOW = ROOT / ".venv-tensorflow/bin/python"
MXNET = ROOT / ".venv-mxnet/bin/python"
TENSORFLOW_2_20 = ROOT / ".venv-tensorflow-2.20/bin/python"
NATIVE, PYTHON = (["env", f"RONDE_TENSORFLOW_OPS={ops}"] for ops in ("native", "python"))
JAX_NATIVE, JAX_PYTHON = (["env", f"RONDE_JAX_OPS={ops}", "NPROC=1"] for ops in ("native", "python"))
MXNET_NATIVE, MXNET_PYTHON = (["env", f"RONDE_MXNET_OPS={ops}"] for ops in ("native", "python"))
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


class FrameworkJob(NamedTuple):
    """The processes that run the cases of a framework."""

    framework: str
    size: int
    python: str | Path = sys.executable
    prefixes: dict[int, list[str]] | None = None
    modes: tuple[str, ...] = ()
    """Empty: all that the framework has."""


JOBS = {
    "numpy": FrameworkJob("numpy", 3),
    "torch": FrameworkJob("torch", 3),
    "tensorflow": FrameworkJob("tensorflow", 2, TENSORFLOW),
    "tensorflow-python": FrameworkJob("tensorflow", 2, TENSORFLOW, {0: PYTHON, 1: PYTHON}, ("function", "graph")),
    "tensorflow-mixed": FrameworkJob("tensorflow", 2, TENSORFLOW, {0: NATIVE, 1: PYTHON}, ("function", "graph")),
    "jax": FrameworkJob("jax", 2, TENSORFLOW, {0: JAX_NATIVE, 1: JAX_NATIVE}),
    "jax-python": FrameworkJob("jax", 2, TENSORFLOW, {0: JAX_PYTHON, 1: JAX_PYTHON}, ("jit",)),
    "jax-mixed": FrameworkJob("jax", 2, TENSORFLOW, {0: JAX_NATIVE, 1: JAX_PYTHON}, ("jit",)),
    "mxnet": FrameworkJob("mxnet", 2, MXNET),
    "mxnet-python": FrameworkJob("mxnet", 2, MXNET, {0: MXNET_PYTHON, 1: MXNET_PYTHON}, ("asynchronous",)),
    "mxnet-mixed": FrameworkJob("mxnet", 2, MXNET, {0: MXNET_NATIVE, 1: MXNET_PYTHON}, ("asynchronous",)),
    "tensorflow-2.20": FrameworkJob("tensorflow", 2, TENSORFLOW_2_20, {0: NATIVE, 1: NATIVE}, ("function",)),
}
NEEDS = {
    sys.executable: [],
    TENSORFLOW: [
        pytest.mark.slow,
        needs("TensorFlow", missing="" if TENSORFLOW.exists() else "no .venv-tensorflow; `make build` makes it"),
    ],
    MXNET: [
        pytest.mark.slow,
        needs("MXNet", missing="" if MXNET.exists() else "no .venv-mxnet; `make build` makes it"),
    ],
    TENSORFLOW_2_20: [
        pytest.mark.slow,
        needs(
            "TensorFlow 2.20",
            missing="" if TENSORFLOW_2_20.exists() else "no .venv-tensorflow-2.20; `make test-all` makes it",
        ),
    ],
}
pytestmark = [
    pytest.mark.timeout(LONG_TEST_S),
    pytest.mark.leaves(reason="the processes serve all tests of the session, which ends them"),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per job, mode and case."""
    made = []
    for name, job in JOBS.items():
        for mode in job.modes or MODES[job.framework]:
            for case in CASES.values():
                is_without = (case.for_tensors and job.framework in WITHOUT_TENSORS) or (
                    case.for_gradients and job.framework in WITHOUT_GRADIENTS
                )
                if not is_without:
                    made.append(
                        pytest.param(name, mode, case.name, id=f"{name}-{mode}-{case.name}", marks=NEEDS[job.python])
                    )
    metafunc.parametrize(("job", "mode", "case"), made)


@pytest.fixture(scope="session")
def running() -> Iterator[dict[str, ProcessRanks]]:
    """The processes that were started for a test and serve the next ones, too; of one job at a time."""
    running: dict[str, ProcessRanks] = {}
    yield running
    for ranks in running.values():
        ranks.close()


def test_collectives(job: str, mode: str, case: str, running: dict[str, ProcessRanks]) -> None:
    wanted = JOBS[job]
    if job not in running:
        for ranks in running.values():
            ranks.close()
        running.clear()
        running[job] = ProcessRanks(wanted.size, python=wanted.python, prefixes=wanted.prefixes, env=QUIET)
    running[job].run(case, wanted.framework, mode)
