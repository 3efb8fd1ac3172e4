"""What progress bars write: tqdm's own calls, written out, and rich's, captured from rich itself."""

from __future__ import annotations

import io

import rich.console
import rich.progress


def tqdm_bar(name: str, *, total: int, leave: bool = True) -> list[bytes]:
    """The writes of `for _ in tqdm(range(total), desc=name)`."""
    writes = [f"\r{name}: {100 * step // total}%|{'#' * step:<{total}}| {step}/{total}" for step in range(total + 1)]
    writes.append("\n" if leave else "\r" + " " * 30 + "\r")
    return [write.encode() for write in writes]


def tqdm_nested(*, outer: int, inner: int) -> list[bytes]:
    """The writes of two nested bars: the inner one goes a line down and up again at each step."""
    writes = [b"\router: 0/%d" % outer]
    for step in range(1, outer + 1):
        for inner_step in range(inner + 1):
            writes += [b"\n", b"\rinner: %d/%d" % (inner_step, inner), b"\x1b[A"]
        writes += [b"\n", b"\r            \r", b"\x1b[A"]
        writes.append(b"\router: %d/%d" % (step, outer))
    return [*writes, b"\n"]


def rich_progress(*, steps: int, bars: int = 2, transient: bool = False, log: bool = False) -> list[bytes]:
    """Bars of rich, refreshed at each step, as rich writes them to a terminal; with lines printed in between."""
    file = _Writes()
    console = rich.console.Console(
        file=file, force_terminal=True, width=60, height=20, color_system="standard", legacy_windows=False, _environ={}
    )
    columns = ("{task.description}", rich.progress.MofNCompleteColumn())
    with rich.progress.Progress(*columns, console=console, auto_refresh=False, transient=transient) as progress:
        tasks = [progress.add_task(name, total=steps) for name in ("train", "check", "third")[:bars]]
        for step in range(steps):
            for task in tasks:
                progress.advance(task)
            progress.refresh()
            if log:
                progress.console.print(f"step {step}")
    return [write.encode() for write in file.writes]


class _Writes(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)
