"""`ronde run --top`: the table of `ronde top` while the job runs, in place of what its ranks print. Used by command."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.live import Live

from ronde.cli.overview import draw_overview
from ronde.errors import RondeError
from ronde.launch.endpoint import NoSuchJob, ask_status, find_job

__all__ = ["LiveTable"]

EVERY_S = 1.0
SOON_S = 0.1
"""While the job is not to be found yet."""
HEADER_ROWS = 5


class LiveTable:
    """As a context: shows the job of this name until its end. The last table stays."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._over = threading.Event()
        # Owned by the table. Touches only the terminal, and asks the driver as any other process would.
        self._thread = threading.Thread(target=self._show, name="ronde-top", daemon=True)

    def __enter__(self) -> LiveTable:
        """Itself, drawing."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw no more."""
        self._over.set()
        self._thread.join()

    def _show(self) -> None:
        console = Console(stderr=True)
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            pause_s = 0.0
            while not self._over.wait(pause_s):
                pause_s = SOON_S
                try:
                    status = ask_status(find_job(self._name))
                except (NoSuchJob, RondeError, OSError):  # not begun, or just over
                    continue
                rows = max(1, console.height - HEADER_ROWS)
                live.update(draw_overview(status, max_rows=rows, width=console.width), refresh=True)
                pause_s = EVERY_S
