"""A Printer in memory, for tests."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace

from ronde.launch.output.printer import OutputOptions, Printer
from ronde.launch.output.terminal import StandardStreams, TerminalInfo
from ronde.launch.protocol import StdStream
from tests.unit.launch.output.terminal import Terminal

PLAIN = OutputOptions(fold=False)
FOLDED = OutputOptions(fold=True)
TERMINAL = TerminalInfo(out_is_terminal=True, err_is_terminal=True, same_file=True, height=24)


@dataclass
class Screens:
    """A Printer, its two files, and a clock that the test moves."""

    num_ranks: int = 1
    options: OutputOptions = PLAIN
    now_s: float = 100.0
    out: io.BytesIO = field(default_factory=io.BytesIO)
    err: io.BytesIO = field(default_factory=io.BytesIO)
    terminal: Terminal = field(default_factory=Terminal)

    def __post_init__(self) -> None:
        target = StandardStreams(self.out, self.err)
        if self.options.terminal_info.same_file:
            target = StandardStreams(self.out, self.out)
        self.printer = Printer(target, num_ranks=self.num_ranks, options=self.options, wall_clock=lambda: 0.0)
        self._seen = 0

    @classmethod
    def on_terminal(cls, num_ranks: int = 1, **options: bool) -> Screens:
        return cls(num_ranks, replace(OutputOptions(terminal_info=TERMINAL), **options))  # type: ignore[arg-type]

    def say(self, rank: int, *chunks: bytes, stream: StdStream = "out") -> float | None:
        """The rank prints; the printer does what is due."""
        for chunk in chunks:
            self.printer.write(rank, stream, chunk)
        return self.printer.refresh(self.now_s)

    def wait(self, seconds: float) -> float | None:
        """Time passes, and the printer is called whenever it asked for it."""
        end_s = self.now_s + seconds
        next_s = self.printer.refresh(self.now_s)
        while next_s is not None and next_s <= end_s:
            assert next_s > self.now_s, "asks for the same time again and again"
            self.now_s = next_s
            next_s = self.printer.refresh(self.now_s)
        self.now_s = end_s
        return self.printer.refresh(end_s)

    def printed(self) -> str:
        """What has reached standard output."""
        return self.out.getvalue().decode(errors="replace")

    def seen(self) -> list[str]:
        """What stands on the terminal."""
        data = self.out.getvalue()
        self.terminal.feed(data[self._seen :])
        self._seen = len(data)
        return self.terminal.seen()

    def cursor_shown(self) -> bool:
        self.seen()
        return self.terminal.cursor_shown

    def close(self) -> str:
        """Close the printer, and answer what has been printed in all."""
        self.printer.close()
        return self.printed()
