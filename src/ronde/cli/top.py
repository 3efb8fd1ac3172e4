"""A job's status as a table for people, a row per rank. Used by `ronde top` and `ronde run --top`.

`ronde top`: what the ranks of a running job do with their time, live.

`ronde run --top`: the table of `ronde top` while the job runs, in place of what its ranks print. Used by command.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ronde.errors import RondeError
from ronde.launch.driver.monitor import JobStatus, NoSuchJob, RankStatus, RunningJob, find_job, query_status
from ronde.text import format_bytes, format_duration, format_number, shorten

__all__ = ["LiveStatusTable", "app", "render_status_table"]

STATE_STYLES = {"starting": "yellow", "running": "green", "left": "dim", "lost": "bold red"}
SLOWEST_MARKER = "▶"
UNKNOWN = "-"
WIDE_TERMINAL_COLUMNS = 120
"""Columns of a terminal that has room for everything."""
RANK_WIDTH, STATE_WIDTH, NOW_WIDTH = 6, 8, 20
"""What these columns need at least."""
MAX_HOST_WIDTH = 12
"""Longer names are cut; where there is room, twice as long."""
COLUMN_DROP_ORDER = (
    *("GPU mem", "step", "lately", "memory", "comm", "CPU"),
    *("ops/s", "compute", "GPU", "steps/s", "waiting"),
)
"""The order in which columns make room on a narrow terminal; who is waited for always stays."""
SILENT_AFTER_S = 5.0
"""Ranks tell how they are every second."""


@dataclass(frozen=True, slots=True)
class StatusColumn:
    """One column: its title, and what it shows of a rank."""

    title: str
    text: Callable[[RankStatus], str]
    wide: bool = False
    """Only where there is room."""
    optional: bool = False
    """Only when some rank has something to show."""


COLUMNS = (
    StatusColumn("step", lambda rank: str(rank.steps or UNKNOWN), wide=True, optional=True),
    StatusColumn("steps/s", lambda rank: _format_optional_number(rank.steps_per_s), optional=True),
    StatusColumn("ops/s", lambda rank: _format_optional_number(rank.operations_per_s)),
    StatusColumn("compute", lambda rank: _format_percent(rank.computing)),
    StatusColumn("waiting", lambda rank: _format_percent(rank.waiting)),
    StatusColumn("comm", lambda rank: _format_percent(rank.moving)),
    StatusColumn("CPU", lambda rank: _format_percent(rank.cpu)),
    StatusColumn("memory", lambda rank: _format_optional_size(rank.memory_bytes)),
    StatusColumn("GPU", lambda rank: _format_percent(rank.gpu), optional=True),
    StatusColumn("GPU mem", lambda rank: _format_optional_size(rank.gpu_bytes), wide=True, optional=True),
    StatusColumn("waited for", lambda rank: format_duration(rank.held_up_s)),
    StatusColumn("lately", lambda rank: _format_percent(rank.holding_up), wide=True),
)


def render_status_table(status: JobStatus, *, max_rows: int = 1000, width: int = WIDE_TERMINAL_COLUMNS) -> Table:
    """All ranks in order; or, when there are more than max_rows, those that need attention and those that the others
    wait for most."""
    shown = status.ranks
    if len(shown) > max_rows:
        worst = sorted(shown, key=lambda rank: (rank.state == "running", -rank.holding_up, rank.rank))
        shown = tuple(sorted(worst[:max_rows], key=lambda rank: rank.rank))
    is_wide = width >= WIDE_TERMINAL_COLUMNS
    columns = _fit_columns(_useful_columns(shown, is_wide), shown, width - (NOW_WIDTH if is_wide else 0))
    table = _make_table(status, len(status.ranks) - len(shown), is_wide)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("now", ratio=1, no_wrap=True, overflow="ellipsis")
    for rank in shown:
        is_slowest = rank.rank == status.slowest
        table.add_row(
            f"{SLOWEST_MARKER} {rank.rank}" if is_slowest else str(rank.rank),
            Text(_format_host(rank)),
            Text(rank.state, style=STATE_STYLES[rank.state]),
            *(column.text(rank) for column in columns),
            *((Text(_format_current_operation(rank)),) if is_wide else ()),
            style="bold yellow" if is_slowest else None,
        )
    return table


def _useful_columns(shown: tuple[RankStatus, ...], is_wide: bool) -> list[StatusColumn]:
    """Those that fit and have something to show; steps, where they are known, instead of operations."""
    useful = [
        column
        for column in COLUMNS
        if (is_wide or not column.wide) and (not column.optional or any(column.text(rank) != UNKNOWN for rank in shown))
    ]
    has_steps = any(column.title == "steps/s" for column in useful)
    return [column for column in useful if column.title != "ops/s" or not has_steps]


def _fit_columns(columns: list[StatusColumn], shown: tuple[RankStatus, ...], width: int) -> list[StatusColumn]:
    """The most important ones that there is room for beside rank, host and state."""
    hosts = max((len(_format_host(rank)) for rank in shown), default=0)
    room = width - sum(1 + most for most in (RANK_WIDTH, min(hosts, MAX_HOST_WIDTH), STATE_WIDTH))
    widths = {each.title: 1 + max([len(each.title), *(len(each.text(rank)) for rank in shown)]) for each in columns}
    for title in COLUMN_DROP_ORDER:
        if sum(widths.values()) > room:
            widths.pop(title, None)
    return [column for column in columns if column.title in widths]


def _make_table(status: JobStatus, num_hidden: int, is_wide: bool) -> Table:
    words = ["waited for: time that other ranks waited for this one, all of them added up"]
    if status.slowest is not None:
        words.append(f"{SLOWEST_MARKER} the others wait for this rank most")
    if num_hidden:
        words.append(f"{num_hidden} more ranks not shown")
    table = Table(
        title=Text(f"job {status.name}: {status.size} ranks, {format_duration(status.elapsed_s)}"),
        caption=Text("\n".join(words)),
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        expand=is_wide,
    )
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column(
        "host", max_width=2 * MAX_HOST_WIDTH if is_wide else MAX_HOST_WIDTH, no_wrap=True, overflow="ellipsis"
    )
    table.add_column("state", no_wrap=True)
    return table


def _format_host(rank: RankStatus) -> str:
    return shorten(rank.host) or UNKNOWN


def _format_current_operation(rank: RankStatus) -> str:
    if rank.state != "running":
        return shorten(rank.why)
    if rank.silent_s is not None and rank.silent_s > SILENT_AFTER_S:
        return f"silent for {rank.silent_s:.0f} s"
    return shorten(rank.doing)


def _format_optional_number(value: float | None) -> str:
    return UNKNOWN if value is None else format_number(value)


def _format_percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def _format_optional_size(value: int | None) -> str:
    return UNKNOWN if value is None else format_bytes(value)


REFRESH_INTERVAL_S = 1.0
HEADER_ROWS = 6
"""Lines of the table that are no rank: its title, its heading, what is written below."""
USAGE_ERROR_CODE = 2

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode=None)


@app.command()
def top(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its name; not needed while only one is running.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the numbers once, as JSON, and end.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, and end.")] = False,
) -> None:
    """Show live what ranks do with their time, and who holds up others.

    A rank computes, waits for others, or moves data (comm). "waited for" is how long other ranks have waited for this
    one, found from when each came to each operation; the rank that the others wait for most is marked.
    """
    try:
        running = find_job(job)
        status = query_status(running)
    except (NoSuchJob, RondeError, OSError) as error:
        typer.echo(f"ronde top: {error}", err=True)
        raise typer.Exit(USAGE_ERROR_CODE) from None
    console = Console()
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(status)) + b"\n")
    elif once or not console.is_terminal:
        console.print(render_status_table(status, width=console.width))
    else:
        watch_job(running, status, console)


def watch_job(running: RunningJob, status: JobStatus, console: Console) -> None:
    """Show the job until it ends, or the user has seen enough."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            max_rows = max(1, console.height - HEADER_ROWS)
            live.update(render_status_table(status, max_rows=max_rows, width=console.width), refresh=True)
            try:
                time.sleep(REFRESH_INTERVAL_S)
                status = query_status(running)
            except KeyboardInterrupt:
                return
            except OSError:
                break
    console.print(f"job {running.name} has ended")


LIVE_REFRESH_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 0.1
"""While the job is not to be found yet."""
LIVE_HEADER_ROWS = 5


class LiveStatusTable:
    """As a context: shows the job of this name until its end. The last table stays."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopped = threading.Event()
        # Owned by the table. Touches only the terminal, and asks the driver as any other process would.
        self._thread = threading.Thread(target=self._run_thread, name="ronde-top", daemon=True)

    def __enter__(self) -> LiveStatusTable:
        """Itself, drawing."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw no more."""
        self._stopped.set()
        self._thread.join()

    def _run_thread(self) -> None:
        console = Console(stderr=True)
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            pause_s = 0.0
            while not self._stopped.wait(pause_s):
                pause_s = RETRY_INTERVAL_S
                try:
                    status = query_status(find_job(self._name))
                except (NoSuchJob, RondeError, OSError):  # not begun, or just over
                    continue
                rows = max(1, console.height - LIVE_HEADER_ROWS)
                live.update(render_status_table(status, max_rows=rows, width=console.width), refresh=True)
                pause_s = LIVE_REFRESH_INTERVAL_S
