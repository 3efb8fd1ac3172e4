"""A Printer in memory, for tests."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace

from ronde.launch.output.printer import OutputOptions, Printer
from ronde.launch.output.terminal import StandardStreams, TerminalInfo
from ronde.launch.protocol import StdStream
from tests.unit.launch.output.fake_terminal import Terminal

PLAIN = OutputOptions(fold=False)
FOLDED = OutputOptions(fold=True)
TERMINAL = TerminalInfo(out_is_terminal=True, err_is_terminal=True, same_file=True, height=24)


@dataclass
class MemoryPrinter:
    """A Printer, its two files, and a clock that the test moves."""

    num_ranks: int = 1
    options: OutputOptions = PLAIN
    now_s: float = 100.0
    out: io.BytesIO = field(default_factory=io.BytesIO)
    err: io.BytesIO = field(default_factory=io.BytesIO)
    terminal: Terminal = field(default_factory=Terminal)

    def __post_init__(self) -> None:
        streams = StandardStreams(self.out, self.out if self.options.terminal_info.same_file else self.err)
        self.sink = Printer(streams, num_ranks=self.num_ranks, options=self.options, wall_clock=lambda: 0.0)
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
