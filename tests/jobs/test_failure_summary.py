"""The summary of `ronde run` after a hang or a disagreement: it names the rank that did not come, and where it is; or
the line of every rank that disagreed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.jobs.kit import RondeRun

HANGS = """import ronde, numpy, signal
ronde.init()
if ronde.rank() == 1:
    signal.pause()  # hangs here
ronde.allreduce(numpy.ones(3){})
"""
DISAGREES = """import ronde, numpy
ronde.init()
if ronde.rank() == 1:
    ronde.allreduce(numpy.ones(4){})
else:
    ronde.allreduce(numpy.ones(3){})
"""
NAMES = pytest.mark.parametrize("name", ["", ", name='grad.3'"], ids=["in program order", "named"])


def summary(folder: Path, script: str, *settings: str) -> list[str]:
    path = folder / "train.py"
    path.write_text(script)
    with RondeRun("-np", "2", "--grace", "1", *settings, sys.executable, str(path)) as job:
        return job.result().summary


@NAMES
def test_a_hang_ends_with_the_missing_rank_and_the_line_where_it_is(tmp_path: Path, name: str) -> None:
    lines = summary(tmp_path, HANGS.format(name), "--operation-s", "2")
    assert not any("failed first" in line for line in lines), lines
    assert re.match(r"(ronde: )?rank 0 on host localhost waited in vain for rank 1: exited with code 1 \(", lines[0])
    pattern = r"rank 1 on host localhost, pid \d+, did not come: it was at train\.py:4 in <module>: signal\.pause\(\)"
    assert re.search(pattern, lines[-1]), lines


@NAMES
def test_a_disagreement_shows_the_line_of_every_rank(tmp_path: Path, name: str) -> None:
    text = "\n".join(summary(tmp_path, DISAGREES.format(name, name)))
    assert f"rank 0 was at train.py:6 in <module>: ronde.allreduce(numpy.ones(3){name})" in text
    assert f"rank 1 was at train.py:4 in <module>: ronde.allreduce(numpy.ones(4){name})" in text
