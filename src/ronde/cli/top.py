"""`ronde top` and `ronde run --top`: a live table of what the ranks of a job do with their time, a row per rank."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ronde.cli.arguments import CommandParser, print_error
from ronde.errors import RondeError
from ronde.launch.driver.monitor import JobStatus, NoSuchJob, RankStatus, RunningJob, find_job, query_status
from ronde.text import format_bytes, format_count, format_duration, format_number, shorten

DESCRIPTION = """Show live what ranks do with their time, and who holds up others.

A rank computes, waits for others, or moves data (comm). "waited for" is how
long other ranks have waited for this one, found from when each came to each
operation; the rank that the others wait for most is marked. With a parameter
server, "staleness" is how many updates of others come between the read of a
rank and its push, lately and at most."""

REFRESH_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 0.1
"""Between attempts of `ronde run --top` to find its job, which has just been started."""
HEADER_ROWS = 6
"""Lines of the table that are no rank: title, heading, caption."""

STATE_STYLES = {"starting": "yellow", "running": "green", "left": "dim", "lost": "bold red"}
SLOWEST_MARKER = "▶"
UNKNOWN = "-"
WIDE_TERMINAL_COLUMNS = 120
"""Width of a terminal that has room for everything."""
RANK_WIDTH, WORKER_WIDTH, STATE_WIDTH, NOW_WIDTH = 6, 6, 8, 20
"""Minimum widths of columns."""
MAX_HOST_WIDTH = 12
"""Longer names are cut; on a wide terminal, those longer than twice this."""
COLUMN_DROP_ORDER = (
    *("GPU mem", "step", "lately", "memory", "comm", "CPU"),
    *("ops/s", "compute", "GPU", "steps/s", "staleness", "waiting"),
)
"""The order in which columns are dropped on a narrow terminal; "waited for" always stays."""
WIDE_COLUMNS = {"step", "GPU mem", "lately"}
"""Shown on wide terminals only."""
OPTIONAL_COLUMNS = {"step", "steps/s", "staleness", "GPU", "GPU mem"}
"""Shown only when some rank has a value."""
MAX_CHANGES = 3
"""Changes of the round of an elastic job that are shown."""
MAX_CHANGE_CHARS = 300
SILENT_AFTER_S = 5.0
"""A rank that has sent no sample for so long is called silent; they send one every second."""


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


COLUMNS: dict[str, Callable[[RankStatus], str]] = {
    "step": lambda rank: str(rank.steps or UNKNOWN),
    "steps/s": lambda rank: UNKNOWN if rank.steps_per_s is None else format_number(rank.steps_per_s),
    "staleness": lambda rank: UNKNOWN if rank.staleness is None else f"{rank.staleness:.1f} (max {rank.max_staleness})",
    "ops/s": lambda rank: UNKNOWN if rank.operations_per_s is None else format_number(rank.operations_per_s),
    "compute": lambda rank: _percent(rank.computing),
    "waiting": lambda rank: _percent(rank.waiting),
    "comm": lambda rank: _percent(rank.moving),
    "CPU": lambda rank: _percent(rank.cpu),
    "memory": lambda rank: UNKNOWN if rank.memory_bytes is None else format_bytes(rank.memory_bytes),
    "GPU": lambda rank: _percent(rank.gpu),
    "GPU mem": lambda rank: UNKNOWN if rank.gpu_bytes is None else format_bytes(rank.gpu_bytes),
    "waited for": lambda rank: format_duration(rank.held_up_s),
    "lately": lambda rank: _percent(rank.holding_up),
}


def render_status_table(status: JobStatus, *, max_rows: int = 1000, width: int = WIDE_TERMINAL_COLUMNS) -> Table:
    """All ranks in order; when there are more than max_rows, those that do not run and those that the others wait for
    most."""
    shown = status.ranks
    captions = [
        *_describe_rounds(status),
        "waited for: time that other ranks waited for this one, all of them added up",
    ]
    if status.slowest is not None:
        captions.append(f"{SLOWEST_MARKER} the others wait for this rank most")
    if len(shown) > max_rows:
        worst = sorted(shown, key=lambda rank: (rank.state == "running", -rank.holding_up, rank.rank))
        shown = tuple(sorted(worst[:max_rows], key=lambda rank: rank.rank))
        captions.append(f"{len(status.ranks) - len(shown)} more ranks not shown")
    is_wide = width >= WIDE_TERMINAL_COLUMNS
    table = Table(
        title=Text(f"job {status.name}: {format_count(status.size, 'rank')}, {format_duration(status.elapsed_s)}"),
        caption=Text("\n".join(captions)),
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        expand=is_wide,
    )
    is_elastic = any(rank.number is not None for rank in shown)
    table.add_column("rank", justify="right", no_wrap=True)
    if is_elastic:  # output and messages call processes by these numbers
        table.add_column("worker", justify="right", no_wrap=True)
    table.add_column("host", max_width=MAX_HOST_WIDTH * (1 + is_wide), no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True)
    hosts = [shorten(rank.host) or UNKNOWN for rank in shown]
    host_width = min(MAX_HOST_WIDTH, max(map(len, hosts), default=0))
    fixed_width = (
        max([RANK_WIDTH, *(len(rank.name) for rank in shown)])
        + is_elastic * (WORKER_WIDTH + 1)
        + host_width
        + STATE_WIDTH
        + 3
    )
    columns = _choose_columns(shown, width - fixed_width, is_wide)
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("now", ratio=1, no_wrap=True, overflow="ellipsis")
    for index, rank in enumerate(shown):
        is_slowest = rank.rank == status.slowest
        number = rank.name or (UNKNOWN if rank.rank < 0 else str(rank.rank))
        table.add_row(
            f"{SLOWEST_MARKER} {number}" if is_slowest else number,
            *((UNKNOWN if rank.number is None else str(rank.number),) if is_elastic else ()),
            Text(hosts[index]),
            Text(rank.state, style=STATE_STYLES[rank.state]),
            *(texts[index] for texts in columns.values()),
            *((Text(_describe_current_operation(rank)),) if is_wide else ()),
            style="bold yellow" if is_slowest else None,
        )
    return table


def _describe_rounds(status: JobStatus) -> list[str]:
    """The last changes of the round of an elastic job, and what will happen next."""
    if not status.rounds:
        return [status.plan] if status.plan else []
    now = f"round {status.rounds[-1].round} since {format_duration(status.elapsed_s - status.rounds[-1].elapsed_s)}"
    changes = [shorten(record.describe(), MAX_CHANGE_CHARS) for record in status.rounds[1:][-MAX_CHANGES:]]
    return [*changes, f"{now}: {status.plan}"]


def _choose_columns(shown: tuple[RankStatus, ...], width: int, is_wide: bool) -> dict[str, list[str]]:
    """The texts of the columns that have a value for some rank and fit into this width; steps, where they are known,
    instead of operations."""
    columns = {title: [text(rank) for rank in shown] for title, text in COLUMNS.items()}
    for title in OPTIONAL_COLUMNS | WIDE_COLUMNS:
        if (title in WIDE_COLUMNS and not is_wide) or (title in OPTIONAL_COLUMNS and set(columns[title]) <= {UNKNOWN}):
            del columns[title]
    if "steps/s" in columns:
        del columns["ops/s"]
    widths = {title: 1 + max(map(len, (title, *texts))) for title, texts in columns.items()}
    for title in COLUMN_DROP_ORDER:
        if sum(widths.values()) > width - NOW_WIDTH * is_wide:
            widths.pop(title, None)
    return {title: columns[title] for title in widths}


def _describe_current_operation(rank: RankStatus) -> str:
    if rank.state != "running":
        return shorten(rank.why)
    if rank.silent_s is not None and rank.silent_s > SILENT_AFTER_S:
        return f"silent for {rank.silent_s:.0f} s"
    return shorten(rank.doing)


def top(arguments: Sequence[str]) -> int:
    parser = CommandParser("top", DESCRIPTION, usage="[FLAGS] [JOB]")
    parser.add_job()
    parser.add_argument("--json", action="store_true", help="Print the numbers once, as JSON, and end.")
    parser.add_argument("--once", action="store_true", help="Print the table once, and end.")
    flags = parser.parse(arguments)
    try:
        job = find_job(flags.job)
        status = query_status(job)
    except (NoSuchJob, RondeError, OSError) as error:
        return print_error(parser.prog, error)
    console = Console()
    if flags.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(status)) + b"\n")
    elif flags.once or not console.is_terminal:
        console.print(render_status_table(status, width=console.width))
    else:
        watch_job(job, status, console)
    return 0


def watch_job(job: RunningJob, status: JobStatus, console: Console) -> None:
    """Show the job until it ends, or until Ctrl-C."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            _update(live, status)
            try:
                time.sleep(REFRESH_INTERVAL_S)
                status = query_status(job)
            except KeyboardInterrupt:
                return
            except OSError:
                break
    console.print(f"job {job.name} has ended")


@contextmanager
def live_status_table(name: str) -> Iterator[None]:
    """Shows the job of this name on standard error while the block runs; the last table stays there."""
    stopped = threading.Event()

    def show() -> None:
        with Live(console=Console(stderr=True), auto_refresh=False, vertical_overflow="crop") as live:
            delay_s = 0.0
            while not stopped.wait(delay_s):
                try:
                    _update(live, query_status(find_job(name)))
                    delay_s = REFRESH_INTERVAL_S
                except (NoSuchJob, RondeError, OSError):  # not started yet, or just ended
                    delay_s = RETRY_INTERVAL_S

    # Owned by the block. Touches only the terminal, and queries the driver as any other process would.
    thread = threading.Thread(target=show, name="ronde-top", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _update(live: Live, status: JobStatus) -> None:
    height, width = live.console.height, live.console.width
    num_rows = max(1, height - HEADER_ROWS - len(_describe_rounds(status)))
    live.update(render_status_table(status, max_rows=num_rows, width=width), refresh=True)
