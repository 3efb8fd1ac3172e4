"""A run log as one HTML page with plots: no script, nothing to load from elsewhere. For people, through write_report().

What is drawn: every value of the log (one plot per ending of their names), step time per rank, how each rank's time
divides into computing, waiting and moving, load and memory over time, a table of the ranks, and the facts of the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median

from ronde.dash.chart import NUM_COLOURS, Bar, Chart, Point, Series, bar_chart, line_chart
from ronde.dash.run_log import RankTimeBreakdown, ResourceSample, RunHistory, RunLog, read_log
from ronde.dash.style import STYLE
from ronde.text import format_compact_number, format_count, format_duration

__all__ = ["render_report_page", "write_report"]

TIME_PARTS = {"computing": 0, "moving data": 1, "waiting for other ranks": 7, "between steps (loading data)": 2}
"""How a rank spends its time, and the colours of that."""
MAX_TILES = 6
"""Headline numbers at the top."""


def write_report(log: RunLog | Path | str, path: Path | str, *, title: str = "Training run") -> Path:
    """Write the report of this log; the file is there whole or not at all. Returns its absolute path."""
    run = read_log(log.path if isinstance(log, RunLog) else log)
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(render_report_page(run, title=title), encoding="utf-8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def render_report_page(run: RunHistory, *, title: str = "Training run") -> str:
    """The page as text."""
    ranks = run.ranks()
    shares = {rank: [share for _, share in run.breakdowns(rank)] for rank in ranks}
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(_summary_line(run))}</p>',
        _tiles(run),
        _section("Values", [line_chart(chart) for chart in _value_charts(run)]),
        _section("Time", [line_chart(_step_time_chart(run)), _breakdown_chart(run, shares)]),
        _section("Load", [line_chart(chart) for chart in _usage_charts(run)]),
        "<h2>Ranks</h2>" + _rank_table(run, shares),
        "<h2>Facts</h2>" + _table((), [(name, value) for name, value in run.facts.items()]),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>\n"
        + "\n".join(sections)
        + "\n<footer>made by ronde</footer></main></body></html>\n"
    )


def _summary_line(run: RunHistory) -> str:
    hosts = list(dict.fromkeys(run.hosts))
    words = [
        format_count(len(run.ranks()), "rank"),
        format_count(len(hosts), "host") + (f" ({hosts[0]})" if len(hosts) == 1 else ""),
    ]
    words.append(f"{format_duration(run.elapsed_s)} of training")
    if run.num_resumes:
        words.append(f"went on {format_count(run.num_resumes, 'time')} from a checkpoint")
    if not run.ended:
        words.append("has not come to its end")
    return ", ".join(words)


def _tiles(run: RunHistory) -> str:
    """The last of each value; those that came last first, since they sum up the run."""
    last = {name: value for record in run.values for name, value in record.values.items()}
    when = {name: index for index, record in enumerate(run.values) for name in record.values}
    order = sorted(last, key=lambda name: -when[name])[:MAX_TILES]
    tiles = [f"<li><b>{format_compact_number(last[name])}</b><span>{escape(name)}</span></li>" for name in order]
    return f'<ul class="tiles">{"".join(tiles)}</ul>' if tiles else ""


def _section(title: str, figures: Sequence[str]) -> str:
    return f'<h2>{title}</h2><div class="charts">{"".join(figures)}</div>' if figures else ""


def _value_charts(run: RunHistory) -> list[Chart]:
    """One chart per ending: train/loss and val/loss are lines of the chart "loss"."""
    charts: dict[str, list[Series]] = {}
    for name in run.value_names():
        line, _, plot = name.rpartition("/")
        charts.setdefault(plot, []).append(Series(line or plot, run.series(name)))
    return [Chart(plot, "step", plot, tuple(lines), y_low=_lowest(plot)) for plot, lines in charts.items()]


def _lowest(plot: str) -> float | None:
    """A rate is seen against standing still; of a loss or an accuracy the differences count."""
    return 0.0 if plot.endswith("per second") else None


def _step_time_chart(run: RunHistory) -> Chart:
    lines = _per_rank(run, _step_times)
    return Chart("Step time per rank", "step", "milliseconds", lines, y_low=0.0)


def _step_times(run: RunHistory, rank: int) -> list[Point]:
    """A share tells the times of its steps, or of a few together; they end at its step."""
    points: list[Point] = []
    for step, share in run.breakdowns(rank):
        width = share.num_steps / len(share.step_s) if share.step_s else 0.0
        first = step - share.num_steps
        points += [(first + (index + 1) * width, 1e3 * value) for index, value in enumerate(share.step_s)]
    return points


def _per_rank(run: RunHistory, points: Callable[[RunHistory, int], list[Point]]) -> tuple[Series, ...]:
    """A line per rank; of many ranks the smallest, middle and largest value at each place."""
    lines = {rank: points(run, rank) for rank in run.ranks()}
    if len(lines) <= NUM_COLOURS:
        return tuple(Series(f"rank {rank}", line) for rank, line in lines.items())
    columns: dict[float, list[float]] = {}
    for line in lines.values():
        for x, y in line:
            if y is not None:
                columns.setdefault(x, []).append(y)
    pick: dict[str, Callable[[list[float]], float]] = {"largest": max, "median": median, "smallest": min}
    return tuple(
        Series(f"{name} of {len(lines)} ranks", [(x, choose(column)) for x, column in sorted(columns.items())])
        for name, choose in pick.items()
    )


def _breakdown_chart(run: RunHistory, breakdowns: dict[int, list[RankTimeBreakdown]]) -> str:
    bars = [Bar(_rank_name(run, rank), _seconds_by_part(mine)) for rank, mine in breakdowns.items()]
    return bar_chart("Where the time of each rank went", TIME_PARTS, bars)


def _seconds_by_part(breakdowns: Sequence[RankTimeBreakdown]) -> tuple[float, float, float, float]:
    """Seconds, in the order of PARTS."""
    return (
        sum(share.compute_s for share in breakdowns),
        sum(share.move_s for share in breakdowns),
        sum(share.wait_s for share in breakdowns),
        sum(share.between_s for share in breakdowns),
    )


def _rank_name(run: RunHistory, rank: int) -> str:
    several = len(set(run.hosts)) > 1 and rank < len(run.hosts)
    return f"rank {rank} · {run.hosts[rank]}" if several else f"rank {rank}"


def _usage_charts(run: RunHistory) -> list[Chart]:
    """Over time, since load has to do with the clock and not with steps."""
    loads = [load for sample in run.samples for share in sample.ranks for load in share.loads]
    if not loads:
        return []
    charts = [
        _usage_chart(run, "CPU load per rank", "% of one core", lambda load: load.cpu, 100.0),
        _usage_chart(run, "Memory per rank", "MB", lambda load: load.memory_bytes / 1e6, None),
    ]
    if any(load.gpu is not None for load in loads):
        charts.insert(0, _usage_chart(run, "GPU load per rank", "%", lambda load: load.gpu, 100.0))
    hosts = {host: index for index, host in reversed(list(enumerate(run.hosts)))}  # its first rank speaks for a host
    lines = tuple(
        Series(host, _usage_points(run, rank, lambda load: load.host_cpu)) for host, rank in sorted(hosts.items())
    )
    charts.append(Chart("CPU load per host", "seconds", "% of all cores", lines, y_low=0.0, y_high=100.0))
    return charts


def _usage_chart(
    run: RunHistory, title: str, y_label: str, value: Callable[[ResourceSample], float | None], y_high: float | None
) -> Chart:
    # Ranks look at slightly different moments: whole seconds bring those of many ranks together.
    lines = _per_rank(run, lambda run, rank: [(float(round(x)), y) for x, y in _usage_points(run, rank, value)])
    return Chart(title, "seconds", y_label, lines, y_low=0.0, y_high=y_high)


def _usage_points(run: RunHistory, rank: int, value: Callable[[ResourceSample], float | None]) -> list[Point]:
    return [(load.at_s, value(load)) for _, share in run.breakdowns(rank) for load in share.loads]


def _rank_table(run: RunHistory, breakdowns: dict[int, list[RankTimeBreakdown]]) -> str:
    names = ("rank", "host", "steps", "mean step", "longest", "computing", "moving", "waiting", "CPU", "most memory")
    return _table(names, [_rank_row(run, rank, mine) for rank, mine in breakdowns.items()])


def _rank_row(run: RunHistory, rank: int, breakdowns: Sequence[RankTimeBreakdown]) -> tuple[str, ...]:
    num_steps = sum(share.num_steps for share in breakdowns)
    compute_s, move_s, wait_s, _ = _seconds_by_part(breakdowns)
    in_steps_s = compute_s + move_s + wait_s
    loads = [load for share in breakdowns for load in share.loads]

    def percent(part_s: float) -> str:
        return f"{100 * part_s / in_steps_s:.1f} %" if in_steps_s else "–"

    return (
        str(rank),
        run.hosts[rank] if rank < len(run.hosts) else "–",
        str(num_steps),
        f"{1e3 * in_steps_s / num_steps:.1f} ms" if num_steps else "–",
        f"{1e3 * max(share.longest_s for share in breakdowns):.1f} ms" if num_steps else "–",
        percent(compute_s),
        percent(move_s),
        percent(wait_s),
        f"{fmean(load.cpu for load in loads):.0f} %" if loads else "–",
        f"{max(load.memory_bytes for load in loads) / 1e6:.0f} MB" if loads else "–",
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th{_column(index, names)}>{escape(name)}</th>" for index, name in enumerate(names))
    body = "".join(
        "<tr>" + "".join(f"<td{_column(i, names)}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="table"><table>{f"<tr>{head}</tr>" if head else ""}{body}</table></div>'


def _column(index: int, names: Sequence[str]) -> str:
    """Numbers stand at the right; rank and host, and plain facts, at the left."""
    return ' class="number"' if names and index > 1 else ""
