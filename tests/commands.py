"""Commands that tests run to their end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(sys.executable).parent
"""Where `ronde` and `horovodrun` are installed."""


def run_command(
    words: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    limit_s: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command, whatever its exit code is. `env` is its whole environment, by default that of the test."""
    command = [str(word) for word in words]
    return subprocess.run(
        command, cwd=cwd, env=env, input=input, capture_output=True, text=True, timeout=limit_s, check=False
    )


def output_of(
    words: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    limit_s: float = PATIENCE_S,
) -> str:
    """The standard output of a command that must succeed."""
    done = run_command(words, cwd=cwd, env=env, limit_s=limit_s)
    assert done.returncode == 0, f"{words} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout
