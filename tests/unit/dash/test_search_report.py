"""The report of a search: what the trials show is in the page, and nothing is loaded."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from ronde.dash import render_search_page, write_search_report
from ronde.search.protocol import Outcome
from ronde.search.results import SearchResult, TrialResult

HOSTILE = "</script><script>alert(1)</script>"


def make_result() -> SearchResult:
    def trial(number: int, outcome: Outcome, value: float | None, lr: float, kind: str, **more: object) -> TrialResult:
        params = {"lr": lr, "kind": kind, "fixed": 3}
        return TrialResult(number=number, outcome=outcome, value=value, params=params, **more)  # type: ignore[arg-type]

    return SearchResult(
        direction="maximize",
        trials=[
            trial(0, Outcome.COMPLETE, 0.5, 0.001, "a", reported={1: 0.25, 2: 0.5}),
            trial(1, Outcome.FAILED, None, 0.1, HOSTILE, reason=f"ValueError: {HOSTILE}"),
            trial(2, Outcome.COMPLETE, 0.75, 0.01, "b", reported={1: 0.5, 2: 0.75}),
            trial(3, Outcome.PRUNED, 0.125, 0.1, "a"),
            trial(4, Outcome.COMPLETE, float("inf"), 0.02, "a"),
        ],
        importances={"lr": 0.75, HOSTILE: 0.25},
    )


def test_the_page_has_history_coordinates_importance_and_all_trials() -> None:
    page = render_search_page(make_result())
    plots = json.loads(re.search(r'<script type="application/json" id="plots">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    best, value = plots[0]["lines"]
    assert (value["x"], value["y"]) == ([0, 2], [0.5, 0.75])
    assert best["y"] == [0.5, 0.75]
    assert [line["name"] for line in plots[1]["lines"]] == ["trial 0", "trial 2"]
    assert len(re.findall("<polyline", page)) == 3  # neither the failed trial nor the infinite value
    assert len(re.findall("stroke-dasharray", page)) == 1
    assert "width:75.00%" in page
    assert page.count("alert(1)") == page.count(html.escape(HOSTILE))
    assert "5 trials, 3 complete, 1 pruned, 1 failed" in page
    assert not re.findall(r'(?:src|href)="', page)


def test_a_search_without_any_complete_trial_has_a_page_too(tmp_path: Path) -> None:
    path = write_search_report(
        SearchResult(direction="minimize", trials=[]), tmp_path / "a/report.html", title="Mine & yours"
    )
    assert "<h1>Mine &amp; yours</h1>" in path.read_text()
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]
