"""The README's first example runs as it is printed there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The first block of this language in the README."""
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found
    return found.group(1)


def free_port() -> int:
    """A port nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the example in it, as fit.py."""
    (tmp_path / "fit.py").write_text(block("python"), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_first_example_finds_the_weights(folder: Path, num_ranks: int) -> None:
    command = "python fit.py" if num_ranks == 1 else block("sh").replace(":29400", f":{free_port()}")
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{num_ranks} ranks found [1.0, -2.0, 0.5]\n", done.stderr
