"""The report of a run: one HTML page that holds its plots, its data, its script and its style, and loads nothing.

It shows every value of the log (one plot per ending of their names), the step time per rank, how the time of each rank
divides into computing, waiting and moving data, resource usage over time, a table of the ranks, and the facts of the
run. Plots are drawn in the browser by uPlot, from the JSON of a list of PlotData.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import TypeAlias

from ronde.dash.page import Page, PlotData, PlotLine, make_figure, make_table, write_page
from ronde.dash.run_log import RankTimeBreakdown, ResourceSample, RunHistory, RunLog, RunStarted, read_log
from ronde.text import format_compact_number, format_count, format_duration

TIME_PARTS = {"computing": 0, "moving data": 1, "waiting for other ranks": 7, "between steps (loading data)": 2}
"""The parts of a rank's time, with the numbers of their colours in report.css."""
RANK_HEADINGS = (
    *("rank", "host", "steps", "mean step", "longest"),
    *("computing", "moving", "waiting", "CPU", "most memory"),
)
ROUND_HEADINGS = ("from step", "at", "ranks", "came", "gone")
MAX_TILES = 6
"""Headline numbers at the top."""
MAX_LINES = 8
"""Lines in one plot: there are so many colours."""
MAX_POINTS = 2000
"""Points of one line: a screen cannot show more."""

Point: TypeAlias = tuple[float, float | None]
"""x and y. Without a y, the line has a gap there."""


def write_report(log: RunLog | Path | str, path: Path | str, *, title: str = "Training run") -> Path:
    """Write the report of this log and return its absolute path. The file appears whole or not at all."""
    run = read_log(log.path if isinstance(log, RunLog) else log)
    return write_page(path, render_report_page(run, title=title))


def write_plots(plots: Sequence[PlotData], path: Path | str, *, title: str) -> Path:
    """Write a page with plots of your own numbers, each line with at most eight others, and return its absolute path.
    The file appears whole or not at all."""
    page = Page(title)
    return write_page(path, page.render([page.charts(plots)]))


def render_report_page(run: RunHistory, *, title: str = "Training run") -> str:
    """Return the report of a log as the text of an HTML page."""
    page = Page(title)
    breakdowns = {rank: [breakdown for _, breakdown in run.breakdowns(rank)] for rank in run.ranks()}
    sections = [
        f'<p class="lead">{escape(_summary_line(run))}</p>',
        _tiles(run),
        page.section("Values", _value_plots(run)),
        page.section("Time", [_step_time_plot(run)], _breakdown_figure(run, breakdowns)),
        page.section("Load", _usage_plots(run)),
        "<h2>Rounds</h2>" + make_table(ROUND_HEADINGS, _round_rows(run)) if len(run.starts) > 1 else "",
        "<h2>Ranks</h2>" + _rank_table(run, breakdowns),
        "<h2>Facts</h2>" + make_table((), list(run.facts.items())),
    ]
    return page.render(sections)


def _summary_line(run: RunHistory) -> str:
    hosts = list(dict.fromkeys(run.hosts))
    parts = [
        format_count(len(run.ranks()), "rank"),
        format_count(len(hosts), "host") + (f" ({hosts[0]})" if len(hosts) == 1 else ""),
        f"{format_duration(run.elapsed_s)} of training",
    ]
    if run.num_resumes:
        parts.append(f"went on {format_count(run.num_resumes, 'time')} from a checkpoint")
    if not run.ended:
        parts.append("has not come to its end")
    return ", ".join(parts)


def _tiles(run: RunHistory) -> str:
    """Return the last number of each value. Values that came last stand first, because they sum up the run."""
    last = {name: value for record in run.values for name, value in record.values.items()}
    when = {name: index for index, record in enumerate(run.values) for name in record.values}
    order = sorted(last, key=lambda name: -when[name])[:MAX_TILES]
    tiles = [f"<li><b>{format_compact_number(last[name])}</b><span>{escape(name)}</span></li>" for name in order]
    return f'<ul class="tiles">{"".join(tiles)}</ul>' if tiles else ""


