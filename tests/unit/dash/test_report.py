"""The report: the numbers of the log are in the page, as data of the plots, bars and tables, and nothing is loaded."""

from __future__ import annotations

import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ronde.dash import page, report
from ronde.dash.page import PlotData, PlotLine
from ronde.dash.report import render_report_page, write_plots, write_report
from ronde.dash.run_log import (
    LoggedValues,
    RankTimeBreakdown,
    RankTimesLogged,
    ResourceSample,
    RunFinished,
    RunHistory,
    RunLogRecord,
    RunStarted,
    encode_record,
    parse_log,
)

HOSTILE = "</script><script>alert(1)</script><!--"


def breakdown(rank: int, num_steps: int = 10, gpu: float | None = None) -> RankTimeBreakdown:
    """7 of 10 parts computing, 1 moving, 2 waiting; a step of rank r takes 100 + 10 r milliseconds."""
    step_s = 0.1 + 0.01 * rank
    total_s = step_s * num_steps
    load = ResourceSample(at_s=1.0, cpu=80.0 + rank, host_cpu=95.0, memory_bytes=500_000_000, gpu=gpu)
    return RankTimeBreakdown(
        rank=rank,
        num_steps=num_steps,
        step_s=(step_s,) * num_steps,
        longest_s=step_s,
        compute_s=0.7 * total_s,
        move_s=0.1 * total_s,
        wait_s=0.2 * total_s,
        between_s=0.25 * total_s,
        loads=(load,),
    )


def run_of(num_ranks: int = 2, hosts: tuple[str, ...] = ("a", "a"), gpu: float | None = None) -> RunHistory:
    losses = [2.0, 1.5, 1.0, 0.5, 0.25]
    records: list[RunLogRecord] = [
        RunStarted(facts={"model": f"AlexNet {HOSTILE}"}, hosts=hosts),
        *(LoggedValues(step=10 * i, at_s=i, values={"train/loss": loss}) for i, loss in enumerate(losses, start=1)),
        RankTimesLogged(step=10, at_s=1.0, ranks=tuple(breakdown(rank, gpu=gpu) for rank in range(num_ranks))),
        RankTimesLogged(step=20, at_s=2.0, ranks=tuple(breakdown(rank, gpu=gpu) for rank in range(num_ranks))),
        LoggedValues(step=50, at_s=5.0, values={"val/loss": 0.3, "val/accuracy": 0.975}),
        LoggedValues(step=50, at_s=5.5, values={"test/accuracy": 0.9876}),
        RunFinished(at_s=75.0),
    ]
    return parse_log(encode_record(record) for record in records)


def plots(page: str) -> dict[str, dict[str, Any]]:
    """Return the data of the plots by title."""
    data = re.search(r'<script type="application/json" id="plots">(.*?)</script>', page)
    assert data
    return {plot["title"]: plot for plot in json.loads(data[1])}


def lines(plot: dict[str, Any]) -> dict[str, list[tuple[float, float | None]]]:
    return {line["name"]: list(zip(line["x"], line["y"], strict=True)) for line in plot["lines"]}


