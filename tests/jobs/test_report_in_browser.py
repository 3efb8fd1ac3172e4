"""The report in a real browser: its script draws every plot, with the values of the log in the legends."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from ronde.dash import RunLog, write_report
from tests.limits import PATIENCE_S
from tests.services import needs

BROWSER = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), "")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom")


@needs("a browser", missing="" if BROWSER else "no chromium or google-chrome on the PATH")
def test_every_plot_is_drawn(tmp_path: Path) -> None:
    with RunLog(tmp_path / "log.jsonl") as log:
        for step in range(1, 6):
            with log.step():
                log.add(step, {"train/loss": 1.0 / step, "train/</script>": 2.0})
        log.gather(5)
    page = write_report(log, tmp_path / "report.html")
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    num_plots = len(re.findall(r'<div data-plot="\d+">', drawn))
    assert num_plots == drawn.count("<canvas") >= 4
    legends = re.findall(r'<div class="u-label">([^<]*)</div></th><td class="u-value">([^<]*)</td>', drawn)
    assert ("train", "0.2") in legends and ("train/&lt;", "2") in legends
