"""The report: what is drawn are the numbers of the log. The page is parsed, and lines are read back from the paths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ronde.dash.chart import Chart, Series, line_chart, thin_points
from ronde.dash.report import render_report_page, write_report
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

Element = ElementTree.Element


def share(rank: int, num_steps: int = 10, gpu: float | None = None) -> RankTimeBreakdown:
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
        RunStarted(facts={"model": "AlexNet <script>alert(1)</script>"}, hosts=hosts),
        *(LoggedValues(step=10 * i, at_s=i, values={"train/loss": loss}) for i, loss in enumerate(losses, start=1)),
        RankTimesLogged(step=10, at_s=1.0, ranks=tuple(share(rank, gpu=gpu) for rank in range(num_ranks))),
        RankTimesLogged(step=20, at_s=2.0, ranks=tuple(share(rank, gpu=gpu) for rank in range(num_ranks))),
        LoggedValues(step=50, at_s=5.0, values={"val/loss": 0.3, "val/accuracy": 0.975}),
        LoggedValues(step=50, at_s=5.5, values={"test/accuracy": 0.9876}),
        RunFinished(at_s=75.0),
    ]
    return parse_log(encode_record(record) for record in records)


def page_of(run: RunHistory) -> Element:
    """The page as a tree. It is written so that an XML parser can read it, once its few void elements are closed."""
    text = re.sub(r"<(meta[^>]*)>", r"<\1/>", render_report_page(run).removeprefix("<!DOCTYPE html>\n"))
    return ElementTree.fromstring(text)


def figures(page: Element) -> dict[str, Element]:
    found = {}
    for figure in page.iter("figure"):
        caption = figure.find("figcaption")
        assert caption is not None and caption.text
        found[caption.text] = figure
    return found


def lines(figure: Element) -> dict[str, list[tuple[float, float]]]:
    """The points of each line, from pixels back to numbers."""
    svg = figure.find("svg")
    assert svg is not None
    return {path.attrib["data-name"]: list(_points(svg, path.attrib["d"])) for path in svg.iter("path")}


def _points(svg: Element, path: str) -> Iterator[tuple[float, float]]:
    def back(letter: str, pixel: float) -> float:
        low, high, start, end = (float(svg.attrib[f"data-{letter}-{key}"]) for key in ("low", "high", "start", "end"))
        return low + (pixel - start) / (end - start) * (high - low)

    for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path):
        yield back("x", float(x)), back("y", float(y))


def near(points: list[tuple[float, float]]) -> object:
    return [pytest.approx(point, rel=0.01, abs=0.01) for point in points]


def words(element: Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def test_values_with_one_ending_are_lines_of_one_plot() -> None:
    drawn = figures(page_of(run_of()))
    assert list(drawn)[:2] == ["loss", "accuracy"]
    loss = lines(drawn["loss"])
    assert loss["train"] == near([(10, 2.0), (20, 1.5), (30, 1.0), (40, 0.5), (50, 0.25)])
    assert loss["val"] == near([(50, 0.3)])
    assert "train 0.25" in words(drawn["loss"])
    assert "val 0.975" in words(drawn["accuracy"])


def test_step_times_are_drawn_per_rank_at_their_steps() -> None:
    times = lines(figures(page_of(run_of()))["Step time per rank"])
    assert list(times) == ["rank 0", "rank 1"]
    assert [x for x, _ in times["rank 1"]] == near_numbers(range(1, 21))
    assert {round(y) for _, y in times["rank 0"]} == {100}
    assert {round(y) for _, y in times["rank 1"]} == {110}


def near_numbers(numbers: range) -> object:
    return pytest.approx(list(numbers), abs=0.05)


def test_the_bars_show_where_the_time_went() -> None:
    figure = figures(page_of(run_of()))["Where the time of each rank went"]
    shares = [float(part.attrib["data-share"]) for part in figure.iter("rect")]
    assert shares == pytest.approx([56.0, 8.0, 16.0, 20.0] * 2, abs=0.01)
    widths = [float(part.attrib["width"]) for part in figure.iter("rect")][:4]
    assert [100 * width / sum(widths) for width in widths] == pytest.approx(shares[:4], abs=0.2)


def test_load_has_a_plot_and_a_gpu_only_where_there_is_one() -> None:
    without = figures(page_of(run_of()))
    assert lines(without["CPU load per rank"])["rank 1"] == near([(1.0, 81.0), (1.0, 81.0)])
    assert "GPU load per rank" not in without
    assert lines(figures(page_of(run_of(gpu=66.0)))["GPU load per rank"])["rank 0"] == near([(1.0, 66.0), (1.0, 66.0)])


def test_many_ranks_are_drawn_as_their_extremes_and_median() -> None:
    times = lines(figures(page_of(run_of(num_ranks=12, hosts=("a",) * 12)))["Step time per rank"])
    assert {name: round(points[0][1]) for name, points in times.items()} == {
        "largest of 12 ranks": 210,
        "median of 12 ranks": 155,
        "smallest of 12 ranks": 100,
    }


def test_the_table_has_a_row_per_rank_with_its_host() -> None:
    rows = [words(row) for row in page_of(run_of(hosts=("a", "b"))).iter("tr")]
    assert "0 a 20 100.0 ms 100.0 ms 70.0 % 10.0 % 20.0 % 80 % 500 MB" in rows
    assert "1 b 20 110.0 ms 110.0 ms 70.0 % 10.0 % 20.0 % 81 % 500 MB" in rows


def test_headline_numbers_begin_with_what_came_last() -> None:
    tiles = next(found for found in page_of(run_of()).iter("ul") if found.attrib["class"] == "tiles")
    assert words(tiles[0]) == "0.988 test/accuracy"


def test_the_lead_says_how_the_run_went() -> None:
    run = run_of(hosts=("a", "b"))
    assert "2 ranks, 2 hosts, 1 min 15 s of training" in render_report_page(run)
    run.num_resumes, run.ended = 2, False
    assert "went on 2 times from a checkpoint, has not come to its end" in render_report_page(run)


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = render_report_page(run_of())
    assert "<script" not in page  # the fact that has one in its text is escaped
    assert not re.search(r"""(?:src|href)=|url\(|https?://|@import""", page)
    assert "prefers-color-scheme:dark" in page


def test_an_empty_log_is_a_page_too() -> None:
    drawn = figures(page_of(RunHistory()))
    assert "no numbers" in words(drawn["Step time per rank"])


def test_a_number_that_is_none_interrupts_the_line() -> None:
    chart = Chart("loss", "step", "loss", (Series("train", [(1, 1.0), (2, None), (3, 2.0), (4, 3.0)]),))
    path = re.search(r' d="([^"]*)"', line_chart(chart))
    assert path
    assert re.findall("[MLh]", path[1]) == ["M", "h", "M", "h", "L"]


def test_long_lines_are_thinned_to_their_means() -> None:
    points = [(float(x), float(x % 2)) for x in range(10_000)]
    thinned = thin_points(points, 400)
    assert len(thinned) == 400
    assert {y for _, y in thinned} == {12 / 25, 13 / 25}
    assert thin_points([(1.0, None), (2.0, None)], 1) == [(2.0, None)]


def test_the_file_appears_whole_and_alone(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(encode_record(RunStarted(hosts=("a",))) + encode_record(RunFinished(at_s=1.0)))
    path = write_report(log, tmp_path / "out/report.html", title="Mine & yours")
    assert path.is_absolute()
    assert "<h1>Mine &amp; yours</h1>" in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
