"""The quickstart's script runs as it is printed; the migration guide lists every flag that has no effect."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from horovod.common import variables
from horovod.runner import launch
from tests.limits import PATIENCE_S

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_quickstart_is_right(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", (DOCS / "quickstart.md").read_text(), re.DOTALL)
    assert found
    assert len(re.findall(r"# \d ", found[1])) == 5
    (tmp_path / "train.py").write_text(found[1])
    command = [str(Path(sys.executable).with_name("ronde")), "run", "-np", "2", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\[0\] epoch (\d+): loss", done.stdout, re.MULTILINE) == [str(epoch) for epoch in range(1, 11)]


def test_the_guide_says_why_a_flag_has_no_effect() -> None:
    guide = (DOCS / "horovod.md").read_text()
    families = ("--hierarchical-", "--autotune", "HOROVOD_AUTOTUNE")
    for name in [flag for flag, _ in launch.WITHOUT_EFFECT.values()]:
        assert next((family for family in families if name.startswith(family)), f"`{name}`") in guide, name
    for name in variables._SETTING_BY_VARIABLE:
        assert name in guide, name
