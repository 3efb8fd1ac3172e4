"""A Printer in memory, a terminal that shows what a user would see, and what progress bars write."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field, replace

import rich.console
import rich.progress

from ronde.launch.output.printer import OutputOptions, Printer
from ronde.launch.output.terminal import StandardStreams, TerminalInfo
from ronde.launch.protocol import StdStream

_PART = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Terminal:
    """A terminal of endless height. It understands what TerminalWriter writes and fails on anything else."""

    def __init__(self) -> None:
        self.rows = [""]
        self.row = self.column = 0
        self.cursor_shown = True

    def feed(self, data: bytes) -> None:
        text = data.decode()
        position = 0
        while position < len(text):
            match = _PART.match(text, position)
            assert match is not None, f"unknown bytes: {text[position : position + 20]!r}"
            position = match.end()
            parameters, final, move, printed = match.groups()
            if printed:
                row = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = row[: self.column] + printed + row[self.column + len(printed) :]
                self.column += len(printed)
            elif move:
                self.column = 0
                if move == "\n":
                    self.row += 1
                    self.rows += [""] * (self.row == len(self.rows))
            else:
                self._sequence(parameters, final)

    def visible(self) -> list[str]:
        """The lines, without blanks at their ends and without blank ones at the bottom."""
        lines = [row.rstrip() for row in self.rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def _sequence(self, parameters: str, final: str) -> None:
        if final == "A":
            self.row -= int(parameters)
            assert self.row >= 0, "above the top"
        elif final == "J":
            del self.rows[self.row + 1 :]
            self.rows[self.row] = self.rows[self.row][: self.column]
        elif final in "hl" and parameters == "?25":
            self.cursor_shown = final == "h"
        else:
            assert final == "m" or parameters == "?7", f"unknown sequence: {parameters}{final}"


PLAIN = OutputOptions(fold=False)
FOLDED = OutputOptions(fold=True)
TERMINAL = TerminalInfo(out_is_terminal=True, err_is_terminal=True, same_file=True, height=24)


@dataclass
class MemoryPrinter:
    """A Printer, its two files, and a clock that the test moves."""

    num_ranks: int = 1
    options: OutputOptions = PLAIN
    wall_s: float = 0.0
    now_s: float = 100.0
    out: io.BytesIO = field(default_factory=io.BytesIO)
    err: io.BytesIO = field(default_factory=io.BytesIO)
    terminal: Terminal = field(default_factory=Terminal)

    def __post_init__(self) -> None:
        streams = StandardStreams(self.out, self.out if self.options.terminal_info.same_file else self.err)
        self.sink = Printer(streams, num_ranks=self.num_ranks, options=self.options, wall_clock=lambda: self.wall_s)
        self._num_read = 0

    @classmethod
    def on_terminal(cls, num_ranks: int = 1, **options: bool) -> MemoryPrinter:
        return cls(num_ranks, replace(OutputOptions(terminal_info=TERMINAL), **options))  # type: ignore[arg-type]

    def write(self, rank: int, *chunks: bytes, stream: StdStream = "out") -> float | None:
        """Write as a rank, then refresh."""
        for chunk in chunks:
            self.sink.write(rank, stream, chunk)
        return self.sink.refresh(self.now_s)

    def wait(self, seconds: float) -> float | None:
        """Let time pass, and refresh whenever the printer asked for it."""
        end_s = self.now_s + seconds
        next_s = self.sink.refresh(self.now_s)
        while next_s is not None and next_s <= end_s:
            assert next_s > self.now_s, "asks for the same time again and again"
            self.now_s = next_s
            next_s = self.sink.refresh(self.now_s)
        self.now_s = end_s
        return self.sink.refresh(end_s)

    def printed(self) -> str:
        """Return what has reached standard output."""
        return self.out.getvalue().decode(errors="replace")

    def visible(self) -> list[str]:
        """Return the rows of the terminal."""
        data = self.out.getvalue()
        self.terminal.feed(data[self._num_read :])
        self._num_read = len(data)
        return self.terminal.visible()

    def cursor_shown(self) -> bool:
        self.visible()
        return self.terminal.cursor_shown

    def close(self) -> str:
        """Close the printer. Return all that reached standard output."""
        self.sink.close()
        return self.printed()


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
