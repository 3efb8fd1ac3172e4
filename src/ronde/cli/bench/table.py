"""Results as tables for people. Used by command.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.table import Table

from ronde.cli.bench.measure import COMPATIBLE, OURS, Record
from ronde.cli.bench.shapes import MANY, format_bytes

__all__ = ["allreduce_table", "best_peer", "format_ratio", "format_time", "negotiation_table", "ranks_table"]


def best_peer(records: Iterable[Record]) -> Record | None:
    """The fastest of the others, by the median; None when ronde is alone."""
    others = [record for record in records if record.impl not in (OURS, COMPATIBLE)]
    return min(others, key=lambda record: record.median_us, default=None)


def format_time(us: float) -> str:
    """Microseconds in the unit one would say them in."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.2f} {unit}"
    return f"{us:.1f} µs"


def allreduce_table(records: Sequence[Record], caption: str = "") -> Table:
    """All implementations, size by size; for ronde, how many times as fast as the best peer it is."""
    table = _table("bytes", "", "path", "median", "fastest", "Gbit/s", "against\nbest peer", caption=caption)
    for _, same in groupby(records, key=lambda record: record.bytes):
        rows = list(same)
        best = best_peer(rows)
        for index, row in enumerate(rows):
            table.add_row(
                _size_words(row) if index == 0 else "",
                row.impl,
                row.path,
                format_time(row.median_us),
                format_time(row.min_us),
                f"{row.gbps:.2f}",
                _standing(row, best),
                style="bold" if row.impl == OURS else None,
                end_section=index == len(rows) - 1,
            )
    return table


def negotiation_table(records: Sequence[Record], flights: Sequence[int], caption: str = "") -> Table:
    """Time per named operation against operations in flight."""
    table = _table("in flight", "per operation", "fastest", "operations/s", caption=caption)
    for flight, row in zip(flights, records, strict=False):
        rate = 1e6 / row.median_us if row.median_us else 0.0
        table.add_row(str(flight), format_time(row.median_us), format_time(row.min_us), f"{rate:,.0f}")
    return table


def ranks_table(records: Sequence[Record], caption: str = "") -> Table:
    """One line per number of ranks and implementation: how long it took to start, and each size's median."""
    sizes = sorted({record.bytes for record in records if record.op != "start"})
    table = _table("ranks", "", "start", *(f"{format_bytes(size)} array" for size in sizes), caption=caption)
    for ranks, same in groupby(records, key=lambda record: record.ranks):
        rows = list(same)
        impls = list(dict.fromkeys(row.impl for row in rows))
        for index, impl in enumerate(impls):
            of = {(row.op, row.bytes): format_time(row.median_us) for row in rows if row.impl == impl}
            cells = [of.get(("start", 0), ""), *(of.get(("allreduce", size), "") for size in sizes)]
            end = index == len(impls) - 1
            table.add_row("" if index else str(ranks), impl, *cells, end_section=end)
    return table


def _table(*headings: str, caption: str) -> Table:
    table = Table(caption=caption or None, caption_justify="left")
    texts = {"", "path"}
    for heading in headings:
        table.add_column(heading, justify="left" if heading in texts else "right", no_wrap=True)
    return table


def _size_words(row: Record) -> str:
    return MANY if row.path.startswith(MANY) else format_bytes(row.bytes)


def _standing(row: Record, best: Record | None) -> str:
    """Only ronde is compared, by whichever interface; the best peer is marked."""
    if best is None or not row.median_us:
        return ""
    if row.impl not in (OURS, COMPATIBLE):
        return "best peer" if row is best else ""
    return format_ratio(best.median_us / row.median_us)


def format_ratio(ratio: float) -> str:
    """How many times as good, in the colour of the news."""
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f} ×[/]"
