"""What a run looked like: a log that a training loop writes, and a report with plots made from it.

    from ronde.dash import RunLog, write_report

    with RunLog("runs/a/log.jsonl", facts={"model": "MLP"}) as log:
        for step, batch in enumerate(loader, start=1):
            with log.step():
                loss = train_on(batch)
            if step % 20 == 0:
                log.add(step, {"train/loss": loss})
                log.gather(step)
    write_report("runs/a/log.jsonl", "runs/a/report.html")

No machine-learning library is needed: it serves every framework, and NumPy alone.
"""

from __future__ import annotations

from ronde.dash.page import PlotData, PlotLine
from ronde.dash.report import render_report_page, write_plots, write_report
from ronde.dash.run_log import RankTimeBreakdown, ResourceSample, RunHistory, RunLog, read_log
from ronde.dash.search_report import render_search_page, write_search_report

__all__ = [
    "PlotData",
    "PlotLine",
    "ResourceSample",
    "RankTimeBreakdown",
    "RunHistory",
    "RunLog",
    "read_log",
    "render_report_page",
    "render_search_page",
    "write_plots",
    "write_report",
    "write_search_report",
]
