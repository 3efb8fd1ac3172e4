"""`ronde top`: what the ranks of a running job do with their time, live."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from ronde.cli.overview import draw_overview
from ronde.errors import RondeError
from ronde.launch.endpoint import NoSuchJob, RunningJob, ask_status, find_job
from ronde.launch.status import JobStatus

__all__ = ["app"]

EVERY_S = 1.0
HEADER_ROWS = 6
"""Lines of the table that are no rank: its title, its heading, what is written below."""
WRONG_CODE = 2

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
        status = ask_status(running)
    except (NoSuchJob, RondeError, OSError) as error:
        typer.echo(f"ronde top: {error}", err=True)
        raise typer.Exit(WRONG_CODE) from None
    console = Console()
    if json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(status)) + b"\n")
    elif once or not console.is_terminal:
        console.print(draw_overview(status, width=console.width))
    else:
        watch(running, status, console)


def watch(running: RunningJob, status: JobStatus, console: Console) -> None:
    """Show the job until it ends, or the user has seen enough."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            max_rows = max(1, console.height - HEADER_ROWS)
            live.update(draw_overview(status, max_rows=max_rows, width=console.width), refresh=True)
            try:
                time.sleep(EVERY_S)
                status = ask_status(running)
            except KeyboardInterrupt:
                return
            except OSError:
                break
    console.print(f"job {running.name} has ended")
