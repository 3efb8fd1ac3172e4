"""A Screen that remembers, for tests."""

from __future__ import annotations

from collections.abc import Callable

from ronde.launch.messages import Stream
from ronde.launch.output.screen import Gone

__all__ = ["Memory"]


class Memory:
    """Keeps everything; `on_output` is called with every output."""

    def __init__(self, on_output: Callable[[int], None] = lambda rank: None) -> None:
        self.printed: dict[int, bytes] = {}
        self.ends: list[int] = []
        self.notes: list[str] = []
        self.num_ticks = 0
        self.due_s: float | None = None
        self.why_gone: Gone | None = None
        self.is_full = False
        self._on_output = on_output

    def output(self, rank: int, stream: Stream, data: bytes) -> None:
        self.printed[rank] = self.printed.get(rank, b"") + data
        self._on_output(rank)

    def ended(self, rank: int) -> None:
        self.ends.append(rank)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def tick(self, now_s: float) -> float | None:
        self.num_ticks += 1
        due_s, self.due_s = self.due_s, None
        return due_s

    def tail(self, rank: int, code: int) -> str:
        return self.printed.get(rank, b"").decode()

    def gone(self) -> Gone | None:
        return self.why_gone

    def full(self) -> bool:
        return self.is_full

    def close(self, *, give_up_s: float | None = None) -> None: ...
