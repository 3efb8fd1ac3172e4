"""What training came to, as tables for people, one per network. Used by command.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ronde.cli.bench.measure import COMPATIBLE, OURS
from ronde.cli.bench.models import MODELS
from ronde.cli.bench.table import format_ratio, format_time
from ronde.cli.bench.train import TrainRecord, best_ddp

__all__ = ["train_tables"]

LEAST_FIRST = ("peak\nRSS", "MiB", "against\nronde", "over-\nhead", "effi-\nciency", "step")
"""The order in which columns make room on a narrow terminal; the file of results has them all."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and what it shows of a record beside the best DDP."""

    heading: str
    text: Callable[[TrainRecord, TrainRecord | None], str]


COLUMNS = (
    Column("", lambda row, best: row.impl),
    Column("samples/s", lambda row, best: f"{row.samples_per_s:,.1f}"),
    Column("step", lambda row, best: format_time(row.step_us)),
    Column("over-\nhead", lambda row, best: "" if row.overhead_us is None else _signed(row.overhead_us)),
    Column("effi-\nciency", lambda row, best: "" if row.efficiency is None else f"{row.efficiency:.0%}"),
    Column("against\nbest DDP", lambda row, best: _standing(row, best)),
    Column("against\nronde", lambda row, best: _against_ronde(row)),
    Column("MiB", lambda row, best: "" if row.memory_mb is None else f"{row.memory_mb:,.0f}"),
    Column("peak\nRSS", lambda row, best: "" if row.rss_mb is None else f"{row.rss_mb:,.0f}"),
)


def train_tables(records: Sequence[TrainRecord], caption: str = "", *, width: int = 80) -> Group:
    """Everybody, network by network. Each has the ranks that the caption says, but for the one that is alone."""
    parts: list[RenderableType] = []
    for _, same in groupby(records, key=lambda record: record.model):
        parts += [_table(list(same), width), ""]
    return Group(*parts, Text(caption, style="italic dim"))


def _table(rows: list[TrainRecord], width: int) -> Table:
    """Of one network: the columns that have something to show and fit."""
    model, best = MODELS[rows[0].model], best_ddp(rows)
    cells = {each.heading: [Text.from_markup(each.text(row, best)) for row in rows] for each in COLUMNS}
    cells = {heading: texts for heading, texts in cells.items() if any(texts)}
    for heading in LEAST_FIRST:
        if _width(cells) > width:
            cells.pop(heading, None)
    title = Text(f"{model.name}: {model.words}, batch {rows[0].batch}", style="bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in cells:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row, *texts in zip(rows, *cells.values(), strict=True):
        table.add_row(*texts, style="bold" if row.impl == OURS else None)
    return table


def _width(cells: dict[str, list[Text]]) -> int:
    """Of these columns, with a blank between them."""
    lines = [[*heading.split("\n"), *map(str, texts)] for heading, texts in cells.items()]
    return sum(1 + max(map(len, each)) for each in lines) - 1


def _signed(us: float) -> str:
    """An overhead below 0 is noise, and shown as such."""
    return f"-{format_time(-us)}" if us < 0 else format_time(us)


def _standing(row: TrainRecord, best: TrainRecord | None) -> str:
    """Only ronde is compared, by whichever interface; the best DDP is marked."""
    if row.impl in (OURS, COMPATIBLE):
        return "" if row.vs_ddp is None else format_ratio(row.vs_ddp)
    return "best DDP" if row is best else ""


def _against_ronde(row: TrainRecord) -> str:
    return "" if row.vs_ronde is None or row.impl != COMPATIBLE else f"{row.vs_ronde:.2f} ×"