def visible_text(fragment: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", fragment)).split())


def test_values_with_one_ending_are_lines_of_one_plot() -> None:
    drawn = plots(render_report_page(run_of()))
    assert list(drawn)[:2] == ["loss", "accuracy"]
    assert lines(drawn["loss"]) == {
        "train": [(10, 2.0), (20, 1.5), (30, 1.0), (40, 0.5), (50, 0.25)],
        "val": [(50, 0.3)],
    }


def test_step_times_are_drawn_per_rank_at_their_steps() -> None:
    plot = plots(render_report_page(run_of()))["Step time per rank"]
    times = lines(plot)
    assert list(times) == ["rank 0", "rank 1"]
    assert [x for x, _ in times["rank 1"]] == pytest.approx(range(1, 21))
    assert [y for _, y in times["rank 0"] + times["rank 1"]] == pytest.approx([100.0] * 20 + [110.0] * 20)
    assert plot["y_min"] == 0.0


def test_the_bars_show_where_the_time_went() -> None:
    page = render_report_page(run_of())
    assert re.findall(r'<span style="width:([\d.]+)%', page) == ["56.00", "8.00", "16.00", "20.00"] * 2
    assert "waiting for other ranks: 16.0 %" in page


def test_load_has_a_plot_and_a_gpu_only_where_there_is_one() -> None:
    without = plots(render_report_page(run_of()))
    assert lines(without["CPU load per rank"])["rank 1"] == [(1.0, 81.0), (1.0, 81.0)]
    assert lines(without["CPU load per host"]) == {"a": [(1.0, 95.0), (1.0, 95.0)]}
    assert "GPU load per rank" not in without
    with_gpu = plots(render_report_page(run_of(gpu=66.0)))["GPU load per rank"]
    assert lines(with_gpu)["rank 0"] == [(1.0, 66.0), (1.0, 66.0)]
    assert with_gpu["y_max"] == 100.0


def test_many_ranks_are_drawn_as_their_extremes_and_median() -> None:
    times = lines(plots(render_report_page(run_of(num_ranks=12, hosts=("a",) * 12)))["Step time per rank"])
    assert {name: points[0][1] for name, points in times.items()} == {
        "largest of 12 ranks": pytest.approx(210),
        "median of 12 ranks": pytest.approx(155),
        "smallest of 12 ranks": pytest.approx(100),
    }


def test_the_table_has_a_row_per_rank_with_its_host() -> None:
    rows = [visible_text(row) for row in re.findall("<tr>.*?</tr>", render_report_page(run_of(hosts=("a", "b"))))]
    assert "0 a 20 100.0 ms 100.0 ms 70.0 % 10.0 % 20.0 % 80 % 500 MB" in rows
    assert "1 b 20 110.0 ms 110.0 ms 70.0 % 10.0 % 20.0 % 81 % 500 MB" in rows


def test_headline_numbers_begin_with_what_came_last() -> None:
    tiles = re.search('<ul class="tiles"><li>(.*?)</li>', render_report_page(run_of()))
    assert tiles and visible_text(tiles[1]) == "0.988 test/accuracy"


def test_the_lead_says_how_the_run_went() -> None:
    run = run_of(hosts=("a", "b"))
    assert "2 ranks, 2 hosts, 1 min 15 s of training" in render_report_page(run)
    run.num_resumes, run.ended = 2, False
    assert "went on 2 times from a checkpoint, has not come to its end" in render_report_page(run)


def test_rounds_are_shown_with_who_came_and_who_was_gone() -> None:
    run = run_of(hosts=("a", "b"))
    assert "Rounds" not in visible_text(render_report_page(run))
    run.starts = [
        RunStarted(step=0, at_s=0.0, hosts=("a", "a", "b"), workers=("1", "2", "3")),
        RunStarted(step=7, at_s=65.0, hosts=("a", "b"), workers=("1", "3")),
        RunStarted(step=9, at_s=80.0, hosts=("a", "b", "a", "c"), workers=("1", "3", "4", "5")),
    ]
    rows = [visible_text(row) for row in re.findall("<tr>.*?</tr>", render_report_page(run))]
    assert rows[rows.index("from step at ranks came gone") + 1 :][:3] == [
        "0 0.0 s 3 – –",
        "7 1 min 5 s 2 – 1 on a",
        "9 1 min 20 s 4 1 on a, 1 on c –",
    ]


def test_the_page_loads_nothing_and_looks_good_in_the_dark() -> None:
    page = render_report_page(run_of())
    assert not re.search(r"""(?:src|href)\s*=\s*["']|url\(|@import|\bfetch\(|XMLHttpRequest""", page)
    assert "prefers-color-scheme: dark" in page


def test_names_cannot_end_the_script_that_holds_them() -> None:
    run = run_of(hosts=(HOSTILE, "b"))
    run.values.append(LoggedValues(step=60, at_s=6.0, values={f"{HOSTILE}/{HOSTILE}": 1.0}))
    page = render_report_page(run, title=HOSTILE)
    assert (page.count("<script"), page.count("</script>")) == (3, 3)
    assert "<!--" not in page
    assert HOSTILE in lines(plots(page)["CPU load per host"])


def test_an_empty_log_is_a_page_too() -> None:
    page = render_report_page(RunHistory())
    assert "Step time per rank no numbers" in visible_text(page)
    assert "data-plot=" not in page


def test_nan_interrupts_the_line_and_long_lines_are_thinned_to_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_POINTS", 3)
    losses = [1.0, 3.0, None, None, 5.0]
    run = RunHistory(values=[LoggedValues(step=i, at_s=i, values={"loss": y}) for i, y in enumerate(losses, start=1)])
    assert lines(plots(render_report_page(run))["loss"]) == {"loss": [(2, 2.0), (4, None), (5, 5.0)]}


def test_the_file_appears_whole_and_alone(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(encode_record(RunStarted(hosts=("a",))) + encode_record(RunFinished(at_s=1.0)))
    path = write_report(log, tmp_path / "out/report.html", title="Mine & yours")
    assert path.is_absolute()
    assert "<h1>Mine &amp; yours</h1>" in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_the_chart_library_is_the_released_one_and_its_licence_is_in_the_page() -> None:
    sums = (page.UPLOT_DIR / "SHA256SUMS").read_text().splitlines()
    assert len(sums) == 3
    for checksum, name in (line.split() for line in sums):
        assert hashlib.sha256((page.UPLOT_DIR / name).read_bytes()).hexdigest() == checksum
    assert "uPlot (v1.6.32)" in render_report_page(RunHistory())
    assert "The MIT License" in render_report_page(RunHistory())


def test_staleness_has_a_column_where_ranks_pushed_to_a_parameter_server() -> None:
    assert "staleness" not in render_report_page(run_of())
    pushed = msgspec.structs.replace(breakdown(0), num_pushes=4, staleness=2.5, max_staleness=8)
    records: list[RunLogRecord] = [
        RunStarted(hosts=("a", "a")),
        RankTimesLogged(step=10, at_s=1.0, ranks=(pushed, breakdown(1))),
    ]
    page = render_report_page(parse_log(encode_record(each) for each in records))
    assert "staleness (max)" in page and "2.5 (8)" in page


def test_plots_of_other_numbers_have_a_page_of_their_own(tmp_path: Path) -> None:
    plot = PlotData(f"a {HOSTILE}", "seconds", "%", (PlotLine(HOSTILE, [0.0, 1.0], [1.0, None]),))
    page = write_plots([plot], tmp_path / "new/page.html", title=HOSTILE).read_text()
    assert page.count("<script") == 3 and "alert(1)</script>" not in page and 'data-plot="0"' in page
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
