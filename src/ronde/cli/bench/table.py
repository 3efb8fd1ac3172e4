"""What the user sees while measuring: the table so far, what is being done, notes; and the file of results.

Results as tables for people. Used by command.py.

What training came to, as tables for people, one per network. Used by command.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Generic, TypeVar

import msgspec
import psutil
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ronde.cli.bench.cases import MANY, MODELS
from ronde.cli.bench.runner import COMPATIBLE, OURS, BenchmarkResult
from ronde.cli.bench.train import TrainingResult, best_ddp
from ronde.text import format_exact_bytes, format_microseconds

__all__ = [
    "BenchmarkDisplay",
    "allreduce_table",
    "best_peer",
    "conditions",
    "format_ratio",
    "negotiation_table",
    "ranks_table",
    "train_tables",
]

ResultT = TypeVar("ResultT", bound=msgspec.Struct)
"""One line of results."""


class BenchmarkDisplay(Generic[ResultT]):
    """Shows results as they come. Draws only when told to, so that it never takes a core from who is measured."""

    def __init__(self, console: Console, draw: Callable[[list[ResultT]], RenderableType], json: Path | None) -> None:
        self.records: list[ResultT] = []
        self._console = console
        self._draw = draw
        self._json_path = json
        self._json: IO[bytes] | None = None
        # It erases itself at the end; what stays is printed once.
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible")

    def __enter__(self) -> BenchmarkDisplay[ResultT]:
        """Begin to draw."""
        if self._json_path is not None:
            try:
                self._json = self._json_path.open("wb")
            except OSError as error:
                raise ValueError(f"cannot write the results to {self._json_path}: {error.strerror}") from None
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the table on the screen, the progress gone."""
        self._live.stop()
        if self.records:
            self._console.print(self._draw(self.records))
        if self._json is not None:
            self._json.close()

    def say(self, doing: str) -> None:
        """What is being done now."""
        if self._console.is_terminal:
            progress = Text(f"… {doing}", style="dim")
            self._live.update(Group(self._draw(self.records), progress) if self.records else progress, refresh=True)

    def note(self, text: str) -> None:
        """Something the user should know, above the table."""
        self._console.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)

    def add(self, records: Iterable[ResultT]) -> None:
        """New results."""
        for record in records:
            self.records.append(record)
            if self._json is not None:
                self._json.write(msgspec.json.encode(record) + b"\n")
        if self._json is not None:
            self._json.flush()


def conditions(ranks: int | None = None) -> str:
    """On what machine, and how busy it was before we began: numbers mean little without it."""
    cores = psutil.cpu_count() or 1
    load = psutil.getloadavg()[0]
    words = [f"{ranks} ranks on {cores} cores" if ranks else f"{cores} cores", f"load {load:.1f} before"]
    if load > cores / 2:
        words.append("busy: expect noise")
    return ", ".join(words)


def best_peer(records: Iterable[BenchmarkResult]) -> BenchmarkResult | None:
    """The fastest of the others, by the median; None when ronde is alone."""
    others = [record for record in records if record.impl not in (OURS, COMPATIBLE)]
    return min(others, key=lambda record: record.median_us, default=None)


def allreduce_table(records: Sequence[BenchmarkResult], caption: str = "") -> Table:
    """All implementations, size by size; for ronde, how many times as fast as the best peer it is."""
    table = _make_table("bytes", "", "path", "median", "fastest", "Gbit/s", "against\nbest peer", caption=caption)
    for _, same in groupby(records, key=lambda record: record.bytes):
        rows = list(same)
        best = best_peer(rows)
        for index, row in enumerate(rows):
            table.add_row(
                _size_words(row) if index == 0 else "",
                row.impl,
                row.path,
                format_microseconds(row.median_us),
                format_microseconds(row.min_us),
                f"{row.gbps:.2f}",
                _compare_with_best_peer(row, best),
                style="bold" if row.impl == OURS else None,
                end_section=index == len(rows) - 1,
            )
    return table


def negotiation_table(records: Sequence[BenchmarkResult], flights: Sequence[int], caption: str = "") -> Table:
    """Time per named operation against operations in flight."""
    table = _make_table("in flight", "per operation", "fastest", "operations/s", caption=caption)
    for flight, row in zip(flights, records, strict=False):
        rate = 1e6 / row.median_us if row.median_us else 0.0
        table.add_row(str(flight), format_microseconds(row.median_us), format_microseconds(row.min_us), f"{rate:,.0f}")
    return table


