"""The quickstart's script runs as it is printed; the migration guide lists every flag that has no effect."""

from __future__ import annotations

import re

import pytest

from horovod.common import variables
from horovod.runner import launch
from tests.commands import ROOT
from tests.jobs.test_readme import PAGES, blocks, run
from tests.limits import LONG_TEST_S


@pytest.mark.timeout(LONG_TEST_S)
def test_the_quickstart_is_right() -> None:
    (script, *_) = blocks(PAGES["quickstart"], "python")
    assert len(re.findall(r"# \d ", script)) == 5
    done = run("quickstart", "ronde run -np 2 python train.py")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\[0\] epoch (\d+): loss", done.stdout, re.MULTILINE) == [str(epoch) for epoch in range(1, 11)]


def test_the_guide_says_why_a_flag_has_no_effect() -> None:
    guide = (ROOT / "docs/horovod.md").read_text()
    families = ("--hierarchical-", "--autotune", "HOROVOD_AUTOTUNE")
    for name in [flag for flag, _ in {**launch.WITHOUT_EFFECT, **launch.ONLY_ELASTIC}.values()]:
        assert next((family for family in families if name.startswith(family)), f"`{name}`") in guide, name
    for name in variables._SETTING_BY_VARIABLE:
        assert name in guide, name