def _make_line(name: str, points: Sequence[Point]) -> PlotLine:
    """Return a line of at most MAX_POINTS points. Of more, means of neighbours; those without any y stay a gap."""
    width = max(1, -(-len(points) // MAX_POINTS))
    x, y = [], []
    for start in range(0, len(points), width):
        neighbours = points[start : start + width]
        known = [value for _, value in neighbours if value is not None]
        x.append(neighbours[-1][0])
        y.append(fmean(known) if known else None)
    return PlotLine(name, x, y)


def _value_plots(run: RunHistory) -> list[PlotData]:
    """Return a plot per ending: train/loss and val/loss are lines of the plot "loss"."""
    plots: dict[str, list[PlotLine]] = {}
    for name in run.value_names():
        line, _, plot = name.rpartition("/")
        plots.setdefault(plot, []).append(_make_line(line or plot, run.series(name)))
    return [
        # A rate is compared with 0; of a loss or an accuracy the differences count.
        PlotData(plot, "step", plot, tuple(lines), y_min=0.0 if plot.endswith("per second") else None)
        for plot, lines in plots.items()
    ]


def _step_time_plot(run: RunHistory) -> PlotData:
    """Return the times of steps, or of a few steps together, each at its last step."""
    points: dict[int, list[Point]] = {rank: [] for rank in run.ranks()}
    for rank, line in points.items():
        for last_step, breakdown in run.breakdowns(rank):
            width = breakdown.num_steps / len(breakdown.step_s) if breakdown.step_s else 0.0
            first = last_step - breakdown.num_steps
            line += [(first + (index + 1) * width, 1e3 * value) for index, value in enumerate(breakdown.step_s)]
    return PlotData("Step time per rank", "step", "milliseconds", _lines_per_rank(points), y_min=0.0)


def _lines_per_rank(points: dict[int, list[Point]]) -> tuple[PlotLine, ...]:
    """Return a line per rank; for many ranks, the smallest, median and largest value at each x."""
    if len(points) <= MAX_LINES:
        return tuple(_make_line(f"rank {rank}", line) for rank, line in points.items())
    columns: dict[float, list[float]] = {}
    for line in points.values():
        for x, y in line:
            if y is not None:
                columns.setdefault(x, []).append(y)
    choices: dict[str, Callable[[list[float]], float]] = {"largest": max, "median": median, "smallest": min}
    return tuple(
        _make_line(f"{name} of {len(points)} ranks", [(x, choose(column)) for x, column in sorted(columns.items())])
        for name, choose in choices.items()
    )


def _breakdown_figure(run: RunHistory, breakdowns: dict[int, list[RankTimeBreakdown]]) -> str:
    """Return a bar per rank, with the parts of its time as shares of the whole."""
    title = "Where the time of each rank went"
    several_hosts = len(set(run.hosts)) > 1
    rows = []
    for rank, mine in breakdowns.items():
        seconds = _seconds_by_part(mine)
        total_s = sum(seconds)
        if not total_s:
            continue
        bar = ""
        for (name, colour), part_s in zip(TIME_PARTS.items(), seconds, strict=True):
            percent = 100 * part_s / total_s
            style = f"width:{percent:.2f}%;background:var(--c{colour})"
            shown = f"{percent:.0f} %" if percent >= 9 else ""
            bar += f'<span style="{style}" title="{escape(name)}: {percent:.1f} %">{shown}</span>'
        host = f" · {run.hosts[rank]}" if several_hosts and rank < len(run.hosts) else ""
        rows.append(f'<tr><th>rank {rank}{escape(host)}</th><td><div class="bar">{bar}</div></td></tr>')
    if not rows:
        return make_figure(title, "")
    legend = "".join(
        f'<li><span class="swatch" style="background:var(--c{colour})"></span>{escape(name)}</li>'
        for name, colour in TIME_PARTS.items()
    )
    return make_figure(title, f'<ul class="legend">{legend}</ul><table class="bars">{"".join(rows)}</table>')


def _seconds_by_part(breakdowns: Sequence[RankTimeBreakdown]) -> tuple[float, float, float, float]:
    """Return seconds in the order of TIME_PARTS."""
    return (
        sum(each.compute_s for each in breakdowns),
        sum(each.move_s for each in breakdowns),
        sum(each.wait_s for each in breakdowns),
        sum(each.between_s for each in breakdowns),
    )


def _usage_plots(run: RunHistory) -> list[PlotData]:
    """Return plots over time, because usage has to do with the clock and not with steps."""

    def points(rank: int, value: Callable[[ResourceSample], float | None]) -> list[Point]:
        """Values over time, in whole seconds: ranks are sampled at slightly different moments."""
        return [(float(round(load.at_s)), value(load)) for _, each in run.breakdowns(rank) for load in each.loads]

    def plot(title: str, label: str, value: Callable[[ResourceSample], float | None], y_max: float | None) -> PlotData:
        lines = _lines_per_rank({rank: points(rank, value) for rank in run.ranks()})
        return PlotData(title, "seconds", label, lines, y_min=0.0, y_max=y_max)

    samples = [sample for record in run.samples for breakdown in record.ranks for sample in breakdown.loads]
    if not samples:
        return []
    plots = [
        plot("CPU load per rank", "% of one core", lambda sample: sample.cpu, 100.0),
        plot("Memory per rank", "MB", lambda sample: sample.memory_bytes / 1e6, None),
    ]
    if any(sample.gpu is not None for sample in samples):
        plots.insert(0, plot("GPU load per rank", "%", lambda sample: sample.gpu, 100.0))
    first_ranks = {host: rank for rank, host in reversed(list(enumerate(run.hosts)))}
    lines = tuple(
        _make_line(host, points(rank, lambda sample: sample.host_cpu)) for host, rank in sorted(first_ranks.items())
    )
    return [*plots, PlotData("CPU load per host", "seconds", "% of all cores", lines, y_min=0.0, y_max=100.0)]


def _rank_table(run: RunHistory, breakdowns: dict[int, list[RankTimeBreakdown]]) -> str:
    """Return a row for each rank; with its staleness, if some rank has pushed to a parameter server."""
    headings = list(RANK_HEADINGS)
    rows = [list(_rank_row(run, *each)) for each in breakdowns.items()]
    if any(each.num_pushes for of_rank in breakdowns.values() for each in of_rank):
        headings.append("staleness (max)")
        for row, of_rank in zip(rows, breakdowns.values(), strict=True):
            num_pushes = sum(each.num_pushes for each in of_rank)
            mean = sum(each.staleness * each.num_pushes for each in of_rank) / max(1, num_pushes)
            largest = max((each.max_staleness for each in of_rank), default=0)
            row.append(f"{mean:.1f} ({largest})" if num_pushes else "–")
    return make_table(headings, rows)


def _rank_row(run: RunHistory, rank: int, breakdowns: Sequence[RankTimeBreakdown]) -> tuple[str, ...]:
    num_steps = sum(each.num_steps for each in breakdowns)
    compute_s, move_s, wait_s, _ = _seconds_by_part(breakdowns)
    in_steps_s = compute_s + move_s + wait_s
    samples = [sample for each in breakdowns for sample in each.loads]

    def percent(part_s: float) -> str:
        return f"{100 * part_s / in_steps_s:.1f} %" if in_steps_s else "–"

    return (
        str(rank),
        run.hosts[rank] if rank < len(run.hosts) else "–",
        str(num_steps),
        f"{1e3 * in_steps_s / num_steps:.1f} ms" if num_steps else "–",
        f"{1e3 * max(each.longest_s for each in breakdowns):.1f} ms" if num_steps else "–",
        percent(compute_s),
        percent(move_s),
        percent(wait_s),
        f"{fmean(sample.cpu for sample in samples):.0f} %" if samples else "–",
        f"{max(sample.memory_bytes for sample in samples) / 1e6:.0f} MB" if samples else "–",
    )


def _round_rows(run: RunHistory) -> list[tuple[str, ...]]:
    """Return each time the run went on: how many processes, which and where, came and were gone."""

    def describe(start: RunStarted, others: RunStarted) -> str:
        hosts = [host for worker, host in zip(start.workers, start.hosts, strict=False) if worker not in others.workers]
        counts = ", ".join(f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts))
        return counts or "–"

    rows: list[tuple[str, ...]] = []
    for before, start in zip((None, *run.starts), run.starts, strict=False):
        changes = ("–", "–") if before is None else (describe(start, before), describe(before, start))
        rows.append((str(start.step), format_duration(start.at_s), str(len(start.hosts)), *changes))
    return rows
