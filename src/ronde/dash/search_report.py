"""The report of a search for hyper-parameters: the history of values, what the best trials reported, parallel
coordinates, how much each parameter matters, and all trials. One HTML page that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from ronde.dash.page import Page, PlotData, PlotLine, make_figure, make_table, write_page
from ronde.search.protocol import Outcome, ParameterValue
from ronde.search.results import SearchResult, TrialResult, format_params
from ronde.text import format_compact_number, format_count, format_duration

MAX_CURVES = 8
"""Trials whose reported values are plotted: the best ones."""
LOG_RATIO = 50.0
"""An axis whose largest value is so many times the smallest is logarithmic."""
WIDTH, HEIGHT, MARGIN = 1000, 320, 46
"""Of the parallel coordinates, in units of the drawing."""


def write_search_report(result: SearchResult, path: Path | str, *, title: str = "Search") -> Path:
    """Write the report of a search and return its absolute path. The file appears whole or not at all."""
    return write_page(path, render_search_page(result, title=title))


def render_search_page(result: SearchResult, *, title: str = "Search") -> str:
    """Return the report of a search as the text of an HTML page."""
    page = Page(title)
    names = list(dict.fromkeys(name for trial in result.trials for name in trial.params))
    headings = ("trial", "outcome", "value", *names, "took", "attempts", "reason")
    sections = [
        f'<p class="lead">{escape(_summary_line(result))}</p>',
        page.section("History", [_history_plot(result), *_curve_plots(result)]),
        "<h2>Parallel coordinates</h2>" + _parallel_coordinates(result, names),
        "<h2>Importance</h2>" + _importance_figure(result),
        "<h2>Trials</h2>" + make_table(headings, [_trial_row(trial, names) for trial in _best_first(result)]),
    ]
    return page.render(sections)


def _summary_line(result: SearchResult) -> str:
    counts = {outcome: sum(trial.outcome is outcome for trial in result.trials) for outcome in Outcome}
    parts = [format_count(len(result.trials), "trial")]
    parts += [f"{count} {outcome.value}" for outcome, count in counts.items() if count]
    if counts[Outcome.COMPLETE]:
        best = result.best
        parts.append(f"best {format_compact_number(best.value)} in trial {best.number} ({format_params(best.params)})")
    return ", ".join([*parts, *([result.note] if result.note else [])])


def _best_first(result: SearchResult) -> list[TrialResult]:
    """Complete trials from the best on, then pruned ones, then failed ones."""
    sign = -1.0 if result.direction == "maximize" else 1.0
    order = [Outcome.COMPLETE, Outcome.PRUNED, Outcome.FAILED]
    return sorted(
        result.trials,
        key=lambda trial: (order.index(trial.outcome), sign * (trial.value or 0.0), trial.number),
    )


def _history_plot(result: SearchResult) -> PlotData:
    """Return the value of each complete trial, and the best until then."""
    choose = max if result.direction == "maximize" else min
    complete = [trial for trial in result.trials if trial.outcome is Outcome.COMPLETE and _is_finite(trial.value)]
    numbers = [float(trial.number) for trial in complete]
    values = [trial.value or 0.0 for trial in complete]
    best = [choose(values[: index + 1]) for index in range(len(values))]
    lines = (PlotLine("best", numbers, best), PlotLine("value", numbers, values))
    return PlotData("Value of each complete trial", "trial", "value", lines)


def _curve_plots(result: SearchResult) -> list[PlotData]:
    """Return what the best trials have reported."""
    curves = [trial for trial in _best_first(result) if len(trial.reported) > 1][:MAX_CURVES]
    lines = tuple(
        PlotLine(
            f"trial {trial.number}",
            [float(step) for step in trial.reported],
            [value if _is_finite(value) else None for value in trial.reported.values()],
        )
        for trial in sorted(curves, key=lambda trial: trial.number)
    )
    return [PlotData("What the best trials reported", "step", "value", lines)] if lines else []


# --- parallel coordinates ------------------------------------------------------------------------------------------


class _Axis(NamedTuple):
    """A parameter, or the value, as a vertical line from 0 (below) to 1."""

    name: str
    heights: dict[int, float]
    """By the number of the trial."""
    ticks: list[tuple[float, str]]


def _parallel_coordinates(result: SearchResult, names: Sequence[str]) -> str:
    """Return a drawing with a line for each trial through its parameters to its value: the darker, the better."""
    trials = [trial for trial in _best_first(result) if trial.outcome is not Outcome.FAILED and _is_finite(trial.value)]
    title = "Each line is a trial; the best are strongest, dashed ones were pruned"
    if not trials or not names:
        return make_figure(title, "")
    axes = [_make_axis(name, {trial.number: trial.params.get(name) for trial in trials}) for name in names]
    axes.append(_make_axis("value", {trial.number: trial.value for trial in trials}))
    gap = (WIDTH - 2 * MARGIN) / (len(axes) - 1)

    def point(index: int, height: float) -> tuple[float, float]:
        return round(MARGIN + index * gap, 1), round(HEIGHT - MARGIN - height * (HEIGHT - 2 * MARGIN), 1)

    drawn = []
    for place, trial in reversed([*enumerate(trials)]):  # the best on top
        strength = 1.0 - 0.85 * place / max(1, len(trials) - 1)
        path = " ".join("{},{}".format(*point(index, axis.heights[trial.number])) for index, axis in enumerate(axes))
        dashes = ' stroke-dasharray="4 4"' if trial.outcome is Outcome.PRUNED else ""
        tip = f"trial {trial.number}: {format_compact_number(trial.value)}, {format_params(trial.params)}"
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="var(--c{0 if place else 1})"'
            f' stroke-width="{1.5 if place else 3}" opacity="{strength:.2f}"{dashes}>'
            f"<title>{escape(tip)}</title></polyline>"
        )
    for index, axis in enumerate(axes):
        (x, top), (_, bottom) = point(index, 1.0), point(index, 0.0)
        drawn.append(f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" stroke="var(--soft)"/>')
        drawn.append(f'<text x="{x}" y="{top - 16}" text-anchor="middle" font-weight="600">{escape(axis.name)}</text>')
        for height, label in axis.ticks:
            side = f'x="{x - 5}" text-anchor="end"' if axis is axes[-1] else f'x="{x + 5}"'  # inside of the drawing
            drawn.append(f'<text {side} y="{point(index, height)[1] + 4}">{escape(label)}</text>')
    style = "width:100%;font-size:12px;fill:var(--ink)"
    return make_figure(title, f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}">{"".join(drawn)}</svg>')


def _make_axis(name: str, values: dict[int, ParameterValue]) -> _Axis:
    numbers = {number: float(value) for number, value in values.items() if value is not None and _is_number(value)}
    if len(numbers) < len(values):  # choices
        choices = sorted({_choice_text(value) for value in values.values()})
        places = {choice: index / max(1, len(choices) - 1) for index, choice in enumerate(choices)}
        heights = {number: places[_choice_text(value)] for number, value in values.items()}
        return _Axis(name, heights, [(place, choice) for choice, place in places.items()])
    low, high = min(numbers.values()), max(numbers.values())
    if low == high:
        return _Axis(name, dict.fromkeys(numbers, 0.5), [(0.5, format_compact_number(low))])
    is_log = low > 0 and high / low >= LOG_RATIO

    def height(value: float) -> float:
        return math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)

    middle = math.sqrt(low * high) if is_log else (low + high) / 2
    ticks = [(height(value), format_compact_number(value)) for value in (low, middle, high)]
    return _Axis(name, {number: height(value) for number, value in numbers.items()}, ticks)


def _choice_text(value: ParameterValue) -> str:
    return format_compact_number(value) if isinstance(value, float) else str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


# --- importance and table ------------------------------------------------------------------------------------------


def _importance_figure(result: SearchResult) -> str:
    title = "How much of the difference between trials each parameter explains"
    rows = [
        f'<tr><th>{escape(name)}</th><td><div class="bar">'
        f'<span style="width:{100 * share:.2f}%;background:var(--c0)" title="{100 * share:.1f} %"></span></div></td>'
        f'<td class="number">{100 * share:.0f} %</td></tr>'
        for name, share in result.importances.items()
    ]
    few = "too few trials are complete, or their values or parameters do not differ"
    return make_figure(title, f'<table class="bars">{"".join(rows)}</table>' if rows else f"<p>{few}</p>")


def _trial_row(trial: TrialResult, names: Sequence[str]) -> tuple[str, ...]:
    return (
        str(trial.number),
        trial.outcome.value,
        format_compact_number(trial.value),
        *(_choice_text(trial.params.get(name)) for name in names),
        format_duration(trial.seconds),
        str(trial.attempts),
        trial.reason,
    )
