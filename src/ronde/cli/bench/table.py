"""What `ronde bench` shows: the table so far, progress and notes; and the file of results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

ResultT = TypeVar("ResultT", bound=msgspec.Struct)


class BenchmarkDisplay(Generic[ResultT]):
    """Shows results as they come, and writes them to a file, a JSON object per line. It draws only when it is called,
    so that it never takes a core from the ranks that are measured."""

    def __init__(self, console: Console, render: Callable[[list[ResultT]], RenderableType], json: str | None) -> None:
        self.results: list[ResultT] = []
        self._console = console
        self._render = render
        # It erases itself at the end; then the table is printed once.
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible")
        try:
            self._json = Path(os.devnull if json is None else json).open("wb")
        except OSError as error:
            raise ValueError(f"cannot write the results to {json}: {error.strerror}") from None

    def __enter__(self) -> BenchmarkDisplay[ResultT]:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if self.results:
            self._console.print(self._render(self.results))
        self._json.close()

    def show_progress(self, text: str) -> None:
        if self._console.is_terminal:
            progress = Text(f"… {text}", style="dim")
            self._live.update(Group(self._render(self.results), progress) if self.results else progress, refresh=True)

    def print_note(self, text: str) -> None:
        """Print something the user should know, above the table."""
        self._console.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)

    def fits_in_memory(self, work: str, needed_bytes: int) -> bool:
        """Whether the machine has so much memory; if not, a note says that this is left out."""
        available_bytes = psutil.virtual_memory().available
        if needed_bytes > available_bytes:
            needed = f"needs about {needed_bytes / 2**30:.1f} GiB of memory"
            self.print_note(f"{work} is left out: it {needed}, {available_bytes / 2**30:.1f} GiB are free")
        return needed_bytes <= available_bytes

    def add(self, results: Iterable[ResultT]) -> None:
        for result in results:
            self.results.append(result)
            self._json.write(msgspec.json.encode(result) + b"\n")
        self._json.flush()


def describe_conditions(num_ranks: int | None = None) -> str:
    """The caption of a table: ranks, cores, and how busy the machine was before the benchmark."""
    cores = psutil.cpu_count() or 1
    load = psutil.getloadavg()[0]
    parts = [f"{num_ranks} ranks on {cores} cores" if num_ranks else f"{cores} cores", f"load {load:.1f} before"]
    if load > cores / 2:
        parts.append("busy: expect noise")
    return ", ".join(parts)


def make_table(*headings: str, caption: str) -> Table:
    table = Table(caption=caption or None, caption_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "path") else "right", no_wrap=True)
    return table


def format_ratio(ratio: float) -> str:
    """How many times as fast, green from 1 on and red below."""
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f} ×[/]"
