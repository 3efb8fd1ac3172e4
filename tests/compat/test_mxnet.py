"""hvd for MXNet among two real processes, started by horovodrun. Its ranks have an environment of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.commands import PROGRAMS, ROOT, output_of
from tests.limits import LONG_S, LONG_TEST_S
from tests.services import needs

PYTHON = ROOT / ".venv-mxnet/bin/python"

pytestmark = [
    pytest.mark.timeout(LONG_TEST_S),
    needs("MXNet", missing="" if PYTHON.exists() else "no .venv-mxnet; `make build` makes it"),
]


@pytest.mark.parametrize("ops", ["auto", "python"])
def test_names_operations_and_training_are_horovods(ops: str, tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "compat/horovod/src", ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "RONDE_MXNET_OPS": ops}
    script = ROOT / "tests/compat/scripts/mxnet_training.py"
    output_of([PROGRAMS / "horovodrun", "-np", "2", PYTHON, "-W", "ignore", script, tmp_path], env=env, limit_s=LONG_S)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["done"] * 2