def ranks_table(records: Sequence[BenchmarkResult], caption: str = "") -> Table:
    """One line per number of ranks and implementation: how long it took to start, and each size's median."""
    sizes = sorted({record.bytes for record in records if record.op != "start"})
    table = _make_table("ranks", "", "start", *(f"{format_exact_bytes(size)} array" for size in sizes), caption=caption)
    for ranks, same in groupby(records, key=lambda record: record.ranks):
        rows = list(same)
        impls = list(dict.fromkeys(row.impl for row in rows))
        for index, impl in enumerate(impls):
            of = {(row.op, row.bytes): format_microseconds(row.median_us) for row in rows if row.impl == impl}
            cells = [of.get(("start", 0), ""), *(of.get(("allreduce", size), "") for size in sizes)]
            end = index == len(impls) - 1
            table.add_row("" if index else str(ranks), impl, *cells, end_section=end)
    return table


def _make_table(*headings: str, caption: str) -> Table:
    table = Table(caption=caption or None, caption_justify="left")
    texts = {"", "path"}
    for heading in headings:
        table.add_column(heading, justify="left" if heading in texts else "right", no_wrap=True)
    return table


def _size_words(row: BenchmarkResult) -> str:
    return MANY if row.path.startswith(MANY) else format_exact_bytes(row.bytes)


def _compare_with_best_peer(row: BenchmarkResult, best: BenchmarkResult | None) -> str:
    """Only ronde is compared, by whichever interface; the best peer is marked."""
    if best is None or not row.median_us:
        return ""
    if row.impl not in (OURS, COMPATIBLE):
        return "best peer" if row is best else ""
    return format_ratio(best.median_us / row.median_us)


def format_ratio(ratio: float) -> str:
    """How many times as good, in the colour of the news."""
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f} ×[/]"


LEAST_FIRST = ("peak\nRSS", "MiB", "against\nronde", "over-\nhead", "effi-\nciency", "step")
"""The order in which columns make room on a narrow terminal; the file of results has them all."""


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """One column: its heading, and what it shows of a record beside the best DDP."""

    heading: str
    text: Callable[[TrainingResult, TrainingResult | None], str]


COLUMNS = (
    ResultColumn("", lambda row, best: row.impl),
    ResultColumn("samples/s", lambda row, best: f"{row.samples_per_s:,.1f}"),
    ResultColumn("step", lambda row, best: format_microseconds(row.step_us)),
    ResultColumn("over-\nhead", lambda row, best: "" if row.overhead_us is None else _signed(row.overhead_us)),
    ResultColumn("effi-\nciency", lambda row, best: "" if row.efficiency is None else f"{row.efficiency:.0%}"),
    ResultColumn("against\nbest DDP", lambda row, best: _compare_with_best_ddp(row, best)),
    ResultColumn("against\nronde", lambda row, best: _against_ronde(row)),
    ResultColumn("MiB", lambda row, best: "" if row.memory_mb is None else f"{row.memory_mb:,.0f}"),
    ResultColumn("peak\nRSS", lambda row, best: "" if row.rss_mb is None else f"{row.rss_mb:,.0f}"),
)


def train_tables(records: Sequence[TrainingResult], caption: str = "", *, width: int = 80) -> Group:
    """Everybody, network by network. Each has the ranks that the caption says, but for the one that is alone."""
    parts: list[RenderableType] = []
    for _, same in groupby(records, key=lambda record: record.model):
        parts += [_make_train_table(list(same), width), ""]
    return Group(*parts, Text(caption, style="italic dim"))


def _make_train_table(rows: list[TrainingResult], width: int) -> Table:
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
    return f"-{format_microseconds(-us)}" if us < 0 else format_microseconds(us)


def _compare_with_best_ddp(row: TrainingResult, best: TrainingResult | None) -> str:
    """Only ronde is compared, by whichever interface; the best DDP is marked."""
    if row.impl in (OURS, COMPATIBLE):
        return "" if row.vs_ddp is None else format_ratio(row.vs_ddp)
    return "best DDP" if row is best else ""


def _against_ronde(row: TrainingResult) -> str:
    return "" if row.vs_ronde is None or row.impl != COMPATIBLE else f"{row.vs_ronde:.2f} ×"
