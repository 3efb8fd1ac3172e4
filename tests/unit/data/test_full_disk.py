"""A disk that is full: the folder is named, no half file has its final name, and the same command goes on later."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.limits import PATIENCE_S
from tests.services import needs

IN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@needs("mount namespaces")
@pytest.mark.slow
def test_a_full_disk_is_named_and_commands_go_on_when_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    probe = [*IN_NAMESPACE, "mount", "-t", "tmpfs", "none", str(tmp_path / "small")]
    try:
        can_mount = run_command(probe).returncode == 0
    except FileNotFoundError:
        can_mount = False
    if not can_mount:
        pytest.skip("unshare and mount do not work here")
    words = [*IN_NAMESPACE, sys.executable, "-m", "tests.unit.data.full_disk", str(tmp_path)]
    done = run_command(words, limit_s=PATIENCE_S)
    assert "all checks passed" in done.stdout, f"{done.stdout}\n{done.stderr}"
