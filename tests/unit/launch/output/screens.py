"""A Printer in memory, for tests."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace

from ronde.launch.messages import Stream
from ronde.launch.output.options import Place, PrintOptions, Target
from ronde.launch.output.printer import Printer
from tests.unit.launch.output.terminal import Terminal

PLAIN = PrintOptions(fold=False)
FOLDED = PrintOptions(fold=True)
TERMINAL = Place(out_terminal=True, err_terminal=True, shared=True, height=24)


@dataclass
class Screens:
    """A Printer, its two files, and a clock that the test moves."""

    num_ranks: int = 1
    options: PrintOptions = PLAIN
    now_s: float = 100.0
    out: io.BytesIO = field(default_factory=io.BytesIO)
    err: io.BytesIO = field(default_factory=io.BytesIO)
    terminal: Terminal = field(default_factory=Terminal)

    def __post_init__(self) -> None:
        target = Target(self.out, self.err)
        if self.options.place.shared:
            target = Target(self.out, self.out)
        self.printer = Printer(target, num_ranks=self.num_ranks, options=self.options, wall=lambda: 0.0)
        self._seen = 0

    @classmethod
    def on_terminal(cls, num_ranks: int = 1, **options: bool) -> Screens:
        return cls(num_ranks, replace(PrintOptions(place=TERMINAL), **options))  # type: ignore[arg-type]

    def say(self, rank: int, *chunks: bytes, stream: Stream = "out") -> float | None:
        """The rank prints; the printer does what is due."""
        for chunk in chunks:
            self.printer.output(rank, stream, chunk)
        return self.printer.tick(self.now_s)

    def wait(self, seconds: float) -> float | None:
        """Time passes, and the printer is called whenever it asked for it."""
        end_s = self.now_s + seconds
        next_s = self.printer.tick(self.now_s)
        while next_s is not None and next_s <= end_s:
            assert next_s > self.now_s, "asks for the same time again and again"
            self.now_s = next_s
            next_s = self.printer.tick(self.now_s)
        self.now_s = end_s
        return self.printer.tick(end_s)

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
