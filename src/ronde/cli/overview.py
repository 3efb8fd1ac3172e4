"""A job's status as a table for people, a row per rank. Used by `ronde top` and `ronde run --top`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ronde.cli.figures import format_number, format_size
from ronde.launch.status import JobStatus, RankStatus
from ronde.observe.events import shorten

__all__ = ["draw_overview"]

STATE_STYLES = {"starting": "yellow", "running": "green", "left": "dim", "lost": "bold red"}
SLOWEST = "▶"
UNKNOWN = "-"
WIDE = 120
"""Columns of a terminal that has room for everything."""
RANK_WIDTH, STATE_WIDTH, NOW_WIDTH = 6, 8, 20
"""What these columns need at least."""
HOST_WIDTH = 12
"""Longer names are cut; where there is room, twice as long."""
LEAST_FIRST = (
    *("GPU mem", "step", "lately", "memory", "comm", "CPU"),
    *("ops/s", "compute", "GPU", "steps/s", "waiting"),
)
"""The order in which columns make room on a narrow terminal; who is waited for always stays."""
SILENT_S = 5.0
"""Ranks tell how they are every second."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its title, and what it shows of a rank."""

    title: str
    text: Callable[[RankStatus], str]
    wide: bool = False
    """Only where there is room."""
    optional: bool = False
    """Only when some rank has something to show."""


COLUMNS = (
    Column("step", lambda rank: str(rank.steps or UNKNOWN), wide=True, optional=True),
    Column("steps/s", lambda rank: _number(rank.steps_per_s), optional=True),
    Column("ops/s", lambda rank: _number(rank.operations_per_s)),
    Column("compute", lambda rank: _share(rank.computing)),
    Column("waiting", lambda rank: _share(rank.waiting)),
    Column("comm", lambda rank: _share(rank.moving)),
    Column("CPU", lambda rank: _share(rank.cpu)),
    Column("memory", lambda rank: _size(rank.memory_bytes)),
    Column("GPU", lambda rank: _share(rank.gpu), optional=True),
    Column("GPU mem", lambda rank: _size(rank.gpu_bytes), wide=True, optional=True),
    Column("waited for", lambda rank: _seconds(rank.held_up_s)),
    Column("lately", lambda rank: _share(rank.holding_up), wide=True),
)


def draw_overview(status: JobStatus, *, max_rows: int = 1000, width: int = WIDE) -> Table:
    """All ranks in order; or, when there are more than max_rows, those that need attention and those that the others
    wait for most."""
    shown = status.ranks
    if len(shown) > max_rows:
        worst = sorted(shown, key=lambda rank: (rank.state == "running", -rank.holding_up, rank.rank))
        shown = tuple(sorted(worst[:max_rows], key=lambda rank: rank.rank))
    is_wide = width >= WIDE
    columns = _fitting(_columns(shown, is_wide), shown, width - (NOW_WIDTH if is_wide else 0))
    table = _frame(status, len(status.ranks) - len(shown), is_wide)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("now", ratio=1, no_wrap=True, overflow="ellipsis")
    for rank in shown:
        is_slowest = rank.rank == status.slowest
        table.add_row(
            f"{SLOWEST} {rank.rank}" if is_slowest else str(rank.rank),
            Text(_host(rank)),
            Text(rank.state, style=STATE_STYLES[rank.state]),
            *(column.text(rank) for column in columns),
            *((Text(_now(rank)),) if is_wide else ()),
            style="bold yellow" if is_slowest else None,
        )
    return table


def _columns(shown: tuple[RankStatus, ...], is_wide: bool) -> list[Column]:
    """Those that fit and have something to show; steps, where they are known, instead of operations."""
    useful = [
        column
        for column in COLUMNS
        if (is_wide or not column.wide) and (not column.optional or any(column.text(rank) != UNKNOWN for rank in shown))
    ]
    has_steps = any(column.title == "steps/s" for column in useful)
    return [column for column in useful if column.title != "ops/s" or not has_steps]


def _fitting(columns: list[Column], shown: tuple[RankStatus, ...], width: int) -> list[Column]:
    """The most important ones that there is room for beside rank, host and state."""
    hosts = max((len(_host(rank)) for rank in shown), default=0)
    room = width - sum(1 + most for most in (RANK_WIDTH, min(hosts, HOST_WIDTH), STATE_WIDTH))
    widths = {each.title: 1 + max([len(each.title), *(len(each.text(rank)) for rank in shown)]) for each in columns}
    for title in LEAST_FIRST:
        if sum(widths.values()) > room:
            widths.pop(title, None)
    return [column for column in columns if column.title in widths]


def _frame(status: JobStatus, num_hidden: int, is_wide: bool) -> Table:
    words = ["waited for: time that other ranks waited for this one, all of them added up"]
    if status.slowest is not None:
        words.append(f"{SLOWEST} the others wait for this rank most")
    if num_hidden:
        words.append(f"{num_hidden} more ranks not shown")
    table = Table(
        title=Text(f"job {status.name}: {status.size} ranks, {_seconds(status.elapsed_s)}"),
        caption=Text("\n".join(words)),
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        expand=is_wide,
    )
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("host", max_width=2 * HOST_WIDTH if is_wide else HOST_WIDTH, no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True)
    return table


def _host(rank: RankStatus) -> str:
    return shorten(rank.host) or UNKNOWN


def _now(rank: RankStatus) -> str:
    if rank.state != "running":
        return shorten(rank.why)
    if rank.silent_s is not None and rank.silent_s > SILENT_S:
        return f"silent for {rank.silent_s:.0f} s"
    return shorten(rank.doing)


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else format_number(value)


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def _seconds(value: float) -> str:
    if value < 100:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _size(value: int | None) -> str:
    return UNKNOWN if value is None else format_size(value)
