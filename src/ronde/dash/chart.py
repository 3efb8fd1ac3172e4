"""Charts as SVG text: lines over an axis, and bars of parts. Used by the report.

Colours are CSS classes of the page (`c0` … `c7`), so light and dark are the page's business. Without any script, a
point shows its value when the pointer rests on it. The plotting area's limits are in `data-*` attributes: what was
drawn can be read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ronde.dash.scale import Axis, fit_axis
from ronde.text import format_compact_number

__all__ = ["NUM_COLOURS", "Bar", "Chart", "Series", "bar_chart", "line_chart", "thin_points"]

NUM_COLOURS = 8
WIDTH, HEIGHT = 640.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 66.0, 14.0, 12.0, 40.0
MOST_POINTS = 400
"""Per line: more cannot be told apart at this width."""
MOST_HINTS = 60
"""Per line: points that tell their value."""
MOST_DOTS = 30
"""Up to so many points of a line are marked."""
ROW, LABEL = 26.0, 120.0

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """One line. A point without a value interrupts it."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    y_low: float | None = None
    """Where the y axis begins at the latest; a chart of times or loads begins at 0."""
    y_high: float | None = None
    """Where the y axis ends at the earliest."""


@dataclass(frozen=True)
class Bar:
    """A row: its name, and the size of each part."""

    name: str
    parts: tuple[float, ...]


def line_chart(chart: Chart) -> str:
    """A figure with the chart and its legend; says so when there is nothing to draw."""
    drawn = [Series(line.name, thin_points(line.points, MOST_POINTS)) for line in chart.series]
    known = [(x, y) for line in drawn for x, y in line.points if y is not None]
    if not known:
        return _figure(chart.title, '<p class="none">no numbers</p>', "")
    x_axis, y_axis = _axes(chart, known)
    body = [*_grid(chart, x_axis, y_axis)]
    for index, line in enumerate(drawn):
        body += _line(line, f"c{index % NUM_COLOURS}", x_axis, y_axis)
    legend = "".join(_legend_entry(i % NUM_COLOURS, line.name, _last(line)) for i, line in enumerate(drawn))
    return _figure(chart.title, _svg(HEIGHT, chart.title, body, x_axis, y_axis), legend)


def bar_chart(title: str, parts: Mapping[str, int], bars: Sequence[Bar]) -> str:
    """A figure with one bar per row, its parts as shares of the whole; `parts` has their names and colours."""
    rows = [bar for bar in bars if sum(bar.parts) > 0]
    if not rows:
        return _figure(title, '<p class="none">no numbers</p>', "")
    body: list[str] = []
    for row, bar in enumerate(rows):
        body += _bar(bar, parts, row * ROW + 2)
    legend = "".join(_legend_entry(colour, name, "") for name, colour in parts.items())
    return _figure(title, _svg(len(rows) * ROW + 4, title, body), legend)


def thin_points(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points: means of neighbours. Neighbours without any value stay a gap."""
    width = -(-len(points) // most)
    if width <= 1:
        return list(points)
    return [_mean(points[start : start + width]) for start in range(0, len(points), width)]


def _mean(points: Sequence[Point]) -> Point:
    known = [y for _, y in points if y is not None]
    return points[-1][0], sum(known) / len(known) if known else None


def _last(line: Series) -> str:
    known = [y for _, y in line.points if y is not None]
    return format_compact_number(known[-1]) if known else "–"


def _axes(chart: Chart, known: Sequence[tuple[float, float]]) -> tuple[Axis, Axis]:
    xs, ys = [x for x, _ in known], [y for _, y in known]
    low = min(ys) if chart.y_low is None else min(chart.y_low, *ys)
    high = max(ys) if chart.y_high is None else max(chart.y_high, *ys)
    x_axis = fit_axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, most_ticks=8)
    # Lines begin and end at the edges; only the ticks have to be round.
    if max(xs) > min(xs):
        inside = tuple(tick for tick in x_axis.ticks if min(xs) <= tick <= max(xs))
        x_axis = Axis(min(xs), max(xs), x_axis.start, x_axis.end, inside)
    return x_axis, fit_axis(low, high, HEIGHT - BOTTOM, TOP)


def _grid(chart: Chart, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 7:g}" y="{y + 4:.1f}" text-anchor="end">{y_axis.words(tick)}</text>'
    bottom = HEIGHT - BOTTOM
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16:g}" text-anchor="middle">{x_axis.words(tick)}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="axis" x="{middle:g}" y="{HEIGHT - 6:g}" text-anchor="middle">{escape(chart.x_label)}</text>'
    yield (
        f'<text class="axis" x="12" y="{bottom / 2:g}" text-anchor="middle" '
        f'transform="rotate(-90 12 {bottom / 2:g})">{escape(chart.y_label)}</text>'
    )


def _line(line: Series, colour: str, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    path, pen_down = [], False
    for x, y in line.points:
        if y is not None:
            place = f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}"
            path.append(f"L{place}" if pen_down else f"M{place}h0")  # h0: a point between two gaps is a dot
        pen_down = y is not None
    yield f'<path class="line {colour}" data-name="{escape(line.name)}" d="{" ".join(path)}"/>'
    known = [(x, y) for x, y in line.points if y is not None]
    every = max(1, -(-len(known) // MOST_HINTS))
    kind = "dot" if len(known) <= MOST_DOTS else "hint"
    for x, y in known[::-1][::every]:
        text = f"{line.name}: {format_compact_number(y)} at {format_compact_number(x)}"
        yield (
            f'<circle class="{kind} {colour}" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="2.5">'
            f"<title>{escape(text)}</title></circle>"
        )


def _bar(bar: Bar, parts: Mapping[str, int], top: float) -> Iterator[str]:
    total = sum(bar.parts)
    yield f'<text class="row" x="{LABEL - 8:g}" y="{top + 15:g}" text-anchor="end">{escape(bar.name)}</text>'
    x = LABEL
    for (name, colour), size in zip(parts.items(), bar.parts, strict=True):
        width = (WIDTH - RIGHT - LABEL) * size / total
        percent = 100 * size / total
        yield (
            f'<rect class="part f{colour}" data-share="{percent:.2f}" x="{x:.1f}" y="{top:g}" '
            f'width="{width:.1f}" height="20"><title>{escape(f"{bar.name}, {name}: {percent:.1f} %")}</title></rect>'
        )
        if width > 44:
            place = f'x="{x + width / 2:.1f}" y="{top + 14:g}" text-anchor="middle"'
            yield f'<text class="inside" {place}>{percent:.0f} %</text>'
        x += width


def _svg(height: float, title: str, body: Sequence[str], x_axis: Axis | None = None, y_axis: Axis | None = None) -> str:
    limits = ""
    for letter, axis in (("x", x_axis), ("y", y_axis)):
        if axis is not None:
            values = {"low": axis.low, "high": axis.high, "start": axis.start, "end": axis.end}
            limits += "".join(f' data-{letter}-{name}="{value!r}"' for name, value in values.items())
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(title)}"{limits}>'
        + "".join(body)
        + "</svg>"
    )


def _legend_entry(colour: int, name: str, value: str) -> str:
    return f'<li><span class="swatch f{colour}"></span>{escape(name)} <b>{escape(value)}</b></li>'


def _figure(title: str, drawing: str, legend: str) -> str:
    listed = f'<ul class="legend">{legend}</ul>' if legend else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{listed}{drawing}</figure>"
