"""One HTML page that holds its plots, its data, its script and its style, and loads nothing. Used by the reports.

Plots are drawn in the browser by uPlot, from the JSON of a list of PlotData.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec

STATIC_DIR = Path(__file__).parent / "static"
UPLOT_DIR = Path(__file__).parent / "vendor" / "uplot"


class PlotLine(msgspec.Struct, frozen=True):
    """A line of a plot. Where y is None it has a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]


class PlotData(msgspec.Struct, frozen=True):
    """Lines over common axes."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[PlotLine, ...]
    y_min: float | None = None
    """The y axis begins here, or below when a value is smaller. None: near the smallest value."""
    y_max: float | None = None
    """The y axis ends here, or above when a value is larger. None: near the largest value."""


class Page:
    """A page that is being made. Its plots are numbered in the order of its sections."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._plots: list[PlotData] = []

    def charts(self, new_plots: Sequence[PlotData], *figures: str) -> str:
        """Return these plots and figures beside each other."""
        drawn = []
        for index, plot in enumerate(new_plots, start=len(self._plots)):
            is_empty = all(value is None for line in plot.lines for value in line.y)
            drawn.append(make_figure(plot.title, "" if is_empty else f'<div data-plot="{index}"></div>'))
        self._plots.extend(new_plots)
        return f'<div class="charts">{"".join((*drawn, *figures))}</div>'

    def section(self, heading: str, new_plots: Sequence[PlotData], *figures: str) -> str:
        """Return a section with these plots and figures; nothing if there is no plot."""
        return f"<h2>{heading}</h2>{self.charts(new_plots, *figures)}" if new_plots else ""

    def render(self, sections: Sequence[str]) -> str:
        """Return the text of the page."""
        # Inside a script element only "</script" and "<!--" have a meaning; \u003c is "<" in a string of JSON.
        data = msgspec.json.encode(self._plots).decode().replace("<", "\\u003c")
        files = (UPLOT_DIR / "uPlot.min.css", STATIC_DIR / "report.css", UPLOT_DIR / "LICENSE")
        scripts = (UPLOT_DIR / "uPlot.iife.min.js", STATIC_DIR / "report.js")
        uplot_css, report_css, licence, uplot_js, report_js = (
            path.read_text(encoding="utf-8") for path in (*files, *scripts)
        )
        heading = f"<h1>{escape(self._title)}</h1>"
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{escape(self._title)}</title>\n<style>{uplot_css}\n{report_css}</style></head><body><main>\n"
            + "\n".join([heading, *sections])
            + "\n<noscript><p>The plots need JavaScript.</p></noscript><footer>made by ronde</footer></main>\n"
            f'<script type="application/json" id="plots">{data}</script>\n'
            f"<script>/*\nuPlot: {licence}*/\n{uplot_js}</script>\n<script>{report_js}</script></body></html>\n"
        )


def write_page(path: Path | str, text: str) -> Path:
    """Write a page and return its absolute path. The file appears whole or not at all."""
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def make_figure(title: str, drawing: str) -> str:
    drawing = drawing or '<p class="none">no numbers</p>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawing}</figure>"


def make_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        """Numbers stand at the right; rank and host, and plain facts, at the left."""
        classes = ["" if index < 2 or not names else ' class="number"' for index in range(len(cells))]
        inside = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(classes, cells, strict=True))
        return f"<tr>{''.join(inside)}</tr>"

    lines = [*([row("th", names)] if names else []), *(row("td", cells) for cells in rows)]
    return f'<div class="table"><table>{"".join(lines)}</table></div>'
