"""What the user sees while measuring: the table so far, what is being done, notes; and the file of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Generic, TypeVar

import msgspec
import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

__all__ = ["Screen", "conditions"]

Line = TypeVar("Line", bound=msgspec.Struct)
"""One line of results."""


class Screen(Generic[Line]):
    """Shows results as they come. Draws only when told to, so that it never takes a core from who is measured."""

    def __init__(self, console: Console, draw: Callable[[list[Line]], RenderableType], json: Path | None) -> None:
        self.records: list[Line] = []
        self._console = console
        self._draw = draw
        self._json_path = json
        self._json: IO[bytes] | None = None
        # It erases itself at the end; what stays is printed once.
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible")

    def __enter__(self) -> Screen[Line]:
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

    def add(self, records: Iterable[Line]) -> None:
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
