"""A Screen that remembers, for tests."""

from __future__ import annotations

from collections.abc import Callable

from ronde.launch.output.terminal import OutputClosed
from ronde.launch.protocol import StdStream

__all__ = ["RecordingSink"]


class RecordingSink:
    """Keeps everything; `on_output` is called with every output."""

    def __init__(self, on_output: Callable[[int], None] = lambda rank: None) -> None:
        self.printed: dict[int, bytes] = {}
        self.exited_ranks: list[int] = []
        self.messages: list[str] = []
        self.num_refreshes = 0
        self.due_s: float | None = None
        self.closed_with: OutputClosed | None = None
        self.backlogged = False
        self._on_output = on_output

    def write(self, rank: int, stream: StdStream, data: bytes) -> None:
        self.printed[rank] = self.printed.get(rank, b"") + data
        self._on_output(rank)

    def rank_exited(self, rank: int) -> None:
        self.exited_ranks.append(rank)

    def print_message(self, text: str) -> None:
        self.messages.append(text)

    def refresh(self, now_s: float) -> float | None:
        self.num_refreshes += 1
        due_s, self.due_s = self.due_s, None
        return due_s

    def tail(self, rank: int, exit_code: int) -> str:
        return self.printed.get(rank, b"").decode()

    def closed(self) -> OutputClosed | None:
        return self.closed_with

    def is_backlogged(self) -> bool:
        return self.backlogged

    def close(self, *, timeout_s: float | None = None) -> None: ...
