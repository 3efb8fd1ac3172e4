"""What training came to, as a table for people. Used by command.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from ronde.cli.bench.measure import COMPATIBLE, OURS
from ronde.cli.bench.models import MODELS
from ronde.cli.bench.table import format_ratio, format_time
from ronde.cli.bench.train import TrainRecord, best_ddp

__all__ = ["train_table"]

HEADINGS = (
    "samples/s",
    "step",
    "over-\nhead",
    "effi-\nciency",
    "against\nbest DDP",
    "against\nronde",
    "MiB",
    "peak\nRSS",
)


def train_table(records: Sequence[TrainRecord], caption: str = "") -> Table:
    """Everybody, network by network. Each has the ranks that the caption says, but for the one that is alone."""
    table = Table(caption=caption or None, caption_justify="left")
    table.add_column("network", overflow="fold")
    table.add_column("", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", overflow="fold")  # a screen may be narrow; digits are never cut off
    for name, same in groupby(records, key=lambda record: record.model):
        rows = list(same)
        best = best_ddp(rows)
        for index, row in enumerate(rows):
            words = (name, MODELS[name].words, f"batch {row.batch}")
            table.add_row(
                words[index] if index < len(words) else "",
                row.impl,
                *_cells(row, best),
                style="bold" if row.impl == OURS else None,
                end_section=index == len(rows) - 1,
            )
    return table


def _cells(row: TrainRecord, best: TrainRecord | None) -> tuple[str, ...]:
    return (
        f"{row.samples_per_s:,.1f}",
        format_time(row.step_us),
        "" if row.overhead_us is None else _signed(row.overhead_us),
        "" if row.efficiency is None else f"{row.efficiency:.0%}",
        _standing(row, best),
        "" if row.vs_ronde is None or row.impl != COMPATIBLE else f"{row.vs_ronde:.2f} ×",
        "" if row.memory_mb is None else f"{row.memory_mb:,.0f}",
        "" if row.rss_mb is None else f"{row.rss_mb:,.0f}",
    )


def _signed(us: float) -> str:
    """An overhead below 0 is noise, and shown as such."""
    return f"-{format_time(-us)}" if us < 0 else format_time(us)


def _standing(row: TrainRecord, best: TrainRecord | None) -> str:
    """Only ronde is compared, by whichever interface; the best DDP is marked."""
    if row.impl in (OURS, COMPATIBLE):
        return "" if row.vs_ddp is None else format_ratio(row.vs_ddp)
    return "best DDP" if row is best else ""
