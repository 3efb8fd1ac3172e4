"""The README's example runs as it is printed there, alone and under `ronde run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import PATIENCE_S

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the example in it, as fit.py."""
    found = re.search(r'```python\n("""fit\.py.*?)```', README, re.DOTALL)
    assert found
    (tmp_path / "fit.py").write_text(found[1], encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("python fit.py", "1 ranks found [1.0, -2.0, 0.5]\n"),
        ("ronde run -np 2 python fit.py", "[0] 2 ranks found [1.0, -2.0, 0.5]\n"),
    ],
)
def test_the_example_finds_the_weights(folder: Path, command: str, printed: str) -> None:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed, done.stderr
